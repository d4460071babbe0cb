"""Replicas that are not heard for a while, and are not lost."""

from __future__ import annotations

import asyncio

import pytest

from aioinfer.parallel import Dispatcher
from aioinfer.parallel.connection import BEAT, LOST, SILENT
from aioinfer.parallel.remote import SocketReplica
from aioinfer.params import SamplingParams
from tests.parallel.framed import framed
from tests.parallel.toys import PARAMS, attempt_of, expected, placed, prompt, toys, virtual

LONG = SamplingParams(max_tokens=400, ignore_eos=True, temperature=0)
#: seconds after which it is noticed, for sure
NOTICED = (SILENT + 2) * BEAT


def states(dispatcher: Dispatcher) -> list[str]:
    return [each.state for each in dispatcher.stats().replicas]


@virtual
async def test_streams_survive_when_all_replicas_are_silent() -> None:
    async with framed(toys(2)) as dispatcher:
        wanted = [expected(prompt(seed), LONG) for seed in range(6)]
        streams = [dispatcher.generate(prompt(seed), LONG) for seed in range(6)]
        await placed(dispatcher, streams)
        for replica in dispatcher._replicas:
            replica.hang(1.5 + NOTICED)  # type: ignore[attr-defined]
        await asyncio.sleep(NOTICED)
        assert states(dispatcher) == ["silent", "silent"]
        assert dispatcher.degraded
        assert not dispatcher.stats().parts  # health finds nothing that computes
        waiting = dispatcher.generate(prompt(9), PARAMS)
        await asyncio.sleep(BEAT)
        assert attempt_of(waiting) is None
        assert [each.token_ids for each in await asyncio.gather(*streams)] == wanted
        assert len((await waiting).token_ids) == 8
        assert states(dispatcher) == ["ready", "ready"]
        assert not dispatcher.degraded
        assert dispatcher.stats().resumed == 0


@virtual
async def test_a_silent_replica_gets_no_new_work_until_it_is_heard() -> None:
    async with framed(toys(2)) as dispatcher:
        silent, other = dispatcher._replicas
        silent.hang(5.0)  # type: ignore[attr-defined]
        await asyncio.sleep(NOTICED)
        assert states(dispatcher) == ["silent", "ready"]
        streams = [dispatcher.generate(prompt(seed), PARAMS) for seed in range(8)]
        assert await placed(dispatcher, streams) == {other.name: 8}
        await asyncio.gather(*streams)
        await asyncio.sleep(5.0)
        streams = [dispatcher.generate(prompt(seed), PARAMS) for seed in range(8)]
        assert await placed(dispatcher, streams) == {silent.name: 4, other.name: 4}
        await asyncio.gather(*streams)


@virtual
async def test_after_a_long_silence_streams_go_on_elsewhere() -> None:
    async with framed(toys(2)) as dispatcher:
        stream = dispatcher.generate(prompt(1), LONG)
        await anext(stream)
        replica = attempt_of(stream).replica
        replica.hang(1000.0)
        await asyncio.sleep((LOST - 2) * BEAT)
        assert attempt_of(stream).replica is replica
        assert (await stream).token_ids == expected(prompt(1), LONG)
        assert dispatcher.stats().resumed == 1
        assert sorted(states(dispatcher)) == ["lost", "ready"]
        # Either end may be the first to notice.
        assert str(replica.cause) in ("no frame for 30 s", "its connection was closed")


@virtual
async def test_an_output_that_only_a_silent_replica_may_continue_holds_up_no_other() -> None:
    """``identical``: the weights of the others are other ones."""
    engines = [*toys(1), *toys(1, quantization="int8")]
    async with framed(engines, on_loss="identical") as dispatcher:
        first, _ = dispatcher._replicas
        stream = dispatcher.generate(prompt(1), LONG)
        await placed(dispatcher, [stream])
        await anext(stream)
        assert attempt_of(stream).replica is first
        first.hang(6.0)  # type: ignore[attr-defined]
        await asyncio.sleep(NOTICED)
        running = dispatcher._started()
        attempt = attempt_of(stream)
        running._leave(attempt, abort=True)  # as one that is sent away
        running._again(attempt.record)
        assert len((await dispatcher.generate(prompt(2), PARAMS)).token_ids) == 8
        assert len((await stream).token_ids) == 400


@virtual
async def test_a_silent_replica_can_be_drained_and_removed() -> None:
    async with framed(toys(2)) as dispatcher:
        streams = [dispatcher.generate(prompt(seed), LONG) for seed in range(4)]
        await placed(dispatcher, streams)
        silent, other = dispatcher._replicas
        silent.hang(1000.0)  # type: ignore[attr-defined]
        await asyncio.sleep(NOTICED)
        await dispatcher.remove(silent.name)
        assert await placed(dispatcher, streams) == {other.name: 4}
        assert [len(each.token_ids) for each in await asyncio.gather(*streams)] == [400] * 4


@virtual
async def test_a_process_that_has_ended_is_lost_though_its_socket_is_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A child of its own has the socket, too."""
    async with framed(toys(2)) as dispatcher:
        first, second = dispatcher._replicas
        monkeypatch.setattr(SocketReplica, "ended", property(lambda self: self is first))
        await asyncio.sleep(NOTICED)
        assert states(dispatcher) == ["ready", "ready"]  # it is heard
        for replica in (first, second):
            replica.hang(3.0)  # type: ignore[attr-defined]
        await asyncio.sleep(NOTICED)
        assert states(dispatcher) == ["lost", "silent"]
        assert "its process has ended" in str(first.cause)
