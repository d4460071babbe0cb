"""What the reader of a stream has of it in a random lifetime, and how that may end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from aioinfer import errors
from aioinfer.execution.device import DeviceLost, StepOutOfMemory
from aioinfer.params import Grammar, SamplingParams
from aioinfer.request import Output
from aioinfer.stream import Stream
from aioinfer.text.grammar import Compiler
from tests.engine.processors import is_broken

if TYPE_CHECKING:
    from tests.engine.worlds import World

__all__ = ["Injected", "Reading", "outcome_of", "replay", "weights_of"]


class Injected(RuntimeError):
    """What an injected fault raises."""


@dataclass
class Reading:
    """What somebody has of a stream, which may be cut and go on as another one."""

    stream: Stream
    params: SamplingParams
    ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    #: by token, the version of the weights that computed it
    weights: list[int] = field(default_factory=list)
    #: tokens that were given to the stream, of which others have written the first ``kept``
    begun: list[int] = field(default_factory=list)
    kept: int = 0

    @property
    def versions(self) -> list[tuple[int, int]]:
        """How many tokens behind those that were given weights of which version have computed."""
        found: list[tuple[int, int]] = []
        for version in self.weights[len(self.begun) :]:
            assert not found or found[-1][1] <= version, "a version came after a later one"
            if found and found[-1][1] == version:
                found[-1] = found[-1][0] + 1, version
            else:
                found.append((1, version))
        return found

    def so_far(self, outcome: str, reason: str | None = None) -> tuple[Any, ...]:
        return outcome, self.ids, "".join(self.texts), reason, self.versions

    def failed(self, error: errors.RequestError) -> tuple[Any, ...]:
        """A processor or a grammar has ended it."""
        output, what = self.stream.cell.output, "grammar"
        if isinstance(error, errors.ProcessorFailed):
            what = "processor"
            assert is_broken(error.__cause__), repr(error.__cause__)
        assert output.token_ids[: len(self.ids)] == self.ids
        # A stream that was cut does not know the weights of those before.
        self.weights += weights_of(output)[len(self.ids) :]
        return "failed", [*output.token_ids], "", None, self.versions, what


def outcome_of(
    world: World,
    reading: Reading,
    error: Exception,
    timeouts: Mapping[str, Any],
    *,
    restored: bool = False,
) -> tuple[Any, ...]:
    """What an error says of a lifetime, if it may be raised at all."""
    match error:
        case errors.ProcessorFailed() | errors.ConstraintFailed():
            return reading.failed(error)
        case errors.InvalidRequest() if error.field in reading.params.constraints:
            return ("refused",)
        case errors.InvalidRequest():
            assert restored
            assert error.field == "checkpoint"
            assert reading.params.masked, "nothing else refuses what there is"
            return ("refused",)
        case errors.TimedOut():
            assert timeouts[f"{error.phase}_timeout"] is not None
            return "timed out", error.phase
        case errors.Rejected():
            return ("rejected later",)
        case errors.StepFailed():
            assert isinstance(error.__cause__, Injected)
            return ("step failed",)
        case errors.OutOfMemory():
            assert isinstance(error.__cause__, StepOutOfMemory)
            return ("out of memory",)
        case errors.EngineFailed():
            assert isinstance(error.__cause__, (DeviceLost, errors.EngineFailed))
            return ("engine failed",)
        case errors.Cancelled():
            assert "weights" in str(error)
            assert world.renewal is not None
            return ("replaced",)
    raise error


def weights_of(output: Output) -> list[int]:
    """By token, the version of the weights that computed it."""
    found: list[int] = []
    for end, _, version in [*output.switches, (len(output.token_ids), 0, output.weight_version)]:
        found += [version] * (end - len(found))
    return found[: len(output.token_ids)]


def replay(compiler: Compiler, grammar: Grammar, ids: list[int], *, ended: bool) -> None:
    """A fresh matcher accepts every token, and nothing but the end comes after the end."""
    matcher = compiler.matcher(grammar)
    for at, token in enumerate(ids):
        assert not (matcher.stopped and at < len(ids) - 1)
        assert matcher.accept(token), (at, matcher.error)
    assert matcher.error is None
    assert matcher.stopped or not ended
