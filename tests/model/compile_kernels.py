"""Compile the kernels for a GPU on a machine without one; run as a module by a test.

The interpreter takes much that the compiler does not. Here the kernels' own launchers are called with CPU
tensors, a stand-in for Triton's driver names the target, and launches stop after compiling. Prints one
JSON object per kernel compiled: what it takes, and in which step of which shape. Arguments: the compute
capability without its point, 90 is Hopper's; and "float8" for the kernels for floats of 8 bits, or "plain".
"""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import KernelInterface

from aioinfer.checkpoint.tensors import Float8Matrix
from aioinfer.model.adapters.triton_adapters import TritonAdapters
from aioinfer.model.attention import triton_decode, triton_heads
from aioinfer.model.attention.base import AttentionParams
from aioinfer.model.attention.pool import KVPool, KVShape
from aioinfer.model.attention.triton_attention import TritonAttention
from aioinfer.model.attention.triton_heads import rotate_and_store
from aioinfer.model.batch import Batch
from aioinfer.model.float8 import rounded_matrix
from aioinfer.model.float8_linear import Float8Linear
from aioinfer.model.heads import HeadNorm
from aioinfer.model.linear import TorchLinear
from aioinfer.model.moe.experts import ExpertWeights, Float8ExpertWeights
from aioinfer.model.moe.float8_experts import Float8Experts
from aioinfer.model.moe.routing import GroupedSigmoidRouter, SoftmaxRouter
from aioinfer.model.moe.triton_experts import TritonExperts
from aioinfer.model.moe.triton_routing import TritonRouter
from aioinfer.model.norm import Norm
from aioinfer.model.operations import triton_operations
from aioinfer.model.operations.triton_operations import TritonOperations
from aioinfer.model.rope import Rotary
from aioinfer.model.triton_float8 import EVERY_TUNING, round_rows
from aioinfer.model.triton_linear import TritonLinear
from aioinfer.model.weights import RandomWeights, StoredMatrix
from tests.model.adapters import factors, write_adapter

CPU = torch.device("cpu")
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


class Driver:
    """As much of Triton's driver as compiling asks for."""

    def __init__(self, architecture: int = 90) -> None:
        self.architecture = architecture

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.architecture, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Recorder:
    """Takes the place of all launches, and prints what is compiled for a shape."""

    def __init__(self, shape: str) -> None:
        self.shape = shape
        self.step = 0
        self._seen: set[str] = set()
        KernelInterface.__getitem__ = lambda kernel, grid: self._launcher(kernel, grid)

    def _launcher(self, kernel: Any, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **constants: Any) -> None:
            compiled = kernel.run(*args, grid=grid, warmup=True, **constants)
            if compiled.hash in self._seen:
                return
            self._seen.add(compiled.hash)
            found = {"name": compiled.name, "shape": self.shape, "step": self.step}
            found |= {"shared": compiled.metadata.shared, "wgmma": "wgmma" in compiled.asm["ptx"]}
            found["exponents"] = exponents(compiled.asm["ptx"])
            found |= {"early": compiled.metadata.launch_pdl, "follows": follows(compiled.asm["ptx"])}
            print(json.dumps(found | resources(compiled.asm["cubin"])), flush=True)  # noqa: T201

        return launch


def follows(ptx: str) -> bool:
    """Whether a kernel waits for the one before, before it reads or writes any memory of the device."""
    return "griddepcontrol.wait" in re.split(r"\b(?:ld|st|atom|red|cp)\.\S*global", ptx)[0]


def resources(cubin: bytes) -> dict[str, int]:
    """Registers of a thread, and bytes that it spills to its stack."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    registers, stack = re.findall(r"REG:(\d+) STACK:(\d+)", text)[-1]
    return {"registers": int(registers), "stack": int(stack)}


def exponents(ptx: str) -> dict[str, int]:
    """How often the argument of a power of two is the result of which instruction."""
    made: dict[str, str] = {}
    count: Counter[str] = Counter()
    for operation, register, arguments in re.findall(r"^\s+([a-z0-9_.]+)\s+(%\w+), (.*);", ptx, re.MULTILINE):
        if operation.startswith("ex2."):
            # Of a pair of numbers in one register the instruction is not found.
            count[made.get(arguments.strip(), "unknown")] += 1
        made[register] = operation
    return dict(count)


def ints(values: list[int], shift: int) -> torch.Tensor:
    """At an address of any alignment, as sections of a packed buffer are."""
    buffer = torch.empty(len(values) + shift, dtype=torch.int64)
    buffer[shift:] = torch.tensor(values)
    return buffer[shift:]


def step(rows: list[tuple[int, int]], num_decodes: int, page_size: int, rng: random.Random) -> Batch:
    q_lens, kv_lens = [q for q, _ in rows], [kv for _, kv in rows]
    tokens, width = sum(q_lens), -(-max(kv_lens) // page_size)
    ids, ends = ints([0] * tokens, rng.randrange(2)), torch.tensor([0, *q_lens]).cumsum(0).tolist()
    table = ints([0] * (width * len(rows)), rng.randrange(2)).view(len(rows), width)
    cu_q, kv_len = (ints(values, rng.randrange(2)) for values in (ends, kv_lens))
    return Batch(
        ids, ids, ids, cu_q, kv_len, table, ids[:0], q_lens=q_lens, kv_lens=kv_lens, num_decodes=num_decodes
    )


def compile_steps(
    name: str,
    head_dim: int,
    dtype: torch.dtype,
    heads: tuple[int, int] = (32, 8),
    page_size: int = 64,
    *,
    normed: int = 0,
    float8: bool = False,
    invariant: bool = False,
    **options: Any,
) -> None:
    """Steps of many sizes; whatever is not constant must not compile again. ``normed``: how many heads of a
    token are, queries first."""
    queries, kv_heads = heads
    shape = [KVShape(kv_heads, head_dim)]
    pool = KVPool(shape, num_pages=1, page_size=page_size, dtype=dtype, device=CPU, float8=float8)
    attention = TritonAttention(pool, capability=divmod(int(sys.argv[1]), 10), invariant=invariant)
    operations, params, rng = TritonOperations(), AttentionParams(0.1, **options), random.Random(0)
    norm = HeadNorm(torch.empty(normed, head_dim, dtype=dtype), 1e-6) if normed else None
    recorder = Recorder(name)
    for recorder.step in range(12):
        at = recorder.step
        # The first two steps have it all: both kinds of rows, contexts of one split and of several.
        decodes = [(1, rng.randint(300, 4000) if at % 2 else 200)] * (at * 5 % 17 + 1)
        chunks = [(17 + at, 17 + at)] * (1 if at < 2 else rng.randrange(4))
        batch = step(decodes + chunks, len(decodes), page_size, rng)
        qkv = torch.empty(len(batch.input_ids), queries + 2 * kv_heads, head_dim, dtype=dtype)
        q, k, v = qkv.split((queries, kv_heads, kv_heads), dim=1)
        attention(0, q, k, v, batch, params)
        factors = torch.empty(len(qkv), 1, head_dim, dtype=dtype)
        attention.fused(0, qkv, norm, Rotary(factors, factors), batch, params)
        hidden = torch.empty(len(qkv), queries * head_dim, dtype=dtype)
        for delta in () if float8 else (None, hidden):
            operations.add_norm(hidden, delta, Norm(hidden[0], 1e-6))
            operations.gate_mul(hidden, "silu")


def compile_heads(name: str, heads: int, kv_heads: int, head_dim: int, rotated: int) -> None:
    """Heads of which a part is rotated, for steps of several sizes."""
    recorder = Recorder(name)
    pool = torch.empty(2, 32, kv_heads, head_dim, dtype=torch.bfloat16)
    norm = HeadNorm(torch.empty(heads + kv_heads, head_dim, dtype=torch.bfloat16), 1e-6)
    for recorder.step, tokens in enumerate((32, 1, 17)):
        qkv = torch.empty(tokens, heads + 2 * kv_heads, head_dim, dtype=torch.bfloat16)
        factors = torch.empty(tokens, 1, rotated, dtype=torch.bfloat16)
        slots = ints([0] * tokens, recorder.step % 2)
        rotate_and_store(qkv, norm, Rotary(factors, factors), pool, pool.clone(), slots)


def compile_experts(
    name: str,
    dtype: torch.dtype,
    sizes: tuple[int, int, int],
    blocks: tuple[tuple[int, int], tuple[int, int]] | None = None,
) -> None:
    """Steps of many sizes, of one token and of thousands. ``sizes``: experts, hidden, middle; ``blocks``: of
    gate and up and of down, in floats of 8 bits."""
    count, hidden, middle = sizes
    shapes = (2 * middle, hidden), (hidden, middle)
    recorder, rng, routers = Recorder(name), random.Random(0), list[TritonRouter]()
    if blocks is None:
        gate_up, down = (torch.empty(count, *shape, dtype=dtype, device="meta") for shape in shapes)
        experts: Any = TritonExperts(ExpertWeights(gate_up, down))
        gates, bias = gate_up[:, 0], gate_up[:, 0, 0].float()
        by_groups = GroupedSigmoidRouter(gates.float(), bias, 8, 8, 4, True, 2.5)
        routers = [TritonRouter(SoftmaxRouter(gates, 8, True)), TritonRouter(by_groups)]
    else:
        both, last = (
            Float8Matrix(
                torch.empty(count, rows, inner, dtype=torch.float8_e4m3fn, device="meta"),
                torch.empty(count, -(-rows // height), -(-inner // width), device="meta"),
                (height, width),
            )
            for (rows, inner), (height, width) in zip(shapes, blocks, strict=True)
        )
        experts = Float8Experts(Float8ExpertWeights(both, last))
    for recorder.step in range(12):
        tokens = (1, 8 * count, rng.randrange(2, 64))[min(recorder.step, 2)]
        x, weights = torch.empty(tokens, hidden, dtype=dtype), torch.empty(tokens, 8, dtype=dtype)
        for router in routers:
            router(x)
        experts(x, weights, ints([0] * (8 * tokens), rng.randrange(2)).view(tokens, 8))


def compile_products(name: str, dtype: torch.dtype, outputs: int, inner: int, block: tuple[int, int]) -> None:
    """Steps with one of every tuning, then of sizes that must not compile again."""
    matrix = rounded_matrix(torch.zeros(outputs, inner), block)
    linear, recorder = Float8Linear(matrix, torch.zeros(outputs, dtype=dtype)), Recorder(name)
    for recorder.step, rows in enumerate((*EVERY_TUNING, 1, 3, 20, 31, 50, 200, 1000)):
        linear(torch.empty(rows, inner, dtype=dtype))
        round_rows(torch.empty(rows, inner, dtype=dtype))


def compile_linear(name: str, dtype: torch.dtype, outputs: int, inner: int) -> None:
    """A product in a fixed order for steps of several sizes, with a bias and without."""
    recorder = Recorder(name)
    weight = torch.empty(outputs, inner, dtype=dtype)
    for recorder.step, rows in enumerate((1, 2048, 7)):
        for bias in (None, weight[:, 0].contiguous()):
            TritonLinear(weight, bias)(torch.empty(rows, inner, dtype=dtype))


class _Empty(TorchLinear):
    """A linear layer that computes nothing."""

    def __init__(self, outputs: int) -> None:
        super().__init__(torch.empty(outputs, 0))

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        return values.new_empty(len(values), len(self.weight))


def compile_adapters(name: str, dtype: torch.dtype, rows: list[int], inputs: int) -> None:
    """Steps of many sizes, with adapters of small ranks and large ones."""
    adapters = TritonAdapters(dtype, CPU, max_rank=64)
    weights, names = RandomWeights(dtype=dtype, device=CPU), [f"model.{at}" for at in range(len(rows))]
    linears = [
        adapters.linear(StoredMatrix(weights, names, rows, inputs), _Empty(sum(rows))),
        # Whose targets do not begin at 0.
        adapters.linear(
            StoredMatrix(weights, [f"{name}.more" for name in names], rows, inputs),
            _Empty(sum(rows)),
        ),
    ]
    with tempfile.TemporaryDirectory() as folder:
        for slot, rank in enumerate((8, 64), 1):
            shapes = {f"{name}{more}": (count, inputs) for name, count in zip(names, rows, strict=True)
                      for more in ("", ".more")}  # fmt: skip
            matrices = factors(shapes, dict.fromkeys(shapes, rank), seed=slot, dtype=dtype)
            write_adapter(Path(folder, str(slot)), matrices, r=rank)
            adapters.install(slot, adapters.prepare(Path(folder, str(slot))))
    recorder, rng = Recorder(name), random.Random(0)
    for recorder.step in range(8):
        q_lens = [1] * rng.randint(1, 17) + [rng.randint(2, 40)] * (recorder.step % 2)
        batch = step([(count, count) for count in q_lens], 1, 16, rng)
        batch.adapter_slots = [rng.choice((0, 1, 2)) for _ in q_lens]
        batch.adapter_slots[0] = recorder.step % 2 + 1
        with adapters.computing(batch):
            for linear in linears:
                linear(torch.empty(len(batch.input_ids), inputs, dtype=dtype))


def compile_plain() -> None:
    compile_steps("qwen3-8b", 128, BF16, page_size=16, normed=40)
    for head_dim in (64, 80, 256):
        compile_steps(f"{head_dim}", head_dim, BF16, (16, 8), normed=24)
    for head_dim in (64, 80, 128, 256):
        compile_steps(f"{head_dim}-float32", head_dim, F32, (16, 8))
    compile_steps("capped", 80, F16, (14, 2), window=100, soft_cap=50.0, block=32)
    compile_steps("invariant", 128, BF16, normed=40, invariant=True)
    compile_heads("llada2-mini", 16, 4, 128, 64)
    compile_linear("linear", BF16, 4096, 4096)
    compile_linear("linear-float32", F32, 70, 200)
    compile_experts("qwen3-30b-a3b", BF16, (128, 2048, 768))
    compile_experts("experts-float32", F32, (16, 200, 72))
    compile_adapters("adapters-qkv", BF16, [4096, 1024, 1024], 4096)
    compile_adapters("adapters-odd", F32, [72], 200)


def compile_float8() -> None:
    compile_products("rows", BF16, 4096, 4096, (1, 4096))
    compile_products("blocks", BF16, 6144, 4096, (128, 128))
    compile_products("sums", F16, 1024, 3072, (1, 3072))
    compile_products("products-float32", F32, 100, 200, (40, 200))
    compile_experts("experts-blocks", BF16, (128, 2048, 768), ((128, 128), (128, 128)))
    compile_experts("experts-rows", F16, (256, 2048, 512), ((1, 2048), (1, 512)))
    compile_experts("experts-float32", F32, (16, 200, 72), ((40, 200), (1, 72)))
    compile_steps("kv", 128, BF16, normed=40, float8=True)
    compile_steps("kv-capped", 80, F16, float8=True, window=100, soft_cap=50.0)
    compile_steps("kv-large", 256, BF16, normed=48, float8=True)
    compile_steps("kv-half", 64, F16, float8=True)


def main() -> None:
    architecture, kind = sys.argv[1:]
    triton.runtime.driver.set_active(Driver(int(architecture)))
    early: list[Any] = [triton_decode, triton_heads, triton_operations]
    for module in early:
        # These ask the device of their tensors, which here is a CPU.
        module.launches_early = lambda device: architecture == "90"
    (compile_float8 if kind == "float8" else compile_plain)()


if __name__ == "__main__":
    main()
