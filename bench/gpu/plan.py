"""Plan: parts of the bench, their sizes and their time limits."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["FULL", "PARTS", "REHEARSAL", "Plan", "Size"]


@dataclass(frozen=True, slots=True)
class Size:
    """Sizes of what is measured. All lengths in tokens."""

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
    #: overlap: (batch, output) of each load, and the length of its prompts
    overlap_loads: tuple[tuple[int, int], ...]
    overlap_prompt: int
    #: (overlapped steps, launch mode)
    ways: tuple[tuple[int, str], ...]


FULL = Size(
    copy_bytes=2 << 30,
    matmul=8192,
    batches=(1, 8, 64, 256),
    prompt=960,
    output=128,
    requests=256,
    lengths=(100, 1024),
    largest_id=10_000,
    overlap_loads=((256, 96), (8, 256)),
    overlap_prompt=64,
    ways=((1, "thread"), (0, "thread"), (2, "thread"), (1, "inline")),
)
REHEARSAL = Size(
    copy_bytes=4 << 20,
    matmul=128,
    batches=(1, 4),
    prompt=24,
    output=16,
    requests=6,
    lengths=(5, 20),
    largest_id=500,
    overlap_loads=((4, 8),),
    overlap_prompt=8,
    ways=((1, "thread"), (0, "inline")),
)


@dataclass(frozen=True, slots=True)
class Plan:
    """The command line, as the parts need it."""

    size: Size
    device: str
    dtype: str
    shape: str
    #: settings of the engine, as flags give them
    settings: dict[str, str] = field(default_factory=dict)


#: by name: purpose, and seconds that it may take, its start included
PARTS = {
    "model": ("decode by batch against the roofline", 90.0),
    "offline": ("nano-vllm's offline workload", 110.0),
    "overlap": ("overlapped steps and launch modes", 120.0),
    "endpoint": ("the same load through HTTP from another process", 110.0),
}
