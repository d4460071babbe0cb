"""Encoders of weights as whole numbers, and as floats of 8 bits, from the formats' descriptions."""

from __future__ import annotations

import torch

from tests.checkpoint.float_formats import Encoded

__all__ = [
    *("GROUP", "awq", "fp8_blocks", "fp8_channels", "fp8_tensor", "gptq", "int8", "packed", "shuffled"),
    "symmetric",
]

GROUP = 32


def _words(numbers: torch.Tensor, bits: int, order: list[int] | None = None) -> torch.Tensor:
    """Numbers along the last dimension in int32 words, the first in the lowest bits."""
    if 32 % bits:
        stream = ((numbers.long()[..., None] >> torch.arange(bits)) & 1).flatten(-2)
        words = (stream.reshape(*stream.shape[:-1], -1, 32) << torch.arange(32)).sum(-1)
        return ((words + 2**31) % 2**32 - 2**31).int()
    each = 32 // bits
    short = -numbers.shape[-1] % each
    numbers = torch.nn.functional.pad(numbers.long(), (0, short))
    groups = numbers.reshape(*numbers.shape[:-1], -1, each)
    words = torch.zeros(groups.shape[:-1], dtype=torch.int64)
    for place in range(each):
        words |= groups[..., order[place] if order else place] << (place * bits)
    return words.to(torch.uint32).view(torch.int32) if hasattr(torch, "uint32") else words.to(torch.int32)


def _grid(weight: torch.Tensor, bits: int, group: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Numbers [rows, inner], scales and zeros [rows, groups]."""
    rows, inner = weight.shape
    parts = weight.reshape(rows, -1, group)
    low, high = parts.amin(2).clamp_max(0), parts.amax(2).clamp_min(0)
    scales = ((high - low) / (2**bits - 1)).half().float().clamp_min(1e-4)
    zeros = (-low / scales).round().clamp(0, 2**bits - 1)
    # Groups without negative numbers have zeros of 0.
    zeros[0] = 0
    numbers = ((parts / scales[..., None]).round() + zeros[..., None]).clamp(0, 2**bits - 1)
    return numbers.reshape(rows, inner), scales, zeros


def _spread(values: torch.Tensor, group: int) -> torch.Tensor:
    return values.repeat_interleave(group, dim=1)


def awq(weight: torch.Tensor) -> Encoded:
    numbers, scales, zeros = _grid(weight, 4, GROUP)
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    parts = {
        "qweight": _words(numbers.T.contiguous(), 4, order),
        "qzeros": _words(zeros.T.contiguous(), 4, order),
        "scales": scales.T.half().contiguous(),
    }
    return Encoded(parts, (numbers - _spread(zeros, GROUP)) * _spread(scales, GROUP))


def gptq(weight: torch.Tensor, bits: int = 4, *, order: torch.Tensor | None = None, less: int = 1) -> Encoded:
    inner = weight.shape[1]
    groups = torch.arange(inner) // GROUP
    sorted_weight = weight if order is None else weight[:, order]
    numbers, scales, zeros = _grid(sorted_weight, bits, GROUP)
    made = (numbers - _spread(zeros, GROUP)) * _spread(scales, GROUP)
    if order is not None:
        back = order.argsort()
        numbers, made, groups = numbers[:, back], made[:, back], groups[back]
    parts = {
        "qweight": _words(numbers.contiguous(), bits).T.contiguous(),
        "qzeros": _words((zeros.T.contiguous() - less) % 8, bits)
        if bits == 3
        else _less(_words(zeros.T.contiguous(), bits), bits, less),
        "scales": scales.T.half().contiguous(),
        "g_idx": groups.int(),
    }
    return Encoded(parts, made)


def _less(words: torch.Tensor, bits: int, less: int) -> torch.Tensor:
    """1 subtracted in every place, of whole words, as the tools do."""
    ones = sum(1 << shift for shift in range(0, 32, bits))
    return ((words.long() - less * ones + 2**31) % 2**32 - 2**31).int()


def symmetric(weight: torch.Tensor, less: int) -> Encoded:
    """With zeros in the middle, which files hold in two ways."""
    scales = (weight.reshape(len(weight), -1, GROUP).abs().amax(2) / 7).half().float()
    numbers = (weight / _spread(scales, GROUP)).round().clamp(-8, 7) + 8
    zeros = torch.full_like(scales, 8)
    parts = {
        "qweight": _words(numbers, 4).T.contiguous(),
        "qzeros": _less(_words(zeros.T.contiguous(), 4), 4, less),
        "scales": scales.T.half().contiguous(),
    }
    return Encoded(parts, (numbers - 8) * _spread(scales, GROUP))


def packed(weight: torch.Tensor, bits: int = 4, *, symmetric: bool = True) -> Encoded:
    rows, inner = weight.shape
    numbers, scales, zeros = _grid(weight, bits, GROUP)
    if symmetric:
        half = 2 ** (bits - 1)
        scales = weight.reshape(rows, -1, GROUP).abs().amax(2) / (half - 1)
        numbers = (weight / _spread(scales, GROUP)).round() + half
        zeros = torch.full_like(scales, half)
    parts = {
        "weight_packed": _words(numbers, bits),
        "weight_shape": torch.tensor([rows, inner]),
        "weight_scale": scales,
    }
    if not symmetric:
        parts["weight_zero_point"] = _words(zeros.T.contiguous(), bits).T.contiguous()
    return Encoded(parts, (numbers - _spread(zeros, GROUP)) * _spread(scales, GROUP))


def int8(weight: torch.Tensor) -> Encoded:
    scales = weight.abs().amax(1, keepdim=True) / 127
    numbers = (weight / scales).round()
    return Encoded({"weight": numbers.to(torch.int8), "weight_scale": scales}, numbers * scales)


def fp8_blocks(weight: torch.Tensor, block: int = 48) -> Encoded:
    rows, inner = weight.shape
    scales = torch.zeros(-(-rows // block), -(-inner // block))
    stored, made = torch.zeros_like(weight), torch.zeros_like(weight)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            part = (slice(i * block, (i + 1) * block), slice(j * block, (j + 1) * block))
            scales[i, j] = weight[part].abs().max() / 448
            stored[part] = (weight[part] / scales[i, j]).to(torch.float8_e4m3fn).float()
            made[part] = stored[part] * scales[i, j]
    return Encoded({"weight": stored.to(torch.float8_e4m3fn), "weight_scale_inv": scales}, made)


def fp8_channels(weight: torch.Tensor) -> Encoded:
    scales = weight.abs().amax(1, keepdim=True) / 448
    stored = (weight / scales).to(torch.float8_e4m3fn)
    return Encoded(
        {"weight": stored, "weight_scale": scales, "input_scale": torch.ones(1)}, stored.float() * scales
    )


def fp8_tensor(weight: torch.Tensor) -> Encoded:
    scale = weight.abs().max() / 448
    stored = (weight / scale).to(torch.float8_e4m3fn)
    return Encoded({"weight": stored, "weight_scale": scale.reshape(1)}, stored.float() * scale)


def shuffled(weight: torch.Tensor) -> Encoded:
    order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(5))
    return gptq(weight, order=order)
