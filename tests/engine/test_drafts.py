"""What the stream of a diffusion model holds: final tokens as they come, and drafts of those behind them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from aioinfer import DiffusionParams, EngineConfig, SamplingParams
from aioinfer.cells import StreamCell
from aioinfer.loop.core import Core
from aioinfer.loop.options import Prepared
from aioinfer.outputs import Chunk, Result
from aioinfer.request import Output, Request
from aioinfer.scheduling.block_cursor import BlockCursor
from aioinfer.stream import Stream
from aioinfer.text.output import UNKNOWN
from tests.engine.conftest import MakeEngine
from tests.engine.simulation import settle
from tests.toys import ToyTokenizer
from tests.toys.blocks import ScriptedDevice, scripted_generate

SIZE, MASK = 8, 63
PROMPT = [5, 6, 7]
MONOTONE, EDITING = "low_confidence", "joint_threshold"


def params(algorithm: str = MONOTONE, **options: Any) -> SamplingParams:
    diffusion = DiffusionParams(algorithm=algorithm, draft=options.pop("draft", True))
    return SamplingParams(
        **{"temperature": 0.0, "max_tokens": 40, "ignore_eos": True, "diffusion": diffusion, **options}
    )


def scripted(edits: int = 0, **options: Any) -> ScriptedDevice:
    return ScriptedDevice(**{"num_slots": 24, "edits": edits, **options})


def expected(device: ScriptedDevice, prompt: list[int], wanted: SamplingParams) -> list[int]:
    return scripted_generate(device.script, prompt, wanted, block_size=SIZE, mask_token_id=MASK)


async def read(stream: Stream) -> tuple[list[Chunk], Result]:
    """All chunks, which together are the result."""
    chunks = [chunk async for chunk in stream]
    result = stream.result()
    assert "".join(chunk.text for chunk in chunks) == result.text
    assert [token for chunk in chunks for token in chunk.token_ids] == result.token_ids
    assert [step for chunk in chunks for step in chunk.step_map or ()] == result.step_map
    for chunk in chunks:
        assert chunk.step_map is not None
        assert len(chunk.step_map) == len(chunk.token_ids)
        assert chunk.logprobs is None or len(chunk.logprobs) == len(chunk.token_ids)
        assert chunk.text or chunk.token_ids or chunk.draft or chunk.finish_reason, "a chunk of nothing"
    return chunks, result


@pytest.mark.parametrize("window", [0, 2])
@pytest.mark.parametrize("algorithm", [MONOTONE, EDITING])
async def test_drafts_lead_up_to_the_tokens_and_change_none(
    make_engine: MakeEngine, algorithm: str, window: int
) -> None:
    device, wanted = scripted(edits=2), params(algorithm)
    async with make_engine(device=device, overlap_steps=window) as engine:
        chunks, result = await read(engine.generate(PROMPT, wanted))
        await settle(engine)
    assert result.token_ids == expected(device, PROMPT, wanted)
    known, revised, drafts, ends = 0, 0, 0, set()
    for chunk in chunks:
        known += len(chunk.token_ids)
        if chunk.token_ids:
            ends.add((len(PROMPT) + known) % SIZE)
        if chunk.draft is None:
            continue
        drafts += 1
        assert chunk.draft.start == known
        assert known + len(chunk.draft.token_ids) <= 40
        final = result.token_ids[known:]
        pairs = zip(chunk.draft.token_ids, chunk.draft.step_map, strict=True)
        assert all((token is None) == (step is None) for token, step in pairs)
        if algorithm == MONOTONE:
            steps = (result.step_map or [])[known:]
            assert all(x in (None, y) for x, y in zip(chunk.draft.step_map, steps, strict=False))
        assert len(chunk.draft.text.replace(UNKNOWN, "")) >= sum(x is not None for x in chunk.draft.token_ids)
        revised += sum(x not in (None, y) for x, y in zip(chunk.draft.token_ids, final, strict=False))
    assert drafts > 3, "a draft per block at the very least"
    assert (revised > 0) == (algorithm == EDITING)
    if algorithm == EDITING:
        assert ends <= {0, (len(PROMPT) + 40) % SIZE}, "tokens came out that might have been edited"
    else:
        assert ends - {0, 3}, "nothing came out before its block was done"


async def test_who_does_not_ask_for_drafts_gets_none_and_the_same(make_engine: MakeEngine) -> None:
    async with make_engine(device=scripted()) as engine:
        plain, result = await read(engine.generate(PROMPT, params(draft=False)))
        _, drafted = await read(engine.generate(PROMPT, params()))
        awaited = await engine.generate(PROMPT, params())
    assert all(chunk.draft is None and chunk.token_ids for chunk in plain)
    assert result == drafted == awaited


class Rounds:
    """One request, a round at a time, and the cell of its stream."""

    def __init__(self, wanted: SamplingParams, **device: Any) -> None:
        self.device = scripted(**{"mean_steps": 6.0, "variation": 0.0, **device})
        self.core = Core(
            EngineConfig(model="scripted", overlap_steps=0), self.device.open(), ToyTokenizer(), float
        )
        self.cell = StreamCell(Output(Request(params=wanted)))
        self.request = self.core.submit(self.cell.output, Prepared(PROMPT, None), self.cell)
        assert isinstance(self.request.cursor, BlockCursor)

    def go(self, rounds: int = 1) -> None:
        for _ in range(rounds):
            step = self.core.plan()
            assert step is not None
            moved = self.core.resolve(step, self.device.launch(self.device.prepare(step)).wait())
            assert moved in ([], [self.request])


def test_a_slow_reader_gets_the_newest_draft_and_no_older_one() -> None:
    world = Rounds(params(EDITING))
    world.go(2)
    first = world.cell.take()
    assert first is not None
    assert first.draft is not None
    assert world.cell.take() is None, "the same again"
    world.go(2)
    second = world.cell.take()
    assert second is not None
    assert second.draft is not None
    assert world.cell.take() is None
    assert second.token_ids == first.token_ids == []
    block = world.request.cursor.block
    assert block is not None
    newest = tuple(
        token if known else None for token, known in zip(block.ids[3:], block.known[3:], strict=True)
    )
    assert second.draft.token_ids == newest != first.draft.token_ids
    assert second.draft.token_ids.count(None) < first.draft.token_ids.count(None)


def test_a_draft_ends_with_the_first_end_token_that_is_known() -> None:
    plain = Rounds(params(EDITING, max_tokens=5))
    plain.go(2)
    known = plain.request.output.draft()
    assert known is not None
    at, end = next((at, token) for at, token in enumerate(known.token_ids) if token is not None)
    for include in (False, True):
        world = Rounds(params(EDITING, max_tokens=5, stop_token_ids=[end], include_stop=include))
        world.go(2)
        draft = world.request.output.draft()
        assert draft is not None
        assert draft.token_ids == known.token_ids[: at + 1]
        assert draft.text == UNKNOWN * at + (ToyTokenizer().decode([end]) if include else "")


def test_held_back_text_is_part_of_the_draft_and_its_ids_of_the_chunk() -> None:
    """Read together, chunks and the last draft always show all that is known."""
    device = scripted()
    text = ToyTokenizer().decode(expected(device, PROMPT, params()))
    world = Rounds(params(stop=[text[1:20] + "never"]), mean_steps=4.0, variation=0.6)
    shown, ids, held = "", list[int](), 0
    while not world.request.finished:
        world.go()
        chunk = world.cell.take()
        if chunk is None:
            continue
        shown, ids = shown + chunk.text, ids + chunk.token_ids
        assert ids == world.request.output_ids
        decoded = ToyTokenizer().decode(ids)
        held += len(decoded) > len(shown)
        if chunk.draft is not None:
            assert (shown + chunk.draft.text).startswith(decoded)
            rest = (shown + chunk.draft.text).removeprefix(decoded)
            assert rest.count(UNKNOWN) == chunk.draft.token_ids.count(None)
    assert held
    assert shown == text


async def test_leaving_in_mid_block_leaves_nothing_behind(make_engine: MakeEngine) -> None:
    async with make_engine(device=scripted(edits=1)) as engine:

        async def leave(number: int) -> None:
            wanted = params(EDITING if number % 2 else MONOTONE)
            async with engine.generate([1 + number % 60, *PROMPT], wanted) as stream:
                drafts = 0
                async for chunk in stream:
                    drafts += chunk.draft is not None
                    if drafts > number % 4:
                        return
                raise AssertionError("the stream ended first")

        async with asyncio.TaskGroup() as group:
            for number in range(40):
                group.create_task(leave(number))
        await settle(engine)


async def test_stats_count_rounds_and_what_they_bring(make_engine: MakeEngine) -> None:
    device = scripted(mean_steps=2.0, variation=0.0)
    async with make_engine(device=device, fused_commit=False, overlap_steps=0, max_rounds=4) as engine:
        assert engine.stats().tokens_per_round == 0
        await engine.generate([1], params(max_tokens=23))
        stats = engine.stats()
    assert stats.output_tokens == 23
    # Three blocks of two rounds each; the last one is not committed.
    assert stats.rounds == device.block_rounds == 8
    assert stats.tokens_per_round == 23 / 8


async def test_an_engine_without_a_tokenizer_drafts_tokens(make_engine: MakeEngine) -> None:
    async with make_engine(device=scripted(), tokenizer=None) as engine:
        chunks, _ = await read(engine.generate(PROMPT, params()))
    drafts = [chunk.draft for chunk in chunks if chunk.draft]
    assert drafts
    assert not any(draft.text for draft in drafts)
