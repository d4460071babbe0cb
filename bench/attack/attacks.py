"""The attacks: valid and invalid requests of one kind each, made before they are sent.

    python -m bench.attack.attacks NAME URL        build the attack, wait for a line on stdin, carry it out

Prints a JSON object when it is over: how often which status came back, how many clients left or were cut off.
Each runs in a process of its own, so that building and sending large bodies delays no canary.
"""

from __future__ import annotations

import asyncio
import gzip
import itertools
import json
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

__all__ = ["ATTACKS", "Attack"]

_KIB, _MIB = 1 << 10, 1 << 20
#: seconds after which a client that still waits leaves
_PATIENCE = 6.0


@dataclass(frozen=True, slots=True)
class Attack:
    """``clients`` connections that each send ``body()`` to ``path``, ``times`` times.

    ``leaves``: seconds after which a client hangs up whatever it has received. ``reads``: whether it reads
    the answer at all. ``raw``: bytes that are sent instead of a request.
    """

    purpose: str
    body: Callable[[], Any] = dict
    path: str = "/v1/completions"
    clients: int = 1
    times: int = 1
    leaves: float = _PATIENCE
    reads: bool = True
    headers: dict[str, str] = field(default_factory=dict)
    raw: bytes = b""


def _completion(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny-chat", "prompt": "Count to ten.", "max_tokens": 16, **fields}


def _chat(content: Any = "Count to ten.", **fields: Any) -> dict[str, Any]:
    return {"model": "tiny-chat", "messages": [{"role": "user", "content": content}], **fields}


def _stops() -> dict[str, Any]:
    stops = [chr(97 + at) * 1000 + "x" * at + "Z" * 8 for at in range(16)]
    return _completion(n=128, stop=stops)


def _schema(properties: int) -> dict[str, Any]:
    names = {
        f"field_{at}": {"type": "string", "enum": [f"v{at}_{k}" for k in range(20)]}
        for at in range(properties)
    }
    schema = {"type": "object", "properties": names, "required": list(names), "additionalProperties": False}
    return {"type": "json_schema", "json_schema": {"name": "big", "schema": schema, "strict": True}}


def _nested(depth: int) -> bytes:
    return b'{"model":"tiny-chat","prompt":' + b"[" * depth + b"]" * depth + b"}"


def _objects(count: int) -> bytes:
    return b'{"model":"tiny-chat","prompt":"x","metadata":[' + b",".join([b'{"a":{}}'] * count) + b"]}"


_CHAT = "/v1/chat/completions"

ATTACKS: dict[str, Attack] = {
    # What once froze the loop.
    "stops": Attack("4 bodies with 16 stop strings of 1,000 characters and n=128", _stops, clients=4),
    "logprobs": Attack(
        "n=128 with 20 logprobs each over 400 tokens, in one answer",
        lambda: _chat(n=128, logprobs=True, top_logprobs=20, max_tokens=400, ignore_eos=True),
        _CHAT,
        leaves=30.0,
    ),
    "stop-regex": Attack(
        "60 streams with a stop expression that backtracks",
        lambda: _completion(stop_regex=["(?:.|..){1,11}[~Q]"], max_tokens=200, ignore_eos=True, stream=True),
        clients=60,
    ),
    "ids": Attack("16 MiB of token ids", lambda: _completion(prompt=[7] * (16 * _MIB // 3 - 100))),
    "messages": Attack(
        "500,000 messages",
        lambda: {"model": "tiny-chat", "messages": [{"role": "user", "content": ""}] * 500_000},
        _CHAT,
    ),
    "bomb": Attack(
        "1 MiB of gzip that is 1 GiB",
        lambda: gzip.compress(bytes(1 << 30)),
        headers={"Content-Encoding": "gzip"},
        clients=2,
    ),
    # Of the same kind.
    "long-text": Attack(
        "256 KiB of spaces with n=128, left after 0.3 s",
        lambda: _completion(prompt=" " * (256 * _KIB), n=128),
        clients=8,
        leaves=0.3,
    ),
    "huge-text": Attack("15 MiB of text", lambda: _completion(prompt="word " * (3 * _MIB)), clients=2),
    "nested": Attack("arrays nested 500,000 deep", lambda: _nested(500_000), clients=4, times=4),
    "objects": Attack("500,000 objects in metadata", lambda: _objects(500_000), clients=2),
    "keys": Attack(
        "200,000 unknown fields", lambda: _completion(**{f"unknown_{at}": 1 for at in range(200_000)})
    ),
    "schemas": Attack(
        "12 JSON schemas of 300 properties with 20 choices each",
        lambda: _chat(response_format=_schema(300)),
        _CHAT,
        clients=12,
    ),
    "choices": Attack(
        "20,000 choices",
        lambda: _completion(guided_choice=[f"choice {at}" for at in range(20_000)]),
        clients=4,
    ),
    "regex": Attack(
        "grammars of nested repetitions",
        lambda: _completion(guided_regex="((a{1,500}b){1,500}c){1,500}"),
        clients=8,
    ),
    "biases": Attack(
        "100,000 biases", lambda: _completion(logit_bias={str(at): 1 for at in range(100_000)}), clients=4
    ),
    "bad-words": Attack(
        "20,000 bad words", lambda: _completion(bad_words=[f"bad{at}" for at in range(20_000)]), clients=4
    ),
    "prompts": Attack(
        "8,192 prompts in one request", lambda: _completion(prompt=["hello"] * 8192, max_tokens=2), clients=2
    ),
    "tools": Attack(
        "5,000 tools",
        lambda: _chat(
            tools=[
                {"type": "function", "function": {"name": f"f{at}", "parameters": {"type": "object"}}}
                for at in range(5000)
            ]
        ),
        _CHAT,
        clients=4,
    ),
    "parts": Attack(
        "100,000 parts of one message",
        lambda: _chat([{"type": "text", "text": "a"}] * 100_000),
        _CHAT,
        clients=2,
    ),
    "surrogates": Attack(
        "1 MiB of combining characters and escapes",
        lambda: b'{"model":"tiny-chat","prompt":"' + b"\\u0301\\ud83d" * 80_000 + b'"}',
        clients=4,
    ),
    "half-open": Attack(
        "300 connections whose headers never end",
        raw=b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX: ",
        clients=300,
    ),
    "not-http": Attack(
        "connections that speak something else", raw=b"\x16\x03\x01" * 50 + b"\r\n\r\n", clients=100, times=10
    ),
    "deaf": Attack(
        "60 streams whose clients do not read",
        lambda: _completion(max_tokens=800, stream=True, ignore_eos=True, logprobs=5),
        clients=60,
        reads=False,
    ),
    "leavers": Attack(
        "100 clients that leave at once, 20 times",
        lambda: _completion(max_tokens=100, stream=True),
        clients=100,
        times=20,
        leaves=0.05,
    ),
}


async def _carry_out(attack: Attack, url: str) -> dict[str, int]:
    payload = attack.raw or await asyncio.to_thread(_request, attack, url)
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    host, port = url.removeprefix("http://").split(":")
    seen: Counter[str] = Counter()
    await asyncio.gather(*(_client(attack, host, int(port), payload, seen) for _ in range(attack.clients)))
    return dict(seen)


def _request(attack: Attack, url: str) -> bytes:
    """The request's bytes; bodies that are no bytes are JSON."""
    made = attack.body()
    body = made if isinstance(made, bytes) else json.dumps(made).encode()
    host = url.removeprefix("http://")
    fields = {
        "Host": host,
        "Content-Type": "application/json",
        "Content-Length": str(len(body)),
        **attack.headers,
    }
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"POST {attack.path} HTTP/1.1\r\n{head}\r\n".encode() + body


async def _client(attack: Attack, host: str, port: int, payload: bytes, seen: Counter[str]) -> None:
    for _ in range(attack.times):
        try:
            reader, writer = await asyncio.open_connection(host, port)
        except OSError:
            seen["refused"] += 1
            continue
        try:
            async with asyncio.timeout(attack.leaves):
                seen[await _exchange(attack, reader, writer, payload)] += 1
        except TimeoutError:
            seen["left"] += 1
        except OSError:
            seen["cut off"] += 1
        finally:
            writer.transport.abort()


async def _exchange(
    attack: Attack, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, payload: bytes
) -> str:
    """Send, and return the status, or what happened instead."""
    writer.write(payload)
    if not attack.reads:
        await asyncio.get_running_loop().create_future()
    # A server may refuse before it has read everything.
    line = await reader.readline()
    if not line:
        return "closed"
    async for _ in _rest(reader):
        pass
    return line.split()[1].decode() if line.startswith(b"HTTP/") else "not HTTP"


async def _rest(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """The rest of one answer: as long as its head says, or until the last chunk."""
    length, chunked = 0, False
    while (line := await reader.readline()) not in (b"\r\n", b""):
        name, _, value = line.lower().partition(b":")
        length = int(value) if name == b"content-length" else length
        chunked = chunked or (name == b"transfer-encoding" and b"chunked" in value)
    while chunked:
        size = int(await reader.readline() or b"0", 16)
        yield await reader.readexactly(size + 2)
        if size == 0:
            return
    while length > 0:
        part = await reader.read(min(length, _MIB))
        if not part:
            return
        length -= len(part)
        yield part


def main(arguments: Iterable[str]) -> None:
    name, url = itertools.islice(arguments, 2)
    print(json.dumps(asyncio.run(_carry_out(ATTACKS[name], url))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
