"""The bench of many streams: what its client keeps is read back whole, and every part has its rows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.fanout.device import expected_ids
from bench.fanout.processes import body, responses
from tests.tiers import PROGRAM, nightly

ROOT = Path(__file__).parents[2]


def chunked(*frames: str) -> bytes:
    data = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    for frame in [*frames, ""]:
        data += f"{len(frame.encode()):x}\r\n{frame}\r\n".encode()
    return data


def kept(number: int, response: bytes) -> bytes:
    return number.to_bytes(4, "little") + len(response).to_bytes(4, "little") + response


def test_kept_responses_are_read_back(tmp_path: Path) -> None:
    file = tmp_path / "kept"
    events = 'data: {"a":"é"}\n\ndata: {"a":2}\n\n'
    whole = chunked(": ok\n\n", events[:9], events[9:], "data: [DONE]\n\n")
    file.write_bytes(kept(7, whole) + kept(300, chunked("data: [DONE]\n\n")))
    assert [*responses(file)] == [(7, [{"a": "é"}, {"a": 2}]), (300, [])]


@pytest.mark.parametrize(
    "response",
    [
        chunked("data: 1\n\n"),
        chunked("data: [DONE]\n\n")[:-5],
        chunked("data: [DONE]\n\n").replace(b"e\r\n", b"d\r\n"),
    ],
    ids=["no [DONE]", "no last chunk", "wrong length"],
)
def test_damaged_responses_are_found(tmp_path: Path, response: bytes) -> None:
    file = tmp_path / "kept"
    file.write_bytes(kept(0, response))
    with pytest.raises(ValueError, match=r"ends with|has no end|does not end|invalid literal"):
        [*responses(file)]


def test_a_request_is_one_around_its_number() -> None:
    before, after = body(9, 4, ignore_eos=True)
    asked = json.loads(f"{before}123{after}")
    assert asked["prompt"] == [123, 4, 4, 4]
    assert (asked["max_tokens"], asked["stream"], asked["ignore_eos"]) == (9, True, True)


def test_outputs_go_round_in_the_text() -> None:
    assert expected_ids(range(40), 1, 5) == [37, 38, 39, 0, 1]


@nightly(PROGRAM)
def test_the_fanout_bench_has_every_part(tmp_path: Path) -> None:
    file = tmp_path / "lines.jsonl"
    options = "--streams 8 --seconds 0.2 --rounds 1 --requests 200"
    command = [sys.executable, "-m", "bench", "fanout", *options.split(), "--json", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = map(json.loads, file.read_text().splitlines())
    rows = {name: section["rows"] for name, section in line["sections"].items()}
    assert {name: len(found) for name, found in rows.items()} == {
        "saturated": 1, "paced": 1, "burden": 1, "inprocess": 2, "text": 2, "memory": 1,
    }  # fmt: skip
    assert all(row["wrong"] == 0 and row["requests"] == 16 for row in rows["text"])
    assert rows["saturated"][0]["of_bare"] > 0
    assert rows["paced"][0]["busy"] > 0
