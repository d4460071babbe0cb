"""Native layers with recurrent state: the cells that they read and write, and what they refuse."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from aioinfer.model.decoder import Decoder
from aioinfer.model.inspection import LoadOptions
from aioinfer.model.loader import load_model
from aioinfer.model.native import NativeDecoder
from aioinfer.model.state import RowStates, StatePool
from aioinfer.native.bindings import InvalidArguments
from tests.model.checkpoints import RECURRENT, make_model
from tests.model.harness import attention_for, build_batch, require, row_states, state_pool

CPU = torch.device("cpu")
#: one with convolutions alone, one with the delta rule, and one with a state space beside attention
KINDS = ["lfm2", "qwen3.5", "falcon-h1"]
Checkpoint = Callable[[str], tuple[Path, Any]]


class Steps:
    """Steps of one sequence each, over pages of its own."""

    def __init__(self, path: Path, kernels: Any = "native", dtype: str = "float32") -> None:
        self.model = load_model(path, LoadOptions(dtype=dtype, device=CPU, kernels=kernels))
        self.attention = attention_for(self.model.spec, 20, 16, kernels)
        pool = state_pool(self.model.spec, 6)
        assert pool is not None
        self.pool: StatePool = pool

    @torch.inference_mode()
    def __call__(self, ids: list[int], start: int, read: int, write: int) -> torch.Tensor:
        states = row_states(self.pool, [(read, write)])
        rows = [(ids, start, list(range(1, 11)))]
        decode = int(start > 0 and len(ids) == 1)
        batch = build_batch(rows, 16, num_decodes=decode, logits_rows=range(len(ids)), states=states)
        return self.model.forward(batch, self.attention).clone()

    def cell(self, index: int) -> list[torch.Tensor]:
        return [tensor[index].clone() for tensor in self.pool.tensors]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("kernels", ["native", "sdpa"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_snapshot_stays_as_it_is_and_starts_a_sequence_again(
    checkpoint: Checkpoint, kind: str, kernels: str
) -> None:
    require(kernels)
    steps = Steps(checkpoint(kind)[0], kernels)
    ids = [(7 * i + 3) % 100 for i in range(45)]
    steps(ids[:17], 0, 0, 3)
    kept = steps.cell(3)
    behind = steps(ids[17:], 17, 3, 5)
    assert same(steps.cell(3), kept)
    # One more token from each of both: in the same cell, and from the snapshot as before.
    steps([9], 45, 5, 5)
    assert torch.equal(steps(ids[17:], 17, 3, 2), behind)
    # What the null cell holds is not read.
    for tensor in steps.pool.tensors:
        tensor[0] = float("nan")
    steps(ids[:17], 0, 0, 1)
    assert same(steps.cell(1), kept)
    # No other cell was written.
    assert all(bool(tensor.isnan().all()) for index in (4, 6) for tensor in steps.cell(index))


@pytest.mark.parametrize("kind", KINDS)
def test_the_spec_says_what_a_cell_holds(checkpoint: Checkpoint, kind: str) -> None:
    path, oracle = checkpoint(kind)
    spec = load_model(path, LoadOptions(dtype="bfloat16", device=CPU, kernels="sdpa")).spec
    config = oracle.config
    layers = [layer != "full_attention" for layer in config.layer_types].count(True)
    beside = layers if kind == "falcon-h1" else 0
    assert len(spec.kv_layers) == config.num_hidden_layers - layers + beside
    if beside:
        conv, state = spec.states[:2]
        assert (conv.shape, conv.dtype) == ((3, 8 * 16 + 2 * 2 * 32), torch.bfloat16)
        assert (state.shape, state.dtype) == ((8, 32, 16), torch.float32)
        assert len(spec.states) == 2 * layers
    elif kind == "lfm2":
        assert spec.state_bytes == layers * (config.conv_L_cache - 1) * config.hidden_size * 2
    else:
        conv, state = spec.states[:2]
        assert conv == ((3, 2 * 2 * 16 + 4 * 48), torch.bfloat16, 2 * 2 * 16 + 4 * 48)
        assert state == ((4, 16, 48), torch.float32, 2 * 4)
        assert len(spec.states) == 2 * layers


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("read", "write"), [(7, 1), (1, 7), (-1, 1), (1, -1)])
def test_cells_beyond_the_pool_are_refused(checkpoint: Checkpoint, kind: str, read: int, write: int) -> None:
    require("native")
    steps = Steps(checkpoint(kind)[0])
    with pytest.raises(InvalidArguments, match=r"(read|write)\[0\] is -?\d, not in \[0, 7\)"):
        steps([1, 2, 3], 0, read, write)


def test_a_pool_of_other_states_is_refused(checkpoint: Checkpoint) -> None:
    require("native")
    steps = Steps(checkpoint("qwen3.5")[0])
    short = StatePool(steps.model.spec.states, 2, CPU)
    short.num_cells = 6
    cells = torch.zeros(1, dtype=torch.int64)
    batch = build_batch([([1], 0, [1])], 16, num_decodes=0, states=RowStates(short, cells, cells))
    with pytest.raises(ValueError, match="contiguous elements"):
        steps.model.forward(batch, steps.attention)
    with pytest.raises(AssertionError, match="has cells"):
        steps.model.forward(dataclasses.replace(batch, states=None), steps.attention)


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("qwen3.5", {"linear_key_head_dim": 12}),
        ("qwen3.5", {"linear_value_head_dim": 24}),
        ("qwen3.5-moe", {"shared_expert_intermediate_size": 40}),
        ("lfm2", {"block_multiple_of": 1}),
    ],
)
def test_sizes_that_are_no_whole_vectors_are_computed_by_torch(
    tmp_path: Path, family: str, change: dict[str, int]
) -> None:
    require("native")
    prefix, settings = RECURRENT[family]
    make_model(prefix, {**settings, **change}, tmp_path, seed=0)
    model = load_model(tmp_path, LoadOptions(dtype="float32", device=CPU, kernels="native"))
    assert isinstance(model, Decoder)
    assert not isinstance(model, NativeDecoder)
    assert "multiples of 16" in model.spec.layer_reason
