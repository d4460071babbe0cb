"""Placing: chooses the replica that gets a request, by the load of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from aioinfer.errors import EngineFailed
from aioinfer.parallel.policies import Candidate, RoutingPolicy
from aioinfer.parallel.prefixes import PAGE, take_away
from aioinfer.parallel.record import Record
from aioinfer.parallel.replica import Attempt, Replica, ReplicaState, Wanted
from aioinfer.parallel.roles import Role

__all__ = ["Placement", "Placing", "has_adapter", "makes_the_same", "page_hashes"]

#: steps of prefill that a replica may have in its own queue
_STEPS = 2
#: hashes of a prompt's prefixes, at most
_MOST_PAGES = 512
_READY = ReplicaState.READY


class Placement(NamedTuple):
    """The replica that a request goes to."""

    replica: Replica
    #: tokens to compute before the first one, and hashes of its prefixes
    uncached: int
    pages: Sequence[int]


class Placing:
    """A replica has room if it has a slot and less than two steps of prefill to do, or nothing at all. Of
    what outputs need that have begun elsewhere, it gets half a step at a time, so that its own go on."""

    def __init__(self, replicas: Sequence[Replica], policy: RoutingPolicy, prefill_tokens: int) -> None:
        """``prefill_tokens``: to compute, from which on a prompt is for replicas that compute prompts."""
        self.replicas = list(replicas)
        self._prefill_tokens = prefill_tokens
        self.policy = policy
        #: replicas that refused a request, until one of theirs ends
        self._full: set[Replica] = set()
        #: how many attempts have a prefix, on all replicas, by the hashes of its pages
        self._sharing: Counter[int] = Counter()

    @property
    def ready(self) -> list[Replica]:
        """Replicas that take requests, or will when they are heard again."""
        return [each for each in self.replicas if each.state is _READY]

    @property
    def alive(self) -> bool:
        """Something computes, or is about to."""
        return any(each.state not in (ReplicaState.LOST, ReplicaState.CLOSED) for each in self.replicas)

    def computes(
        self, record: Record, wanted: Wanted | None, *, soon: bool = False, sent: bool = False
    ) -> bool:
        """A replica that takes requests has what is ``wanted`` (None: anything) and the adapter of a record;
        ``soon``: or one may have these soon; ``sent``: the adapter that it had where it was sent."""
        return any(
            ((soon and each.coming) or (each.takes_work and has_adapter(each, record, sent)))
            and (wanted is None or wanted.is_of(each))
            for each in self.replicas
        )

    def lane(self, record: Record) -> Role:
        """The role of the replicas that a record is for: "prefill" for long prompts without output, if that
        does not more than double what there is to compute, as without the history that others hold."""
        if record.output.token_ids or all(each.role == "both" for each in self.replicas):
            return "decode"
        known = here = there = record.known
        if self.policy.looks_at_prefixes:
            key = record.key
            pages = page_hashes(key, hash(record.namespace))
            for each in self.ready:
                uncached = known - _cached(each, key, record, pages)[0]
                here = min(here, uncached) if each.role != "prefill" else here
                there = min(there, uncached) if each.role != "decode" else there
        return "prefill" if here >= self._prefill_tokens and there <= 2 * here else "decode"

    def successor(self, record: Record, coming: int) -> Replica | None:
        """A replica that goes on with what one for prompts has begun, to the bit; None: there is none, or no
        slot beside those for as many others as are ``coming``."""
        wanted = Wanted(record.output.numerics, record.output.newest_version)
        found = [
            each
            for each in self.replicas
            if each.role != "prefill" and each.takes_work and wanted.is_of(each) and has_adapter(each, record)
        ]
        if sum(max(0, each.slots - each.load.requests) for each in found) <= coming:
            return None
        return min(found, key=lambda each: each.load.tokens, default=None)

    def home(self, pages: Sequence[int], target: Replica) -> Replica | None:
        """The replica that holds a prefix with these hashes, if it is not the ``target``."""
        found = [each for each in self.ready if pages and pages[-1] in each.held]
        return None if target in found else next(iter(found), None)

    def choose(self, record: Record, wanted: Wanted | None = None) -> Placement | None:
        """The replica that computes a record, rather one that is not given weights; None: none has room.
        ``wanted``: what it must have."""
        able = [each for each in self.ready if each.takes_work and has_adapter(each, record)]
        suited = [each for each in able if each.role in (record.lane, "both")] or able
        free = [each for each in suited if self._has_room(each, record)]
        if record.output.token_ids:
            preferred = wanted or Wanted(record.output.numerics, record.output.newest_version)
            same = [each for each in free if preferred.is_of(each)]
            if not same and not any(map(preferred.is_of, suited)):  # rather the same tokens than its role
                same = [each for each in able if preferred.is_of(each) and self._has_room(each, record)]
            free = same if same or wanted is not None else free
        free = [each for each in free if not each.updating] or free
        free = [each for each in free if each.name == record.near] or free
        if not free:
            return None
        known, pages, candidates = record.known, list[int](), list[Candidate]()
        if self.policy.looks_at_prefixes:
            key = record.key
            pages = page_hashes(key, hash(record.namespace))
            shares = self._shares(pages, known)
            for each in free:
                there, coming = _cached(each, key, record, pages)
                uncached = known - max(there, coming)
                share = min(shares[min((known - uncached) // PAGE, len(pages))], uncached)
                # What others there compute for it, too, is in the backlog: it is no load of theirs alone.
                share -= min(max(0, coming - there), each.load.backlog)
                share -= any(page in each.held for page in pages) if each.held else 0
                candidates.append(Candidate(each, uncached, share))
        else:
            candidates = [Candidate(each, known - record.stored, known - record.stored) for each in free]
        chosen = self.policy.choose(record, candidates)
        return Placement(chosen, next(each.uncached for each in candidates if each.replica is chosen), pages)

    def place(self, attempt: Attempt, placement: Placement) -> None:
        """Count an attempt on its replica."""
        record = attempt.record
        prompt, most = len(record.output.prompt_ids), record.request.params.max_tokens
        rest = attempt.replica.info.max_model_len - prompt
        attempt.uncached, attempt.pages = placement.uncached, placement.pages
        attempt.tokens = prompt + (rest if most is None else min(most, rest))
        attempt.replica.load.add(attempt)
        self._sharing.update(attempt.pages)

    def admitted(self, attempt: Attempt, cached_tokens: int) -> None:
        """Count what an attempt has to compute, now that its hits in the prefix cache are known."""
        if attempt.uncached:
            attempt.replica.load.admitted(attempt, max(1, attempt.record.known - cached_tokens))

    def ended(self, attempt: Attempt) -> None:
        """Count an attempt no longer."""
        replica, begun = attempt.replica, not attempt.uncached
        replica.load.remove(attempt)
        if begun and replica.guessed and self.policy.looks_at_prefixes:
            replica.remember(_pages(attempt.record, attempt.pages))
        take_away(self._sharing, attempt.pages)
        self._full.discard(attempt.replica)

    def _shares(self, pages: Sequence[int], known: int) -> list[float]:
        """By the number of leading pages that a replica has, what a request bears of computing the others:
        each token is divided by the open requests that have it, with this one."""
        shares = [float(known - len(pages) * PAGE)]
        for page in reversed(pages):
            shares.append(shares[-1] + PAGE / (1 + self._sharing[page]))
        return shares[::-1]

    def full(self, replica: Replica) -> bool:
        """Note that it refused a request: the next one waits until one of its own has ended. Whether it has
        any."""
        if replica.load.requests:
            self._full.add(replica)
        return replica.load.requests > 0

    @property
    def free_slots(self) -> int:
        """Of all replicas that take requests."""
        free = (each.slots - each.load.requests for each in self.ready if each not in self._full)
        return sum(max(0, each) for each in free)

    def lost(self, reason: str, causes: Sequence[BaseException | None] = ()) -> EngineFailed:
        """The error of a stream that goes on nowhere; without ``causes``, those of the replicas' losses."""
        named = [str(each) for each in causes]
        if not causes:
            causes = [each.cause for each in self.replicas if each.cause is not None]
            named = [f"{each.name}: {each.cause}" for each in self.replicas if each.cause is not None]
        error = EngineFailed(f"{reason}: {'; '.join(named)}")
        error.__cause__ = causes[-1] if causes else None
        return error

    def _has_room(self, replica: Replica, record: Record) -> bool:
        load = replica.load
        if not load.requests:
            return True
        if replica in self._full or load.requests >= replica.slots:
            return False
        if record.output.token_ids and load.resuming >= max(1, replica.step_tokens // 2):
            return False
        return load.backlog < _STEPS * replica.step_tokens


def makes_the_same(replica: Replica, record: Record) -> bool:
    """A replica goes on with an output to the bit, as far as that is known."""
    wanted = Wanted(record.output.numerics, record.output.newest_version)
    return wanted.is_of(replica) and replica.info.deterministic


def has_adapter(replica: Replica, record: Record, sent: bool = False) -> bool:
    """A replica has what computes a record: where some of its output is there, the same that computed it;
    ``sent``: the same in any case."""
    name = record.request.adapter
    return name is None or replica.has(
        name, record.output.adapter_fingerprint if sent or record.output.token_ids else ""
    )


def _cached(replica: Replica, key: bytes, record: Record, pages: Sequence[int]) -> tuple[int, int]:
    """The number of known tokens that it has, and has or is about to have for another request."""
    pooling = record.request.pooling
    if pooling is not None and pooling.whole:  # all of it is computed
        return 0, 0
    coming = 0
    for page in pages:
        if not replica.load.pages[page]:
            break
        coming += PAGE
    most = record.known - 1  # the last known token is always computed
    if record.request.params.prompt_logprobs is not None:
        most = min(most, record.request.first_scored)  # so is all that is scored
    return min(max(replica.cached(key, record, pages), record.stored), most), min(coming, most)


def _pages(record: Record, known: Sequence[int] = ()) -> list[int]:
    """Hashes of all prefixes of whole pages, of which the first are ``known``."""
    found = list(known)
    last = found[-1] if found else hash(record.namespace)
    first = len(found)
    return found + page_hashes(record.key[4 * PAGE * first :], last, _MOST_PAGES - first)


def page_hashes(key: bytes, last: int, most: int = _MOST_PAGES) -> list[int]:
    """Hashes of the prefixes of whole pages of token ids with this key, which follow what has the hash
    ``last``, or begin in the namespace that has it."""
    size, found = 4 * PAGE, list[int]()
    for start in range(0, min(len(key) // size, most) * size, size):
        last = hash((last, key[start : start + size]))
        found.append(last)
    return found
