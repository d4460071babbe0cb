"""Compile the sampling kernels for Hopper on a machine without a GPU; run as a module by a test.

As tests/model/compile_kernels.py does: launches stop after compiling. Prints a JSON object per kernel
compiled; step 0 is the sampler's warm-up.
"""

from __future__ import annotations

import random
from dataclasses import replace

import torch
import triton

from aioinfer.model.backend import Backend
from aioinfer.sampling import sampler, triton_logits
from aioinfer.sampling.batch import SamplingBatch
from aioinfer.sampling.penalties import Penalties
from aioinfer.sampling.triton_sampler import sample_tokens
from tests.model.compile_kernels import Driver, Recorder, ints


def batch(rows: int, rng: random.Random) -> SamplingBatch:
    """Columns at addresses of any alignment, as sections of a packed buffer are."""

    def floats() -> torch.Tensor:
        return torch.ones(rows + 1)[rng.randrange(2) :][:rows]

    slots, positions, seeds, top_k = (ints([0] * rows, rng.randrange(2)) for _ in range(4))
    return SamplingBatch(
        slots, positions, seeds, floats(), floats(), floats(), top_k, floats(), floats(), floats(),
        all_greedy=False, any_top_k=True, any_top_p=True, any_min_p=True, any_penalty=False,
    )  # fmt: skip


def compile_sampling(name: str, vocab: int) -> None:
    """The warm-up, and batches of many sizes; whatever is not constant must not compile again."""
    recorder = Recorder(name)
    sampler.Sampler(300, vocab, torch.device("cpu")).warm_up()
    rng = random.Random(0)
    for rows in (1, 2, 5, 16, 17, 256):
        recorder.step += 1
        logits = torch.empty(rows, vocab)
        some = batch(rows, rng)
        sample_tokens(logits, some)
        sample_tokens(logits, replace(some, all_greedy=True))
        penalties = some.repetition_penalty, some.presence_penalty, some.frequency_penalty
        counts, row_of = torch.empty(rows, vocab, dtype=torch.int32), torch.empty(300, dtype=torch.int64)
        triton_logits.penalise(logits, counts, row_of, some.slots, penalties, 1 << 30)
        triton_logits.ban_(logits, some.slots, some.slots)
        triton_logits.add_biases_(logits, some.slots, some.slots, some.slots)
        words = torch.empty(rows, rng.randrange(1, vocab // 32), dtype=torch.int32)
        triton_logits.apply_masks_(logits, some.slots, words)


def main() -> None:
    triton.runtime.driver.set_active(Driver())
    sampler.choose_sampling = lambda *_: Backend("triton", "for its kernels")  # type: ignore[attr-defined]
    # There are no tokens to count, for nothing was launched.
    Penalties.record = lambda *_: None  # type: ignore[method-assign]
    compile_sampling("qwen3", 151_936)
    compile_sampling("gpt2", 50_257)


if __name__ == "__main__":
    main()
