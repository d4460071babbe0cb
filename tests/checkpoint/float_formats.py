"""Encoders of weights as floats of 4 bits and as bitsandbytes has them, from the formats' descriptions."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import torch

__all__ = ["BITSANDBYTES", "Encoded", "Parts", "bnb4", "bnb8", "compressed_fp4", "modelopt_fp4", "mxfp4"]

Parts = dict[str, torch.Tensor]


class Encoded(NamedTuple):
    """What a format stores of a weight, and what that stands for."""

    parts: Parts
    weight: torch.Tensor


#: quantiles of the normal distribution, as QLoRA has them
NF4 = [
    -1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.091050036, 0.0,
    0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0,
]  # fmt: skip
_FP4_HALF = [0.0, 0.0052083333, 0.6666667, 1.0, 0.33333334, 0.5, 0.16666667, 0.25]
FP4 = [*_FP4_HALF, *(-each for each in _FP4_HALF)]
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
BITSANDBYTES: dict[str, Any] = {
    "quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, "_load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": "bfloat16",
    "bnb_4bit_quant_storage": "uint8", "llm_int8_skip_modules": ["lm_head"], "llm_int8_threshold": 6.0,
}  # fmt: skip


def bnb4(weight: torch.Tensor, kind: str = "nf4", block: int = 64, *, nested: bool = True) -> Encoded:
    """By a table, in blocks of the flattened matrix; with ``nested``, factors are numbers of a table, too."""
    table = torch.tensor(NF4 if kind == "nf4" else FP4)
    flat = torch.nn.functional.pad(weight.flatten(), (0, -weight.numel() % block)).view(-1, block)
    factors = flat.abs().amax(1)
    state: dict[str, Any] = {"quant_type": kind, "blocksize": block, "dtype": "float32"}
    state["shape"] = [*weight.shape]
    parts: Parts = {"weight.quant_map": table}
    if nested:
        offset = float(factors.mean())
        around = torch.nn.functional.pad(factors - offset, (0, -len(factors) % 256)).view(-1, 256)
        outer, levels = around.abs().amax(1), torch.linspace(-1, 1, 256)
        inner = (around / outer[:, None])[..., None].sub(levels).abs().argmin(2).to(torch.uint8)
        made = (levels[inner.int()] * outer[:, None]).flatten()[: len(factors)] + offset
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
        parts |= {"weight.absmax": inner.flatten()[: len(factors)].clone(), "weight.nested_absmax": outer}
        parts["weight.nested_quant_map"], factors = levels, made
    else:
        parts["weight.absmax"] = factors
    numbers = (flat / factors[:, None])[..., None].sub(table).abs().argmin(2)
    made = (table[numbers] * factors[:, None]).flatten()[: weight.numel()].view(weight.shape)
    pairs = torch.nn.functional.pad(numbers.flatten()[: weight.numel()], (0, weight.numel() % 2)).view(-1, 2)
    parts["weight"] = (pairs[:, :1] << 4 | pairs[:, 1:]).to(torch.uint8)
    described = torch.tensor([*json.dumps(state).encode()], dtype=torch.uint8)
    parts[f"weight.quant_state.bitsandbytes__{kind}"] = described
    return Encoded(parts, made)


def bnb8(weight: torch.Tensor) -> Encoded:
    largest = weight.abs().amax(1)
    numbers = (weight * 127 / largest[:, None]).round()
    parts = {"weight": numbers.to(torch.int8), "SCB": largest, "weight_format": torch.tensor(0).byte()}
    return Encoded(parts, numbers * largest[:, None] / 127)


def _e2m1(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes of two numbers each, the first in the lower bits, and the numbers."""
    nearest = values.abs()[..., None].sub(_E2M1).abs().argmin(-1)
    numbers = nearest | (values < 0).long() << 3
    made = _E2M1[nearest] * torch.where(values < 0, -1.0, 1.0)
    return (numbers[..., 0::2] | numbers[..., 1::2] << 4).to(torch.uint8), made


def _nvfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Bytes, scales of groups, the factor of all, and the weight."""
    parts = weight.reshape(len(weight), -1, 16)
    overall = weight.abs().max() / (6 * 448)
    scales = (parts.abs().amax(2) / 6 / overall).to(torch.float8_e4m3fn)
    wide = (scales.float() * overall).clamp_min(1e-12)[..., None]
    packed, made = _e2m1(parts / wide)
    return packed.reshape(len(weight), -1), scales, overall, (made * wide).reshape(weight.shape)


def modelopt_fp4(weight: torch.Tensor) -> Encoded:
    packed, scales, overall, made = _nvfp4(weight)
    parts = {"weight": packed, "weight_scale": scales, "weight_scale_2": overall}
    return Encoded({**parts, "input_scale": torch.tensor(0.5)}, made)


def compressed_fp4(weight: torch.Tensor) -> Encoded:
    packed, scales, overall, made = _nvfp4(weight)
    parts = {"weight_packed": packed, "weight_scale": scales, "weight_global_scale": 1 / overall.reshape(1)}
    return Encoded({**parts, "input_global_scale": torch.ones(1)}, made)


def mxfp4(weight: torch.Tensor) -> Encoded:
    parts = weight.reshape(len(weight), -1, 32)
    exponents = (parts.abs().amax(2) / 6).log2().ceil()
    packed, made = _e2m1(parts / exponents.exp2()[..., None])
    scales = (exponents + 127).to(torch.uint8)
    made = made * exponents.exp2()[..., None]
    return Encoded(
        {"weight_packed": packed.reshape(len(weight), -1), "weight_scale": scales}, made.reshape(weight.shape)
    )
