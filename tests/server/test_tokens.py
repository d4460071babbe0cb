"""Token ids over HTTP and in process: what the model would get, and its text."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import aiohttp
import pytest

from aioinfer.config import EngineConfig
from aioinfer.engine import Engine
from aioinfer.errors import EngineClosed, InvalidRequest
from aioinfer.execution.launcher import ThreadLauncher
from aioinfer.server.tokens import Detokenized, Tokenized, TokenizerInfo
from tests.server.conftest import Bundled, Serving
from tests.server.test_openapi import violations
from tests.tiers import SECONDS, rest
from tests.toys import ToyDevice, ToyTokenizer

USER = [{"role": "user", "content": "abc"}]


async def asked(session: aiohttp.ClientSession, path: str, body: Any = None) -> tuple[int, Any]:
    method = "GET" if body is None else "POST"
    async with session.request(method, path, json=body) as response:
        return response.status, await response.json()


async def test_a_text_becomes_tokens_and_text_again(bundled: Bundled) -> None:
    async with bundled() as client, aiohttp.ClientSession(str(client.base_url)[:-3]) as session:
        status, found = await asked(session, "tokenize", {"prompt": "Once upon", "return_token_strs": True})
        assert (status, violations(Tokenized, found)) == (200, [])
        assert found["count"] == len(found["tokens"]) == len(found["token_strs"]) > 1
        status, bare = await asked(session, "tokenize", {"prompt": "Once upon", "add_special_tokens": False})
        assert bare["token_strs"] is None
        assert found["tokens"][-bare["count"] :] == bare["tokens"]
        status, text = await asked(session, "detokenize", {"tokens": bare["tokens"]})
        assert (status, text, violations(Detokenized, text)) == (200, {"prompt": "Once upon"}, [])
        status, info = await asked(session, "tokenizer_info")
        assert (status, violations(TokenizerInfo, info)) == (200, [])
        assert found["max_model_len"] == info["max_model_len"]


async def test_a_chat_has_the_tokens_that_generating_counts(bundled: Bundled) -> None:
    async with bundled() as client, aiohttp.ClientSession(str(client.base_url)[:-3]) as session:
        answer = await client.chat.completions.create(model="tiny-chat", messages=USER, max_tokens=1)  # type: ignore[arg-type]
        assert answer.usage is not None
        _, found = await asked(session, "tokenize", {"messages": USER})
        assert found["count"] == answer.usage.prompt_tokens
        _, unanswered = await asked(session, "tokenize", {"messages": USER, "add_generation_prompt": False})
        assert unanswered["tokens"] == found["tokens"][: unanswered["count"]] != found["tokens"]


async def test_counting_goes_beyond_the_context_and_ends_where_no_prompt_could(serving: Serving) -> None:
    async with serving() as served, aiohttp.ClientSession(served.url) as session:
        limit = served.engine.info.max_model_len
        longest = (served.engine.tokenizer or ToyTokenizer()).longest_token or 1
        status, found = await asked(session, "/tokenize", {"prompt": "a" * (longest * (limit - 1))})
        assert status == 200
        status, found = await asked(session, "/tokenize", {"prompt": "a" * (longest * limit + 1)})
        assert (status, found["error"]["code"]) == (400, "context_length_exceeded")


@rest(SECONDS)
@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("tokenize", {}, "messages"),
        ("tokenize", {"prompt": ""}, "prompt"),
        ("tokenize", {"prompt": [1, 2]}, "prompt"),
        ("tokenize", {"prompt": "a", "messages": USER}, "messages"),
        ("tokenize", {"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt"),
        ("tokenize", {"prompt": "a", "add_special_tokens": 1}, "add_special_tokens"),
        ("tokenize", {"prompt": "a", "truncate": 1}, "truncate"),
        ("tokenize", {"messages": USER, "chat_template": "x"}, "chat_template"),
        ("detokenize", {}, "tokens"),
        ("detokenize", {"tokens": "abc"}, "tokens"),
        ("detokenize", {"tokens": [1, "2"]}, "tokens"),
        ("detokenize", {"tokens": [True]}, "tokens"),
        ("detokenize", {"tokens": [1 << 40]}, "tokens"),
        ("detokenize", {"tokens": [-1]}, "tokens"),
        ("detokenize", {"tokens": [1], "skip": True}, "skip"),
    ],
)
async def test_what_is_wrong_is_named(serving: Serving, path: str, body: Any, param: str) -> None:
    async with serving() as served, aiohttp.ClientSession(served.url) as session:
        status, found = await asked(session, f"/{path}", body)
    assert (status, found["error"]["param"]) == (400, param), found


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
    async with serving(max_queued_requests=2) as served, aiohttp.ClientSession(served.url) as session:
        monkeypatch.setattr(served.engine, path, wait, raising=False)
        first = [asyncio.create_task(asked(session, f"/{path}", body)) for _ in range(2)]
        for _ in first:
            await began.acquire()
        status, found = await asked(session, f"/{path}", body)
        assert (status, "max_queued_requests" in found["error"]["message"]) == (429, True)
        free.set()
        assert [(await each)[0] for each in first] == [200] * 2


async def test_another_model_has_no_tokens_here(serving: Serving) -> None:
    async with serving() as served, aiohttp.ClientSession(served.url) as session:
        for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
            status, found = await asked(session, path, {**body, "model": "other"})
            assert (status, found["error"]["code"]) == (404, "model_not_found")


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


def held_engine() -> tuple[Engine, Held]:
    tokenizer = Held()
    config = EngineConfig(model="toy", page_size=4, num_pages=64)
    device = ToyDevice(num_pages=64, page_size=4, num_slots=config.num_slots)
    engine = Engine(config, launcher=lambda _: ThreadLauncher(device), tokenizer=lambda _: tokenizer)
    return engine, tokenizer


async def test_closing_ends_what_is_being_tokenized() -> None:
    engine, tokenizer = held_engine()
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
    engine, tokenizer = held_engine()
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
                engine.prompt("a", **arguments)  # type: ignore[arg-type]
            assert caught.value.field in arguments
