"""Replicas with roles: prompts are computed on some, and go on in others with their KV."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from aioinfer import ConfigError, SamplingParams, StepFailed
from aioinfer.cli.serving import _engine
from aioinfer.config import EngineConfig, ServerConfig
from aioinfer.engine import Engine
from aioinfer.loop.holding import Prefix
from aioinfer.parallel import Dispatcher
from aioinfer.parallel import handover as handovers
from aioinfer.parallel.replica import Replica, Stored
from tests.engine.simulation import settle
from tests.engine.test_restoring import THINKS
from tests.model.harness import require
from tests.parallel.framed import Kind, both, framed
from tests.parallel.test_failover import chat, check_same, diffusion, interrupted, read, toy_requests
from tests.parallel.toys import (
    ENDLESS,
    STEP,
    Toy,
    attempt_of,
    end,
    expected,
    prompt,
    sent,
    toys,
    turn,
    virtual,
)
from tests.tiers import SECONDS, grid, rest

ROLES: dict[str, Any] = {"roles": ["prefill", "decode"], "prefill_tokens": 32}
LONG = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0)
SHORT = SamplingParams(max_tokens=4, ignore_eos=True, temperature=0)


def two(**settings: Any) -> list[Toy]:
    return toys(2, deterministic=True, **settings)


def where(stream: Any) -> str:
    attempt = attempt_of(stream)
    return "" if attempt is None else attempt.replica.name


def computed(engine: Engine) -> tuple[int, int]:
    """Tokens of prompts that it has computed, and of outputs."""
    stats = engine.stats()
    return stats.prefill_tokens, stats.output_tokens


# -- where what is computed ----------------------------------------------------------------------------


@both
@virtual
async def test_a_prompt_is_computed_on_one_replica_and_its_stream_in_the_other(kind: Kind) -> None:
    engines = two()
    async with kind(engines, **ROLES) as dispatcher:
        ids = prompt(1, 64)
        stream = dispatcher.generate(ids, LONG)
        await turn()
        assert where(stream) == "local-0"
        result = await stream
        assert result.token_ids == expected(ids, LONG)
        assert (result.resumed, result.identical, result.usage.cached_tokens) == (0, True, 0)
        await asyncio.sleep(1.0)
        # The last known token is always computed, and nothing else of the prompt.
        (first, few), (again, rest_) = map(computed, engines)
        assert (first, again) == (64, 1)
        assert few <= 4
        assert rest_ >= 36
        stats = dispatcher.stats()
        assert (stats.handovers, stats.handovers_without_pages, stats.resumed) == (1, 0, 0)
        for engine in engines:
            await settle(engine)


@both
@virtual
async def test_short_prompts_are_no_matter_of_replicas_for_long_ones(kind: Kind) -> None:
    engines = two()
    async with kind(engines, **ROLES) as dispatcher:
        streams = [dispatcher.generate(prompt(seed, 31), SHORT) for seed in range(8)]
        await turn()
        assert sent(dispatcher, streams) == {"local-1": 8}
        await asyncio.gather(*streams)
        assert dispatcher.stats().handovers == 0


@virtual
async def test_a_prompt_whose_beginning_is_cached_is_short() -> None:
    async with Dispatcher(two(), **ROLES) as dispatcher:
        ids = prompt(1, 64)
        await dispatcher.generate(ids, LONG)
        again = dispatcher.generate(ids + prompt(2, 16), SHORT)
        await turn()
        assert where(again) == "local-1"
        await again


@both
@virtual
async def test_what_ends_with_its_first_token_ends_where_that_is_computed(kind: Kind) -> None:
    engines = two()
    async with kind(engines, **ROLES) as dispatcher:
        ids = prompt(3, 64)
        one = dispatcher.generate(ids, LONG.changed(max_tokens=1))
        none = dispatcher.generate(ids, LONG.changed(max_tokens=0))
        stops = dispatcher.generate(ids, LONG.changed(stop_token_ids=(expected(ids, LONG)[0],)))
        assert (await one).token_ids == expected(ids, LONG)[:1]
        assert (await none).token_ids == []
        assert (await stops).finish_reason == "stop"
        assert dispatcher.stats().handovers == 0
        assert computed(engines[1]) == (0, 0)


@virtual
async def test_long_prompts_that_wait_hold_up_no_short_ones_and_no_streams() -> None:
    engines = [Toy(max_running_requests=1), Toy(max_running_requests=64)]
    async with Dispatcher(engines, **ROLES) as dispatcher:
        many = [dispatcher.generate(prompt(seed, 512), LONG) for seed in range(4)]
        short = dispatcher.generate(prompt(9, 8), SHORT)
        await turn()
        assert sent(dispatcher, [*many, short]) == {"local-0": 1, "local-1": 1, "": 3}
        await short
        assert sum(stream.done for stream in many) == 0
        for stream in many:
            await stream


@virtual
async def test_streams_stay_while_no_replica_has_a_slot_for_them() -> None:
    """They go on where they are, and leave when there is one."""
    engines = [Toy(max_running_requests=8), Toy(max_running_requests=1)]
    async with Dispatcher(engines, **ROLES) as dispatcher:
        streams = [dispatcher.generate(prompt(seed, 64), ENDLESS) for seed in range(3)]
        await asyncio.sleep(10 * STEP)
        assert sent(dispatcher, streams) == {"local-0": 2, "local-1": 1}
        assert all(len(stream.result().token_ids) > 2 for stream in streams)
        for stream in streams:
            if where(stream) == "local-1":
                stream.close()
        await asyncio.sleep(10 * STEP)
        assert sorted(where(each) for each in streams if not each.done) == ["local-0", "local-1"]
        await end(streams)


@both
@virtual
async def test_a_role_that_nobody_has_at_the_moment_is_everybodys(kind: Kind) -> None:
    engines = two()
    async with kind(engines, **ROLES) as dispatcher:
        dispatcher._started().when_lost = None
        first, second = dispatcher._replicas
        running = dispatcher._started()
        running.lost(second, RuntimeError("it is gone"))
        short, ids = dispatcher.generate(prompt(1, 8), ENDLESS), prompt(2, 64)
        long = dispatcher.generate(ids, ENDLESS)
        await asyncio.sleep(20 * STEP)
        assert {where(short), where(long)} == {first.name}
        await dispatcher.restart(second.name)
        await asyncio.sleep(20 * STEP)
        assert {where(short), where(long)} == {second.name}
        await dispatcher.restart(first.name)
        running.lost(first, RuntimeError("it is gone"))
        third = dispatcher.generate(prompt(3, 64), ENDLESS)
        await turn()
        assert where(third) == second.name
        await asyncio.sleep(20 * STEP)
        for stream, start in ((long, ids), (third, prompt(3, 64))):
            found = stream.result().token_ids
            assert found == expected(start, ENDLESS)[: len(found)]
            assert len(found) > 5
        await end([short, long, third])


@virtual
async def test_an_engine_that_is_added_has_a_role() -> None:
    async with Dispatcher(two(), **ROLES) as dispatcher:
        await dispatcher.remove("local-0")
        assert await dispatcher.add(Toy(deterministic=True), role="prefill") == "local-2"
        stream = dispatcher.generate(prompt(1, 64), LONG)
        await turn()
        assert where(stream) == "local-2"
        assert (await stream).identical
        assert (dispatcher.stats().handovers, dispatcher.stats().handovers_without_pages) == (1, 0)


# -- nothing shows -------------------------------------------------------------------------------------


@rest(SECONDS)
@both
@virtual
async def test_no_parameter_shows_that_a_stream_was_handed_over(kind: Kind) -> None:
    settings = {"longest": 96, "num_pages": 64, "deterministic": True, **THINKS}
    engines = [Toy(seed=seed, **settings) for seed in (1, 2)]
    options: dict[str, Any] = {"roles": ["prefill", "decode"], "prefill_tokens": 1}
    async with kind(engines, **options) as dispatcher, Dispatcher([Toy(longest=96, **THINKS)]) as plain:
        for number, (ids, params) in enumerate(toy_requests()):
            seeded = params.changed(seed=number)
            wanted = await plain.generate(ids, seeded)
            found = await read(dispatcher.generate(ids, seeded))
            check_same(found, wanted)
        assert dispatcher.stats().handovers > 10


@rest(SECONDS)
@both
@pytest.mark.parametrize("every", grid([3], [1]))
@virtual
async def test_any_replica_may_be_lost_at_any_token(kind: Kind, every: int) -> None:
    """The one that computes the prompt, the one that goes on with it, and either amid the handover."""
    engines = [Toy(longest=96, num_pages=64, deterministic=True) for _ in range(3)]
    options: dict[str, Any] = {"roles": ["prefill", "decode", "decode"], "prefill_tokens": 8}
    async with kind(engines, **options) as dispatcher:
        dispatcher._started().when_lost = None
        ids = prompt(5, 40)
        wanted = await dispatcher.generate(ids, LONG)
        for at in range(0, 40, every):
            dispatcher.flush_cache()
            found, lost = await interrupted(dispatcher, ids, LONG, at)
            assert lost
            check_same(found, wanted)
        for engine in engines:
            await settle(engine)


@rest(SECONDS)
@pytest.mark.parametrize("victim", [0, 1])
@both
@virtual
async def test_a_replica_may_be_lost_at_any_time_of_a_handover(kind: Kind, victim: int) -> None:
    ids = prompt(6, 64)
    for tenth in range(0, 60, 2):
        engines = two()
        async with kind(engines, **ROLES) as dispatcher:
            dispatcher._started().when_lost = None
            stream = dispatcher.generate(ids, LONG)
            await asyncio.sleep(tenth * STEP / 10)
            engines[victim].lose()
            result = await stream
            assert (result.token_ids, result.identical) == (expected(ids, LONG), True)
            await settle(engines[1 - victim])


@both
@virtual
async def test_pages_that_are_not_stored_in_time_are_computed_again(
    kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream waits for them for five seconds, at most."""

    async def never(self: Replica, prefix: Prefix) -> Stored:
        await asyncio.Event().wait()
        raise AssertionError

    engines = two()
    async with kind(engines, **ROLES) as dispatcher:
        monkeypatch.setattr(type(dispatcher._replicas[0]), "store_prefix", never)
        loop, ids = asyncio.get_running_loop(), prompt(7, 64)
        begun = loop.time()
        result = await dispatcher.generate(ids, LONG)
        assert result.token_ids == expected(ids, LONG)
        assert 5 <= loop.time() - begun < 6
        assert dispatcher.stats().handovers_without_pages == 1
        assert computed(engines[1])[0] == 65
        gone = dispatcher.generate(prompt(8, 64), LONG, running_timeout=0.2)
        with pytest.raises(TimeoutError):
            await gone
        left = dispatcher.generate(prompt(9, 64), LONG)
        await anext(left)
        left.close()
        assert not len(dispatcher._started().handovers)


@both
@virtual
async def test_a_full_exchange_costs_time_and_nothing_else(kind: Kind) -> None:
    engines = two()
    async with kind(engines, **ROLES, exchange_gib=1e-8) as dispatcher:
        ids = prompt(8, 64)
        result = await dispatcher.generate(ids, LONG)
        assert (result.token_ids, result.identical) == (expected(ids, LONG), True)
        assert dispatcher.stats().handovers_without_pages == 1
        assert computed(engines[1])[0] == 65


@both
@virtual
async def test_a_stream_that_goes_on_before_its_pages_are_there_is_slower_and_not_wrong(
    kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = two()
    async with kind(engines, **ROLES) as dispatcher:
        store = type(dispatcher._replicas[0]).store_prefix
        storing: list[asyncio.Task[Stored]] = []

        async def early(self: Any, prefix: Prefix) -> Stored:
            storing.append(asyncio.ensure_future(store(self, prefix)))
            return Stored(len(prefix.ids))

        monkeypatch.setattr(type(dispatcher._replicas[0]), "store_prefix", early)
        for seed in range(5):
            ids = prompt(seed, 64)
            assert (await dispatcher.generate(ids, LONG)).token_ids == expected(ids, LONG)
        await asyncio.gather(*storing)


@virtual
async def test_a_page_under_the_name_of_another_one_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests can tell: a relay that mixes up two pages is found by what reads them."""
    relay = handovers.relay

    async def mixed(source: Replica, target: Replica, names: Sequence[bytes]) -> int:
        fetch = source.fetch
        other = dict(zip(names, [*names[1:], names[0]], strict=True))
        monkeypatch.setattr(source, "fetch", lambda name, at: fetch(other[name], at), raising=False)
        return await relay(source, target, names)

    monkeypatch.setattr(handovers, "relay", mixed)
    async with framed(two(), **ROLES) as dispatcher:
        ids = prompt(1, 64)
        with pytest.raises(StepFailed, match="reads KV that is not of its own tokens"):
            await dispatcher.generate(ids, LONG)


@both
@virtual
async def test_a_page_that_is_stored_before_it_is_written_would_be_seen(kind: Kind) -> None:
    engines = two()
    async with kind(engines, **ROLES) as dispatcher:
        device = engines[0].device
        device.page_views = lambda page: [memoryview(bytearray(len(view))) for view in views(page)]  # type: ignore[method-assign]
        views = type(device).page_views.__get__(device)
        with pytest.raises(StepFailed, match="reads KV that is not of its own tokens"):
            await dispatcher.generate(prompt(1, 64), LONG)


@virtual
async def test_replicas_of_another_arithmetic_are_handed_nothing() -> None:
    engines = [Toy(deterministic=True), Toy(deterministic=True, quantization="int8")]
    async with Dispatcher(engines, **ROLES) as dispatcher:
        ids = prompt(1, 64)
        result = await dispatcher.generate(ids, LONG)
        assert (result.token_ids, result.identical) == (expected(ids, LONG), True)
        assert dispatcher.stats().handovers == 0


@both
@virtual
async def test_vectors_of_long_prompts_are_computed_where_prompts_are(kind: Kind) -> None:
    engines = two()
    async with kind(engines, **ROLES) as dispatcher, Dispatcher(two()) as plain:
        ids = prompt(1, 64)
        wanted, found = [(await each.embed([ids]))[0].vector for each in (plain, dispatcher)]
        assert (found == wanted).all()
        assert computed(engines[1]) == (0, 0)


@rest(SECONDS)
@pytest.mark.parametrize("kinds", [chat, diffusion])
async def test_every_kind_of_request_to_a_bundled_model_is_handed_over(kinds: Any) -> None:
    """Of a diffusion model, when its first block is done."""
    require("native")
    (settings, _), asked = kinds()
    config = EngineConfig(**settings, deterministic=True)
    async with Dispatcher([Engine(config)]) as plain:
        wanted = await asyncio.gather(*[plain.generate(*each) for each in asked])
    engines = [Engine(config), Engine(config)]
    async with Dispatcher(engines, roles=["prefill", "decode"], prefill_tokens=1) as dispatcher:
        found = await asyncio.gather(*[read(dispatcher.generate(*each)) for each in asked])
        for each, result in zip(found, wanted, strict=True):
            check_same(each, result)
        assert dispatcher.stats().handovers > len(asked) / 2
        assert engines[1].stats().cached_tokens > 0


# -- what is refused -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"roles": ["prefill"]}, "roles: 1 for 2 replicas"),
        ({"roles": "prefill"}, "roles must be a list with one role per replica"),
        ({"roles": ["prefill", "pre"]}, "role must be one of prefill, decode, both, got 'pre'"),
        ({"roles": ["prefill", "prefill"]}, "at least one replica must have the role 'decode' or 'both'"),
        ({"roles": ["decode", "decode"]}, "at least one replica must have the role 'prefill' or 'both'"),
        ({"prefill_tokens": 0}, "prefill_tokens must be a positive number of tokens, got 0"),
        ({"exchange_gib": -1}, "exchange_gib must be a positive number of GiB, got -1"),
    ],
)
def test_wrong_roles_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Dispatcher(toys(2), **options)


@both
@virtual
async def test_engines_without_a_prefix_cache_have_no_roles(kind: Kind) -> None:
    dispatcher = kind(two(prefix_cache=False), **ROLES)
    with pytest.raises(ConfigError, match="roles: an engine without a prefix cache"):
        await dispatcher.start()
    assert dispatcher.closed


def test_a_server_has_so_many_replicas_for_prompts() -> None:
    config = ServerConfig(replicas=3, prefill_replicas=1, prefill_tokens=100, exchange_gib=0.5)
    dispatcher = _engine(EngineConfig(), config)
    assert isinstance(dispatcher, Dispatcher)
    assert [replica.role for replica in dispatcher._replicas] == ["prefill", "decode", "decode"]
    assert (dispatcher._prefill_tokens, dispatcher._exchange_gib) == (100, 0.5)
    assert ServerConfig(replicas=3).roles == []
    for replicas in (1, 2):
        with pytest.raises(ConfigError, match=f"prefill_replicas must be fewer than replicas, .* {replicas}"):
            ServerConfig(replicas=replicas, prefill_replicas=2)
