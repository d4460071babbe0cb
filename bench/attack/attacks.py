"""The attacks: what clients send, made before it is sent.

    python -m bench.attack.attacks NAME HOST PORT ADMIN      build it, wait for a line, carry it out

NAME/ordinary is the same load without what makes it an attack, where there is such a thing. Prints how often
which status came back, as JSON. Each runs in a process of its own and delays no canary.
"""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import struct
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

__all__ = ["ATTACKS", "Attack"]


@dataclass(frozen=True, slots=True)
class Attack:
    """Connections that each send what ``make`` gives for their number, side by side."""

    make: Callable[[int], bytes]
    clients: int = 1
    #: seconds after which a client leaves, whatever it has received
    leaves: float = 15.0
    #: it reads the answer
    reads: bool = True
    #: it goes to the admin port
    admin: bool = False
    #: ordinary requests of the same size, from as many clients that read and stay
    ordinary: Callable[[int], bytes] | None = None


def _request(path: str, body: Any = b"", method: str = "POST", **headers: str) -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    fields = {
        "Host": "localhost",
        "Content-Type": "application/json",
        "Content-Length": str(len(data)),
        **headers,
    }
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + data


def _completion(**fields: Any) -> bytes:
    return _request("/v1/completions", {"prompt": "Count to ten.", "max_tokens": 16, **fields})


def _zipped(body: bytes) -> bytes:
    return _request("/v1/completions", gzip.compress(body), **{"Content-Encoding": "gzip"})


def _schema(schema: Any) -> bytes:
    return _completion(guided_json=schema)


def _names(count: int, start: int = 0) -> list[str]:
    return [f"value {start}-{number}" for number in range(count)]


def _wide(number: int) -> bytes:
    fields = {f"f{number}_{at}": {"type": "string", "maxLength": 90 + at} for at in range(12)}
    return _schema({"type": "object", "properties": fields, "required": [*fields]})


def _nested(depth: int) -> Any:
    schema: Any = {"type": "string"}
    for at in range(depth):
        schema = {"allOf": [schema, {"minLength": at % 7}]}
    return schema


def _twice(number: int) -> bytes:
    keys = ",".join(f'"k{at}":1' for at in range(60_000))
    return _request("/v1/completions", f'{{"prompt":"x","metadata":{{{keys},"k0":2}}}}'.encode())


def _gbnf(number: int) -> bytes:
    rules = [f"r{at} ::= r{at + 1} | [a-z]{number}" for at in range(900)]
    return _completion(guided_grammar="\n".join(["root ::= r0", *rules, 'r900 ::= "a"']))


def _stops(number: int) -> bytes:
    return _completion(n=128, stop=[chr(97 + at) * 1000 + "x" * at + "Z" * 8 for at in range(16)])


def _pattern(number: int) -> bytes:
    return _completion(stop_regex=[f"(?:.|..){{1,{11 + at}}}[~Q]{number}" for at in range(4)], max_tokens=60)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _png(width: int, height: int, *chunks: bytes) -> bytes:
    """An image of one colour, of one bit per pixel: few bytes."""
    head = _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0))
    pixels = _chunk(b"IDAT", zlib.compress(bytes(height * (1 + -(-width // 8)))))
    return b"".join([b"\x89PNG\r\n\x1a\n", head, *chunks, pixels, _chunk(b"IEND", b"")])


def _chat(*images: bytes | str, kind: str = "png") -> bytes:
    """A chat about images, files or what stands for their base64."""
    data = [each if isinstance(each, str) else base64.b64encode(each).decode() for each in images]
    parts = [{"type": "image_url", "image_url": {"url": f"data:image/{kind};base64,{each}"}} for each in data]
    content = [*parts, {"type": "text", "text": "What is it?"}]
    messages = [{"role": "user", "content": content}]
    return _request("/v1/chat/completions", {"messages": messages, "max_tokens": 4})


def _noise(number: int) -> bytes:
    """A chat about an image of 16 MB."""
    side, random = 2350, Random(number)
    rows = b"".join(b"\0" + random.randbytes(3 * side) for _ in range(side))
    header = _chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0))
    pixels = _chunk(b"IDAT", zlib.compress(rows, 0))
    return _chat(b"\x89PNG\r\n\x1a\n" + header + pixels + _chunk(b"IEND", b""))


def _escapes(number: int) -> bytes:
    url = b"data:image/png;base64," + b"\\u0041" * 3_600_000
    part = b'{"type":"image_url","image_url":{"url":"' + url + b'"}}'
    body = b'{"messages":[{"role":"user","content":[' + part + b"]}]}"
    return _request("/v1/chat/completions", body)


def _segments(number: int) -> bytes:
    """JPEG files are closed by what libjpeg calls a premature end."""
    exif = b"\xff\xe1\xff\xffExif\0\0" + bytes(65_527)
    joined = b"\xff\xe1\0\x09Exif\0\0a" * 900_000
    return _chat(b"\xff\xd8" + exif * 60 + joined, kind="jpeg")


def _plainly(**fields: Any) -> Callable[[int], bytes]:
    return lambda number: _completion(**fields)


_LONG = {"prompt": "x", "max_tokens": 1000, "n": 32, "ignore_eos": True}
_UNREAD = {"max_tokens": 800, "stream": True, "ignore_eos": True, "logprobs": 5}
_AMBIGUOUS = 'start: e\ne: e e e | e e | "a" | "b" | "c" | " "'

ATTACKS: dict[str, Attack] = {
    # Grammars, patterns and schemas: little to send, much to build.
    "multiple-of": Attack(lambda n: _schema({"type": "integer", "multipleOf": 9_999_991 + n}), 4),
    "ambiguous": Attack(lambda n: _completion(guided_grammar=_AMBIGUOUS, max_tokens=400), 8,
                        ordinary=_plainly(max_tokens=400)),
    "unrolled": Attack(lambda n: _completion(guided_regex=f"(((a{{100}}){{100}}){{{100 - n}}})"), 4),
    "counted": Attack(lambda n: _schema({"type": "string", "pattern": f"^((ab?){{500}}c){{50{n}}}$"}), 4),
    "lookaheads": Attack(lambda n: _schema({"type": "string", "pattern": "(?=a)" * 9000}), 6),
    "blank-lines": Attack(lambda n: _zipped(b'{"prompt":"","guided_grammar":"' + b"\\n" * 40_000 + b'"}'), 4),
    "schemas": Attack(_wide, 64, ordinary=_plainly()),
    "items": Attack(lambda n: _schema({"type": "array", "items": {}, "maxItems": 10**6 - n}), 4),
    "enum": Attack(lambda n: _schema({"enum": _names(50_000, n)}), 2),
    "all-of": Attack(lambda n: _schema(_nested(400)), 4),
    "gbnf": Attack(_gbnf, 2),
    # Bodies.
    "keys-twice": Attack(_twice, 6),
    "bodies": Attack(lambda n: _zipped(b'{"prompt":"' + b"word " * 3_000_000 + b'"}'), 80),
    "bombs": Attack(lambda n: _zipped(bytes(1 << 28)), 4),
    "ids": Attack(lambda n: _completion(prompt=[7] * 5_000_000), 1),
    "deep": Attack(lambda n: _request("/v1/completions", b'{"prompt":' + b"[" * 500_000), 4),
    # Images, of a model that reads them; others refuse their field.
    "image-bodies": Attack(lambda n: _chat("A" * (22 << 20)), 8, ordinary=_noise),
    "image-escapes": Attack(_escapes, 4),
    "image-holes": Attack(lambda n: _chat("A" * (20 << 20) + "!" + "A" * 3), 8, ordinary=_noise),
    "image-pixels": Attack(lambda n: _chat(*[_png(8000, 8000 + n)] * 2), 16),
    "image-bombs": Attack(lambda n: _chat(_png(60_000, 60_000 + n)), 4),
    "image-heads": Attack(_segments, 4),
    "image-chunks": Attack(lambda n: _chat(_png(8, 8, _chunk(b"prVt", b"") * 900_000)), 2),
    "image-lines": Attack(lambda n: _chat(*[_png(20_000, 1 + n % 4), _png(1, 20_000)] * 16), 64),
    "image-leavers": Attack(lambda n: _chat(*[_png(8000, 8000)] * 8), 32, leaves=1.0),
    # Floods, and clients that leave or do not read.
    "traces": Attack(lambda n: _request("/debug/trace", method="GET") * 20, 20),
    "half-open": Attack(lambda n: b"POST /livez HTTP/1.1\r\nHost: localhost\r\nX: ", 300, leaves=6.0),
    "admin-port": Attack(lambda n: b"GET /st", 300, leaves=6.0, admin=True),
    "pipelines": Attack(lambda n: _request("/v1/completions", _LONG) + _request("/livez", method="GET") * 200,
                        4, leaves=0.7, reads=False, ordinary=_plainly(n=32)),
    "upgrades": Attack(lambda n: _request("/v1/completions", _LONG, Connection="Upgrade", Upgrade="websocket")
                       + b"x" * 300_000, 4, leaves=0.7, reads=False, ordinary=_plainly(n=32)),
    "leavers": Attack(_plainly(max_tokens=100, stream=True), 400, leaves=0.05,
                      ordinary=_plainly(max_tokens=1)),
    "deaf": Attack(_plainly(**_UNREAD), 60, 8.0, reads=False, ordinary=_plainly(**_UNREAD)),
    # Stops.
    "stops": Attack(_stops, 4, ordinary=_plainly(n=128)),
    "stop-regex": Attack(_pattern, 60, ordinary=_plainly(max_tokens=60)),
}  # fmt: skip


async def _carry_out(attack: Attack, host: str, port: int) -> dict[str, int]:
    made = [attack.make(number) for number in range(attack.clients)]
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    seen: Counter[str] = Counter()
    await asyncio.gather(*(_client(attack, host, port, data, seen) for data in made))
    return dict(seen)


async def _client(attack: Attack, host: str, port: int, data: bytes, seen: Counter[str]) -> None:
    try:
        reader, writer = await asyncio.open_connection(host, port)
    except OSError:
        seen["refused"] += 1
        return
    try:
        async with asyncio.timeout(attack.leaves):
            writer.write(data)
            if not attack.reads:
                await asyncio.get_running_loop().create_future()
            seen.update(_statuses(await _read(reader)))
    except TimeoutError:
        seen["left"] += 1
    except OSError:
        seen["cut off"] += 1
    finally:
        writer.transport.abort()


async def _read(reader: asyncio.StreamReader) -> bytes:
    """The head of the first answer, and then its body and whatever comes until half a second of nothing."""
    head = await reader.readline()
    while True:
        try:
            async with asyncio.timeout(0.5):
                if not await reader.read(1 << 20):
                    return head
        except TimeoutError:
            return head


def _statuses(head: bytes) -> Iterator[str]:
    yield head.split()[1].decode() if head.startswith(b"HTTP/") else "closed"


def _chosen(name: str) -> Attack:
    name, _, ordinary = name.partition("/")
    attack = ATTACKS[name]
    if not ordinary:
        return attack
    assert attack.ordinary is not None
    return Attack(attack.ordinary, attack.clients)


if __name__ == "__main__":
    chosen = _chosen(sys.argv[1])
    print(json.dumps(asyncio.run(_carry_out(chosen, sys.argv[2], int(sys.argv[4 if chosen.admin else 3])))))
