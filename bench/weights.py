"""``python -m bench weights``: replacing all weights of a running engine beside streams.

Weights are given as tensors, in windows in turn with windows as long in which nothing happens: seconds of the
call, and the longest gap between two tokens of a stream. The streams wait while weights are written.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path

from aioinfer.config import EngineConfig
from aioinfer.engine import Engine
from bench.gaps import streaming
from bench.gpu.shapes import SHAPES, write_model
from bench.peers.checkpoint import tensor_shapes
from bench.report import Report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", default="0.6b", choices=list(SHAPES))
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--updates", type=int, default=3)
    parser.add_argument("--threads", type=int)


def run(options: argparse.Namespace, report: Report) -> None:
    """A row without and one with updates."""
    asyncio.run(_run(options, report))


async def _run(options: argparse.Namespace, report: Report) -> None:
    import torch

    from aioinfer.model.weights import RandomWeights

    shape = SHAPES[options.shape]
    random = RandomWeights(dtype=torch.bfloat16, device=torch.device("cpu"), seed=1)
    tensors = {name: random.take(name, size) for name, size in tensor_shapes(shape)}
    report.fact("gb", sum(tensor.nbytes for tensor in tensors.values()) / 1e9)
    with tempfile.TemporaryDirectory() as folder:
        config = EngineConfig(
            model=str(write_model(shape, Path(folder))),
            load_format="random",
            dtype="bfloat16",
            device="cpu",
            threads=options.threads,
            max_model_len=1024,
            max_running_requests=options.streams,
            speculation="off",
        )
        seconds: list[float] = []
        worst: dict[str, list[float]] = {"quiet": [], "updating": []}
        async with Engine(config) as engine, streaming(engine, options.streams) as gaps:
            for _ in range(options.updates):
                for way, found in worst.items():
                    gaps.reset()
                    start = time.perf_counter()
                    if way == "updating":
                        await engine.update_weights(tensors)
                        seconds.append(time.perf_counter() - start)
                    await gaps.settled()
                    found.append(gaps.worst)
    for way, found in worst.items():
        report.row(
            way=way,
            streams=options.streams,
            call_s=statistics.median(seconds) if way == "updating" else None,
            gap_s=statistics.median(found),
            worst_gap_s=max(found),
        )
