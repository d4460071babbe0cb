"""The kernels of adapters against the formula, interpreted on the CPU or compiled on CUDA."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from aioinfer.model.adapters.rows import Run, blocks, runs
from aioinfer.model.batch import Batch
from aioinfer.model.weights import RandomWeights, StoredMatrix
from tests.model.adapters import factors, write_adapter
from tests.model.kernels import TOLERANCE, normal
from tests.tiers import INTERPRETER, grid, nightly, points


class Layer:
    """One adapted layer of tensors q, k, ... with so many rows, and adapters in slots from 1 on."""

    def __init__(
        self,
        base: Path,
        device: str,
        rows: Sequence[int],
        inputs: int,
        dtype: torch.dtype = torch.float32,
        order: torch.Tensor | None = None,
    ) -> None:
        from aioinfer.model.adapters.triton_adapters import TritonAdapters

        self._base, self.device, self.dtype, self.inputs = base, device, dtype, inputs
        self.rows = {f"model.layers.0.{'qkv'[at]}": count for at, count in enumerate(rows)}
        self.order = torch.arange(sum(rows)) if order is None else order
        self.adapters = TritonAdapters(dtype, torch.device(device), max_rank=64)
        weights = RandomWeights(dtype=dtype, device=torch.device("cpu"))
        # A layer in front: targets of this one do not begin at 0.
        other = StoredMatrix(weights, ["model.layers.9.other"], [8], inputs)
        self.other = self.adapters.linear(other, lambda x: x.new_zeros(len(x), 8))
        stored = StoredMatrix(weights, list(self.rows), list(rows), inputs, order=order)
        self.linear = self.adapters.linear(stored, self._plain)
        #: by slot, what the adapter adds to the weight, float64
        self.changes: dict[int, torch.Tensor] = {}

    def _plain(self, values: torch.Tensor) -> torch.Tensor:
        """Without adapters the layer returns ones."""
        return values.new_ones(len(values), len(self.order))

    def install(self, slot: int, ranks: Sequence[int], *, alpha: float = 3.0) -> None:
        """An adapter with a rank for each tensor, 0 for none."""
        ranked = {name: rank for name, rank in zip(self.rows, ranks, strict=True) if rank}
        shapes = {name: (self.rows[name], self.inputs) for name in ranked}
        matrices = factors(shapes, ranked, seed=slot, dtype=self.dtype)
        path = write_adapter(
            self._base / str(slot), matrices, r=1, lora_alpha=1, rank_pattern=ranked,
            alpha_pattern={name: alpha * rank for name, rank in ranked.items()},
        )  # fmt: skip
        self.adapters.install(slot, self.adapters.prepare(path))
        whole = []
        for name, count in self.rows.items():
            a, b = matrices.get(name, (torch.zeros(1, self.inputs), torch.zeros(count, 1)))
            whole.append(alpha * b.double() @ a.double())
        self.changes[slot] = torch.cat(whole)[self.order]

    def __call__(self, values: torch.Tensor, slots: Sequence[int], q_lens: Sequence[int]) -> torch.Tensor:
        batch = _batch(slots, q_lens)
        with self.adapters.computing(batch):
            return self.linear(values.to(self.device)).cpu()

    def values(self, tokens: int, seed: int = 0) -> torch.Tensor:
        return normal(tokens, self.inputs, seed=seed).to(self.dtype)

    def check(self, slots: Sequence[int], q_lens: Sequence[int]) -> None:
        values = self.values(sum(q_lens))
        got = self(values, slots, q_lens)
        assert got.dtype == self.dtype
        expected = torch.ones(len(values), len(self.order), dtype=torch.float64)
        at = 0
        for slot, count in zip(slots, q_lens, strict=True):
            if slot:
                expected[at : at + count] += values[at : at + count].double() @ self.changes[slot].T
            at += count
        # Results are of this size, and sums of so many.
        bound = TOLERANCE[self.dtype] * 4
        torch.testing.assert_close(got.double(), expected, rtol=bound, atol=bound)


def _batch(slots: Sequence[int], q_lens: Sequence[int]) -> Batch:
    nothing: Any = None
    return Batch(*[nothing] * 7, q_lens=list(q_lens), kv_lens=list(q_lens), num_decodes=0,
                 adapter_slots=list(slots))  # fmt: skip


@pytest.mark.parametrize("dtype", grid([torch.bfloat16], [torch.float32, torch.float16], INTERPRETER))
def test_types(tmp_path: Path, device: str, dtype: torch.dtype) -> None:
    layer = Layer(tmp_path, device, [40, 24, 24], 80, dtype)
    for slot, ranks in enumerate(([4, 4, 4], [16, 0, 3]), 1):
        layer.install(slot, ranks)
    layer.check([1, 0, 2, 2, 1], [1, 1, 1, 3, 18])


@pytest.mark.parametrize(
    ("rows", "inputs"),
    points(
        [([70], 50), ([5, 3, 3], 16)], [([64], 32), ([65, 130], 600), ([1], 1), ([16], 1100)], INTERPRETER
    ),
)
def test_sizes(tmp_path: Path, device: str, rows: list[int], inputs: int) -> None:
    """Less than a tile, more than one, and no multiple of one; the inner dimension in one part or several."""
    layer = Layer(tmp_path, device, rows, inputs)
    layer.install(1, [5] * len(rows))
    layer.check([1, 0, 1], [2, 1, 1])


@pytest.mark.parametrize(
    ("first", "second"), points([(1, 17)], [(16, 16), (33, 64), (0, 2), (3, 0)], INTERPRETER)
)
def test_ranks(tmp_path: Path, device: str, first: int, second: int) -> None:
    layer = Layer(tmp_path, device, [20, 30], 40)
    layer.install(3, [first, second])
    layer.install(1, [2, 2])
    layer.check([3, 1], [3, 2])


def test_tensors_whose_rows_are_apart(tmp_path: Path, device: str) -> None:
    """The outputs of the first one are around those of the others."""
    order = torch.cat((torch.arange(0, 80, 2), torch.arange(80, 120), torch.arange(1, 80, 2)))
    layer = Layer(tmp_path, device, [80, 20, 20], 32, order=order)
    layer.install(1, [4, 4, 4])
    layer.install(2, [4, 0, 20])
    layer.check([1, 2, 0], [2, 1, 1])


@nightly(INTERPRETER)
def test_a_tokens_bits_do_not_depend_on_its_company(tmp_path: Path, device: str) -> None:
    layer = Layer(tmp_path, device, [40, 24], 600, torch.bfloat16)
    for slot, ranks in enumerate(([4, 4], [40, 2], [0, 16]), 1):
        layer.install(slot, ranks)
    slots, q_lens = [1, 1, 0, 2, 3, 1, 2], [1, 1, 1, 1, 4, 19, 2]
    values = layer.values(sum(q_lens), seed=3)
    together, at = layer(values, slots, q_lens), 0
    for slot, count in zip(slots, q_lens, strict=True):
        for cut in {1, count}:
            own = values[at : at + cut]
            alone = layer(own, [slot], [cut]) if slot else torch.ones_like(together[at : at + cut])
            assert torch.equal(alone, together[at : at + cut])
        at += count


def test_values_may_be_a_view(tmp_path: Path, device: str) -> None:
    layer = Layer(tmp_path, device, [24], 40)
    layer.install(1, [4])
    values = layer.values(3)
    wide = torch.cat((values, values), dim=1).to(device)
    for view in (wide[:, :40], values.T.contiguous().T.to(device)):
        with layer.adapters.computing(_batch([1], [3])):
            assert torch.equal(layer.linear(view).cpu(), layer(values, [1], [3]))


def test_layers_that_no_adapter_changes_are_left(tmp_path: Path, device: str) -> None:
    layer = Layer(tmp_path, device, [24], 40)
    layer.install(1, [4])
    with layer.adapters.computing(_batch([1], [3])):
        assert not layer.other(layer.values(3).to(device)).any()
    with layer.adapters.computing(_batch([0], [3])):
        assert torch.equal(layer.linear(layer.values(3).to(device)).cpu(), torch.ones(3, 24))


def test_adapters_come_and_go_between_steps(tmp_path: Path, device: str) -> None:
    layer = Layer(tmp_path, device, [24], 40)
    layer.install(1, [4])
    layer.check([1], [2])
    layer.install(5, [20])
    layer.check([1, 5], [2, 2])
    layer.adapters.remove(1)
    layer.check([0, 5], [2, 2])
    with pytest.raises(ValueError, match="slot 1 has no adapter"):
        layer.check([1, 5], [2, 2])
    layer.install(1, [7])
    layer.check([1, 5], [2, 2])


@pytest.mark.parametrize(
    ("slots", "q_lens", "expected"),
    [
        ([0, 0], [1, 5], []),
        ([1, 1, 2], [1, 2, 1], [(1, 0, 3), (2, 3, 4)]),
        ([1, 0, 1], [1, 2, 1], [(1, 0, 1), (1, 3, 4)]),
        ([0, 3], [2, 40], [(3, 2, 42)]),
        ([2, 1, 1, 1, 2], [1] * 5, [(2, 0, 1), (1, 1, 4), (2, 4, 5)]),
    ],
)
def test_neighbours_with_one_adapter_are_one_run(
    slots: list[int], q_lens: list[int], expected: list[tuple[int, int, int]]
) -> None:
    assert runs(slots, q_lens) == expected


def test_blocks_cut_runs() -> None:
    found = blocks([Run(1, 0, 33), Run(2, 40, 41)], 16)
    assert found == [(1, 0, 16), (1, 16, 32), (1, 32, 33), (2, 40, 41)]
