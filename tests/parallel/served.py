"""An engine and its agent behind a real socket, on the loop of the test; and a bare peer of it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from aioinfer import SamplingParams
from aioinfer.engine import Engine
from aioinfer.parallel import Dispatcher
from aioinfer.parallel.agent import Agent
from aioinfer.parallel.frames import FrameReader, frame
from aioinfer.parallel.messages import Answers, Decoder, Message, Refused, Welcome, encoded
from aioinfer.parallel.remote import SocketReplica
from aioinfer.parallel.replica import ReplicaEvents
from tests.parallel.toys import Toy

VOCAB = 40
TOKEN = "not a secret"


def toy(seconds: float = 0.0, **settings: Any) -> Engine:
    """A toy of which each step takes so long."""
    return Toy(
        seconds=lambda _: seconds, longest=400, vocab_size=VOCAB, num_pages=1000, max_running_requests=8,
        seed=1, **settings,
    )  # fmt: skip


class Served(SocketReplica):
    """A replica whose engine and agent are on this loop, behind a real socket."""

    def __init__(self, engine: Engine, name: str, path: Path, token: str = TOKEN) -> None:
        super().__init__(str(path), name, token=token)
        self.engine = engine
        self.path = path
        self.agent: Agent
        self._server: asyncio.Server | None = None

    async def launch(self, progress: Any = None) -> None:
        if self.engine.closed:
            await self.engine.start()
            self.agent = Agent(self.engine, token=TOKEN)
            self.path.unlink(missing_ok=True)
            loop = asyncio.get_running_loop()
            self._server = await loop.create_unix_server(self.agent.connect, self.path)
        await super().launch(progress)

    async def aclose(self) -> None:
        await super().aclose()
        if self._server is not None:
            self._server.close()
            await self.agent.aclose()
        await self.engine.aclose()


class ServedDispatcher(Dispatcher):
    def __init__(self, engines: list[Engine], directory: Path, **options: Any) -> None:
        self._directory = directory
        super().__init__(engines, **options)

    def _replica_of(self, engine: Engine, name: str) -> Any:
        return Served(engine, name, self._directory / name)

    @property
    def replicas(self) -> list[Served]:
        return self._replicas  # type: ignore[return-value]


@contextlib.asynccontextmanager
async def dispatching(directory: Path, *engines: Engine, **options: Any) -> AsyncIterator[ServedDispatcher]:
    dispatcher = ServedDispatcher(list(engines), directory, **options)
    await dispatcher.start()
    try:
        yield dispatcher
    finally:
        await dispatcher.aclose()
    for replica in dispatcher.replicas:
        assert not replica.load.requests
        assert not replica.agent._sessions


PARAMS = SamplingParams(
    ignore_eos=True, max_tokens=60, temperature=1.0, seed=3, logprobs=2, prompt_logprobs=1
)


_decode = Decoder(Welcome | Refused | Answers)


class Peer:
    """A dispatcher that says anything."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._frames = FrameReader()
        self._found: list[Any] = []
        self.writer = writer

    @classmethod
    async def connect(cls, path: Path) -> Peer:
        return cls(*await asyncio.open_unix_connection(path))

    def send(self, message: Message) -> None:
        self.writer.write(frame(encoded(message)))

    async def next(self) -> Any:
        """None at the end."""
        async with asyncio.timeout(60):
            while not self._found:
                data = await self._reader.read(1 << 16)
                if not data:
                    return None
                self._found += map(_decode, self._frames.feed(data))
        return self._found.pop(0)

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(OSError):
            await self.writer.wait_closed()


class Told(ReplicaEvents):
    """What a replica reports."""

    def __init__(self) -> None:
        self.causes: list[BaseException] = []
        self.left = 0

    def moved(self, rows: Any) -> None:
        raise AssertionError(rows)

    def leaving(self, replica: Any) -> None:
        self.left += 1

    def lost(self, replica: Any, cause: BaseException) -> None:
        self.causes.append(cause)
