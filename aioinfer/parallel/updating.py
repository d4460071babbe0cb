"""Other weights for a dispatcher: its replicas get them, one after the other."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aioinfer.errors import ConfigError, EngineClosed, EngineError, EngineFailed
from aioinfer.loop.updating import UpdateMode, WeightSource, check_mode, check_version, frozen

if TYPE_CHECKING:
    from aioinfer.parallel.dispatching import Dispatching
    from aioinfer.parallel.replica import Replica

__all__ = ["newest_version", "update"]

_log = logging.getLogger("aioinfer")


def newest_version(running: Dispatching) -> int:
    """Of the replica that takes requests and has the newest weights."""
    return max((each.weight_version for each in running.placing.ready), default=0)


async def update(running: Dispatching, source: WeightSource, mode: UpdateMode, version: int | None) -> int:
    """As :meth:`Dispatcher.update_weights`: updates happen in the order in which they are asked for. A
    replica that is lost, or closed, does not count, unless all are. What the first one refuses, none gets;
    what a later one refuses, the others get, and an error says which replica has which version."""
    given = frozen(source)
    check_mode(mode)
    async with running.updating:
        running.check_serving()
        replicas, newest = running.placing.ready, newest_version(running)
        for replica in replicas:
            if replica.no_updates:
                raise ConfigError(f"weights: {replica.no_updates} (replica {replica.name})")
        behind = [each for each in replicas if each.weight_version != newest]
        again = bool(behind) and type(version) is int and version == newest
        chosen = newest if again else check_version(version, newest)
        targets = behind if again else replicas
        if not isinstance(given, Path):
            _check_alike(targets, running.updated_from if again else newest, replicas)
        try:
            refused = await _update_each(running, targets, given, mode, chosen, begun=again)
        finally:
            if not again and newest_version(running) == chosen:
                running.updated_from = None if behind else newest
        if refused:
            raise EngineError(
                f"weights: not every replica has version {chosen} ({_versions(running.placing.ready)}), and "
                f"asked for once more, those behind get it: {'; '.join(refused)}"
            )
        return chosen


def _check_alike(targets: Sequence[Replica], before: int | None, replicas: Sequence[Replica]) -> None:
    """Tensors may be some of all: raise ConfigError unless what they leave out is of one version, which is
    that ``before`` the update."""
    if any(each.weight_version != before for each in targets):
        raise ConfigError(
            f"weights: the replicas have those of different versions ({_versions(replicas)}), "
            "and only a checkpoint, which has all tensors, makes them alike"
        )


async def _update_each(
    running: Dispatching,
    replicas: Sequence[Replica],
    given: Any,
    mode: UpdateMode,
    chosen: int,
    *,
    begun: bool,
) -> list[str]:
    """One after the other; returns what some have refused. Unless one has this version, as if it has
    ``begun``: raises what the first one did, and EngineFailed if all are lost."""
    refused, lost = list[str](), EngineFailed("no replica takes requests")
    for replica in replicas:
        if replica not in running.placing.ready:
            continue  # it has left meanwhile
        replica.updating = True
        try:
            await replica.update_weights(given, mode, chosen)
            begun = True
        except (EngineFailed, EngineClosed) as error:
            running.check_loop()
            lost = error if isinstance(error, EngineFailed) else EngineFailed(str(error))
            _log.error("the replica %s is lost while it is given weights: %s", replica.name, error)
        except Exception as error:
            if not begun:
                raise
            refused.append(f"{replica.name}: {error}")
            _log.error("the replica %s keeps the weights that it has: %s", replica.name, error)
        finally:
            replica.updating = False
        running.adapted()
    if not begun:
        raise lost
    return refused


def _versions(replicas: Sequence[Replica]) -> str:
    return ", ".join(f"{each.name}: {each.weight_version}" for each in replicas)
