"""Branches of random lifetimes: streams are forked, rewound, injected into and left at random moments."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from aioinfer import errors
from aioinfer.outputs import Result
from aioinfer.params import SamplingParams
from aioinfer.stream import Stream
from tests.engine.reading import Reading, outcome_of, weights_of
from tests.toys import ToyTokenizer

if TYPE_CHECKING:
    from tests.engine.worlds import World

__all__ = ["Branching", "Tree"]

_WHAT = {"fork": 5, "rewind": 2, "inject": 3, "leave": 2}
#: branches of one request at most
_MOST = 24


@dataclass
class Branching:
    """The dice of one engine's branches, and what came of them."""

    dice: random.Random
    counts: Counter[str] = field(default_factory=Counter)

    def tree(self, world: World, number: int, prompt: list[int], adapter: int) -> Tree | None:
        return Tree(self, world, number, prompt, adapter) if self.dice.random() < 0.7 else None


@dataclass(eq=False)
class Bough:
    """One stream of a tree, and its reader."""

    reading: Reading
    manner: str
    task: asyncio.Future[None] = field(default_factory=asyncio.Future)
    #: the stream was left, on purpose
    gone: bool = False
    #: it was rewound or injected into: what was delivered is not all of its text
    rewritten: bool = False

    @property
    def stream(self) -> Stream:
        return self.reading.stream


class Tree:
    """A request and everything that branches from it."""

    def __init__(
        self, branching: Branching, world: World, number: int, prompt: list[int], adapter: int
    ) -> None:
        self._dice, self._counts = branching.dice, branching.counts
        self._world, self._number, self._prompt, self._adapter = world, number, prompt, adapter
        self._timeouts: Mapping[str, Any] = {}
        self._boughs: list[Bough] = []
        self._outcomes: list[tuple[Any, ...]] = []

    async def grow(
        self, stream: Stream, params: SamplingParams, timeouts: Mapping[str, Any]
    ) -> list[tuple[Any, ...]]:
        """Until all branches have ended; returns how they did."""
        self._timeouts = timeouts
        self._add(Reading(stream, params))
        del stream
        for _ in range(self._dice.choice([1, 3, 6, 12])):
            await asyncio.sleep(self._dice.expovariate(1 / 0.02))
            boughs = [each for each in self._boughs if not each.gone]
            if not boughs:
                break
            self._act(self._dice.choice(boughs))
        for bough in self._boughs:
            await asyncio.wait([bough.task])
            if not bough.task.cancelled():
                bough.task.result()
            if not bough.gone:
                await bough.stream.aclose()
        self._boughs.clear()
        return self._outcomes

    def _add(self, reading: Reading) -> None:
        manner = self._dice.choice(["read", "read", "read", "slow", "await", "unread"])
        bough = Bough(reading, manner)
        self._boughs.append(bough)
        self._read(bough)

    def _read(self, bough: Bough) -> None:
        reads = self._reader if bough.manner != "unread" else self._idle
        bough.task = asyncio.ensure_future(reads(bough))

    # -- readers --------------------------------------------------------------------------------

    async def _idle(self, bough: Bough) -> None:
        await asyncio.sleep(self._dice.uniform(0, 0.2))
        bough.gone = True
        await bough.stream.aclose()
        self._end(bough, "never read")

    async def _reader(self, bough: Bough) -> None:
        reading, reason = bough.reading, None
        try:
            if bough.manner == "await":
                result = await bough.stream
                reading.ids, reading.weights = [*result.token_ids], weights_of(bough.stream.cell.output)
                self._finished(bough, result, result.finish_reason)
                return
            async for chunk in bough.stream:
                reading.ids += chunk.token_ids
                reading.weights += [chunk.weight_version] * len(chunk.token_ids)
                reading.texts.append(chunk.text)
                reason = chunk.finish_reason
                if bough.manner == "slow":
                    await asyncio.sleep(self._dice.uniform(0, 0.05))
            if reason is not None:
                self._finished(bough, bough.stream.result(), reason)
            else:
                assert bough.gone, "a stream ends without a reason"
        except Exception as error:
            if bough.gone and isinstance(error, errors.Cancelled):
                return
            self._failed(bough, error)

    def _finished(self, bough: Bough, result: Result, reason: str | None) -> None:
        reading = bough.reading
        assert reading.ids == result.token_ids, "not every token was delivered once"
        if bough.manner != "await":
            text = "".join(reading.texts)
            assert bough.rewritten or result.text.endswith(text)
            assert reading.begun or bough.rewritten or result.text == text
        self._claim(bough, result.text, reason, result)
        self._end(bough, "finished")

    def _failed(self, bough: Bough, error: Exception) -> None:
        if isinstance(error, errors.InvalidRequest):
            assert self._refusable(bough.reading, error), error
            self._end(bough, "refused")
            return
        outcome = outcome_of(self._world, bough.reading, error, self._timeouts)
        if outcome[0] == "failed":
            bough.reading.ids = outcome[1]
            self._claim(bough, "", None, None).failed = outcome[5]
        self._end(bough, str(outcome[0]))

    def _refusable(self, reading: Reading, error: errors.InvalidRequest) -> bool:
        """What it begins with cannot be an output under its parameters."""
        from tests.engine.processors import written
        from tests.engine.worlds import VOCAB, ended

        params, begun = reading.params, reading.begun
        if error.field in ("checkpoint", "adapter"):
            return self._world.adapters is not None
        most = params.max_tokens or 0
        if len(begun) >= most or {*begun} & {0, *params.stop_token_ids}:
            return True
        if ended(begun, params)[2] == "stop":
            return True
        limit = len(self._prompt) + len(begun) + 1
        found = written(self._prompt, params, vocab_size=VOCAB, limit=limit, begun=begun)
        return found.failed == "grammar" or limit > self._world.engine.info.max_model_len

    def _end(self, bough: Bough, outcome: str) -> None:
        self._counts[outcome] += 1
        self._outcomes.append((bough.manner, outcome, *bough.reading.ids))

    def _claim(self, bough: Bough, text: str, reason: str | None, result: Result | None) -> Any:
        from tests.engine.worlds import Claim

        reading = bough.reading
        claim = Claim(
            *(self._number, f"branch: {bough.manner}", self._prompt, reading.params, [*reading.ids], text),
            *(reason, result, reading.versions, self._adapter),
        )
        claim.begun, claim.kept = [*reading.begun], reading.kept
        self._world.claims.append(claim)
        return claim

    # -- what happens to them -------------------------------------------------------------------

    def _act(self, bough: Bough) -> None:
        what = self._dice.choices([*_WHAT], [*_WHAT.values()])[0]
        output, closed = bough.stream.cell.output, bough.stream.cell.closed
        if what == "fork" and len(self._boughs) >= _MOST:
            what = "leave"
        try:
            match what:
                case "fork":
                    self._fork(bough)
                case "leave":
                    self._leave(bough)
                case _:
                    self._rewrite(bough, what)
        except RuntimeError:
            assert not output.accepted
            what = "too early"
        except errors.InvalidRequest as error:
            fields = ("max_tokens", "then", "inject", "at", "to", "stop_token_ids", "checkpoint", "logprobs")
            assert error.field in (*fields, "adapter") or error.code == "context_length_exceeded", error
            what = f"refused: {error.field}"
        except errors.Rejected:
            what = "rejected"
        except errors.Cancelled:
            assert closed
        except (errors.EngineFailed, errors.EngineClosed):
            assert self._world.device.lost
        self._counts[what] += 1

    def _fork(self, bough: Bough) -> None:
        dice, stream, params = self._dice, bough.stream, None
        output, parent = stream.cell.output, bough.reading
        at = dice.choice([None, dice.randint(0, len(output.token_times))])
        kept = self._kept(stream) if at is None else at
        then, ids = self._then(dice.choice([0, 0, 1, 3]))
        n = dice.choice([1, 1, 2, 4, 8])
        if dice.random() < 0.4:
            params = self._varied(parent.params)
        asked = {name: value for name, value in self._options().items() if dice.random() < 0.3}
        children = stream.fork(n, at=at, then=then, params=params, **asked)
        assert len(children) == n
        self._counts["branches"] += n
        for number, child in enumerate(children):
            own = child.cell.output.request.params
            seed = (parent.params.seed or 0) + 1 if params is None else params.seed or 0
            assert own.seed == seed + number
            reading = Reading(child, own, begun=[*output.token_ids[:kept], *ids], kept=kept)
            reading.ids, reading.weights = reading.begun[:kept], [0] * kept
            self._add(reading)

    def _kept(self, stream: Stream) -> int:
        """How many tokens are kept where nobody says how many."""
        output = stream.cell.output
        known = len(output.token_times) - (output.ended and output.finish_reason == "stop")
        return min(known, stream.cell.taken_ids) if stream._iterated else known

    def _then(self, count: int) -> tuple[str | Sequence[int], list[int]]:
        ids = self._dice.choices(range(64), k=count)
        if not count or self._dice.random() < 0.7:
            return ids, ids
        text = "".join(chr(97 + token % 26) for token in ids)
        return text, ToyTokenizer(64).encode_part(text)

    def _options(self) -> dict[str, Any]:
        dice = self._dice
        return {"priority": dice.randrange(3), "cache_salt": "other", "max_lag": dice.choice([1, 3, 20])}

    def _varied(self, params: SamplingParams) -> SamplingParams:
        """Other parameters for a fork."""
        dice, steering = self._dice, self._world.steering
        assert params.max_tokens is not None
        changes: dict[str, Any] = {
            "seed": dice.randrange(1 << 40),
            "temperature": dice.choice([0.0, 1.0]),
            "stop": dice.choice([(), ("a",), params.stop]),
            "max_tokens": params.max_tokens + dice.choice([0, 1, 10]),
        }
        changed = params.changed(**{name: value for name, value in changes.items() if dice.random() < 0.5})
        if steering is not None and dice.random() < 0.5:
            changed = steering.choose(changed.changed(logits_processors=()), patient=True)
        return changed

    def _rewrite(self, bough: Bough, what: str) -> None:
        dice, stream, reading = self._dice, bough.stream, bough.reading
        output = stream.cell.output
        known, weights = [*output.token_ids], weights_of(output)
        at = dice.choice([None, dice.randint(0, len(output.token_times))])
        if what == "inject":
            kept = self._kept(stream) if at is None else at
            then, ids = self._then(dice.choice([1, 3]))
            stream.inject(then, at=at)
        else:
            kept, ids = at or 0, []
            stream.rewind(kept)
        # What had been written is right as far as it goes.
        shown = Reading(stream, reading.params, known[: len(output.token_times)], [], weights)
        before = Bough(shown, "before", bough.task)
        before.reading.begun, before.reading.kept = reading.begun, reading.kept
        self._claim(before, "", None, None)
        bough.rewritten = True
        reading.begun, reading.kept = [*known[:kept], *ids], kept
        del reading.ids[kept:], reading.weights[kept:]
        if bough.task.done():
            self._read(bough)

    def _leave(self, bough: Bough) -> None:
        bough.gone = True
        how = self._dice.choice(["cancel", "close", "drop"])
        if how == "close" or bough.manner in ("slow", "unread"):  # perhaps nobody waits for it now
            bough.stream.close()
        if how != "close":
            bough.task.cancel()
        if how == "drop":
            self._boughs.remove(bough)  # nobody has it any more
        self._end(bough, "left")
