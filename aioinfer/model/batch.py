"""Batch: the tensors of one step, the input of models and attention kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from aioinfer.model.canvas import Canvas
    from aioinfer.model.state import RowStates
    from aioinfer.model.vision.base import Features

__all__ = ["Batch"]


@dataclass(slots=True)
class Batch:
    """R rows packed along one token axis of T tokens; no padding between rows.

    Rows with one token that continue a sequence (decodes) come first, ``num_decodes`` of them; then prefill
    chunks and the blocks of diffusion models. Rows of the same sequence attend to each other's keys and
    values of this step. All tensors are int64 on the model's device; the lists are host copies, so that no
    kernel reads a size back from the device.
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
    #: [R, P] pages of each row's sequence in order; unused entries are the null page, 0
    block_table: torch.Tensor
    #: [S] indices of the tokens whose logits are computed, in any order: the last token of every row that
    #: samples, or the unknown positions of a block
    logits_rows: torch.Tensor
    #: tokens of each row, on the host
    q_lens: list[int]
    #: ``kv_len`` on the host
    kv_lens: list[int]
    num_decodes: int
    #: ``logits_rows`` are all T tokens in their order
    all_logits: bool = False
    #: [H] indices of the tokens whose hidden states are wanted; None: of none
    hidden_rows: torch.Tensor | None = None
    #: [H, hidden] float32: their states after the last norm, in front of the head
    hidden: torch.Tensor | None = None
    #: places where the residual of all tokens is wanted, C of them: i, in front of layer i; the number of
    #: layers, behind the last; one more, that normed
    places: torch.Tensor | None = None
    #: [T, C * hidden] in the model's dtype
    captured: torch.Tensor | None = None
    #: recurrent states of the rows; None for a model without any
    states: RowStates | None = None
    #: [R] the slot of each row's adapter, 0 for none, see
    #: :class:`~aioinfer.model.adapters.base.AdapterSlots`; None if no row has one
    adapters: torch.Tensor | None = None
    #: ``adapters`` on the host
    adapter_slots: list[int] | None = None
    #: of a model with canvases, those of the step; None for other models
    canvas: Canvas | None = None
    #: the images of the step; None if it has none
    features: Features | None = None
    #: [3, T] positions of time, height and width that keys are rotated by (M-RoPE); None: ``positions``
    rotary: torch.Tensor | None = None
    #: [T] the position behind those that each token sees, in layers where the tokens of an image see each
    #: other both ways; None: its own is the last
    ends: torch.Tensor | None = None
    #: state that the attention kernel computes once for all layers of the step (masks, page lists)
    attention_plan: object | None = None
