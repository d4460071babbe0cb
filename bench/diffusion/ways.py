"""The ways to serve a diffusion model that are compared: engines, and what each has on top of the last."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from aioinfer.config import EngineConfig
from aioinfer.engine import Engine
from aioinfer.scheduling.block_batch import BlockBatch
from aioinfer.scheduling.block_cursor import BlockCursor
from aioinfer.scheduling.request import Request
from aioinfer.scheduling.scheduler import Scheduler
from aioinfer.scheduling.step import Outcome, Step

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


class _Restless(Scheduler):
    """No request keeps slot and pages between the rounds of a block."""

    __slots__ = ()

    def resolve(self, step: Step, outcome: Outcome) -> list[Request]:
        updated = super().resolve(step, outcome)
        for request in list(self.queues.batch.requests):
            assert isinstance(request.cursor, BlockCursor), "not a diffusion model"
            if request.cursor.mid_block:
                self.queues.retract(request)
        return updated


def scheduler_of(engine: Engine) -> Scheduler:
    """The scheduler of a running engine with a diffusion model."""
    scheduler = engine._core.scheduler
    assert isinstance(scheduler.queues.batch, BlockBatch), "not a diffusion model"
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
        chunk = settings.get("chunk_size", config.chunk_tokens) or block
        config = replace(config, **{**settings, "chunk_size": chunk})
        found[way] = config
    return found
