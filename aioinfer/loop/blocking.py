"""Blocking: what the synchronous LLM is made of besides a core: flights that failed, adapters, a bar."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from aioinfer.errors import Rejected
from aioinfer.execution.device import Device, Flight, StepResult
from aioinfer.inputs import plain
from aioinfer.loop.adapters import checked_path, of_config, read_adapter
from aioinfer.outputs import AdapterInfo
from aioinfer.scheduling.adapters import AdapterRegistry, AdapterVersion, check_adapter_name
from aioinfer.scheduling.step import Step

__all__ = ["BlockingLoads", "Failed", "launched", "progress_bar"]


class BlockingLoads:
    """Loads and unloads adapters on the calling thread, which is the launch thread, too."""

    def __init__(self, registry: AdapterRegistry, device: Device, model: str) -> None:
        self._registry = registry
        self._device = device
        self._model = model
        registry.when_leaving = self._remove

    def load(self, name: str, path: str | os.PathLike[str]) -> AdapterInfo:
        """As :meth:`aioinfer.LLM.load_adapter`."""
        registry, device = self._registry, self._device
        name, where = plain(name), checked_path(path)
        check_adapter_name(name, self._model)
        registry.begin(name)
        try:
            prepared = read_adapter(device, where)
            slot = registry.reserve()
            if slot is None:
                raise Rejected("adapters that were replaced have requests still, which go on with step()")
            try:
                device.install_adapter(slot, prepared)
            except BaseException:
                registry.give_back(slot)
                raise
            return registry.publish(
                *(name, where, slot),
                rank=prepared.rank,
                num_bytes=prepared.num_bytes,
                fingerprint=prepared.fingerprint,
            ).info
        finally:
            registry.end(name)

    def load_all(self, paths: Mapping[str, str]) -> None:
        """Those of the config, by name, at the start. Raises ConfigError."""
        for name, path in paths.items():
            with of_config(name):
                self.load(name, path)

    def unload(self, name: str) -> None:
        """As :meth:`aioinfer.LLM.unload_adapter`."""
        name = plain(name)
        check_adapter_name(name, "")
        if name not in self._registry.loaded:
            raise self._registry.not_loaded(name)
        self._registry.retire(name)

    def _remove(self, version: AdapterVersion) -> None:
        self._device.remove_adapter(version.slot)
        self._registry.freed(version)


def launched(device: Device, step: Step) -> Flight:
    try:
        return device.launch(device.prepare(step))
    except Exception as error:
        return Failed(error)


class Failed:
    """The flight of a step whose launch raised; ``wait`` raises the error."""

    __slots__ = ("_error",)

    def __init__(self, error: Exception) -> None:
        self._error = error

    def wait(self) -> StepResult:
        raise self._error


def progress_bar(total: int, shown: bool) -> Any:
    from tqdm import tqdm

    return tqdm(total=total, unit="request", disable=not shown)
