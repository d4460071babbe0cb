"""Other weights in place of those of a loaded model: the bits of a model that was loaded with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from aioinfer.model.loader import load_model
from aioinfer.model.updates.recipe import NewTensors, prepare_update
from tests.model.block_models import block_config, write_checkpoint
from tests.model.checkpoints import FAMILIES, IN_ENGINES, RECURRENT, make_model
from tests.model.harness import attention_for, build_batch, require, row_states, state_pool
from tests.tiers import grid

CPU = torch.device("cpu")
#: one of each way in which tensors become parts of a model
KINDS = [
    *(
        "llama-gqa-tied",
        "llama-biases",
        "qwen3-wide-untied",
        "qwen3-moe-mixed",
        "mixtral",
        "gpt2-wide",
        "glm4",
    ),
    *("gpt-oss", "gemma2", "gemma4-shared", "gemma4-keys", "gemma4-experts"),
    *("lfm2-biases", "lfm2-moe", "qwen3.5", "qwen3.5-moe"),
]
OTHERS = [kind for kind in {**FAMILIES, **RECURRENT} if kind not in KINDS]


def go_on() -> None:
    """Nobody wants to end it."""


def load(path: Path, kernels: str = "native", **options: Any) -> Any:
    options = {"dtype": "float32", "block_size": 4 if "llada2" in path.name else None, **options}
    return load_model(path, device=CPU, kernels=kernels, **options)


def write(kind: str, path: Path, seed: int) -> Path:
    """A checkpoint of a family. Neighbouring seeds have nothing in common but their shapes."""
    if kind == "llada2":
        write_checkpoint(path, block_config(), seed=seed)
    else:
        make_model(*{**FAMILIES, **RECURRENT}[kind], path, seed=seed)
    return path


@pytest.fixture
def pair(tmp_path: Path) -> Callable[[str], tuple[Path, Path]]:
    """Writes two checkpoints of one family."""

    def written(kind: str) -> tuple[Path, Path]:
        return write(kind, tmp_path / f"{kind}-one", 1), write(kind, tmp_path / f"{kind}-two", 2)

    return written


def items(path: Path) -> list[tuple[object, object]]:
    return [*load_file(path / "model.safetensors").items()]


def update(model: Any, given: NewTensors) -> None:
    prepare_update(model, given, go_on).install()


@torch.inference_mode()
def logits(model: Any, kernels: str = "native") -> torch.Tensor:
    ids = [(7 * i + 3) % 100 for i in range(40)]
    states = row_states(state_pool(model.spec, 1), [(0, 1)])
    batch = build_batch([(ids, 0, [1, 2, 3])], 16, num_decodes=0, logits_rows=range(40), states=states)
    found: torch.Tensor = model.forward(batch, attention_for(model.spec, 5, 16, kernels))
    return found


def kernels_of(kind: str) -> Iterator[str]:
    return (kernels for name, kernels in IN_ENGINES if name == kind)


@pytest.mark.parametrize("kind", grid(KINDS, OTHERS))
def test_an_updated_model_has_the_bits_of_one_that_was_loaded_anew(
    pair: Callable[[str], tuple[Path, Path]], kind: str
) -> None:
    """Every family, on torch's kernels and, where these can, on native ones; from a directory and from
    memory."""
    one, two = pair(kind)
    for kernels in kernels_of(kind):
        require(kernels)
        expected = logits(load(two, kernels), kernels)
        model = load(one, kernels)
        before = logits(model, kernels)
        assert not torch.equal(before, expected)
        update(model, two)
        assert torch.equal(logits(model, kernels), expected)
        own = bool(model.spec.layer_kernels)
        update(model, items(one) if own else [*load(one, kernels).state().items()])
        assert torch.equal(logits(model, kernels), before)
