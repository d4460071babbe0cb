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

__all__ = ["OFFSETS", "Client", "Target", "body", "client", "compiled_client", "responses", "target"]

#: prompts begin with a token below this
OFFSETS = 256
_SOURCE = Path(__file__).with_name("client.cpp")


@contextmanager
def compiled_client() -> Iterator[Path]:
    """The program. Raises BadOptions if there is no compiler."""
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
    process: subprocess.Popen[str]

    def begin(self) -> None:
        """Forget how late the loop was."""
        urllib.request.urlopen(urllib.request.Request(self.probe, method="POST"), timeout=60).read()

    def tell(self, *, collect: bool = False) -> dict[str, Any]:
        """Sums so far; ``collect``: after a collection of garbage."""
        address = self.probe + ("?collect=1" if collect else "")
        with urllib.request.urlopen(address, timeout=60) as response:
            found: dict[str, Any] = json.load(response)
        return found


@contextmanager
def target(kind: str, loop: str, tokenizer: str | None, **settings: float) -> Iterator[Target]:
    """A target in a process. Raises RuntimeError if it does not start, or has written to stderr."""
    command = [sys.executable, "-m", "bench.fanout.target", "--kind", kind, "--loop", loop]
    for name, value in settings.items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    if tokenizer is not None:
        command += ["--tokenizer", tokenizer]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        try:
            assert process.stdout is not None
            line = process.stdout.readline().split()
            if len(line) == 2:
                yield Target(int(line[0]), f"http://127.0.0.1:{line[1]}/probe", process)
                process.send_signal(signal.SIGTERM)
                process.wait(60)
        finally:
            process.kill()
            process.wait()
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

    def wait(self, name: str, count: int, seconds: float = 60.0) -> dict[str, float]:
        """Until ``count`` have ``begun`` or are ``done``. Raises RuntimeError if a response failed."""
        end = time.monotonic() + seconds
        while True:
            found = self.counts()
            if found["errors"]:
                raise RuntimeError(f"{found['errors']:.0f} responses failed: {found}")
            if found[name] >= count:
                return found
            if time.monotonic() > end:
                raise RuntimeError(f"{found[name]:.0f} of {count} responses are {name}")
            time.sleep(0.02)


@contextmanager
def client(
    program: Path, port: int, streams: int, parts: tuple[str, str], requests: int = 0, file: str = "-"
) -> Iterator[Client]:
    """``requests`` over ``streams`` connections, one over each by default; see client.cpp."""
    command = [str(program), str(port), PATH, str(streams), str(requests or streams), str(OFFSETS), file]
    with subprocess.Popen(
        [*command, *parts], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield Client(process)
        finally:
            process.kill()


def body(max_tokens: int, context: int = 5, **fields: Any) -> tuple[str, str]:
    """A request, around the first token of its prompt; ``context`` are the others."""
    asked = {"model": "fanout", "max_tokens": max_tokens, "temperature": 0, "stream": True}
    before, after = json.dumps({**asked, **fields, "prompt": [0, context, context, context]}).split("[0,")
    return f"{before}[", f",{after}"


def responses(file: Path) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """The number of each response that a client kept, and its events. Raises ValueError if one is damaged."""
    data, at = file.read_bytes(), 0
    while at < len(data):
        number, size = (int.from_bytes(data[at + each : at + each + 4], "little") for each in (0, 4))
        yield number, _events(data[at + 8 : at + 8 + size])
        at += 8 + size


def _events(response: bytes) -> list[dict[str, Any]]:
    at, payload = response.index(b"\r\n\r\n") + 4, []
    while at < len(response):
        start = response.index(b"\r\n", at) + 2
        end = start + int(response[at : start - 2], 16)
        if response[end : end + 2] != b"\r\n":
            raise ValueError(f"a chunk of {end - start} bytes does not end where it should")
        payload.append(response[start:end])
        at = end + 2
    if payload.pop() != b"":
        raise ValueError("the response has no end")
    events = b"".join(payload).decode().split("\n\n")
    if events[-2:] != ["data: [DONE]", ""]:
        raise ValueError(f"the response ends with {events[-2:]}")
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2] if not event.startswith(":")]
