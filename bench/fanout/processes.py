"""Processes of the bench: the target, and the client that only counts."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aioinfer.native.build import BuildFailed, find_compiler
from bench.command import BadOptions
from bench.fanout.target import PATH
from bench.null_device import MAX_TOKENS

__all__ = ["Client", "Target", "client", "compiled_client", "target"]

#: prompts begin with a token below this
_OFFSETS = 256
_SOURCE = Path(__file__).with_name("client.cpp")


@contextmanager
def compiled_client() -> Iterator[Path]:
    """The client's program. Raises BadOptions if there is no compiler."""
    try:
        compiler = find_compiler()
    except BuildFailed as error:
        raise BadOptions(str(error)) from None
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "client"
        command = [*compiler, "-std=c++20", "-O2", str(_SOURCE), "-o", str(program)]
        made = subprocess.run(command, capture_output=True, text=True)
        if made.returncode:
            raise BadOptions(f"the compiler failed: {made.stderr.strip()[:300]}")
        yield program


@dataclass(frozen=True, slots=True)
class Target:
    """A running target."""

    port: int
    probe: str

    def begin(self) -> None:
        """Reset the lateness of the loop."""
        urllib.request.urlopen(urllib.request.Request(self.probe, method="POST"), timeout=60).read()

    def tell(self) -> dict[str, Any]:
        """Sums so far."""
        with urllib.request.urlopen(self.probe, timeout=60) as response:
            found: dict[str, Any] = json.load(response)
        return found


@contextmanager
def target(kind: str, streams: int, step_ms: float) -> Iterator[Target]:
    """A target in a process. Raises RuntimeError if it does not start, or has written a traceback."""
    command = [sys.executable, "-m", "bench.fanout.target", "--kind", kind]
    command += ["--streams", str(streams), "--step-ms", str(step_ms)]
    with tempfile.TemporaryFile("w+") as errors:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process:
            try:
                assert process.stdout is not None
                line = process.stdout.readline().split()
                if len(line) == 2:
                    yield Target(int(line[0]), f"http://127.0.0.1:{line[1]}/probe")
                    process.send_signal(signal.SIGTERM)
                    process.wait(60)
            finally:
                process.kill()
        errors.seek(0)
        said = errors.read()
    if len(line) != 2 or "Traceback" in said:
        raise RuntimeError(f"the target {kind} failed:\n{said[-2000:]}")


@dataclass(frozen=True, slots=True)
class Client:
    """A running client."""

    process: subprocess.Popen[str]

    def counts(self) -> dict[str, float]:
        """Sums so far."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        found: dict[str, float] = json.loads(self.process.stdout.readline())
        return found

    def wait_begun(self, count: int, seconds: float = 60.0) -> None:
        """Wait until ``count`` responses have begun. Raises RuntimeError if one failed."""
        end = time.monotonic() + seconds
        while (found := self.counts())["begun"] < count:
            if found["errors"] or time.monotonic() > end:
                raise RuntimeError(f"not all of {count} responses begin: {found}")
            time.sleep(0.02)


@contextmanager
def client(program: Path, port: int, streams: int) -> Iterator[Client]:
    """A client with one endless request on each of ``streams`` connections; see client.cpp."""
    asked = {"model": "null", "max_tokens": MAX_TOKENS, "temperature": 0, "stream": True}
    before, after = json.dumps({**asked, "prompt": [0, 5, 5, 5]}).split("[0,")
    command = [str(program), str(port), PATH, str(streams), str(_OFFSETS), f"{before}[", f",{after}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Client(process)
        finally:
            process.kill()
