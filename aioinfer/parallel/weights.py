"""Weights of a dispatcher: its replicas get other ones, one after the other."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aioinfer.errors import ConfigError, EngineClosed, EngineError, EngineFailed
from aioinfer.loop.service import Service
from aioinfer.loop.updating import UpdateMode, WeightSource, check_mode, check_version, frozen
from aioinfer.parallel.placing import Placing

if TYPE_CHECKING:
    from aioinfer.parallel.replica import Replica

__all__ = ["ReplicaWeights"]

_log = logging.getLogger("aioinfer")


class ReplicaWeights:
    """Replaces the weights of all replicas of a started dispatcher."""

    def __init__(self, streams: Service[Any], placing: Placing, changed: Callable[[], None]) -> None:
        """``changed``: called when a replica has other weights."""
        self._streams = streams
        self._placing = placing
        self._changed = changed
        #: one update at a time
        self._turn = asyncio.Lock()
        #: the version that all replicas had before the newest one; None: not the same
        self._before: int | None = None

    @property
    def newest(self) -> int:
        """Newest version among the replicas that take requests."""
        return max((each.weight_version for each in self._placing.ready), default=0)

    async def update(self, source: WeightSource, mode: UpdateMode, version: int | None) -> int:
        """As :meth:`Dispatcher.update_weights`."""
        given = frozen(source)
        check_mode(mode)
        async with self._turn:
            self._streams.check_serving()
            replicas, newest = self._placing.ready, self.newest
            for replica in replicas:
                if replica.no_updates:
                    raise ConfigError(f"weights: {replica.no_updates} (replica {replica.name})")
            behind = [each for each in replicas if each.weight_version != newest]
            again = bool(behind) and type(version) is int and version == newest
            chosen = newest if again else check_version(version, newest)
            targets = behind if again else replicas
            if not isinstance(given, Path):
                _check_alike(targets, self._before if again else newest, replicas)
            try:
                refused = await self._update_each(targets, given, mode, chosen, begun=again)
            finally:
                if not again and self.newest == chosen:
                    self._before = None if behind else newest
            if refused:
                versions = _versions(self._placing.ready)
                raise EngineError(
                    f"weights: not every replica has version {chosen} ({versions}), and asked for once more, "
                    f"those behind get it: {'; '.join(refused)}"
                )
            return chosen

    async def _update_each(
        self, replicas: Sequence[Replica], given: Any, mode: UpdateMode, chosen: int, *, begun: bool
    ) -> list[str]:
        """Update one after the other; returns what some have refused. Unless one has this version, as if it
        has ``begun``: raises what the first one did, and EngineFailed if all are lost."""
        refused, lost = list[str](), EngineFailed("no replica takes requests")
        for replica in replicas:
            if replica not in self._placing.ready:
                continue  # it has left meanwhile
            replica.updating = True
            try:
                await replica.update_weights(given, mode, chosen)
                begun = True
            except (EngineFailed, EngineClosed) as error:
                self._streams.check_loop()
                lost = error if isinstance(error, EngineFailed) else EngineFailed(str(error))
                _log.error("the replica %s is lost while it is given weights: %s", replica.name, error)
            except Exception as error:
                if not begun:
                    raise
                refused.append(f"{replica.name}: {error}")
                _log.error("the replica %s keeps the weights that it has: %s", replica.name, error)
            finally:
                replica.updating = False
            self._changed()
        if not begun:
            raise lost
        return refused


def _check_alike(targets: Sequence[Replica], before: int | None, replicas: Sequence[Replica]) -> None:
    """Tensors may be some of all: raise ConfigError unless what they leave out is of one version, which is
    that ``before`` the update."""
    if any(each.weight_version != before for each in targets):
        raise ConfigError(
            f"weights: the replicas have those of different versions ({_versions(replicas)}), "
            "and only a checkpoint, which has all tensors, makes them alike"
        )


def _versions(replicas: Sequence[Replica]) -> str:
    return ", ".join(f"{each.name}: {each.weight_version}" for each in replicas)
