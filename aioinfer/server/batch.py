"""Batch: files of requests in the form of OpenAI's Batch API, answered by the application of a server.

::

    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}
    {"id": "batch_req_...", "custom_id": "a", "response": {"status_code": 200, ...}, "error": null}

Every body takes the way of a request over HTTP, through an ASGI application in this process. Memory holds the
rows that are computed and, of all rows, 16 bytes that tell their names apart.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import hashlib
import os
import stat
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple, Self

import msgspec

from aioinfer.client.engine_like import EngineLike
from aioinfer.config import ServerConfig
from aioinfer.errors import ConfigError, EngineError, why
from aioinfer.server.app import asgi_app
from aioinfer.server.asgi import AsgiApplication
from aioinfer.server.http.failures import Failure
from aioinfer.server.http.limits import IMAGES_BODY_MIB
from aioinfer.system.locks import lock

__all__ = ["URLS", "Batch", "Counts", "Output", "Row", "count_rows", "read_rows"]

#: what a row may ask for
URLS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/responses",
    "/v1/score",
    "/v1/rerank",
)
#: rows that are read and not written, in those that are computed at a time
_AHEAD = 4
_MOST_LINE = int((IMAGES_BODY_MIB + 1) * (1 << 20))
#: how each line of the output begins
_BEGIN = b'{"id":"batch_req_'
_TOO_MANY = 429


# -- lines ---------------------------------------------------------------------------------------------


class _Line(msgspec.Struct):
    """A line of the input; its body stays as it is."""

    custom_id: str
    url: str = ""
    method: str = "POST"
    body: msgspec.Raw = msgspec.Raw(b"{}")


class _Body(msgspec.Struct):
    stream: Any = None


class _Answer(msgspec.Struct):
    status_code: int
    request_id: str = ""
    body: msgspec.Raw = msgspec.Raw(b"{}")


class _Written(msgspec.Struct, omit_defaults=True):
    """A line of the output."""

    id: str
    custom_id: str | None
    response: _Answer
    error: None
    #: number of the row, where ``custom_id`` does not tell it from others
    line: int = 0

    @property
    def key(self) -> bytes:
        return _key(f"line {self.line}" if self.line else f"id {self.custom_id}")


def _key(name: str) -> bytes:
    return hashlib.blake2b(name.encode(), digest_size=16).digest()


class Row(NamedTuple):
    """A row of the input. ``failure``: why it is not computed."""

    key: bytes
    custom_id: str | None
    #: as in the output
    line: int
    url: str = ""
    body: bytes = b""
    failure: Failure | None = None


def read_rows(file: IO[bytes]) -> Iterator[Row]:
    """The rows of a file, one after the other. A bad one has a failure, and so has one whose ``custom_id``
    an earlier row has."""
    seen: set[bytes] = set()
    for number, data in _lines(file):
        if data is not None and not data.strip():
            continue
        row = _row(number, data)
        if row.key in seen:
            why = f"an earlier row has the custom_id {str(row.custom_id)[:100]!r}"
            row = _bad(number, row.custom_id, "custom_id", why)
        seen.add(row.key)
        yield row


def _lines(file: IO[bytes]) -> Iterator[tuple[int, bytes | None]]:
    """Numbers from 1 on, and lines; None for one that is too long."""
    number = 0
    while data := file.readline(_MOST_LINE):
        number += 1
        whole = data.removeprefix(codecs.BOM_UTF8) if number == 1 else data
        while len(data) == _MOST_LINE and not data.endswith(b"\n"):
            whole, data = b"", file.readline(_MOST_LINE)
        yield number, whole or None


def _row(number: int, data: bytes | None) -> Row:
    if data is None:
        return _bad(number, None, "body", f"line {number} has more than {IMAGES_BODY_MIB:g} MiB")
    try:
        line = msgspec.json.decode(data, type=_Line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return _bad(number, None, "custom_id", f"line {number} is no row of a batch: {why(error)}")
    if line.method != "POST":
        return _bad(0, line.custom_id, "method", f"must be POST, got {line.method[:100]!r}")
    if line.url not in URLS:
        return _bad(0, line.custom_id, "url", f"must be one of {', '.join(URLS)}, got {line.url[:100]!r}")
    body = bytes(line.body)
    with contextlib.suppress(msgspec.MsgspecError, RecursionError):  # else the application says what is wrong
        if msgspec.json.decode(body, type=_Body).stream:
            return _bad(0, line.custom_id, "stream", "a row of a batch has one whole answer")
    return Row(_key(f"id {line.custom_id}"), line.custom_id, 0, line.url, body)


def _bad(number: int, custom_id: str | None, param: str, why: str) -> Row:
    name = f"line {number}" if number else f"id {custom_id}"
    return Row(_key(name), custom_id, number, failure=Failure(400, "invalid_request_error", why, param))


def count_rows(path: Path) -> int:
    """How many lines of a file are not blank."""
    with path.open("rb") as file:
        return sum(data is None or bool(data.strip()) for _, data in _lines(file))


# -- the output ----------------------------------------------------------------------------------------


@dataclass
class Counts:
    """What became of rows, those of earlier runs included."""

    answered: int = 0
    failed: int = 0
    #: of these, rows of earlier runs
    earlier: int = 0

    @property
    def done(self) -> int:
        return self.answered + self.failed


class Output:
    """The file of answers. Rows that it has are done; a line that was cut off by the end of an earlier
    program is taken away. One program at a time has it."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError if it is no such file, or another program has it; OSError."""
        if path.exists() and not stat.S_ISREG(path.stat().st_mode):
            raise ConfigError(f"{path}: is no file that can be read again, to go on where a run has ended")
        self.counts = Counts()
        self._path = path
        self._keys: set[bytes] = set()
        self._file = path.open("a+b", buffering=0)
        try:
            _lock(self._file, path)
            self._read()
        except BaseException:
            self._file.close()
            raise

    def _read(self) -> None:
        end = 0
        with self._path.open("rb") as file:
            for number, data in enumerate(file, 1):
                if not data.endswith(b"\n"):
                    if not (data.startswith(_BEGIN) or _BEGIN.startswith(data)):
                        raise self._foreign(number)
                    break
                try:
                    written = msgspec.json.decode(data, type=_Written)
                except msgspec.MsgspecError:
                    raise self._foreign(number) from None
                self._note(written.key, written.response.status_code)
                end += len(data)
        self.counts.earlier = self.counts.done
        self._file.truncate(end)

    def _foreign(self, number: int) -> ConfigError:
        return ConfigError(f"{self._path}: line {number} is no answer of a batch: choose another output file")

    def _note(self, key: bytes, status: int) -> None:
        self._keys.add(key)
        if status < 400:
            self.counts.answered += 1
        else:
            self.counts.failed += 1

    def has(self, row: Row) -> bool:
        """The row is done."""
        return row.key in self._keys

    def write(self, row: Row, answer: _Answer) -> None:
        """Append a row. Raises OSError; nothing of the row is there then."""
        written = _Written(f"batch_req_{uuid.uuid4().hex}", row.custom_id, answer, None, row.line)
        data = msgspec.json.encode(written) + b"\n"
        before, left = os.fstat(self._file.fileno()).st_size, memoryview(data)
        try:
            while left:
                left = left[self._file.write(left) :]
        except BaseException:
            with contextlib.suppress(OSError):
                self._file.truncate(before)
            raise
        self._note(row.key, answer.status_code)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def _lock(file: IO[bytes], path: Path) -> None:
    try:
        lock(file.fileno())
    except BlockingIOError:
        raise ConfigError(f"{path}: another batch writes to it") from None
    except OSError:
        pass  # a file system without locks


# -- computing -----------------------------------------------------------------------------------------


class Batch:
    """Computes rows with an engine that is started: ``concurrency`` at a time, and written in their order."""

    def __init__(self, engine: EngineLike, config: ServerConfig, concurrency: int) -> None:
        self._engine = engine
        self._app = asgi_app(engine, config)
        self._turns = asyncio.Semaphore(concurrency)
        self._most = _AHEAD * concurrency
        #: requests that are computed, and what is set when the next of them has ended
        self._active = 0
        #: requests that were begun, the same one every time
        self._begun = 0
        self._ended = asyncio.Event()

    async def run(self, rows: Iterator[Row], output: Output, told: Callable[[], object]) -> None:
        """Compute the rows that the output has not; ``told`` is called after each. Rows that are done when
        this is left, by an exception or cancelled, are written, too.

        Raises OSError of the files, and EngineError when the engine has failed.
        """
        window: deque[tuple[Row, asyncio.Task[_Answer]]] = deque()

        def write(*, done: bool) -> None:
            row, answering = window.popleft()
            if not done or not (answering.cancelled() or answering.exception()):
                output.write(row, answering.result())
                told()

        async with _life(self._app):
            try:
                for row in rows:
                    if output.has(row):
                        continue
                    window.append((row, asyncio.create_task(self._answer(row))))
                    if len(window) >= self._most:
                        await asyncio.wait([window[0][1]])
                    while window and window[0][1].done():
                        write(done=False)
                while window:
                    await asyncio.wait([window[0][1]])
                    write(done=False)
            finally:
                left = [answering for _, answering in window]
                for answering in left:
                    answering.cancel()  # which changes nothing for those that are done
                if left:
                    await asyncio.wait(left)
                while window:
                    write(done=True)

    async def _answer(self, row: Row) -> _Answer:
        if row.failure is not None:
            return _failed(row.failure)
        async with self._turns:
            while True:
                alone = not self._active
                self._active += 1
                self._begun += 1
                begun = self._begun
                try:
                    status, request_id, body = await _post(self._app, row.url, row.body)
                finally:
                    self._active -= 1
                if status >= 500 and not self._engine.ready:
                    raise EngineError(f"the engine has failed: {body[:300].decode(errors='replace')}")
                # One that was begun later can come before it, as bodies are parsed on threads.
                if status != _TOO_MANY or (alone and self._begun == begun):
                    ended, self._ended = self._ended, asyncio.Event()
                    ended.set()
                    return _Answer(status, request_id, msgspec.Raw(body))
                if self._active:  # others of this batch fill the queue
                    await self._ended.wait()


def _failed(failure: Failure) -> _Answer:
    return _Answer(failure.status, "", msgspec.Raw(msgspec.json.encode(failure.body())))


async def _post(app: AsgiApplication, path: str, body: bytes) -> tuple[int, str, bytes]:
    """Status, request id and body of the response to one request."""
    given = False
    status, headers, parts = 500, dict[bytes, bytes](), list[bytes]()

    async def receive() -> dict[str, Any]:
        nonlocal given
        if given:
            await asyncio.Event().wait()  # the client stays
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
            headers.update(message["headers"])
        else:
            parts.append(message.get("body", b""))

    sizes = (b"content-length", str(len(body)).encode())
    named = [(b"host", b"localhost"), (b"content-type", b"application/json"), sizes]
    scope = {"type": "http", "http_version": "1.1", "method": "POST", "scheme": "http", "path": path}
    await app({**scope, "query_string": b"", "root_path": "", "headers": named}, receive, send)
    return status, headers.get(b"x-request-id", b"").decode(), b"".join(parts)


@contextlib.asynccontextmanager
async def _life(app: AsgiApplication) -> AsyncIterator[None]:
    """The application between its start and its end."""
    started, stop = asyncio.Event(), asyncio.Event()
    events = iter(["startup", "shutdown"])

    async def receive() -> dict[str, Any]:
        event = next(events)
        if event == "shutdown":
            await stop.wait()
        return {"type": f"lifespan.{event}"}

    async def send(message: Any) -> None:
        started.set()
        if message["type"].endswith("failed"):
            raise EngineError(message["message"])

    life = asyncio.create_task(app({"type": "lifespan"}, receive, send))
    try:
        starting = asyncio.create_task(started.wait())
        await asyncio.wait([life, starting], return_when=asyncio.FIRST_COMPLETED)
        starting.cancel()
        if life.done():
            life.result()
        yield
    finally:
        stop.set()
        await asyncio.wait([life])
