"""Peer: transformers' continuous batching and this engine with the same model, requests and device.

Both decode greedily, without end tokens, everybody from the start; the weights are the same, too, so the
share of equal tokens says whether they compute the same model. (With random weights in bf16 the likeliest
tokens are close, and a sequence that parts from the other stays apart.) A peer that takes too long is
stopped, and measured by what it had done.
"""

from __future__ import annotations

import dataclasses
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.gpu.engines import generate, run_async, started
from bench.gpu.offline import workload
from bench.gpu.plan import Plan
from bench.gpu.report import PartReport
from bench.gpu.shapes import SHAPES, write_model
from bench.gpu.workload import Workload

__all__ = ["Outcome", "run", "run_peer"]

#: positions of a block of the peer's cache, and tokens of one of its steps
_BLOCK = 256
_STEP_TOKENS = 4096
#: seconds kept for what comes after the peer
_RESERVE = 3.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the peer did."""

    seconds: float
    tokens: list[list[int]]
    #: how its attention is computed
    attention: str
    complete: bool


def run(plan: Plan, report: PartReport) -> None:
    """A row each, and the ratio."""
    load = workload(plan).first(plan.size.peer_requests, plan.size.peer_output)
    run_async(_engine(plan, report, load))


async def _engine(plan: Plan, report: PartReport, load: Workload) -> None:
    async with started(plan, plan.shape) as engine:
        seconds, ours = await generate(engine, load, 0.0)
        rate = sum(load.outputs) / seconds
        report.row(
            engine="aioinfer",
            requests=len(ours),
            tokens=sum(load.outputs),
            seconds=seconds,
            tokens_per_s=rate,
        )
    outcome = run_peer(plan, load, report.remaining - _RESERVE)
    done = sum(map(len, outcome.tokens))
    pairs = [
        (a, b) for left, right in zip(ours, outcome.tokens, strict=True)
        for a, b in zip(left, right, strict=False)
    ]  # fmt: skip
    report.row(
        engine=f"transformers, {outcome.attention}", requests=len(ours), tokens=done,
        seconds=outcome.seconds, tokens_per_s=done / outcome.seconds, ratio=rate / (done / outcome.seconds),
        equal_tokens=sum(a == b for a, b in pairs) / len(pairs),
        equal_firsts=sum(left[:1] == right[:1] for left, right in zip(ours, outcome.tokens, strict=True))
        / len(ours),
    )  # fmt: skip
    if not outcome.complete:
        report.note(f"transformers was stopped after {done} of {sum(load.outputs)} tokens")


def run_peer(plan: Plan, load: Workload, seconds: float) -> Outcome:
    """The load through transformers, for at most so many seconds, start-up included.

    Raises RuntimeError if something in transformers failed, or if there was no time for a token.
    """
    end = time.monotonic() + seconds
    model = _make_model(plan)
    from transformers import ContinuousBatchingConfig, GenerationConfig

    blocks = sum(
        -(-(length + output) // _BLOCK) + 1
        for length, output in zip(load.prompt_lengths, load.outputs, strict=True)
    )
    # What 5.17 calls a block's size is a page's later.
    known = {item.name for item in dataclasses.fields(ContinuousBatchingConfig)}
    size = {"page_size" if "page_size" in known else "block_size": _BLOCK}
    manager_context = model.continuous_batching_context_manager(
        generation_config=GenerationConfig(
            do_sample=False, eos_token_id=-1, max_new_tokens=max(load.outputs)
        ),
        continuous_batching_config=ContinuousBatchingConfig(
            num_blocks=blocks, max_batch_tokens=_STEP_TOKENS, allow_block_sharing=False, **size
        ),
        block=True,
        timeout=10,
    )
    with manager_context as manager:
        attention = model.config._attn_implementation
        warm = Workload(load.prompts[:2], [4] * len(load.prompts[:2]))
        _collect(manager, _submit(manager, warm), end)
        start = time.perf_counter()
        names = _submit(manager, load)
        results = _collect(manager, names, end)
        took = time.perf_counter() - start
        complete = len(results) == len(names)
        if not complete:
            # What the others have so far comes as their failure.
            manager.stop(block=True, timeout=10, hard_stop=True)
            while (result := manager.get_result(timeout=0.2)) is not None:
                results[result.request_id] = result
    tokens = [list(results[name].generated_tokens) if name in results else [] for name in names]
    if not any(tokens):
        raise RuntimeError("no time was left for transformers")
    if complete and [len(ids) for ids in tokens] != load.outputs:
        raise RuntimeError(f"transformers made {sum(map(len, tokens))} tokens of {sum(load.outputs)}")
    return Outcome(took, tokens, attention, complete)


def _make_model(plan: Plan) -> Any:
    """The plan's shape in transformers, with the weights that the engine gives it."""
    import torch
    from transformers import AutoConfig

    from aioinfer.execution.cuda_device import pick_device
    from aioinfer.model.transformers_model import random_model
    from aioinfer.model.weights import RandomWeights

    device, dtype = pick_device(plan.device), getattr(torch, plan.dtype)
    with tempfile.TemporaryDirectory() as name:
        config = AutoConfig.from_pretrained(write_model(SHAPES[plan.shape], Path(name)))
    model = random_model(config, dtype, device, RandomWeights(dtype=dtype, device=device))
    model.set_attn_implementation("sdpa")
    return model


def _submit(manager: Any, load: Workload) -> list[str]:
    """The names of the requests."""
    return [
        manager.add_request(prompt, max_new_tokens=output)
        for prompt, output in zip(load.prompts, load.outputs, strict=True)
    ]


def _collect(manager: Any, names: list[str], end: float) -> dict[str, Any]:
    """Results by name, without those that were not there by ``end``. Raises RuntimeError if the manager or
    a request failed."""
    results: dict[str, Any] = {}
    while len(results) < len(names) and time.monotonic() < end:
        result = manager.get_result(timeout=0.2)
        if result is None:
            if not manager.is_running():
                raise RuntimeError("transformers' generation thread has ended")
        elif result.error is not None:
            raise RuntimeError(f"transformers: {result.error}")
        elif result.is_finished():
            results[result.request_id] = result
    return results
