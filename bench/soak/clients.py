"""Twelve kinds of clients that go on until the time is up, and know what the answers must be."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

__all__ = ["KINDS", "Soak"]

_QUESTIONS = [f"What is {a} + {b}?" for a in range(11, 31) for b in (5, 17)]
_SHARED = "The following is a list of things to remember. " * 8
_SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["red", "green"]}, "n": {"type": "integer", "maximum": 99, "minimum": 0}},
    "required": ["name", "n"],
    "additionalProperties": False,
}


@dataclass(slots=True)
class Soak:
    """What all clients share: the server, the answers as they were when asked alone, and what was seen."""

    url: str
    session: aiohttp.ClientSession = field(init=False)
    expected: dict[str, Any] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    stopped: bool = False

    async def client(self, kind: str, rng: random.Random) -> None:
        """One client: request after request, with a pause now and then."""
        while not self.stopped:
            try:
                await KINDS[kind](self, rng)
            except (aiohttp.ClientError, OSError) as error:
                self.wrong.append(f"{kind}: {error!r}")
            self.counts[kind] += 1
            await asyncio.sleep(rng.random() * 0.2)

    def check(self, name: str, body: dict[str, Any], answer: Any) -> None:
        """Compare with what the same body brought first."""
        key = f"{name} {json.dumps(body, sort_keys=True)}"
        if answer != self.expected.setdefault(key, answer):
            self.wrong.append(f"{name}: {answer!r} instead of {self.expected[key]!r}")

    async def answer(self, path: str, body: dict[str, Any], status: int = 200) -> dict[str, Any]:
        """The answer in one piece; another status than expected is wrong."""
        async with self.session.post(f"{self.url}{path}", json=body) as response:
            found: dict[str, Any] = await response.json()
            if response.status != status:
                self.wrong.append(f"{path}: {response.status} {json.dumps(found)[:200]}")
            return found

    async def stream(
        self,
        path: str,
        body: dict[str, Any],
        *,
        leave_after: int | None = None,
        pause: float = 0.0,
    ) -> list[dict[str, Any]]:
        """The events of a stream, all or the first few; ``pause`` seconds between reads."""
        events: list[dict[str, Any]] = []
        async with self.session.post(f"{self.url}{path}", json={**body, "stream": True}) as response:
            if response.status != 200:
                self.wrong.append(f"{path}: {response.status} {(await response.text())[:200]}")
                return events
            async for line in response.content:
                if line.startswith(b"data: [DONE]"):
                    return events
                if line.startswith(b"data: "):
                    events.append(json.loads(line[6:]))
                    if leave_after is not None and len(events) >= leave_after:
                        response.close()
                        return events
                    if pause:
                        await asyncio.sleep(pause)
        self.wrong.append(f"{path}: a stream without an end")
        return events


def _chat(rng: random.Random, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": rng.choice(_QUESTIONS)}]
    return {"messages": messages, "temperature": 0, "max_tokens": 24, **fields}


def _text(events: list[dict[str, Any]]) -> dict[int, str]:
    texts: dict[int, str] = {}
    for event in events:
        for choice in event.get("choices", ()):
            piece = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            texts[choice["index"]] = texts.get(choice["index"], "") + piece
    return texts


async def _blocking_chat(soak: Soak, rng: random.Random) -> None:
    body = _chat(rng)
    found = await soak.answer("/v1/chat/completions", body)
    soak.check("chat", body, found["choices"][0]["message"]["content"])


async def _streamed_chat(soak: Soak, rng: random.Random) -> None:
    body = _chat(rng)
    events = await soak.stream("/v1/chat/completions", body)
    soak.check("chat", body, _text(events).get(0))


async def _choices(soak: Soak, rng: random.Random) -> None:
    body = {"prompt": rng.choice(_QUESTIONS), "n": 4, "seed": rng.randrange(8), "max_tokens": 16}
    events = await soak.stream("/v1/completions", body)
    soak.check("choices", body, _text(events))


async def _leaves_midway(soak: Soak, rng: random.Random) -> None:
    await soak.stream("/v1/completions", {"prompt": "Once", "max_tokens": 300}, leave_after=rng.randint(1, 9))


async def _leaves_at_once(soak: Soak, rng: random.Random) -> None:
    body = {"prompt": _SHARED + str(rng.randrange(10**6)), "max_tokens": 100}
    try:
        async with asyncio.timeout(rng.random() * 0.02):
            await soak.answer("/v1/completions", body)
    except TimeoutError:
        pass


async def _reads_slowly(soak: Soak, rng: random.Random) -> None:
    body = _chat(rng, ignore_eos=True)
    events = await soak.stream("/v1/chat/completions", body, pause=0.05)
    soak.check("slow", body, _text(events).get(0))


async def _schema(soak: Soak, rng: random.Random) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "thing", "schema": _SCHEMA}}
    body = _chat(rng, response_format=schema, max_tokens=60)
    found = await soak.answer("/v1/chat/completions", body)
    text = found["choices"][0]["message"]["content"]
    soak.check("schema", body, text)
    if found["choices"][0]["finish_reason"] == "stop" and set(json.loads(text)) != {"name", "n"}:
        soak.wrong.append(f"schema: {text}")


async def _stops(soak: Soak, rng: random.Random) -> None:
    stop = rng.choice(["4", "= ", "1"])
    body = _chat(rng, stop=[stop, "never seen"])
    found = await soak.answer("/v1/chat/completions", body)
    text = found["choices"][0]["message"]["content"]
    soak.check("stops", body, text)
    if stop in text:
        soak.wrong.append(f"stops: {stop!r} is in {text!r}")


async def _logprobs(soak: Soak, rng: random.Random) -> None:
    body = {"prompt": rng.choice(_QUESTIONS), "logprobs": 3, "echo": True, "max_tokens": 8, "temperature": 0}
    found = await soak.answer("/v1/completions", body)
    soak.check("logprobs", body, found["choices"][0]["logprobs"])


async def _invalid(soak: Soak, rng: random.Random) -> None:
    field, value = rng.choice([("temperature", -1), ("n", 0), ("max_tokens", "x"), ("stop", [1])])
    body = _chat(rng) | {field: value}
    await soak.answer("/v1/chat/completions", body, status=400)


async def _shared_prefix(soak: Soak, rng: random.Random) -> None:
    body = {"prompt": f"{_SHARED}{rng.randrange(40)}:", "max_tokens": 8, "temperature": 0}
    found = await soak.answer("/v1/completions", body)
    soak.check("prefix", body, found["choices"][0]["text"])


async def _breaks_off(soak: Soak, rng: random.Random) -> None:
    """A connection that is reset in the middle of a body."""
    host, port = soak.url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: 100\r\n\r\n{{".encode())
    await asyncio.sleep(rng.random() * 0.05)
    writer.transport.abort()


KINDS: dict[str, Callable[[Soak, random.Random], Awaitable[None]]] = {
    "chat": _blocking_chat,
    "streamed": _streamed_chat,
    "choices": _choices,
    "leaves midway": _leaves_midway,
    "leaves at once": _leaves_at_once,
    "reads slowly": _reads_slowly,
    "schema": _schema,
    "stops": _stops,
    "logprobs": _logprobs,
    "invalid": _invalid,
    "shared prefix": _shared_prefix,
    "breaks off": _breaks_off,
}
