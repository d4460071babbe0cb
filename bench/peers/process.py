"""A peer's process: asked with a deadline, stopped while others are measured, ended as a tree."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.peers.watch import tree

__all__ = ["PeerFailed", "PeerProcess"]

#: seconds that a peer may take to end when it is asked to
_GRACE = 5.0
#: becomes the command, to be killed (9) when its parent dies (PR_SET_PDEATHSIG, 1), which may have happened
_MORTAL = """
import ctypes, os, sys
parent, *command = sys.argv[1:]
ctypes.CDLL(None).prctl(1, 9)
if os.getppid() == int(parent):
    os.execvp(command[0], command)
"""


class PeerFailed(Exception):
    """A peer died, said nothing in time, or said that it failed."""


class PeerProcess:
    """A command that speaks the adapters' protocol, with all that it starts; its stderr is in a file."""

    def __init__(self, command: Sequence[str], *, log: Path, cwd: Path) -> None:
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        mortal = [sys.executable, "-c", _MORTAL, str(os.getpid()), *command]
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                mortal, cwd=cwd, process_group=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file,
                bufsize=0,
            )  # fmt: skip
        self.pid = self._process.pid
        self._asked = 0
        self._heard = b""
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def pause(self) -> None:
        """Stop all its processes: they use no CPU, whatever its threads wait on."""
        self._signal(signal.SIGSTOP, tree(self.pid))

    def resume(self) -> None:
        self._signal(signal.SIGCONT, tree(self.pid))

    def kill(self) -> None:
        """End all its processes. Idempotent."""
        self._signal(signal.SIGKILL, tree(self.pid))
        # Processes that were being started meanwhile are in the group.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def ask(self, do: str, timeout: float, **fields: Any) -> dict[str, Any]:
        """Send a request and return the answer; other lines are passed over.

        Raises PeerFailed if it answers with an error, ends, or takes longer than ``timeout`` seconds; after
        the latter two it has been killed.
        """
        self._asked += 1
        deadline = time.monotonic() + timeout
        try:
            self._send(json.dumps({"id": self._asked, "do": do, **fields}).encode() + b"\n", deadline)
            answer = None
            while answer is None:
                answer = _answer(self._line(deadline), self._asked)
        except PeerFailed:
            self.kill()
            raise
        if "error" in answer:
            raise PeerFailed(f"{do}: {answer['error']}")
        told: dict[str, Any] = answer["ok"]
        return told

    def _signal(self, number: signal.Signals, members: Sequence[int]) -> None:
        for pid in members:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _send(self, data: bytes, deadline: float) -> None:
        assert self._process.stdin is not None
        if self._process.stdin.closed:
            raise PeerFailed(self._ending())
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
        while b"\n" not in self._heard:
            if not select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise PeerFailed("it did not answer in time")
            part = os.read(pipe, 1 << 20)
            if not part:
                raise PeerFailed(self._ending())
            self._heard += part
        line, _, self._heard = self._heard.partition(b"\n")
        return line

    def _ending(self) -> str:
        """How it ended, with the last lines of its log."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_GRACE)
        text = self.log.read_bytes()[-400:].decode("utf-8", "replace")
        return f"it ended with {self.exit_code}: {' '.join(text.split())}"


def _answer(line: bytes, asked: int) -> dict[str, Any] | None:
    try:
        answer = json.loads(line)
    except ValueError:
        return None
    if not isinstance(answer, dict) or answer.get("id") != asked:
        return None
    good = isinstance(answer.get("ok"), dict) or isinstance(answer.get("error"), str)
    return answer if good else None
