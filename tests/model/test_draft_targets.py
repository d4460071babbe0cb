"""What a draft head shares with a model: the vectors of tokens, and the head."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.model.checkpoints import FAMILIES, make_model
from tests.model.harness import load, require


@pytest.mark.native
@pytest.mark.parametrize("family", ["qwen3-blocks", "gemma2", "granite", "cohere2", "opt", "gpt2-wide"])
def test_native_models_share_what_models_of_torch_do(family: str, tmp_path: Path) -> None:
    """Vectors of tokens have one scale and no positions, logits another scale, and a cap."""
    require("native")
    prefix, shape = FAMILIES[family]
    make_model(prefix, shape, tmp_path, seed=0)
    native, plain = (load(tmp_path, kernels=kernels) for kernels in ("native", "sdpa"))
    ids = torch.arange(0, plain.spec.vocab_size, 7)
    assert torch.equal(native.embed(ids), plain.embed(ids))
    normed = torch.randn(5, plain.spec.hidden_size, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(native.to_logits(normed), plain.to_logits(normed), atol=1e-4, rtol=1e-4)
