"""Replicas with weights of several versions, and what their streams say of it."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from aioinfer import DiffusionParams, SamplingParams
from aioinfer.config import EngineConfig
from aioinfer.engine import Engine
from aioinfer.errors import ConfigError, EngineError, EngineFailed
from aioinfer.outputs import TokenLogprob
from aioinfer.testing import TimedLauncher
from tests.parallel.framed import FramedReplica, Kind, both, framed, local
from tests.parallel.toys import PARAMS, STEP, Toy, attempt_of, prompt, record, sent, toys, virtual
from tests.toys import ToyTokenizer, toy_generate
from tests.toys.blocks import ScriptedDevice

LONG = SamplingParams(max_tokens=60, ignore_eos=True, temperature=0)


@both
@virtual
async def test_a_stream_that_two_versions_wrote_says_that_it_is_not_identical(kind: Kind) -> None:
    engines = toys(2, deterministic=True)
    async with kind(engines) as dispatcher:
        await engines[0].update_weights({"weights": 1})
        stream = dispatcher.generate(prompt(0), LONG)
        await asyncio.sleep(6.5 * STEP)
        assert attempt_of(stream).replica.name == "local-0"
        assert record(stream).output.weight_version == 1
        engines[0].lose()
        result = await stream
        assert (result.weight_version, result.identical) == (0, False)


@both
@virtual
async def test_an_output_that_must_be_identical_goes_on_with_the_same_weights_only(kind: Kind) -> None:
    engines = toys(3, deterministic=True)
    async with kind(engines, on_loss="identical") as dispatcher:
        for engine in (engines[0], engines[2]):
            await engine.update_weights({"weights": 1})
        stream = dispatcher.generate(prompt(0), LONG)
        await asyncio.sleep(6.5 * STEP)
        for number in (0, 2):
            assert attempt_of(stream).replica.name == f"local-{number}"
            engines[number].lose()
            if number == 0:
                await asyncio.sleep(6.5 * STEP)
        with pytest.raises(EngineFailed, match="weights of version 1"):
            await stream


@pytest.mark.parametrize("left", [1, 2])
@virtual
async def test_an_output_that_must_be_identical_leaves_a_replica_that_was_updated_unnoticed(
    left: int,
) -> None:
    engines = toys(1 + left, deterministic=True)
    async with framed(engines, on_loss="identical") as dispatcher:
        stream = dispatcher.generate(prompt(0), LONG)
        await asyncio.sleep(6.5 * STEP)
        updated = dispatcher._replicas[-1]
        assert isinstance(updated, FramedReplica)
        updated.sockets[1].held = True
        await engines[-1].update_weights({"weights": 1})
        engines[0].lose()
        await asyncio.sleep(3.5 * STEP)
        found, attempt = record(stream), attempt_of(stream)
        assert attempt.replica is updated
        assert updated.weight_version == 0, "nothing has come of the update"
        updated.sockets[1].release()
        if left == 1:
            with pytest.raises(EngineFailed, match="no replica left has the same arithmetic"):
                await stream
            return
        result = await stream
        assert (result.weight_version, result.identical) == (0, True)
        assert result.token_ids == toy_generate(prompt(0), LONG)
        assert len(found.losses) < 2, "an update is no loss"


@both
@virtual
async def test_an_output_that_goes_on_anyhow_prefers_its_weights(kind: Kind) -> None:
    engines = toys(3, deterministic=True)
    async with kind(engines) as dispatcher:
        for engine in (engines[0], engines[2]):
            await engine.update_weights({"weights": 1})
        stream = dispatcher.generate(prompt(0), LONG)
        await asyncio.sleep(6.5 * STEP)
        engines[0].lose()
        result = await stream
        assert (result.weight_version, result.identical) == (1, True)


@pytest.mark.parametrize("count", [20, 60])
@virtual
async def test_rows_that_wait_for_a_socket_are_each_of_one_version(count: int) -> None:
    engines = toys(1)
    params = LONG.changed(max_tokens=count)
    async with framed(engines) as dispatcher:
        stream = dispatcher.generate(prompt(0), params)
        (replica,) = dispatcher._replicas
        assert isinstance(replica, FramedReplica)
        assert replica.agent is not None
        assert replica.agent.session is not None
        await asyncio.sleep(4.5 * STEP)
        connection = replica.agent.session.connection
        replica.sockets[1].held = True
        connection.pause_writing()
        for weights in (1, 2):
            await asyncio.sleep(5 * STEP)
            await engines[0].update_weights({"weights": weights})
        await asyncio.sleep(20 * STEP)
        replica.sockets[1].release()
        connection.resume_writing()
        parts: dict[int, list[int]] = {0: [], 1: [], 2: []}
        async for chunk in stream:
            parts[chunk.weight_version] += chunk.token_ids
        assert all(parts.values())
        begun: list[int] = []
        for weights, ids in parts.items():
            wanted = toy_generate(prompt(0), params, weights=weights, begun=begun)
            assert wanted[: len(begun) + len(ids)] == begun + ids
            begun += ids
        assert len(begun) == count


@virtual
async def test_updates_that_are_asked_for_together_happen_in_order() -> None:
    engines = toys(2)
    async with local(engines) as dispatcher:
        updates = [dispatcher.update_weights({"weights": each}) for each in (1, 2, 3)]
        assert await asyncio.gather(*updates) == [1, 2, 3]
        assert [engine.weight_version for engine in engines] == [3, 3]
        result = await dispatcher.generate(prompt(0), LONG)
        assert result.token_ids == toy_generate(prompt(0), LONG, weights=3)


@virtual
async def test_an_update_goes_on_where_one_replica_is_lost() -> None:
    engines = toys(3)
    async with local(engines) as dispatcher:
        update = engines[1].update_weights

        async def lost(*arguments: Any, **options: Any) -> int:
            engines[1].lose()
            return await update(*arguments, **options)

        engines[1].update_weights = lost  # type: ignore[method-assign]
        assert await dispatcher.update_weights({"weights": 1}, version=7) == 7
        assert [engines[number].weight_version for number in (0, 2)] == [7, 7]
        assert dispatcher.weight_version == 7


@virtual
async def test_an_update_that_all_replicas_are_lost_in_fails() -> None:
    engines = toys(1)
    async with local(engines) as dispatcher:

        async def lost(*arguments: Any, **options: Any) -> int:
            engines[0].lose()
            raise EngineFailed("the device is lost")

        engines[0].update_weights = lost  # type: ignore[method-assign]
        with pytest.raises(EngineFailed, match="the device is lost"):
            await dispatcher.update_weights({"weights": 1})


SCORED = SamplingParams(max_tokens=5, ignore_eos=True, temperature=0, prompt_logprobs=1)


@virtual
async def test_logprobs_of_a_prompt_that_were_sent_before_an_update_are_all_sent_again() -> None:
    engines = toys(1, chunk_size=8, max_step_tokens=8, max_running_requests=4)
    async with framed(engines) as dispatcher:
        (replica,) = dispatcher._replicas
        assert isinstance(replica, FramedReplica)
        assert replica.agent is not None
        assert replica.agent.session is not None
        connection = replica.agent.session.connection
        connection.pause_writing()
        stream = dispatcher.generate(prompt(0, 64), SCORED)
        await asyncio.sleep(4.5 * STEP)
        connection.resume_writing()  # in the midst of the prompt
        await asyncio.sleep(STEP)
        assert 0 < len(record(stream).output.prompt_logprobs) < 63
        # Those of a toy are the same with all weights.
        sent = attempt_of(stream).prompt_logprobs
        sent[:] = [TokenLogprob(each.token_id, -1.0) for each in sent]
        await engines[0].update_weights({"weights": 1})
        result, wanted = await stream, await dispatcher.generate(prompt(0, 64), SCORED)
        assert (result.weight_version, result.identical) == (1, True)
        assert result.prompt_logprobs == wanted.prompt_logprobs
        assert result.token_ids == wanted.token_ids


@both
@virtual
async def test_what_is_restored_without_output_has_the_logprobs_of_the_weights_that_go_on(kind: Kind) -> None:
    engines = toys(1)
    async with kind(engines) as dispatcher:
        before = await dispatcher.generate(prompt(0), SCORED)
        stream = dispatcher.generate(prompt(0), SCORED)
        # Those of a toy are the same with all weights.
        scored = tuple(TokenLogprob(each.token_id, -1.0) for each in before.prompt_logprobs or () if each)
        checkpoint = dataclasses.replace(stream.checkpoint(), prompt_logprobs=scored)
        stream.close()
        await engines[0].update_weights({"weights": 1})
        result, wanted = await dispatcher.restore(checkpoint), await dispatcher.generate(prompt(0), SCORED)
        assert result.prompt_logprobs == wanted.prompt_logprobs


def refuse(engine: Toy, message: str) -> Callable[[], None]:
    """Its device refuses weights, until what is returned is called."""
    accept = engine.device.prepare_weights

    def prepare(given: Any, go_on: Any) -> int:
        raise ConfigError(message)

    def again() -> None:
        engine.device.prepare_weights = accept  # type: ignore[method-assign]

    engine.device.prepare_weights = prepare  # type: ignore[method-assign]
    return again


@virtual
async def test_what_the_first_replica_refuses_none_gets() -> None:
    engines = toys(3)
    async with local(engines) as dispatcher:
        refuse(engines[0], "norm: has another shape")
        with pytest.raises(ConfigError, match=r"^norm: has another shape$"):
            await dispatcher.update_weights({"weights": 1})
        assert [engine.weight_version for engine in engines] == [0, 0, 0]


@virtual
async def test_what_a_later_replica_refuses_the_others_get_and_it_gets_when_asked_once_more() -> None:
    engines = toys(4)
    async with local(engines) as dispatcher:
        again = [refuse(engines[number], "the files are gone") for number in (1, 3)]
        with pytest.raises(
            EngineError, match=r"version 200 \(local-0: 200, local-1: 0, .*: the files are gone"
        ):
            await dispatcher.update_weights({"weights": 1}, version=200)
        assert [engine.weight_version for engine in engines] == [200, 0, 200, 0]
        again[1]()
        with pytest.raises(EngineError, match="local-1: the files are gone"):
            await dispatcher.update_weights({"weights": 1}, version=200)
        again[0]()
        assert await dispatcher.update_weights({"weights": 1}, version=200) == 200
        assert [(engine.weight_version, engine.device.weights) for engine in engines] == [(200, 1)] * 4
        with pytest.raises(ConfigError, match="greater than 200"):
            await dispatcher.update_weights({"weights": 1}, version=200)


@virtual
async def test_an_update_that_is_cancelled_between_two_replicas_goes_on_when_asked_once_more() -> None:
    engines = toys(2)
    async with local(engines) as dispatcher:
        hold = asyncio.Event()
        update = engines[1].update_weights

        async def held(*arguments: Any, **options: Any) -> int:
            await hold.wait()
            return await update(*arguments, **options)

        engines[1].update_weights = held  # type: ignore[method-assign]
        task = asyncio.ensure_future(dispatcher.update_weights({"weights": 1}, version=7))
        while engines[0].weight_version == 0:
            await asyncio.sleep(STEP)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert [engine.weight_version for engine in engines] == [7, 0]
        hold.set()
        assert await dispatcher.update_weights({"weights": 1}, version=7) == 7
        assert [engine.weight_version for engine in engines] == [7, 7]


@virtual
async def test_replicas_of_different_versions_are_given_checkpoints_only() -> None:
    engines = toys(2)
    async with local(engines) as dispatcher:
        for weights in (1, 2):
            await dispatcher.update_weights({"weights": weights})
        await dispatcher.restart("local-1")
        assert [engine.weight_version for engine in engines] == [2, 0]
        different = r"different versions \(local-0: 2, local-1: 0\), and only a checkpoint"
        for version in (None, 2, 3):
            with pytest.raises(ConfigError, match=different):
                await dispatcher.update_weights({"weights": 2}, version=version)
        assert [engine.device.weights for engine in engines] == [2, 0]
        for engine in engines:
            engine.device.prepare_weights = lambda given, go_on: 3  # type: ignore[method-assign]
        assert await dispatcher.update_weights("a checkpoint") == 3
        assert [(engine.weight_version, engine.device.weights) for engine in engines] == [(3, 3)] * 2


@virtual
async def test_requests_that_come_during_an_update_go_to_the_replicas_that_serve() -> None:
    engines = toys(2)
    async with local(engines) as dispatcher:
        old = dispatcher.generate(prompt(0), LONG)
        await asyncio.sleep(2.5 * STEP)
        assert sent(dispatcher, [old])["local-0"]
        update = asyncio.ensure_future(dispatcher.update_weights({"weights": 1}, mode="wait"))
        await asyncio.sleep(STEP)
        results = [await dispatcher.generate(prompt(number), PARAMS) for number in range(1, 5)]
        assert not old.done, "it is waited for"
        assert [each.weight_version for each in results] == [0] * 4
        await update
        assert (await old).weight_version == 0
        streams = [dispatcher.generate(prompt(number), PARAMS) for number in range(4)]
        await asyncio.sleep(STEP)
        assert sorted(sent(dispatcher, streams).values()) == [2, 2]


class Blocks(Engine):
    """An engine of a scripted diffusion model in virtual time."""

    def __init__(self) -> None:
        config = EngineConfig(model="scripted", page_size=8, num_pages=64, max_running_requests=8)

        def launcher(_: EngineConfig) -> TimedLauncher:
            self.device = ScriptedDevice(num_slots=config.num_slots, mean_steps=6.0, variation=0.0)
            return TimedLauncher(self.device, lambda step: STEP)

        super().__init__(config, launcher=launcher, tokenizer=lambda _: ToyTokenizer())

    lose = Toy.lose


@pytest.mark.parametrize("steps", [12, 15])
@both
@virtual
async def test_half_a_block_goes_on_with_other_weights(kind: Kind, steps: int) -> None:
    engines = [Blocks(), Blocks()]
    params = LONG.changed(diffusion=DiffusionParams(algorithm="low_confidence"))
    async with kind(engines) as dispatcher:
        await engines[1].update_weights({"weights": 1})
        stream = dispatcher.generate([5, 6, 7], params)
        await asyncio.sleep((steps + 0.5) * STEP)
        before = list(record(stream).output.token_ids)
        assert (3 + len(before)) % 8, "a block is not complete"
        engines[0].lose()
        result = await stream
        assert result.token_ids[: len(before)] == before
        assert len(result.token_ids) == len(result.step_map or ()) == 60
        assert dispatcher.stats().diverged == 0
