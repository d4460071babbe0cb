"""Ten updates in a row of the bundled model, under the load of 32 streams."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import random
import shutil
import weakref
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from aioinfer import Chunk, Engine, EngineConfig, SamplingParams, StreamCheckpoint
from aioinfer.execution.torch_device import TorchDevice
from aioinfer.model.weights import StoredMatrix
from tests.compiled import require_native
from tests.engine.simulation import settle
from tests.tiers import nightly

BUNDLED = EngineConfig().model_path
STREAMS, UPDATES = 32, 10


def settings(**changes: Any) -> dict[str, Any]:
    return {
        "attention_backend": "native",
        "deterministic": True,
        "max_running_requests": STREAMS,
        "num_pages": 2000,
        "max_model_len": 600,
        **changes,
    }


def another(path: Path) -> Path:
    """The bundled model, changed a little, as by a step of training."""
    shutil.copytree(BUNDLED, path)
    generator = torch.Generator().manual_seed(1)
    tensors = {
        name: (tensor.float() * (1 + 0.05 * torch.randn(tensor.shape, generator=generator))).to(tensor.dtype)
        for name, tensor in load_file(BUNDLED / "model.safetensors").items()
    }
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[Any]]:
    """What holds the weights that an update has read until it has installed them."""
    found: list[weakref.ref[Any]] = []
    prepare = TorchDevice.prepare_weights

    def recorded(device: TorchDevice, *given: Any) -> Any:
        prepared = prepare(device, *given)
        changes = [each for each in prepared._changes if isinstance(each, FunctionType)]
        cells = [cell.cell_contents for each in changes for cell in each.__closure__ or ()]
        weights = [each._weights for each in cells if isinstance(each, StoredMatrix)]
        found.extend(map(weakref.ref, (prepared, *changes, *weights)))
        return prepared

    monkeypatch.setattr(TorchDevice, "prepare_weights", recorded)
    return found


@nightly("32 streams of hundreds of tokens, and parts of them again")
@pytest.mark.parametrize("quantization", ["none", "int8"])
async def test_no_stream_fails_and_each_goes_on_as_a_fresh_engine_would(
    tmp_path: Path, quantization: Any, read: list[weakref.ref[Any]]
) -> None:
    require_native()
    paths = [BUNDLED, another(tmp_path / "another")]
    from_memory = [*load_file(paths[0] / "model.safetensors").items()]
    dice = random.Random(5)
    prompts = [[dice.randrange(10, 860) for _ in range(dice.randint(3, 60))] for _ in range(STREAMS)]
    params = [
        SamplingParams(
            max_tokens=20 * UPDATES,
            ignore_eos=True,
            temperature=dice.choice([0.0, 0.8]),
            seed=each,
            logprobs=0,
        )
        for each in range(STREAMS)
    ]
    chunks: list[list[Chunk]] = [[] for _ in prompts]
    checkpoints: list[StreamCheckpoint] = []
    config = EngineConfig(**settings(quantization=quantization))
    async with Engine(config) as engine:

        async def consume(index: int) -> None:
            stream = engine.generate(prompts[index], params[index], max_lag=8)
            count = 0
            async for chunk in stream:
                chunks[index].append(chunk)
                count += len(chunk.token_ids)
                # However long an update takes, no stream ends before most of them.
                while count > 20 * (engine.weight_version + 1):
                    await asyncio.sleep(0.001)
                if not checkpoints[index:]:
                    checkpoints.append(stream.checkpoint())

        async with asyncio.TaskGroup() as group:
            for index in range(STREAMS):
                group.create_task(consume(index))
            for version in range(1, UPDATES + 1):
                least = 12 * version
                while min(sum(len(chunk.token_ids) for chunk in each) for each in chunks) < least:
                    await asyncio.sleep(0.005)
                # Every other time from memory, as a trainer in this process would.
                source: Any = paths[version % 2] if version % 4 else from_memory
                assert await engine.update_weights(source) == version
        await settle(engine)
        assert engine.stats().failed_checks == 0
        gc.collect()
        assert len(read) > 10 * UPDATES
        assert not [found for ref in read if (found := ref()) is not None], "weights are left behind"
    await _compare(paths, prompts, params, chunks, checkpoints[0], quantization)


async def _compare(
    paths: list[Path],
    prompts: list[list[int]],
    params: list[SamplingParams],
    chunks: list[list[Chunk]],
    pattern: StreamCheckpoint,
    quantization: Any,
) -> None:
    """Some stretches of each stream with those of fresh engines, resumed where the stretch begins."""
    dice, compared = random.Random(6), 0
    for parity, path in enumerate(paths):
        async with Engine(EngineConfig(**settings(model=str(path), quantization=quantization))) as fresh:

            async def check(index: int, start: int, stop: int, fresh: Engine = fresh) -> None:
                tokens = [token for chunk in chunks[index] for token in chunk.token_ids]
                logprobs = [each for chunk in chunks[index] for each in chunk.logprobs or ()]
                begun = dataclasses.replace(
                    pattern,
                    fingerprint=fresh.info.fingerprint,
                    prompt_token_ids=prompts[index],
                    params=params[index].changed(max_tokens=stop),
                    seed=index,
                    token_ids=tokens[:start],
                    logprobs=logprobs[:start],
                    delivered_tokens=start,
                    delivered_characters=0,
                    request_id="",
                )
                result = await fresh.restore(begun)
                assert result.token_ids == tokens[:stop], (index, start)
                assert result.logprobs == logprobs[:stop], (index, start)

            async with asyncio.TaskGroup() as group:
                for index, each in enumerate(chunks):
                    stretches = _stretches(each)
                    versions = [version for version, *_ in stretches]
                    # One that is ahead of the others has ended before the last, and two updates may come at
                    # once.
                    assert versions == sorted(set(versions))
                    assert len(versions) > UPDATES // 2
                    own = [stretch for stretch in stretches if stretch[0] % 2 == parity]
                    for _, start, stop in dice.sample(own, 3):
                        group.create_task(check(index, start, stop))
                        compared += 1
    assert compared == STREAMS * 6


def _stretches(chunks: list[Chunk]) -> list[tuple[int, int, int]]:
    """Version, first token and last of what each version has computed."""
    found: list[tuple[int, int, int]] = []
    at = 0
    for chunk in chunks:
        end = at + len(chunk.token_ids)
        if found and found[-1][0] == chunk.weight_version:
            found[-1] = (chunk.weight_version, found[-1][1], end)
        elif end > at:
            found.append((chunk.weight_version, at, end))
        at = end
    return found
