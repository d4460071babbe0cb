"""Proposals in Triton: :func:`aioinfer.diffusion.proposal.propose` by the kernels of the sampler.

A position is a line of logits (:mod:`aioinfer.sampling.triton_lines`). Positions that are not wanted, which
are those that hold a token already, are not read. Greedy blocks take one pass over the logits, in their own
type, and three launches; a temperature another pass and two launches more, filters and what they need to find
a threshold 18 more, most of whose programs end at once. Beside the logits there is no memory of their size.

Masses are those of :mod:`aioinfer.sampling.filters`, integers, for what tokens are drawn from, and sums in
float64, in a fixed order, at temperature 1: neither depends on the other rows. With the same logits, tokens
are those of torch's operations as far as the sampler's are, and confidences differ by an ulp or two.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import torch
import triton
import triton.language as tl

from aioinfer.diffusion.proposal import Asked, Proposal, noise_positions
from aioinfer.sampling.filters import mass_unit
from aioinfer.sampling.triton_filters import scale
from aioinfer.sampling.triton_lines import Chosen, Lines, SampleTuning, Work
from aioinfer.sampling.triton_noise import INTERPRETED, exponential, logarithm
from aioinfer.sampling.triton_sampler import choose_tokens

__all__ = ["propose", "warm_up"]

#: The sums, and with them confidences, depend on the size of chunks.
_TUNING = SampleTuning()
_TILE = 128


@triton.jit(do_not_specialize=["temperature", "lowered", "by", "number"])
def _propose_kernel(
    logits: tl.tensor, temperature: tl.tensor, lowered: tl.tensor, by: tl.tensor,
    tokens: tl.tensor, peaks: tl.tensor, kept: tl.tensor, sums: tl.tensor,
    confidences: tl.tensor, logprobs: tl.tensor, valid: tl.tensor,
    number: tl.tensor, stride: tl.tensor,
    DRAWS: tl.constexpr, PER: tl.constexpr, UNIT: tl.constexpr, TILE: tl.constexpr, WIDEN: tl.constexpr,
) -> None:  # fmt: skip
    """Write confidence, logprob and validity of each line's token; 0 without one. Grid (lines / TILE,)."""
    line = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    peak = tl.load(peaks + line, mask=line < number, other=float("inf"))
    good = tl.abs(peak) < float("inf")
    token = tl.load(tokens + line, mask=good, other=0)
    x = tl.load(logits + line * stride + token, mask=good, other=0.0).to(tl.float32)
    name = tl.load(lowered + line, mask=good, other=-1)
    x = tl.where(token == name, x - tl.load(by + line // PER, mask=good, other=0.0), x)
    total = tl.load(sums + line, mask=good, other=1.0)
    confidence = tl.div_rn(tl.full([TILE], 1.0, tl.float32), total)
    if DRAWS:
        temp = tl.load(temperature + line // PER, mask=good, other=0.0)
        drawn = temp > 0.0
        mass = tl.load(kept + line, mask=good & drawn, other=1).to(tl.float64) * (1.0 / UNIT)
        weight = exponential(scale(x, peak, temp), WIDEN)
        confidence = tl.where(drawn, tl.div_rn(weight, mass.to(tl.float32)), confidence)
    logprob = x - peak - logarithm(total, WIDEN)
    inside = line < number
    tl.store(tokens + line, token, mask=inside)
    tl.store(confidences + line, tl.where(good, confidence, 0.0), mask=inside)
    tl.store(logprobs + line, tl.where(good, logprob, 0.0), mask=inside)
    tl.store(valid + line, good.to(tl.uint8), mask=inside)


def propose(logits: torch.Tensor, asked: Asked) -> Proposal:
    """See :func:`aioinfer.diffusion.proposal.propose`. Reads nothing back from the device, and can be
    captured in a CUDA graph; the memory for lists of filters, 50 kB per position, is part of it."""
    lines = _lines(logits, asked)
    filters = asked.drawn and asked.filtered
    work = Work(
        draws=asked.drawn,
        filters=filters,
        wide_nucleus=filters,
        wide_top_k=filters,
        weighs=asked.drawn,
        sums=True,
        entropy=asked.entropy,
    )
    chosen = choose_tokens(lines, work, _TUNING)
    confidence, logprobs, valid = _confide(lines, chosen, drawn=asked.drawn)
    shape = logits.shape[:2]
    assert chosen.sums is not None
    return Proposal(
        tokens=chosen.tokens.view(shape),
        confidence=confidence.view(shape),
        logprobs=logprobs.view(shape),
        valid=valid.view(shape),
        mass=chosen.sums.view(shape),
        entropy=None if chosen.entropy is None else chosen.entropy.view(shape),
    )


def _lines(logits: torch.Tensor, asked: Asked) -> Lines:
    rows, size, vocab = logits.shape
    flat = logits.reshape(rows * size, vocab)
    sampling = {
        name: asked.sampling[name].contiguous() for name in ("temperature", "top_k", "top_p", "min_p")
    }
    lowered = asked.lowered
    if lowered is None:
        # Kernels of their own for the two cases would have to be compiled, too.
        lowered = torch.full((rows, size), -1, device=logits.device), sampling["temperature"]
    return Lines(
        logits=flat if flat.stride(1) == 1 else flat.contiguous(),
        **sampling,
        seeds=asked.sampling["seed"].contiguous(),
        positions=noise_positions(asked).view(-1),
        per=size,
        banned=asked.mask_id,
        lowered=lowered[0].reshape(-1),
        by=lowered[1].contiguous(),
        wanted=asked.wanted.contiguous().view(torch.uint8).view(-1),
    )


def _confide(lines: Lines, chosen: Chosen, *, drawn: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Confidence and logprob of the tokens, float32 [N] each, and whether there are any, bool [N]."""
    number, vocab = lines.logits.shape
    confidence, logprobs = torch.empty_like(chosen.peaks), torch.empty_like(chosen.peaks)
    valid = torch.empty(number, dtype=torch.bool, device=chosen.peaks.device)
    _propose_kernel[(triton.cdiv(number, _TILE),)](
        lines.logits, lines.temperature, lines.lowered, lines.by, chosen.tokens, chosen.peaks, chosen.kept,
        chosen.sums, confidence, logprobs, valid.view(torch.uint8), number, lines.logits.stride(0),
        DRAWS=drawn, PER=lines.per, UNIT=mass_unit(vocab), TILE=_TILE, WIDEN=INTERPRETED,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return confidence, logprobs, valid


def warm_up(size: int, vocab: int, dtype: torch.dtype, device: torch.device) -> None:
    """Run every kernel that a round may need once, so that no request waits for compilation, and none is
    compiled during a capture."""
    for logits, asked in _every_kind(size, vocab, dtype, device):
        propose(logits, asked)


def _every_kind(
    size: int, vocab: int, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[torch.Tensor, Asked]]:
    logits = torch.zeros(1, size, vocab, dtype=dtype, device=device)
    zero, one = torch.zeros(1, dtype=torch.int64, device=device), torch.ones(1, device=device)
    asked = Asked(
        positions=torch.zeros(1, size, dtype=torch.int64, device=device),
        rounds=zero,
        sampling={"temperature": one, "top_p": one / 2, "min_p": one, "top_k": zero, "seed": zero},
        wanted=torch.ones(1, size, dtype=torch.bool, device=device),
        mask_id=0,
    )
    for entropy, (drawn, filtered) in product((False, True), ((False, False), (True, False), (True, True))):
        yield logits, replace(asked, entropy=entropy, drawn=drawn, filtered=filtered)
