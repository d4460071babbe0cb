"""Turns of sessions over HTTP that overlap, whose clients leave, or which take long."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from typing import Any

import aiohttp
import pytest

from aioinfer.server.http.disconnects import ClientGone
from aioinfer.server.openai.wires import OpenAIAnswer
from aioinfer.server.owned import Owned
from aioinfer.server.sessions.turns import Turn
from tests.engine.conftest import Gate
from tests.server.conftest import Serving
from tests.server.test_adversity import idle, until
from tests.server.test_sessions import ASK, CHAT, TEXT, make, read, say
from tests.server.test_sessions import limited as limited  # a fixture
from tests.server.test_stored_responses import message, of


async def test_a_turn_that_was_read_amid_another_is_not_taken_behind_it(
    serving: Serving, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, goes_on = threading.Event(), threading.Event()
    begin = Turn.begin

    def slowly(self: Turn, messages: Any) -> Any:
        if messages == [message("Second")]:
            made.set()
            assert goes_on.wait(60)
        return begin(self, messages)

    monkeypatch.setattr(Turn, "begin", slowly)
    async with serving(fault=gate) as served:
        session = await make(served)
        first = asyncio.create_task(say(served, session, "First"))
        await until(lambda: served.engine.stats().running == 1)
        second = asyncio.create_task(say(served, session, "Second"))
        await until(made.is_set)
        gate.release()
        assert (await first).status == 200
        goes_on.set()
        # It has messages without those of the first one.
        assert (await second).refusal == (409, "session")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_a_turn_whose_client_left_after_its_last_token_leaves_the_session_as_it_was(
    serving: Serving, monkeypatch: pytest.MonkeyPatch, stream: bool, path: str
) -> None:
    first = [message("Be brief.", "system")]
    begin = {"messages": first} if path == CHAT else {"prompt": [1, 2, 3]}
    more = {"messages": [message("More")]} if path == CHAT else {"prompt": [4]}
    async with serving() as served:
        session = await make(served, **begin)
        before = await read(served, session)
        forks: list[Any] = []

        async def leave(*_: Any) -> None:
            await until(lambda: idle(served))
            forks.append((await served.http("POST", f"/v1/sessions/{session}/fork")).json())
            raise ClientGone("planned")

        with monkeypatch.context() as patch:
            patch.setattr(OpenAIAnswer, "whole", leave)
            patch.setattr(OpenAIAnswer, "chunk", leave)
            patch.setattr(OpenAIAnswer, "plain", lambda self, index: None)
            with suppress(aiohttp.ClientError):
                await served.post(path, {**ASK, **more, "session": session, "stream": stream})
        found = await read(served, session)
        assert (found["num_tokens"], found["busy"]) == (before["num_tokens"], False)
        assert found["held_tokens"] <= found["num_tokens"]
        turn = (await served.post(path, {**ASK, **more, "session": session})).json()
        whole = {"messages": [*first, *more["messages"]]} if path == CHAT else {"prompt": [1, 2, 3, 4]}
        wanted = (await served.post(path, {**ASK, **whole})).json()
        assert turn["usage"]["prompt_tokens"] == wanted["usage"]["prompt_tokens"]
        # A fork has what was there, and nothing twice.
        after = [
            (await served.post(path, {**ASK, **more, "session": each})).json()["usage"]["prompt_tokens"]
            for each in (session, forks[0]["id"])
        ]
        assert after[0] == after[1]


@pytest.mark.parametrize(
    "begin", [{"prompt": [*range(1, 51)]}, {"messages": [message("Be brief. " * 9, "system")]}]
)
async def test_first_messages_count_if_their_client_left(
    serving: Serving, gate: Gate, limited: dict[str, Any], still: None, begin: dict[str, Any]
) -> None:
    async with serving(server=limited, fault=gate) as served:
        left = asyncio.create_task(served.post("/v1/sessions", begin, **of("carol")))
        await until(lambda: served.engine.stats().running == 1)
        left.cancel()
        await asyncio.wait([left])
        gate.release()
        await until(lambda: idle(served))
        assert (await served.post("/v1/sessions", {}, **of("carol"))).status == 429
        assert served.engine.stats().sessions == 0


async def test_a_session_does_not_expire_amid_a_turn(
    serving: Serving, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    defaults: Any = Owned.__init__.__kwdefaults__
    monkeypatch.setitem(defaults, "clock", lambda: now[0])
    async with serving(fault=gate) as served:
        session = await make(served, ttl=10)
        turn = asyncio.create_task(say(served, session, "Hello"))
        await until(lambda: served.engine.stats().running == 1)
        now[0] = 15
        assert (await read(served, session))["busy"]
        gate.release()
        assert (await turn).status == 200
        now[0] = 24
        assert (await read(served, session))["num_tokens"] > 0
        now[0] = 25
        assert (await served.get(f"/v1/sessions/{session}")).status == 404
