"""NativeTwoWayAttention: by the kernels of text models, over one page that a unit has for itself."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from aioinfer.model.attention.base import AttentionParams
from aioinfer.model.attention.native_attention import NativeAttention
from aioinfer.model.attention.pool import KVShape
from aioinfer.model.batch import Batch
from aioinfer.native.bindings import ThreadPool

__all__ = ["NativeTwoWayAttention"]

#: of sizes of heads, and of cells of a page that need no conversion
_MULTIPLE = 16


class NativeTwoWayAttention:
    """A :class:`~aioinfer.model.vision.attention.TwoWayAttention`: a prefill of one row, every token of which
    sees up to the end. Launch thread only."""

    __slots__ = ("_attention", "_batch", "_dtype", "_pool", "_shape")

    def __init__(self, pool: ThreadPool, dtype: torch.dtype) -> None:
        self._pool, self._dtype = pool, dtype
        #: patches and heads for which there is a page
        self._shape: tuple[int, ...] = ()
        self._attention: NativeAttention
        self._batch: Batch

    def __call__(self, qkv: torch.Tensor, scale: float) -> torch.Tensor:
        size = qkv.shape[2]
        # Zeros behind a head change no dot product.
        padded = F.pad(qkv, (0, -size % _MULTIPLE)) if size % _MULTIPLE else qkv
        if padded.shape != self._shape:
            self._reserve(*padded.shape)
        params = AttentionParams(scale, spans=True)
        return self._attention.fused(0, padded, None, None, self._batch, params)[..., :size]

    def _reserve(self, patches: int, heads: int, size: int) -> None:
        cells = patches + -patches % _MULTIPLE
        shape = KVShape(heads // 3, size)
        if self._shape:
            del self._attention  # before there is another page
        self._shape = ()
        self._attention = NativeAttention(
            self._pool, [shape], num_pages=0, page_size=cells, dtype=self._dtype
        )
        none, places = torch.empty(0, dtype=torch.int64), torch.arange(patches)
        self._batch = Batch(
            input_ids=none,
            positions=places,
            slot_mapping=places,
            cu_q=torch.tensor([0, patches]),
            kv_len=torch.tensor([patches]),
            block_table=torch.zeros((1, 1), dtype=torch.int64),
            logits_rows=none,
            q_lens=[patches],
            kv_lens=[patches],
            num_decodes=0,
            ends=torch.full((patches,), patches),
        )
        self._shape = patches, heads, size
