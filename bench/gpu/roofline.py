"""The roofline: how fast a step of a model can be at a device's copy bandwidth and matmul rate.

A decode step reads all weights once and the keys and values of every context, and writes and reads logits in
float32; it multiplies each token with all matrices. It does so in phases, one after the other: at many rows
the memory waits while matrices are multiplied, and the matrix units wait while attention reads. So each phase
takes what takes longer in it, and a step the sum. Launches, dependent kernels and sampling come on top.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["Peaks", "Phase", "Shape", "decode_phases", "decode_step"]

#: bytes of bfloat16
_ELEMENT = 2
#: bytes of a scale of weights of 8 bits
_SCALE = 4
#: a float32 logit, written by the model and read by the sampler
_LOGIT = 4


@dataclass(frozen=True, slots=True)
class Peaks:
    """Measured rates of a device: bytes per second read and written by a copy, bf16 FLOP per second."""

    bandwidth: float
    flops: float

    def seconds(self, phase: Phase) -> float:
        """The least that a phase can take."""
        return max(phase.moved / self.bandwidth, phase.flops / self.flops)


class Phase(NamedTuple):
    """Work of a step whose reading and computing overlap; the next phase needs its result."""

    #: bytes read and written
    moved: float
    flops: float


@dataclass(frozen=True, slots=True)
class Shape:
    """A dense decoder of the Qwen3 family."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool
    #: the matrices of the layers are floats of 8 bits, with a scale for each output
    float8: bool = False
    #: keys and values are, with a byte of a factor for each head
    kv_float8: bool = False

    @property
    def kv_bytes(self) -> int:
        """Keys and values of one position."""
        head = self.head_dim + 1 if self.kv_float8 else self.head_dim * _ELEMENT
        return 2 * self.layers * self.kv_heads * head

    @property
    def layer_parameters(self) -> int:
        """Elements of all matrices in the layers."""
        attention = self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * self.hidden * (attention + 3 * self.intermediate)

    @property
    def layer_bytes(self) -> int:
        """Bytes of all matrices in the layers."""
        if not self.float8:
            return _ELEMENT * self.layer_parameters
        outputs = (self.heads + 2 * self.kv_heads) * self.head_dim + 2 * (self.hidden + self.intermediate)
        return self.layer_parameters + self.layers * _SCALE * outputs

    @property
    def step_bytes(self) -> int:
        """Bytes of weights that a step reads: all but an untied embedding, of which it needs a few rows."""
        norms = self.layers * 2 * (self.hidden + self.head_dim) + self.hidden
        return self.layer_bytes + _ELEMENT * (norms + self.vocab * self.hidden)

    @property
    def attention_flops(self) -> int:
        """Operations of one query at one position, all layers: a dot product and a weighted sum per head."""
        return 4 * self.layers * self.heads * self.head_dim


def decode_phases(shape: Shape, contexts: int, rows: int) -> dict[str, Phase]:
    """Phases of a step of ``rows`` decodes with ``contexts`` positions together, summed over the layers."""
    head = shape.vocab * shape.hidden
    logits = _LOGIT * shape.vocab * rows
    return {
        # Each weight of theirs is used once per row: none waits for another resource than the others do.
        "matrices": Phase(shape.step_bytes - _ELEMENT * head, 2 * rows * shape.layer_parameters),
        "attention": Phase(shape.kv_bytes * (contexts + rows), shape.attention_flops * contexts),
        "head": Phase(_ELEMENT * head + logits, 2 * rows * head),
        "sampling": Phase(logits, 0),
    }


def decode_step(shape: Shape, contexts: int, rows: int, peaks: Peaks) -> float:
    """Seconds of a step of ``rows`` decodes with ``contexts`` positions together."""
    return sum(map(peaks.seconds, decode_phases(shape, contexts, rows).values()))
