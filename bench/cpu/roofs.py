"""``python -m bench cpu --roof``: what a forward reaches of what the processor could do at most.

A program in C++ measures two roofs on all threads: bytes per second that are read from memory, and operations
per second with the instructions of the kernels. A part of a forward cannot take less time than it takes to
read its weights, or keys and values, once, and to compute its products; "reached" is the larger of the two
over the time that it takes, the median of several forwards without anything else (no scheduler, no sampling).

Decodes are measured with ``--prompt-tokens`` positions each, and alone with each of ``--contexts``; prefill,
of ``--prefill-tokens``, from the first position on and behind each of ``--contexts``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time
from dataclasses import astuple, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

import aioinfer.native
from aioinfer.config import EngineConfig
from aioinfer.model.attention.base import Attention
from aioinfer.model.attention.native_attention import NativeAttention
from aioinfer.model.batch import Batch
from aioinfer.model.kernels import choose_attention, make_attention
from aioinfer.model.loader import LoadOptions, load_model
from aioinfer.model.quantization import Quantization, rounding_of
from aioinfer.model.spec import CausalLM
from aioinfer.native.build import BuildFailed, find_compiler
from aioinfer.native.processor import choose_tiles
from bench.command import BadOptions
from bench.gpu.roofline import Shape
from bench.peers.registry import Precision
from bench.report import Report

__all__ = ["Phase", "Roofs", "measure_roofs", "needs"]

_PAGE = 32
_SOURCE = Path(__file__).with_name("roofs.cpp")
_KERNELS = Path(aioinfer.native.__file__).parent / "source"
#: forwards of a phase, and seconds that they take at least
_FORWARDS, _SECONDS = 5, 1.0


@dataclass(frozen=True, slots=True)
class Roofs:
    """Per second: bytes read from memory, and operations (two a product) on numbers of each kind."""

    bytes: float
    bf16: float
    int8: float
    int4: float


@dataclass(frozen=True, slots=True)
class Phase:
    """A forward of ``rows`` equal rows: ``tokens`` of each behind ``context`` positions."""

    name: str
    rows: int
    tokens: int
    context: int

    @property
    def positions(self) -> int:
        """Of each row, behind the forward."""
        return self.context + self.tokens


def needs(shape: Shape, precision: Precision, phase: Phase) -> dict[str, tuple[float, float]]:
    """By part, the bytes that a forward reads from memory and the operations that it computes."""
    tokens = phase.rows * phase.tokens
    head = shape.vocab * shape.hidden
    weights = _bytes(precision, shape.layer_parameters) + _bytes(precision, head, head=True)
    products = 2 * (shape.layer_parameters * tokens + head * phase.rows)
    pairs = phase.rows * sum(phase.context + 1 + at for at in range(phase.tokens))
    kv = shape.kv_bytes * phase.rows * phase.positions
    return {"linear": (weights, products), "attention": (kv, shape.attention_flops * pairs)}


def _bytes(precision: Precision, numbers: int, *, head: bool = False) -> float:
    """Of so many weights, with 16 bits for each scale and offset."""
    quantization: Quantization = "none" if precision == "bf16" else precision
    rounding = rounding_of(quantization, head=head)
    if rounding is None:
        return 2.0 * numbers
    factors = 2 if rounding.bits == 4 else 1
    return numbers * (rounding.bits / 8 + 2 * factors / rounding.group)


def measured(threads: int, seconds: float) -> Roofs:
    """Measure them. Raises BadOptions if there is no compiler."""
    try:
        compiler = find_compiler()
    except BuildFailed as error:
        raise BadOptions(str(error)) from None
    flags = ["-std=c++20", "-O3", "-pthread", *os.environ.get("AIOINFER_CXXFLAGS", "-march=native").split()]
    flags += [*choose_tiles().flags, f"-I{_KERNELS}"]
    with tempfile.TemporaryDirectory() as directory:
        program = str(Path(directory) / "roofs")
        made = subprocess.run(
            [*compiler, *flags, str(_SOURCE), "-o", program], capture_output=True, text=True
        )
        if made.returncode:
            raise BadOptions(f"the compiler failed: {made.stderr.strip()[:300]}")
        command = [program, str(threads), str(seconds)]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return Roofs(**json.loads(said))


def better(one: Roofs, other: Roofs) -> Roofs:
    """The higher roof of each kind."""
    pairs = zip(astuple(one), astuple(other), strict=True)
    return Roofs(*(max(pair) for pair in pairs))


def fill(attention: Attention) -> None:
    """Write all keys and values: memory that was never written is one page of zeros, which is in a cache."""
    assert isinstance(attention, NativeAttention)
    for cells in attention._cells:
        cells.fill_(0.5)


def shape_of(model: Path) -> Shape:
    """Raises BadOptions if it is not a dense decoder that is described like Qwen3 or Llama."""
    config: dict[str, Any] = json.loads((model / "config.json").read_text("utf-8"))
    if config.get("num_experts"):
        raise BadOptions("--roof counts what dense models compute, not mixtures of experts")
    try:
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        return Shape(
            config["architectures"][0],
            config["num_hidden_layers"],
            hidden,
            heads,
            config.get("num_key_value_heads", heads),
            config.get("head_dim") or hidden // heads,
            config["intermediate_size"],
            config["vocab_size"],
            bool(config.get("tie_word_embeddings")),
        )
    except KeyError as error:
        raise BadOptions(f"{model.name}: config.json has no {error}") from None


def batch_of(phase: Phase, vocab: int) -> Batch:
    """Rows over pages of their own, with random ids; the logits of the last token of each."""
    rows, tokens, pages = phase.rows, phase.tokens, -(-phase.positions // _PAGE)
    positions = torch.arange(phase.context, phase.positions).repeat(rows)
    table = 1 + torch.arange(rows * pages).view(rows, pages)
    owner = torch.arange(rows).repeat_interleave(tokens)
    ends = [0, *accumulate([tokens] * rows)]
    return Batch(
        input_ids=torch.randint(vocab, (rows * tokens,)),
        positions=positions,
        slot_mapping=table[owner, positions // _PAGE] * _PAGE + positions % _PAGE,
        cu_q=torch.tensor(ends),
        kv_len=torch.full((rows,), phase.positions),
        block_table=table,
        logits_rows=torch.tensor(ends[1:]) - 1,
        q_lens=[tokens] * rows,
        kv_lens=[phase.positions] * rows,
        num_decodes=rows if tokens == 1 else 0,
    )


def seconds_of(model: CausalLM, attention: Attention, batch: Batch) -> dict[str, float]:
    """By part, the median of several forwards."""
    model.forward(batch, attention)
    samples: list[dict[str, float]] = []
    end = time.perf_counter() + _SECONDS
    while len(samples) < _FORWARDS or time.perf_counter() < end:
        before = dict(model.seconds)
        model.forward(batch, attention)
        samples.append({part: total - before[part] for part, total in model.seconds.items()})
    return {part: statistics.median(sample[part] for sample in samples) for part in samples[0]}


def phases_of(options: argparse.Namespace, longest: int) -> list[Phase]:
    """Those that fit the model."""
    prompt, prefill = options.prompt_tokens, options.prefill_tokens
    phases = [Phase(f"decode {count}", count, 1, prompt) for count in options.concurrency]
    phases += [Phase(f"decode 1 at {context}", 1, 1, context) for context in options.contexts]
    if prefill:
        phases.append(Phase(f"prefill {prefill}", 1, prefill, 0))
        phases += [
            Phase(f"prefill {prefill} at {context}", 1, prefill, context) for context in options.contexts
        ]
    return [phase for phase in phases if phase.positions <= longest]


def measure_roofs(options: argparse.Namespace, model: Path, report: Report) -> None:
    """A row for each part of each phase, and one for the roofs."""
    shape, precision, cpu = shape_of(model), options.precision, torch.device("cpu")
    config = EngineConfig(model=str(model), device="cpu", dtype="bfloat16")
    torch.set_num_threads(options.threads)
    made = load_model(
        config.model_path,
        LoadOptions(
            dtype="bfloat16",
            device=cpu,
            kernels="native",
            quantization="none" if precision == "bf16" else precision,
        ),
    )
    spec = made.spec
    roofs, taken = measured(options.threads, 1.0), {}
    for phase in phases_of(options, spec.max_model_len):
        attention = make_attention(
            choose_attention(cpu, spec.head_dims, spec.dtype, "native"),
            spec.kv_layers,
            num_pages=phase.rows * -(-phase.positions // _PAGE),
            page_size=_PAGE,
            dtype=spec.dtype,
            device=cpu,
        )
        fill(attention)
        taken[phase] = seconds_of(made, attention, batch_of(phase, spec.vocab_size))
    # Others may have used the machine.
    roofs = better(roofs, measured(options.threads, 1.0))
    report.row(phase="roofs", gb_s=roofs.bytes / 1e9, **{
        f"{kind}_gflop_s": getattr(roofs, kind) / 1e9 for kind in ("bf16", "int8", "int4")
    })  # fmt: skip
    for phase, seconds in taken.items():
        for part, (size, operations) in needs(shape, precision, phase).items():
            by_memory = size / roofs.bytes
            by_products = operations / getattr(roofs, precision if part == "linear" else "bf16")
            report.row(
                phase=phase.name,
                part=part,
                ms=1e3 * seconds[part],
                roof_ms=1e3 * max(by_memory, by_products),
                bound="memory" if by_memory > by_products else "products",
                reached=max(by_memory, by_products) / seconds[part],
            )
        report.row(phase=phase.name, part="rest", ms=1e3 * seconds["rest"])
