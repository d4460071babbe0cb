"""Traces of four formats as loads, and what is wrong with a file in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from aioinfer.errors import ConfigError
from aioinfer.server.http.logs import _FIELDS
from aioinfer.twin.load import Session, Turn, single
from aioinfer.twin.traces import KINDS, read_trace, scaled

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens\r
2023-11-16 23:59:58.5000001,4808,10\r
2023-11-16 23:59:59.0319600,3180,8\r
2023-11-17 00:00:00.0781490,110,27"""
AZURE_2024 = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,2162,5
2024-05-10 02:00:00.017335+02:00,2399,6
2024-05-10 00:00:01+00:00,76,15
"""
BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,0,1087,Conversation log
118,GPT-4,417,276,693,API log
"""
BURSTGPT_2 = """Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
10.5,a1,3.5,ChatGPT,40,9,49,Conversation log
12.0,,1.0,GPT-4,20,5,25,API log
"""
BLOCKS = [(0, 1100, 500, [0, 1, 2]), (0, 1536, 3, [0, 1, 3]), (3052, 100, 40, [0])]
MOONCAKE = "\n".join(
    json.dumps({"timestamp": at, "input_length": asked, "output_length": answered, "hash_ids": hashes})
    for at, asked, answered, hashes in BLOCKS
)


def access(ended: str, seconds: float, **fields: object) -> str:
    line = {"time": f"2026-11-30T10:00:{ended}+00:00", "path": "/v1/completions", "status": 200}
    assert {*line, "seconds", *fields} <= set(_FIELDS), "fields of a line of the log"
    return json.dumps({**line, "seconds": seconds, **fields})


ACCESS = "\n".join(
    [
        "INFO aioinfer: serving",
        access("04.000", 1.0, model="m", prompt_tokens=20, output_tokens=5),
        access("04.100", 0.001),
        access("09.000", 8.0, model="m", prompt_tokens=30, output_tokens=70),
        "WARNING aioinfer: something else",
        access("10.000", 0.5, model="m", prompt_tokens=9, output_tokens=0),
        access("12.000", 2.5, model="m", prompt_tokens=40, output_tokens=6),
    ]
)
FILES = {"azure": AZURE, "burstgpt": BURSTGPT, "mooncake": MOONCAKE, "access-log": ACCESS}


Trace: TypeAlias = Callable[[str | bytes], Path]


@pytest.fixture
def trace(tmp_path: Path) -> Trace:
    def written(text: str | bytes) -> Path:
        path = tmp_path / "100%.trace"
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return path

    return written


def rows(path: Path, kind: str | None = None) -> list[tuple[float, int, int]]:
    found = [(each.at, each.turns[0]) for each in read_trace(path, kind)]
    return [(round(at, 6), sum(n for _, n in turn.pieces), turn.output_tokens) for at, turn in found]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (AZURE, [(0.0, 4808, 10), (0.53196, 3180, 8), (1.578149, 110, 27)]),
        (AZURE_2024, [(0.0, 2162, 5), (0.007405, 2399, 6), (0.99007, 76, 15)]),
        (BURSTGPT, [(0.0, 472, 18), (113.0, 417, 276)]),
        (BURSTGPT_2, [(0.0, 40, 9), (1.5, 20, 5)]),
        (MOONCAKE, [(0.0, 1100, 500), (0.0, 1536, 3), (3.052, 100, 40)]),
        # a request is written when it ends: the second one arrived first
        (ACCESS, [(0.0, 30, 70), (2.0, 20, 5), (8.5, 40, 6)]),
    ],
)
def test_a_trace_is_recognised_and_read(
    trace: Trace, text: str, expected: list[tuple[float, int, int]]
) -> None:
    assert rows(trace(text)) == expected
    assert rows(trace("\ufeff" + text.replace("\r", "") + "\n\n")) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_that_is_given_reads_the_same(trace: Trace, kind: str) -> None:
    path = trace(FILES[kind])
    assert list(read_trace(path, kind)) == list(read_trace(str(path)))


def test_prompts_of_unknown_text_have_nothing_in_common(trace: Trace) -> None:
    contents = [each.turns[0].pieces[0][0] for each in read_trace(trace(AZURE))]
    assert contents == [1, 2, 3]


def test_equal_blocks_are_equal_contents(trace: Trace) -> None:
    first, second, third = (each.turns[0].pieces for each in read_trace(trace(MOONCAKE)))
    assert first == ((1, 512), (2, 512), (3, 76))
    assert second == ((1, 512), (2, 512), (4, 512))
    assert third == ((1, 100),)


def test_sessions_of_burstgpt_are_names(trace: Trace) -> None:
    assert [each.name for each in read_trace(trace(BURSTGPT_2))] == ["a1", None]


def test_rows_a_minute_late_arrive_with_the_one_before(trace: Trace) -> None:
    head = "Timestamp,Request tokens,Response tokens"
    late = [head, "100,1,1", "110,2,2", "51,3,3", "200,4,4"]
    assert rows(trace("\n".join(late))) == [(0, 1, 1), (10, 2, 2), (10, 3, 3), (100, 4, 4)]
    with pytest.raises(ConfigError, match="line 4, column Timestamp: 61 s before an earlier line"):
        rows(trace("\n".join(late).replace("51,", "49,")))


def test_requests_come_before_the_end_of_the_file_is_read(trace: Trace) -> None:
    path = trace("TIMESTAMP,ContextTokens,GeneratedTokens\n0,1,1\n99,2,2\n200,3,3\n300,bad,4\n")
    assert [next(found).at for found in [read_trace(path)] for _ in range(2)] == [0, 99]


BAD = [
    ("azure", "3180", "abc", "line 3: Expected `int`, got `str` - at `$.ContextTokens`"),
    ("azure", "3180", "-5", "line 3: Expected `int` >= 0 - at `$.ContextTokens`"),
    ("azure", "3180", "12.5", "line 3: Expected `int`, got `str` - at `$.ContextTokens`"),
    ("azure", "3180", "9" * 5000, "line 3: Integer value out of range - at `$.ContextTokens`"),
    ("azure", "2023-11-17 ", "yesterday ", "line 4: Invalid RFC3339 encoded datetime - at `$.TIMESTAMP`"),
    ("azure", ",110,27", ",110", "line 4: Expected `int`, got `null` - at `$.GeneratedTokens`"),
    ("azure", "3180", '"3180', "line 4: unexpected end of data"),
    ("burstgpt", "118", "nan", "line 4: Expected `float` >= 0.0 - at `$.Timestamp`"),
    ("burstgpt", "118", "inf", "line 4: Expected `float` < 1000000000000000.0 - at `$.Timestamp`"),
    ("burstgpt", "118", "-1", "line 4: Expected `float` >= 0.0 - at `$.Timestamp`"),
    ("burstgpt", "Request tokens", "Requests", "line 2: Object missing required field `Request tokens`"),
    ("mooncake", "1536", "-1", "line 2: Expected `int` >= 0 - at `$.input_length`"),
    ("mooncake", "1536", '"x"', "line 2: Expected `int`, got `str` - at `$.input_length`"),
    ("mooncake", "1536", "1537", "line 2, column hash_ids: 3 blocks for 1537 tokens"),
    ("mooncake", "3052", "NaN", "line 3: JSON is malformed"),
    ("mooncake", "[0]}", "[0", "line 3: Input data was truncated"),
    ("mooncake", '{"timestamp": 3052', '"timestamp": 3052', "line 3: "),
    ("mooncake", "output_length", "output", "line 1: Object missing required field `output_length`"),
    ("access-log", "2026-11-30T10:00:12", "noon", "line 7: Invalid RFC3339 encoded datetime - at `$.time`"),
    ("access-log", "2.5", "-2.5", "line 7: Expected `float` >= 0.0 - at `$.seconds`"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "was", "given", "message"), BAD)
def test_a_bad_row_is_named(trace: Trace, kind: str, was: str, given: str, message: str) -> None:
    path = trace(FILES[kind].replace(was, given))
    with pytest.raises(ConfigError) as caught:
        list(read_trace(path, kind))
    assert str(caught.value).startswith(str(path))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no known format"),
        (b"\n\n", "no known format"),
        (b"a,b\n1,2\n", "no known format. Formats, and what they have: azure (TIMESTAMP, ContextTokens, "),
        (b"{1", "no known format"),
        (b"[1]\n", "no known format"),
        (AZURE.encode().replace(b"3180", b"\xff"), "line 3: Expected `int`, got `str` - at"),
        (bytes(range(256)), "no known format"),
        (b"TIMESTAMP,ContextTokens,GeneratedTokens\n", "no requests"),
        (b"TIMESTAMP,ContextTokens,GeneratedTokens\n0,5,0\n", "no requests"),
    ],
)
def test_a_file_that_is_no_trace_is_refused(trace: Trace, content: bytes, message: str) -> None:
    path = trace(content)
    with pytest.raises(ConfigError) as caught:
        list(read_trace(path))
    assert str(caught.value).startswith(str(path))
    assert message in str(caught.value)


def test_a_missing_file_and_an_unknown_kind_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.csv: No such file"):
        read_trace(tmp_path / "none.csv")
    with pytest.raises(ConfigError, match="'vidur' is none of azure, burstgpt, mooncake, access-log"):
        read_trace(tmp_path / "none.csv", "vidur")


LOAD = [single(0.0, ((1, 5),), 1), Session(4.0, (Turn(0, ((2, 5),), 1), Turn(3, ((3, 5),), 1)), "s")]


def test_a_scaled_load_arrives_faster_and_thinks_as_before() -> None:
    first, second = scaled(LOAD, rate=2.0)
    assert (first.at, second.at) == (0.0, 2.0)
    assert second.turns == LOAD[1].turns
    assert second.name == "s"
    assert list(scaled(LOAD)) == LOAD


def test_a_scaled_load_is_cut() -> None:
    assert [len(each.turns) for each in scaled(LOAD, most=2)] == [1, 1]
    assert [len(each.turns) for each in scaled(LOAD, most=1)] == [1]
    assert [each.at for each in scaled(LOAD, until=4.0)] == [0.0]
    assert [each.at for each in scaled(LOAD, rate=2.0, until=4.0)] == [0.0, 2.0]


@pytest.mark.parametrize("options", [{"rate": 0}, {"rate": float("nan")}, {"most": 0}, {"until": -1}])
def test_scales_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(options))}: .* is out of range"):
        list(scaled(LOAD, **options))
