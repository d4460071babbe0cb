"""Hidden states, of every family and with every kind of kernels: those of transformers, and no more than are
asked for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from aioinfer.config import EngineConfig
from aioinfer.llm import LLM
from aioinfer.model.inspection import LoadOptions
from aioinfer.model.kernels import AttentionBackend
from aioinfer.model.loader import load_model
from tests.model.checkpoints import IN_ENGINES
from tests.model.harness import attention_for, build_batch, require
from tests.model.test_oracle import prompts
from tests.tiers import points

Checkpoints = Callable[[str], tuple[Path, Any]]
CPU = torch.device("cpu")
#: of which the whole is no multiple of a chunk
CHUNK = 6


@pytest.mark.parametrize(("family", "kernels"), points(IN_ENGINES[::2], IN_ENGINES[1::2]))
def test_hidden_states_are_those_of_transformers(
    checkpoint: Checkpoints, family: str, kernels: AttentionBackend
) -> None:
    require(kernels)
    path, oracle = checkpoint(family)
    config = EngineConfig(
        model=str(path), dtype="float32", page_size=8, num_pages=64, chunk_size=CHUNK, threads=1,
        attention_backend=kernels,
    )  # fmt: skip
    batch = prompts(2, 7)
    with LLM(config) as llm:
        found = llm.embed(batch, pooling="tokens", normalize=False)
        last = llm.embed(batch, pooling="last", normalize=False)
    for ids, each, one in zip(batch, found, last, strict=True):
        with torch.no_grad():
            wanted = oracle.base_model(torch.tensor([ids])).last_hidden_state[0].numpy()
        assert each.vector.shape == wanted.shape
        assert np.abs(each.vector - wanted).max() <= 2e-3 * np.abs(wanted).max()
        assert np.abs(one.vector - wanted[-1]).max() <= 2e-3 * np.abs(wanted).max()


@pytest.mark.parametrize("kernels", ["native", "sdpa"])
@torch.inference_mode()
def test_a_step_computes_what_its_rows_ask_for(checkpoint: Checkpoints, kernels: Any) -> None:
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

    logits, nothing = forward([2, 4], None)
    assert nothing is None
    none, hidden = forward([], [4, 0, 2])
    assert none.shape == (0, model.spec.vocab_size)
    assert (hidden.shape, hidden.dtype) == ((3, model.spec.hidden_size), torch.float32)
    both, same = forward([2, 4], [4, 0, 2])
    assert torch.equal(both, logits)
    assert torch.equal(same, hidden)
    if kernels == "native":
        with pytest.raises(Exception, match="hidden_rows"):
            forward([], [5])
