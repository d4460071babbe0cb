"""As much of FlashInfer as aioinfer calls, in torch on any device; checks and computes what it is given."""

from __future__ import annotations

from types import ModuleType
from typing import Any, ClassVar

import torch

__all__ = ["BatchPrefillWithPagedKVCacheWrapper", "module"]


def module() -> ModuleType:
    """To be imported as ``flashinfer``."""
    made = ModuleType("flashinfer")
    made.BatchPrefillWithPagedKVCacheWrapper = BatchPrefillWithPagedKVCacheWrapper  # type: ignore[attr-defined]
    return made


class BatchPrefillWithPagedKVCacheWrapper:
    """The signature is that of flashinfer-python 0.7.2, as far as it is used."""

    #: all that were made
    made: ClassVar[list[BatchPrefillWithPagedKVCacheWrapper]] = []

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD") -> None:
        assert float_workspace_buffer.dtype == torch.uint8
        assert kv_layout == "NHD"
        self.plans = self.runs = 0
        self.made.append(self)

    def plan(
        self,
        *given: Any,
        causal: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.float16,
    ) -> None:
        """``given``: qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads,
        num_kv_heads, head_dim_qk, page_size."""
        queries, starts, pages, last = rows = given[:4]
        *_, head_dim, page_size = self._shape = given[4:]
        assert all(each.dtype == torch.int32 for each in rows)
        # Those on a device would be waited for.
        assert all(each.device.type == "cpu" for each in (queries, starts, last))
        assert causal
        assert sm_scale is not None
        assert head_dim in (64, 128, 256)
        assert len(pages) == starts[-1]
        assert bool(((last >= 1) & (last <= page_size)).all())
        self.plans += 1
        self._rows = [each.tolist() for each in rows]
        self._scale, self._window, self._cap = sm_scale, window_left, logits_soft_cap
        self._dtype = q_data_type

    def run(
        self, q: torch.Tensor, paged_kv_cache: tuple[torch.Tensor, torch.Tensor], *, out: torch.Tensor
    ) -> torch.Tensor:
        self.runs += 1
        starts, page_starts, pages, last = self._rows
        heads, kv_heads, head_dim, page_size = self._shape
        assert q.dtype == out.dtype == self._dtype
        assert q.shape == out.shape == (starts[-1], heads, head_dim)
        assert all(each.shape[1:] == (page_size, kv_heads, head_dim) for each in paged_kv_cache)
        for row in range(len(last)):
            own = pages[page_starts[row] : page_starts[row + 1]]
            length = (len(own) - 1) * page_size + last[row]
            keys, values = (
                store[own].flatten(0, 1)[:length].double().repeat_interleave(heads // kv_heads, dim=1)
                for store in paged_kv_cache
            )
            tokens = slice(starts[row], starts[row + 1])
            out[tokens] = self._attend(q[tokens].double(), keys, values).to(out.dtype)
        return out

    def _attend(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        scores: Any = torch.einsum("qhd,nhd->hqn", q, keys) * self._scale
        if self._cap:
            scores = self._cap * torch.tanh(scores / self._cap)
        key = torch.arange(len(keys), device=q.device)
        query = key[len(keys) - len(q) :, None]
        seen = key <= query
        if self._window >= 0:
            seen &= key >= query - self._window
        return torch.einsum("hqn,nhd->qhd", scores.masked_fill(~seen, float("-inf")).softmax(-1), values)
