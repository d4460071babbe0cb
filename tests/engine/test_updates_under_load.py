"""Updates in a row of the bundled model under load: each stream goes on as a fresh engine would."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import random
import shutil
import weakref
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from aioinfer import Chunk, Engine, EngineConfig, SamplingParams, StreamCheckpoint
from aioinfer.execution.torch_device import TorchDevice
from tests.compiled import require_native
from tests.engine.simulation import settle
from tests.tiers import nightly

BUNDLED = EngineConfig().model_path
STREAMS, UPDATES = 32, 10


def settings(**changes: Any) -> EngineConfig:
    shared: dict[str, Any] = {"attention_backend": "native", "deterministic": True, "num_pages": 2000}
    return EngineConfig(**shared, max_running_requests=STREAMS, max_model_len=600, **changes)


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
        found.extend(map(weakref.ref, (prepared, *prepared._changes)))
        return prepared

    monkeypatch.setattr(TorchDevice, "prepare_weights", recorded)
    return found


def asked(number: int) -> tuple[list[int], SamplingParams]:
    dice = random.Random(number)
    temperature = dice.choice([0.0, 0.8])
    params = SamplingParams(
        max_tokens=20 * UPDATES, ignore_eos=True, temperature=temperature, seed=number, logprobs=0
    )
    return [dice.randrange(10, 860) for _ in range(dice.randint(3, 60))], params


@nightly("32 streams of hundreds of tokens, and parts of them again")
@pytest.mark.parametrize("quantization", ["none", "int8"])
async def test_no_stream_fails_and_each_goes_on_as_a_fresh_engine_would(
    tmp_path: Path, quantization: Any, read: list[weakref.ref[Any]]
) -> None:
    require_native()
    paths = [BUNDLED, another(tmp_path / "another")]
    from_memory = [*load_file(paths[0] / "model.safetensors").items()]
    chunks: list[list[Chunk]] = [[] for _ in range(STREAMS)]
    checkpoints: list[StreamCheckpoint] = []
    async with Engine(settings(quantization=quantization)) as engine:

        async def consume(index: int) -> None:
            stream = engine.generate(*asked(index), max_lag=8)
            async for chunk in stream:
                chunks[index].append(chunk)
                # However long an update takes, no stream ends before most of them.
                while count(chunks[index]) > 20 * (engine.weight_version + 1):
                    await asyncio.sleep(0.001)
                if not checkpoints:
                    checkpoints.append(stream.checkpoint())

        async with asyncio.TaskGroup() as group:
            for index in range(STREAMS):
                group.create_task(consume(index))
            for version in range(1, UPDATES + 1):
                while min(map(count, chunks)) < 12 * version:
                    await asyncio.sleep(0.005)
                # Every other time from memory, as a trainer in this process would.
                source: Any = paths[version % 2] if version % 4 else from_memory
                assert await engine.update_weights(source) == version
        await settle(engine)
        assert engine.stats().failed_checks == 0
        gc.collect()
        assert len(read) > 10 * UPDATES
        assert not [found for ref in read if (found := ref()) is not None], "weights are left behind"
    for parity, path in enumerate(paths):
        async with Engine(settings(model=str(path), quantization=quantization)) as fresh:
            for index, each in enumerate(chunks):
                await compare(fresh, index, each, parity, checkpoints[0])


def count(chunks: list[Chunk]) -> int:
    return sum(len(chunk.token_ids) for chunk in chunks)


async def compare(
    fresh: Engine, index: int, chunks: list[Chunk], parity: int, pattern: StreamCheckpoint
) -> None:
    """Stretches of a stream by these weights are those of a fresh engine, resumed where they begin."""
    tokens = [token for chunk in chunks for token in chunk.token_ids]
    logprobs = [each for chunk in chunks for each in chunk.logprobs or ()]
    prompt, params = asked(index)
    versions, stop, begun = [], 0, []
    for version, several in groupby(chunks, lambda chunk: chunk.weight_version):
        start, stop = stop, stop + count([*several])
        versions.append(version)
        if version % 2 == parity and stop > start:
            checkpoint = dataclasses.replace(
                pattern,
                fingerprint=fresh.info.fingerprint,
                prompt_token_ids=prompt,
                params=params.changed(max_tokens=stop),
                seed=index,
                token_ids=tokens[:start],
                logprobs=logprobs[:start],
                delivered_tokens=start,
                delivered_characters=0,
                request_id="",
            )
            begun.append((stop, fresh.restore(checkpoint)))
    # One that is ahead of the others has ended before the last, and two updates may come at once.
    assert versions == sorted(set(versions))
    assert len(versions) > UPDATES // 2
    assert begun
    for stop, stream in begun:
        result = await stream
        assert (result.token_ids, result.logprobs) == (tokens[:stop], logprobs[:stop]), (index, stop)
