"""KeeperProcess: the child that is Ray's driver, as seen from its parent."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from aioinfer.errors import AioInferError, EngineError
from aioinfer.parallel.launched import HostUnavailable, leave
from aioinfer.parallel.sent_errors import SentError

__all__ = ["KeeperProcess", "Placing"]

_log = logging.getLogger("aioinfer")

#: seconds in which the keeper has imported Ray, and after that is connected to the cluster
_IMPORTING, _CONNECTING = 60.0, 8.0
#: bytes of an event
_LIMIT = 1 << 20


class Placing:
    """What the keeper has said of a replica."""

    def __init__(self, died: Callable[[str], None]) -> None:
        """``died``: is told why it has ended, once it was placed."""
        loop = asyncio.get_running_loop()
        self._died = died
        #: host, port and process
        self.placed: asyncio.Future[tuple[str, int, int]] = loop.create_future()
        self.ended: asyncio.Future[None] = loop.create_future()

    def heard(self, event: dict[str, Any]) -> None:
        """An event of this replica. Raises anything for one that makes no sense."""
        match event["event"]:
            case "placed":
                if not self.placed.done():
                    self.placed.set_result((event["host"], event["port"], event["pid"]))
            case "waiting":
                _log.warning("a replica waits for a place in the Ray cluster")
            case "died" if self.placed.done():
                self._died(event["why"])
            case "died":
                self.give_up(_error(event))
            case "ended":
                self.gone(EngineError("it was ended"))
            case other:
                raise ValueError(f"no event is called {other!r}")

    def give_up(self, error: AioInferError) -> None:
        """Whoever waits for its place gets this."""
        if not self.placed.done():
            self.placed.set_exception(error)
            self.placed.exception()  # whoever waited may have left

    def gone(self, error: AioInferError) -> None:
        """Nothing more is heard of it."""
        self.give_up(error)
        if not self.ended.done():
            self.ended.set_result(None)


def _error(event: dict[str, Any]) -> AioInferError:
    # Those of the engine another start would meet, too.
    if "error" in event:
        return msgspec.convert(event["error"], SentError).error()
    return HostUnavailable(f"its actor has died: {event['why']}")


class KeeperProcess:
    """From its start to its end. It belongs to one loop."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        #: for Unix sockets, closed to other users
        self._directory: Path | None = None
        self._placings: dict[int, Placing] = {}

    @classmethod
    async def start(cls, command: Sequence[str], address: str) -> KeeperProcess:
        """One that is connected. Raises HostUnavailable: there is no cluster; EngineError."""
        keeper = cls()
        try:
            await keeper._start(command, address)
        except BaseException:
            await keeper.end(0.0)
            raise
        return keeper

    async def _start(self, command: Sequence[str], address: str) -> None:
        try:
            # Not on a thread: whoever is cancelled meanwhile would leave it behind.
            self._directory = Path(tempfile.mkdtemp(prefix="aioinfer-"))
            process = self._process = await asyncio.create_subprocess_exec(
                *command,
                address,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=_LIMIT,
                start_new_session=True,  # signals of a terminal are for this process
            )
        except OSError as error:
            raise EngineError(f"the keeper of replicas on Ray cannot be started: {error}") from error
        try:
            async with asyncio.timeout(_IMPORTING):
                await _event(process)
            async with asyncio.timeout(_CONNECTING):
                event = await _event(process)
        except TimeoutError:
            raise HostUnavailable(f"there is no answer of a Ray cluster at {address}") from None
        if event["event"] != "connected":
            raise HostUnavailable(f"there is no Ray cluster at {address}: {event.get('why')}")
        self._reading = asyncio.get_running_loop().create_task(self._read(process), name="aioinfer-ray")

    @property
    def alive(self) -> bool:
        """It hears and is heard."""
        return self._reading is not None and not self._reading.done()

    def path(self, number: int) -> str:
        """Of the Unix socket for a replica."""
        assert self._directory is not None
        return str(self._directory / str(number))

    def place(self, number: int, placing: Placing, **fields: Any) -> None:
        """Have a replica placed, which no other one has had the number of."""
        self._placings[number] = placing
        if not self._send("place", number, path=self.path(number), **fields):
            placing.gone(HostUnavailable("the keeper of replicas on Ray has ended"))

    def has(self, number: int) -> bool:
        """It was told of this replica, which has not ended."""
        return number in self._placings

    def forget(self, number: int, *, kill: bool) -> None:
        """Have it ended, at once or as it likes to."""
        if not self._send("end", number, kill=kill):
            self._placings[number].gone(HostUnavailable("the keeper of replicas on Ray has ended"))

    def _send(self, do: str, number: int, **fields: Any) -> bool:
        """Whether it is there to hear that."""
        if not self.alive:
            return False
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, "number": number, **fields}).encode() + b"\n")
        return True

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        """What it says, until it ends."""
        error = HostUnavailable("the keeper of replicas on Ray was ended")
        try:
            while True:
                event = await _event(process)
                number = event["number"]
                self._placings[number].heard(event)
                if event["event"] == "ended":
                    del self._placings[number]
        except HostUnavailable as ended:
            error = ended
        except Exception as failure:
            error = HostUnavailable(f"the keeper of replicas on Ray makes no sense: {failure!r}")
            _log.error("%s", error)
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()  # if it goes on, nobody listens
            for placing in self._placings.values():
                placing.gone(error)
            self._placings.clear()

    async def end(self, seconds: float) -> None:
        """Wait so long until it has ended, and then kill it. Idempotent."""
        process, self._process = self._process, None
        try:
            if process is not None:
                assert process.stdin is not None
                process.stdin.close()
                await _end(process, seconds)
        finally:
            if self._reading is not None:
                self._reading.cancel()
            self._remove_directory()
        if self._reading is not None:
            await asyncio.wait([self._reading])

    def leave(self) -> None:
        """Its loop is closed: it ends with its standard input."""
        leave(self._process)
        self._process = None
        self._remove_directory()

    def _remove_directory(self) -> None:
        directory, self._directory = self._directory, None
        if directory is not None:
            shutil.rmtree(directory, ignore_errors=True)


async def _event(process: asyncio.subprocess.Process) -> dict[str, Any]:
    """Raises HostUnavailable: it has ended; ValueError."""
    assert process.stdout is not None
    line = await process.stdout.readline()
    if not line:
        raise HostUnavailable("the keeper of replicas on Ray has ended")
    try:
        event = json.loads(line)
    except ValueError:
        raise HostUnavailable(f"the keeper of replicas on Ray says {line[:200]!r}") from None
    if not isinstance(event, dict) or "event" not in event:
        raise HostUnavailable(f"the keeper of replicas on Ray says {line[:200]!r}")
    return event


async def _end(process: asyncio.subprocess.Process, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await process.wait()
    except TimeoutError:
        if seconds:
            _log.warning("the keeper of replicas on Ray does not end, and is killed")
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
