"""Sessions: the same tokens as without, whatever becomes of their KV, and only the new ones computed."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from aioinfer import Result, SamplingParams, Session, errors
from aioinfer.engine import Engine
from aioinfer.scheduling.audit import audit
from tests.engine.conftest import Gate, MakeEngine
from tests.engine.simulation import settle
from tests.parallel.toys import Toy, virtual
from tests.toys import ToyDevice, toy_generate
from tests.toys.adapters import ToyAdapter, write_toy_adapter

SIZE = 4
SHORT = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=1)
ENDLESS = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
FIRST = list(range(1, 22))
SECOND, THIRD = [50, 51, 52], [40, 41]


def seeded(seed: int) -> SamplingParams:
    return SamplingParams(temperature=1, seed=seed, max_tokens=6, ignore_eos=True, logprobs=1)


async def plain(make_engine: MakeEngine, prompt: Sequence[int], params: SamplingParams) -> Result:
    """What an engine without a cache says."""
    async with make_engine(prefix_cache=False) as engine:
        return await engine.generate(list(prompt), params)


def held(count: int) -> int:
    """Tokens of a session of so many whose KV can be held: whole pages without the last token."""
    return (count - 1) // SIZE * SIZE


async def filled(engine: Engine, first: int = 60) -> None:
    """Other requests have used every page since."""
    longest = engine.info.max_model_len - 8
    for each in (first, first + 1):
        await engine.generate([each] * longest, SHORT)


# -- turns -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"overlap_steps": 2}, {"chunk_size": 3}], ids=str)
async def test_turns_continue_the_tokens_exactly_and_compute_the_new_ones_only(
    make_engine: MakeEngine, settings: dict[str, Any]
) -> None:
    ids: list[int] = []
    async with make_engine(**settings) as engine, engine.session() as session:
        for turn in (FIRST, SECOND, THIRD, None):
            prompt = [*ids, *(turn or ())]
            result = await session.generate(turn, SHORT)
            assert list(result.prompt_token_ids) == prompt
            expected = await plain(make_engine, prompt, SHORT)
            assert (result.token_ids, result.logprobs) == (expected.token_ids, expected.logprobs)
            assert result.usage.cached_tokens == held(len(ids) or 1)
            ids = [*prompt, *result.token_ids]
            assert session.token_ids == tuple(ids)
            assert session.held_tokens == held(len(ids)) == engine.stats().held_tokens
        assert engine.stats().sessions == 1
        session.close()
        assert (engine.stats().sessions, engine.stats().held_tokens) == (0, 0)
        assert session.num_tokens == len(ids), "what it contains can be read still"
        await settle(engine)


async def test_text_is_appended_as_text(make_engine: MakeEngine) -> None:
    async with make_engine() as engine, engine.session() as session:
        first = await session.generate("abcdef", SHORT)
        second = await session.generate("gh", SHORT)
        tokenizer = engine.tokenizer
        assert tokenizer is not None
        prompt = [*tokenizer.encode("abcdef"), *first.token_ids, *tokenizer.encode_part("gh")]
        assert list(second.prompt_token_ids) == prompt
        assert second.token_ids == toy_generate(prompt, SHORT)


@pytest.mark.parametrize("way", ["await", "iterate", "keep", "drop"])
async def test_a_turn_has_ended_when_its_output_has_however_it_is_read(
    make_engine: MakeEngine, way: str
) -> None:
    output = toy_generate(FIRST, SHORT)
    async with make_engine() as engine, engine.session() as session:
        stream = session.generate(FIRST, SHORT)
        if way == "await":
            await stream
        elif way == "iterate":
            assert [token async for chunk in stream for token in chunk.token_ids] == output
        else:
            while not stream.done:
                await asyncio.sleep(0)
            if way == "drop":
                del stream
        assert session.token_ids == (*FIRST, *output)
        assert session.held_tokens == held(session.num_tokens)
        assert not session.in_turn
        assert (await session.generate(SECOND, SHORT)).usage.cached_tokens == held(27)


@pytest.mark.parametrize("way", ["cancel", "close", "drop", "abort", "fail", "timeout"])
async def test_a_turn_that_does_not_end_leaves_the_session_as_it_was(
    make_engine: MakeEngine, gate: Gate, way: str
) -> None:
    gate.open = True
    async with make_engine(fault=gate) as engine, engine.session() as session:
        await session.generate(FIRST, SHORT)
        before = session.token_ids
        gate.open = False
        options: dict[str, Any] = {"request_id": "turn"}
        if way == "timeout":
            options["running_timeout"] = 1e-9
        stream = session.generate(SECOND, ENDLESS, **options)
        reader = asyncio.ensure_future(anext(stream))
        await asyncio.to_thread(gate.arrived.acquire)
        assert session.in_turn or way == "timeout"
        if way == "cancel":
            reader.cancel()
        elif way == "close":
            stream.close()
        elif way == "abort":
            assert engine.abort("turn") == 1
        elif way == "fail":
            runtime = engine._serving()
            (opened,) = runtime.open.values()
            runtime.end(opened, errors.StepFailed("injected"))
        gate.release()
        await asyncio.wait([reader])
        if not reader.cancelled():
            reader.exception()
        del stream, reader
        gc.collect()
        while session.in_turn:
            await asyncio.sleep(0)
        assert session.token_ids == before
        assert session.held_tokens == held(len(before))
        result = await session.generate(SECOND, SHORT)
        assert result.token_ids == toy_generate([*before, *SECOND], SHORT)
        assert result.usage.cached_tokens >= held(len(before))
        session.close()
        await settle(engine)


async def test_a_turn_is_rewritten_before_its_end_only(make_engine: MakeEngine) -> None:
    async with make_engine() as engine, engine.session() as session:
        stream = session.generate([1, 2, 3], SamplingParams(max_tokens=10, ignore_eos=True))
        await anext(stream)
        stream.inject([9], at=0)
        result = await stream
        assert [*session.token_ids] == [1, 2, 3, *result.token_ids]
        with pytest.raises(errors.InvalidRequest, match="it has ended: fork it instead"):
            stream.rewind(3)
        assert stream.result().token_ids == result.token_ids
        await settle(engine)


async def test_two_turns_at_once_are_refused(make_engine: MakeEngine) -> None:
    async with make_engine() as engine, engine.session() as session:
        stream = session.generate(FIRST, SHORT)
        with pytest.raises(errors.InvalidRequest, match="session: has a turn under way"):
            session.generate(SECOND, SHORT)
        await stream
        await session.generate(SECOND, SHORT)


async def test_a_turn_that_is_refused_changes_nothing(make_engine: MakeEngine) -> None:
    async with make_engine(max_queued_requests=1) as engine, engine.session(cache_salt="a") as session:
        with pytest.raises(errors.InvalidRequest, match="prompt: is empty"):
            session.generate(None, SHORT)
        await session.generate(FIRST, SHORT)
        before = session.token_ids
        for prompt, options, field in (
            ([64], {}, "prompt"),
            ([1] * 300, {}, "prompt"),
            ([{"role": "user", "content": "hi"}], {}, "prompt"),
            (engine.prompt([1]), {}, "prompt"),
            ([1], {"adapter": "x"}, "adapter"),
            ([1], {"cache_salt": "b"}, "cache_salt"),
        ):
            with pytest.raises(errors.InvalidRequest) as refused:
                await session.generate(prompt, SHORT, **options)  # type: ignore[arg-type]
            assert refused.value.field == field
        with pytest.raises(errors.InvalidRequest, match="session: is no chat"):
            session.chat("hello")
        assert (session.token_ids, session.in_turn) == (before, False)
        assert session.held_tokens == held(len(before))


# -- forks -----------------------------------------------------------------------------------------------


async def test_ten_forks_say_what_ten_requests_say(make_engine: MakeEngine) -> None:
    async with make_engine(num_pages=128) as engine, engine.session() as session:
        await session.generate(FIRST, SHORT)
        forks = [session.fork() for _ in range(10)]
        assert engine.stats().sessions == 11
        assert engine.stats().held_tokens == held(27), "held by all, counted once"
        assert all(fork._state is session._state for fork in forks)
        results = await asyncio.gather(*(fork.generate(SECOND, seeded(at)) for at, fork in enumerate(forks)))
        for seed, (fork, result) in enumerate(zip(forks, results, strict=True)):
            prompt = [*session.token_ids, *SECOND]
            expected = await plain(make_engine, prompt, seeded(seed))
            assert (result.token_ids, result.logprobs) == (expected.token_ids, expected.logprobs)
            assert result.usage.cached_tokens >= held(27), "or what another fork has computed"
            assert fork.token_ids == (*prompt, *result.token_ids)
        assert len({fork.token_ids for fork in forks}) == 10
        for fork in forks:
            fork.close()
        assert session.held_tokens == held(27) == engine.stats().held_tokens
        session.close()
        await settle(engine)


async def test_a_fork_during_a_turn_is_of_the_state_before_it(make_engine: MakeEngine) -> None:
    async with make_engine() as engine, engine.session() as session:
        empty = session.fork()
        await session.generate(FIRST, SHORT)
        before = session.token_ids
        stream = session.generate(SECOND, SHORT)
        fork = session.fork()
        assert not fork.in_turn
        other, one = await asyncio.gather(fork.generate(THIRD, SHORT), stream)
        assert one.token_ids == toy_generate([*before, *SECOND], SHORT)
        assert other.token_ids == toy_generate([*before, *THIRD], SHORT)
        assert (empty.num_tokens, empty.held_tokens) == (0, 0)


# -- whatever becomes of the KV --------------------------------------------------------------------------


async def test_what_is_held_is_evicted_last_and_delays_nobody(make_engine: MakeEngine) -> None:
    async with make_engine(num_pages=32, max_held_share=1.0) as engine, engine.session() as session:
        await session.generate(FIRST, SHORT)
        others = [[each] * 40 for each in range(30, 38)]
        for prompt in others:
            assert (await engine.generate(prompt, SHORT)).token_ids == toy_generate(prompt, SHORT)
        assert session.held_tokens == held(27), "others were evicted, though they were used since"
        assert engine.stats().held_pages_lost == 0
        await filled(engine)  # with all pages, held or not
        stats = engine.stats()
        assert session.held_tokens < held(27)
        assert stats.held_pages_lost == (held(27) - session.held_tokens) // SIZE
        assert stats.retractions == 0
        result = await session.generate(SECOND, SHORT)
        assert result.token_ids == toy_generate(session.token_ids[:30], SHORT)
        assert session.held_tokens == held(36), "held again"
        session.close()
        await settle(engine)


@pytest.mark.parametrize("snapshots", [None, 8, 1, 0])
async def test_a_flushed_session_is_computed_again(make_engine: MakeEngine, snapshots: int | None) -> None:
    async with (
        make_engine(device=ToyDevice(snapshots=snapshots), state_snapshot_tokens=1) as engine,
        engine.session() as session,
    ):
        await session.generate(FIRST, SHORT)
        before = session.held_tokens
        engine.flush_cache()
        assert session.held_tokens == engine.stats().held_tokens == 0
        assert engine.stats().held_pages_lost * SIZE >= before
        assert session.fork().held_tokens == 0
        result = await session.generate(SECOND, SHORT)
        assert result.usage.cached_tokens == 0
        assert result.token_ids == toy_generate([*session.token_ids[:27], *SECOND], SHORT)
        audit(engine._core.scheduler)


async def test_flushing_amid_a_turn_changes_no_token(make_engine: MakeEngine, gate: Gate) -> None:
    gate.open = True
    async with make_engine(fault=gate) as engine, engine.session() as session:
        await session.generate(FIRST, SHORT)
        gate.open = False
        stream = session.generate(SECOND, SHORT)
        await asyncio.to_thread(gate.arrived.acquire)
        engine.flush_cache()
        gate.release()
        assert (await stream).token_ids == toy_generate([*session.token_ids[:27], *SECOND], SHORT)
        assert session.held_tokens == 0, "what follows a flushed prefix is not cached"
        assert (await session.generate(THIRD, SHORT)).token_ids == toy_generate(
            [*session.token_ids[:38]], SHORT
        )
        assert session.held_tokens == held(44)
        session.close()
        await settle(engine)


@pytest.mark.parametrize("snapshots", [8, 2])
async def test_of_a_recurrent_model_what_follows_the_last_state_is_computed_again(
    make_engine: MakeEngine, snapshots: int
) -> None:
    """States are kept at the last page boundary of a prompt: an answer is computed again, once."""
    async with (
        make_engine(device=ToyDevice(snapshots=snapshots), state_snapshot_tokens=1) as engine,
        engine.session() as session,
    ):
        cached = []
        for turn in (FIRST, SECOND, THIRD):
            prompt = [*session.token_ids, *turn]
            result = await session.generate(turn, SHORT)
            assert result.token_ids == toy_generate(prompt, SHORT)
            cached.append(result.usage.cached_tokens)
            if snapshots == 8:
                assert session.held_tokens == held(len(prompt))
        assert cached == [0, held(21), held(30)] or snapshots < 8
        await filled(engine)
        result = await session.generate(None, SHORT)
        assert result.token_ids == toy_generate(session.token_ids[:44], SHORT)
        session.close()
        await settle(engine)


async def test_other_weights_compute_a_session_again(make_engine: MakeEngine) -> None:
    async with make_engine(max_held_share=1.0) as engine, engine.session() as session:
        await session.generate(FIRST, SHORT)
        await engine.update_weights({"weights": 1})
        assert session.held_tokens == 0
        result = await session.generate(SECOND, SHORT)
        assert result.usage.cached_tokens == 0
        assert result.token_ids == toy_generate([*session.token_ids[:27], *SECOND], SHORT, weights=1)
        assert session.held_tokens == held(36)
        await engine.update_weights({"weights": 2}, mode="wait")
        stream = session.generate(THIRD, ENDLESS)
        await anext(stream)
        await engine.update_weights({"weights": 3})
        await stream
        assert session.held_tokens == held(session.num_tokens), "as the newest weights have it"
        session.close()
        await settle(engine)


async def test_sessions_of_two_adapters_and_of_two_salts_share_nothing(tmp_path: Path) -> None:
    paths = {name: write_toy_adapter(tmp_path / name, name) for name in "ab"}

    async def check(engine: Engine, **options: Any) -> None:
        adapter = options.get("adapter")
        key = 0 if adapter is None else ToyAdapter.read(paths[adapter]).key
        session = engine.session(**options)
        for turn in (FIRST, SECOND):
            prompt, before = [*session.token_ids, *turn], session.num_tokens
            result = await session.generate(turn, SHORT)
            assert result.token_ids == toy_generate(prompt, SHORT, adapter=key)
            assert result.usage.cached_tokens == held(before or 1)

    def run() -> None:
        @virtual
        async def inner() -> None:
            async with Toy() as engine:
                for name, path in paths.items():
                    await engine.load_adapter(name, path)
                for options in ({}, {"adapter": "a"}, {"adapter": "b"}, {"cache_salt": "s"}):
                    await check(engine, **options)

        inner()

    await asyncio.to_thread(run)


async def test_a_diffusion_session_goes_on_at_the_border_of_a_block(make_engine: MakeEngine) -> None:
    from tests.engine.block_parity import to_the_end
    from tests.engine.block_worlds import decode
    from tests.engine.test_block_prefixes import LONGEST, scripted, tokens

    engine, device = scripted(make_engine)
    params = to_the_end(None, 6)
    async with engine, engine.session() as session:
        for turn, cached in ((tokens(9), 0), (tokens(5, 1), 12)):
            prompt = [*session.token_ids, *turn]
            result = await session.generate(turn, params)
            (expected,) = decode(device, device.script, [(prompt, params)], LONGEST)
            assert result.token_ids == expected.ids
            assert result.usage.cached_tokens == cached
        prefix = await engine.warm(tokens(13, 2))
        assert (prefix.num_tokens, prefix.held_tokens) == (13, 12)
        prefix.release()
        session.close()
        await settle(engine)


# -- limits ----------------------------------------------------------------------------------------------


@virtual
async def test_what_is_not_used_for_its_time_is_held_no_longer() -> None:
    async with Toy(session_timeout=5.0) as engine:
        usual, short = engine.session(), engine.session(ttl=1.0)
        await usual.generate(FIRST, SHORT)
        await short.generate(THIRD * 4, SHORT)
        fork = short.fork()
        await asyncio.sleep(0.5)
        turn = short.generate(None, SHORT)
        await asyncio.sleep(0.7)
        assert turn.done
        assert (short.held_tokens, fork.held_tokens) == (16, 0)
        assert engine.stats().holds_expired == 1
        await asyncio.sleep(0.4)
        assert (short.held_tokens, usual.held_tokens) == (0, held(27))
        await asyncio.sleep(5)
        assert engine.stats().held_tokens == 0
        assert engine.stats().holds_expired == 3
        assert engine.stats().held_pages_lost == 0, "they are cached still"
        result = await usual.generate(SECOND, SHORT)
        assert result.token_ids == toy_generate([*usual.token_ids[:27], *SECOND], SHORT)
        assert usual.held_tokens == held(36)
        assert not short.closed


async def test_holds_on_what_was_not_used_for_longest_end_for_others(make_engine: MakeEngine) -> None:
    async with make_engine(num_pages=64, max_held_share=0.25) as engine:
        sessions = [engine.session() for _ in range(3)]
        for at, session in enumerate(sessions):
            await session.generate([10 + at] * 20, SHORT)  # 6 pages each, of 16 that may be held
            if at == 1:
                await engine.generate([*sessions[0].token_ids], SHORT)
        assert [session.held_tokens for session in sessions] == [24, 0, 24]
        assert engine.stats().holds_expired == 1
        long = engine.session()
        await long.generate([1] * 100, SHORT)
        assert long.held_tokens == 64, "no more than may be held in all"
        assert [session.held_tokens for session in sessions] == [0, 0, 0]
        assert engine.stats().held_tokens == 64


async def test_no_more_sessions_than_may_be_open(make_engine: MakeEngine) -> None:
    async with make_engine(max_sessions=2) as engine:
        one, two = engine.session(), engine.session()
        with pytest.raises(errors.Rejected, match="max_sessions"):
            engine.session()
        with pytest.raises(errors.Rejected, match="max_sessions"):
            one.fork()
        two.close()
        two.close()
        fork = one.fork()
        await fork.generate(FIRST, SHORT)
        with pytest.raises(errors.EngineClosed, match="the session was closed"):
            two.generate(FIRST, SHORT)
        with pytest.raises(errors.EngineClosed, match="the session was closed"):
            two.fork()
        del fork
        gc.collect()
        await asyncio.sleep(0)
        assert engine.stats().sessions == 1, "one that was dropped is closed"
        assert engine.stats().held_tokens == 0


async def test_without_a_cache_or_a_share_sessions_hold_nothing(make_engine: MakeEngine) -> None:
    for settings in ({"prefix_cache": False}, {"max_held_share": 0.0}):
        async with make_engine(**settings) as engine, engine.session() as session:
            for turn in (FIRST, SECOND):
                prompt = [*session.token_ids, *turn]
                assert (await session.generate(turn, SHORT)).token_ids == toy_generate(prompt, SHORT)
                assert session.fork().held_tokens == session.held_tokens == 0


@pytest.mark.parametrize(
    ("options", "field"),
    [({"ttl": 0}, "ttl"), ({"request_id": "x"}, "request_id"), ({"priority": "x"}, "priority")],
    ids=str,
)
async def test_what_is_no_option_of_a_session_is_refused(
    make_engine: MakeEngine, options: dict[str, Any], field: str
) -> None:
    async with make_engine() as engine:
        with pytest.raises(errors.InvalidRequest) as refused:
            engine.session(**options)
        assert refused.value.field == field
        with pytest.raises(TypeError, match="no option"):
            engine.session(nothing=1)  # type: ignore[call-arg]
        assert engine.stats().sessions == 0


# -- ends ------------------------------------------------------------------------------------------------


async def test_a_closed_engine_ends_its_sessions(make_engine: MakeEngine) -> None:
    engine = make_engine()
    async with engine:
        session = engine.session()
        prefix = await engine.warm([9] * 12)
        await session.generate(FIRST, SHORT)
        before = session.token_ids
        unread = session.generate(SECOND, ENDLESS)
        await engine.aclose()
    with pytest.raises(errors.EngineClosed):
        await unread
    assert session.closed
    assert (session.token_ids, session.held_tokens, prefix.held_tokens) == (before, 0, 0)
    async with engine:
        with pytest.raises(errors.EngineClosed):
            session.generate(SECOND, SHORT)
        session.close()
        prefix.release()
        assert engine.stats().sessions == 0
        await settle(engine)


async def test_a_session_belongs_to_the_loop_of_its_engine(make_engine: MakeEngine) -> None:
    async with make_engine() as engine:
        session = engine.session()

        async def elsewhere() -> None:
            for call in (lambda: session.generate(FIRST, SHORT), session.fork, session.close):
                with pytest.raises(errors.WrongLoop):
                    call()

        await asyncio.to_thread(asyncio.run, elsewhere())
        await session.generate(FIRST, SHORT)


async def test_a_session_that_is_dropped_amid_a_turn_lets_it_go_on(make_engine: MakeEngine) -> None:
    async with make_engine() as engine:
        stream = engine.session().generate(FIRST, SHORT)
        gc.collect()
        assert (await stream).token_ids == toy_generate(FIRST, SHORT)
        del stream
        gc.collect()
        await asyncio.sleep(0)
        assert engine.stats().sessions == engine.stats().held_tokens == 0
        await settle(engine)


async def test_a_session_that_is_closed_amid_a_turn_holds_nothing(make_engine: MakeEngine) -> None:
    async with make_engine() as engine:
        session = engine.session()
        stream = session.generate(FIRST, SHORT)
        session.close()
        assert (await stream).token_ids == toy_generate(FIRST, SHORT)
        assert (session.num_tokens, engine.stats().held_tokens) == (0, 0)
        await settle(engine)


def test_a_session_has_a_name_and_says_how_it_is() -> None:
    @virtual
    async def inner() -> None:
        async with Toy() as engine:
            session = engine.session()
            assert repr(session) == f"<Session {session.id} open tokens=0 held=0>"
            assert isinstance(session, Session)
            stream = session.generate(FIRST, SHORT)
            assert "in a turn" in repr(session)
            await stream
            assert "tokens=27 held=24" in repr(session)
            session.close()
            assert "closed" in repr(session)

    inner()
