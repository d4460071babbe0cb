"""The scheduler reads its settings from the engine's config, and has no defaults of its own."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil

from aioinfer import scheduling
from aioinfer.cache.pages import PageAllocator
from aioinfer.cache.slots import SlotPool
from aioinfer.config import EngineConfig
from aioinfer.scheduling.memory import Memory
from aioinfer.scheduling.scheduler import Scheduler


def test_no_class_of_the_scheduler_repeats_a_setting() -> None:
    settings = {item.name for item in dataclasses.fields(EngineConfig)} - {"seed"}  # requests have one, too
    for found in pkgutil.walk_packages(scheduling.__path__, "aioinfer.scheduling."):
        module = importlib.import_module(found.name)
        for name, kind in inspect.getmembers(module, inspect.isclass):
            if kind.__module__ == found.name and dataclasses.is_dataclass(kind):
                repeated = settings & {item.name for item in dataclasses.fields(kind)}
                assert not repeated, f"{name} has fields of EngineConfig: {repeated}"


def test_a_scheduler_has_the_policy_and_the_settings_of_its_config() -> None:
    memory = Memory(PageAllocator(8, 4), SlotPool(64))
    config = EngineConfig(policy="lof", max_step_tokens=128)
    scheduler = Scheduler(memory, config)
    assert scheduler.queues.waiting.name == "lof"
    assert scheduler.cap.tokens == 128
    assert scheduler.config is config
