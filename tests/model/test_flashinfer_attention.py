"""Attention with FlashInfer for prefill rows, on a stand-in that checks what it is given."""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from aioinfer.config import EngineConfig
from aioinfer.errors import ConfigError
from aioinfer.execution.graphs import graphs_unsupported
from aioinfer.llm import LLM
from aioinfer.model.attention.base import AttentionParams
from aioinfer.model.attention.pool import KVShape
from aioinfer.model.backend import Backend
from aioinfer.model.kernels import choose_attention, choose_layers, make_attention
from aioinfer.params import SamplingParams
from bench.gpu.roofline import Shape
from bench.gpu.shapes import write_model
from tests.model import fake_flashinfer
from tests.model.fake_flashinfer import BatchPrefillWithPagedKVCacheWrapper
from tests.model.kernels import TOLERANCE, Problem, Setup, kernels_or_skip
from tests.tiers import INTERPRETER, SLOW_MODEL, nightly

CPU = torch.device("cpu")
MADE = BatchPrefillWithPagedKVCacheWrapper.made


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    kernels_or_skip("cpu")
    module = fake_flashinfer.module()
    module.__spec__ = importlib.machinery.ModuleSpec("flashinfer", None)
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    MADE.clear()
    yield
    MADE.clear()


def setup(rows: list[tuple[int, int]], num_decodes: int, seed: int = 0) -> Setup:
    task = Problem.make(rows, heads=4, kv_heads=2, head_dim=64, page_size=16, dtype=torch.bfloat16, seed=seed)
    return Setup(task, num_decodes)


def attention_of(step: Setup) -> Any:
    from aioinfer.model.attention.flashinfer_attention import FlashInferAttention

    return FlashInferAttention(step.pool())


@nightly(INTERPRETER)
@pytest.mark.parametrize("params", [AttentionParams(0.2), AttentionParams(0.2, window=9, soft_cap=2.0)])
def test_prefill_rows_are_planned_once_a_step(flashinfer: None, params: AttentionParams) -> None:
    step = setup([(1, 40), (1, 3), (9, 9), (20, 45), (1, 32)], 2)
    attention, batch, task = attention_of(step), step.batch(), step.task
    expected = task.expected(0.2, window=params.window, soft_cap=params.soft_cap)
    for _ in range(3):
        got = attention(1, task.q, step.k, step.v, batch, params)
        bound = TOLERANCE[torch.bfloat16]
        torch.testing.assert_close(got.double(), expected, rtol=bound, atol=bound)
    (wrapper,) = MADE
    assert (wrapper.plans, wrapper.runs) == (1, 3)
    attention(1, task.q, step.k, step.v, batch, AttentionParams(0.3))
    assert [each.plans for each in MADE] == [1, 1], "other constants have a plan of their own"


@nightly(INTERPRETER)
def test_a_plan_is_not_made_anew_while_steps_in_flight_may_read_it(flashinfer: None) -> None:
    step = setup([(5, 20)], 0)
    attention, task = attention_of(step), step.task
    for _ in range(6):
        attention(1, task.q, step.k, step.v, step.batch(), AttentionParams(0.2))
    assert [each.plans for each in MADE] == [2, 2, 1, 1]


@nightly(INTERPRETER)
@pytest.mark.parametrize("case", ["blocks", "sinks", "captured", "decodes"])
def test_what_flashinfer_does_not_compute_is_tritons(flashinfer: None, case: str) -> None:
    step = setup([(1, 20), (1, 7)] if case == "decodes" else [(8, 24), (8, 8)], 2 * (case == "decodes"))
    task, batch = step.task, step.batch()
    params = AttentionParams(0.2, block=8 if case == "blocks" else 1)
    sinks = torch.linspace(-3, 3, 4) if case == "sinks" else None
    if case == "captured":
        batch.kv_lens = []
    got = attention_of(step)(1, task.q, step.k, step.v, batch, params, sinks)
    bound = TOLERANCE[torch.bfloat16]
    expected = task.expected(0.2, block=params.block, sinks=sinks)
    torch.testing.assert_close(got.double(), expected, rtol=bound, atol=bound)
    assert not MADE


def test_it_is_chosen_for_the_asking_alone(flashinfer: None, monkeypatch: pytest.MonkeyPatch) -> None:
    bf16 = torch.bfloat16
    chosen = choose_attention(CPU, {64, 128}, bf16, "flashinfer")
    assert chosen == Backend("flashinfer", "asked for")
    assert choose_layers(chosen, [24]).name == "triton"
    assert graphs_unsupported(torch.device("cuda"), "flashinfer", True) is None
    for head_dims, dtype, reason in (
        ({80}, bf16, "heads of size 80"),
        ({64}, torch.float32, "no kernels for float32"),
    ):
        with pytest.raises(ConfigError, match=reason):
            choose_attention(CPU, head_dims, dtype, "flashinfer")
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(
        ConfigError, match=r"^attention_backend: flashinfer was asked for, and .*not installed"
    ):
        choose_attention(CPU, {64}, bf16, "flashinfer")


def test_captured_steps_leave_it_the_longer_chunks() -> None:
    """What is captured is Triton's."""
    for settings, tokens in (
        ({}, 256),
        ({"max_step_tokens": 100}, 100),
        ({"prefill_graph_tokens": 1024}, 1024),
        ({"attention_backend": "auto"}, 2048),
    ):
        config = EngineConfig(**{"attention_backend": "flashinfer", **settings})  # type: ignore[arg-type]
        assert config.graph_tokens == tokens


def test_the_backend_makes_it(flashinfer: None) -> None:
    from aioinfer.model.attention.flashinfer_attention import FlashInferAttention

    sizes: dict[str, Any] = {"num_pages": 2, "page_size": 16, "dtype": torch.bfloat16, "device": CPU}
    made = make_attention(Backend("flashinfer", "asked for"), [KVShape(2, 64)], **sizes)
    assert isinstance(made, FlashInferAttention)


@nightly(SLOW_MODEL)
def test_an_engine_runs_on_it(flashinfer: None, tmp_path: Path) -> None:
    """What it computes for prompts in chunks is what Triton's kernels do, as far as bfloat16 goes."""
    path = write_model(Shape("heads-of-64", 2, 64, 4, 2, 64, 128, 300, True), tmp_path)
    options: dict[str, Any] = {
        "model": str(path), "load_format": "random", "dtype": "bfloat16", "device": "cpu", "num_pages": 32,
        "chunk_size": 7, "threads": 1,
    }  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, prompt_logprobs=1)
    found = []
    for backend in ("triton", "flashinfer"):
        with LLM(EngineConfig(**options, attention_backend=backend)) as llm:
            results = llm.generate([[5, 4, 3, 2, 1] * 4, [9, 10], [7, 8]], params)
        assert [len(each.token_ids) for each in results] == [3, 3, 3]
        found.append([entry.logprob for each in results for entry in each.prompt_logprobs or [] if entry])
    assert len(found[0]) == 21
    assert found[1] == pytest.approx(found[0], abs=0.05)
    assert sum(each.plans for each in MADE) >= 3


def test_what_adds_in_another_order_is_not_deterministic(flashinfer: None, tmp_path: Path) -> None:
    path = write_model(Shape("heads-of-64", 1, 64, 4, 2, 64, 128, 300, True), tmp_path)
    config = EngineConfig(
        model=str(path), load_format="random", dtype="bfloat16", device="cpu", num_pages=32,
        attention_backend="flashinfer", deterministic=True,
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"^deterministic: .*flashinfer kernels"), LLM(config):
        pass
