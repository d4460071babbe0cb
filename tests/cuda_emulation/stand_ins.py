"""A plugin of pytest: torch does the work of kernels that engines launch often, in place of the interpreter.

On the emulated device only. Samplers and proposals are torch's, too, unless a test names Triton's.
What has no stand-in, adapters and what samples in Triton among them, runs in the interpreter; in a test of
kernels, which asks for them by ``kernels_or_skip``, everything does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch

from tests.cuda_emulation.compute import alias, enqueue  # isort: skip  # before the package

from aioinfer.model import triton_float8
from aioinfer.model.attention import triton_attention
from aioinfer.model.attention.base import AttentionParams
from aioinfer.model.attention.pool import KVScales
from aioinfer.model.attention.sdpa import visible
from aioinfer.model.heads import HeadNorm, split_heads
from aioinfer.model.moe import triton_experts
from aioinfer.model.moe.experts import ExpertWeights, Float8ExpertWeights, LoopExperts
from aioinfer.model.moe.triton_routing import TritonRouter
from aioinfer.model.operations.torch_operations import TorchOperations
from aioinfer.model.operations.triton_operations import TritonOperations
from aioinfer.model.rope import Rotary
from aioinfer.sampling import backend
from tests.model import kernels
from tests.model.float8 import rounded_heads, widened

#: whether the test that runs is one of kernels
_kernels = False


def use_kernels() -> None:
    global _kernels
    _kernels = True


kernels.emulated = use_kernels


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Generator[None, bool, bool]:
    global _kernels
    _kernels = False
    return (yield)


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None, scale: float,
    window: int | None, soft_cap: float | None, block: int,
) -> torch.Tensor:  # fmt: skip
    """Of a sequence's last positions."""
    k, v = (side.double().repeat_interleave(q.shape[1] // k.shape[1], 1) for side in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double() * scale, k)
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    seen = visible(len(q), 0, len(k), AttentionParams(scale, window, block=block), q.device)
    scores = scores.masked_fill_(~seen, float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks.double()[:, None, None].expand(-1, len(q), 1)), -1)
    weights = scores.softmax(-1)[..., : len(k)]
    return torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)


def _paged(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, table: torch.Tensor, cu_q: torch.Tensor,
    kv_len: torch.Tensor, out: torch.Tensor, sinks: torch.Tensor | None, scales: KVScales | None,
    **scoring: Any,
) -> None:  # fmt: skip
    if scales is not None:
        keys, values = widened(keys, scales.keys), widened(values, scales.values)
    ends = cu_q.tolist()
    for row, length in enumerate(kv_len.tolist()):
        begin, end = ends[row : row + 2]
        if length == 0 or begin == end:
            out[begin:end] = 0
            continue
        pages = table[row, : -(-length // keys.shape[1])].long()
        k, v = (side[pages].flatten(0, 1)[:length] for side in (keys, values))
        out[begin:end] = _attend(q[begin:end], k, v, sinks, **scoring)


def paged_prefill(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, block_table: torch.Tensor, cu_q: torch.Tensor,
    kv_len: torch.Tensor, *, scale: float, window: int | None, soft_cap: float | None, block: int = 1,
    sinks: torch.Tensor | None = None, out: torch.Tensor | None = None, num_tokens: int, tuning: object,
    splits: int = 1, scales: KVScales | None = None,
) -> torch.Tensor:  # fmt: skip
    out = torch.empty_like(q) if out is None else out
    tensors: list[Any] = [alias(tensor) for tensor in (q, keys, values, block_table, cu_q, kv_len, out)]
    tensors.append(None if sinks is None else alias(sinks))
    tensors.append(None if scales is None else KVScales(*map(alias, scales)))
    scoring: dict[str, Any] = {"scale": scale, "window": window, "soft_cap": soft_cap, "block": block}
    enqueue(lambda: _paged(*tensors, **scoring), "paged_prefill")
    return out


def paged_decode(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, block_table: torch.Tensor,
    kv_len: torch.Tensor, **options: Any,
) -> torch.Tensor:  # fmt: skip
    cu_q = torch.arange(len(q) + 1, device=q.device)
    return paged_prefill(q, keys, values, block_table, cu_q, kv_len, num_tokens=len(q), **options)


def store_kv(
    k: torch.Tensor, v: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slot_mapping: torch.Tensor,
    scales: KVScales | None = None,
) -> None:  # fmt: skip
    if scales is None:
        keys.flatten(0, 1).index_put_((slot_mapping,), k)
        values.flatten(0, 1).index_put_((slot_mapping,), v)
        return
    tensors = [alias(tensor) for tensor in (k, v, keys, values, slot_mapping, *scales)]
    enqueue(lambda: _store_rounded(*tensors), "store_kv")


def _store_rounded(
    k: torch.Tensor, v: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor,
    key_scales: torch.Tensor, value_scales: torch.Tensor,
) -> None:  # fmt: skip
    for given, cells, scales in ((k, keys, key_scales), (v, values, value_scales)):
        rounded, exponents = rounded_heads(given)
        cells.flatten(0, 1).view(torch.uint8)[slots.long()] = rounded.view(torch.uint8)
        scales.flatten(0, 1)[slots.long()] = exponents


def rotate_and_store(
    qkv: torch.Tensor, norm: HeadNorm | None, rotary: Rotary | None, keys: torch.Tensor,
    values: torch.Tensor, slot_mapping: torch.Tensor, *, shared: bool = False,
    scales: KVScales | None = None,
) -> torch.Tensor:  # fmt: skip
    q, k, v = split_heads(qkv, 0 if shared else keys.shape[2], norm, rotary)
    if not shared:
        store_kv(k, v, keys, values, slot_mapping, scales)
    return q


def float8_linear(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, block: tuple[int, int],
    bias: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    out = x.new_empty(len(x), len(weight))
    tensors: list[Any] = [alias(tensor) for tensor in (x, weight, scales, out)]
    tensors.append(None if bias is None else alias(bias))
    enqueue(lambda: _float8_product(block, *tensors), "float8_linear")
    return out


def _float8_product(
    block: tuple[int, int], x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, out: torch.Tensor,
    bias: torch.Tensor | None,
) -> None:  # fmt: skip
    wide = _dequantised(weight, scales, block)
    out.copy_(torch.nn.functional.linear(x.double(), wide, None if bias is None else bias.double()))


def _dequantised(values: torch.Tensor, scales: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """A matrix, or a stack of such, in float64."""
    rows, inner = values.shape[-2:]
    wide = scales.repeat_interleave(block[0], -2)[..., :rows, :]
    return values.double() * wide.repeat_interleave(block[1], -1)[..., :inner]


def route(router: TritonRouter, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return router.rule(hidden)


def fused_experts(
    hidden: torch.Tensor, stack: ExpertWeights | Float8ExpertWeights, weights: torch.Tensor,
    experts: torch.Tensor, tuning: object,
) -> torch.Tensor:  # fmt: skip
    out = torch.empty_like(hidden)
    to, *inputs = (alias(tensor) for tensor in (out, hidden, weights, experts))
    biases = stack.biases if stack.biases is None else (alias(stack.biases[0]), alias(stack.biases[1]))
    if isinstance(stack, ExpertWeights):
        mixture = LoopExperts(ExpertWeights(alias(stack.gate_up), alias(stack.down), stack.gate, biases))
        enqueue(lambda: to.copy_(mixture(*inputs)), "fused_experts")
        return out
    gate = stack.gate
    matrices: list[Any] = [(*map(alias, each[:2]), each.block) for each in (stack.gate_up, stack.down)]

    def work() -> None:
        gate_up, down = (_dequantised(*each) for each in matrices)
        hidden, weights, experts = inputs
        wide = biases if biases is None else (biases[0].double(), biases[1].double())
        mixture = LoopExperts(ExpertWeights(gate_up, down, gate, wide))
        to.copy_(mixture(hidden.double(), weights.double(), experts))

    enqueue(work, "fused_experts")
    return out


def auto_is_torch(choose: Callable[..., Any]) -> Callable[..., Any]:
    return lambda device, wanted="auto": choose(device, "torch" if wanted == "auto" else wanted)


def _stand_in(owner: Any, name: str, twin: Callable[..., Any]) -> None:
    """Put ``twin`` in the place of a kernel's launcher, where its callers look that up."""
    kernel = getattr(owner, name)

    @functools.wraps(kernel)
    def launch(*args: Any, **kwargs: Any) -> Any:
        return (kernel if _kernels else twin)(*args, **kwargs)

    setattr(owner, name, launch)


for each in (paged_decode, paged_prefill, rotate_and_store, store_kv):
    _stand_in(triton_attention, each.__name__, each)
_stand_in(triton_float8, "float8_linear", float8_linear)
_stand_in(TritonRouter, "__call__", route)
_stand_in(triton_experts, "fused_experts", fused_experts)
_stand_in(TritonOperations, "add_norm", TorchOperations.add_norm)
_stand_in(TritonOperations, "gate_mul", TorchOperations.gate_mul)
for chooser in ("choose_sampling", "choose_proposing"):
    _stand_in(backend, chooser, auto_is_torch(getattr(backend, chooser)))
