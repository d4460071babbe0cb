"""A child of a fork, such as a worker of a pool, lives longer than what its parent has opened."""

from __future__ import annotations

import asyncio
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop

from aioinfer.parallel.connection import Connection
from aioinfer.parallel.launched import Child

#: seconds, to tell "never" from "soon"
NEVER = 60.0


@contextmanager
def child_of_a_fork(work: Callable[[], object] = lambda: None) -> Iterator[None]:
    """A child that does some work and then waits for the end of the block."""
    reading, writing = os.pipe()
    done, told = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        try:
            os.close(writing)
            work()
            os.write(told, b"x")
            os.read(reading, 1)
        finally:
            os._exit(0)
    try:
        os.close(told)
        assert os.read(done, 1) == b"x"
        yield
    finally:
        os.close(writing)
        os.waitpid(child, 0)
        os.close(reading)
        os.close(done)


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Iterator[Callable[[Any], Any]]:
    with asyncio.Runner(loop_factory=request.param) as runner:
        yield runner.run


def test_a_process_ends_with_its_input_whoever_was_forked_meanwhile(run: Callable[[Any], Any]) -> None:
    async def ended() -> bool:
        code = "import sys; sys.stdin.read()"
        child = await Child.start(lambda _: [sys.executable, "-c", code])
        with child_of_a_fork():
            return await child.end(NEVER)

    assert run(ended())


def test_a_peer_hears_of_the_end_whoever_was_forked_meanwhile(
    run: Callable[[Any], Any], tmp_path: Path
) -> None:
    class Ignored:
        def __getattr__(self, name: str) -> Callable[..., None]:
            return lambda *_: None

    async def heard() -> bytes:
        read: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            read.set_result(await reader.read())
            writer.close()

        async with await asyncio.start_unix_server(serve, tmp_path / "socket"):
            made: Any = Connection(Ignored(), lambda _: None)  # type: ignore[arg-type, return-value]
            await asyncio.get_running_loop().create_unix_connection(lambda: made, str(tmp_path / "socket"))
            with child_of_a_fork():
                made.finish()
                async with asyncio.timeout(NEVER):
                    return await read

    assert run(heard()) == b""


def test_what_a_child_closes_of_it_closes_nothing_else_there(run: Callable[[Any], Any]) -> None:
    async def ended() -> bool:
        code = "import sys; sys.stdin.read()"
        child = await Child.start(lambda _: [sys.executable, "-c", code])

        def close() -> None:
            pipe = child.stdin.get_extra_info("pipe")
            number = pipe.fileno()
            os.fstat(number)  # it is taken still
            pipe.close()
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.fstat(number)

        with child_of_a_fork(close):
            assert child.process.returncode is None
            return await child.end(NEVER)

    assert run(ended())
