"""Other weights for a dispatcher: its replicas get them, one after the other."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from aioinfer.errors import ConfigError, EngineClosed, EngineFailed
from aioinfer.loop.updating import UpdateMode, WeightSource, check_mode, check_version, frozen

if TYPE_CHECKING:
    from aioinfer.parallel.dispatching import Dispatching

__all__ = ["newest_version", "update"]

_log = logging.getLogger("aioinfer")


def newest_version(running: Dispatching) -> int:
    """Of the replica that takes requests and has the newest weights."""
    return max((each.weight_version for each in running.placing.ready), default=0)


async def update(running: Dispatching, source: WeightSource, mode: UpdateMode, version: int | None) -> int:
    """As :meth:`Dispatcher.update_weights`: updates happen in the order in which they are asked for. A
    replica that is lost, or closed, does not count, unless all are."""
    given = frozen(source)
    check_mode(mode)
    async with running.updating:
        running.check_serving()
        chosen = check_version(version, newest_version(running))
        replicas = running.placing.ready
        for replica in replicas:
            if replica.no_updates:
                raise ConfigError(f"weights: {replica.no_updates} (replica {replica.name})")
        done, lost = 0, EngineFailed("no replica takes requests")
        for replica in replicas:
            if replica not in running.placing.ready:
                continue  # it has left meanwhile
            try:
                await replica.update_weights(given, mode, chosen)
                done += 1
            except (EngineFailed, EngineClosed) as error:
                running.check_loop()
                lost = error if isinstance(error, EngineFailed) else EngineFailed(str(error))
                _log.error("the replica %s is lost while it is given weights: %s", replica.name, error)
            running.adapted()
        if not done:
            raise lost
        return chosen
