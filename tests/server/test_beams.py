"""``use_beam_search``: the choices of a call are the best hypotheses of a beam search."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from aioinfer import SamplingParams
from tests.engine.conftest import Gate
from tests.engine.test_chat import freed
from tests.server.conftest import Connect, Serving
from tests.server.raw import request

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER: Any = [{"role": "user", "content": "Hello"}]
BEAMS: dict[str, Any] = {"use_beam_search": True, "n": 3, "max_tokens": 6}


def contents(reply: Any) -> list[Any]:
    return [choice["message"]["content"] for choice in reply.json()["choices"]]


async def test_choices_are_what_the_engine_finds_best_first(serving: Serving) -> None:
    prompts, ways = [[3, 5, 8], [1, 2]], {"length_penalty": 0.0, "early_stopping": "never"}
    async with serving() as served:
        reply = await served.post(
            COMPLETIONS, {**BEAMS, **ways, "prompt": prompts, "temperature": 0.3, "return_token_ids": True}
        )
        expected = [
            found.result
            for prompt in prompts
            for found in await served.engine.beam(prompt, 3, SamplingParams(max_tokens=6), **ways)  # type: ignore[arg-type]
        ]
    choices = reply.json()["choices"]
    assert [choice["token_ids"] for choice in choices] == [each.token_ids for each in expected]
    assert [choice["text"] for choice in choices] == [each.text for each in expected]
    assert [choice["finish_reason"] for choice in choices] == [each.finish_reason for each in expected]
    usage = reply.json()["usage"]
    assert usage["prompt_tokens"] == 5
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0
    assert usage["completion_tokens"] == sum(len(each.token_ids) for each in expected)


async def test_a_stream_has_each_choice_at_once_when_the_search_has_ended(serving: Serving) -> None:
    async with serving() as served, served.client() as client:
        asked: Any = {"model": "toy", "messages": USER, "n": 3, "max_tokens": 6}
        beams = {"use_beam_search": True}
        whole = await client.chat.completions.create(**asked, extra_body=beams)
        texts = ["", "", ""]
        async for chunk in await client.chat.completions.create(**asked, extra_body=beams, stream=True):
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
        assert texts == [choice.message.content for choice in whole.choices]


async def test_logprobs_are_those_that_the_search_went_by(serving: Serving) -> None:
    async with serving() as served:
        reply = await served.post(CHAT, {**BEAMS, "messages": USER, "logprobs": True, "length_penalty": 1})
        expected = await served.engine.beam(USER, 3, SamplingParams(max_tokens=6))
    for choice, each in zip(reply.json()["choices"], expected, strict=True):
        entries = choice["logprobs"]["content"]
        assert len(entries) == len(each.result.token_ids)
        total = sum(entry["logprob"] for entry in entries)
        assert total / len(entries) == pytest.approx(each.score, rel=1e-4)


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"stop": "x"}, "stop"),
        ({"min_tokens": 2}, "min_tokens"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"logprobs": True, "top_logprobs": 2}, "top_logprobs"),
        ({"n": 128}, "n"),
        ({"length_penalty": "1"}, "length_penalty"),
        ({"length_penalty": 400}, "length_penalty"),
        ({"early_stopping": "always"}, "early_stopping"),
        ({"use_beam_search": False, "length_penalty": 2.0}, "length_penalty"),
        ({"use_beam_search": False, "early_stopping": True}, "early_stopping"),
    ],
)
async def test_what_beams_cannot_have_is_refused_by_its_field(
    serving: Serving, fields: dict[str, Any], where: str
) -> None:
    async with serving() as served:
        reply = await served.post(CHAT, {**BEAMS, "messages": USER, **fields})
        assert reply.refusal == (400, where)


async def test_a_client_that_leaves_ends_all_beams(
    serving: Serving, connect: Connect, connections: Any, gate: Gate
) -> None:
    async with serving(fault=gate) as served:
        raw = await connect(served)
        body = {**BEAMS, "prompt": [1, 2], "max_tokens": 50, "model": "toy"}
        await raw.send(request("POST", COMPLETIONS, body))
        for _ in range(5):
            await asyncio.to_thread(gate.arrived.acquire)
            gate.step()
        await asyncio.to_thread(gate.arrived.acquire)
        assert served.engine.stats().running
        await raw.close()
        while served.engine.stats().running:
            await asyncio.sleep(0.001)
        gate.release()
        await freed(served.engine)
