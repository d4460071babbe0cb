"""``python -m bench adapters``: cost of LoRA adapters, beside the same model without them.

Random weights of a shape, and random adapters of all its linear layers. Decodes of a batch and prompts are
timed in turns: by an engine without adapters (``off``), and by one with eight of them loaded, where no
request has one (``base``), all have the same (``one``), or each has another (``distinct``). ``ratio`` is the
median time over that of ``off``.

``loading``: the longest gap between two tokens of streams in windows in which an adapter is loaded, and in
windows as long in which none is, in turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from aioinfer.config import EngineConfig
from aioinfer.engine import Engine
from aioinfer.outputs import Result
from aioinfer.params import SamplingParams
from bench.gaps import streaming
from bench.gpu.roofline import Shape
from bench.gpu.shapes import SHAPES, write_model
from bench.report import Report

#: adapters that are loaded
_MANY = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", default="0.6b", choices=list(SHAPES))
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--steps", type=int, default=60, help="timed steps of each way")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of timed prompts")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--loads", type=int, default=24, help="windows in which an adapter is loaded")
    parser.add_argument("--threads", type=int)


def run(options: argparse.Namespace, report: Report) -> None:
    """A row per load and way."""
    asyncio.run(_run(options, report))


async def _run(options: argparse.Namespace, report: Report) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder, shape = Path(name), SHAPES[options.shape]
        model = write_model(shape, folder / "model")
        paths = [write_adapter(shape, folder / f"adapter-{at}", options.rank, seed=at) for at in range(_MANY)]
        report.fact("adapter_mib", sum(file.stat().st_size for file in paths[0].iterdir()) / 2**20)
        async with AsyncExitStack() as stack:
            without = await stack.enter_async_context(Engine(_config(model, options, 0)))
            having = await stack.enter_async_context(Engine(_config(model, options, _MANY)))
            for number, path in enumerate(paths):
                await having.load_adapter(str(number), path)
            for batch in options.batches:
                ways: dict[str, tuple[Engine, list[str | None]]] = {
                    "off": (without, [None] * batch),
                    "base": (having, [None] * batch),
                    "one": (having, ["0"] * batch),
                }
                if batch > 1:
                    ways["distinct"] = (having, [str(row % _MANY) for row in range(batch)])
                await _compare(f"decode of {batch}", ways, 32, options.steps, options.rounds, report)
            ways = {"off": (without, [None]), "base": (having, [None]), "one": (having, ["0"])}
            await _compare(f"prefill of {options.prompt}", ways, options.prompt, 0, options.rounds, report)
            if options.loads:
                await _loading(having, paths, options, report)


def _config(model: Path, options: argparse.Namespace, adapters: int) -> EngineConfig:
    return EngineConfig(
        model=str(model),
        load_format="random",
        dtype="bfloat16",
        device="cpu",
        threads=options.threads,
        prefix_cache=False,
        speculation="off",
        max_running_requests=max(options.batches),
        max_model_len=1024,
        chunk_size=max(options.prompt, 64),
        max_adapters=adapters,
    )


async def _compare(
    what: str,
    ways: dict[str, tuple[Engine, list[str | None]]],
    prompt: int,
    steps: int,
    rounds: int,
    report: Report,
) -> None:
    """Report milliseconds of a step of decodes (of the whole prompt if ``steps`` is 0), ways in turns."""
    times: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(rounds + 1):
        for way in list(ways) if number % 2 else list(ways)[::-1]:
            engine, adapters = ways[way]
            found = await asyncio.gather(
                *[_ask(engine, row, number, prompt, steps, name) for row, name in enumerate(adapters)]
            )
            metrics = [result.metrics for result in found if result.metrics is not None]
            if number == 0:  # warms up
                continue
            if steps:
                begin = max(each.token_times[0] for each in metrics)
                end = min(each.token_times[-1] for each in metrics)
                times[way].append((end - begin) / steps)
            else:
                times[way].append(metrics[0].token_times[0] - metrics[0].arrival)
    base = statistics.median(times["off"])
    for way, each in times.items():
        median = statistics.median(each)
        report.row(what=what, way=way, ms=1e3 * median, least=1e3 * min(each), ratio=median / base)


async def _ask(engine: Engine, row: int, number: int, prompt: int, steps: int, adapter: str | None) -> Result:
    ids = [(7 * at + 3 * row + number) % 400 + 1 for at in range(prompt)]
    params = SamplingParams(temperature=0, max_tokens=steps + 1, ignore_eos=True)
    return await engine.generate(ids, params, adapter=adapter)


async def _loading(
    engine: Engine, paths: Sequence[Path], options: argparse.Namespace, report: Report
) -> None:
    """Report gaps of streams while adapters are loaded, and while none is, in turns."""
    seconds: list[float] = []
    worst: dict[str, list[float]] = {"quiet": [], "loading": []}
    async with streaming(engine, max(options.batches)) as gaps:
        for number in range(options.loads):
            for way in sorted(worst, reverse=number % 2 == 1):
                gaps.reset()
                start = time.perf_counter()
                if way == "quiet":
                    await asyncio.sleep(statistics.median(seconds or [0.2]))
                else:
                    await engine.load_adapter(str(number % 2), paths[number % _MANY])
                    seconds.append(time.perf_counter() - start)
                await gaps.settled()
                worst[way].append(gaps.worst)
    for way, found in worst.items():
        report.row(
            what="loading",
            way=way,
            streams=gaps.streams,
            load_ms=1e3 * statistics.median(seconds),
            gap_ms=1e3 * statistics.median(found),
            worst_gap_ms=1e3 * max(found),
        )


def write_adapter(shape: Shape, folder: Path, rank: int, *, seed: int) -> Path:
    """A random adapter of all linear layers of a shape without experts, in bfloat16, as PEFT writes it."""
    import torch
    from safetensors.torch import save_file

    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    hidden, middle = shape.hidden, shape.intermediate
    modules = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (middle, hidden),
        "mlp.up_proj": (middle, hidden),
        "mlp.down_proj": (hidden, middle),
    }
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(shape.layers):
        for name, (outputs, inputs) in modules.items():
            at = f"base_model.model.model.layers.{layer}.{name}"
            a = torch.randn(rank, inputs, generator=generator) * inputs**-0.5
            b = torch.randn(outputs, rank, generator=generator) * 0.05
            tensors[f"{at}.lora_A.weight"] = a.to(torch.bfloat16)
            tensors[f"{at}.lora_B.weight"] = b.to(torch.bfloat16)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": sorted({name.rpartition(".")[2] for name in modules}),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
