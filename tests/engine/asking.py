"""Short ways to ask a running engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aioinfer.engine import Engine
from aioinfer.params import SamplingParams


async def greedy_ids(engine: Engine, prompt: Sequence[int], **params: Any) -> list[int]:
    """Token ids of a greedy answer that is as long as it may be, but for what ``params`` change."""
    wanted = SamplingParams(**{"temperature": 0.0, "ignore_eos": True, **params})
    return (await engine.generate(prompt, wanted)).token_ids
