"""Image encoders: features equal transformers' in float32, to the bit in every slicing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from aioinfer.errors import ConfigError
from tests.images.towers import TOWERS, features, oracle_features
from tests.model.harness import load, require
from tests.model.multimodal_models import edit_config, edit_tensors, is_vision, make_wrapper

#: relative to the largest feature
CLOSE = 1e-5


@pytest.fixture(params=["sdpa", "native"])
def kernels(request: pytest.FixtureRequest) -> str:
    require(request.param)
    return str(request.param)


def units(name: str, seed: int = 5) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    case, rng = TOWERS[name], np.random.default_rng(seed)
    return [case.make(size, rng) for size in case.sizes]


@pytest.mark.parametrize("name", TOWERS)
def test_features_equal_those_of_transformers(tmp_path: Path, name: str, kernels: str) -> None:
    oracle = make_wrapper(name, tmp_path)
    model = load(tmp_path, kernels=kernels)
    support, hidden = model.encoder.support, model.spec.hidden_size
    assert model.spec.images is support
    for pixels, arguments in units(name):
        expected = oracle_features(oracle, arguments)
        found = features(model.encoder, pixels)
        assert found.shape == expected.shape
        assert len(found) * hidden * 4 == support.position_bytes
        assert (found - expected).abs().max() <= CLOSE * expected.abs().max()


@pytest.mark.parametrize("name", TOWERS)
def test_a_unit_has_the_same_bits_in_any_slices_and_among_any_others(
    tmp_path: Path, name: str, kernels: str
) -> None:
    make_wrapper(name, tmp_path)
    encoder = load(tmp_path, kernels=kernels, dtype="bfloat16").encoder
    all_units = [pixels for pixels, _ in units(name)]
    expected = [features(encoder, pixels) for pixels in all_units]
    assert all(each.dtype == torch.bfloat16 for each in expected)
    # Layer by layer in turns.
    with torch.no_grad():
        states = [encoder.begin(pixels) for pixels in reversed(all_units)]
        for index in range(encoder.depth):
            states = [encoder.layer(index, state) for state in states]
        found = [encoder.end(state) for state in states]
    for one, other in zip(expected, reversed(found), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", TOWERS)
def test_the_parameters_of_the_encoder_count(tmp_path: Path, name: str) -> None:
    oracle = make_wrapper(name, tmp_path)
    spec = load(tmp_path, kernels="sdpa").spec
    blind = load(tmp_path, kernels="sdpa", images=False)
    count = sum(each.numel() for key, each in oracle.named_parameters() if is_vision(key))
    assert spec.num_parameters == blind.spec.num_parameters + count
    assert spec.part == f"text and images of {oracle.config.architectures[0]}"
    assert blind.encoder is None
    assert blind.spec.images is None
    assert blind.spec.part.startswith("text part of ")


@pytest.mark.parametrize("name", TOWERS)
def test_random_weights_make_an_encoder_too(tmp_path: Path, name: str, kernels: str) -> None:
    make_wrapper(name, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    encoder = load(tmp_path, kernels=kernels, load_format="random").encoder
    for pixels, _ in units(name):
        assert features(encoder, pixels).isfinite().all()


def a_tensor(path: Path, change: Callable[[torch.Tensor], torch.Tensor | None]) -> str:
    """Change a tensor in the middle of an encoder, or remove it; returns its name in the files, without
    "model."."""
    changed = ""

    def edit(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        nonlocal changed
        inside = sorted(name for name in tensors if is_vision(name))
        changed = inside[len(inside) // 2]
        new = change(tensors.pop(changed))
        return tensors if new is None else {**tensors, changed: new}

    edit_tensors(path, edit)
    return changed.removeprefix("model.")


@pytest.mark.parametrize("name", TOWERS)
def test_a_damaged_encoder_is_named(tmp_path: Path, name: str) -> None:
    make_wrapper(name, tmp_path)
    found = a_tensor(tmp_path, lambda tensor: tensor[..., :-1])
    with pytest.raises(ConfigError, match=rf"{found} is shaped .*, the config says"):
        load(tmp_path, kernels="sdpa")
    found = a_tensor(tmp_path, lambda tensor: None)
    with pytest.raises(ConfigError, match=f"the checkpoint has no tensor {found}"):
        load(tmp_path, kernels="sdpa")
    assert load(tmp_path, kernels="sdpa", images=False).encoder is None


@pytest.mark.parametrize("name", TOWERS)
def test_an_unknown_tensor_of_an_encoder_is_refused(tmp_path: Path, name: str) -> None:
    make_wrapper(name, tmp_path)
    found = a_tensor(tmp_path, lambda tensor: tensor)
    edit_tensors(tmp_path, lambda tensors: {**tensors, f"{found}er": torch.ones(3, 3)})
    with pytest.raises(ConfigError, match=f"1 unexpected tensors, first {found}er"):
        load(tmp_path, kernels="sdpa")


def test_an_encoder_that_is_not_supported_leaves_the_text(tmp_path: Path) -> None:
    make_wrapper("smolvlm", tmp_path)
    edit_config(tmp_path, lambda stated: stated["vision_config"].update(hidden_act="relu"))
    model = load(tmp_path, kernels="sdpa")
    assert model.encoder is None
    assert model.spec.part.startswith("text part of SmolVLM")


def test_transformers_code_reads_no_images(tmp_path: Path) -> None:
    make_wrapper("smolvlm", tmp_path)
    model = load(tmp_path, force_transformers=True)
    assert model.encoder is None
    assert model.spec.images is None
