"""The ways to serve a diffusion model that are compared: engines, and what each has on top of the last."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from aioinfer.config import EngineConfig
from aioinfer.diffusion.state import BlockState
from aioinfer.engine import Engine
from aioinfer.scheduling.blocks import BlockScheduler
from aioinfer.scheduling.request import Request
from aioinfer.scheduling.step import Step

__all__ = ["WAYS", "configs", "make_restless", "scheduler_of"]

#: settings of each way, on top of those of the one before; a chunk of 0 is a block
WAYS: dict[str, dict[str, Any]] = {
    "sync": {
        "diffusion_mode": "sync",
        "mixed": False,
        "step_priority": "prefill",
        "fused_commit": False,
        "overlap_steps": 0,
        "chunk_size": 0,
    },
    "sync+": {"chunk_size": 512},
    "fdfo": {"diffusion_mode": "fdfo", "chunk_size": 0},
    "reuse": {"max_rounds": 64},
    "mixed": {"mixed": True, "step_priority": "decode", "chunk_size": 512},
    "fused": {"fused_commit": True},
    "overlap": {"overlap_steps": 1, "max_rounds": 1},
}


class _Restless(BlockScheduler):
    """Nobody keeps slot and pages between the rounds of a block."""

    __slots__ = ()

    def resolve_blocks(
        self, step: Step, blocks: Mapping[int, BlockState], forwards: int = 1
    ) -> list[Request]:
        moved = super().resolve_blocks(step, blocks, forwards)
        for request in list(self.batch.requests):
            if request.mid_block:
                self._retract(request)
        return moved


def scheduler_of(engine: Engine) -> BlockScheduler:
    """The scheduler of a running engine."""
    scheduler = engine._started_core().scheduler
    assert isinstance(scheduler, BlockScheduler), "not a diffusion model"
    return scheduler


def make_restless(engine: Engine) -> None:
    """Between rounds, requests give back slot and pages, and what is known of their blocks travels through
    the host."""
    scheduler_of(engine).__class__ = _Restless


def configs(options: argparse.Namespace, model: str, block: int) -> dict[str, EngineConfig]:
    """Of the engines, way by way."""
    most = max(options.concurrency)
    config = EngineConfig(
        model=model,
        threads=options.threads,
        dtype=options.dtype,
        device=options.device,
        load_format="random" if options.shape else "auto",
        max_running_requests=most,
        # Several engines share the memory: enough for a thousand positions each, and no more.
        num_pages=most * -(-1024 // max(16, block)),
        max_step_tokens=max(2048, 4 * block * most),
    )
    found = {}
    for way, settings in WAYS.items():
        chunk = settings.get("chunk_size", config.chunk_size) or block
        config = replace(config, **{**settings, "chunk_size": chunk})
        found[way] = config
    return found
