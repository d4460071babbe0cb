"""Adapters of a dispatcher: its replicas have them, all of them the same."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from aioinfer.errors import AioInferError, EngineClosed, EngineFailed, InvalidRequest
from aioinfer.loop.adapters import checked_path
from aioinfer.loop.resumption import check_adapter
from aioinfer.outputs import AdapterInfo
from aioinfer.parallel.streams import record_of
from aioinfer.scheduling.adapters import adapter_not_loaded, check_adapter_name

if TYPE_CHECKING:
    from aioinfer.parallel.dispatching import Dispatching
    from aioinfer.parallel.replica import Replica
    from aioinfer.resuming.record import StreamCheckpoint

__all__ = ["adapters", "catch_up", "check", "gone", "load", "unload"]

_log = logging.getLogger("aioinfer")


async def load(running: Dispatching, name: str, path: str | os.PathLike[str]) -> AdapterInfo:
    """On every replica that takes requests. Where one refuses, those that did not have the name lose it
    again, and what that one raised is raised. One that is lost meanwhile does not count."""
    check_adapter_name(name, running.info.model)
    path = checked_path(path)
    ready = running.placing.ready
    had = {replica for replica in ready if replica.has(name)}
    loads = [replica.load_adapter(name, path) for replica in ready]
    ends = await asyncio.gather(*loads, return_exceptions=True)
    loaded = [(each, end) for each, end in zip(ready, ends, strict=True) if isinstance(end, AdapterInfo)]
    errors = [end for end in ends if isinstance(end, BaseException)]
    refused = [error for error in errors if not isinstance(error, (EngineFailed, EngineClosed))]
    if refused or not loaded:
        for replica, _ in loaded:
            if replica not in had:
                with contextlib.suppress(AioInferError):
                    await replica.unload_adapter(name)
        raise (refused or errors or [EngineFailed("no replica takes requests")])[0]
    running.adapters[name] = path
    running.joined()
    return loaded[0][1]


async def unload(running: Dispatching, name: str) -> None:
    """Everywhere. Raises InvalidRequest: no replica has it."""
    known = running.adapters.pop(name, None)
    having = [replica for replica in running.placing.ready if replica.has(name)]
    if not having and known is None:
        raise adapter_not_loaded(name, (each.name for each in adapters(running)), "name")
    ends = await asyncio.gather(*(each.unload_adapter(name) for each in having), return_exceptions=True)
    for end in ends:
        if isinstance(end, BaseException) and not isinstance(end, (EngineFailed, EngineClosed)):
            raise end


def adapters(running: Dispatching) -> list[AdapterInfo]:
    """Those of all replicas, by name, with the requests of all."""
    found: dict[str, AdapterInfo] = {}
    for replica in running.placing.ready:
        for each in replica.adapters():
            found.setdefault(each.name, each)
    counts = Counter(record_of(request).options.adapter for request in running.open_requests)
    return [replace(each, requests=counts[name]) for name, each in found.items()]


def check(running: Dispatching, name: str | None, checkpoint: StreamCheckpoint | None) -> None:
    """Raise InvalidRequest unless a replica has the adapter of a request, or will have it when it has
    started."""
    if name is None:
        return
    found = {each.name: each for replica in running.placing.ready for each in replica.adapters()}
    if checkpoint is None:
        if name not in found and name not in running.adapters:
            raise adapter_not_loaded(name, found, reason=running.info.adapter_reason)
    elif not any(each.has(name, checkpoint.adapter_fingerprint) for each in running.placing.ready):
        check_adapter(checkpoint, found)


def gone(running: Dispatching, name: str) -> InvalidRequest:
    """The error of a request whose adapter was unloaded while it waited."""
    return adapter_not_loaded(name, (each.name for each in adapters(running)))


async def catch_up(running: Dispatching, replica: Replica) -> None:
    """Load what the others have into a replica that joins. What it cannot have, it gets no requests for."""
    for name, path in list(running.adapters.items()):
        if any((each.name, each.path) == (name, path) for each in replica.adapters()):
            continue
        try:
            await replica.load_adapter(name, path)
        except (EngineFailed, EngineClosed):
            return  # which is noticed otherwise
        except AioInferError as error:
            _log.error("the replica %s joins without the adapter %r: %s", replica.name, name, error)
