"""``python -m bench kernels``: linear layers on a CPU, by shape, format of weights and number of rows.

    python -m bench kernels
    python -m bench kernels --shapes 1024x3072 --rows 1 4 16 --formats bf16 int4-64 --threads 1

A shape is the inner dimension and the outputs. Each call reads another copy of the weights, from memory:
"gb_s" counts their bytes and is what few rows are bound by; "gflop_s" counts two operations a product and is
what many rows are bound by. An int8 layer has a scale for each output, or for groups of so many numbers, as
int4 layers have; models are rounded to int8-128 and int4-64. Times are medians of calls, rounding of
activations included.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Literal

import torch

from aioinfer.model.native_linear import NativeLinear
from aioinfer.model.quantization import Rounding
from aioinfer.native.bindings import ThreadPool, native_unsupported, shared_thread_pool
from bench.command import BadOptions
from bench.report import Report

__all__ = ["add_arguments", "run"]

_SHAPES = ["1024x3072", "3072x1024", "576x1536", "2048x6144", "1024x151936"]
_FORMATS = ["bf16", "int8", "int8-128", "int4-32", "int4-64", "int4-128"]
#: results of this many elements and more would take seconds and gigabytes
_MOST_RESULTS = 16 << 20

#: (address of the values, their rows, address of the results)
_Apply = Callable[[int, int, int], None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shapes", nargs="+", default=_SHAPES, metavar="INNERxOUTPUTS")
    parser.add_argument("--formats", nargs="+", choices=_FORMATS, default=_FORMATS, metavar="FORMAT",
                        help=f"of weights: {', '.join(_FORMATS)}")  # fmt: skip
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 1024])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--cold-mib", type=int, default=128, help="copies of the weights take so much, at least"
    )
    parser.add_argument("--seconds", type=float, default=0.3, help="time to measure each row of the table")


def make(pool: ThreadPool, weight: torch.Tensor, kind: str) -> tuple[_Apply, float]:
    """A layer over bfloat16 rows, and the bytes of its weights."""
    if kind == "bf16":
        return NativeLinear(pool, weight, None).packed.apply, 2.0 * weight.numel()
    name, _, text = kind.partition("-")
    bits: Literal[4, 8] = 4 if name == "int4" else 8
    inner = weight.shape[1]
    group = int(text or 0) or -(-inner // 64) * 64
    groups = -(-inner // group)
    # A group has a scale, and with 4 bits an offset, of 16 bits each; a single one, of 32 bits.
    factors = groups * (32 if groups == 1 else 16) * (2 if bits == 4 else 1)
    apply = NativeLinear(pool, weight, None, Rounding(bits, int(text or 0))).packed.apply
    return apply, len(weight) * (groups * group * bits + factors) / 8


def measure(layers: list[_Apply], rows: int, inner: int, outputs: int, seconds: float) -> float:
    """Seconds of a call, the median over ``seconds``, layers in turns."""
    values, out = torch.randn(rows, inner).bfloat16(), torch.empty(rows, outputs, dtype=torch.bfloat16)
    samples: list[float] = []
    end = time.perf_counter() + seconds
    while len(samples) < 5 or time.perf_counter() < end:
        layer = layers[len(samples) % len(layers)]
        before = time.perf_counter()
        layer(values.data_ptr(), rows, out.data_ptr())
        samples.append(time.perf_counter() - before)
    return statistics.median(samples[2:])


def parsed(shape: str) -> tuple[int, int]:
    """Inner dimension and outputs. Raises BadOptions."""
    inner, _, outputs = shape.partition("x")
    if not (inner.isdecimal() and outputs.isdecimal() and int(inner) % 16 == 0 < int(inner) * int(outputs)):
        raise BadOptions(f"a shape is INNERxOUTPUTS, an inner dimension that 16 divides, not {shape}")
    return int(inner), int(outputs)


def run(options: argparse.Namespace, report: Report) -> None:
    """A row per shape, number of rows and format."""
    shapes = [parsed(shape) for shape in options.shapes]
    why = native_unsupported()
    if why is not None:
        raise BadOptions(f"there are no native kernels: {why}")
    pool = shared_thread_pool(options.threads)
    for shape, (inner, outputs) in zip(options.shapes, shapes, strict=True):
        weight = (torch.randn(outputs, inner) * 0.03).bfloat16()
        for kind in options.formats:
            first, size = make(pool, weight, kind)
            copies = max(1, round(options.cold_mib * 2**20 / size))
            layers = [first, *(make(pool, weight, kind)[0] for _ in range(copies - 1))]
            for rows in options.rows:
                if rows * outputs >= _MOST_RESULTS:
                    report.note(f"{shape}, {rows} rows: left out, too many results")
                    continue
                seconds = measure(layers, rows, inner, outputs, options.seconds)
                report.row(
                    shape=shape,
                    format=kind,
                    rows=rows,
                    us=1e6 * seconds,
                    gb_s=size / seconds / 1e9,
                    gflop_s=2.0 * rows * weight.numel() / seconds / 1e9,
                )
