"""Replica: one engine of a dispatcher, wherever it runs.

It reports what its steps bring to :class:`ReplicaEvents`, once per step, and asks nothing. The dispatcher
numbers its attempts and knows from these alone how much each replica has to do.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Protocol

from aioinfer.errors import ConfigError
from aioinfer.parallel.prefixes import take_away

if TYPE_CHECKING:
    from aioinfer.execution.device import DeviceInfo, Progress
    from aioinfer.loop.updating import UpdateMode, WeightSource
    from aioinfer.observe.stats import EngineStats
    from aioinfer.outputs import AdapterInfo, Draft, TokenLogprob
    from aioinfer.parallel.record import Attempt, Ending, Record
    from aioinfer.resuming.record import StreamCheckpoint

__all__ = ["Load", "Replica", "ReplicaEvents", "ReplicaState", "Rows", "close_all"]


class ReplicaState(Enum):
    """``STARTING -> READY -> DRAINING -> CLOSED``, and LOST from any of these."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    LOST = "lost"
    CLOSED = "closed"


class Rows:
    """What a step brought one attempt, or several steps did. Lists are as long as ``ids`` or empty."""

    __slots__ = ("adapter_fingerprint", "admitted_at", "at", "cached_tokens", "draft", "ending", "first",
                 "identical", "ids", "logprobs", "prompt_logprobs", "steps", "text", "times",
                 "weight_version")  # fmt: skip

    def __init__(
        self,
        first: int,
        at: int,
        ids: Sequence[int] = (),
        text: str = "",
        times: Sequence[float] = (),
        *,
        admitted_at: float | None = None,
        cached_tokens: int = 0,
        identical: bool = True,
        logprobs: Sequence[TokenLogprob] = (),
        prompt_logprobs: Sequence[TokenLogprob] = (),
        steps: Sequence[int] = (),
        draft: Callable[[], Draft | None] | None = None,
        ending: Ending | None = None,
        weight_version: int | None = None,
        adapter_fingerprint: str = "",
    ) -> None:
        #: index in the output of the first of ``ids``, and in its text of the first character of ``text``
        self.first = first
        self.at = at
        self.ids = ids
        self.text = text
        #: when the loop read them
        self.times = times
        self.admitted_at = admitted_at
        self.cached_tokens = cached_tokens
        #: the output is that of an undisturbed request
        self.identical = identical
        self.logprobs = logprobs
        #: all that are known by now
        self.prompt_logprobs = prompt_logprobs
        #: of a diffusion model, the rounds that wrote the tokens
        self.steps = steps
        #: makes the newest draft; None: there is no new one
        self.draft = draft
        #: nothing follows. It comes with the last tokens: an output is never complete and without its end
        self.ending = ending
        #: of the weights that computed the tokens; None: those of the rows before
        self.weight_version = weight_version
        #: of the files of the adapter that computes them; empty: none, or as of the rows before
        self.adapter_fingerprint = adapter_fingerprint


class ReplicaEvents(Protocol):
    """What a replica reports, on the dispatcher's loop, perhaps amid a step: nothing is raised."""

    def moved(self, rows: Sequence[tuple[Attempt, Rows]]) -> None:
        """What a step brought these attempts. Ignored for those that have ended."""

    def leaving(self, replica: Replica) -> None:
        """It is about to end: its streams should go on elsewhere."""

    def adapted(self) -> None:
        """A replica has other adapters, or other weights."""

    def lost(self, replica: Replica, cause: BaseException) -> None:
        """Nothing more comes from it. Idempotent."""


class Load:
    """The attempts that were sent to a replica and have not ended, and their sums."""

    __slots__ = ("attempts", "backlog", "pages", "resuming", "tokens")

    def __init__(self) -> None:
        self.attempts: dict[int, Attempt] = {}
        #: prompt tokens that it has to compute, of attempts without a first token
        self.backlog = 0
        #: and those of them that belong to outputs which have begun
        self.resuming = 0
        #: prompt and possible output of all attempts
        self.tokens = 0
        #: how many attempts have a prefix, by the hashes of its pages
        self.pages: Counter[int] = Counter()

    @property
    def requests(self) -> int:
        """Number of attempts."""
        return len(self.attempts)

    def add(self, attempt: Attempt) -> None:
        """Count an attempt."""
        self.attempts[attempt.number] = attempt
        self.tokens += attempt.tokens
        self._compute(attempt, attempt.uncached)
        self.pages.update(attempt.pages)

    def begun(self, attempt: Attempt) -> None:
        """Its first token is there: its prompt is computed."""
        self.admitted(attempt, 0)

    def admitted(self, attempt: Attempt, uncached: int) -> None:
        """It has to compute this many tokens, and not the number that was assumed."""
        self._compute(attempt, uncached - attempt.uncached)
        attempt.uncached = uncached

    def _compute(self, attempt: Attempt, more: int) -> None:
        self.backlog += more
        if attempt.resumes:
            self.resuming += more

    def remove(self, attempt: Attempt) -> None:
        """Do not count an attempt any more."""
        self.begun(attempt)
        del self.attempts[attempt.number]
        self.tokens -= attempt.tokens
        take_away(self.pages, attempt.pages)


class Replica(ABC):
    """One engine of a dispatcher. The dispatcher alone calls these, on its loop."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.state = ReplicaState.STARTING
        #: why it is LOST
        self.cause: BaseException | None = None
        self.load = Load()
        #: it is given other weights: for some time it computes nothing
        self.updating = False
        #: it is closed, or about to be, and is started again
        self.restarting = False

    @property
    def coming(self) -> bool:
        """It may take requests soon."""
        return self.restarting or self.state in (ReplicaState.STARTING, ReplicaState.DRAINING)

    @property
    @abstractmethod
    def info(self) -> DeviceInfo:
        """Known when it has started."""

    @property
    @abstractmethod
    def slots(self) -> int:
        """Requests that it computes at the same time, at most."""

    @property
    @abstractmethod
    def step_tokens(self) -> int:
        """Tokens of a step, at most."""

    @abstractmethod
    async def launch(self, progress: Progress | None = None) -> None:
        """Have it started, if it is not. Raises ConfigError, EngineError, OutOfMemory."""

    @abstractmethod
    async def start(self, events: ReplicaEvents) -> None:
        """Begin to report. Raises EngineError."""

    @abstractmethod
    def submit(
        self,
        attempt: Attempt,
        checkpoint: StreamCheckpoint | None,
        waiting: float | None,
        running: float | None,
    ) -> None:
        """Compute an attempt, from a checkpoint on or from the beginning; ``waiting`` and ``running``:
        seconds that are left. Raises Rejected: not now; EngineError: it is lost; RequestError."""

    @abstractmethod
    def abort(self, attempt: Attempt) -> None:
        """Nothing more is wanted of it. On a replica that is lost, too, and amid a step."""

    @abstractmethod
    def begun(self, attempt: Attempt) -> bool:
        """It has had a row in a step, as far as that is known."""

    @abstractmethod
    def caught_up(self, attempt: Attempt) -> None:
        """The consumer has read enough for a request that was parked for it."""

    @abstractmethod
    def cached(self, token_ids: Sequence[int], record: Record, pages: Sequence[int]) -> int:
        """Of these tokens of a record, how many from the first on have their KV there, as far as that is
        known; ``pages``: hashes of their prefixes, of PAGE tokens more each."""

    def remember(self, pages: Sequence[int]) -> None:
        """An attempt that has begun there has ended, and leaves what has these hashes."""
        return

    @abstractmethod
    def stats(self) -> EngineStats | None:
        """None: unknown, of one that is lost, for example."""

    @abstractmethod
    async def pause(self) -> None:
        """As :meth:`aioinfer.Engine.pause`."""

    @abstractmethod
    def resume(self) -> None:
        """As :meth:`aioinfer.Engine.resume`."""

    @abstractmethod
    def flush_cache(self) -> int:
        """As :meth:`aioinfer.Engine.flush_cache`."""

    @abstractmethod
    def adapters(self) -> Sequence[AdapterInfo]:
        """As :meth:`aioinfer.Engine.adapters`; none of one that does not serve."""

    def fingerprint_of(self, name: str | None) -> str:
        """Of the files of an adapter; empty for none, and for one that it has not."""
        return "" if name is None else next((e.fingerprint for e in self.adapters() if e.name == name), "")

    def has(self, name: str, fingerprint: str = "") -> bool:
        """It has an adapter; with a ``fingerprint``, from these files."""
        found = self.fingerprint_of(name)
        return bool(found) and fingerprint in ("", found)

    @abstractmethod
    async def load_adapter(self, name: str, path: str) -> AdapterInfo:
        """As :meth:`aioinfer.Engine.load_adapter`. Raises EngineFailed where it is lost, too."""

    @abstractmethod
    async def unload_adapter(self, name: str) -> None:
        """As :meth:`aioinfer.Engine.unload_adapter`."""

    #: why the weights cannot be replaced from here; empty if they can
    no_updates = ""

    @property
    def weight_version(self) -> int:
        """As :attr:`aioinfer.Engine.weight_version`."""
        return 0

    def note_version(self, version: int) -> None:
        """Something was computed by weights of this version, or of a later one."""
        return

    async def update_weights(self, source: WeightSource, mode: UpdateMode, version: int) -> None:
        """As :meth:`aioinfer.Engine.update_weights`."""
        raise ConfigError(f"weights: {self.no_updates}")

    def give_up(self) -> None:
        """The dispatcher is closed while this is being launched, which should fail soon."""
        return

    def outlive_loop(self) -> None:
        """Its loop was closed before it was: forget what belonged to that. :meth:`aclose` follows."""
        return

    @abstractmethod
    async def aclose(self) -> None:
        """End it. Idempotent."""

    def __repr__(self) -> str:
        return f"<Replica {self.name} {self.state.value} requests={self.load.requests}>"


async def close_all(replicas: Iterable[Replica]) -> None:
    """Side by side, and each of them, whatever another one raises; that is raised at the end."""
    ends = await asyncio.gather(*(each.aclose() for each in replicas), return_exceptions=True)
    for end in ends:
        if end is not None:
            raise end
