"""Traces: loads from files of requests that arrived somewhere, read line by line.

=========== ============================================================================ ==================
``kind``    what is read                                                                 prompts share
=========== ============================================================================ ==================
azure       CSV of Azure's LLM inference traces, 2023 and 2024                           nothing
burstgpt    CSV of BurstGPT (arXiv 2401.17644); its sessions are names of requests       nothing
mooncake    JSON lines of Mooncake (FAST '25), with hashes of blocks of 512 tokens       blocks
access-log  ``--access-log-format json`` of our server; lines of other messages are left nothing
            out. A call with several prompts or choices is one request with their sum.
=========== ============================================================================ ==================

Requests without prompt or output tokens have failed and are left out.
"""

from __future__ import annotations

import csv
import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, NamedTuple, TypeVar

import msgspec

from aioinfer.errors import ConfigError
from aioinfer.twin.load import CONTENTS, Load, Session, Turn

__all__ = ["KINDS", "read_trace", "scaled"]

#: formats, and the columns or fields that tell them; the first one has the time
KINDS = {
    "azure": ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    "burstgpt": ("Timestamp", "Request tokens", "Response tokens"),
    "mooncake": ("timestamp", "input_length", "output_length", "hash_ids"),
    "access-log": ("time", "path", "status", "seconds"),
}
#: tokens of a block of Mooncake
_BLOCK = 512
#: Seconds that a row may be behind one that arrived later. Azure's files of 2023 and Mooncake's have no such
#: rows; logs of several hosts that were put together do.
_LATE = 60.0
#: bytes of a line, and lines up to the one by which a log is recognised
_LONGEST = 1 << 20
_MESSAGES = 1000

_Tokens = Annotated[int, msgspec.Meta(ge=0, lt=CONTENTS)]
_Time = Annotated[float, msgspec.Meta(ge=0)]
_Number = TypeVar("_Number", int, float)


class _Row(NamedTuple):
    at: float
    line: int
    prompt_tokens: int
    output_tokens: int
    blocks: Sequence[int] = ()
    name: str | None = None
    seconds: float = 0.0


class _Mooncake(msgspec.Struct):
    timestamp: _Time  # milliseconds
    input_length: _Tokens
    output_length: _Tokens
    hash_ids: list[Annotated[int, msgspec.Meta(ge=0, lt=CONTENTS - 1)]]

    def row(self, line: int) -> _Row:
        if len(self.hash_ids) != -(-self.input_length // _BLOCK):
            raise ValueError(f"{len(self.hash_ids)} blocks for {self.input_length} tokens - at `$.hash_ids`")
        return _Row(self.timestamp / 1e3, line, self.input_length, self.output_length, self.hash_ids)


class _Access(msgspec.Struct):
    time: Annotated[datetime, msgspec.Meta(tz=True)]  # of the end
    seconds: _Time
    prompt_tokens: _Tokens = 0
    output_tokens: _Tokens = 0

    def row(self, line: int) -> _Row:
        at = self.time.timestamp() - self.seconds
        return _Row(at, line, self.prompt_tokens, self.output_tokens, seconds=self.seconds)


def read_trace(path: str | Path, kind: str | None = None) -> Iterator[Session]:
    """The requests of a trace in order of arrival, as sessions of one turn; the first one at 0 seconds.

    ``kind`` is a key of :data:`KINDS`, recognised by the first line if None. Raises ConfigError, of a bad row
    with its line and column. A row that is up to a minute late in its file is put where it belongs. Memory is
    that of a minute's requests; of an access log, whose lines are written when requests end, that of the
    longest request, too, and it is read twice.
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
    for session in load:
        at = session.at / rate
        if (until is not None and at >= until) or (most is not None and most <= 0):
            return
        yield replace(session, at=at, turns=session.turns[:most])
        if most is not None:
            most -= len(session.turns)


def _recognised(path: Path) -> str:
    lines = [line for line in itertools.islice(_lines(path), _MESSAGES) if line.strip()]
    if not lines:
        raise ConfigError(f"{path}: empty")
    names = {name.strip(' "\r\n') for name in lines[0].split(",")}
    try:
        names.update(msgspec.json.decode(next(line for line in lines if line[0] == "{"), type=dict))
    except (StopIteration, msgspec.MsgspecError):
        pass
    for kind, needed in KINDS.items():
        if names.issuperset(needed):
            return kind
    known = "; ".join(f"{kind} ({', '.join(needed)})" for kind, needed in KINDS.items())
    raise ConfigError(f"{path}: a trace of no known format. Formats, and what they have: {known}")


def _lines(path: Path) -> Iterator[str]:
    number = 0
    try:
        with path.open("rb") as file:
            while line := file.readline(_LONGEST):
                number += 1
                if len(line) == _LONGEST:
                    raise ConfigError(f"{path}, line {number}: longer than {_LONGEST} bytes")
                yield line.decode("utf-8-sig" if number == 1 else "utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError:
        raise ConfigError(f"{path}, line {number}: not UTF-8") from None


def _sessions(path: Path, kind: str) -> Iterator[Session]:
    """Rows by time: each waits until none that is late can be before it."""
    rows = _csv_rows if kind in ("azure", "burstgpt") else _json_rows
    late = _LATE + (max((row.seconds for row in rows(path, kind)), default=0) if kind == "access-log" else 0)
    fresh = iter(range(1, CONTENTS))
    held: list[_Row] = []
    newest, first = -math.inf, None
    for row in itertools.chain(rows(path, kind), [None]):
        if row is not None:
            newest = max(newest, row.at)
            if row.at < newest - late:
                what = f"{newest - row.at:.0f} s before an earlier line"
                raise _bad(path, row.line, KINDS[kind][0], what)
            if row.prompt_tokens and row.output_tokens:
                heapq.heappush(held, row)
        while held and (row is None or held[0].at < newest - late):
            at, _, tokens, output_tokens, blocks, name, _ = heapq.heappop(held)
            first = at if first is None else first
            pieces = [(block + 1, _BLOCK) for block in blocks] or [(next(fresh), tokens)]
            pieces[-1] = (pieces[-1][0], tokens - _BLOCK * (len(pieces) - 1))
            yield Session(at - first, (Turn(0.0, tuple(pieces), output_tokens),), name)
    if first is None:
        raise ConfigError(f"{path}: no requests")


def _json_rows(path: Path, kind: str) -> Iterator[_Row]:
    form: type[_Mooncake | _Access] = _Mooncake if kind == "mooncake" else _Access
    for number, line in enumerate(_lines(path), 1):
        if line[0] == "{" or (kind == "mooncake" and line.strip()):
            try:
                yield msgspec.json.decode(line, type=form).row(number)
            except (msgspec.MsgspecError, ValueError) as error:
                raise ConfigError(f"{path}, line {number}: {error}") from None


def _csv_rows(path: Path, kind: str) -> Iterator[_Row]:
    reader = csv.reader(_lines(path), strict=True)
    try:
        header = [name.strip() for name in next(reader, [])]
        for name in KINDS[kind]:
            if name not in header:
                raise _bad(path, 1, name, "missing")
        for fields in filter(None, reader):
            row = dict(zip(header, fields, strict=False))
            if len(row) < len(header):
                raise _bad(path, reader.line_num, header[len(row)], "missing")
            try:
                name, what = KINDS[kind][0], "time"
                at, what = _checked(_seconds(row[name]), math.inf), "number of tokens"
                tokens = []
                for name in KINDS[kind][1:]:
                    tokens.append(_checked(int(row[name]), CONTENTS))
                prompt, output = tokens
            except ValueError:
                raise _bad(path, reader.line_num, name, f"{row[name][:40]!r} is no {what}") from None
            yield _Row(at, reader.line_num, prompt, output, name=row.get("Session ID") or None)
    except csv.Error as error:
        raise ConfigError(f"{path}, line {reader.line_num}: {error}") from None


def _seconds(text: str) -> float:
    """Seconds, or a date (in UTC unless it says otherwise)."""
    try:
        return float(text)
    except ValueError:
        date = datetime.fromisoformat(text.strip())
        return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()


def _checked(value: _Number, most: float) -> _Number:
    if 0 <= value < most:
        return value
    raise ValueError


def _bad(path: Path, line: int, column: str, what: str) -> ConfigError:
    return ConfigError(f"{path}, line {line}, column {column}: {what}")
