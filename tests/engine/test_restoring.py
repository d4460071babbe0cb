"""A restored stream is the undisturbed one, wherever it was cut: ids, text, logprobs, reasons, usage."""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections import abc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import fields
from typing import Any

import pytest

from aioinfer import EngineClosed, InvalidRequest, StreamCheckpoint
from aioinfer.config import EngineConfig
from aioinfer.engine import Engine
from aioinfer.execution.launcher import InlineLauncher
from aioinfer.outputs import Result
from aioinfer.params import DiffusionParams, Grammar, SamplingParams
from aioinfer.pooling import Pooling
from examples.training.tasks import TASKS, held_out
from tests.engine.conftest import MakeEngine
from tests.model.harness import require
from tests.tiers import SECONDS, grid, rest
from tests.toys.blocks import ScriptedDevice

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "n": {"type": "integer"}},
    "required": ["name", "n"],
    "additionalProperties": False,
}
#: requests to a model that generates token by token: together they have every parameter
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "drawn": {"temperature": 1.5},
    "filtered": {"temperature": 0.9, "top_p": 0.9, "top_k": 20, "min_p": 0.01, "top_n_sigma": 2.0},
    "penalised": {"repetition_penalty": 1.3, "presence_penalty": 0.7, "frequency_penalty": 0.4},
    "biased": {"logit_bias": {40: 4.0, 41: -50.0}},
    "allowed": {"allowed_token_ids": range(30, 200)},
    "long at least": {"min_tokens": 20},
    "unending": {"ignore_eos": True},
    "logprobs": {"logprobs": 3, "prompt_logprobs": 2},
    "late logprobs": {"prompt_logprobs": 1, "logprob_start_len": 5},
    "stop strings": {"stop": ("the", " =", "\n\n")},
    "stops kept": {"stop": ("and", "a "), "include_stop": True},
    "stops of answers": {"stop": ("e", "o"), "stop_format": ("hermes", "qwen3", None)},
    "stop pattern": {"stop_regex": ("[a-z]+ing", "[0-9]{3}"), "temperature": 1.2},
    "stop tokens": {"stop_token_ids": [46, 47, 48]},
    "special text": {"skip_special_tokens": False},
    "bad words": {"bad_words": ("the", [45, 46])},
    "schema": {"grammar": Grammar("json_schema", SCHEMA)},
    "pattern": {"grammar": Grammar("regex", "(yes|no), [a-z ]{12}")},
    "object": {"grammar": Grammar("json_object"), "logprobs": 0},
    "thinking": {"thinking_budget": 4, "thinking_grace": 2, "thinking_end": "So."},
    "undrafted": {"speculate": False},
    "predicted": {"prediction": "What comes next is known, or nearly."},
}
#: outputs of such an engine begin with a thought
THINKS = {"reasoning_parser": "deepseek-r1"}
DIFFUSION: dict[str, dict[str, Any]] = {
    "low_confidence": {},
    "threshold": {"diffusion": DiffusionParams(threshold=0.3)},
    "edits": {"diffusion": DiffusionParams(algorithm="joint_threshold", edit_threshold=0.6)},
    "steps": {"diffusion": DiffusionParams(algorithm="static_steps", steps=3), "temperature": 1.0},
    "factor": {"diffusion": DiffusionParams(algorithm="factor", factor=4.0), "stop": ("the",)},
    "entropy": {"diffusion": DiffusionParams(algorithm="entropy_bound", entropy_bound=0.5), "logprobs": 0},
    "drafts": {"diffusion": DiffusionParams(draft=True), "temperature": 0.7},
    "penalised": {
        "repetition_penalty": 1.3,
        "presence_penalty": 0.7,
        "frequency_penalty": 0.4,
        "logprobs": 3,
        "diffusion": DiffusionParams(threshold=0.6),
    },
    "biased edits": {
        "logit_bias": {40: 4.0},
        "allowed_token_ids": range(30, 200),
        "min_tokens": 20,
        "top_n_sigma": 2.0,
        "temperature": 1.0,
        "logprobs": 2,
        "diffusion": DiffusionParams(algorithm="joint_threshold"),
    },
    "template": {"template": [None] * 3 + [70] * 9 + [None] * 5 + [71] * 8},
}


#: fields of a record that are text
TEXTS = {"fingerprint", "model", "numerics", "request_id", "cache_salt", "routing_key"}


def same(found: Result, wanted: Result) -> None:
    for name in (
        "token_ids",
        "text",
        "finish_reason",
        "stop_reason",
        "logprobs",
        "prompt_logprobs",
        "step_map",
    ):
        assert getattr(found, name) == getattr(wanted, name), name
    assert found.usage.completion_tokens == wanted.usage.completion_tokens
    assert found.usage.prompt_tokens == wanted.usage.prompt_tokens


async def cuts(engine: Engine, prompt: Any, params: SamplingParams) -> list[tuple[StreamCheckpoint, str]]:
    """A checkpoint behind every chunk of a stream, and the text that was read until there."""
    stream = engine.generate(prompt, params)
    await stream.accepted()
    found, text = [(stream.checkpoint(), "")], ""
    async for chunk in stream:
        text += chunk.text
        if not stream.done:
            found.append((stream.checkpoint(), text))
    return found


async def goes_on(
    engine: Engine, checkpoint: StreamCheckpoint, read: str, wanted: Result, *, identical: bool
) -> None:
    stored = checkpoint.to_json()
    again = StreamCheckpoint.from_json(stored)
    assert again.to_json() == stored
    stream = engine.restore(again)
    ids = list(checkpoint.token_ids[: checkpoint.delivered_tokens])
    async for chunk in stream:
        read += chunk.text
        ids += chunk.token_ids
    found = stream.result()
    same(found, wanted)
    assert (read, ids) == (wanted.text, wanted.token_ids)
    assert found.resumed == len(checkpoint.token_ids)
    assert found.identical is identical
    assert found.request_id == checkpoint.request_id


async def continue_all(
    one: Engine, other: Engine, asked: abc.Sequence[tuple[Any, SamplingParams]], *, identical: bool
) -> int:
    """Cut every request at every token, and go on with all of that at once in another engine."""
    wanted = await asyncio.gather(*[one.generate(*each) for each in asked])
    found = await asyncio.gather(*[cuts(one, *each) for each in asked])
    undisturbed = [other.generate([5, 6, 7, 8], SamplingParams(max_tokens=50, seed=1)) for _ in range(3)]
    await asyncio.gather(
        *[
            goes_on(other, *cut, result, identical=identical)
            for result, several in zip(wanted, found, strict=True)
            for cut in several
        ]
    )
    await asyncio.gather(*undisturbed)
    assert other.stats().running == other.stats().waiting == 0
    return sum(map(len, found))


# -- on the toy device ---------------------------------------------------------------------------------


def test_the_kinds_have_every_parameter() -> None:
    # functions are in no record
    there = {"max_tokens", "seed", "logits_processors"}.union(*KINDS.values(), *DIFFUSION.values())
    assert there == {each.name for each in fields(SamplingParams)}


@rest(SECONDS)
@pytest.mark.parametrize("window", [0, 1, 2])
async def test_every_cut_goes_on_as_if_nothing_had_happened(make_engine: MakeEngine, window: int) -> None:
    rng = random.Random(window)
    kinds = {name: kind for name, kind in KINDS.items() if "grammar" not in kind and "bad_words" not in kind}
    asked = []
    for number, kind in enumerate(kinds.values()):
        chosen = {
            name: [token % 64 for token in value]
            if name in ("stop_token_ids", "allowed_token_ids")
            else value
            for name, value in kind.items()
        }
        if "stop" in chosen:
            chosen["stop"] = ("q", "zz")
        params = SamplingParams(seed=number, max_tokens=24, **chosen)
        asked.append(([rng.randrange(1, 64) for _ in range(rng.randint(1, 9))], params))
    async with (
        make_engine(num_pages=512, overlap_steps=window, deterministic=True, **THINKS) as one,
        # So few pages that requests are retracted.
        make_engine(
            page_size=8,
            num_pages=12,
            overlap_steps=2 - window,
            deterministic=True,
            prefix_cache=False,
            **THINKS,
        ) as other,
    ):
        assert await continue_all(one, other, asked, identical=True) > 100
        assert other.stats().retractions


async def test_an_engine_draws_the_seed_once(make_engine: MakeEngine) -> None:
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    async with make_engine() as one, make_engine(seed=9) as other:
        stream = one.generate([1, 2, 3], params)
        await anext(stream)
        checkpoint = stream.checkpoint()
        assert checkpoint.params.seed is None
        assert (await other.restore(checkpoint)).token_ids == (await stream).token_ids


async def test_what_its_consumer_has_not_read_is_delivered_first(make_engine: MakeEngine) -> None:
    async with make_engine() as engine:
        stream = engine.generate([3, 4], SamplingParams(max_tokens=30, ignore_eos=True, seed=2))
        first = await anext(stream)
        while len(stream.result().token_ids) < 12:
            await asyncio.sleep(0)
        checkpoint = stream.checkpoint()
        assert checkpoint.delivered_tokens == len(first.token_ids)
        assert len(checkpoint.token_ids) >= 12
        again = engine.restore(checkpoint)
        rest = [chunk async for chunk in again]
        assert first.text + "".join(chunk.text for chunk in rest) == (await stream).text
        ids = [token for chunk in (first, *rest) for token in chunk.token_ids]
        assert ids == stream.result().token_ids


async def test_a_stream_that_its_engine_left_goes_on_in_the_next(make_engine: MakeEngine) -> None:
    params = SamplingParams(max_tokens=40, ignore_eos=True, seed=3)
    engine = make_engine()
    async with engine:
        wanted = await engine.generate([1, 2], params)
        stream = engine.generate([1, 2], params)
        await anext(stream)
        await engine.aclose()
        with pytest.raises(EngineClosed):
            await stream
        checkpoint = stream.checkpoint()
    async with engine:
        same(await engine.restore(checkpoint), wanted)


async def test_a_consumer_that_leaves_a_restored_stream_frees_it(make_engine: MakeEngine) -> None:
    async with make_engine() as engine:
        stream = engine.generate([1, 2], SamplingParams(max_tokens=60, ignore_eos=True))
        await anext(stream)
        checkpoint = stream.checkpoint()
        stream.close()
        for tokens in range(3):
            again = engine.restore(checkpoint)
            for _ in range(tokens):
                await anext(again)
            again.close()
        await engine.generate([4], SamplingParams(max_tokens=3))
        assert engine.stats().running == engine.stats().waiting == engine.stats().arriving == 0


async def test_checkpoints_are_of_outputs_that_go_on(make_engine: MakeEngine) -> None:
    async with make_engine() as engine:
        stream = engine.generate([1, 2], SamplingParams(max_tokens=4))
        await stream
        with pytest.raises(RuntimeError, match="complete"):
            stream.checkpoint()
        stream = engine.generate("text", SamplingParams(max_tokens=4))
        with pytest.raises(RuntimeError, match="tokenized"):
            stream.checkpoint()


async def test_what_generates_nothing_has_no_checkpoint(make_engine: MakeEngine) -> None:
    async with make_engine(chunk_size=8) as engine:
        score = SamplingParams(max_tokens=0, prompt_logprobs=0)
        for stream in (
            engine.generate([*range(40)], score),
            engine.generate([*range(40)], SamplingParams(max_tokens=0), pooling=Pooling("mean")),
        ):
            with pytest.raises(RuntimeError, match="max_tokens 0"):
                stream.checkpoint()
            while not stream.admitted:
                await asyncio.sleep(0)
            with pytest.raises(RuntimeError, match="max_tokens 0"):
                stream.checkpoint()
            await stream


# -- bad input -----------------------------------------------------------------------------------------


async def some(engine: Engine, **settings: Any) -> StreamCheckpoint:
    params = SamplingParams(max_tokens=20, ignore_eos=True, seed=4, logprobs=1, prompt_logprobs=0, **settings)
    stream = engine.generate([1, 2, 3], params)
    for _ in range(5):
        await anext(stream)
    checkpoint = stream.checkpoint()
    stream.close()
    return checkpoint


def refused(text: str) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        StreamCheckpoint.from_json(text)
    assert caught.value.field == "checkpoint"
    return caught.value


def test_a_record_that_was_stored_by_an_earlier_release_is_read() -> None:
    stored = (
        '{"version":1,"fingerprint":"files-0","model":"m","numerics":"n","identical":true,"prompt_token_ids":[1,2],'
        '"params":{"seed":3,"stop":["x"],"logit_bias":[[3,-1.5]],"grammar":{"kind":"regex","source":"[a-z]+"}},'
        '"seed":3,"token_ids":[4],"delivered_tokens":1,"delivered_characters":2,'
        '"logprobs":[[4,-Infinity,[[4,-0.5],[5,-1]]]],"prompt_logprobs":[],"step_map":[0],"block":{"start":0,'
        '"ids":[1],"known":[true],"written_in":[-1],"logprobs":[0.0],"rounds":0,"done":false,"changed":false,'
        '"failed":false,"private":[1]},"request_id":"r","priority":0,"cache_salt":"","routing_key":null}'
    )
    found = StreamCheckpoint.from_json(stored)
    assert found.params == SamplingParams(
        seed=3, logit_bias={3: -1.5}, grammar=Grammar("regex", "[a-z]+"), stop="x"
    )
    assert found.block is not None
    assert (found.block.private, found.logprobs[0].logprob, found.adapter) == ((1,), -math.inf, None)
    assert found.to_json() == stored.replace("-1]]]", "-1.0]]]")


async def test_what_is_no_record_is_refused_by_the_field(make_engine: MakeEngine) -> None:
    async with make_engine() as engine:
        text = (await some(engine)).to_json()
    for end in range(len(text)):
        refused(text[:end])
    StreamCheckpoint.from_json(text.encode())
    for other in (None, 5, []):
        refused(other)  # type: ignore[arg-type]
    record = json.loads(text)
    values: dict[str, list[Any]] = {name: [1.5, [[]], {"a": 1}, "text"] for name in record}
    for name in TEXTS:
        values[name].remove("text")
    values["version"] = [0, 2, "1", None, True, 1.0]
    values["surplus"] = [1]
    values["logprobs"] += [[[1, 10**400, []]], [[1, float("nan"), []]]]
    biases: list[Any] = [{"1": 2}, [[[1], 2]]]
    values["params"] += [{"temperature": -1}, {"heat": 1}, {"grammar": {}}, {"stop": 5}]
    values["params"] += [{"logit_bias": bias} for bias in biases]
    for name, several in values.items():
        for value in several:
            assert name in refused(json.dumps({**record, name: value})).message
    for name in record.keys() - {"version"}:
        rest = {other: value for other, value in record.items() if other != name}
        assert name in refused(json.dumps(rest)).message


async def test_what_makes_no_sense_here_is_refused_before_anything_is_queued(make_engine: MakeEngine) -> None:
    async with make_engine(num_pages=64) as engine:
        checkpoint = await some(engine)
        record = json.loads(checkpoint.to_json())
        ids = record["token_ids"]
        cases: dict[str, dict[str, Any]] = {
            "model": {"fingerprint": "files-0123", "model": "another"},
            "64": {"token_ids": [*ids[:-1], 64]},
            "negative": {"prompt_token_ids": []},
            "logprobs": {"logprobs": record["logprobs"][1:]},
            "prompt_logprobs": {"prompt_logprobs": record["prompt_logprobs"] * 3},
            "delivered_tokens": {"delivered_tokens": len(ids) + 1},
            "max_tokens": {"params": {**record["params"], "max_tokens": len(ids)}},
            "stops": {"params": {**record["params"], "stop_token_ids": [ids[2]]}},
            "diffusion": {"step_map": [0] * len(ids)},
            "room": {"prompt_token_ids": [1] * 300},
        }
        for name, change in cases.items():
            other = StreamCheckpoint.from_json(json.dumps({**record, **change}))
            with pytest.raises(InvalidRequest) as caught:
                engine.restore(other)
            if name not in ("negative", "room"):
                assert name in str(caught.value), name
        with pytest.raises(InvalidRequest):
            engine.restore(checkpoint.to_json())  # type: ignore[arg-type]
        stats = engine.stats()
        assert stats.waiting == stats.arriving == 0
        # What only the text shows is known a little later.
        for change in (
            {"delivered_characters": 1000},
            {"params": {**record["params"], "stop": (await engine.detokenize(ids[:2]))[:1]}},
        ):
            stream = engine.restore(StreamCheckpoint.from_json(json.dumps({**record, **change})))
            with pytest.raises(InvalidRequest) as caught:
                await stream
            assert caught.value.field == "checkpoint"
        assert len((await engine.restore(checkpoint)).token_ids) == 20


@rest(SECONDS)
async def test_a_block_that_cannot_be_is_refused_before_anything_is_queued() -> None:
    params = SamplingParams(
        max_tokens=40, ignore_eos=True, diffusion=DiffusionParams(algorithm="static_steps")
    )
    async with Engine(EngineConfig(model="tiny-diffusion", threads=1)) as engine:
        size = engine.info.block_size or 0
        stream = engine.generate("copy: banana\n", params)
        await stream.accepted()
        while (checkpoint := stream.checkpoint()).block is None:
            await asyncio.sleep(0)
        record = json.loads(checkpoint.to_json())
        stream.close()
        changes: list[tuple[str, Any]] = [
            *(("ids", [bad] * size) for bad in (10**9, -1, -(2**63))),
            *(("private", bad) for bad in ([0] * 50, [2**62], [-1])),
            *(("known", bad) for bad in ([True] * size, [False] * size)),
            ("failed", True),
            ("done", True),
            ("rounds", 2**63 - 1),
            ("logprobs", [-math.inf] * size),
            ("written_in", [2**40] * size),
            *(("tops", bad) for bad in ([[]], [[[10**9, -1.0]]] * size, [[[-1, -1.0]]] * size)),
            ("start", record["block"]["start"] + size),
        ]
        for name, value in changes:
            other = {**record, "block": {**record["block"], name: value}}
            with pytest.raises(InvalidRequest) as caught:
                engine.restore(StreamCheckpoint.from_json(json.dumps(other)))
            assert caught.value.field == "checkpoint"
        assert engine.stats().arriving == engine.stats().waiting == 0
        assert len((await engine.restore(checkpoint)).token_ids) == 40


async def test_an_output_that_its_grammar_refuses_is_no_checkpoint() -> None:
    async with Engine(EngineConfig(threads=1)) as engine:
        stream = engine.generate("Hello", SamplingParams(max_tokens=20, seed=1, grammar=SCHEMA))
        await anext(stream)
        record = json.loads(stream.checkpoint().to_json())
        stream.close()
        other = {**record, "token_ids": [500] * 10, "delivered_tokens": 0, "delivered_characters": 0}
        with pytest.raises(InvalidRequest, match="token_ids") as caught:
            await engine.restore(StreamCheckpoint.from_json(json.dumps(other)))
        assert caught.value.field == "checkpoint"


# -- on the demo models --------------------------------------------------------------------------------


@asynccontextmanager
async def two(model: str, **settings: Any) -> AsyncIterator[tuple[Engine, Engine]]:
    """The same arithmetic and all else different."""
    shared: dict[str, Any] = {"model": model, "deterministic": True, "max_model_len": 256, **settings}
    first = EngineConfig(threads=2, page_size=16, overlap_steps=1, max_running_requests=32, **shared)
    second = EngineConfig(
        threads=1, page_size=32, overlap_steps=0, max_running_requests=9, prefix_cache=False, **shared
    )
    async with Engine(first) as one, Engine(second) as other:
        yield one, other


@rest(SECONDS)
@pytest.mark.parametrize("dtype", grid(["bfloat16"], ["float32"]))
async def test_every_cut_of_a_model_goes_on_to_the_bit(dtype: str) -> None:
    require("native")
    asked = [
        (
            held_out(task, number + 1)[-1].messages,
            SamplingParams(**{"seed": number, "max_tokens": 24, **kind}),
        )
        for number, (task, kind) in enumerate(zip(sorted(TASKS) * 9, KINDS.values(), strict=False))
    ]
    async with two("tiny-chat", dtype=dtype, **THINKS) as (one, other):
        assert await continue_all(one, other, asked, identical=True) > 100


@rest(SECONDS)
async def test_every_cut_of_a_diffusion_model_goes_on_to_the_bit() -> None:
    require("native")
    asked = [
        ("copy: a longer text to copy\n", SamplingParams(seed=number, max_tokens=30, ignore_eos=True, **kind))
        for number, kind in enumerate(DIFFUSION.values())
    ]
    async with two("tiny-diffusion") as (one, other):
        assert await continue_all(one, other, asked, identical=True) > 10


@rest(SECONDS)
async def test_a_model_in_another_precision_goes_on_and_says_so() -> None:
    require("native")
    prompt = held_out(sorted(TASKS)[0], 1)[-1].messages
    settings = {"model": "tiny-chat", "deterministic": True, "threads": 1}
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    async with (
        Engine(EngineConfig(**settings, dtype="float32")) as one,
        Engine(EngineConfig(**settings, dtype="bfloat16")) as other,
    ):
        stream = one.generate(prompt, params)
        await anext(stream)
        found = await other.restore(stream.checkpoint())
        assert not found.identical
        assert len(found.token_ids) == 20


@rest(SECONDS)
async def test_every_cut_of_a_block_whose_tokens_move_goes_on() -> None:
    """With all that its algorithm remembers, in the record."""
    settings: dict[str, Any] = {"model": "scripted", "page_size": 8, "overlap_steps": 0, "max_rounds": 1}

    def engine() -> Engine:
        device = ScriptedDevice(num_pages=512, num_slots=512, edits=4, mean_steps=2.0)
        return Engine(
            EngineConfig(**settings), launcher=lambda _: InlineLauncher(device), tokenizer=lambda _: None
        )

    draft = DiffusionParams(algorithm="joint_threshold_indel", draft=True, edit_threshold=0.1)
    asked = [
        ([*range(20, 20 + length)], SamplingParams(seed=length, max_tokens=40, logprobs=0, diffusion=draft))
        for length in range(1, 9)
    ]
    async with engine() as one, engine() as other:
        assert await continue_all(one, other, asked, identical=one.info.deterministic) > 100
