"""A peer's process: asked with a deadline, stopped while others are measured, and ended for sure."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from bench.peers.watch import tree

__all__ = ["PeerFailed", "PeerProcess", "Process", "end_of"]

#: bytes of an answer at most
_LONGEST = 64 * 2**20
#: seconds that a peer may take to end when it is asked to
_GRACE = 5.0
#: becomes the command, to be killed (9) when its parent dies (PR_SET_PDEATHSIG, 1), which may have happened,
#: and to be ended by a hang-up also where this process ignores those (nohup)
_MORTAL = """
import ctypes, os, signal, sys
parent, *command = sys.argv[1:]
ctypes.CDLL(None).prctl(1, 9)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
if os.getppid() == int(parent):
    os.execvp(command[0], command)
"""


class PeerFailed(Exception):
    """A peer died, said nothing in time, or said that it failed."""


class Process:
    """Some command with all that it starts, its stderr in a file.

    Should this process be killed, the kernel kills the command. What it has started is in its process group,
    and that in this session, not in one of its own: a group that is stopped then is woken and hung up.
    """

    def __init__(
        self, command: Sequence[str], *, log: Path, cwd: Path, environment: Mapping[str, str], pipes: bool
    ) -> None:
        """Raises OSError if there is no such command."""
        if shutil.which(command[0]) is None:
            raise FileNotFoundError(f"there is no {command[0]}")
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        mortal = [sys.executable, "-c", _MORTAL, str(os.getpid()), *command]
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                mortal, cwd=cwd, env={**os.environ, **environment}, process_group=0, stderr=file,
                stdin=subprocess.PIPE if pipes else subprocess.DEVNULL,
                stdout=subprocess.PIPE if pipes else file, bufsize=0,
            )  # fmt: skip
        self.pid = self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def pause(self) -> None:
        """Stop all its processes: nothing of it uses the CPU, whatever its threads spin on."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """End all its processes. Idempotent."""
        members = tree(self.pid)
        self._signal(signal.SIGKILL, members)
        # What was being started meanwhile is in the group.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _wait(self, timeout: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout)

    def _signal(self, number: signal.Signals, members: Sequence[int] | None = None) -> None:
        for pid in tree(self.pid) if members is None else members:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()


class PeerProcess(Process):
    """One that speaks the adapters' protocol."""

    def __init__(
        self, command: Sequence[str], *, log: Path, cwd: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(command, log=log, cwd=cwd, environment=environment or {}, pipes=True)
        self._asked = 0
        self._heard = b""
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)

    def ask(self, do: str, timeout: float, **fields: Any) -> dict[str, Any]:
        """What it answers.

        Lines that are no answer are somebody's prints and passed over. Raises PeerFailed if it answers with
        an error, ends, or takes longer than ``timeout`` seconds; after the latter two it has been killed.
        """
        if self.exit_code is not None:
            raise PeerFailed(self._ending())
        self._asked += 1
        deadline = time.monotonic() + timeout
        try:
            self._send(json.dumps({"id": self._asked, "do": do, **fields}).encode() + b"\n", deadline)
            while True:
                answer = _answer(self._line(deadline), self._asked)
                if answer is not None:
                    break
        except PeerFailed:
            self.kill()
            raise
        if "error" in answer:
            raise PeerFailed(f"{do}: {answer['error']}")
        told: dict[str, Any] = answer["ok"]
        return told

    def close(self) -> None:
        """Ask it to end, and end it. Idempotent."""
        if self.exit_code is None:
            # Once it has gone, nothing tells whose those are that went off into sessions of their own.
            members = tree(self.pid)
            with contextlib.suppress(PeerFailed):
                self.resume()
                self.ask("quit", _GRACE)
                self._wait(_GRACE)
            self._signal(signal.SIGKILL, [pid for pid in members if pid != self.pid])
        self.kill()

    def _send(self, data: bytes, deadline: float) -> None:
        assert self._process.stdin is not None
        pipe = self._process.stdin.fileno()
        while data:
            if not select.select([], [pipe], [], max(0.0, deadline - time.monotonic()))[1]:
                raise PeerFailed("it reads nothing")
            try:
                data = data[os.write(pipe, data) :]
            except BrokenPipeError:
                raise PeerFailed(self._ending()) from None

    def _line(self, deadline: float) -> bytes:
        assert self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        while True:
            line, newline, rest = self._heard.partition(b"\n")
            if newline:
                self._heard = rest
                return line
            if len(self._heard) > _LONGEST:
                raise PeerFailed("it prints without end")
            if not select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise PeerFailed("it did not answer in time")
            if time.monotonic() >= deadline:
                raise PeerFailed("it talks, and did not answer in time")
            part = os.read(pipe, 1 << 20)
            if not part:
                raise PeerFailed(self._ending())
            self._heard += part

    def _ending(self) -> str:
        self._wait(_GRACE)
        return f"it ended with {self.exit_code}: {end_of(self.log)}"


def _answer(line: bytes, asked: int) -> dict[str, Any] | None:
    try:
        answer = json.loads(line)
    except ValueError:
        return None
    if not isinstance(answer, dict) or answer.get("id") != asked:
        return None
    good = isinstance(answer.get("ok"), dict) or isinstance(answer.get("error"), str)
    return answer if good else None


def end_of(log: Path, length: int = 400) -> str:
    """The last that a process said, on one line."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - length))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return ""
    return " ".join(text.split())
