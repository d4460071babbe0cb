"""Engines on the toy device that are called, not awaited."""

from __future__ import annotations

from typing import Any

from aioinfer.config import EngineConfig
from aioinfer.llm import LLM
from aioinfer.speculation.drafter import Drafter
from tests.toys import ToyDevice, ToyTokenizer


def make_llm(
    *,
    device: ToyDevice | type[ToyDevice] = ToyDevice,
    drafter: Drafter | None = None,
    fault: Any = None,
    **settings: Any,
) -> LLM:
    """An LLM with these settings on this device, or on one of this class."""
    usual = {"model": "toy", "page_size": 4, "num_pages": 64, "max_running_requests": 4}
    config = EngineConfig(**{**usual, **settings})

    def make(config: EngineConfig) -> ToyDevice:
        if isinstance(device, ToyDevice):
            return device
        return device(
            num_pages=config.num_pages or 0,
            page_size=config.page_size,
            num_slots=config.num_slots,
            max_adapters=config.adapter_slots,
            fault=fault,
        )

    return LLM(config, device=make, tokenizer=lambda _: ToyTokenizer(), drafter=drafter)
