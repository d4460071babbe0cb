"""RayCluster: the keeper of a dispatcher's replicas, as seen from the dispatcher."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import logging
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from aioinfer.errors import ConfigError, EngineError, shown
from aioinfer.parallel.launched import HostUnavailable, leave

__all__ = ["Placed", "RayCluster", "check_address"]

_log = logging.getLogger("aioinfer")

#: seconds in which the keeper has imported Ray, and after that is connected to the cluster
_IMPORTING, _CONNECTING = 60.0, 8.0
#: seconds in which it has ended an actor, and itself
_FAREWELL = 10.0


class Placed(NamedTuple):
    """Where a replica listens, and the Unix socket that reaches it through Ray."""

    host: str
    port: int
    #: of its process, on its node
    pid: int
    path: str


def check_address(address: object) -> str:
    """Raises ConfigError."""
    if isinstance(address, str):
        host, _, port = address.rpartition(":")
        known = host and "/" not in host and port.isascii() and port.isdigit() and int(port) < 1 << 16
        if address == "auto" or known:
            return address
    raise ConfigError(f"ray must be auto or HOST:PORT, of a cluster that runs, got {shown(address)}")


class RayCluster:
    """It is connected to while replicas are placed on it or wait for that, and belongs to one loop then."""

    def __init__(self, address: str, replicas: int) -> None:
        """``address``: "auto" or HOST:PORT; ``replicas``: that will be placed. Raises ConfigError."""
        self._address = check_address(address)
        if importlib.util.find_spec("ray") is None:
            raise ConfigError("ray is not installed: pip install 'aioinfer[ray]'")
        self._replicas = replicas
        self._process: asyncio.subprocess.Process | None = None
        self._directory: Path | None = None
        self._reading: asyncio.Task[None] | None = None
        #: the keeper is being started
        self._lock = asyncio.Lock()
        self._placed: dict[int, _Placing] = {}
        #: the keeper's command before the address; tests have another one
        self.command = [sys.executable, "-m", "aioinfer.parallel.on_ray.keeper"]

    async def place(
        self, number: int, settings: dict[str, Any], token: str, died: Callable[[str], None]
    ) -> Placed:
        """Start a replica somewhere in the cluster, and wait until it has loaded its model. ``died``: is
        told why it has ended, later. It must be ended in any case. Raises HostUnavailable: there is no
        cluster; EngineError: it has died."""
        placing = self._placed[number] = _Placing(died)
        await self._connect()
        assert self._directory is not None
        path = str(self._directory / str(number))
        self._send("place", number, settings=settings, token=token, path=path, replicas=self._replicas)
        return Placed(*await placing.placed, path)

    async def end(self, number: int, *, kill: bool) -> None:
        """End a replica, at once or as it likes to; with the last one the connection to the cluster ends.
        Idempotent."""
        placing = self._placed.pop(number, None)
        if placing is None:
            return
        try:
            if self._process is not None and self._send("end", number, kill=kill):
                self._placed[number] = placing
                async with asyncio.timeout(_FAREWELL):
                    await placing.ended
        except TimeoutError:
            _log.warning("a replica on Ray does not end")
        finally:
            self._placed.pop(number, None)
            if not self._placed:
                await self._disconnect()

    def outlive_loop(self) -> None:
        """The loop was closed before the replicas were ended: the keeper ends them. Idempotent."""
        leave(self._process)
        self._process = self._reading = None
        self._placed.clear()
        self._lock = asyncio.Lock()
        self._remove_directory()

    # -- the keeper ---------------------------------------------------------------------------------

    async def _connect(self) -> None:
        async with self._lock:
            if self._reading is not None and not self._reading.done():
                return
            await self._disconnect()
            try:
                await self._start()
            except BaseException:
                await asyncio.shield(self._disconnect(kill=True))
                raise

    async def _start(self) -> None:
        try:
            self._directory = Path(tempfile.mkdtemp(prefix="aioinfer-"))
            process = self._process = await asyncio.create_subprocess_exec(
                *self.command,
                self._address,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                start_new_session=True,  # signals of a terminal are for this process
            )
        except OSError as error:
            raise EngineError(f"the keeper of replicas on Ray cannot be started: {error}") from error
        try:
            async with asyncio.timeout(_IMPORTING):
                await self._event(process)
            async with asyncio.timeout(_CONNECTING):
                event = await self._event(process)
        except TimeoutError:
            raise HostUnavailable(f"there is no answer of a Ray cluster at {self._address}") from None
        if event["event"] != "connected":
            raise HostUnavailable(f"there is no Ray cluster at {self._address}: {event['why']}")
        reading = asyncio.get_running_loop().create_task(self._read(process), name="aioinfer-ray")
        self._reading = reading

    async def _event(self, process: asyncio.subprocess.Process) -> dict[str, Any]:
        assert process.stdout is not None
        line = await process.stdout.readline()
        if not line:
            raise HostUnavailable("the keeper of replicas on Ray has ended")
        event: dict[str, Any] = json.loads(line)
        return event

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        """What it says, until it ends."""
        try:
            while True:
                event = await self._event(process)
                placing = self._placed.get(event["number"])
                if placing is not None:
                    placing.heard(event)
        except HostUnavailable as error:
            for placing in list(self._placed.values()):
                placing.gone(error)

    def _send(self, do: str, number: int, **fields: Any) -> bool:
        """Whether the keeper is there to hear it."""
        if self._process is None or self._reading is None or self._reading.done():
            return False
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, "number": number, **fields}).encode() + b"\n")
        return True

    async def _disconnect(self, *, kill: bool = False) -> None:
        reading, self._reading = self._reading, None
        process, self._process = self._process, None
        try:
            if process is not None:
                assert process.stdin is not None
                process.stdin.close()
                await _end(process, 0.0 if kill else _FAREWELL)
        finally:
            if reading is not None:
                reading.cancel()
                await asyncio.wait([reading])
            self._remove_directory()

    def _remove_directory(self) -> None:
        directory, self._directory = self._directory, None
        if directory is not None:
            shutil.rmtree(directory, ignore_errors=True)


async def _end(process: asyncio.subprocess.Process, seconds: float) -> None:
    """Wait so long until it ends, and then kill it."""
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


class _Placing:
    """What the keeper has said of a replica."""

    def __init__(self, died: Callable[[str], None]) -> None:
        loop = asyncio.get_running_loop()
        self._died = died
        self.placed: asyncio.Future[tuple[str, int, int]] = loop.create_future()
        self.ended: asyncio.Future[None] = loop.create_future()

    def heard(self, event: dict[str, Any]) -> None:
        match event["event"]:
            case "placed" if not self.placed.done():
                self.placed.set_result((event["host"], event["port"], event["pid"]))
            case "waiting":
                _log.warning("a replica waits for a place in the Ray cluster")
            case "died" if self.placed.done():
                self._died(event["why"])
            case "died":
                self.placed.set_exception(EngineError(f"its actor has died: {event['why']}"))
            case "ended" if not self.ended.done():
                self.ended.set_result(None)

    def gone(self, error: HostUnavailable) -> None:
        """There is no keeper any more."""
        if not self.placed.done():
            self.placed.set_exception(error)
            self.placed.exception()  # whoever waited may have left
        if not self.ended.done():
            self.ended.set_result(None)
