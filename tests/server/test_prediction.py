"""OpenAI's ``prediction``: the same answer, sooner, and how much of it was expected."""

from __future__ import annotations

from typing import Any

from tests.server.conftest import Bundled, Serving
from tests.tiers import SECONDS, rest

PATH = "/v1/chat/completions"
STORY: Any = [{"role": "user", "content": "Write a short story about Mira."}]


@rest(SECONDS)
async def test_the_openai_client_reads_how_much_of_a_prediction_was_right(bundled: Bundled) -> None:
    """As text and as parts, streamed or not; the answer is that without one."""
    async with bundled() as client:
        asked: Any = {"model": "tiny-chat", "messages": STORY, "temperature": 0, "max_tokens": 120}
        plain = await client.chat.completions.create(**asked)
        text = plain.choices[0].message.content
        assert plain.usage.completion_tokens_details is None
        forms: list[Any] = [text, [{"type": "text", "text": text[:40]}, {"type": "text", "text": text[40:]}]]
        for content in forms:
            answer = await client.chat.completions.create(
                **asked, prediction={"type": "content", "content": content}
            )
            assert answer.choices[0].message.content == text
            assert answer.usage.completion_tokens == plain.usage.completion_tokens
            details = answer.usage.completion_tokens_details
            assert details.accepted_prediction_tokens > 20
        stream = await client.chat.completions.create(
            **asked,
            prediction={"type": "content", "content": "Something else altogether, again and again."},
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
        usage = chunks[-1].usage
        assert usage.completion_tokens_details.accepted_prediction_tokens == 0


REFUSED: list[tuple[Any, str]] = [
    ("text", ""),
    ([], ""),
    ({"content": "x"}, ".type"),
    ({"type": "text", "content": "x"}, ".type"),
    ({"type": "content"}, ".content"),
    ({"type": "content", "content": 5}, ".content"),
    ({"type": "content", "content": [5]}, ".content[0]"),
    ({"type": "content", "content": [{"type": "text", "text": "a"}, {"type": "x"}]}, ".content[1].type"),
    ({"type": "content", "content": [{"type": "text", "text": 1}]}, ".content[0].text"),
    ({"type": "content", "content": "x", "more": 1}, ".more"),
    ({"type": "content", "content": "\ud800"}, ""),
]


async def test_a_prediction_of_another_form_is_refused_by_its_field(serving: Serving) -> None:
    async with serving() as served:
        for prediction, where in REFUSED:
            reply = await served.post(PATH, {"messages": STORY, "prediction": prediction})
            assert reply.refusal == (400, f"prediction{where}")


async def test_an_empty_or_far_too_long_prediction_is_accepted(serving: Serving) -> None:
    more = [{"prediction": {"type": "content", "content": each}} for each in ("", [], "word " * 50_000)]
    async with serving() as served:
        for fields in (*more, {"speculate": False}):
            reply = await served.post(PATH, {"messages": STORY, "max_tokens": 3, **fields})
            assert reply.json()["choices"]
