"""Compile the kernels for floats of 8 bits for a GPU on a machine without one; run as a module by a test.

As ``compile_kernels.py`` beside it, of weights, of experts, and of keys and values. The argument is the
compute capability without its point.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from aioinfer.checkpoint.tensors import Float8Matrix
from aioinfer.model.attention.base import AttentionParams
from aioinfer.model.attention.pool import KVPool, KVShape
from aioinfer.model.attention.triton_attention import TritonAttention
from aioinfer.model.float8 import rounded_matrix
from aioinfer.model.float8_linear import Float8Linear
from aioinfer.model.heads import HeadNorm
from aioinfer.model.moe.experts import Float8ExpertWeights
from aioinfer.model.moe.float8_experts import Float8Experts
from aioinfer.model.rope import Rotary
from aioinfer.model.triton_float8 import EVERY_TUNING, round_rows
from tests.model.compile_kernels import CPU, Driver, Recorder, step

#: rows of the steps: one of every tuning, then others that must not compile again
_ROWS = (*EVERY_TUNING, 1, 3, 20, 31, 50, 200, 1000)


class Target(Driver):
    """A device of one architecture."""

    def __init__(self, architecture: int) -> None:
        self._architecture = architecture

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._architecture, 32)


def compile_products(name: str, dtype: torch.dtype, outputs: int, inner: int, block: tuple[int, int]) -> None:
    """Steps of many sizes."""
    linear = Float8Linear(
        rounded_matrix(torch.zeros(outputs, inner), block), torch.zeros(outputs, dtype=dtype)
    )
    recorder = Recorder(name)
    for recorder.step, rows in enumerate(_ROWS):
        linear(torch.empty(rows, inner, dtype=dtype))
        round_rows(torch.empty(rows, inner, dtype=dtype))


def compile_experts(
    name: str, dtype: torch.dtype, sizes: tuple[int, int, int], blocks: list[tuple[int, int]]
) -> None:
    """Steps of many sizes, of one token and of thousands. ``sizes``: experts, hidden, middle."""
    count, hidden, middle = sizes
    gate_up, down = (
        Float8Matrix(
            torch.empty(count, *shape, dtype=torch.float8_e4m3fn, device="meta"),
            torch.empty(count, -(-shape[0] // block[0]), -(-shape[1] // block[1]), device="meta"),
            block,
        )
        for shape, block in zip([(2 * middle, hidden), (hidden, middle)], blocks, strict=True)
    )
    experts = Float8Experts(Float8ExpertWeights(gate_up, down))
    recorder, rng = Recorder(name), random.Random(0)
    for recorder.step in range(6):
        tokens = (1, 8 * count, rng.randrange(2, 64))[min(recorder.step, 2)]
        x, weights = torch.empty(tokens, hidden, dtype=dtype), torch.empty(tokens, 8, dtype=dtype)
        experts(x, weights, torch.zeros(tokens, 8, dtype=torch.int64))


def compile_steps(name: str, head_dim: int, dtype: torch.dtype, *, normed: int = 0, **options: Any) -> None:
    """Decodes and chunks over keys and values of 8 bits; whatever is not constant must not compile again.
    ``normed``: how many heads of a token are, queries first."""
    shape, heads = KVShape(8, head_dim), 32
    norm = HeadNorm(torch.empty(normed, head_dim, dtype=dtype), 1e-6) if normed else None
    pool = KVPool([shape], num_pages=1, page_size=64, dtype=dtype, device=CPU, float8=True)
    attention, params, rng = TritonAttention(pool), AttentionParams(0.1, **options), random.Random(0)
    recorder = Recorder(name)
    for recorder.step in range(6):
        decodes = [(1, 3000 if recorder.step % 2 else 200)] * (recorder.step * 5 % 17 + 1)
        chunks = [(17 + recorder.step, 17 + recorder.step)]
        batch = step(decodes + chunks, len(decodes), 64, rng)
        qkv = torch.empty(len(batch.input_ids), heads + 16, head_dim, dtype=dtype)
        q, k, v = qkv.split((heads, 8, 8), dim=1)
        attention(0, q, k, v, batch, params)
        factors = torch.empty(len(qkv), 1, head_dim, dtype=dtype)
        attention.fused(0, qkv, norm, Rotary(factors, factors), batch, params)


def main() -> None:
    triton.runtime.driver.set_active(Target(int(sys.argv[1])))
    compile_products("rows", torch.bfloat16, 4096, 4096, (1, 4096))
    compile_products("blocks", torch.bfloat16, 6144, 4096, (128, 128))
    compile_products("sums", torch.float16, 1024, 3072, (1, 3072))
    compile_products("odd", torch.float32, 100, 200, (40, 200))
    compile_experts("experts-blocks", torch.bfloat16, (128, 2048, 768), [(128, 128)] * 2)
    compile_experts("experts-rows", torch.float16, (256, 2048, 512), [(1, 2048), (1, 512)])
    compile_experts("experts-odd", torch.float32, (16, 200, 72), [(40, 200), (1, 72)])
    compile_steps("kv", 128, torch.bfloat16, normed=40)
    compile_steps("kv-capped", 80, torch.float16, window=100, soft_cap=50.0)
    compile_steps("kv-large", 256, torch.bfloat16, normed=48)
    compile_steps("kv-half", 64, torch.float16)


if __name__ == "__main__":
    main()
