"""Token ids over HTTP and in process: what the model would get, and its text."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from aioinfer.config import EngineConfig
from aioinfer.engine import Engine
from aioinfer.errors import EngineClosed, InvalidRequest
from aioinfer.server.tokens import Detokenized, Tokenized, TokenizerInfo
from tests.server.calls import http
from tests.server.conftest import Bundled, Serving, site
from tests.server.test_mounting import make_engine
from tests.server.test_openapi import violations
from tests.tiers import SECONDS, rest
from tests.toys import ToyTokenizer

USER = [{"role": "user", "content": "abc"}]


async def test_a_text_becomes_tokens_and_text_again(bundled: Bundled) -> None:
    async with bundled() as model, http(site(model)) as client:
        asked = {"prompt": "Once upon", "return_token_strs": True}
        found = (await client.post("/tokenize", asked)).json()
        assert not violations(Tokenized, found)
        assert found["count"] == len(found["tokens"]) == len(found["token_strs"]) > 1
        asked = {"prompt": "Once upon", "add_special_tokens": False}
        bare = (await client.post("/tokenize", asked)).json()
        assert bare["token_strs"] is None
        assert found["tokens"][-bare["count"] :] == bare["tokens"]
        text = (await client.post("/detokenize", {"tokens": bare["tokens"]})).json()
        assert text == {"prompt": "Once upon"}
        assert not violations(Detokenized, text)
        info = (await client.get("/tokenizer_info")).json()
        assert not violations(TokenizerInfo, info)
        assert found["max_model_len"] == info["max_model_len"]


async def test_a_chat_has_the_tokens_that_generating_counts(bundled: Bundled) -> None:
    async with bundled() as model, http(site(model)) as client:
        answer = (await client.post("/v1/chat/completions", {"messages": USER, "max_tokens": 1})).json()
        found = (await client.post("/tokenize", {"messages": USER})).json()
        assert found["count"] == answer["usage"]["prompt_tokens"]
        asked = {"messages": USER, "add_generation_prompt": False}
        unanswered = (await client.post("/tokenize", asked)).json()
        assert unanswered["tokens"] == found["tokens"][: unanswered["count"]] != found["tokens"]


async def test_counting_goes_beyond_the_context_and_ends_where_no_prompt_could(serving: Serving) -> None:
    async with serving() as served:
        limit = served.engine.info.max_model_len
        longest = (served.engine.tokenizer or ToyTokenizer()).longest_token or 1
        assert (await served.post("/tokenize", {"prompt": "a" * (longest * (limit - 1))})).status == 200
        reply = await served.post("/tokenize", {"prompt": "a" * (longest * limit + 1)})
        assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("tokenize", {}, "messages"),
    ("tokenize", {"prompt": ""}, "prompt"),
    ("tokenize", {"prompt": [1, 2]}, "prompt"),
    ("tokenize", {"prompt": "a", "messages": USER}, "messages"),
    ("tokenize", {"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt"),
    ("tokenize", {"prompt": "a", "add_special_tokens": 1}, "add_special_tokens"),
    ("tokenize", {"prompt": "a", "truncate": 1}, "truncate"),
    ("tokenize", {"messages": USER, "chat_template": "x"}, "chat_template"),
    ("tokenize", {"prompt": "a", "model": "other"}, "model"),
    ("detokenize", {}, "tokens"),
    ("detokenize", {"tokens": "abc"}, "tokens"),
    ("detokenize", {"tokens": [1, "2"]}, "tokens"),
    ("detokenize", {"tokens": [True]}, "tokens"),
    ("detokenize", {"tokens": [1 << 40]}, "tokens"),
    ("detokenize", {"tokens": [-1]}, "tokens"),
    ("detokenize", {"tokens": [1], "skip": True}, "skip"),
    ("detokenize", {"tokens": [1], "model": "other"}, "model"),
]


async def test_what_is_wrong_is_named(serving: Serving) -> None:
    async with serving() as served:
        for path, body, param in REFUSED:
            reply = await served.post(f"/{path}", body)
            assert reply.refusal == (404 if param == "model" else 400, param), body


@pytest.mark.parametrize("path", ["tokenize", "detokenize"])
async def test_what_wants_tokens_only_is_counted_against_its_key_and_all_others(
    serving: Serving, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, free = asyncio.Semaphore(0), asyncio.Event()

    async def wait(*given: Any, **options: Any) -> Any:
        began.release()
        await free.wait()
        return [1] if path == "tokenize" else "x"

    body = {"prompt": "x"} if path == "tokenize" else {"tokens": [1]}
    async with serving(max_queued_requests=2) as served:
        monkeypatch.setattr(served.engine, path, wait, raising=False)
        first = [asyncio.create_task(served.post(f"/{path}", body)) for _ in range(2)]
        for _ in first:
            await began.acquire()
        reply = await served.post(f"/{path}", body)
        assert (reply.status, "max_queued_requests" in reply.error["message"]) == (429, True)
        free.set()
        assert [(await each).status for each in first] == [200] * 2


# -- in process ----------------------------------------------------------------------------------------


class Held(ToyTokenizer):
    """A tokenizer that waits to be let on."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.go = threading.Event(), threading.Event()

    def encode(self, text: str) -> list[int]:
        self.begun.set()
        assert self.go.wait(60)
        return super().encode(text)


async def test_closing_ends_what_is_being_tokenized() -> None:
    tokenizer = Held()
    engine = make_engine(tokenizer=tokenizer)
    await engine.start()
    waiting = [asyncio.create_task(engine.tokenize(f"text {number}")) for number in range(5)]
    try:
        await asyncio.to_thread(tokenizer.begun.wait, 60)
        closing = asyncio.create_task(engine.aclose())
        for each in waiting:
            with pytest.raises(EngineClosed):
                await each
    finally:
        tokenizer.go.set()
    await closing
    with pytest.raises(EngineClosed):
        await engine.tokenize("abc")


async def test_a_cancelled_call_leaves_the_others_their_turn() -> None:
    tokenizer = Held()
    engine = make_engine(tokenizer=tokenizer)
    async with engine:
        waiting = [asyncio.create_task(engine.tokenize(f"text {number}")) for number in range(6)]
        await asyncio.to_thread(tokenizer.begun.wait, 60)
        for each in waiting[::2]:
            each.cancel()
        await asyncio.wait(waiting[::2])
        tokenizer.go.set()
        expected = [ToyTokenizer().encode(f"text {number}") for number in (1, 3, 5)]
        assert await asyncio.gather(*waiting[1::2]) == expected
        assert engine.stats().waiting == 0


@rest(SECONDS)
async def test_tokens_in_process() -> None:
    async with Engine(EngineConfig(threads=1)) as engine:
        ids = await engine.tokenize("Once upon a time")
        assert await engine.detokenize(ids) == "Once upon a time"
        chat = await engine.tokenize(USER)
        result = await engine.generate(engine.prompt(USER))
        assert list(result.prompt_token_ids) == chat
        cut = engine.prompt("Once upon a time", truncate_prompt_tokens=2)
        assert list((await engine.generate(cut)).prompt_token_ids) == ids[-2:]
        assert (
            await engine.generate(engine.prompt(ids * 1000, truncate_prompt_tokens=3))
        ).usage.prompt_tokens == 3
        for arguments in ({"truncate_prompt_tokens": 0}, {"add_special_tokens": 1}):
            with pytest.raises(InvalidRequest) as caught:
                engine.prompt("a", **arguments)
            assert caught.value.field in arguments
