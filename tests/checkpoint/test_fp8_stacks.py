"""Stacked experts of FP8 checkpoints: their scales, in every form in which they are stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from aioinfer.checkpoint.formats import quantised_tensors
from aioinfer.checkpoint.tensors import SafetensorsTensors, Tensors
from aioinfer.errors import ConfigError

NAME = "layers.0.experts.gate_up_proj"
COUNT, ROWS, INNER = 3, 80, 100
BLOCKS = {"quant_method": "fp8", "weight_block_size": [32, 48]}
PLAIN: dict[str, Any] = {"quant_method": "fp8"}
COMPRESSED = {
    "quant_method": "compressed-tensors", "format": "float-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float"}}},
}  # fmt: skip

#: config, the shape of scales, and the block that they are of
FORMS: dict[str, tuple[dict[str, Any], tuple[int, ...], tuple[int, int]]] = {
    "blocks": (BLOCKS, (COUNT, 3, 3), (32, 48)),
    "blocks larger than rows": (
        {**BLOCKS, "weight_block_size": [128, 32]}, (COUNT, 1, 4), (ROWS, 32),
    ),
    "halves in blocks": ({**BLOCKS, "weight_block_size": [128, 32]}, (COUNT, 2, 4), (ROWS // 2, 32)),
    "halves": (PLAIN, (COUNT, 2, 1), (ROWS // 2, INNER)),
    "matrices": (PLAIN, (COUNT, 1, 1), (ROWS, INNER)),
    "matrices, flat": (PLAIN, (COUNT,), (ROWS, INNER)),
    "all": (PLAIN, (1,), (ROWS, INNER)),
    "outputs": (COMPRESSED, (COUNT, ROWS, 1), (1, INNER)),
    "outputs, flat": (COMPRESSED, (COUNT, ROWS), (1, INNER)),
}  # fmt: skip


def write(folder: Path, scales: torch.Tensor, config: dict[str, Any], **more: torch.Tensor) -> Tensors:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(COUNT, ROWS, INNER, generator=generator).to(torch.float8_e4m3fn)
    end = "scale" if config is COMPRESSED else "scale_inv"
    tensors = {NAME: values, f"{NAME}_{end}": scales, f"{NAME}_activation_scale": torch.ones(COUNT)}
    save_file({**tensors, "norm.weight": torch.ones(5), **more}, folder / "model.safetensors")
    return quantised_tensors(SafetensorsTensors(folder), config)


@pytest.mark.parametrize("form", FORMS)
def test_a_stack_is_its_numbers_times_the_scales_of_their_blocks(tmp_path: Path, form: str) -> None:
    config, shape, (height, width) = FORMS[form]
    scales = torch.rand(shape, generator=torch.Generator().manual_seed(2)) + 0.5
    tensors = write(tmp_path, scales, config, convolution=torch.ones(2, 3, 4))
    assert set(tensors.names) == {NAME, "norm.weight", "convolution"}
    assert tensors.shape(NAME) == (COUNT, ROWS, INNER)
    matrix = tensors.float8(NAME)
    assert matrix is not None
    assert matrix.block == (height, width)
    high, wide = -(-ROWS // height), -(-INNER // width)
    assert matrix.scales.shape == (COUNT, high, wide)
    found, given = tensors.read(NAME), scales.reshape(-1)
    assert found.shape == (COUNT, ROWS, INNER)
    for expert, row, column in ((0, 0, 0), (1, 33, 50), (2, ROWS - 1, INNER - 1), (1, 40, 99)):
        # In the order in which they are stored, whatever their dimensions are.
        at = (expert * high + row // height) * wide + column // width if len(given) > 1 else 0
        assert found[expert, row, column] == matrix.values[expert, row, column].float() * given[at]
    assert tensors.float8("convolution") is None
    assert torch.equal(tensors.read("convolution"), torch.ones(2, 3, 4))


def test_scales_that_fit_no_block_are_refused(tmp_path: Path) -> None:
    tensors = write(tmp_path, torch.ones(COUNT, 4, 3), BLOCKS)
    with pytest.raises(ConfigError, match=r"scales of .*gate_up_proj are shaped \(3, 4, 3\), which fits no"):
        tensors.read(NAME)


def test_a_stack_without_scales_is_refused(tmp_path: Path) -> None:
    values = torch.ones(COUNT, ROWS, INNER).to(torch.float8_e4m3fn)
    save_file({NAME: values}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=f"{NAME} is quantised, and the checkpoint has no {NAME}_scale"):
        quantised_tensors(SafetensorsTensors(tmp_path), PLAIN)


def test_one_vector_of_floats_of_8_bits_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"at is quantised, and shaped \(4,\)"):
        write(tmp_path, torch.ones(1), PLAIN, **{"at.weight": torch.ones(4).to(torch.float8_e4m3fn)})


def test_other_floats_of_8_bits_in_a_stack_are_dequantised(tmp_path: Path) -> None:
    values = torch.ones(COUNT, 8, 32).to(torch.float8_e5m2)
    save_file({NAME: values, f"{NAME}_scale_inv": torch.full((1,), 3.0)}, tmp_path / "model.safetensors")
    tensors = quantised_tensors(SafetensorsTensors(tmp_path), PLAIN)
    assert tensors.float8(NAME) is None
    assert torch.equal(tensors.read(NAME), torch.full((COUNT, 8, 32), 3.0))
