"""Recording: the steps of an engine that runs, with what they had and when they happened."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from aioinfer.observe.observers import Observer
from aioinfer.scheduling.costs import Sizes

if TYPE_CHECKING:
    from aioinfer.engine import Engine
    from aioinfer.scheduling.step import Step

__all__ = ["RecordedStep", "Recording", "members"]

#: steps after which the lanes of the timeline are read, which keep some thousand
_BATCH = 1000


class RecordedStep(NamedTuple):
    """One step. Times are in seconds of ``time.perf_counter``."""

    id: int
    sizes: Sizes
    #: numbers of the requests that generate in it; number and length of each prefill chunk
    generating: tuple[int, ...]
    prefilling: tuple[tuple[int, int], ...]
    #: when it was planned and given to the device, begun and ended there, read, and delivered
    planned: float
    launched: float
    begun: float
    ended: float
    read: float
    delivered: float


def members(step: Step) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
    """The composition of a step."""
    generating = tuple(sorted(each.key for each in step.generating.sequences))
    return generating, tuple((row.sequence.key, row.length) for row in step.prefilling)


class Recording(Observer):
    """Observes a started engine until it is closed, or until :meth:`stop`."""

    def __init__(self, engine: Engine) -> None:
        self._timeline = engine.timeline
        self._steps: dict[int, tuple[Sizes, tuple[int, ...], tuple[tuple[int, int], ...]]] = {}
        self._found: list[RecordedStep] = []
        self._stopped = False
        engine.observe(self)

    def stepped(self, step: Step, lag: float) -> None:
        if self._stopped or step.encoding is not None:
            return
        self._steps[step.id] = (Sizes.of(step), *members(step))
        if len(self._steps) >= _BATCH:
            self._collect()

    def stop(self) -> list[RecordedStep]:
        """The steps so far that were delivered, in their order."""
        self._stopped = True
        self._collect()
        return self._found

    def _collect(self) -> None:
        loop, device = (_by_step(lane.events) for lane in (self._timeline.loop, self._timeline.device))
        for number in sorted(self._steps):
            events, computed = loop.get(number, {}), device.get(number)
            read = events.get("resolve") or events.get("verify")
            if computed is None or read is None or not events.keys() >= {"plan", "pack", "deliver"}:
                continue
            found = RecordedStep(
                number,
                *self._steps.pop(number),
                planned=events["plan"][0],
                launched=events["pack"][1],
                begun=min(begin for begin, _ in computed.values()),
                ended=max(end for _, end in computed.values()),
                read=read[0],
                delivered=events["deliver"][1],
            )
            self._found.append(found)
        if len(self._steps) > 2 * _BATCH:
            self._steps.clear()  # their events are gone


def _by_step(events: Iterable[tuple[str, int, float, float]]) -> dict[int, dict[str, tuple[float, float]]]:
    found: dict[int, dict[str, tuple[float, float]]] = {}
    for what, step, start, end in list(events):
        found.setdefault(step, {})[what] = (start, end)
    return found
