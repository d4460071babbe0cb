"""Logits processors of random requests, and what is written under them in the plainest way."""

from __future__ import annotations

import asyncio
import contextvars
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Self

import numpy as np

from aioinfer.params import Grammar, SamplingParams
from aioinfer.scheduling.step import NewRequestData
from aioinfer.steering.processors import Ids, Logits
from aioinfer.text.grammar import Compiler
from aioinfer.text.guidance import GuidanceBackend
from tests.toys import ToyTokenizer
from tests.toys.device import _next_token
from tests.toys.pooling import beginning, mix

__all__ = ["CALLER", "Broken", "Steering", "Written", "is_broken", "written"]

#: of a request, where its processors must be called
CALLER: contextvars.ContextVar[int] = contextvars.ContextVar("caller", default=-1)

#: what processors do, and how often
_WHAT = {"nothing": 3, "edit": 6, "bend": 3, "force": 4, "write": 1, "fail": 3, "spoil": 2, "cancel": 2}
#: virtual seconds in which coroutines answer
_DELAYS = (0.0, 0.0, 0.001, 0.01, 0.1)
#: grammars with a choice at each token, with forced tokens, and with an end
_GRAMMARS = ("[a-j]*", "([a-h]vwxyzvwxyz)*", "[d-h]vwxyzvwxyz[a-k]{1,30}", "[a-zäöüß]{9,12}")


class Broken(RuntimeError):
    """What a processor raises."""


@dataclass(frozen=True, slots=True)
class Rule:
    """What a processor decides, by a number that stands for what it has seen, and perhaps by the logits."""

    what: str
    salt: int

    def decide(self, seen: int, logits: Logits) -> Sequence[int] | None:
        found, size = mix(seen, self.salt), len(logits)
        often, token = found % 12, found // 12 % size
        match self.what:
            case "edit" if often < 5:
                logits[token] = 2.0
            case "bend" if often < 8:
                logits[(int(logits.argmax()) + token) % size] = 2.0
            case "force" if often < 2:
                forced = [mix(found, at) % size for at in range(1 + token % 6)]
                return (forced, tuple(forced), np.asarray(forced))[token % 3]  # type: ignore[return-value]
            case "write" if often < 11:
                return [token]
            case "fail" if not often:
                raise Broken(f"at {seen}")
            case "cancel" if not often:
                raise asyncio.CancelledError
            case "spoil" if not often:
                logits[:] = -np.inf
        return None


def seen_of(ids: Sequence[int] | Ids) -> int:
    """A number for the end of some tokens, and for how many there are."""
    seen = len(ids)
    for token in ids[-3:]:
        seen = mix(seen, int(token))
    return seen


class Plain:
    """Decides by the tokens that it is given."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule

    def __call__(self, ids: Ids, logits: Logits) -> Any:
        return self.rule.decide(self.seen(ids), logits)

    def seen(self, ids: Ids) -> int:
        return seen_of(ids)


class Batched(Plain):
    """The same for all rows of a step."""

    def batch(self, ids: Sequence[Ids], logits: Sequence[Logits]) -> list[Any]:
        assert len(ids) == len({id(each) for each in logits}) > 0
        return [self(*each) for each in zip(ids, logits, strict=True)]


class Counting(Plain):
    """Decides by the tokens that it was told, all of which it must have been."""

    def __init__(self, rule: Rule, told: Sequence[int] = ()) -> None:
        super().__init__(rule)
        self._told = [*told]

    def accept(self, token: int) -> None:
        self._told.append(token)

    def copy(self) -> Self:
        return type(self)(self.rule, self._told)

    def seen(self, ids: Ids) -> int:
        count = len(self._told)
        assert ids[len(ids) - count :].tolist() == self._told, "it was told of other tokens"
        return seen_of(ids) ^ count


class Later(Plain):
    """Decides some time later, or never."""

    def __init__(self, rule: Rule, home: Steering, owner: int, delay: float | None) -> None:
        super().__init__(rule)
        self._rest = home, owner, delay
        self.home, self.owner, self.delay = self._rest

    async def __call__(self, ids: Ids, logits: Logits) -> Any:
        before = ids.copy(), logits.copy()
        assert CALLER.get() == self.owner, "it is called in another context"
        self.home.asking += 1
        self.home.counts["asked"] += 1
        try:
            if self.delay is None and mix(seen_of(ids), self.rule.salt) % 2:
                self.home.counts["never answered"] += 1
                await asyncio.Event().wait()
            await asyncio.sleep(self.home.dice.choice(_DELAYS) if self.delay is None else self.delay)
        except asyncio.CancelledError:
            self.home.counts["cancelled"] += 1
            raise
        finally:
            self.home.asking -= 1
        assert (ids == before[0]).all()
        assert (logits == before[1]).all()
        return super().__call__(ids, logits)


class CountingLater(Later, Counting):
    """Both."""

    def __init__(self, *rest: Any, told: Sequence[int] = ()) -> None:
        Later.__init__(self, *rest)
        self._told = [*told]

    def copy(self) -> Self:
        return type(self)(self.rule, *self._rest, told=self._told)


def is_broken(cause: BaseException | None) -> bool:
    """A processor was meant to fail like this."""
    return isinstance(cause, (Broken, asyncio.CancelledError)) or "no finite maximum" in str(cause)


@dataclass
class Steering:
    """The processors of one engine, and what came of them."""

    dice: random.Random
    counts: Counter[str] = field(default_factory=Counter)
    #: coroutines that run
    asking: int = 0

    def __post_init__(self) -> None:
        # What one raises ends all rows of its step.
        kinds = self.dice.sample(["edit", "bend", "force", "spoil"], 2)
        self._batched = [Batched(Rule(what, number)) for number, what in enumerate(kinds)]

    def _rule(self, *, asynchronous: bool) -> Rule:
        what = self.dice.choices([*_WHAT], [*_WHAT.values()])[0]
        if what == "cancel" and not asynchronous:
            what = "fail"
        return Rule(what, self.dice.randrange(1 << 20))

    def choose(self, params: SamplingParams, *, patient: bool) -> SamplingParams:
        """Parameters with processors, and perhaps a grammar; ``patient``: the reader waits for ever."""
        dice = self.dice
        if params.max_tokens == 0 or dice.random() < 0.2:
            return params
        if dice.random() < 0.2:
            grammar = Grammar("regex", dice.choice(_GRAMMARS))
            params = params.changed(grammar=grammar, ignore_eos=False, stop_token_ids=(), min_tokens=0)
        if dice.random() < 0.15:
            return params.changed(logits_processors=(dice.choice(self._batched),))
        kinds = (Plain, Counting, Later, CountingLater)
        chosen = dice.choices(kinds, [4, 3, 2, 2], k=dice.choice([1, 1, 1, 2, 3]))
        return params.changed(logits_processors=tuple(self._make(kind, patient) for kind in chosen))

    def _make(self, kind: type[Plain], patient: bool) -> Plain:
        asynchronous = issubclass(kind, Later)
        rule = self._rule(asynchronous=asynchronous)
        if not asynchronous:
            return kind(rule)
        delay = None if not patient and self.dice.random() < 0.7 else self.dice.choice(_DELAYS)
        return kind(rule, self, CALLER.get(), delay)  # type: ignore[call-arg]


@dataclass
class Written:
    """What any correct engine writes on a toy device."""

    ids: list[int]
    #: the tokens that were not sampled
    forced: set[int] = field(default_factory=set)
    #: what has ended it: "processor", "grammar"
    failed: str | None = None


def written(
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    vocab_size: int,
    limit: int,
    adapter: int = 0,
    weights: int = 0,
    begun: Sequence[int] = (),
    shown: Sequence[int] | None = None,
) -> Written:
    """What follows the output that has ``begun``, one token after the other. ``limit``: tokens of prompt and
    output at most. ``shown``: what processors see of the prompt, if not all of it."""
    assert params.seed is not None
    assert params.max_tokens is not None
    stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else {0})
    tenant = NewRequestData(params, params.seed, stop_ids, prompt, ())
    state = beginning(weights) ^ adapter
    for token in (*prompt, *begun):
        state = mix(state, token)
    found, mask = Written([*begun]), _Mask(params.structure, begun, vocab_size)
    limit = min(limit, len(prompt) + params.max_tokens)
    while len(prompt) + len(found.ids) < limit:
        if mask.failed:
            found.failed = "grammar"
            break
        logits = np.zeros(vocab_size, np.float32)
        logits[_next_token(state, tenant, len(found.ids), vocab_size)] = 1.0
        try:
            seen = prompt if shown is None else shown
            forced = _decided(params, [*seen, *found.ids], len(found.ids), logits)
        except (Broken, asyncio.CancelledError):
            found.failed = "processor"
            break
        for token in forced or [mask.first_from(int(logits.argmax()))]:
            if forced:
                found.forced.add(len(found.ids))
            found.ids.append(token)
            mask.accept(token)
            state = mix(state, token)
            if token in stop_ids or len(prompt) + len(found.ids) == limit:
                return found
    return found


def _decided(params: SamplingParams, ids: list[int], count: int, logits: Logits) -> list[int]:
    for each in params.logits_processors:
        assert isinstance(each, Plain)
        seen = seen_of(ids) ^ (count if isinstance(each, Counting) else 0)
        forced = each.rule.decide(seen, logits)
        if forced is not None:
            return [int(token) for token in forced]
    if not np.isfinite(logits.max()):
        raise Broken
    return []


@cache
def _compiler(vocab_size: int) -> Compiler:
    return Compiler(GuidanceBackend(ToyTokenizer(vocab_size).for_grammars(), vocab_size, [0], max_depth=64))


class _Mask:
    """What a grammar allows next; without one everything."""

    def __init__(self, grammar: Grammar | None, begun: Sequence[int], vocab_size: int) -> None:
        self._compiler, self._size = _compiler(vocab_size), vocab_size
        self._matcher = None if grammar is None else self._compiler.matcher(grammar)
        #: a token was not allowed
        self.failed = False
        for token in begun:
            self.accept(token)

    def accept(self, token: int) -> None:
        if self._matcher is not None and not self.failed:
            self.failed = not self._matcher.accept(token)

    def first_from(self, token: int) -> int:
        if self._matcher is None:
            return token
        mask = np.zeros(-(-self._size // 32), np.int32)
        self._compiler.backend.fill([self._matcher], [mask])
        assert mask.any()
        while not mask[token // 32] >> (token % 32) & 1:
            token = (token + 1) % self._size
        return token
