"""Damaged and misfitting parts of quantised weights: one clear error each."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from aioinfer.checkpoint.formats import quantised_tensors
from aioinfer.checkpoint.tensors import SafetensorsTensors
from aioinfer.errors import ConfigError
from tests.checkpoint.float_formats import Parts
from tests.checkpoint.test_formats import FORMATS, random_weight

#: formats whose files tell a damage from another matrix
NAMES = [
    *("bnb-nf4", "bnb-fp4", "bnb-8", "modelopt-fp4", "nvfp4", "mxfp4"),
    *("gptq-3", "gptq-2", "autoround", "autoround-awq"),
]
#: parts that are not read
UNREAD = {"input_scale", "input_global_scale", "weight_format", "g_idx"}
#: other types of a part, as a tool could have written it
TYPES = (torch.int32, torch.int16, torch.float64, torch.bool)


def of_parts(parts: Parts) -> Iterator[Parts]:
    """Each part away, of another type, of another shape, and not finite."""
    for name, tensor in parts.items():
        if name in UNREAD:
            continue

        def changed(value: torch.Tensor, name: str = name) -> Parts:
            return {**parts, name: value}

        if name not in ("weight", "weight_packed", "qweight"):
            yield {each: value for each, value in parts.items() if each != name}
        if "quant_state" not in name:
            yield from (changed(tensor.float().to(kind)) for kind in TYPES if kind != tensor.dtype)
        if tensor.is_floating_point():
            yield changed(torch.full_like(tensor, float("nan")))
        yield changed(torch.stack([tensor] * 3))
        if tensor.dim():
            yield changed(tensor[:0].clone())
            yield changed(tensor[: len(tensor) - 1].clone() if len(tensor) > 1 else torch.cat([tensor] * 2))


def of_states(parts: Parts) -> Iterator[Parts]:
    """The object of bitsandbytes, broken, and with values that are none."""
    for name, tensor in parts.items():
        if "quant_state" not in name:
            continue
        stated = json.loads(bytes(tensor.tolist()))
        texts = ["", "[]", "null", json.dumps(stated)[:-1], "\xff"]
        for field in ("shape", "blocksize", "nested_blocksize", "nested_offset"):
            if field in stated:
                values: list[Any] = [None, 0, -1, "64", [], 1e400]
                if field == "shape":
                    values += [[72], [72, 127], [72, 0], [1, 72, 128], [72, 1e2]]
                if field == "nested_offset":
                    values = [None, "1", 1e400]
                texts += [json.dumps({**stated, field: value}) for value in values]
        for text in texts:
            yield {**parts, name: torch.tensor([*text.encode("latin-1")], dtype=torch.uint8)}


def damages(name: str, parts: Parts) -> list[Parts]:
    return [*of_parts(parts), *of_states(parts)]


@pytest.mark.parametrize("name", NAMES)
def test_damaged_parts_are_one_error(tmp_path: Path, name: str) -> None:
    config, encode, _ = FORMATS[name]
    parts, made = encode(random_weight(name))
    file, tried = tmp_path / "model.safetensors", 0

    def read() -> None:
        tensors = quantised_tensors(SafetensorsTensors(tmp_path), config)
        if "at.weight" not in tensors.names or tensors.shape("at.weight") != made.shape:
            raise ConfigError("at.weight is none of the model's")  # which says so itself
        tensors.read("at.weight")
        if tensors.rounding("at.weight") is not None:
            tensors.quantised("at.weight")

    for each in damages(name, parts):
        save_file({f"at.{part}": tensor.contiguous() for part, tensor in each.items()}, file)
        with pytest.raises(ConfigError, match=r"\bat\b"):
            read()
        tried += 1
    save_file({f"at.{part}": tensor.contiguous() for part, tensor in parts.items()}, file)
    whole = file.read_bytes()
    read()
    for cut in (0, 7, 8, 50, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:cut])
        with pytest.raises(ConfigError, match="cannot be read"):
            read()
        tried += 1
    assert tried >= 20


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("bnb-nf4", {"load_in_4bit": False, "load_in_8bit": True}),
        ("bnb-8", {"load_in_8bit": False}),
        ("modelopt-fp4", {"quant_algo": "W4A16_AWQ"}),
        ("modelopt-fp4", {"quant_algo": None}),
        ("modelopt-fp4", {"quant_algo": ["NVFP4"]}),
        ("modelopt-fp4", {"rotation": {"kind": "hadamard"}}),
    ],
)
def test_configs_of_another_format_are_one_error(tmp_path: Path, name: str, change: dict[str, Any]) -> None:
    config, encode, _ = FORMATS[name]
    parts, _ = encode(torch.ones(64, 64))
    save_file({f"at.{part}": tensor for part, tensor in parts.items()}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError):
        quantised_tensors(SafetensorsTensors(tmp_path), {**config, **change})
