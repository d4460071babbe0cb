"""Measuring: the metrics of one engine, over its starts and in any number of registries."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from aioinfer.errors import ConfigError, shown
from aioinfer.observe.metrics.recorder import Recorder, Snapshot
from aioinfer.observe.observers import Observer, Observers

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from aioinfer.observe.metrics.collector import Labels, Reading
    from aioinfer.observe.stats import EngineStats

__all__ = ["Measuring"]

#: characters of a label
_MAX_LABEL = 256


class Measuring(Observer):
    """The metrics of an engine, by a :class:`Recorder` while it runs. Registered with a registry of the
    application, they are there until the engine is closed."""

    def __init__(self) -> None:
        self.recorder: Recorder | None = None
        #: of the engine, while it is started; they do not change
        self.facts: Mapping[str, str] = {}
        self._registries: list[CollectorRegistry] = []

    def begin(
        self,
        observers: Observers,
        loop: asyncio.AbstractEventLoop,
        max_model_len: int,
        facts: Mapping[str, str],
        stats: Callable[[], tuple[EngineStats, int]],
    ) -> None:
        """The engine has started, or is running and to be measured from now on."""
        self.recorder = Recorder(loop, max_model_len, stats)
        self.facts = facts
        observers.add(self.recorder)
        observers.add(self)

    def closed(self) -> None:
        self.recorder = None
        for registry in list(self._registries):
            self.unregister(registry)

    def snapshot(self) -> Snapshot | None:
        """Every value at this moment; None while the engine is not started."""
        return None if self.recorder is None else self.recorder.snapshot()

    def reading(self, labels: Labels) -> Reading | None:
        """The same as a registry shows it."""
        from aioinfer.observe.metrics.collector import Reading

        snapshot = self.snapshot()
        return None if snapshot is None else Reading(labels, snapshot, self.facts)

    def register(self, registry: CollectorRegistry, labels: Labels, *, vllm: bool) -> None:
        """See :meth:`aioinfer.Engine.register`."""
        from aioinfer.observe.metrics.collector import attach

        for name, value in labels._asdict().items():
            if type(value) is not str or not 0 < len(value) <= _MAX_LABEL:
                raise ConfigError(
                    f"{name} must be a string of 1 to {_MAX_LABEL} characters, got {shown(value)}"
                )
        attach(registry, self, labels, vllm=vllm)
        self._registries.append(registry)

    def unregister(self, registry: CollectorRegistry) -> None:
        """See :meth:`aioinfer.Engine.unregister`."""
        from aioinfer.observe.metrics.collector import detach

        self._registries = [each for each in self._registries if each is not registry]
        if not detach(registry, self):
            raise ConfigError("the engine is not in this registry")
