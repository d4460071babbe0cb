"""Traces: loads from files of requests that arrived somewhere.

=========== ============================================================================ ==================
``kind``    what is read                                                                 prompts share
=========== ============================================================================ ==================
azure       CSV of Azure's LLM inference traces, 2023 and 2024                           nothing
burstgpt    CSV of BurstGPT (arXiv 2401.17644); its sessions are names of requests       nothing
mooncake    JSON lines of Mooncake (FAST '25), with hashes of blocks of 512 tokens       blocks
access-log  ``--access-log-format json`` of our server; other lines are left out. A      nothing
            call with several prompts or choices is one request with their sum.
=========== ============================================================================ ==================

Requests without prompt or output tokens have failed and are left out.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypedDict

import msgspec

from aioinfer.errors import ConfigError
from aioinfer.twin.load import CONTENTS, Load, Session, Turn

__all__ = ["KINDS", "read_trace", "scaled"]

#: tokens of a block of Mooncake
_BLOCK = 512
#: seconds that a row may be behind an earlier one, as in logs of several hosts that were put together
_LATE = 60.0
#: lines up to the one by which a file is recognised
_FIRST = 1000

_Count = Annotated[int, msgspec.Meta(ge=0, lt=CONTENTS - 1)]
_Time = Annotated[float, msgspec.Meta(ge=0, lt=1e15)]
_Blocks = list[_Count]
_SESSION = {"Session ID": NotRequired[str]}
#: formats: their columns or fields. The first three tell them: the time, prompt and output tokens.
KINDS: dict[str, dict[str, Any]] = {
    "azure": {"TIMESTAMP": datetime, "ContextTokens": _Count, "GeneratedTokens": _Count},
    "burstgpt": {"Timestamp": _Time, "Request tokens": _Count, "Response tokens": _Count, **_SESSION},
    "mooncake": {"timestamp": _Time, "input_length": _Count, "output_length": _Count, "hash_ids": _Blocks},
    "access-log": {"time": datetime, "prompt_tokens": _Count, "output_tokens": _Count, "seconds": _Time},
}


def read_trace(path: str | Path, kind: str | None = None) -> Iterator[Session]:
    """The requests of a trace in order of arrival, as sessions of one turn; the first one at 0 seconds.

    ``kind`` is a key of :data:`KINDS`, recognised by the first lines if None. A row that is up to a minute
    late in its file arrives with the one before. Rows are read one by one, but those of an access log, whose
    lines are in the order of ends, at once. Raises ConfigError, of a bad row with its line and column.
    """
    path = Path(path)
    kind = kind or _recognised(path)
    if kind not in KINDS:
        raise ConfigError(f"kind: {kind!r} is none of {', '.join(KINDS)}")
    return _sessions(path, kind)


def scaled(
    load: Load, rate: float = 1.0, most: int | None = None, until: float | None = None
) -> Iterator[Session]:
    """A load with arrivals ``rate`` times as fast, cut after ``most`` requests (turns) or ``until`` seconds
    of the result. Think times are those of users, and stay. Raises ConfigError."""
    for name, value in {"rate": rate, "most": most, "until": until}.items():
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"{name}: {value} is out of range")
    left = CONTENTS if most is None else most
    for session in load:
        at = session.at / rate
        if left <= 0 or (until is not None and at >= until):
            return
        yield replace(session, at=at, turns=session.turns[:left])
        left -= len(session.turns)


def _recognised(path: Path) -> str:
    for line in islice(_lines(path), _FIRST):
        for kind, columns in KINDS.items():
            if all(column in line for column in islice(columns, 3)):
                return kind
    known = "; ".join(f"{kind} ({', '.join(islice(columns, 3))})" for kind, columns in KINDS.items())
    raise ConfigError(f"{path}: a trace of no known format. Formats, and what they have: {known}")


def _lines(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
            yield from file
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error


def _rows(path: Path, kind: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Checked rows with the numbers of their lines."""
    number = 0

    def lines() -> Iterator[str]:
        nonlocal number
        for line in _lines(path):
            number += 1
            if kind != "access-log" or (line[0] == "{" and '"prompt_tokens"' in line):
                yield line

    rows: Iterable[Any] = map(msgspec.json.decode, filter(str.strip, lines()))
    if kind in ("azure", "burstgpt"):
        rows = csv.DictReader(lines(), restkey="", strict=True)
    typed_dict: Any = TypedDict
    form = typed_dict(kind, KINDS[kind])
    try:
        for row in rows:
            yield number, msgspec.convert(row, form, strict=False)
    except (msgspec.MsgspecError, csv.Error) as error:
        raise ConfigError(f"{path}, line {number}: {error}") from None


def _sessions(path: Path, kind: str) -> Iterator[Session]:
    time, prompt, output = islice(KINDS[kind], 3)
    rows: Iterable[Any] = ((_seconds(row[time], row), line, row) for line, row in _rows(path, kind))
    if kind == "access-log":
        rows = sorted(rows)
    fresh, first, latest = iter(range(1, CONTENTS)), None, -math.inf
    for at, line, row in rows:
        if at < latest - _LATE:
            late = f"{latest - at:.0f} s before an earlier line"
            raise ConfigError(f"{path}, line {line}, column {time}: {late}")
        latest = max(latest, at)
        tokens, blocks = row[prompt], row.get("hash_ids", [])
        if "hash_ids" in row and len(blocks) != -(-tokens // _BLOCK):
            wrong = f"{len(blocks)} blocks for {tokens} tokens"
            raise ConfigError(f"{path}, line {line}, column hash_ids: {wrong}")
        if tokens and row[output]:
            first = latest if first is None else first
            pieces = [(block + 1, _BLOCK) for block in blocks] or [(next(fresh), tokens)]
            pieces[-1] = (pieces[-1][0], tokens - _BLOCK * (len(pieces) - 1))
            turn = Turn(0.0, tuple(pieces), row[output])
            yield Session(latest - first, (turn,), row.get("Session ID") or None)
    if first is None:
        raise ConfigError(f"{path}: no requests")


def _seconds(time: float | datetime, row: dict[str, Any]) -> float:
    """The moment of arrival; dates are in UTC unless they say otherwise."""
    if isinstance(time, datetime):  # of a request's end in an access log
        time = time if time.tzinfo else time.replace(tzinfo=UTC)
        return time.timestamp() - float(row.get("seconds", 0.0))
    return time / 1e3 if "hash_ids" in row else time
