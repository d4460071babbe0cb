"""Images in requests, in every form that clients have; and what is refused, by its field."""

from __future__ import annotations

import io
import json
import struct
import threading
import zlib
from collections.abc import Iterator
from typing import Any

import pytest
from PIL import Image

from aioinfer.images import base64 as decoding
from aioinfer.images import encoded as reading
from aioinfer.server.http.bodies import BODIES
from tests.server.calls import Reply
from tests.server.conftest import Served
from tests.server.pictures import claude, encoded, image_url, picture, seeing, uri
from tests.server.test_adversity import idle, until
from tests.tiers import SECONDS, rest

RED, BLUE = picture("red"), picture("blue", kind="JPEG")
MODEL = "fake"
CALL: Any = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}],
}


CLAUDE_IMAGE: Any = {
    "type": "image",
    "source": {"type": "base64", "media_type": "image/png", "data": encoded(RED)},
}


def text(given: str) -> Any:
    return {"type": "text", "text": given}


def user(*parts: Any) -> Any:
    return {"role": "user", "content": list(parts)}


def seen(served: Served) -> str:
    """The text of the newest prompt."""
    prompt: str = served.engine.requests[-1].prompt  # type: ignore[attr-defined]
    return prompt


# -- forms ---------------------------------------------------------------------------------------------


@rest(SECONDS)
async def test_openais_chats_have_images_of_users_and_of_tools() -> None:
    async with seeing() as served, served.client() as client:
        message = user(text("A"), image_url(uri(RED)), text("B"), image_url(uri(BLUE, "image/jpeg")))
        answer = await client.chat.completions.create(model=MODEL, messages=[message])
        assert answer.choices[0].message.content == "Seen."
        assert seen(served) == "user: A<image>B<image>\nassistant: "
        # A position is a token.
        words = seen(served).replace("<image>", "....")
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == len(words)
        tool: Any = {"role": "tool", "tool_call_id": "c1", "content": [image_url(uri(RED)), text("done")]}
        chunks = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "Look"}, CALL, tool], stream=True
        )
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in chunks]) == "Seen."
        assert "tool: <image>done\n" in seen(served)


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": uri(RED)},
        image_url(uri(RED), detail="auto"),
        image_url(uri(RED), detail="high"),
        image_url(uri(RED), detail=None),
        image_url(uri(RED).replace("image/png", "IMAGE/PNG").replace("data:", "Data:")),
        image_url(uri(BLUE, "image/jpg")),
        image_url(uri(picture(kind="WEBP"), "image/webp")),
        image_url(uri(picture(kind="GIF"), "image/gif")),
        # a camera's file of several pictures
        image_url(
            uri(picture(kind="MPO", save_all=True, append_images=[Image.new("RGB", (8, 6))]), "image/jpeg")
        ),
        # what follows an image in its file is not looked at
        image_url(uri(RED + b"PK\3\4" + bytes(100))),
        {**image_url(uri(RED)), "cache_control": {"type": "ephemeral"}},
    ],
    ids=str,
)
async def test_an_image_is_taken_as(part: Any) -> None:
    async with seeing() as served:
        reply = await served.post("/v1/chat/completions", {"messages": [user(part)]})
        assert (reply.status, seen(served)) == (200, "user: <image>\nassistant: ")


@rest(SECONDS)
async def test_responses_have_images_of_inputs_and_outputs_and_go_on_with_them() -> None:
    async with seeing() as served, served.client() as client:
        image: Any = {"type": "input_image", "image_url": uri(RED), "detail": "auto"}
        said: Any = [{"role": "user", "content": [{"type": "input_text", "text": "A"}, image]}]
        first = await client.responses.create(model=MODEL, input=said)
        assert first.output_text == "Seen."
        assert seen(served) == "user: A<image>\nassistant: "
        items: Any = [
            {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": [image]},
        ]
        second = await client.responses.create(model=MODEL, input=items, previous_response_id=first.id)
        assert seen(served).startswith("user: A<image>\nassistant: Seen.")
        assert "tool: <image>\n" in seen(served)
        kept = await client.responses.input_items.list(second.id, order="asc")
        stored = [item.to_dict() for item in kept.data]
        assert stored[0]["content"] == [{"type": "input_text", "text": "A"}, image]
        assert stored[-1]["output"] == [image]


@rest(SECONDS)
async def test_anthropics_messages_have_images_of_users_and_of_results() -> None:
    async with seeing() as served, claude(served) as client:
        block: Any = {
            "type": "image",
            "source": {"type": "base64", "media_type": "image/png", "data": encoded(RED)},
        }
        message: Any = user(text("A"), block, text("B"), text("C"), block)
        asked: Any = {"model": MODEL, "max_tokens": 9, "messages": [message]}
        answer = await client.messages.create(**asked)
        assert answer.to_dict()["content"] == [{"type": "text", "text": "Seen."}]
        assert seen(served) == "user: A<image>BC<image>\nassistant: "
        del asked["max_tokens"]
        count = await client.messages.count_tokens(**asked)
        assert count.input_tokens == answer.usage.input_tokens == len("user: A....BC....\nassistant: ")
        result: Any = {
            "type": "tool_result",
            "tool_use_id": "t1",
            "content": [text("x"), block],
            "is_error": True,
        }
        called: Any = {"type": "tool_use", "id": "t1", "name": "look", "input": {}}
        later = [
            user(text("Look")),
            {"role": "assistant", "content": [called]},
            user(result, block, text("Well?")),
        ]
        await client.messages.create(model=MODEL, max_tokens=9, messages=[*later, user(block)])
        assert "tool: Error: x<image>\nuser: <image>Well?\n\n<image>\n" in seen(served)


async def test_tokens_and_sessions_have_images() -> None:
    async with seeing() as served:
        message = user(image_url(uri(RED)))
        reply = await served.post("/tokenize", {"messages": [message]})
        tokens = reply.json()["tokens"]
        assert tokens == [1 + byte for byte in b"user: \0\0\0\0\nassistant: "]
        made = await served.post("/v1/sessions", {"messages": [message]})
        session = made.json()["id"]
        for number in range(2):
            body = {"session": session, "messages": [user(text("A"), image_url(uri(BLUE, "image/jpeg")))]}
            assert (await served.post("/v1/chat/completions", body)).status == 200
            assert seen(served).count("<image>") == 2 + number
        # Fields are those of the call, whatever came before it.
        body["messages"] = [user(image_url(uri(RED[:40])))]
        reply = await served.post("/v1/chat/completions", body)
        assert reply.refusal == (400, "messages[0].content[0].image_url.url")


# -- refusals ------------------------------------------------------------------------------------------


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, *chunks: bytes) -> bytes:
    """A PNG file whose head says so."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(chunks) + chunk(b"IEND", b"")


def animated(kind: str) -> bytes:
    file, frames = io.BytesIO(), [Image.new("RGB", (8, 8), color) for color in ("red", "blue", "green")]
    frames[0].save(file, kind, save_all=True, append_images=frames[1:])
    return file.getvalue()


BASE64 = encoded(RED)
BOMB = png(30_000, 30_000, chunk(b"IDAT", zlib.compress(bytes(1 << 20))))
SVG = b"<svg xmlns='http://www.w3.org/2000/svg'><image href='file:///etc/passwd'/></svg>"
#: URLs that are no images, and a word of what is said
HOSTILE: dict[str, tuple[str, str]] = {
    # no URL of an image
    "empty": ("", "must be a data URI or"),
    "path": ("/etc/passwd", "must be a data URI or"),
    "file": ("file:///etc/passwd", "must be a data URI or"),
    "gopher": ("gopher://127.0.0.1:70/x", "must be a data URI or"),
    "ftp": ("ftp://a.b/x.png", "must be a data URI or"),
    "script": ("javascript:alert(1)", "must be a data URI or"),
    "blob": ("blob:http://a.b/1", "must be a data URI or"),
    "no host": ("http:///x.png", "must be a data URI or"),
    "port": ("http://a.b:99999/x.png", "must be a data URI or"),
    "long": ("http://a.b/" + "x" * 9000, "must be a data URI or"),
    "nul": ("http://a\0.b/x", "image_hosts"),
    "remote": ("https://a.b/x.png", "image_hosts"),
    "loopback": ("http://127.0.0.1/x.png", "image_hosts"),
    "metadata": ("http://169.254.169.254/latest/", "image_hosts"),
    "credentials": ("https://user:secret@a.b/x.png", "no user and no password"),
    # no data URI in base64 of a type that is read
    "no comma": ("data:image/png;base64", "is no data URI"),
    "bare": ("data:", "is no data URI"),
    "text": ("data:,hello", "must be in base64"),
    "not base64": ("data:image/png,%89PNG", "must be in base64"),
    "parameter": (f"data:image/png;charset=utf-8;base64,{BASE64}", "must be in base64"),
    "no type": (f"data:;base64,{BASE64}", "must be of type"),
    "svg": (uri(SVG, "image/svg+xml"), "must be of type"),
    "html": (uri(b"<html>", "text/html"), "must be of type"),
    "pdf": (uri(b"%PDF-1.7", "application/pdf"), "must be of type"),
    "bmp": (uri(picture(kind="BMP"), "image/bmp"), "must be of type"),
    "tiff": (uri(picture(kind="TIFF"), "image/tiff"), "must be of type"),
    # base64 with holes
    "space": (f"data:image/png;base64, {BASE64}", "white space at character 0"),
    "newline": (uri(RED) + "\n", "is not base64"),
    "lines": (f"data:image/png;base64,{BASE64[:40]}\r\n\r\n{BASE64[40:]}", "white space at character 40"),
    "hole": (f"data:image/png;base64,{BASE64[:40]}\0\0\0\0{BASE64[44:]}", "'\\x00' at character 40"),
    "url alphabet": (f"data:image/png;base64,{BASE64[:40]}-_-_{BASE64[44:]}", "alphabet of URLs"),
    "escaped": (f"data:image/png;base64,{BASE64[:40]}%2B%2B{BASE64[46:]}", "an escape at character 40"),
    "not ascii": (f"data:image/png;base64,{BASE64[:40]}éééé", "'é' at character 40"),
    "padding within": (f"data:image/png;base64,{BASE64[:40]}AA=={BASE64[44:]}", "padding at character 42"),
    "padding missing": ("data:image/png;base64,iVBORw", "no whole groups of four"),
    "padding twice": ("data:image/png;base64,iVBORw======", "is not base64"),
    "padding alone": ("data:image/png;base64,====", "is not base64"),
    "too much padding": ("data:image/png;base64,iVBO====", "is not base64"),
    "no data": ("data:image/png;base64,", "empty"),
    "surrogate": ("data:image/png;base64,\ud800\ud800\ud800\ud800", "is not base64"),
    # files of other types than stated
    "png as jpeg": (uri(RED, "image/jpeg"), "is stated to be image/jpeg, and begins as image/png"),
    "jpeg as png": (uri(BLUE), "is stated to be image/png, and begins as image/jpeg"),
    "svg as png": (uri(SVG), "is no image of type"),
    "html as gif": (uri(b"<script>", "image/gif"), "is no image of type"),
    "zip before png": (uri(b"PK\3\4" + RED), "is no image of type"),
    "elf": (uri(b"\x7fELF" + bytes(100)), "is no image of type"),
    "bmp as png": (uri(picture(kind="BMP")), "is no image of type"),
    "one byte": (uri(b"\x89"), "is no image of type"),
    # damaged files
    "signature": (uri(RED[:8]), "cannot be decoded"),
    "head": (uri(RED[:33]), "cannot be decoded"),
    "truncated": (uri(RED[:50]), "cannot be decoded"),
    "jpeg truncated": (uri(BLUE[:100], "image/jpeg"), "cannot be decoded"),
    "webp truncated": (uri(picture(kind="WEBP")[:30], "image/webp"), "cannot be decoded"),
    "gif truncated": (uri(b"GIF89a" + bytes(3), "image/gif"), "cannot be decoded"),
    "no pixels": (uri(png(8, 8)), "cannot be decoded"),
    "checksum": (uri(RED[:20] + bytes(4) + RED[24:]), "cannot be decoded"),
    "zeros": (uri(b"\xff\xd8\xff" + bytes(1000), "image/jpeg"), "cannot be decoded"),
    # too large, or several
    "large": (uri(png(9000, 9000)), "max_image_pixels"),
    "bomb": (uri(BOMB), "decompression bomb"),
    "wide": (uri(png(1 << 30, 1)), "decompression bomb"),
    "tall": (uri(png(1, 1 << 31)), "decompression bomb"),
    "nothing wide": (uri(png(0, 5)), "cannot be decoded"),
    "animated gif": (uri(animated("GIF"), "image/gif"), "is animated"),
    "animated png": (uri(animated("PNG")), "is animated"),
    "animated webp": (uri(animated("WEBP"), "image/webp"), "is animated"),
    "scans": (uri(BLUE[:-2] + b"\xff\xda" * 200 + BLUE[-2:], "image/jpeg"), "more than 100 scans"),
}


@pytest.fixture(autouse=True)
def gives_memory_back() -> Iterator[None]:
    held = BODIES.promised
    yield
    assert BODIES.promised == held


async def test_what_is_no_image_is_refused_by_its_field() -> None:
    async with seeing() as served:
        for name, (url, said) in HOSTILE.items():
            body = {"messages": [user(text("A"), image_url(uri(RED))), user(text("B"), image_url(url))]}
            reply = await served.post("/v1/chat/completions", body)
            assert reply.refusal == (400, "messages[1].content[1].image_url.url"), name
            assert said in reply.error["message"], (name, reply.error["message"])
            assert len(reply.error["message"]) < 500, name
        assert len(HOSTILE) > 60
        assert not served.engine.requests  # type: ignore[attr-defined]
        await until(lambda: idle(served))


async def test_every_protocol_names_its_field() -> None:
    async with seeing() as served:
        for name in ("remote", "hole", "jpeg as png", "truncated", "bomb", "animated gif"):
            url, said = HOSTILE[name]
            item = {
                "role": "user",
                "content": [{"type": "input_text", "text": "A"}, {"type": "input_image", "image_url": url}],
            }
            reply = await served.post("/v1/responses", {"input": [item]})
            assert reply.refusal == (400, "input[0].content[1].image_url"), name
            assert said in reply.error["message"], name
            output = {"type": "function_call_output", "call_id": "1", "output": item["content"]}
            reply = await served.post("/v1/responses", {"input": [item | {"content": "A"}, output]})
            assert reply.refusal == (400, "input[1].output[1].image_url"), name
            head, _, data = url.partition(",")
            if not data:
                continue
            source = {"type": "base64", "media_type": head[5:].partition(";")[0], "data": data}
            for block in ({"type": "image", "source": source}, result({"type": "image", "source": source})):
                body = {"max_tokens": 9, "messages": [user(text("A"), text("B"), block)]}
                for path in ("/v1/messages", "/v1/messages/count_tokens"):
                    given = body if path == "/v1/messages" else {"messages": body["messages"]}
                    reply = await served.post(path, given)
                    where = "messages[0].content[2]" + ("" if block["type"] == "image" else ".content[1]")
                    assert reply.status == 400, name
                    assert reply.error["message"].startswith(f"{where}.source"), (name, reply.error)
                    assert said in reply.error["message"], name


def result(block: Any) -> Any:
    return {"type": "tool_result", "tool_use_id": "t", "content": [text("A"), block]}


def asked(path: str, message: Any) -> tuple[str, Any]:
    """The path and a body with this message."""
    name = "input" if path == "responses" else "messages"
    more = {"max_tokens": 9} if path == "messages" else {}
    return f"/v1/{path}", {name: [message], **more}


def sourced(**source: str) -> Any:
    return {"type": "image", "source": source}


CHATS, ITEM = "chat/completions", {"type": "input_image", "image_url": uri(RED)}
#: endpoint, message, and the field below that
FORMS: list[tuple[str, Any, str]] = [
    (CHATS, user(image_url(uri(RED), detail="low")), "image_url.detail"),
    (CHATS, user({"type": "image_url"}), "image_url"),
    (CHATS, user({"type": "image_url", "image_url": 5}), "image_url"),
    (CHATS, user(image_url(5)), "image_url.url"),  # type: ignore[arg-type]
    (CHATS, user({**image_url(uri(RED)), "colour": 1}), "colour"),
    (CHATS, user({"type": "input_audio"}), "type"),
    (CHATS, {"role": "system", "content": [image_url(uri(RED))]}, "type"),
    (CHATS, {"role": "assistant", "content": [image_url(uri(RED))]}, "type"),
    ("responses", user({"type": "input_image", "file_id": "file_1"}), "file_id"),
    ("responses", user({"type": "input_image"}), "image_url"),
    ("responses", user({**ITEM, "image_url": {"url": uri(RED)}}), "image_url"),
    ("responses", user({**ITEM, "detail": "low"}), "detail"),
    ("responses", {"role": "developer", "content": [ITEM]}, "type"),
    ("messages", user({"type": "image"}), "source"),
    ("messages", user(sourced(type="file", file_id="f")), "source.type"),
    ("messages", user(sourced(type="url", url="https://a.b")), "source.url"),
    ("messages", user(sourced(type="base64", media_type="image/png")), "source.data"),
    ("messages", user(sourced(type="base64", media_type="image/tiff", data=BASE64)), "source.data"),
    ("messages", {"role": "assistant", "content": [sourced(type="url", url="https://a.b")]}, "type"),
]


@pytest.mark.parametrize(("path", "message", "field"), FORMS)
async def test_forms_that_would_be_ignored_are_refused(path: str, message: Any, field: str) -> None:
    where, body = asked(path, message)
    async with seeing() as served:
        reply = await served.post(where, body)
        assert reply.status == 400
        items = "input" if path == "responses" else "messages"
        assert reply.error["message"].startswith(f"{items}[0].content[0].{field}: ")


@pytest.mark.parametrize("given", ["/etc/passwd", uri(RED), encoded(RED), {"data": encoded(RED)}, None])
async def test_no_body_has_what_a_program_gives(given: Any) -> None:
    """A path would be one of the server's files."""
    part = {"type": "image", "image": given}
    async with seeing() as served:
        for path in ("/v1/chat/completions", "/v1/sessions", "/tokenize"):
            reply = await served.post(path, {"messages": [user(part)]})
            assert reply.refusal == (400, "messages[0].content[0].type"), path
        for path, body in (
            ("/v1/responses", {"input": [user(part)]}),
            ("/v1/messages", {"max_tokens": 1, "messages": [user(part)]}),
        ):
            assert (await served.post(path, body)).status == 400
        assert not served.engine.requests  # type: ignore[attr-defined]


async def test_a_model_that_reads_no_images_says_so() -> None:
    bodies = {
        "/v1/chat/completions": {"messages": [user(image_url("https://a.b/c"))]},
        "/v1/responses": {"input": [user({"type": "input_image", "image_url": uri(RED)})]},
        "/tokenize": {"messages": [user(image_url(uri(RED)))]},
    }
    async with seeing(images=False) as served:
        for path, body in bodies.items():
            reply = await served.post(path, body)
            assert reply.status == 400
            assert "this model reads no images" in reply.error["message"]
            assert reply.error["code"] == "unsupported_parameter"
        assert modalities(await served.get("/v1/models/fake")) == ["text"]
    async with seeing() as served:
        assert modalities(await served.get("/v1/models/fake")) == ["text", "image"]


def modalities(reply: Reply) -> Any:
    return reply.json()["architecture"]["input_modalities"]


# -- limits --------------------------------------------------------------------------------------------


async def test_there_are_so_many_images_of_a_request_and_no_more() -> None:
    async with seeing() as served:
        parts = [image_url(uri(RED))] * 32
        reply = await served.post("/v1/chat/completions", {"messages": [user(*parts)]})
        assert reply.status == 200
        reply = await served.post("/v1/chat/completions", {"messages": [user(*parts, image_url(uri(RED)))]})
        assert reply.refusal == (400, "messages[0].content[32].image_url.url")
        assert "max_images" in reply.error["message"]


@rest(SECONDS)
async def test_a_body_may_be_larger_where_the_model_reads_images() -> None:
    large = {"messages": [user(image_url(uri(RED + bytes(4 << 20))))]}
    begin = json.dumps({"messages": [user(image_url("data:image/png;base64,"))]}).encode()
    huge = begin.replace(b"base64,", b"base64," + b"A" * (50 << 20))
    async with seeing(images=False) as served:
        assert (await served.post("/v1/chat/completions", large)).status == 413
    async with seeing() as served:
        assert (await served.post("/v1/chat/completions", large)).status == 200
        reply = await served.post("/v1/chat/completions", huge)
        assert (reply.status, reply.error["code"]) == (413, "body_too_large")
    async with seeing(max_body_mib=64) as served:
        reply = await served.post("/v1/chat/completions", huge)
        assert reply.status == 400
        assert "max_image_bytes" in reply.error["message"]


@rest(SECONDS)
async def test_images_are_decoded_beside_the_loop_and_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    threads, sizes = [], []
    decode, take = decoding.decoded_base64, decoding.binascii.a2b_base64

    def decoded(given: str, field: str) -> bytes:
        threads.append(threading.current_thread())
        return decode(given, field)

    class Watched:
        @staticmethod
        def a2b_base64(given: str, **options: Any) -> bytes:
            sizes.append(len(given))
            return take(given, **options)

    monkeypatch.setattr(reading, "decoded_base64", decoded)
    monkeypatch.setattr(decoding, "binascii", Watched)
    data = RED + bytes(range(256)) * 16_384
    async with seeing() as served:
        reply = await served.post("/v1/chat/completions", {"messages": [user(image_url(uri(data)))]})
        assert reply.status == 200
    assert threads
    assert threading.main_thread() not in threads
    assert sum(sizes) == len(encoded(data))
    assert max(sizes) == 1 << 20
