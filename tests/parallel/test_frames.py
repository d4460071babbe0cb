"""Frames and messages: what is packed is unpacked, and nothing else is taken for it."""

from __future__ import annotations

import dataclasses
import json
import struct
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioinfer import SamplingParams, errors
from aioinfer.errors import EngineError
from aioinfer.execution.device import DeviceInfo
from aioinfer.loop.options import RequestOptions
from aioinfer.observe.stats import EngineStats
from aioinfer.outputs import AdapterInfo, Draft, TokenLogprob
from aioinfer.parallel.columns import pack_rows, unpack_rows
from aioinfer.parallel.errors_record import error_of, error_record
from aioinfer.parallel.frames import HANDSHAKE_LIMIT, LIMIT, FrameError, FrameReader, Kind, frame
from aioinfer.parallel.messages import Abort, Adapt, Adapted, Hello, Read, Reason, Stats, Submit, Welcome
from aioinfer.parallel.record import Ending
from aioinfer.parallel.replica import Rows
from aioinfer.params import DiffusionParams, Grammar
from aioinfer.resuming.record import StreamCheckpoint
from tests.tiers import SECONDS, rest

#: so that ids can be anything
VOCAB = 1 << 32

NUMBERS = st.integers(1, (1 << 63) - 1)
TOKENS = st.integers(0, (1 << 32) - 1)
COUNTS = st.integers(0, (1 << 31) - 1)
LOGPROBS = st.floats(max_value=0, allow_nan=False)
TEXT = st.text(st.characters(), max_size=20)

# -- frames --------------------------------------------------------------------------------------------


@rest(SECONDS)
@given(
    st.lists(st.tuples(st.sampled_from(Kind), st.binary(max_size=300))),
    st.lists(st.integers(1, 400), min_size=1),
)
def test_frames_come_out_as_they_went_in_whatever_the_pieces(
    frames: list[tuple[Kind, bytes]], sizes: list[int]
) -> None:
    data = b"".join(frame(kind, payload) for kind, payload in frames)
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
            for kind, payload in reader.feed(data[at : at + size]):
                assert isinstance(kind, Kind)
                assert len(payload) < 200
    except FrameError:
        pass
    assert len(reader._data) <= 200 + 5 + size


@pytest.mark.parametrize("size", [0, HANDSHAKE_LIMIT + 1, LIMIT + 1, (1 << 32) - 1])
def test_a_length_beyond_the_limit_is_refused_before_it_is_read(size: int) -> None:
    reader = FrameReader(HANDSHAKE_LIMIT)
    with pytest.raises(FrameError, match=f"a frame of {size} bytes"):
        list(reader.feed(struct.pack("<IB", size, Kind.ROWS)))
    reader = FrameReader(HANDSHAKE_LIMIT)
    assert list(reader.feed(struct.pack("<IB", HANDSHAKE_LIMIT, Kind.ROWS))) == []


def test_a_kind_that_does_not_exist_is_refused() -> None:
    with pytest.raises(FrameError, match="no frames of kind 99"):
        list(FrameReader().feed(struct.pack("<IB", 1, 99)))


def test_a_frame_that_is_too_large_is_not_sent() -> None:
    with pytest.raises(FrameError, match="too large"):
        frame(Kind.ROWS, bytes(LIMIT))


# -- rows ----------------------------------------------------------------------------------------------


@st.composite
def logprobs(draw: Any) -> TokenLogprob:
    top = draw(st.lists(st.tuples(COUNTS, LOGPROBS), max_size=3))
    return TokenLogprob(draw(COUNTS), draw(LOGPROBS), tuple(top))


@st.composite
def any_error(draw: Any) -> errors.AioInferError:
    text = draw(TEXT)
    error: errors.AioInferError = draw(
        st.sampled_from(
            [
                errors.InvalidRequest("prompt", text, code="context_length_exceeded"),
                errors.InvalidRequest("temperature", text),
                errors.ConstraintFailed(["grammar", "bad_words"], text),
                errors.Rejected(text, 2.5),
                errors.TimedOut("waiting", 0.25),
                errors.Cancelled(text),
                errors.StepFailed(text),
                errors.OutOfMemory(text),
                errors.EngineError(text),
            ]
        )
    )
    if draw(st.booleans()):
        error.__cause__ = ValueError(draw(TEXT))
    return error


@st.composite
def endings(draw: Any) -> Ending:
    error = draw(st.none() | any_error())
    return Ending(
        "abort" if error else draw(st.sampled_from(["stop", "length"])),
        draw(st.none() | TEXT | COUNTS),
        error,
        (draw(COUNTS), draw(COUNTS)),
    )


@st.composite
def drafts(draw: Any) -> Draft:
    count = draw(st.integers(0, 4))
    values = st.lists(st.none() | COUNTS, min_size=count, max_size=count)
    return Draft(draw(COUNTS), tuple(draw(values)), draw(TEXT), tuple(draw(values)))


@st.composite
def some_rows(draw: Any) -> tuple[int, Rows]:
    ids = draw(st.lists(TOKENS, max_size=5))
    draft = draw(st.none() | drafts())

    def one_each(values: Any) -> Any:
        return st.just(()) | st.lists(values, min_size=len(ids), max_size=len(ids))

    row = Rows(
        draw(COUNTS),
        draw(COUNTS),
        ids,
        draw(TEXT),
        (),
        admitted_at=draw(st.none() | st.floats(0, 100)),
        cached_tokens=draw(COUNTS),
        identical=draw(st.booleans()),
        logprobs=draw(one_each(logprobs())),
        prompt_logprobs=draw(st.lists(logprobs(), max_size=3)),
        steps=draw(one_each(COUNTS)),
        draft=None if draft is None else lambda: draft,
        ending=draw(st.none() | endings()),
        weight_version=draw(st.none() | COUNTS),
        adapter_fingerprint=draw(st.just("") | TEXT),
    )
    return draw(NUMBERS), row


def plain(row: Rows) -> dict[str, Any]:
    """What can be compared."""
    found = {name: getattr(row, name) for name in Rows.__slots__}
    for name in ("ids", "logprobs", "prompt_logprobs", "steps"):
        found[name] = list(found[name])
    found["draft"] = row.draft and row.draft()
    ending = row.ending
    if ending is not None:
        error = ending.error
        cause = error and error.__cause__ and str(error.__cause__).removeprefix("ValueError: ")
        found["ending"] = (
            *(ending.finish_reason, ending.stop_reason, ending.predicted),
            *(type(error), error and error.args, error and error.__dict__, cause),
        )
    for name in ("times", "admitted_at", "cached_tokens"):
        del found[name]
    return found


@rest(SECONDS)
@given(st.lists(some_rows(), max_size=5))
def test_rows_come_out_as_they_went_in(rows: list[tuple[int, Rows]]) -> None:
    found = unpack_rows(pack_rows(rows, 100.0), 7.0, VOCAB)
    assert [number for number, _ in found] == [number for number, _ in rows]
    for (_, before), (_, after) in zip(rows, found, strict=True):
        assert plain(after) == plain(before)
        assert list(after.times) == [7.0] * len(before.ids)
        if before.admitted_at is None:
            assert after.admitted_at is None
        else:
            assert after.admitted_at == pytest.approx(before.admitted_at - 93.0)
            assert after.cached_tokens == before.cached_tokens


def test_a_step_of_64_rows_is_one_kilobyte_and_has_no_json() -> None:
    rows = [(number, Rows(100, 400, [number], " and", (0.0,))) for number in range(64)]
    payload = pack_rows(rows, 0.0)
    assert len(payload) == 16 + 64 * (25 + 4 + 4)
    assert b"{" not in payload[-256:]


@rest(SECONDS)
@given(st.lists(some_rows(), min_size=1, max_size=3), st.data())
def test_rows_that_are_cut_or_changed_are_rows_or_one_error(
    rows: list[tuple[int, Rows]], data: st.DataObject
) -> None:
    payload = pack_rows(rows, 100.0)
    cut = payload[: data.draw(st.integers(0, len(payload) - 1))]
    with pytest.raises(FrameError):
        unpack_rows(cut, 0.0, VOCAB)
    changed = bytearray(payload)
    for at in data.draw(st.lists(st.integers(0, len(payload) - 1), min_size=1, max_size=4)):
        changed[at] = data.draw(st.integers(0, 255))
    try:
        found = unpack_rows(bytes(changed), 0.0, VOCAB)
    except FrameError:
        return
    assert len(pack_rows(found, 0.0)) > 0


@given(st.binary(max_size=200))
def test_any_bytes_are_rows_or_one_error(data: bytes) -> None:
    try:
        unpack_rows(data, 0.0, VOCAB)
    except FrameError:
        pass


@pytest.mark.parametrize(
    ("row", "what"),
    [
        (Rows(0, 0, [1, 2], logprobs=[TokenLogprob(1, -1.0)]), "logprobs for other tokens"),
        (Rows(0, 0, [1], steps=[1, 2]), "steps for other tokens"),
    ],
)
def test_columns_of_another_length_are_refused(row: Rows, what: str) -> None:
    with pytest.raises(FrameError, match=what):
        unpack_rows(pack_rows([(1, row)], 0.0), 0.0, VOCAB)


# -- errors --------------------------------------------------------------------------------------------


def test_an_error_of_another_package_is_told_by_its_name() -> None:
    found = error_of(error_record(ZeroDivisionError("by zero")))
    assert type(found) is EngineError
    assert str(found) == "ZeroDivisionError: by zero"


@pytest.mark.parametrize(
    "record",
    [
        None,
        [],
        {"class": "ConfigError", "message": "x"},
        {"class": "KeyboardInterrupt", "message": "x"},
        {"class": "Rejected", "message": "x", "retry_after": "soon"},
        {"class": "InvalidRequest", "field": 1, "message": "x"},
        {"class": "EngineError"},
        {"class": "TimedOut", "phase": "sleeping", "seconds": 1.0},
    ],
)
def test_only_errors_of_requests_and_engines_are_made(record: Any) -> None:
    with pytest.raises(ValueError, match=r"error|with a"):
        error_of(record)


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


@st.composite
def submits(draw: Any) -> Submit:
    params = draw(st.sampled_from(PARAMS))
    ids = tuple(draw(st.lists(COUNTS, min_size=1, max_size=6)))
    seconds = st.none() | st.floats(1e-6, 1e6)
    options = RequestOptions(
        priority=draw(st.integers(-(1 << 31), (1 << 31) - 1)),
        cache_salt=draw(TEXT),
        routing_key=draw(st.none() | TEXT),
        waiting_timeout=draw(seconds),
        running_timeout=draw(seconds),
        max_lag=draw(st.none() | st.integers(1, 100)),
        request_id=draw(st.none() | TEXT),
        adapter=draw(st.none() | TEXT),
    )
    checkpoint = None
    if draw(st.booleans()):
        output = tuple(draw(st.lists(COUNTS, min_size=1, max_size=4)))
        checkpoint = StreamCheckpoint(
            fingerprint="abc",
            model="m",
            numerics="n",
            identical=True,
            prompt_token_ids=ids,
            params=params,
            seed=params.seed or 0,
            token_ids=output,
            logprobs=tuple(draw(st.lists(logprobs(), max_size=2))),
            adapter=draw(st.none() | TEXT),
            adapter_fingerprint=draw(st.sampled_from(["", "abc"])),
        )
    return Submit(draw(NUMBERS), ids, params, options, checkpoint, draw(COUNTS))


@given(submits())
def test_a_request_comes_out_as_it_went_in(order: Submit) -> None:
    found = Submit.unpack(order.pack())
    assert found.refused is None
    assert tuple(found.prompt_ids) == tuple(order.prompt_ids)
    assert found._replace(prompt_ids=(), checkpoint=None) == order._replace(prompt_ids=(), checkpoint=None)
    assert (found.checkpoint and found.checkpoint.to_json()) == (
        order.checkpoint and order.checkpoint.to_json()
    )


def test_parameters_that_another_release_does_not_know_refuse_one_request() -> None:
    order = Submit(4, (1, 2), SamplingParams(seed=1), RequestOptions(), None, 0)
    packed = order.pack().replace(b'"seed"', b'"sead"')
    found = Submit.unpack(packed)
    assert found.number == 4
    assert isinstance(found.refused, errors.InvalidRequest)
    assert found.refused.field == "sead"


MESSAGES: list[tuple[Callable[[bytes], Any], bytes]] = [
    (Hello.unpack, Hello("token", "print").pack()),
    (Welcome.unpack, Welcome(INFO, 8, 512, STATS).pack()),
    (Stats.unpack, Stats.pack(STATS)),
    (Submit.unpack, Submit(4, (1, 2), PARAMS[1], RequestOptions(), None, 0).pack()),
    (Abort.unpack, Abort.pack(9)),
    (Read.unpack, Read.pack(9, 100)),
    (Adapt.unpack, Adapt(7, "sql", "/adapters/sql").pack()),
    (Adapted.unpack, Adapted(7, [ADAPTER], errors.Rejected("full")).pack()),
]


@pytest.mark.parametrize(
    "error",
    [None, errors.ConfigError("q_proj: no"), errors.InvalidRequest("name", "is not loaded", code="c")],
)
def test_what_came_of_an_adapter_comes_out_as_it_went_in(error: Any) -> None:
    found = Adapted.unpack(Adapted(7, (ADAPTER,), error).pack())
    assert (found.number, found.adapters) == (7, (ADAPTER,))
    assert type(found.error) is type(error)
    assert str(found.error) == str(error)
    for order in (Adapt(1, "ü", "/a b"), Adapt(2, "x"), Adapt(3)):
        assert Adapt.unpack(order.pack()) == order
    assert Welcome.unpack(Welcome(INFO, 8, 512, STATS, True, (ADAPTER,)).pack()).adapters == (ADAPTER,)


def test_what_a_replica_is_comes_out_as_it_went_in() -> None:
    assert Welcome.unpack(MESSAGES[1][1]) == Welcome(INFO, 8, 512, STATS)
    assert Stats.unpack(Stats.pack(STATS)) == STATS
    assert Hello.unpack(Hello("ü", "print").pack()) == Hello("ü", "print")
    assert (Abort.unpack(Abort.pack(9)), Read.unpack(Read.pack(9, 100))) == (9, (9, 100))
    assert Reason.unpack(Reason.pack("why\ud800" + "y" * 9000)).startswith("why?yyy")
    assert len(Reason.unpack(Reason.pack("y" * 9000))) == 2000


@pytest.mark.parametrize(("unpack", "payload"), MESSAGES)
@given(data=st.data())
def test_messages_that_are_cut_or_changed_are_messages_or_one_error(
    unpack: Callable[[bytes], Any], payload: bytes, data: st.DataObject
) -> None:
    changed = bytearray(payload[: data.draw(st.integers(0, len(payload)))])
    for at in data.draw(st.lists(st.integers(0, len(payload) - 1), max_size=4)):
        if at < len(changed):
            changed[at] = data.draw(st.integers(0, 255))
    try:
        unpack(bytes(changed))
    except FrameError:
        pass


@rest(SECONDS)
@pytest.mark.parametrize(("unpack", "payload"), MESSAGES)
@given(
    data=st.binary(max_size=100)
    | st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["token", "protocol", "info", "slots", "stats", "params"]), inner
            )
        ),
        max_leaves=8,
    ).map(lambda value: json.dumps(value).encode())
)
def test_any_bytes_are_a_message_or_one_error(
    unpack: Callable[[bytes], Any], payload: bytes, data: bytes
) -> None:
    try:
        unpack(data)
    except FrameError:
        pass


def test_a_replica_of_another_release_is_refused_by_its_fields() -> None:
    packed = Welcome(INFO, 8, 512, STATS).pack().replace(b'"numerics"', b'"numbers"')
    with pytest.raises(FrameError, match="other fields than those of DeviceInfo"):
        Welcome.unpack(packed)
