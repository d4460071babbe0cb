"""Frames and messages: what is sent comes out as it went in, and nothing else is taken for it."""

from __future__ import annotations

import dataclasses
import math
import struct
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioinfer import SamplingParams, errors
from aioinfer.config import EngineConfig
from aioinfer.engine import Engine
from aioinfer.errors import EngineError
from aioinfer.execution.device import DeviceInfo
from aioinfer.images.source import ImageSource
from aioinfer.observe.stats import EngineStats
from aioinfer.outputs import AdapterInfo, Draft, TokenLogprob
from aioinfer.parallel.frames import HANDSHAKE_LIMIT, LIMIT, FrameError, FrameReader, frame
from aioinfer.parallel.messages import (
    Abort,
    Adapt,
    Adapted,
    Answers,
    Decoder,
    Fetch,
    Fetched,
    Flush,
    Held,
    Hello,
    Hold,
    Keep,
    Kept,
    Leaving,
    Lost,
    Message,
    Orders,
    Read,
    Refused,
    Release,
    Share,
    Shared,
    Stats,
    StepRows,
    Store,
    Stored,
    Submit,
    Use,
    Welcome,
    encoded,
)
from aioinfer.parallel.rows import Ending, Rows, check
from aioinfer.parallel.sent_errors import SentError
from aioinfer.params import DiffusionParams, Grammar
from aioinfer.pooling import Pooling
from aioinfer.request import Request
from aioinfer.resuming.record import StreamCheckpoint
from tests.tiers import SECONDS, rest

#: so that ids can be anything
VOCAB = 1 << 32

TEXT = st.text(max_size=20)

decode = Decoder(Hello | Welcome | Refused | Orders | Answers)


def again(rows: list[tuple[int, Rows]]) -> list[tuple[int, Rows]]:
    """The rows as the other end reads them."""
    found: list[tuple[int, Rows]] = decode(encoded(StepRows(rows))).rows
    check(found, VOCAB)
    return found


# -- frames --------------------------------------------------------------------------------------------


@rest(SECONDS)
@given(st.lists(st.binary(min_size=1, max_size=300)), st.lists(st.integers(1, 400), min_size=1))
def test_frames_come_out_as_they_went_in_whatever_the_pieces(frames: list[bytes], sizes: list[int]) -> None:
    data = b"".join(map(frame, frames))
    reader, found, at, turn = FrameReader(), [], 0, 0
    while at < len(data):
        size = sizes[turn % len(sizes)]
        found += reader.feed(data[at : at + size])
        at, turn = at + size, turn + 1
    assert found == frames


@given(st.binary(max_size=400), st.integers(1, 100))
def test_any_bytes_are_frames_or_one_error(data: bytes, size: int) -> None:
    reader = FrameReader(limit=200)
    try:
        for at in range(0, len(data), size):
            assert all(len(payload) <= 200 for payload in reader.feed(data[at : at + size]))
    except FrameError:
        pass
    assert len(reader._data) <= 200 + 4 + size


@pytest.mark.parametrize("size", [0, HANDSHAKE_LIMIT + 1, LIMIT + 1, (1 << 32) - 1])
def test_a_length_beyond_the_limit_is_refused_before_it_is_read(size: int) -> None:
    reader = FrameReader(HANDSHAKE_LIMIT)
    with pytest.raises(FrameError, match=f"a frame of {size} bytes"):
        list(reader.feed(struct.pack("<I", size)))
    reader = FrameReader(HANDSHAKE_LIMIT)
    assert list(reader.feed(struct.pack("<I", HANDSHAKE_LIMIT))) == []


def test_what_cannot_be_sent_is_refused() -> None:
    with pytest.raises(FrameError, match="too large"):
        frame(bytes(LIMIT + 1))
    with pytest.raises(FrameError, match="cannot be sent"):
        encoded(Hello("\ud800"))


# -- messages ------------------------------------------------------------------------------------------

INFO = DeviceInfo(
    vocab_size=100,
    max_model_len=64,
    num_pages=20,
    eos_token_ids=frozenset({3, 7}),
    description="toy",
    page_size=4,
    kernels={"attention": "native (it is there)"},
    deterministic=True,
    fingerprint="abc",
    numerics="n",
)
STATS = EngineStats(
    **{
        item.name: {"int": 1, "float": 0.5, "bool": True, "str": "x"}.get(str(item.type), {"attention": 0.25})
        for item in dataclasses.fields(EngineStats)
    }
)
ADAPTER = AdapterInfo("sql", "/adapters/sql", 3, 16, 1 << 20, "abc", 2)
PARAMS = [
    SamplingParams(seed=5),
    SamplingParams(temperature=0.0, max_tokens=9, stop=["a", "b"], seed=1 << 62),
    SamplingParams(logit_bias={3: -1.5}, logprobs=2, prompt_logprobs=1, seed=0, bad_words=["x"]),
    SamplingParams(grammar=Grammar("json_schema", '{"type": "object"}'), seed=1),
    SamplingParams(diffusion=DiffusionParams(threshold=0.5, draft=True), seed=1),
]
ROW = Rows(
    3,
    9,
    [5, 6],
    " and",
    admitted_at=0.0,
    logprobs=[TokenLogprob(5, -0.5, ((5, -0.5),))] * 2,
    steps=[0, 1],
    draft=lambda: Draft(5, (1, None), "x", (0, None)),
    ending=Ending("abort", error=errors.Rejected("full"), pooled=np.ones((1, 2), np.float32)),
)
MESSAGES: list[Message] = [
    Hello("ü"),
    Welcome(INFO, 8, 512, STATS, True, (ADAPTER,)),
    Refused("why"),
    Stats(STATS),
    Submit.of(4, (1, 2), Request(params=PARAMS[0], pooling=Pooling("choices", (3, 4))), None, 0),
    Abort(9),
    Read(9, 100),
    Flush(),
    Leaving(),
    Lost("it burns"),
    Adapt(7, "sql", b"/a \xff"),
    Adapted(7, (ADAPTER,), errors.Rejected("full")),
    StepRows([(1, ROW), (2, Rows(0, 0))]),
    Share(1, 1 << 30, b"/a \xff"),
    Store(2, [1, 2], "salt", "sql"),
    Fetch(3, bytes(range(16)), 1 << 20),
    Keep(4, bytes(range(16)), 5, 9, b"four"),
    Hold(5, [1, 2], "salt", "sql", 9.5, compute=True),
    Hold(6, of=5),
    Use(5),
    Release(5),
    Shared(1, "why"),
    Stored(2, 2, [bytes(range(16))]),
    Fetched(3, 9, b"piece"),
    Kept(4, True),
    Held(5, 4, errors.Rejected("full")),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_comes_out_as_it_went_in(message: Message) -> None:
    found = decode(encoded(message))
    assert type(found) is type(message)
    assert encoded(found) == encoded(message)  # errors and arrays do not compare


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
@given(data=st.data())
def test_messages_that_are_cut_or_changed_are_messages_or_one_error(
    message: Message, data: st.DataObject
) -> None:
    payload = encoded(message)
    with pytest.raises(FrameError):
        decode(payload[: data.draw(st.integers(0, len(payload) - 1))])
    changed = bytearray(payload)
    for at in data.draw(st.lists(st.integers(0, len(payload) - 1), min_size=1, max_size=4)):
        changed[at] = data.draw(st.integers(0, 255))
    try:
        found = decode(bytes(changed))
        if isinstance(found, StepRows):
            check(found.rows, VOCAB)
        elif isinstance(found, Submit):
            found.asked()
    except (FrameError, errors.InvalidRequest):
        pass


@rest(SECONDS)
@given(
    st.binary(max_size=100)
    | st.recursive(
        st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | TEXT,
        lambda inner: st.lists(inner, max_size=6) | st.dictionaries(TEXT, inner, max_size=3),
        max_leaves=12,
    ).map(msgspec.msgpack.encode)
)
def test_any_bytes_are_a_message_or_one_error(data: bytes) -> None:
    try:
        decode(data)
    except FrameError:
        pass


@pytest.mark.parametrize("header", [b"\xdd", b"\xdf", b"\xc6", b"\xdb"])
def test_lengths_inside_of_a_message_are_not_believed(header: bytes) -> None:
    for size in (b"\x00\xff\xff\xff", b"\xff\xff\xff\xff"):
        with pytest.raises(FrameError, match=r"truncated|Expected"):
            decode(b"\x93\x12" + header + size)
    with pytest.raises(FrameError, match=r"recursion|Expected"):
        decode(b"\x96\x02\x01\x90\x81\xa1x" + b"\x91" * 100_000)


@pytest.mark.parametrize(
    ("message", "what"),
    [
        ([99], "Invalid value"),
        ([3], "truncated|at least"),
        ([3, 1, 2], "at most"),
        ([3, "1"], "Expected `int`"),
        ([16, {}, 8, 512, {}, True, []], "missing required field"),
        ([18, [[1, [0, 0, [-1]]]]], ">= 0"),
        ([18, [[1, [0, 0, [], "", [], None, 0, True, [], [], [], None, None, None, "", 1]]]], "at most"),
        ([23, 1, [], {"kind": "KeyboardInterrupt"}], "no class of errors"),
        ([23, 1, [], {"kind": "TimedOut", "phase": "sleeping"}], "Invalid enum value 'sleeping'"),
    ],
)
def test_what_is_no_message_is_refused_by_its_field(message: Any, what: str) -> None:
    with pytest.raises(FrameError, match=what):
        decode(msgspec.msgpack.encode(message))


# -- requests ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("begun", [False, True])
def test_a_request_comes_out_as_it_went_in(params: SamplingParams, begun: bool) -> None:
    request = Request(
        params=params, priority=-3, cache_salt="s", routing_key="ü", waiting_timeout=1e-6,
        running_timeout=1e6, max_lag=7, request_id="mine", adapter="sql",
    )  # fmt: skip
    images = [ImageSource(b"\xffPNG"), ImageSource(b"\0" * 6, (2, 1))]
    checkpoint = StreamCheckpoint(
        fingerprint="abc", model="m", numerics="n", identical=True, prompt_token_ids=[5, -6], params=params,
        seed=params.seed or 0, token_ids=[7], logprobs=[TokenLogprob(7, -0.5, ((7, -0.5), (3, -1.25)))],
        adapter="sql", adapter_fingerprint="abc", images=images,
    )  # fmt: skip
    found = decode(encoded(Submit.of(9, [5, -6], request, checkpoint if begun else None, 3, images)))
    assert (found.number, found.read, found.options) == (9, 3, request.options())
    prompt, found_request, found_checkpoint, found_images = found.asked()
    assert (prompt, found_request, found_images) == ([5, -6], request, images)
    assert (found_checkpoint and found_checkpoint.to_json()) == (checkpoint.to_json() if begun else None)


def test_images_of_a_stream_that_moves_are_sent_as_they_are() -> None:
    """In a checkpoint they are text, a third longer, which takes a loop long to write and to read."""
    image = ImageSource(bytes(90_000), (300, 100))
    request = Request(params=SamplingParams(seed=1))
    checkpoint = StreamCheckpoint(
        fingerprint="abc", model="m", numerics="n", identical=True, prompt_token_ids=[-6],
        params=request.params, seed=1, token_ids=[7], images=[image],
    )  # fmt: skip
    assert len(encoded(Submit.of(9, [-6], request, checkpoint, 1, [image]))) < 91_000


def test_parameters_that_another_release_does_not_know_refuse_one_request() -> None:
    order = Submit.of(4, (1, 2), Request(params=SamplingParams(seed=1)), None, 0)
    found = decode(encoded(order).replace(b"seed", b"sead"))
    assert found.number == 4
    with pytest.raises(errors.InvalidRequest, match="sead: is not known"):
        found.asked()


# -- rows ----------------------------------------------------------------------------------------------


def any_errors() -> list[errors.AioInferError]:
    return [
        errors.InvalidRequest("prompt", "ü", code="context_length_exceeded"),
        errors.InvalidRequest("temperature", "no"),
        errors.ConstraintFailed(["grammar", "bad_words"], "no"),
        errors.ConfigError("q_proj: no"),
        errors.Rejected("full", 2.5),
        errors.TimedOut("running", 0.25),
        errors.Cancelled("no"),
        errors.StepFailed("no"),
        errors.OutOfMemory("no"),
        errors.EngineError("no"),
    ]


@pytest.mark.parametrize("error", any_errors(), ids=lambda error: type(error).__name__)
def test_an_error_comes_out_as_it_went_in(error: errors.AioInferError) -> None:
    error.__cause__ = ValueError("why\ud800")
    ((_, found),) = again([(1, Rows(0, 0, ending=Ending("abort", error=error)))])
    assert found.ending is not None
    other = found.ending.error
    assert (type(other), str(other), vars(other)) == (type(error), str(error), vars(error))
    assert str(other and other.__cause__) == "ValueError: why?"


def test_an_error_of_another_package_is_told_by_its_name() -> None:
    found = SentError.of(ZeroDivisionError("by zero")).error()
    assert type(found) is EngineError
    assert str(found) == "ZeroDivisionError: by zero"
    assert len(str(SentError.of(EngineError("y" * 9000)).error())) == 4000


def test_rows_come_out_as_they_went_in() -> None:
    wanted = Rows(
        3, 9, [5, 6], "ü", admitted_at=0.25, cached_tokens=4, identical=False,
        logprobs=[TokenLogprob(5, -0.5, ((5, -0.5),)), TokenLogprob(6, -math.inf, ())],
        prompt_logprobs=[TokenLogprob(1, -2.0, ())], steps=[0, 1],
        ending=Ending("stop", "the", predicted=(3, 1)), weight_version=2, adapter_fingerprint="abc",
    )  # fmt: skip
    ((number, found),) = again([((1 << 63) - 1, wanted)])
    assert (number, found.times) == ((1 << 63) - 1, ())
    found.times = wanted.times
    assert msgspec.structs.asdict(found) == msgspec.structs.asdict(wanted)


def test_hidden_states_come_out_as_they_went_in() -> None:
    wanted = np.arange(6, dtype=np.float32).reshape(2, 3)
    ((_, found),) = again([(1, Rows(0, 0, ending=Ending("length", pooled=wanted)))])
    assert found.ending is not None
    assert (found.ending.pooled == wanted).all()
    payload = encoded(StepRows([(1, Rows(0, 0, ending=Ending("length", pooled=wanted)))]))
    for shape in (b"\x92\x02\x04", b"\x92\xfe\xfd"):
        with pytest.raises(FrameError, match=r"another size|>= 0"):
            decode(payload.replace(b"\x92\x02\x03", shape))


def test_a_step_of_64_rows_is_small() -> None:
    rows = [(number, Rows(100, 400, [number], " and")) for number in range(64)]
    assert len(encoded(StepRows(rows))) < 1700


@pytest.mark.parametrize(
    ("row", "what"),
    [
        (Rows(0, 0, [1, 2], logprobs=[TokenLogprob(1, -1.0)]), "logprobs for other tokens"),
        (Rows(0, 0, [1], steps=[1, 2]), "steps for other tokens"),
        (Rows(0, 0, [VOCAB]), "not in the vocabulary"),
    ],
)
def test_rows_that_make_no_sense_are_refused(row: Rows, what: str) -> None:
    with pytest.raises(FrameError, match=what):
        again([(1, row)])


async def test_statistics_of_an_engine_without_native_kernels_are_sent() -> None:
    """Where there is no compiler: nothing measures the parts of a forward there."""
    async with Engine(EngineConfig(device="cpu", threads=1, attention_backend="sdpa")) as engine:
        stats = engine.stats()
    assert stats.forward_seconds == {}
    assert encoded(stats)  # type: ignore[arg-type]
