"""Replica: one engine of a dispatcher, wherever it runs.

It reports what its steps bring to :class:`ReplicaEvents`, once per step, and asks nothing. The dispatcher
numbers its attempts and knows from these alone how much each replica has to do.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

from aioinfer.errors import ConfigError
from aioinfer.parallel.prefixes import take_away
from aioinfer.parallel.roles import Role

if TYPE_CHECKING:
    from aioinfer.execution.device import DeviceInfo, Progress
    from aioinfer.loop.holding import Kept, Prefix
    from aioinfer.loop.updating import UpdateMode, WeightSource
    from aioinfer.observe.observers import Observers
    from aioinfer.observe.stats import EngineStats
    from aioinfer.outputs import AdapterInfo, TokenLogprob
    from aioinfer.parallel.exchange import Exchange
    from aioinfer.parallel.record import Record, TimeLeft
    from aioinfer.parallel.rows import Rows
    from aioinfer.resuming.record import StreamCheckpoint

__all__ = [
    "Attempt",
    "Diverged",
    "Load",
    "Replica",
    "ReplicaEvents",
    "ReplicaState",
    "Stored",
    "Unwanted",
    "Wanted",
    "close_all",
]


_log = logging.getLogger("aioinfer")


class Diverged(Exception):
    """An attempt brought other tokens or another text than the record has."""


class Unwanted(Exception):
    """An attempt goes on with other weights than it must."""


class ReplicaState(Enum):
    """``STARTING -> READY -> DRAINING -> CLOSED``, and LOST from any of these."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    LOST = "lost"
    CLOSED = "closed"


class ReplicaEvents:
    """Hears what a replica reports, on the dispatcher's loop, perhaps amid a step: nothing is raised. This
    one ignores it."""

    def moved(self, rows: Sequence[tuple[Attempt, Rows]]) -> None:
        """Take the new output of these attempts. Ignored for those that have ended."""

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
        self.admitted(attempt, 0)
        del self.attempts[attempt.number]
        self.tokens -= attempt.tokens
        take_away(self.pages, attempt.pages)


class Wanted(NamedTuple):
    """Arithmetic and weights that an output must go on with."""

    #: by which arithmetic, and by which version of the weights its last token was computed
    numerics: str
    weights: int

    def __str__(self) -> str:
        return "the same arithmetic" + (f" and the weights of version {self.weights}" if self.weights else "")

    def is_of(self, replica: Replica) -> bool:
        """A replica has it, as far as that is known."""
        return replica.info.numerics == self.numerics and replica.weight_version == self.weights


class Stored(NamedTuple):
    """What a replica has stored of a prefix for others."""

    tokens: int
    #: of its pages, where they can be fetched
    names: Sequence[bytes] = ()


class Replica(ABC):
    """One engine of a dispatcher. The dispatcher alone calls these, on its loop."""

    #: what is in its prefix cache is guessed from what it is to :meth:`remember`
    guessed = False

    def __init__(self, name: str) -> None:
        self.name = name
        self.state = ReplicaState.STARTING
        #: what is sent to it
        self.role: Role = "both"
        #: why it is LOST
        self.cause: BaseException | None = None
        self.load = Load()
        #: what it holds for sessions, by the hashes of their last pages
        self.held: Counter[int] = Counter()
        #: counters of earlier engines in its place, by their names
        self.past: dict[str, Any] = {}
        #: where it reports, from :meth:`start` on
        self.events = ReplicaEvents()
        #: where it leaves pages for others and finds theirs; None: nowhere
        self.exchange: Exchange | None = None
        #: it is given other weights: for some time it computes nothing
        self.updating = False
        #: it is not heard at the moment, and gets no new work
        self.silent = False
        #: it is closed, or about to be, and is started again
        self.restarting = False

    @property
    def takes_work(self) -> bool:
        """It takes requests at the moment."""
        return self.state is ReplicaState.READY and not self.silent

    @property
    def status(self) -> str:
        """The state, or "silent" of one that would take requests if it were heard."""
        return "silent" if self.silent and self.state is ReplicaState.READY else self.state.value

    @property
    def coming(self) -> bool:
        """It may take requests soon."""
        return self.silent or self.restarting or self.state in (ReplicaState.STARTING, ReplicaState.DRAINING)

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
    def submit(self, attempt: Attempt, checkpoint: StreamCheckpoint | None, left: TimeLeft) -> None:
        """Compute an attempt, from a checkpoint on or from the beginning. Raises
        Rejected: not now; EngineError: it is lost; RequestError."""

    @abstractmethod
    def abort(self, attempt: Attempt) -> None:
        """Nothing more is wanted of it. On a replica that is lost, too, and amid a step."""

    @abstractmethod
    def caught_up(self, attempt: Attempt) -> None:
        """The consumer has read enough for a request that was parked for it."""

    @abstractmethod
    def cached(self, key: bytes, record: Record, pages: Sequence[int]) -> int:
        """The number of tokens of a record, from the first on, that have their KV there, as far as that is
        known; ``key``: its own, ``pages``: hashes of their prefixes, of PAGE tokens more each."""

    def remember(self, pages: Sequence[int]) -> None:
        """An attempt that has begun there has ended, and leaves what has these hashes."""
        return

    @abstractmethod
    def stats(self) -> EngineStats | None:
        """The last ones that are known; None before its first start."""

    def follow(self, observers: Observers) -> None:
        """Report the steps of an engine on this loop to these, too."""
        return

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
        """The fingerprint of an adapter's files; empty for none, and for one that it has not."""
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

    #: it sees the files of this process
    same_host = False
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

    async def share(self, exchange: Exchange) -> None:
        """From now on, leave pages for others there and find theirs. Raises ConfigError: it cannot;
        EngineError."""
        raise ConfigError("roles: pages of this engine cannot be given to others")

    async def share_again(self) -> None:
        """The same at a start. One that has served before does without, if it must."""
        if self.exchange is None:
            return
        try:
            await self.share(self.exchange)
        except ConfigError as error:
            if not self.restarting:
                raise
            self.exchange = None
            _log.warning("the replica %s leaves no pages for others: %s", self.name, error)

    async def store_prefix(self, prefix: Prefix) -> Stored:
        """Put the KV of a prefix, as far as it is cached, where other replicas get it. Raises EngineError."""
        return Stored(0)

    async def fetch(self, name: bytes, at: int) -> tuple[int, bytes]:
        """A piece of a page that it has stored, from a byte on, and the bytes of the whole page; nothing of
        one that it has not. Raises EngineError."""
        return 0, b""

    async def give(self, name: bytes, at: int, total: int, data: bytes) -> bool:
        """Give it a piece of a page of another replica; whether it takes it. Raises EngineError."""
        return False

    def hold(self, prefix: Prefix, seconds: float | None) -> Kept | None:
        """Hold what it has cached of a prefix, until that was not used for so long. None: it cannot."""
        return None

    async def warm(self, prefix: Prefix, seconds: float | None) -> Kept | None:
        """The same, once it has computed what is missing, or got it from others. Raises as a request."""
        return None

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


class Attempt:
    """One replica's work on a record. When it has ended, nothing more that comes from it counts.

    It says where in the output its tokens and its text are, so one that begins again after a loss is
    compared with the record and adds only what is new::

        record     t0 t1 t2 t3 t4                    delivered, or to be delivered
        attempt    t0 t1 t2 t3 t4 | lost
        attempt        t2 t3 t4 t5 t6                t2 to t4 must be the same; t5 and t6 are new
    """

    __slots__ = ("ended", "handle", "number", "pages", "prompt_logprobs", "read", "record",
                 "replica", "resumes", "tokens", "uncached", "wanted", "weight_version")  # fmt: skip

    def __init__(self, record: Record, replica: Replica, number: int) -> None:
        """``number``: rises with every attempt of a dispatcher."""
        self.record = record
        self.replica = replica
        self.number = number
        #: the output has begun before
        self.resumes = bool(record.output.token_ids)
        #: what it must go on with, until its first token is there
        self.wanted: Wanted | None = None
        self.ended = False
        #: what a local replica reads it by
        self.handle: Any = None
        #: of a remote one: tokens that it knows to be read
        self.read = 0
        #: those that it has brought
        self.prompt_logprobs: list[TokenLogprob] = []
        #: of the replica's load: tokens in all, those to compute before the first one, hashes of its prefixes
        self.tokens = 0
        self.uncached = 0
        #: of the weights that computed what it has brought last; None: unknown
        self.weight_version: int | None = None
        self.pages: Sequence[int] = ()

    def bring(self, rows: Rows, now: float) -> bool:
        """Compare what a step brought with the record, and append what is new there; whether anything is.
        Raises Unwanted, Diverged, and ValueError for rows that leave a gap."""
        if rows.weight_version is not None:
            self.weight_version = rows.weight_version
        if self.wanted is not None:
            if rows.ids and self.weight_version not in (None, self.wanted.weights):
                raise Unwanted
            if not rows.ids and rows.ending is None:
                return self._bring_text(rows.at, rows.text)  # what computes it is not known yet
            self.wanted = None
        if not rows.identical:
            self.record.output.identical = False
        tokens = self._bring_tokens(rows, now)
        self._bring_prompt_logprobs(rows)
        return self._bring_text(rows.at, rows.text) or tokens

    def _bring_tokens(self, rows: Rows, now: float) -> bool:
        output, ids, first = self.record.output, rows.ids, rows.first
        version = output.weight_version if self.weight_version is None else self.weight_version
        known = len(output.token_ids) - first
        if known < 0:
            raise ValueError(f"tokens from {first} on, where there are {len(output.token_ids)}")
        if known and ids:
            there = output.token_ids[first : first + len(ids)]
            if there != list(ids[: len(there)]):
                raise Diverged(f"the tokens from {first} on are others than those that were delivered")
        if not output.token_ids and version != output.weight_version:
            output.weight_version = version  # scores and vectors have no tokens
            output.prompt_logprobs.clear()
        if len(ids) <= known:
            return False
        if version != output.weight_version:
            output.note_switch(output.weight_version)
            output.weight_version = version
        output.token_ids += ids[known:] if known else ids
        output.token_times += rows.times[known:] if rows.times else [now] * (len(ids) - known)
        if rows.logprobs and output.request.params.logprobs is not None:
            output.logprobs += rows.logprobs[known:]
        if rows.steps and output.step_map is not None:
            output.step_map += rows.steps[known:]
        return True

    def _bring_prompt_logprobs(self, rows: Rows) -> None:
        if rows.weight_version is not None and not rows.first:
            self.prompt_logprobs = []  # nothing was output, and others compute them
        if rows.prompt_logprobs:
            self.prompt_logprobs += rows.prompt_logprobs
            known = self.record.output.prompt_logprobs
            if len(self.prompt_logprobs) > len(known):
                known[:] = self.prompt_logprobs

    def _bring_text(self, at: int, text: str) -> bool:
        record, known = self.record, self.record.characters - at
        if known < 0:
            raise ValueError(f"text from {at} on, where there is {record.characters}")
        if known and text:
            there = record.output.text[at : at + len(text)]
            if there != text[: len(there)]:
                raise Diverged(f"the text from {at} on is another one than that which was delivered")
        if len(text) <= known:
            return False
        new = text[known:] if known else text
        record.characters += len(new)
        if record.cell.delivered:
            self._split(new)
        else:
            record.output.pieces.append(new)
        return True

    def _split(self, new: str) -> None:
        """Add text, of which the part that was delivered before the restoring is a piece of its own."""
        record = self.record
        pieces = record.output.pieces
        text = "".join([*pieces, new])
        pieces[:] = [
            piece for piece in (text[: record.cell.delivered], text[record.cell.delivered :]) if piece
        ]
        if len(text) >= record.cell.delivered:
            record.cell.delivered = 0
        record.cell.taken_pieces = 1


async def close_all(replicas: Iterable[Replica]) -> None:
    """Side by side, and each of them, whatever another one raises; that is raised at the end."""
    ends = await asyncio.gather(*(each.aclose() for each in replicas), return_exceptions=True)
    for end in ends:
        if end is not None:
            raise end
