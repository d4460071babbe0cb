"""``aioinfer chat --url``: a server answers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from aioinfer.cli.chat import Remote
from aioinfer.errors import RequestError
from tests.server.conftest import Serving
from tests.tiers import SECONDS, rest


async def answers(remote: Remote, values: dict[str, Any]) -> str:
    messages = [{"role": "user", "content": "hi"}]
    return "".join([piece async for piece in remote.answer(messages, values)])


@rest(SECONDS)
async def test_a_server_answers(serving: Serving) -> None:
    async with serving(server={"api_key": "k"}) as served:
        for url in (served.url, f"{served.url}/", f"{served.url}/v1"):
            remote = Remote(url, "k", None)
            assert await answers(remote, {"max_tokens": 4, "temperature": 0, "ignore_eos": True})
            assert remote.counts is not None
            assert remote.counts[1] == 4
        for key, model, values, message in (
            ("wrong", None, {}, "401: wrong API key"),
            ("k", "other", {}, "404: "),
            ("k", None, {"nonsense": 1}, "400: nonsense"),
        ):
            with pytest.raises(RequestError, match=message):
                await answers(Remote(served.url, key, model), values)
    with pytest.raises(RequestError, match=r"http://127\.0\.0\.1"):
        await answers(Remote(served.url, None, None), {})


@pytest.mark.parametrize(
    "body", ["data: [1]\n\n", "data: {\n\n", 'data: {"choices": 7}\n\n', "data: nothing\n\n"]
)
async def test_what_is_no_answer_is_one_error(body: str) -> None:
    async def other(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + body.encode())
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(other, "127.0.0.1", 0) as server:
        url = "http://{}:{}".format(*server.sockets[0].getsockname())
        if body == "data: [1]\n\n":
            assert await answers(Remote(url, None, None), {}) == ""
        else:
            with pytest.raises(RequestError, match="OpenAI's protocol"):
                await answers(Remote(url, None, None), {})
