"""Large bodies and large answers: refused by size, or read and written in slices."""

from __future__ import annotations

import asyncio
import json
import threading
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioinfer.chat.answers import ChatFormat
from aioinfer.config import ServerConfig
from aioinfer.errors import InvalidRequest
from aioinfer.outputs import Chunk, Result, TokenLogprob, Usage
from aioinfer.params import SamplingParams
from aioinfer.server.http import pace, parsing, pieces
from aioinfer.server.http.failures import Refused
from aioinfer.server.http.limits import Limits
from aioinfer.server.http.pace import Pace
from aioinfer.server.http.parsing import BodyParser, decompress
from aioinfer.server.http.pieces import PiecesPayload
from aioinfer.server.openai.cost import check_answer
from aioinfer.server.openai.logprobs import ChatLogprobs, CompletionLogprobs, Speller, TextOffsets, divided
from aioinfer.server.openai.protocol import Call, parse_chat, parse_completion
from aioinfer.server.openai.protocol import Served as Offer
from aioinfer.server.openai.shapes import CHAT, COMPLETION, Shape
from aioinfer.server.openai.whole import whole_answer
from aioinfer.server.wire import AnswerContext
from tests.server.conftest import Connect, Serving
from tests.server.raw import request
from tests.tiers import SECONDS, rest, scaled
from tests.toys import ToyTokenizer

PATH = "/v1/completions"
OFFER = Offer("toy", SamplingParams(), ChatFormat())
LIMITS = Limits.of(ServerConfig(), 4096)


# -- bodies -----------------------------------------------------------------------------------------


@rest(SECONDS)
def test_limits_follow_from_the_context() -> None:
    assert LIMITS.body == (1 << 20) + 64 * 4096
    assert Limits.of(ServerConfig(), 1 << 20).body == 16 << 20
    assert Limits.of(ServerConfig(max_body_mib=0.5, max_body_values=7), 1 << 20).body == 1 << 19
    # A prompt of ids that fills the context passes.
    for context in (512, 4096, 1 << 17, 1 << 20):
        Limits.of(ServerConfig(), context).check_values(b"[%s]" % b",".join([b"151643"] * context))


def test_values_are_counted_in_all_of_a_large_body() -> None:
    raw = b'{"prompt":[' + b",".join([b"7"] * (1 << 20)) + b"]}"
    assert replace(LIMITS, values=1 << 21).check_values(raw) == (1 << 20) - 1 + 3
    with pytest.raises(InvalidRequest, match=f"{(1 << 20) + 2} values"):
        replace(LIMITS, values=(1 << 20) + 1).check_values(raw)


@asynccontextmanager
async def counting_turns() -> AsyncIterator[Callable[[], int]]:
    """Gives a function that says how often another task has had a turn of the loop."""
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    try:
        yield lambda: turns
    finally:
        counting.cancel()
        await asyncio.wait([counting])


async def test_a_body_that_is_declared_too_large_is_not_read(serving: Serving, connect: Connect) -> None:
    async with serving() as served:
        raw = await connect(served)
        head = request("POST", PATH, Content_Type="application/json", Content_Length="9000000")
        await raw.send(head + b"{")
        assert await raw.status() == 413


@rest(SECONDS)
async def test_a_body_without_a_length_is_refused_while_it_is_read(
    serving: Serving, connect: Connect
) -> None:
    async with serving(server={"max_body_mib": 0.01}) as served:
        raw = await connect(served)
        head = request("POST", PATH, Content_Type="application/json", Transfer_Encoding="chunked")
        await raw.send(head + b"1\r\n{\r\n")
        for _ in range(10):
            await raw.send(b"400\r\n" + b" " * 1024 + b"\r\n")
        # More than the limit has been sent, and not the end.
        await raw.send(b"400\r\n" + b" " * 1024 + b"\r\n")
        assert await raw.status() == 413


@rest(SECONDS)
async def test_decompression_is_in_slices_and_ends_at_the_limit() -> None:
    """64 MiB of zeros."""
    packer = zlib.compressobj()
    bomb = b"".join([packer.compress(bytes(1 << 20)) for _ in range(64)]) + packer.flush()
    async with counting_turns() as turns:
        with pytest.raises(Refused) as refused:
            await decompress(bomb, 4 << 20, "deflate")
    assert refused.value.failure.status == 413
    slices = (4 << 20) // parsing._SLICE
    assert slices <= turns() <= slices + 3
    text = bytes(range(256)) * 16384
    assert await decompress(zlib.compress(text, 0), 16 << 20, "deflate") == text


@pytest.mark.parametrize(
    "raw",
    [
        b'{"prompt":[' + b"[]," * 200_000 + b"1]}",
        b'{"x":' + b'{"a":' * 200_000 + b"1" + b"}" * 200_001,
        b'{"messages":[' + b'{"role":"user","content":"x"},' * 60_000 + b"{}]}",
        b'{"prompt":[' + b"1," * 300_000 + b"1]}",
    ],
    ids=["lists", "objects", "messages", "ids"],
)
async def test_bodies_of_many_values_are_refused_unparsed(
    raw: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json, "loads", lambda *given, **named: pytest.fail("parsed"))
    with pytest.raises(InvalidRequest, match="max_body_values") as refused:
        await BodyParser().parse(lambda body: parse_completion(body, OFFER), raw, LIMITS)
    assert refused.value.field == "body"


async def test_large_bodies_and_patterns_are_parsed_on_a_worker_thread_one_at_a_time() -> None:
    here, running, most, threads = threading.get_ident(), 0, 0, []
    lock = threading.Lock()

    def parse(raw: bytes) -> int:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        threads.append(threading.get_ident())
        json.loads(raw)
        with lock:
            running -= 1
        return len(raw)

    parser = BodyParser()
    assert await parser.parse(parse, b"{}", LIMITS) == 2
    assert threads == [here]
    large = [b'{"prompt":"%s"}' % (b"x" * 100_000), b'{"stop_regex":"x"}'] * 4
    assert await asyncio.gather(*(parser.parse(parse, raw, LIMITS) for raw in large))
    assert here not in threads[1:]
    assert most == 1


def test_the_number_of_messages_is_limited() -> None:
    raw = json.dumps({"messages": [{"role": "user", "content": "x"}] * 5}).encode()
    parse_chat(raw, Offer("toy", SamplingParams(), ChatFormat(), max_messages=5))
    with pytest.raises(InvalidRequest, match="max_messages") as refused:
        parse_chat(raw, Offer("toy", SamplingParams(), ChatFormat(), max_messages=4))
    assert refused.value.field == "messages"


# -- answers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "refused"),
    [
        ({"n": 128, "max_tokens": 400, "logprobs": 20}, True),
        ({"n": 128, "max_tokens": 400, "logprobs": 3}, False),
        ({"n": 128, "max_tokens": 400}, False),
        ({"n": 1, "max_tokens": 1_000_000, "logprobs": 20}, False),
        ({"n": 4, "max_tokens": 1_000_000, "logprobs": 20}, True),
        ({"n": 4, "max_tokens": 1, "logprobs": 20, "echo": True}, True),
        ({"n": 4, "max_tokens": 1, "logprobs": 20, "echo": True, "prompt": [1, 2]}, False),
    ],
)
def test_the_logprobs_of_an_answer_are_limited(body: dict[str, Any], refused: bool) -> None:
    call = parse_completion(json.dumps({"prompt": "x", **body}).encode(), OFFER)
    if not refused:
        check_answer(call, LIMITS)
        return
    with pytest.raises(InvalidRequest, match="max_answer_logprobs") as error:
        check_answer(call, LIMITS)
    assert error.value.field == "logprobs"


def test_the_prompt_logprobs_of_a_chat_are_limited_by_its_tokens_and_not_its_messages() -> None:
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "prompt_logprobs": 20}
    check_answer(parse_chat(json.dumps(chat).encode(), OFFER), LIMITS)
    with pytest.raises(InvalidRequest, match="max_answer_logprobs") as error:
        check_answer(parse_chat(json.dumps({**chat, "n": 128}).encode(), OFFER), LIMITS)
    assert error.value.field == "prompt_logprobs"


@pytest.mark.parametrize("stream", [False, True])
def test_the_prompts_that_an_answer_repeats_are_limited(stream: bool) -> None:
    text, ids = "x" * (LIMITS.echo // 128), [1] * (LIMITS.echo // 128 // 8)
    for prompt, longer in ((text, text + "x"), (ids, [*ids, 1]), ([ids] * 2, [ids, [*ids, 1]])):
        n = 64 if prompt == [ids] * 2 else 128
        for asked, echo, refused in ((prompt, True, False), (longer, False, False), (longer, True, True)):
            body = {"prompt": asked, "n": n, "echo": echo, "stream": stream}
            call = parse_completion(json.dumps(body).encode(), OFFER)
            if not refused:
                check_answer(call, LIMITS)
                continue
            with pytest.raises(InvalidRequest, match="max_answer_logprobs") as error:
                check_answer(call, LIMITS)
            assert error.value.field == "echo"


def call_for(shape: Shape) -> Call:
    prompt = {"messages": [{"role": "user", "content": "x"}]} if shape is CHAT else {"prompt": "x"}
    parse = parse_chat if shape is CHAT else parse_completion
    return parse(json.dumps({**prompt, "n": 2}).encode(), OFFER)


def results(tokens: int) -> list[Result]:
    top = tuple((token, -float(token)) for token in range(20))
    logprobs = [TokenLogprob(at % 50, -0.5, top) for at in range(tokens)]
    return [
        Result("text", [1] * tokens, "length", Usage(1, tokens), logprobs=logprobs, prompt_token_ids=[1])
        for _ in range(2)
    ]


@pytest.mark.parametrize("shape", [CHAT, COMPLETION], ids=["chat", "completion"])
async def test_a_whole_answer_is_written_in_slices_and_never_in_one_piece(
    shape: Shape, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long texts, with and without escapes, many tokens and their rounds. Each token is decoded once."""
    monkeypatch.setattr(pace, "_SLICE", 0.0)
    monkeypatch.setattr(pieces, "PIECE", 256)
    length = 20 * 256
    call = replace(call_for(shape), step_map=True)
    texts = ["x" * length, '"\u00e9\U0001f600\ud800' * (length // 4)]
    answers = [
        replace(result, text=text, step_map=[7] * length)
        for text, result in zip(texts, results(300), strict=True)
    ]
    decoded: list[int] = []

    def spell(token: int) -> bytes:
        decoded.append(token)
        return f"t{token}\u00e9".encode()

    speller = Speller(spell)
    context = AnswerContext(None, speller, [None, None], lambda _: Usage(1, 1), lambda _: [1])
    logprobs = [
        shape.logprobs(speller, TextOffsets(ToyTokenizer(), [1], echo, call.params)) for echo in ("", "echo")
    ]
    async with counting_turns() as turns:
        written = await whole_answer(call, shape, answers, ["", "echo"], speller, context, logprobs)
    assert max(map(len, written)) < 16_384
    assert turns() > sum(map(len, written)) / 4096
    assert sorted(decoded) == list(range(50))
    choices = json.loads(b"".join(written))["choices"]
    found = [each["message"]["content"] if shape is CHAT else each["text"] for each in choices]
    assert found == [texts[0], "echo" + texts[1]]
    assert [each["step_map"] for each in choices] == [[7] * length] * 2
    scores = choices[1]["logprobs"]
    if shape is CHAT:
        entry = scores["content"][49]
        assert (entry["token"], entry["logprob"], bytes(entry["bytes"]).decode()) == ("t49é", -0.5, "t49é")
        assert entry["top_logprobs"][3] == {"token": "t3é", "logprob": -3.0, "bytes": list("t3é".encode())}
    else:
        assert (scores["tokens"][49], scores["text_offset"][:3]) == ("t49é", [4, 4, 5])
        assert scores["top_logprobs"][49]["t3é"] == -3.0


@rest(SECONDS)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=12),
        lambda inner: st.lists(inner) | st.lists(st.integers()) | st.dictionaries(st.text(), inner),
    )
)
@settings(max_examples=scaled(100), deadline=None)
def test_json_in_pieces_is_the_same_json(value: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "PIECE", 4)
        assert "".join(pieces._parts(value)) == json.dumps(value)
        assert "".join(pieces.cut(str(value))) == str(value)


async def test_a_large_answer_is_sent_in_pieces_and_has_a_length(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "PIECE", 64)
    body = {"prompt": [1, 2], "max_tokens": 20, "ignore_eos": True, "logprobs": 1, "n": 4, "seed": 1}
    async with serving() as served:
        for _ in range(2):  # on one connection
            reply = await served.post(PATH, body)
            assert int(reply.headers["Content-Length"]) == len(reply.text) > 1000
            assert reply.type == "application/json"
    assert [len(each["logprobs"]["tokens"]) for each in reply.json()["choices"]] == [20] * 4


async def test_a_client_that_does_not_read_a_large_answer_is_given_up() -> None:
    class Stuck:
        """A connection that takes two pieces."""

        taken = 0

        async def write(self, piece: bytes) -> None:
            self.taken += 1
            if self.taken > 2:
                await asyncio.Event().wait()

    given_up = []
    writer: Any = Stuck()
    payload = PiecesPayload([b"x"] * 5, 0.01, lambda: given_up.append(True))
    assert (payload.size, payload.decode()) == (5, "xxxxx")
    with pytest.raises(ConnectionResetError):
        await payload.write(writer)
    assert (writer.taken, given_up) == (3, [True])


# -- streams ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [CHAT, COMPLETION], ids=["chat", "completion"])
@pytest.mark.parametrize("tokens", [0, 1, 256, 257, 1000])
def test_the_chunk_of_a_slow_reader_has_bounded_logprobs_per_event(shape: Shape, tokens: int) -> None:
    logprobs = [TokenLogprob(at, -0.5, ()) for at in range(tokens)]
    chunk = Chunk("text", [*range(tokens)], "stop", 3, Usage(1, tokens), logprobs, [*range(tokens)])
    parts = [*divided(chunk)]
    assert max(len(part.token_ids) for part in parts) <= 256
    assert [each for part in parts for each in part.token_ids] == chunk.token_ids
    assert [each for part in parts for each in part.logprobs or ()] == logprobs
    assert [each for part in parts for each in part.step_map or ()] == chunk.step_map
    assert all(part.finish_reason is None and not part.text for part in parts[:-1])
    last = parts[-1]
    assert (last.text, last.finish_reason, last.stop_reason, last.usage) == ("text", "stop", 3, chunk.usage)
    plain = replace(chunk, logprobs=None)
    assert [*divided(plain)] == [plain]


async def test_an_echo_is_streamed_in_pieces(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PIECE", 7)
    prompt = "abcdefghijklmnopq\u00e9\U0001f600"
    body = {"prompt": prompt, "max_tokens": 1, "stream": True, "echo": True, "n": 2, "seed": 1}
    async with serving() as served:
        choices = [event["choices"][0] for event in (await served.post(PATH, body)).events()]
    for index in range(2):
        mine = [each["text"] for each in choices if each["index"] == index]
        assert "".join(mine).startswith(prompt)
        assert len(mine) >= 4
        assert all(len(each) <= 7 for each in mine[:-1])


async def test_an_echoed_prompt_is_decoded_once_for_all_choices(serving: Serving) -> None:
    decoded = []

    class Recorded(ToyTokenizer):
        def decode(self, ids: Any, *, skip_special_tokens: bool = True) -> str:
            decoded.append(list(ids))
            return super().decode(ids)

    async with serving(tokenizer=Recorded()) as served:
        body = {"prompt": [[1, 2, 3], [4, 5]], "n": 5, "echo": True, "max_tokens": 1, "temperature": 0}
        answer = (await served.post(PATH, body)).json()
    texts = [choice["text"] for choice in answer["choices"]]
    assert [text.startswith(ToyTokenizer().decode([1, 2, 3])) for text in texts] == [True] * 5 + [False] * 5
    assert decoded == [[1, 2, 3], [4, 5]]


async def written(writer: ChatLogprobs | CompletionLogprobs, entries: list[TokenLogprob | None]) -> str:
    parts: list[str] = []
    await writer.write(entries, Pace(), parts.append, [7])
    return "".join(parts)


async def test_logprobs_are_json_whatever_their_values() -> None:
    entries = [None, TokenLogprob(1, -float("inf"), ((2, float("nan")),))]
    speller = Speller(lambda token: b'"\\\n')
    offsets = TextOffsets(None, [7], "", SamplingParams())
    chat = json.loads(await written(ChatLogprobs(speller), entries), parse_constant=pytest.fail)
    assert [each["logprob"] for each in chat["content"]] == [-9999.0]
    plain = json.loads(
        await written(CompletionLogprobs(speller, offsets), entries), parse_constant=pytest.fail
    )
    assert plain["token_logprobs"] == [None, -9999.0]
    assert plain["top_logprobs"] == [None, {'"\\\n': -9999.0}]
