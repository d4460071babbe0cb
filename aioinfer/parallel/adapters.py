"""Adapters of a dispatcher: all replicas have the same ones."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from aioinfer.errors import AioInferError, ConfigError, EngineClosed, EngineFailed, InvalidRequest
from aioinfer.loop.adapters import checked_path
from aioinfer.loop.resumption import check_adapter
from aioinfer.loop.service import Service
from aioinfer.loop.waiting import NamedLocks, apart, finish
from aioinfer.outputs import AdapterInfo
from aioinfer.parallel.placing import Placing
from aioinfer.scheduling.adapters import adapter_not_loaded, check_adapter_name

if TYPE_CHECKING:
    from aioinfer.parallel.replica import Replica
    from aioinfer.resuming.record import StreamCheckpoint

__all__ = ["ReplicaAdapters"]

_log = logging.getLogger("aioinfer")

#: how often one replica is asked to load an adapter, as it may be started again meanwhile
_TRIES = 3


class ReplicaAdapters:
    """Loads and unloads adapters on all replicas of a started dispatcher."""

    def __init__(self, streams: Service[Any], placing: Placing, changed: Callable[[], None]) -> None:
        """``changed``: called when a name stands for something else."""
        self._streams = streams
        self._placing = placing
        self._changed = changed
        #: by name, for replicas that join
        self._loaded: dict[str, AdapterInfo] = {}
        #: one load or unload of a name at a time, in the order of the calls
        self._turns = NamedLocks()

    # -- loading --------------------------------------------------------------------------------

    async def load(self, name: str, path: str | os.PathLike[str]) -> AdapterInfo:
        """Load an adapter on every replica that takes requests. Where one refuses, and when this is
        cancelled, each has what it had before, and what was raised is raised. One that is lost meanwhile does
        not count."""
        check_adapter_name(name, self._streams.info.model)
        return await apart(self._load_everywhere(name, checked_path(path)), "aioinfer-adapter")

    async def _load_everywhere(self, name: str, path: str) -> AdapterInfo:
        async with self._turns[name]:
            self._streams.check_serving()
            had = {replica: _found(replica, name) for replica in self._placing.ready}
            try:
                info = await self._load(name, path, had)
            except BaseException:
                await finish(asyncio.gather(*(_give_back(each, name, info) for each, info in had.items())))
                raise
            self._loaded[name] = info
            self._changed()
            return info

    async def _load(self, name: str, path: str, had: dict[Replica, AdapterInfo | None]) -> AdapterInfo:
        done: dict[Replica, AdapterInfo] = {}
        tries: Counter[Replica] = Counter()
        lost: list[BaseException] = []
        ready = self._placing
        # Those, too, that have started meanwhile, perhaps again.
        while pending := [each for each in ready.ready if tries[each] < _TRIES and _lacks(each, done)]:
            tries.update(pending)
            for each in pending:
                had.setdefault(each, _found(each, name))
            loads = [each.load_adapter(name, path) for each in pending]
            ends = await asyncio.gather(*loads, return_exceptions=True)
            for replica, end in zip(pending, ends, strict=True):
                if isinstance(end, AdapterInfo):
                    done[replica] = end
                elif isinstance(end, (EngineFailed, EngineClosed)):
                    lost.append(end)
                else:
                    raise end
        found = {each: done[each] for each in ready.ready if each in done}
        if len({info.fingerprint for info in found.values()}) > 1:
            names = ", ".join(f"{each.name}: {info.fingerprint[:12]}" for each, info in found.items())
            raise ConfigError(f"adapter {name!r}: its files differ between the replicas ({names})")
        for info in found.values():
            return info
        raise (lost or [EngineFailed("no replica takes requests")])[0]

    async def unload(self, name: str) -> None:
        """Unload an adapter everywhere, also if this is cancelled. Raises InvalidRequest: no replica has
        it."""
        async with self._turns[name]:
            self._streams.check_serving()
            known = self._loaded.pop(name, None)
            having = [replica for replica in self._placing.ready if replica.has(name)]
            if not having and known is None:
                raise self.missing(name, "name")
            await finish(_unload(name, having))

    # -- asking ---------------------------------------------------------------------------------

    def all(self) -> list[AdapterInfo]:
        """Adapters of all replicas, with the requests of all, and of replicas that are starting."""
        found: dict[str, AdapterInfo] = {}
        for replica in self._placing.ready:
            for each in replica.adapters():
                found.setdefault(each.name, each)
        if any(each.coming for each in self._placing.replicas):
            found = {**self._loaded, **found}
        counts = Counter(cell.output.request.adapter for cell in self._streams.open)
        return [replace(each, requests=counts[name]) for name, each in found.items()]

    def check(self, name: str | None, checkpoint: StreamCheckpoint | None) -> None:
        """Raise InvalidRequest unless a replica has the adapter of a request, or will have it when it has
        started."""
        if name is None:
            return
        ready = self._placing.ready
        found = {each.name: each for replica in ready for each in replica.adapters()}
        if checkpoint is None:
            if name not in found and name not in self._loaded:
                raise adapter_not_loaded(name, found, reason=self._streams.info.adapter_reason)
        elif not any(each.has(name, checkpoint.adapter_fingerprint) for each in ready):
            check_adapter(checkpoint, {each.name: each.fingerprint for each in found.values()})

    def missing(self, name: str, field: str = "adapter") -> InvalidRequest:
        """The error of a request whose adapter was unloaded while it waited."""
        return adapter_not_loaded(name, (each.name for each in self.all()), field)

    # -- replicas that join ---------------------------------------------------------------------

    async def reconcile(self) -> None:
        """Before its replicas start: each gets what the others have. Where a name stands for other files in
        some, it is that of the first one which has it."""
        for replica in self._placing.replicas:
            for each in replica.adapters():
                self._loaded.setdefault(each.name, each)
        for replica in self._placing.replicas:
            await self.catch_up(replica)

    async def catch_up(self, replica: Replica) -> None:
        """Give a replica that joins what the others have, and no more than that, also of what is loaded and
        unloaded meanwhile: when this returns, nothing has changed since. What it cannot have, it gets no
        requests for."""
        tried: dict[str, AdapterInfo | None] = {}
        while (change := self._next_change(replica, tried)) is not None:
            name, info = change
            tried[name] = info
            try:
                if info is None:
                    await replica.unload_adapter(name)
                else:
                    await replica.load_adapter(name, info.path)
            except (EngineFailed, EngineClosed):
                return  # which is noticed otherwise
            except AioInferError as error:
                how = "with" if info is None else "without"
                _log.error("the replica %s joins %s the adapter %r: %s", replica.name, how, name, error)
                if info is not None and replica.has(name):  # from other files
                    with contextlib.suppress(AioInferError):
                        await replica.unload_adapter(name)

    def _next_change(
        self, replica: Replica, tried: dict[str, AdapterInfo | None]
    ) -> tuple[str, AdapterInfo | None] | None:
        """A name, and what it should stand for in a replica, other than what was tried last."""
        for name, info in self._loaded.items():
            if not replica.has(name, info.fingerprint) and tried.get(name) is not info:
                return name, info
        for each in replica.adapters():
            if each.name not in self._loaded and tried.get(each.name, each) is not None:
                return each.name, None
        return None


def _lacks(replica: Replica, done: dict[Replica, AdapterInfo]) -> bool:
    info = done.get(replica)
    return info is None or not replica.has(info.name, info.fingerprint)


async def _give_back(replica: Replica, name: str, info: AdapterInfo | None) -> None:
    """The name stands for what it stood for, or for nothing."""
    present = _found(replica, name)
    if present is None or _alike(present, info):
        return
    with contextlib.suppress(EngineFailed, EngineClosed):
        if info is not None:
            try:
                if _alike(await replica.load_adapter(name, info.path), info):
                    return
                why: object = "its files were changed"
            except (EngineFailed, EngineClosed):
                raise
            except AioInferError as error:
                why = error
            _log.error("the replica %s loses the adapter %r: %s", replica.name, name, why)
        with contextlib.suppress(InvalidRequest):
            await replica.unload_adapter(name)


async def _unload(name: str, having: Sequence[Replica]) -> None:
    ends = await asyncio.gather(*(each.unload_adapter(name) for each in having), return_exceptions=True)
    for end in ends:
        if isinstance(end, BaseException) and not isinstance(end, (EngineFailed, EngineClosed)):
            raise end


def _found(replica: Replica, name: str) -> AdapterInfo | None:
    return next((each for each in replica.adapters() if each.name == name), None)


def _alike(one: AdapterInfo | None, other: AdapterInfo | None) -> bool:
    """From the same files."""
    if one is None or other is None:
        return one is other
    return (one.name, one.path, one.fingerprint) == (other.name, other.path, other.fingerprint)
