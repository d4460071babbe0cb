"""Logits and greedy ids of ``CausalLM.forward`` against transformers, on batches built by hand."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from aioinfer.model.inspection import LoadOptions
from aioinfer.model.kernels import AttentionBackend
from aioinfer.model.loader import load_model
from aioinfer.model.norm import Norm
from aioinfer.model.operations.torch_operations import TorchOperations
from tests.model.checkpoints import FURTHER_IN_ENGINES, IN_ENGINES, RECURRENT, VOCAB
from tests.model.further_families import FURTHER
from tests.model.harness import Driver, attention_for, build_batch, require
from tests.model.kernels import kernels_or_skip
from tests.tiers import SLOW_MODEL, nightly, points

Checkpoint = Callable[[str], tuple[Path, Any]]
CPU = torch.device("cpu")
NEW = 10
KERNELS: list[AttentionBackend] = ["sdpa", "native"]
ROUNDED = ["llama-gqa-tied", "mistral-window", "qwen2", "qwen3", "gpt2-wide", "opt", "gpt-neox", "granite"]
ROUNDED += ["cohere2", "hunyuan", "ministral3"]
ROUNDED += ["gemma2", "gemma3", "gemma4-shared", "gemma4-keys", "olmo2", "olmo3", "glm4", "smollm3"]
#: of those with experts, rounding changes the choice
ROUNDED += [name for name in RECURRENT if "moe" not in name and name != "qwen3-next"]
BY_TRITON = ["qwen3", "mistral-window", "gemma2", "gemma3", "olmo3", "glm4", "smollm3", "gpt-oss"]
BY_TRITON += ["gemma4-shared", "qwen3-moe", "gemma4-experts", "cohere2", "hunyuan", "ministral3"]
ROUNDED_IN_ENGINES = [pair for pair in IN_ENGINES if pair[0] in ROUNDED]
FURTHER_ROUNDED = [
    (name, kernels)
    for name, kernels in FURTHER_IN_ENGINES
    # Of ERNIE transformers rotates in float32, as native kernels do, and torch's layers do not.
    if not any("experts" in field for field in FURTHER[name][1]) and (name, kernels) != ("ernie4.5", "sdpa")
]


def prompts(seed: int, lengths: tuple[int, ...] = (23, 1, 14, 40)) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(length)] for length in lengths]


@functools.cache
@torch.no_grad()
def generate(oracle: Any, prompt: tuple[int, ...], tokens: int) -> list[int]:
    """What transformers' own ``generate`` makes of a prompt, with its own cache. Other chunks, pages and
    kernels ask for the same."""
    ids = torch.tensor([prompt])
    full = oracle.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=tokens, pad_token_id=0
    )
    result: list[int] = full[0].tolist()
    return result


@torch.no_grad()
def oracle_logits(oracle: Any, ids: list[int]) -> torch.Tensor:
    logits: torch.Tensor = oracle(torch.tensor([ids]), use_cache=False).logits[0].float()
    return logits


@torch.no_grad()
def oracle_hidden(oracle: Any, ids: list[int]) -> torch.Tensor:
    hidden: torch.Tensor = oracle.base_model(torch.tensor([ids]), use_cache=False).last_hidden_state[0]
    return hidden


@pytest.mark.parametrize(
    ("family", "kernels"), points(IN_ENGINES[::2], [*IN_ENGINES[1::2], *FURTHER_IN_ENGINES])
)
def test_ids_equal_generate_and_every_logit_and_hidden_state_is_close(
    checkpoint: Checkpoint, family: str, kernels: AttentionBackend
) -> None:
    """Four sequences arrive one after the other, so that chunks and decodes share steps."""
    require(kernels)
    path, oracle = checkpoint(family)
    model = load_model(path, LoadOptions(dtype="float32", device=CPU, kernels=kernels))
    batch = prompts(7)
    driver = Driver(model, chunk=3, seed=3, kernels=kernels)
    sequences = driver.run(batch, NEW, gap=2, all_logits=True)
    for prompt, sequence in zip(batch, sequences, strict=True):
        assert sequence.ids == generate(oracle, tuple(prompt), NEW)
        for found, oracle_of, bound in (
            (sequence.logits, oracle_logits, 1e-4), (sequence.hidden, oracle_hidden, 2e-3),
        ):  # fmt: skip
            wanted = oracle_of(oracle, sequence.ids[:-1])
            got = torch.stack([found[position] for position in range(len(wanted))])
            assert got.dtype == torch.float32
            torch.testing.assert_close(got, wanted, rtol=bound, atol=bound * float(wanted.abs().max()))


@nightly(SLOW_MODEL)
@pytest.mark.parametrize("family", BY_TRITON)
def test_ids_of_kernels_in_triton_equal_transformers(checkpoint: Checkpoint, family: str) -> None:
    """Interpreted; compiled ones have tests/model/test_cuda.py."""
    kernels_or_skip("cpu")
    path, oracle = checkpoint(family)
    model = load_model(path, LoadOptions(dtype="float32", device=CPU, kernels="triton", experts="triton"))
    assert (model.spec.layer_kernels, model.spec.expert_kernels or "triton") == ("triton", "triton")
    batch = prompts(2, (11, 2, 17))
    for prompt, sequence in zip(
        batch, Driver(model, chunk=8, kernels="triton").run(batch, 3, gap=1), strict=True
    ):
        assert sequence.ids == generate(oracle, tuple(prompt), 3)


@pytest.mark.parametrize("kernels", KERNELS)
@torch.inference_mode()
def test_a_step_computes_what_its_rows_ask_for(checkpoint: Checkpoint, kernels: AttentionBackend) -> None:
    require(kernels)
    path, _ = checkpoint("qwen3")
    model = load_model(path, LoadOptions(dtype="float32", device=CPU, kernels=kernels))
    attention = attention_for(model.spec, 8, 8, kernels)
    rows = [([1, 2, 3], 0, [1]), ([4, 5], 0, [2])]

    def forward(logits_rows: list[int], hidden_rows: list[int] | None) -> tuple[torch.Tensor, Any]:
        batch = build_batch(rows, 8, num_decodes=0, logits_rows=logits_rows)
        if hidden_rows is not None:
            batch.hidden_rows = torch.tensor(hidden_rows, dtype=torch.int64)
        return model.forward(batch, attention), batch.hidden

    every, nothing = forward([0, 1, 2, 3, 4], None)
    logits, _ = forward([2, 4], None)
    assert nothing is None
    torch.testing.assert_close(logits, every[[2, 4]], rtol=1e-5, atol=1e-4)
    none, hidden = forward([], [4, 0, 2])
    assert none.shape == (0, model.spec.vocab_size)
    assert (hidden.shape, hidden.dtype) == ((3, model.spec.hidden_size), torch.float32)
    both, same = forward([2, 4], [4, 0, 2])
    assert torch.equal(both, logits)
    assert torch.equal(same, hidden)
    if kernels == "native":
        with pytest.raises(Exception, match="hidden_rows"):
            forward([], [5])


@pytest.mark.parametrize(
    ("family", "kernels"),
    points(ROUNDED_IN_ENGINES[::2], [*ROUNDED_IN_ENGINES[1::2], *FURTHER_ROUNDED]),
)
def test_bfloat16_is_as_close_as_rounding_allows(
    checkpoint: Checkpoint, family: str, kernels: AttentionBackend
) -> None:
    """No further from transformers in float32 than transformers in bfloat16 is, but for chance."""
    require(kernels)
    path, oracle = checkpoint(family)
    model = load_model(path, LoadOptions(dtype="bfloat16", device=CPU, kernels=kernels))
    oracle_bf16 = type(oracle).from_pretrained(path, dtype=torch.bfloat16).eval()
    batch = prompts(10)
    ours, rounding = 0.0, 0.0
    driver = Driver(model, chunk=8, kernels=kernels)
    for prompt, sequence in zip(batch, driver.run(batch, 1, gap=2, all_logits=True), strict=True):
        got = torch.stack([sequence.logits[position] for position in range(len(prompt))])
        theirs, exact = oracle_logits(oracle_bf16, prompt), oracle_logits(oracle, prompt)
        ours += float((got - exact).pow(2).sum())
        rounding += float((theirs - exact).pow(2).sum())
    assert ours < 1.15 * rounding


def test_the_norm_in_bfloat16_has_the_bits_of_transformers() -> None:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        norm = LlamaRMSNorm(192, 1e-6).to(dtype)
        norm.weight.data = (1 + 0.3 * torch.randn(192)).to(dtype)
        hidden = (3 * torch.randn(37, 192)).to(dtype)
        _, normed = TorchOperations().add_norm(hidden, None, Norm(norm.weight.detach(), 1e-6))
        assert torch.equal(normed, norm(hidden))
