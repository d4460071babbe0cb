"""What parameters do to the logits of a block, written down once more: plain Python, token by token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from aioinfer.params import SamplingParams

__all__ = ["adjusted", "raw_logprobs"]


def adjusted(
    logits: torch.Tensor,
    params: SamplingParams,
    *,
    mask_id: int,
    prompt: Sequence[int],
    before: Sequence[int],
    block: Sequence[int | None],
    start: int,
    stop_ids: Sequence[int],
) -> torch.Tensor:
    """Logits [B, V] of a block at ``start``. ``before``: the output before the block; ``block``: by position,
    the token of the output that is known there."""
    lines = logits.float().numpy().copy()
    for at, line in enumerate(lines):
        others = [token for place, token in enumerate(block) if token is not None and place != at]
        _adjust(line, params, start + at - len(prompt), prompt, [*before, *others], stop_ids)
        line[mask_id] = -np.inf
        if params.temperature > 0 and params.top_n_sigma:
            _within_sigmas(line, params.top_n_sigma)
    return torch.from_numpy(lines)


def _adjust(
    line: Any,
    params: SamplingParams,
    index: int,
    prompt: Sequence[int],
    output: Sequence[int],
    stop_ids: Sequence[int],
) -> None:
    """``index``: of the position in the output."""
    f32 = np.float32
    for token, bias in (params.logit_bias or {}).items():
        line[token] += f32(bias)
    if params.allowed_token_ids is not None:
        for token in set(range(len(line))) - set(params.allowed_token_ids):
            line[token] = -np.inf
    for token in sorted({*prompt, *output}):
        penalty, count = f32(params.repetition_penalty), output.count(token)
        line[token] = line[token] / penalty if line[token] > 0 else line[token] * penalty
        line[token] -= f32(params.frequency_penalty) * f32(count)
        line[token] -= f32(params.presence_penalty) * f32(count > 0)
    if index < params.min_tokens:
        for token in stop_ids:
            line[token] = -np.inf


def _within_sigmas(line: Any, sigmas: float) -> None:
    finite = [float(value) for value in line if math.isfinite(value)]
    if not finite:
        return
    mean = math.fsum(finite) / len(finite)
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in finite) / len(finite))
    lowest = max(finite) - sigmas * deviation
    for token, value in enumerate(line):
        if value < lowest:
            line[token] = -np.inf


def raw_logprobs(line: torch.Tensor, mask_id: int, lowered: tuple[int, float] | None = None) -> list[float]:
    """Of all tokens at temperature 1, from one position's logits [V]. ``lowered``: a token, and what an
    algorithm subtracts from its logit."""
    values = [float(value) for value in line.float()]
    if lowered is not None:
        values[lowered[0]] = float(np.float32(values[lowered[0]]) - np.float32(lowered[1]))
    values[mask_id] = -math.inf
    best = max(values)
    mass = math.fsum(math.exp(value - best) for value in values)
    return [value - best - math.log(mass) for value in values]
