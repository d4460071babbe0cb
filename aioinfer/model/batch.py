"""Batch: the tensors of one step, as models and attention kernels see them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["Batch"]


@dataclass(slots=True)
class Batch:
    """R rows packed along one token axis of T tokens; no padding between rows.

    Rows with one token that continue a sequence (decodes) come first, ``num_decodes`` of them; then prefill
    chunks and the blocks of diffusion models. Rows of one sequence see what the others of them write in
    this step. All tensors are int64 on the model's device; the lists are their copies on the host, so that
    no kernel ever reads a size back from the device.
    """

    #: [T] token ids; those of decode rows were gathered from the relay
    input_ids: torch.Tensor
    #: [T] position of each token in its own sequence
    positions: torch.Tensor
    #: [T] KV cell of each token: page * page_size + offset
    slot_mapping: torch.Tensor
    #: [R + 1] row r owns tokens [cu_q[r], cu_q[r + 1])
    cu_q: torch.Tensor
    #: [R] positions of row r's sequence that exist once this step has written its KV
    kv_len: torch.Tensor
    #: [R, P] pages of each row's sequence in order; unused entries are page 0, which belongs to nobody
    block_table: torch.Tensor
    #: [S] tokens whose logits are wanted, in any order: the last one of every row that samples, or those
    #: of a block that are unknown
    logits_rows: torch.Tensor
    #: tokens of each row, on the host
    q_lens: list[int]
    #: ``kv_len`` on the host
    kv_lens: list[int]
    num_decodes: int
    #: what the attention kernel works out once for all layers of the step (masks, page lists)
    attention_plan: object | None = None
