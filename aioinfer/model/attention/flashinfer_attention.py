"""FlashInferAttention: prefill rows by FlashInfer (Ye et al., arXiv 2501.01005), the other rows by Triton.

FlashInfer divides the work of a step among the device's multiprocessors in a plan, which the host makes from
the lengths of the rows, once for all layers with the same constants. So what is captured in a CUDA graph,
whose lengths the host does not know, stays with Triton's kernels: decodes, and the chunks of captured steps,
which are short ones by default (``EngineConfig.graph_tokens``). So do blocks of diffusion models and sinks,
which these kernels of FlashInfer do not compute.
"""

from __future__ import annotations

import importlib.util
from typing import Any, NamedTuple

import torch

from aioinfer.model.attention.base import AttentionParams
from aioinfer.model.attention.pool import KVPool
from aioinfer.model.attention.triton_attention import TritonAttention
from aioinfer.model.batch import Batch

__all__ = ["FlashInferAttention", "flashinfer_unsupported"]

_HEAD_DIMS = (64, 128, 256)
_DTYPES = (torch.float16, torch.bfloat16)
#: bytes for partial results, as FlashInfer's documentation recommends
_WORKSPACE = 128 << 20
#: Plans that are in use at a time at most: a plan is copied to the device from memory of its own, which must
#: not be written while a step before is still to read it. Steps in flight are two at most, and the next one.
_RING = 4


def flashinfer_unsupported(head_dims: frozenset[int], dtype: torch.dtype) -> str | None:
    """Reason why FlashInfer cannot compute such heads here, in words for the user; None if it can."""
    if importlib.util.find_spec("flashinfer") is None:
        return "flashinfer-python is not installed"
    if dtype not in _DTYPES:
        return f"FlashInfer has no kernels for {str(dtype).removeprefix('torch.')}"
    odd = sorted(head_dims.difference(_HEAD_DIMS))
    return f"FlashInfer has no kernels for heads of size {odd[0]}" if odd else None


class _Constants(NamedTuple):
    """The key of a plan, besides the lengths of a step."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    params: AttentionParams


class FlashInferAttention(TritonAttention):
    """Attention by FlashInfer where it can compute the rows, else by Triton."""

    __slots__ = ("_turns", "_workspace", "_wrappers")

    def __init__(self, pool: KVPool) -> None:
        super().__init__(pool)
        device = pool.keys[0].device
        self._workspace = torch.zeros(_WORKSPACE, dtype=torch.uint8, device=device)
        #: wrappers by constants, and the number of plans made for them
        self._wrappers: dict[_Constants, list[Any]] = {}
        self._turns: dict[_Constants, int] = {}

    def _prefill(
        self,
        layer: int,
        q: torch.Tensor,
        decodes: int,
        batch: Batch,
        params: AttentionParams,
        sinks: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        # Lengths of captured rows are known to the device alone.
        if params.block != 1 or sinks is not None or not batch.kv_lens:
            super()._prefill(layer, q, decodes, batch, params, sinks, out)
            return
        keys, values = self._pool.keys[layer], self._pool.values[layer]
        kv_heads, head_dim = keys.shape[2:]
        constants = _Constants(q.shape[1], kv_heads, head_dim, params._replace(shared=False))
        plans = batch.attention_plan
        if not isinstance(plans, dict):
            plans = batch.attention_plan = {}
        if constants not in plans:
            plans[constants] = self._plan(constants, batch, decodes)
        plans[constants].run(q[decodes:], (keys, values), out=out[decodes:])

    def _plan(self, constants: _Constants, batch: Batch, decodes: int) -> Any:
        """A wrapper of FlashInfer's with the lengths and pages of the rows after the decodes. Nothing is read
        back from the device."""
        size, params = self._pool.page_size, constants.params
        q_lens, kv_lens = (torch.tensor(lens[decodes:]) for lens in (batch.q_lens, batch.kv_lens))
        counts = (kv_lens + size - 1) // size
        # The pages of all rows, one row after the other: entries of the page table by row and column.
        rows = torch.repeat_interleave(torch.arange(decodes, decodes + len(counts)), counts)
        first = counts.cumsum(0) - counts
        columns = torch.arange(len(rows)) - torch.repeat_interleave(first, counts)
        table = batch.block_table
        entries = rows * table.shape[1] + columns
        if table.is_cuda:
            entries = entries.pin_memory().to(table.device, non_blocking=True)
        wrapper = self._next_wrapper(constants)
        wrapper.plan(
            _starts(q_lens),
            _starts(counts),
            table.reshape(-1)[entries].to(torch.int32),
            (kv_lens - (counts - 1) * size).to(torch.int32),
            constants.num_heads,
            constants.num_kv_heads,
            constants.head_dim,
            size,
            causal=True,
            sm_scale=params.scale,
            window_left=-1 if params.window is None else params.window - 1,
            logits_soft_cap=params.soft_cap,
            q_data_type=self._pool.keys[0].dtype,
        )
        return wrapper

    def _next_wrapper(self, constants: _Constants) -> Any:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        ring = self._wrappers.setdefault(constants, [])
        turn = self._turns.get(constants, 0)
        self._turns[constants] = turn + 1
        if len(ring) < _RING:
            ring.append(BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD"))
        return ring[turn % _RING]


def _starts(lens: torch.Tensor) -> torch.Tensor:
    """Starts of rows of such lengths, and the end of the last one, int32 on the host."""
    starts = torch.zeros(len(lens) + 1, dtype=torch.int32)
    starts[1:] = lens.cumsum(0)
    return starts
