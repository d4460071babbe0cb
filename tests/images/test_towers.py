"""Image encoders: features equal transformers' in float32, to the bit in every slicing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from aioinfer.cli.doctor import examine
from aioinfer.config import EngineConfig
from aioinfer.errors import ConfigError
from aioinfer.execution.torch_device import TorchDevice
from aioinfer.model.updates.recipe import prepare_update
from tests.checkpoint.test_formats import FORMATS
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
def test_the_memory_of_the_encoder_is_claimed(tmp_path: Path, name: str) -> None:
    oracle, sizes = make_wrapper(name, tmp_path), list[int]()
    for images in (True, False):
        load(tmp_path, None, sizes.append, kernels="sdpa", images=images)
    count = sum(each.numel() for key, each in oracle.named_parameters() if is_vision(key))
    with_images, without = sizes
    assert with_images - without == 4 * count


def test_packed_weights_of_the_encoder_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require("native")
    monkeypatch.setenv("AIOINFER_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "model"
    make_wrapper("smolvlm", path)
    expected = load(path, kernels="native").encoder
    for mapped in (False, True):
        model = load(path, kernels="native", cache_weights=True)
        assert ("were cached" in model.spec.layer_reason) != mapped
        for pixels, _ in units("smolvlm"):
            assert torch.equal(features(model.encoder, pixels), features(expected, pixels))


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


# -- other weights ------------------------------------------------------------------------------------


def other(name: str, path: Path) -> Path:
    """A checkpoint of the same shapes, all of whose tensors are other ones."""
    make_wrapper(name, path)
    edit_tensors(path, lambda tensors: {key: each * 0.75 for key, each in tensors.items()})
    return path


def update(model: Any, given: Any) -> None:
    prepare_update(model, given, lambda: None).install()


@pytest.mark.parametrize("name", TOWERS)
def test_an_updated_encoder_has_the_bits_of_one_that_was_loaded_anew(
    tmp_path: Path, name: str, kernels: str
) -> None:
    """From a directory, from a file, and from memory: all tensors, and some."""
    one, two = tmp_path / "one", other(name, tmp_path / "two")
    make_wrapper(name, one)
    model, all_units = load(one, kernels=kernels), [pixels for pixels, _ in units(name)]

    def found() -> list[torch.Tensor]:
        return [features(model.encoder, pixels) for pixels in all_units]

    def equal(results: list[torch.Tensor]) -> bool:
        return all(torch.equal(a, b) for a, b in zip(found(), results, strict=True))

    before, fresh = found(), load(two, kernels=kernels).encoder
    after = [features(fresh, pixels) for pixels in all_units]
    assert not equal(after)
    update(model, two)
    assert equal(after)
    update(model, one / "model.safetensors")
    assert equal(before)
    tensors = load_file(two / "model.safetensors")
    update(model, [*tensors.items()])
    assert equal(after)
    update(model, one)
    # The text alone, then the encoder in two parts.
    text, half = [], []
    for key in sorted(tensors):
        (half if is_vision(key) and ("norm" in key or "embed" in key) else text).append(key)
    vision = [key for key in text if is_vision(key)]
    update(model, [(key, tensors[key]) for key in text if key not in vision])
    assert equal(before)
    update(model, [(key, tensors[key]) for key in vision])
    assert not equal(after)
    update(model, [(key, tensors[key]) for key in half])
    assert equal(after)


def test_a_wrong_update_of_an_encoder_changes_nothing(tmp_path: Path, kernels: str) -> None:
    make_wrapper("smolvlm", tmp_path / "one")
    model, (pixels, _) = load(tmp_path / "one", kernels=kernels), units("smolvlm")[0]
    before = features(model.encoder, pixels)
    right = load_file(other("smolvlm", tmp_path / "two") / "model.safetensors")
    name = "model.vision_model.encoder.layers.1.mlp.fc1.weight"
    for wrong in ({name: right[name][:-1]}, {name: right[name] * torch.nan}, {f"{name}er": right[name]}):
        with pytest.raises(ConfigError, match=r"weights: .*vision_model\.encoder\.layers\.1\.mlp\.fc1"):
            update(model, [*{**right, **wrong}.items()])
        assert torch.equal(features(model.encoder, pixels), before)


# -- what is not read ---------------------------------------------------------------------------------


def test_an_encoder_that_is_not_supported_leaves_the_text(tmp_path: Path) -> None:
    make_wrapper("smolvlm", tmp_path)
    edit_config(tmp_path, lambda stated: stated["vision_config"].update(hidden_act="relu"))
    model = load(tmp_path, kernels="sdpa")
    assert model.encoder is None
    assert model.spec.part.startswith("text part of SmolVLM")
    assert "are not read: SmolVLMForConditionalGeneration has the activation relu" in str(said(tmp_path))


def test_transformers_code_reads_no_images(tmp_path: Path) -> None:
    make_wrapper("smolvlm", tmp_path)
    model = load(tmp_path, force_transformers=True)
    assert model.encoder is None
    assert model.spec.images is None
    found = said(tmp_path, transformers_fallback=True)
    assert found == "are not read: the text model is computed by transformers"


def said(path: Path, **options: Any) -> str | None:
    """What the doctor says of images."""
    config = EngineConfig(model=str(path), device="cpu", num_pages=8, threads=1, **options)
    return {finding.subject: finding.text for finding in examine(config)}.get("images")


def test_the_doctor_says_whether_images_are_read(tmp_path: Path) -> None:
    make_wrapper("smolvlm", tmp_path / "smolvlm")
    assert said(tmp_path / "smolvlm") == "are read by its own encoder"
    assert said(tmp_path / "smolvlm", images=False) == "are not read: images is False"
    make_wrapper("mistral3", tmp_path / "mistral3")
    assert "no own code for the encoder of Mistral3" in str(said(tmp_path / "mistral3"))


def test_a_device_has_the_encoder_unless_it_is_switched_off(tmp_path: Path) -> None:
    make_wrapper("smolvlm", tmp_path)
    for images in (True, False):
        config = EngineConfig(model=str(tmp_path), device="cpu", num_pages=8, threads=1, images=images)
        device = TorchDevice(config)
        try:
            assert (device.open().images is not None) == images
        finally:
            device.close()


# -- quantised checkpoints ----------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["packed-8", "fp8-blocks", "awq"])
@pytest.mark.parametrize("whole", [False, True])
def test_a_quantised_checkpoint_has_its_encoder(tmp_path: Path, form: str, whole: bool, kernels: str) -> None:
    """``whole``: the encoder is quantised, too; its features are those of the dequantised one."""
    one, two = tmp_path / "quantised", tmp_path / "dequantised"
    for path in (one, two):
        make_wrapper("smolvlm", path)
    config, encode, _ = FORMATS[form]
    config = {**config, "ignore": ["lm_head"], "modules_to_not_convert": ["lm_head"]}
    found, plain = {}, {}
    for name, tensor in load_file(one / "model.safetensors").items():
        quantised = "_proj." in name and name.endswith("weight") and (whole or "text_model" in name)
        quantised &= not is_vision(name) or (whole and ".mlp." in name) or (whole and "out_proj" in name)
        if not quantised:
            found[name] = plain[name] = tensor
            continue
        parts, made = encode(tensor)
        found |= {f"{name.removesuffix('.weight')}.{part}": each for part, each in parts.items()}
        plain[name] = made
    edit_tensors(one, lambda _: found)
    edit_tensors(two, lambda _: plain)
    edit_config(one, lambda stated: stated.update(quantization_config=config))
    encoders = [load(path, kernels=kernels).encoder for path in (one, two)]
    for pixels, _ in units("smolvlm"):
        ours, expected = (features(encoder, pixels) for encoder in encoders)
        # Activations of weights that stay quantised are rounded to 8 bits.
        assert (ours - expected).abs().max() <= (0.1 if whole else 0.0) * expected.abs().max()
