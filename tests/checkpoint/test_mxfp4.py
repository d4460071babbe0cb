"""MXFP4, the format of gpt-oss, against an encoder that is written here and against transformers' decoder."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from aioinfer.checkpoint.formats import quantised_tensors
from aioinfer.checkpoint.formats.base import dequantised
from aioinfer.checkpoint.tensors import FLOAT4, Rounding, SafetensorsTensors
from aioinfer.errors import ConfigError
from tests.checkpoint.test_formats import assert_experts_stay, requantise
from tests.model.checkpoints import make_checkpoint

Parts = dict[str, torch.Tensor]
CONFIG = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
#: all of the format's numbers: (-1)^sign * 2^(exponent - 1) * (1 + fraction / 2), or fraction / 2 without an
#: exponent
NUMBERS = [
    sign * (2.0 ** (exponent - 1) * (1 + fraction / 2) if exponent else fraction / 2)
    for sign, exponent, fraction in itertools.product((1.0, -1.0), range(4), (0, 1))
]


def encode(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
    """The parts of a weight [experts, rows, inner], and what they stand for."""
    groups = weight.unflatten(-1, (-1, 32))
    # The largest of a group becomes at most 6.
    exponents = (groups.abs().amax(-1).clamp_min(1e-30) / 6).log2().ceil()
    distances = groups / 2 ** exponents[..., None]
    codes = (distances[..., None] - torch.tensor(NUMBERS)).abs().argmin(-1)
    made = torch.tensor(NUMBERS)[codes] * 2 ** exponents[..., None]
    blocks = (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)
    return {"_blocks": blocks, "_scales": (exponents + 127).to(torch.uint8)}, made.flatten(-2)


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def save(folder: Path, parts: Parts) -> Any:
    whole = {f"at.up{part}": tensor.contiguous() for part, tensor in parts.items()}
    save_file(whole, folder / "model.safetensors")
    return SafetensorsTensors(folder)


@pytest.mark.parametrize("flat", [False, True], ids=["groups apart", "groups in rows"])
def test_experts_are_what_was_encoded_and_what_transformers_reads(tmp_path: Path, flat: bool) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    weight = noise(3, 10, 96) * torch.tensor([1e-6, 1.0, 4e4])[:, None, None]
    parts, made = encode(weight)
    theirs = convert_moe_packed_tensors(parts["_blocks"], parts["_scales"], dtype=torch.float32)
    if flat:
        parts["_blocks"] = parts["_blocks"].flatten(-2)
    tensors = quantised_tensors(save(tmp_path, {**parts, "_bias": noise(3, 10)}), CONFIG)
    assert set(tensors.names) == {"at.up", "at.up_bias"}
    assert tensors.shape("at.up") == (3, 96, 10)
    got = tensors.read("at.up")
    assert torch.equal(got.mT.float(), made)
    assert torch.equal(got.float(), theirs)
    rounding = tensors.rounding("at.up")
    assert rounding == Rounding(4, 32, FLOAT4)
    for expert in range(3):
        assert torch.equal(dequantised(tensors.quantised("at.up", expert)), made[expert])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda parts: parts.pop("_scales"), r"at.up is quantised, and the checkpoint has no at.up_scales"),
        (lambda parts: parts.update(_scales=parts["_scales"][:, :, :2]), r"at.up_blocks is shaped .* scales"),
        (lambda parts: parts.update(_scales=parts["_scales"][0]), r"at.up_scales is shaped"),
        (lambda parts: parts.update(_blocks=parts["_blocks"][..., :8]), r"at.up_blocks is shaped"),
        (lambda parts: parts.update(_scales=parts["_scales"].float()), r"at.up_scales is of torch.float32"),
        (lambda parts: parts.update(_blocks=parts["_blocks"].int()), r"at.up_blocks is of torch.int32"),
        (lambda parts: parts["_scales"].fill_(255), "scales beyond those of bfloat16"),
        (lambda parts: parts["_scales"].fill_(253), "scales beyond those of bfloat16"),
        (
            lambda parts: parts.update({"": parts["_blocks"].clone()}),
            "at.up is in the checkpoint quantised and not",
        ),
        (lambda parts: parts.clear(), "^model: the config says .* the checkpoint has none"),
    ],
)
def test_parts_that_do_not_fit_are_an_error(tmp_path: Path, change: Any, message: str) -> None:
    parts, _ = encode(noise(2, 4, 96))
    change(parts)
    with pytest.raises(ConfigError, match=message):
        quantised_tensors(save(tmp_path, {**parts, "_bias": noise(2, 4)}), CONFIG).read("at.up")


def test_a_model_of_the_format_is_the_dequantised_one(tmp_path: Path) -> None:
    oracle = make_checkpoint("gpt-oss", tmp_path)
    tensors: Parts = {}
    with torch.no_grad():
        for key, tensor in load_file(tmp_path / "model.safetensors").items():
            if not key.endswith(("gate_up_proj", "down_proj")):
                tensors[key] = tensor
                continue
            parts, made = encode(tensor.mT)
            tensors |= {f"{key}{part}": value for part, value in parts.items()}
            oracle.get_parameter(key).copy_(made.mT)
    requantise(tmp_path, tensors, CONFIG)
    assert_experts_stay(tmp_path, oracle, [random.Random(3).randrange(200) for _ in range(9)], 4)
