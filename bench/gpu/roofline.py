"""The roofline: how fast a step of a model can be at a device's copy bandwidth and matmul rate.

A decode step reads all weights once (of experts, those that a token passes), the keys and values of every
context, and writes and reads logits in float32; it multiplies each token with all matrices that it passes.
It does so in phases, one behind the other: at many rows the memory waits while matrices are multiplied, and
the matrix units wait while attention reads. So each phase takes what takes longer in it, and a step the sum.
What a real step pays besides (launches, dependent kernels, sampling) is the gap that the benches show.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["Peaks", "Phase", "Shape", "decode_phases", "decode_step", "offline"]

#: bytes of bfloat16
_ELEMENT = 2
#: bytes of a scale of weights of 8 bits
_SCALE = 4
#: a float32 logit, written by the model and read by the sampler
_LOGIT = 4


@dataclass(frozen=True, slots=True)
class Peaks:
    """What a device was measured to do: bytes per second read and written by a copy, bf16 FLOP per second."""

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
    """A decoder of the Qwen3 family: dense, or with ``experts`` of which a token passes ``chosen``."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool
    experts: int = 0
    chosen: int = 0
    #: the matrices of the layers, but for routers, are floats of 8 bits, with a scale for each output
    float8: bool = False
    #: keys and values are, with a byte of a factor for each head
    kv_float8: bool = False

    @property
    def kv_bytes(self) -> int:
        """Keys and values of one position."""
        head = self.head_dim + 1 if self.kv_float8 else self.head_dim * _ELEMENT
        return 2 * self.layers * self.kv_heads * head

    @property
    def layer_bytes(self) -> int:
        """All matrices in the layers."""
        if not self.float8:
            return _ELEMENT * self.layer_parameters
        outputs = (self.heads + 2 * self.kv_heads) * self.head_dim + self.hidden
        outputs += (self.experts or 1) * (2 * self.intermediate + self.hidden)
        routers = self.experts * self.hidden
        return self.layer_parameters + self.layers * (_SCALE * outputs + (_ELEMENT - 1) * routers)

    @property
    def layer_parameters(self) -> int:
        """Of all matrices in the layers."""
        return self._parameters(self.experts)

    @property
    def token_parameters(self) -> int:
        """Of the matrices in the layers that a token is multiplied with."""
        return self._parameters(self.chosen)

    def _parameters(self, experts: int) -> int:
        """With so many experts in each layer; for a dense decoder the number says nothing."""
        attention = self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        middle = 3 * self.intermediate * (experts if self.experts else 1) + self.experts
        return self.layers * self.hidden * (attention + middle)

    @property
    def chosen_parameters(self) -> int:
        """Of the experts that a token passes, in all layers."""
        return 3 * self.layers * self.hidden * self.intermediate * self.chosen

    @property
    def expert_bytes(self) -> int:
        """Of all experts in the layers."""
        matrices = 3 * self.hidden * self.intermediate
        if self.float8:
            one = matrices + _SCALE * (2 * self.intermediate + self.hidden)
        else:
            one = _ELEMENT * matrices
        return self.layers * self.experts * one

    @property
    def step_bytes(self) -> int:
        """Weights that a step reads: all but an embedding of its own, of which it needs a few rows."""
        norms = self.layers * 2 * (self.hidden + self.head_dim) + self.hidden
        return self.layer_bytes + _ELEMENT * (norms + self.vocab * self.hidden)

    def idle_bytes(self, rows: int) -> float:
        """Weights of experts that none of so many tokens passes, if they choose at random."""
        if not self.experts:
            return 0.0
        return self.expert_bytes * (1 - self.chosen / self.experts) ** rows

    @property
    def attention_flops(self) -> int:
        """Of one query at one position, all layers: a dot product and a weighted sum per head."""
        return 4 * self.layers * self.heads * self.head_dim


def decode_phases(shape: Shape, contexts: int, rows: int) -> dict[str, Phase]:
    """What a step of ``rows`` decodes, whose contexts have so many positions together, does one after the
    other, summed over the layers."""
    head = shape.vocab * shape.hidden
    logits = _LOGIT * shape.vocab * rows
    phases = {
        # Of all of them each weight is used once per row: none waits for another resource than the others do.
        "matrices": Phase(
            shape.step_bytes - shape.expert_bytes - _ELEMENT * head,
            2 * rows * (shape.token_parameters - shape.chosen_parameters),
        ),
        "attention": Phase(shape.kv_bytes * (contexts + rows), shape.attention_flops * contexts),
        "head": Phase(_ELEMENT * head + logits, 2 * rows * head),
        "sampling": Phase(logits, 0),
    }
    if shape.experts:
        phases["experts"] = Phase(
            shape.expert_bytes - shape.idle_bytes(rows), 2 * rows * shape.chosen_parameters
        )
    return phases


def decode_step(shape: Shape, contexts: int, rows: int, peaks: Peaks) -> float:
    """Seconds of a step of ``rows`` decodes whose contexts have so many positions together."""
    return sum(map(peaks.seconds, decode_phases(shape, contexts, rows).values()))


def offline(
    shape: Shape, prompts: Sequence[int], outputs: Sequence[int], peaks: Peaks
) -> tuple[float, float]:
    """Seconds of (prefill, decode) of requests that all begin at once, by their lengths.

    Prefill brings everybody's first token; then each step decodes whoever is not done yet.
    """
    positions = sum(length * length / 2 for length in prompts)
    flops = 2 * shape.token_parameters * sum(prompts) + shape.attention_flops * positions
    decode = 0.0
    for step in range(1, max(outputs)):
        running = [prompt + step for prompt, output in zip(prompts, outputs, strict=True) if output > step]
        decode += decode_step(shape, sum(running), len(running), peaks)
    return flops / peaks.flops, decode
