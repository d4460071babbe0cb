"""A Ray cluster of one node on this machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.joining import still_running
from tests.ports import free_port

__all__ = ["RayHead", "ray_head"]

_RAY = [sys.executable, "-m", "ray.scripts.scripts"]


class RayHead:
    """Its processes; :attr:`address` is the same in each life."""

    def __init__(self, directory: Path, cpus: int) -> None:
        self.port = free_port()
        self.address = f"127.0.0.1:{self.port}"
        self._directory = directory
        self._cpus = cpus
        self._life = 0
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Returns when it takes connections."""
        self._life += 1
        options = {
            "port": self.port,
            "node-ip-address": "127.0.0.1",
            "num-cpus": self._cpus,
            "object-store-memory": 80_000_000,
            "temp-dir": self._directory / str(self._life),
        }
        command = [*_RAY, "start", "--head", "--block", "--disable-usage-stats", "--include-dashboard=false"]
        self._process = subprocess.Popen(
            [*command, *(f"--{name}={value}" for name, value in options.items())],
            stdout=subprocess.PIPE,
            env=os.environ | {"RAY_AUTH_MODE": "disabled"},
        )
        assert self._process.stdout is not None
        said = b""
        while line := self._process.stdout.readline():
            said += line
            if b"--block" in line:  # the last thing that it says
                return
        raise AssertionError(f"Ray has not started:\n{said.decode(errors='replace')}")

    def kill(self) -> None:
        """End it with all that it has started, at once. Idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        for each in family:
            try:
                each.kill()
            except psutil.NoSuchProcess:
                continue
        process.wait()
        still_running(family)
        assert process.stdout is not None
        process.stdout.close()


@contextmanager
def ray_head(cpus: int = 4) -> Iterator[RayHead]:
    """A cluster that runs."""
    # Ray has Unix sockets deep below it, and their names have at most 107 bytes.
    directory = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
    head = RayHead(directory, cpus)
    try:
        head.start()
        yield head
    finally:
        head.kill()
        shutil.rmtree(directory, ignore_errors=True)
