"""Two hundred requests with images that are none: each is one refusal of its field, and leaves nothing."""

from __future__ import annotations

import asyncio
import io
import random
import struct
import zlib
from collections.abc import Iterator
from typing import Any

import pytest
from PIL import Image

from aioinfer.server.http.bodies import BODIES
from tests.server.conftest import Served
from tests.server.pictures import encoded, image_url, picture, seeing, uri
from tests.server.test_adversity import idle, until
from tests.tiers import SECONDS, rest

Case = tuple[str, Any]
FIELD = "messages[0].content[1]"
KINDS = ("PNG", "JPEG", "WEBP", "GIF")
FILES = {kind: picture("red", (64, 48), kind) for kind in KINDS}
#: what comes before an image in a file that is something else, too
OTHERS = {
    "zip": b"PK\3\4", "pdf": b"%PDF-1.7\n", "html": b"<html><script>", "elf": b"\x7fELF", "exe": b"MZ\x90\0",
    "svg": b"<svg>", "script": b"#!/bin/sh\n", "gzip": b"\x1f\x8b\x08\0", "mp4": b"\0\0\0\x18ftypmp42",
    "avif": b"\0\0\0\x1cftypavif", "riff": b"RIFF\4\0\0\0WAVE", "tiff": b"II*\0", "psd": b"8BPS",
    "ico": b"\0\0\1\0", "jp2": b"\0\0\0\x0cjP  ", "xcf": b"gimp xcf", "nul": b"\0", "newline": b"\n",
    "bom": b"\xef\xbb\xbf",
}  # fmt: skip
TYPES = [
    *(
        "",
        "text/html",
        "image",
        "image/",
        "image/*",
        "image/svg+xml",
        "image/bmp",
        "image/tiff",
        "image/heic",
    ),
    *("application/octet-stream", "video/mp4", "audio/wav", "image/png image/png", "IMAGE/X-PNG", "png"),
]
HOLES = [
    "",
    " ",
    "\t",
    "\n",
    "\r\n",
    "-",
    "_",
    "%2B",
    "=",
    "==",
    "\0",
    "é",
    "!",
    ".",
    ",",
    "\ud800",
    "\u200b",
]
SIZES = [
    *((65_536, 1), (1, 65_536), (8193, 8193), (20_000, 20_000), (65_535, 65_535), (1 << 30, 1), (1, 1 << 30)),
    *((1 << 31, 1 << 31), (0, 1), (1, 0), (0, 0), ((1 << 32) - 1, (1 << 32) - 1), (9000, 8000)),
]
URLS = [
    "", " ", "/etc/passwd", "//127.0.0.1/x.png", "file:///etc/passwd", "ftp://a.b/x.png", "about:blank",
    "javascript:alert(1)", "blob:http://a.b/1", "http://", "http:///x", "http://[", "http://[::1", "https://:80",
    "http://a.b:99999/", "http://127.0.0.1/x.png", "http://[::1]/x.png", "http://localhost/", "http://0/",
    "http://2130706433/", "http://0x7f.1/", "http://169.254.169.254/latest", "http://[::ffff:127.0.0.1]/",
    "http://user:word@a.b/", "http://a.b#@c.d", "http://a\0.b/", "http://a.b/\r\nHost: c", "data:", "data:,",
    "data:image/png", "data:image/png,abc", "data:image/png;base64", "data:image/png;charset=x;base64,AAAA",
    "data:;base64,AAAA", "data:image/png;base64,", "datä:image/png;base64,AAAA",
    "http://" + "a." * 4000 + "b",
]  # fmt: skip
RED = uri(FILES["PNG"])
PARTS: list[Any] = [
    {"type": "image_url"}, {"type": "image_url", "image_url": None}, {"type": "image_url", "image_url": 5},
    {"type": "image_url", "image_url": []}, {"type": "image_url", "image_url": {}},
    {"type": "image_url", "image_url": {"url": None}}, {"type": "image_url", "image_url": {"url": 7}},
    {"type": "image_url", "image_url": {"url": ["data:"]}}, image_url(RED, detail="low"),
    image_url(RED, mime="x"), {"type": "image", "image": "/etc/passwd"}, {"type": "image"},
    {"type": "image", "image": RED}, {"type": "input_image", "image_url": RED}, {"type": "audio"},
    {"type": "image", "source": {"type": "base64", "data": encoded(FILES["PNG"])}}, {"type": "IMAGE_URL"},
    {"type": "video_url", "video_url": {"url": RED}}, {"type": "file", "file": {"file_id": "f"}},
]  # fmt: skip


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, *chunks: bytes) -> bytes:
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(chunks) + chunk(b"IEND", b"")


def animated(kind: str, frames: int) -> bytes:
    file, made = io.BytesIO(), [Image.new("RGB", (8, 8), (9 * number, 0, 0)) for number in range(frames)]
    made[0].save(file, kind, save_all=True, append_images=made[1:])
    return file.getvalue()


def stated(kind: str, data: bytes) -> Any:
    return image_url(uri(data, f"image/{kind.lower()}"))


def files(rng: random.Random) -> Iterator[Case]:
    """Files that are damaged, of another type, or too much."""
    for kind, data in FILES.items():
        for _ in range(10):
            yield f"{kind} cut", stated(kind, data[: rng.randrange(1, len(data) * 3 // 5)])
        yield f"{kind} of noise", stated(kind, data[:12] + rng.randbytes(500))
        for other in KINDS:
            if other != kind:
                yield f"{kind} as {other}", stated(other, data)
    for at in range(8, 33):
        data = bytearray(FILES["PNG"])
        data[at] ^= 1 << rng.randrange(8)
        yield f"PNG with another byte {at}", stated("PNG", bytes(data))
    for name, begin in OTHERS.items():
        yield f"{name} before PNG", stated("PNG", begin + FILES["PNG"])
    for size in SIZES:
        yield f"PNG of {size}", stated("PNG", png(*size, chunk(b"IDAT", zlib.compress(bytes(9999)))))
    for kind in ("PNG", "WEBP", "GIF"):
        for frames in (2, 9):
            yield f"{kind} of {frames} frames", stated(kind, animated(kind, frames))
    yield (
        "PNG with a bomb",
        stated("PNG", png(8, 8, chunk(b"iCCP", b"a\0\0" + zlib.compress(bytes(9 << 20))))),
    )
    yield "JPEG of scans", stated("JPEG", FILES["JPEG"] + b"\xff\xda" * 101)
    yield "JPEG of segments", stated("JPEG", b"\xff\xd8" + b"\xff\xe5\0\2" * 5000 + FILES["JPEG"][2:])


def texts(rng: random.Random) -> Iterator[Case]:
    """URIs that are malformed, and parts that are no images."""
    for kind in KINDS:
        whole = encoded(FILES[kind])
        for hole in HOLES:
            at = rng.randrange(1, len(whole) - 4)
            cut = whole[: at + 1] if hole == "" and at % 4 != 3 else whole[:at] + hole + whole[at + 2 :]
            yield f"{kind} with a hole {hole!r}", image_url(f"data:image/{kind.lower()};base64,{cut}")
    for kind in TYPES:
        yield f"type {kind!r}", image_url(uri(FILES["PNG"], kind))
    for url in URLS:
        yield f"url {url[:40]!r}", image_url(url)
    for number, part in enumerate(PARTS):
        yield f"part {number}", part


CASES = [*files(random.Random(7)), *texts(random.Random(11))]


@pytest.fixture(autouse=True)
def gives_memory_back() -> Iterator[None]:
    held = BODIES.promised
    yield
    assert BODIES.promised == held


async def ask(served: Served, part: Any) -> Any:
    content = [{"type": "text", "text": "A"}, part]
    return await served.post("/v1/chat/completions", {"messages": [{"role": "user", "content": content}]})


@rest(SECONDS)
async def test_two_hundred_that_are_no_images_are_each_refused_by_their_field() -> None:
    assert len(CASES) > 200
    async with seeing() as served:
        for name, part in CASES:
            reply = await ask(served, part)
            assert reply.status == 400, (name, reply.text[:300])
            error = reply.error
            assert error["param"].startswith(FIELD), (name, error)
            assert error["type"] == "invalid_request_error"
            assert error["message"].startswith(f"{error['param']}: "), (name, error)
            told = error["message"].removeprefix(f"{error['param']}: ")
            # A sentence about it, and neither an object's name nor what was sent.
            assert 8 < len(told) < 400, (name, told)
            assert not any(
                word in told for word in ("Traceback", "object at 0x", "<_io", encoded(FILES["PNG"]))
            ), told
        assert not served.engine.requests  # type: ignore[attr-defined]
        assert (await ask(served, stated("PNG", FILES["PNG"]))).status == 200
        await until(lambda: idle(served))


@rest(SECONDS)
async def test_all_of_them_at_once_leave_the_others_their_answers() -> None:
    good = stated("PNG", FILES["PNG"])
    async with seeing() as served:
        parts = [part for _, part in CASES]
        mixed = [each for part in parts[::3] for each in (part, good)]
        replies = await asyncio.gather(*(ask(served, part) for part in mixed))
        assert [reply.status for reply in replies] == [400, 200] * (len(mixed) // 2)
        await until(lambda: idle(served))


@rest(SECONDS)
@pytest.mark.parametrize("size", [(1, 1), (20_000, 1), (1, 20_000), (65_535, 1), (8192, 8192)])
async def test_an_image_of_any_shape_within_the_limits_is_one(size: tuple[int, int]) -> None:
    file = io.BytesIO()
    Image.new("1", size).save(file, "PNG")
    async with seeing() as served:
        assert (await ask(served, stated("PNG", file.getvalue()))).status == 200
