"""Compile the sampling kernels, and those that propose tokens of blocks, on a machine without a GPU; run as a
module by a test.

As tests/model/compile_kernels.py does: launches stop after compiling. The environment variable
COMPILE_CAPABILITY names the target, "90" being Hopper. Prints a JSON object per kernel compiled; step 0 is
the warm-up.
"""

from __future__ import annotations

import os
import random
from dataclasses import replace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from aioinfer.diffusion import triton_proposal
from aioinfer.diffusion.proposal import Asked
from aioinfer.model.backend import Backend
from aioinfer.sampling import sampler, triton_logits
from aioinfer.sampling.batch import SamplingBatch
from aioinfer.sampling.penalties import Penalties
from aioinfer.sampling.triton_sampler import sample_tokens
from tests.model.compile_kernels import Driver, Recorder, ints

CAPABILITY = int(os.environ.get("COMPILE_CAPABILITY", "90"))
ROWS = (1, 2, 5, 16, 17, 256)


class Target(Driver):
    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", CAPABILITY, 32)


def ones(rows: int, rng: random.Random) -> torch.Tensor:
    """At an address of any alignment, as sections of a packed buffer are."""
    return torch.ones(rows + 1)[rng.randrange(2) :][:rows]


def batch(rows: int, rng: random.Random) -> SamplingBatch:
    slots, positions, seeds, top_k = (ints([0] * rows, rng.randrange(2)) for _ in range(4))
    temperature, top_p, min_p, repetition, presence, frequency = (ones(rows, rng) for _ in range(6))
    return SamplingBatch(
        slots, positions, seeds, temperature, top_p, min_p, top_k, repetition, presence, frequency,
        all_greedy=False, any_top_k=True, any_top_p=True, any_min_p=True, any_penalty=False,
    )  # fmt: skip


def compile_sampling(name: str, vocab: int) -> None:
    """The warm-up, and batches of many sizes; whatever is not constant must not compile again."""
    recorder = Recorder(name)
    sampler.Sampler(300, vocab, torch.device("cpu")).warm_up()
    rng = random.Random(0)
    for rows in ROWS:
        recorder.step += 1
        logits = torch.empty(rows, vocab)
        some = batch(rows, rng)
        sample_tokens(logits, some)
        flagged: list[dict[str, Any]] = [{"all_greedy": True}, {"wide_nucleus": True}, {"wide_top_k": True}]
        for flags in flagged:
            sample_tokens(logits, replace(some, **flags))
        counts, row_of = torch.empty(rows, vocab, dtype=torch.int32), torch.empty(300, dtype=torch.int64)
        triton_logits.penalise(logits, counts, row_of, some)
        triton_logits.ban_(logits, some.slots, some.slots)
        triton_logits.add_biases_(logits, some.slots, some.slots, some.slots)
        words = torch.empty(rows, rng.randrange(1, vocab // 32), dtype=torch.int32)
        triton_logits.apply_masks_(logits, some.slots, words)


def compile_proposals(name: str, vocab: int, size: int) -> None:
    """The same of blocks."""
    recorder = Recorder(name)
    triton_proposal.warm_up(size, vocab, torch.bfloat16, torch.device("cpu"))
    rng = random.Random(0)
    for rows in ROWS[:-1]:
        recorder.step += 1
        some = batch(rows, rng)
        asked = Asked(
            positions=torch.zeros(rows, size, dtype=torch.int64),
            rounds=some.positions,
            sampling={
                **{each: getattr(some, each) for each in ("temperature", "top_p", "min_p", "top_k")},
                "seed": some.seeds,
            },
            wanted=torch.ones(rows, size, dtype=torch.bool),
            mask_id=rng.randrange(vocab),
            lowered=(torch.zeros(rows, size, dtype=torch.int64), ones(rows, rng)),
            entropy=rows % 2 == 0,
        )
        logits = torch.empty(rows, size, vocab, dtype=torch.bfloat16)
        for lowered in (asked.lowered, None):
            for drawn, filtered in ((False, False), (True, False), (True, True)):
                asked = replace(asked, lowered=lowered, drawn=drawn, filtered=filtered)
                triton_proposal.propose(logits, asked)


def main() -> None:
    triton.runtime.driver.set_active(Target())
    sampler.choose_sampling = lambda *_: Backend("triton", "for its kernels")  # type: ignore[attr-defined]
    # There are no tokens to count, for nothing was launched.
    Penalties.record = lambda *_: None  # type: ignore[method-assign]
    compile_sampling("qwen3", 151_936)
    compile_sampling("gpt2", 50_257)
    compile_proposals("llada2", 157_184, 32)


if __name__ == "__main__":
    main()
