"""M-RoPE: tokens with three positions are rotated as transformers rotates them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from aioinfer.errors import ConfigError
from tests.model.checkpoints import VOCAB
from tests.model.harness import attention_for, build_batch, load, require, row_states, state_pool
from tests.model.multimodal_models import edit_config, make_wrapper

NAMES = ["qwen3-vl", "qwen3-vl-moe", "qwen3.5-vl", "qwen3.5-vl-moe"]
_RNG = random.Random(3)
PROMPT = [_RNG.randrange(VOCAB) for _ in range(41)]
#: of time, height and width, in no order
THREE = torch.tensor([[_RNG.randrange(60) for _ in PROMPT] for _ in range(3)])


def logits(model: Any, kernels: Any, three: torch.Tensor | None, *, chunk: int) -> torch.Tensor:
    """Logits of the prompt, a chunk of it at a time."""
    attention = attention_for(model.spec, 12, 8, kernels)
    states, found = state_pool(model.spec, 2), []
    for start in range(0, len(PROMPT), chunk):
        ids = PROMPT[start : start + chunk]
        batch = build_batch(
            [(ids, start, range(3, 12))],
            8,
            num_decodes=0,
            logits_rows=range(len(ids)),
            states=row_states(states, [(2 if start else 0, 2)]),
        )
        batch.rotary = None if three is None else three[:, start : start + chunk]
        with torch.inference_mode():
            found.append(model.forward(batch, attention))
    return torch.cat(found)


@pytest.mark.parametrize("kernels", ["sdpa", "native"])
@pytest.mark.parametrize("name", NAMES)
def test_three_positions_give_the_logits_of_transformers(tmp_path: Path, name: str, kernels: Any) -> None:
    require(kernels)
    oracle = make_wrapper(name, tmp_path)
    with torch.inference_mode():
        states = oracle.model.language_model(torch.tensor([PROMPT]), position_ids=THREE[:, None])
        expected = oracle.lm_head(states.last_hidden_state[0])
    model = load(tmp_path, kernels=kernels)
    for chunk in (7, 64):
        torch.testing.assert_close(logits(model, kernels, THREE, chunk=chunk), expected, rtol=1e-3, atol=1e-3)
    plain = logits(model, kernels, None, chunk=64)
    assert not torch.allclose(plain, expected, rtol=1e-2, atol=1e-2)
    # A text's three positions are its one, to the bit.
    assert torch.equal(plain, logits(model, kernels, torch.arange(len(PROMPT)).expand(3, -1), chunk=64))


@pytest.mark.parametrize("sections", [[4, 2], [4, 2, 1], [4, -2, 6], "4, 2, 2", [4.0, 2, 2]])
def test_sections_that_do_not_fit_are_refused(tmp_path: Path, sections: object) -> None:
    make_wrapper("qwen3-vl", tmp_path)

    def change(stated: dict[str, Any]) -> None:
        stated["text_config"]["rope_parameters"]["mrope_section"] = sections

    edit_config(tmp_path, change)
    with pytest.raises(ConfigError, match="mrope_section must be three numbers that add up to 8"):
        load(tmp_path)
