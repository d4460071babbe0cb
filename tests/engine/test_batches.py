"""Every way of a batch, with bad rows among good ones, ended in the middle beside others that fill the queue.

What was done is where the documentation says, the rest is asked for again, and each row has one outcome.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Literal

import pytest

from aioinfer import AioInferError, ChatRow, EngineClosed, InvalidRequest, Pooling, Rejected, SamplingParams
from aioinfer.client.in_thread import EngineInThread
from aioinfer.embeddings.embedding import normalized
from tests.engine.conftest import MakeEngine
from tests.engine.making import make_llm
from tests.tiers import RACES, SECONDS, nightly, rest
from tests.toys import ToyTokenizer, toy_generate
from tests.toys.pooling import toy_pooled

BAD = 100
PARAMS = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
SETTINGS: Any = {"num_pages": 256, "max_running_requests": 16, "max_queued_requests": 32}
#: the prompt of others
OTHER = [1, 2]
RETURN: Any = {"on_error": "return"}
QUERY = "which?"
How = Literal["interrupted", "closed"]


class Held:
    """An engine on a thread of its own, called or not, with others that fill its queue."""

    def __init__(self, face: Any, ends: Ends) -> None:
        self.face, self.ends = face, ends
        self.engine = face.engine if isinstance(face, EngineInThread) else face._engine
        hand_over = face._home.loop.call_soon_threadsafe

        def handed_over(call: Any, *arguments: Any, **options: Any) -> Any:
            if not threading.current_thread().name.startswith("aioinfer"):
                ends.told.set()
            return hand_over(call, *arguments, **options)

        full = threading.Event()
        self._others = asyncio.run_coroutine_threadsafe(self._fill(full), face._home.loop)
        assert full.wait(60)
        face._home.loop.call_soon_threadsafe = handed_over

    async def _fill(self, full: threading.Event) -> None:
        async def ask(stream: Any) -> None:
            with suppress(AioInferError):
                await stream

        async with asyncio.TaskGroup() as others:
            while not self.engine.closed:
                try:
                    others.create_task(ask(self.engine.generate(OTHER, PARAMS)))
                except Rejected:
                    full.set()
                    room = asyncio.get_running_loop().create_future()
                    self.engine.when_room(lambda room=room: room.done() or room.set_result(None))
                    await room

    def on_its_loop(self, call: Callable[[], Any]) -> Any:
        async def called() -> Any:
            self.ends.task = asyncio.current_task()
            return await call()

        return self.face.run(called).result()

    def close(self) -> None:
        self._others.cancel()
        self.face.close()


class Ends:
    """Ends a call amid a step, which waits until the loop has been told."""

    def __init__(self, begun: int) -> None:
        #: requests of the call that begin before
        self._left = begun
        #: what is done then
        self.act: Callable[[], Any] | None = None
        self.told = threading.Event()
        self.task: asyncio.Task[Any] | None = None

    def __call__(self, step: Any) -> None:
        self._left -= sum([*row.sequence.prompt_ids] != OTHER for row in step.prefilling)
        if self.act is not None and self._left <= 0:
            act, self.act = self.act, None
            self.told.clear()
            act()
            assert self.told.wait(60)

    def cancel(self) -> None:
        assert self.task is not None
        self.task.cancel()
        self.told.set()


def interrupt() -> None:
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


# -- ways ------------------------------------------------------------------------------------------------

#: each has the outcomes of rows in their order, None where there is none
Call = Callable[[Held, Sequence[Any]], Sequence[Any]]


def whole(call: Callable[[], Sequence[Any]]) -> Sequence[Any]:
    """What a call returns, or what was done when it was ended."""
    try:
        return call()
    except (KeyboardInterrupt, EngineClosed) as error:
        found: Sequence[Any] = error.results  # type: ignore[union-attr]
        return found


def mapped(held: Held, rows: Sequence[Any]) -> Sequence[Any]:
    async def call() -> list[Any]:
        found = []
        results = held.engine.map(rows, PARAMS, **RETURN)
        with suppress(asyncio.CancelledError, EngineClosed):
            async with results:
                async for each in results:
                    found.append(each)
        late = await results.undelivered()
        return [*found, *(late.get(at) for at in range(len(found), len(rows)))]

    outcomes: list[Any] = held.on_its_loop(call)
    return outcomes


def embedded(held: Held, rows: Sequence[Any]) -> Sequence[Any]:
    async def call() -> Any:
        try:
            return await held.engine.embed(rows, normalize=False, **RETURN)
        except (asyncio.CancelledError, EngineClosed) as error:
            return error.results  # type: ignore[union-attr]

    outcomes: Sequence[Any] = held.on_its_loop(call)
    return outcomes


def scored(held: Held, rows: Sequence[Any]) -> Sequence[Any]:
    async def call() -> Any:
        try:
            return await held.engine.score(QUERY, rows, method="cosine", **RETURN)
        except (asyncio.CancelledError, EngineClosed):
            return None  # scores are comparable when all are there

    return each_score(held.on_its_loop(call), rows)


def each_score(scores: Any, rows: Sequence[Any]) -> Sequence[Any]:
    if scores is None:
        return [None] * len(rows)
    return [scores.errors.get(at, score) for at, score in enumerate(scores.scores)]


def waited(held: Held, future: Any) -> Any:
    """The result of a future, which an interrupted wait does not end."""
    try:
        return future.result()
    except KeyboardInterrupt:
        held.ends.told.set()
        return future.result()


def embedded_elsewhere(held: Held, rows: Sequence[Any]) -> Sequence[Any]:
    return whole(lambda: waited(held, held.face.embed(rows, normalize=False, **RETURN)))


def scored_elsewhere(held: Held, rows: Sequence[Any]) -> Sequence[Any]:
    scores = None
    with suppress(EngineClosed):
        scores = waited(held, held.face.score(QUERY, rows, method="cosine", **RETURN))
    return each_score(scores, rows)


def called(name: str, *arguments: Any, **options: Any) -> Call:
    def call(held: Held, rows: Sequence[Any]) -> Sequence[Any]:
        return whole(lambda: getattr(held.face, name)(rows, *arguments, progress=False, **options, **RETURN))

    return call


def scored_by_call(held: Held, rows: Sequence[Any]) -> Sequence[Any]:
    scores = None
    with suppress(KeyboardInterrupt, EngineClosed):
        scores = held.face.score(QUERY, rows, method="cosine", progress=False, **RETURN)
    return each_score(scores, rows)


# -- rows, and what is right for them ---------------------------------------------------------------------


def ids(number: int) -> list[int]:
    return [number // 60 % 60 + 1, number % 60 + 1, number // 3600 + 1]


def chat(number: int) -> ChatRow:
    return ChatRow([{"role": "user", "content": str(number)}], id=f"row {number}")


def cosine(number: int) -> float:
    query, document = (
        normalized(toy_pooled(ToyTokenizer().encode(text), Pooling("last"))) for text in (QUERY, str(number))
    )
    return float(query @ document)


#: a good row by its number, a bad one, and whether an outcome is that of a number
KINDS: dict[str, tuple[Callable[[int], Any], Any, Callable[[int, Any], bool]]] = {
    "ids": (ids, [10**9], lambda number, each: each.token_ids == toy_generate(ids(number), PARAMS)),
    "chats": (
        chat,
        ChatRow([]),
        lambda number, each: (
            each.result.request_id == f"row {number}"
            and each.result.token_ids
            == toy_generate(ToyTokenizer().encode_chat(chat(number).messages), PARAMS)
        ),
    ),
    "texts": (
        str,
        "",
        lambda number, each: (
            each.vector.tolist() == toy_pooled(ToyTokenizer().encode(str(number)), Pooling("last")).tolist()
        ),
    ),
    "scores": (str, "", lambda number, each: each == pytest.approx(cosine(number))),
}
WAYS: dict[str, tuple[str, Call]] = {
    "map": ("ids", mapped),
    "map of chats": ("chats", mapped),
    "embed": ("texts", embedded),
    "score": ("scores", scored),
    "embed in a thread": ("texts", embedded_elsewhere),
    "score in a thread": ("scores", scored_elsewhere),
    "LLM.generate": ("ids", called("generate", PARAMS)),
    "LLM.chat": ("chats", called("chat", PARAMS)),
    "LLM.embed": ("texts", called("embed", normalize=False)),
    "LLM.score": ("scores", scored_by_call),
}


@pytest.mark.parametrize(
    "count", [pytest.param(200, marks=rest(SECONDS)), pytest.param(5000, marks=nightly(RACES))]
)
@pytest.mark.parametrize("how", ["interrupted", "closed"])
@pytest.mark.parametrize("way", WAYS)
def test_each_row_of_a_batch_has_one_outcome(make_engine: MakeEngine, way: str, how: How, count: int) -> None:
    kind, call = WAYS[way]
    row, bad, fits = KINDS[kind]
    rows = [bad if number % BAD == BAD // 2 else row(number) for number in range(count)]
    ends = Ends(count // 3)

    def begin() -> Held:
        if way.startswith("LLM"):
            return Held(make_llm(fault=ends, **SETTINGS), ends)
        return Held(EngineInThread(make_engine(fault=ends, launch_mode="inline", **SETTINGS)), ends)

    held = begin()
    try:
        if how == "closed":
            ends.act = threading.Thread(target=held.face.close).start
        else:
            ends.act = interrupt if way.startswith("LLM") or "thread" in way else ends.cancel
        found = dict(enumerate(call(held, rows)))
        assert ends.act is None
        done = {at: each for at, each in found.items() if each is not None}
        if kind != "scores" and not (how == "interrupted" and "thread" in way):
            assert 0 < len(done) < count
        if how == "closed":
            held.close()
            held = begin()
        left = [at for at in range(count) if at not in done]
        outcomes = done | dict(zip(left, call(held, [rows[at] for at in left]) if left else (), strict=True))
    finally:
        held.close()
    for number in range(count):
        if number % BAD == BAD // 2:
            assert isinstance(outcomes[number], InvalidRequest)
        else:
            assert fits(number, outcomes[number])
