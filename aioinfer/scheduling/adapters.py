"""Adapters: which LoRA adapters are loaded, which requests use them, and which slots of the device they have.

A *version* is what one load made: its uid, its slot, its files. A name leads to one version at a time. What
replaces it, or takes the name away, retires it: no new request finds it, those that have it keep it, and its
slot comes back after the last step that could read it::

              reserve()              publish()                retire()
     free ─────────────► reserved ──────────────► loaded ────────────────► draining
      ▲                     │ give_back()                                     │ no request has it, and the
      │                     │                                                 │ fence has resolved
      └─────────────────────┴───────────── freed() ◄──── leaving ◄────────────┘ -> when_leaving(version)

There is one slot more than names, so that a name can be replaced when all are taken. Nothing here waits or
touches a device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from aioinfer.errors import ConfigError, InvalidRequest, shown
from aioinfer.outputs import AdapterInfo
from aioinfer.request import Output

__all__ = [
    "ADAPTER_NOT_FOUND",
    "LONGEST_NAME",
    "AdapterRegistry",
    "AdapterVersion",
    "adapter_not_loaded",
    "check_adapter_name",
]

#: characters of a name
LONGEST_NAME = 256
#: of the error of one that asks for an adapter that is not there
ADAPTER_NOT_FOUND = "adapter_not_found"


def check_adapter_name(name: Any, model: str, field: str = "name") -> None:
    """Raise InvalidRequest unless an adapter may have this name; ``model``: the model's own."""
    if type(name) is not str or not name.strip() or len(name) > LONGEST_NAME or not name.isprintable():
        raise InvalidRequest(
            field, f"must be 1 to {LONGEST_NAME} printable characters, not all blank, got {shown(name)}"
        )
    if name == model:
        raise InvalidRequest(field, f"{shown(name)} is the name of the model")


def adapter_not_loaded(
    name: Any, loaded: Iterable[str], field: str = "adapter", reason: str = ""
) -> InvalidRequest:
    """The error of one that asks for an adapter that is not there. ``reason``: why there can be none."""
    if reason:
        message = f"there are none here: {reason}"
    else:
        names = sorted(loaded)
        there = ", ".join(map(shown, names[:10])) + ", ..." * (len(names) > 10)
        message = f"{shown(name)} is not loaded; there are: {there or 'none'}"
    return InvalidRequest(field, message, code=ADAPTER_NOT_FOUND)


class AdapterVersion:
    """The result of one load of a name. Requests hold it from their acceptance to their end."""

    __slots__ = ("fence", "fingerprint", "name", "num_bytes", "path", "rank", "retired", "slot", "uid",
                 "users")  # fmt: skip

    def __init__(
        self, name: str, path: str, slot: int, uid: int, rank: int, num_bytes: int, fingerprint: str
    ) -> None:
        self.name = name
        self.path = path
        #: of the device, from 1 on
        self.slot = slot
        #: rises with every load; part of the namespace of its requests
        self.uid = uid
        self.rank = rank
        self.num_bytes = num_bytes
        #: what tells its files from others
        self.fingerprint = fingerprint
        #: outputs of the requests that have it and have not ended
        self.users: set[Output] = set()
        #: no new request finds it
        self.retired = False
        #: the newest launched step that could read it, as far as its requests have ended
        self.fence = 0

    @property
    def info(self) -> AdapterInfo:
        """At this moment."""
        return AdapterInfo(
            name=self.name,
            path=self.path,
            uid=self.uid,
            rank=self.rank,
            num_bytes=self.num_bytes,
            fingerprint=self.fingerprint,
            requests=len(self.users),
        )

    def __repr__(self) -> str:
        return f"<AdapterVersion {self.name!r} uid={self.uid} slot={self.slot} users={len(self.users)}>"


class AdapterRegistry:
    """The versions of one engine. ``most``: names that may be loaded; ``reason``: why there are none."""

    __slots__ = ("_draining", "_free", "_leaving", "_loading", "_reserved", "_resolved", "_uids", "loaded",
                 "most", "reason", "slots", "when_leaving")  # fmt: skip

    def __init__(self, slots: int, most: int, reason: str = "") -> None:
        self.slots = slots
        self.most = min(most, max(0, slots - 1))
        self.reason = reason
        #: by name
        self.loaded: dict[str, AdapterVersion] = {}
        #: called once for a version whose slot nothing reads any more; :meth:`freed` has to follow when the
        #: device has forgotten it
        self.when_leaving: Callable[[AdapterVersion], None] = lambda version: None
        self._free = list(range(slots, 0, -1))
        self._reserved = 0
        self._draining: dict[int, AdapterVersion] = {}
        self._leaving: dict[int, AdapterVersion] = {}
        #: names that are being loaded, and how many times
        self._loading: Counter[str] = Counter()
        self._uids = 0
        #: the newest step that has resolved
        self._resolved = 0

    # -- names ----------------------------------------------------------------------------------

    def find(self, name: str) -> AdapterVersion:
        """The version that a new request with this name gets. Raises InvalidRequest."""
        version = self.loaded.get(name)
        if version is None:
            raise self.not_loaded(name, "adapter")
        return version

    def not_loaded(self, name: str, field: str = "name") -> InvalidRequest:
        """The error of one that asks for an adapter of this name."""
        return adapter_not_loaded(name, self.loaded, field, "" if self.slots else self.reason)

    def begin(self, name: str) -> None:
        """A load of this name begins; :meth:`end` follows. Raises ConfigError if it can never be there."""
        if not self.slots:
            raise ConfigError(f"adapters: {self.reason}")
        names = self.loaded.keys() | self._loading.keys() | {name}
        if len(names) > self.most:
            raise ConfigError(
                f"max_adapters ({self.most}) adapters are loaded: unload one first, or raise max_adapters"
            )
        self._loading[name] += 1

    def end(self, name: str) -> None:
        """A load that began has ended, whatever came of it."""
        self._loading[name] -= 1
        if not self._loading[name]:
            del self._loading[name]

    # -- slots ----------------------------------------------------------------------------------

    def reserve(self) -> int | None:
        """A free slot, which is taken until it is published or given back; None: all are in use, and one
        comes back by itself."""
        if not self._free:
            return None
        self._reserved += 1
        return self._free.pop()

    def give_back(self, slot: int) -> None:
        """Nothing is in a slot that was reserved."""
        self._reserved -= 1
        self._free.append(slot)

    def publish(
        self, name: str, path: str, slot: int, *, rank: int, num_bytes: int, fingerprint: str
    ) -> AdapterVersion:
        """From now on requests with this name get what the slot holds; what had the name drains."""
        self._uids += 1
        self._reserved -= 1
        version = AdapterVersion(name, path, slot, self._uids, rank, num_bytes, fingerprint)
        if name in self.loaded:
            self.retire(name)
        self.loaded[name] = version
        return version

    def retire(self, name: str) -> AdapterVersion:
        """No new request finds it. Raises KeyError."""
        version = self.loaded.pop(name)
        version.retired = True
        self._draining[version.slot] = version
        self._leave_if_idle(version)
        return version

    def freed(self, version: AdapterVersion) -> None:
        """The device has forgotten a version that was leaving."""
        del self._leaving[version.slot]
        self._free.append(version.slot)

    @property
    def free(self) -> int:
        """Slots with nothing in them."""
        return len(self._free)

    @property
    def draining(self) -> int:
        """Versions that are not found any more and still have their slots."""
        return len(self._draining) + len(self._leaving)

    # -- requests -------------------------------------------------------------------------------

    def leave(self, version: AdapterVersion, output: Output, last_step: int) -> None:
        """Note that a request has ended whose newest launched row was in step ``last_step``. Idempotent."""
        if output not in version.users:
            return
        version.users.remove(output)
        version.fence = max(version.fence, last_step)
        if version.retired:
            self._leave_if_idle(version)

    def resolved(self, step_id: int) -> None:
        """Step ``step_id`` has resolved, and all before it."""
        self._resolved = step_id
        if self._draining:
            for version in list(self._draining.values()):
                self._leave_if_idle(version)

    def _leave_if_idle(self, version: AdapterVersion) -> None:
        if version.users or version.fence > self._resolved or version.slot not in self._draining:
            return
        del self._draining[version.slot]
        self._leaving[version.slot] = version
        self.when_leaving(version)

    # -- checks ---------------------------------------------------------------------------------

    def check(self) -> None:
        """Assert conservation of slots, in O(1)."""
        places = len(self._free) + len(self.loaded) + self.draining
        assert places + self._reserved == self.slots, f"{places} and {self._reserved} of {self.slots} slots"

    def audit(self) -> None:
        """Assert that no slot is in two places, and that versions and their requests know each other."""
        places = [*self._free, *(each.slot for each in self._versions())]
        assert len(places) == len({*places}), f"a slot is in two places: {places}"
        self.check()
        for version in self._versions():
            assert all(user.request.adapter == version.name for user in version.users), version
        for name, version in self.loaded.items():
            assert version.name == name
            assert not version.retired

    def _versions(self) -> list[AdapterVersion]:
        return [*self.loaded.values(), *self._draining.values(), *self._leaving.values()]
