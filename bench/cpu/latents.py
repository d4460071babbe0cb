"""``python -m bench cpu --latents``: attention of decodes over latents, beside the roofs of this machine.

A layer of random weights, of a shape that people run, decodes at two contexts; what the longer one takes more
is attention over latents alone. Its roofs are the time to read these once at the rate at which all threads
read memory, and the time of its products at the rate of a large product of the same type. ``decode`` is the
whole step at a context: its roof is the time to read weights and latents.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from aioinfer.model.attention.native_attention import NativeAttention
from aioinfer.model.attention.pool import KVPool
from aioinfer.model.batch import Batch
from aioinfer.model.inspection import LoadOptions
from aioinfer.model.kernels import choose_attention, make_attention
from aioinfer.model.loader import load_model
from aioinfer.model.native_linear import NativeLinear
from aioinfer.native.bindings import shared_thread_pool
from bench.report import Report

__all__ = ["SHAPES", "measure_latents"]

#: heads, elements of a head that are not rotated, that are, and of its values; rank of the latent
SHAPES = {
    "glm-4.7-flash": (20, 192, 64, 256, 512),
    "deepseek-v2-lite": (16, 128, 64, 128, 512),
    "minicpm3": (40, 64, 32, 64, 256),
    "deepseek-v3": (128, 128, 64, 128, 512),
}
_PAGE, _SHORT = 16, 1024


def measure_latents(rounds: int, threads: int, report: Report) -> None:
    """A row for each shape, number of sequences and context: ``of_reading`` and ``of_roof`` are the shares of
    the time that reading takes, and of the longer of the two roofs, in that of attention."""
    torch.set_num_threads(threads)
    reading, rate = _reading(rounds), _products(rounds, threads)
    report.fact("reading", f"{reading / 1e9:.1f} GB/s")
    report.fact("products", f"{rate / 1e9:.0f} GFLOP/s")
    for name, (heads, plain, rotated, value_dim, rank) in SHAPES.items():
        model = _model(heads, plain, rotated, value_dim, rank)
        for rows, context in ((1, 32768), (1, 131072), (4, 32768)):
            short, long = _decode(model, rows, _SHORT, rounds), _decode(model, rows, context, rounds)
            positions = rows * (context - _SHORT)
            read = positions * KVPool.bytes_per_page(model.spec.kv_layers, 1, torch.bfloat16) / reading
            products = positions * 2 * heads * (2 * rank + rotated) / rate
            report.row(
                shape=name,
                sequences=rows,
                context=context,
                ms=1e3 * (long - short),
                of_reading=read / (long - short),
                of_roof=max(read, products) / (long - short),
            )

    _measure_steps(rounds, reading, report)


def _measure_steps(rounds: int, reading: float, report: Report) -> None:
    """A row for each context: a whole step of a layer with the sizes of GLM-4.7-Flash, and a dense part of
    what a token's experts have together."""
    model = _model(*SHAPES["glm-4.7-flash"], hidden_size=2048, q_lora_rank=768, intermediate_size=5 * 1536)
    weights = 2 * (model.spec.num_parameters - 2 * 256 * 2048)
    for context in (1024, 8192, 32768, 131072):
        seconds = _decode(model, 1, context, rounds)
        read = weights + context * KVPool.bytes_per_page(model.spec.kv_layers, 1, torch.bfloat16)
        of_reading = read / reading / seconds
        report.row(shape="decode", sequences=1, context=context, ms=1e3 * seconds, of_reading=of_reading)


def _model(heads: int, plain: int, rotated: int, value_dim: int, rank: int, **sizes: int) -> Any:
    config = {
        "architectures": ["YoutuForCausalLM"], "model_type": "youtu", "hidden_size": 256, "vocab_size": 256,
        "num_attention_heads": heads, "num_key_value_heads": heads, "num_hidden_layers": 1, "q_lora_rank": 64,
        "qk_nope_head_dim": plain, "qk_rope_head_dim": rotated, "v_head_dim": value_dim, "kv_lora_rank": rank,
        "intermediate_size": 256, "max_position_embeddings": 131072, "tie_word_embeddings": False,
        **dict.fromkeys(("eos_token_id", "bos_token_id", "pad_token_id")), **sizes,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        options = LoadOptions(
            dtype="bfloat16", device=torch.device("cpu"), kernels="native", load_format="random"
        )
        return load_model(Path(folder), options)


def _decode(model: Any, rows: int, context: int, rounds: int) -> float:
    """Seconds of a decode of so many sequences."""
    pages = rows * context // _PAGE
    backend = choose_attention(torch.device("cpu"), model.spec.head_dims, torch.bfloat16, "native")
    attention = make_attention(
        backend,
        model.spec.kv_layers,
        num_pages=pages,
        page_size=_PAGE,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )
    assert isinstance(attention, NativeAttention)
    for cells in attention.page_tensors:
        cells.normal_()
    table = (1 + torch.arange(pages)).view(rows, -1)
    at = torch.full((rows,), context - 1)
    batch = Batch(
        input_ids=torch.zeros(rows, dtype=torch.int64),
        positions=at,
        slot_mapping=table[:, -1] * _PAGE + _PAGE - 1,
        cu_q=torch.arange(rows + 1),
        kv_len=at + 1,
        block_table=table,
        q_lens=[1] * rows,
        kv_lens=[context] * rows,
        num_decodes=rows,
        logits_rows=torch.zeros(0, dtype=torch.int64),
    )
    return _seconds(lambda: model.forward(batch, attention), rounds)


def _reading(rounds: int) -> float:
    """Bytes per second of a sum over memory."""
    memory = torch.ones(1 << 27)
    return memory.nbytes / _seconds(memory.sum, rounds)


def _products(rounds: int, threads: int) -> float:
    """Floating point operations per second of a product of bfloat16."""
    size, rows = 1024, 512
    layer = NativeLinear(shared_thread_pool(threads), torch.randn(size, size).bfloat16(), None)
    values = torch.randn(rows, size).bfloat16()
    return 2 * rows * size * size / _seconds(lambda: layer(values), 10 * rounds)


def _seconds(call: Callable[[], object], rounds: int) -> float:
    call()
    taken = []
    for _ in range(rounds):
        begin = time.perf_counter()
        call()
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken)
