"""Plan: which parts run, at which size, and what each of them may take."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

__all__ = ["PARTS", "Part", "Plan", "Size"]


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured. All lengths in tokens."""

    #: shapes whose heads the kernels get, and (rows, context) of the decodes
    heads: tuple[str, ...]
    decodes: tuple[tuple[int, int], ...]
    #: (rows, queries of a row, its context)
    prefills: tuple[tuple[int, int, int], ...]
    #: positions of the page table that a decode graph has
    widest: int
    #: rows of a decode that is compared with float32, and its context
    checked: tuple[int, int]
    copy_bytes: int
    matmul: int
    #: decode through the engine: batches, prompt and output
    batches: tuple[int, ...]
    prompt: int
    output: int
    #: of the offline workload
    requests: int
    lengths: tuple[int, int]
    largest_id: int
    #: its first requests for the peer, which may be slow, and their longest output
    peer_requests: int
    peer_output: int
    #: overlap: batch and output of each load, and the prompts
    overlap_loads: tuple[tuple[int, int], ...]
    overlap_prompt: int
    ways: tuple[tuple[int, str], ...]
    #: its first requests for the endpoint, and their longest output
    endpoint_requests: int
    endpoint_output: int
    #: requests that arrive one after the other, and their prompts
    arrivals: int = 48
    arrival_lengths: tuple[int, int] = (8, 700)


#: what tells most comes first: without time left, the rest is not run
_WAYS = ((1, "thread"), (0, "thread"), (2, "thread"), (1, "inline"), (0, "inline"), (2, "inline"))

FULL = Size(
    heads=("0.6b", "8b", "14b"),
    decodes=((256, 1024), (64, 1024), (8, 1024), (1, 1024), (256, 8192), (64, 8192), (8, 8192), (1, 8192)),
    prefills=((16, 1024, 1024), (1, 8192, 8192), (4, 512, 8192)),
    widest=40_960,
    checked=(8, 1024),
    copy_bytes=2 << 30,
    matmul=8192,
    batches=(1, 8, 64, 256),
    prompt=960,
    output=128,
    requests=256,
    lengths=(100, 1024),
    largest_id=10_000,
    peer_requests=64,
    peer_output=512,
    overlap_loads=((256, 96), (8, 256)),
    overlap_prompt=64,
    ways=_WAYS,
    endpoint_requests=256,
    endpoint_output=1024,
)
QUICK = replace(
    FULL,
    heads=("0.6b", "8b"),
    decodes=((256, 1024), (64, 1024), (1, 1024), (64, 8192)),
    prefills=((16, 1024, 1024), (1, 8192, 8192)),
    batches=(1, 64, 256),
    prompt=992,
    output=64,
    peer_requests=16,
    peer_output=128,
    overlap_loads=((256, 48), (8, 128)),
    ways=_WAYS[:4],
    endpoint_requests=96,
    endpoint_output=128,
)
REHEARSAL = Size(
    heads=("tiny",),
    decodes=((1, 32), (3, 48)),
    prefills=((2, 20, 20), (1, 8, 40)),
    widest=800,
    checked=(3, 40),
    copy_bytes=4 << 20,
    matmul=128,
    batches=(1, 4),
    prompt=24,
    output=16,
    requests=6,
    lengths=(5, 20),
    largest_id=500,
    peer_requests=4,
    peer_output=20,
    overlap_loads=((4, 8),),
    overlap_prompt=8,
    ways=((1, "thread"), (2, "thread"), (0, "inline")),
    endpoint_requests=6,
    endpoint_output=20,
    arrivals=6,
    arrival_lengths=(3, 40),
)


@dataclass(frozen=True, slots=True)
class Plan:
    """What the parts need to know of the command line."""

    size: Size
    device: str
    dtype: str
    #: the shape of all parts but those of a model, and in a rehearsal of these too
    shape: str
    #: settings of the engine, as flags give them
    settings: dict[str, str] = field(default_factory=dict)
    #: the bench itself is tried out, not the device
    rehearsal: bool = False


@dataclass(frozen=True, slots=True)
class Part:
    """One that can run alone. ``module`` has ``run(plan, report, *arguments)``."""

    module: str
    purpose: str
    #: seconds it may take, in full and quick
    full: float
    quick: float
    arguments: tuple[Any, ...] = ()


def _model(name: str, full: float, quick: float) -> Part:
    return Part("bench.gpu.models", f"Qwen3-{name} against the roofline", full, quick, (name,))


#: In the order in which they run. The bounds of those on 0.6B add up to less than six and three minutes.
PARTS: dict[str, Part] = {
    "kernels": Part("bench.gpu.kernels", "attention kernels against copy and matmul", 45, 25),
    "model": _model("0.6b", 45, 25),
    "model-8b": _model("8b", 75, 50),
    "model-14b": _model("14b", 100, 70),
    "offline": Part("bench.gpu.offline", "nano-vllm's offline workload", 55, 30),
    "peer": Part("bench.gpu.peer", "transformers' continuous batching on the same requests", 65, 25),
    "overlap": Part("bench.gpu.overlap", "overlapped steps and launch modes", 55, 25),
    "endpoint": Part("bench.gpu.endpoint", "the same load through HTTP from another process", 50, 20),
    "launching": Part("bench.gpu.launching", "what a step costs the launch thread, by its kind", 60, 60),
}
