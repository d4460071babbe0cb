"""Rows with adapters: what is packed for them, and what reaches the model and its slots."""

from __future__ import annotations

import asyncio
from collections import abc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from aioinfer import EngineConfig, SamplingParams
from aioinfer.engine import Engine
from aioinfer.errors import ConfigError
from aioinfer.execution.decoding.tokens import TokenPacker
from aioinfer.execution.graph_shapes import GraphShape, GraphShapes
from aioinfer.execution.launcher import ThreadLauncher
from aioinfer.execution.packing import Packer
from aioinfer.execution.torch_device import TorchDevice
from aioinfer.model.adapters.base import PreparedAdapter
from aioinfer.scheduling.step import NO_ROWS, Generating, NewRequestData, Row, Step
from tests.sequences import new_sequence

PARAMS = SamplingParams(temperature=0, ignore_eos=True, max_tokens=6)


def prefill(step: int, slots: abc.Sequence[int], adapters: abc.Sequence[int]) -> Step:
    rows = []
    for slot, adapter in zip(slots, adapters, strict=True):
        request = new_sequence(slot, [1, 2], PARAMS, max_length=20)
        new = NewRequestData(PARAMS, 0, frozenset(), [1, 2], (), adapter=adapter)
        rows.append(Row(request, slot, 0, 2, [1, 2], True, [slot], 0, new))
    return Step(step, NO_ROWS, tuple(rows), 2 * len(rows))


def decode(step: int, slots: abc.Sequence[int]) -> Step:
    requests = [new_sequence(each, [1, 2], PARAMS, max_length=20) for each in slots]
    rows = Generating(requests, np.asarray(slots), np.full(len(slots), 2))
    return Step(step, rows, (), len(slots))


def test_steps_carry_adapters_only_where_a_row_has_one() -> None:
    packer = Packer(TokenPacker(8), 8, 4, 4, GraphShapes([GraphShape(8)]))
    first = packer.pack(prefill(1, [1, 2], [0, 0]))
    assert first.adapter_slots is None
    with pytest.raises(ValueError, match="not in tuple"):
        first.sections["adapters"]
    mixed = packer.pack(prefill(2, [3, 4], [5, 0]))
    assert mixed.adapter_slots == [5, 0] == mixed.sections["adapters"].tolist()
    assert mixed.sections["adapters"].dtype == np.int64
    without = packer.pack(decode(3, [1, 2, 4]))
    assert without.adapter_slots is None
    assert without.shape == GraphShape(8), "captured decodes compute it"
    with_one = packer.pack(decode(4, [1, 3]))
    assert with_one.adapter_slots == [0, 5]
    assert with_one.shape is None, "graphs were captured without adapters"
    again = packer.pack(prefill(5, [3], [0]))
    assert again.adapter_slots is None, "the slot has another tenant"


class Prepared:
    rank, num_bytes, fingerprint = 8, 123, "f"


class Slots:
    """Keeps what is asked of it."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def prepare(self, path: Path) -> PreparedAdapter:
        if not path.is_dir():
            raise ConfigError(f"{path.name}: is no directory")
        self.calls.append(("prepare", path.name))
        return Prepared()

    def install(self, slot: int, adapter: PreparedAdapter) -> None:
        self.calls.append(("install", slot))

    def remove(self, slot: int) -> None:
        self.calls.append(("remove", slot))


class Stubbed(TorchDevice):
    """The bundled model, which sees the adapters of its rows and computes without them."""

    def __init__(self, config: EngineConfig, slots: Slots | None) -> None:
        super().__init__(config)
        self._slots = slots
        self.batches: list[list[int] | None] = []

    def _load(self, *arguments: Any) -> Any:
        model: Any = super()._load(*arguments)
        model.adapters = self._slots
        forward = model.forward

        def seen(batch: Any, attention: Any) -> torch.Tensor:
            self.batches.append(batch.adapter_slots)
            assert (batch.adapters is None) == (batch.adapter_slots is None)
            if batch.adapters is not None:
                assert batch.adapters.tolist() == batch.adapter_slots
                assert len(batch.q_lens) == len(batch.adapter_slots)
                batch.adapters = batch.adapter_slots = None
            logits: torch.Tensor = forward(batch, attention)
            return logits

        model.forward = seen
        return model


def test_rows_reach_the_model_with_the_slots_of_their_adapters(tmp_path: Path) -> None:
    config = EngineConfig(max_adapters=2, num_pages=64, max_running_requests=4, prefix_cache=False)
    slots = Slots()
    device = Stubbed(config, slots)

    async def run() -> None:
        async with Engine(config, launcher=lambda _: ThreadLauncher(device)) as engine:
            assert engine.info.max_adapters == 3
            await engine.generate([5, 6, 7], PARAMS)
            assert set(map(str, device.batches)) == {"None"}
            (tmp_path / "a").mkdir()
            info = await engine.load_adapter("a", tmp_path / "a")
            assert (info.rank, info.num_bytes) == (8, 123)
            with pytest.raises(ConfigError, match="is no directory"):
                await engine.load_adapter("b", tmp_path / "b")
            device.batches.clear()
            alone = await engine.generate([5, 6, 7], PARAMS)
            assert set(map(str, device.batches)) == {"None"}
            streams = [engine.generate([5, 6, 7], PARAMS, adapter=name) for name in (None, "a", "a")]
            assert [(await each).token_ids for each in streams] == [alone.token_ids] * 3
            assert [0, 1, 1] in [sorted(each) for each in device.batches if each is not None]
            await engine.unload_adapter("a")
            await engine.generate([5], PARAMS)

    asyncio.run(run())
    assert slots.calls == [("prepare", "a"), ("install", 1), ("remove", 1)]


@pytest.mark.parametrize(("most", "reason"), [(2, "computes none"), (0, "max_adapters is 0")])
def test_a_model_without_slots_says_why(most: int, reason: str) -> None:
    config = EngineConfig(max_adapters=most, num_pages=64, max_running_requests=4)
    device = Stubbed(config, None if most else Slots())
    info = device.open()
    assert info.max_adapters == 0
    assert reason in info.adapter_reason
    with pytest.raises(ConfigError):
        device.prepare_adapter(Path("/"))
    device.close()
