"""FP8: weights as float8 with a scale of the tensor, of each output, or of each block.

DeepSeek's and Qwen's releases have ``weight_scale_inv`` for blocks of 128 by 128, with partial ones at the
edges (arXiv 2412.19437, section 3.3); compressed-tensors has ``weight_scale``. Of experts that are stacked,
[experts, rows, inner], transformers writes ``gate_up_proj_scale_inv`` [experts, ...] with as many dimensions.
Scales of activations are not used: activations are not rounded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from aioinfer.checkpoint.formats.base import Format, Stored, row_slices
from aioinfer.checkpoint.tensors import Float8Matrix
from aioinfer.errors import ConfigError, shown

if TYPE_CHECKING:
    import torch

__all__ = ["FP8"]


_E4M3 = "float8_e4m3fn"
_TYPES = (_E4M3, "float8_e5m2")


class FP8(Format):
    """Floats of 8 bits with scales of the tensor, of outputs or of blocks."""

    marker = "weight"
    others = frozenset(
        {"weight_scale", "weight_scale_inv", "input_scale", "output_scale", "activation_scale"}
    )
    stacks = True

    def __init__(self, config: dict[str, Any]) -> None:
        block = config.get("weight_block_size")
        if block is not None and not (
            isinstance(block, list)
            and len(block) == 2
            and all(type(size) is int and size > 0 for size in block)
        ):
            raise ConfigError(f"model: weight_block_size must be two sizes, got {shown(block)}")
        self._block: tuple[int, int] | None = None if block is None else (block[0], block[1])

    @classmethod
    def compressed(cls, weights: dict[str, Any]) -> Self:
        """As compressed-tensors describes weights."""
        block = weights["block_structure"] if weights.get("strategy") == "block" else None
        return cls({"weight_block_size": block})

    def quantised(self, stored: Stored) -> bool:
        return stored.has("weight_scale") or stored.has("weight_scale_inv") or _is_float8(stored)

    def shape(self, stored: Stored) -> tuple[int, ...]:
        shape = stored.shape("weight")
        if len(shape) not in (2, 3):
            raise ConfigError(f"model: {stored.module} is quantised, and shaped {shape}")
        stored.shape(self._scale(stored))
        return shape

    def read(self, stored: Stored) -> torch.Tensor:
        import torch

        weight, scale, block = self._parts(stored)
        found = torch.empty(weight.shape)
        if weight.dim() == 2:
            _spread(found, weight, scale, block)
        else:
            for at in range(len(weight)):
                _spread(found[at], weight[at], scale[at], block)
        return found

    def float8(self, stored: Stored) -> Float8Matrix | None:
        found = self._parts(stored)
        return found if str(found.values.dtype) == f"torch.{_E4M3}" else None

    def _parts(self, stored: Stored) -> Float8Matrix:
        """The weight, of either type, its scales in as many dimensions, and their block. Raises
        ConfigError."""
        weight, part = stored.typed("weight", *_TYPES), self._scale(stored)
        scale = stored.read(part).float()
        if weight.dim() != 2:
            return self._stack(stored, weight, scale)
        rows, inner = weight.shape
        if scale.numel() == 1:
            return Float8Matrix(weight, scale.reshape(1, 1), (rows, inner))
        if scale.shape in ((rows,), (rows, 1)):
            return Float8Matrix(weight, scale.reshape(rows, 1), (1, inner))
        found = f"model: {stored.module}.{part} is shaped {tuple(scale.shape)}"
        if self._block is None:
            raise ConfigError(f"{found} without blocks")
        height, width = self._block
        if scale.shape != (shape := (-(-rows // height), -(-inner // width))):
            raise ConfigError(f"{found}, not {shape}")
        return Float8Matrix(weight, scale, (min(height, rows), min(width, inner)))

    def _stack(self, stored: Stored, weight: torch.Tensor, scale: torch.Tensor) -> Float8Matrix:
        """A stack of matrices, with scales of blocks, outputs, matrices, or their halves: of gate and of up,
        which transformers keeps apart even where a block is larger. Raises ConfigError."""
        count, rows, inner = weight.shape
        height, width = self._block or (rows, inner)
        high, wide = -(-rows // height), -(-inner // width)
        if scale.shape == (count, high, wide):
            return Float8Matrix(weight, scale, (min(height, rows), min(width, inner)))
        if scale.numel() == 1 or scale.shape in ((count,), (count, 1), (count, 1, 1)):
            scale = scale.reshape(-1, 1, 1).expand(count, 1, 1).contiguous()
            return Float8Matrix(weight, scale, (rows, inner))
        if scale.shape in ((count, rows), (count, rows, 1)):
            return Float8Matrix(weight, scale.reshape(count, rows, 1), (1, inner))
        if high == 1 and rows % 2 == 0 and scale.shape == (count, 2, wide):
            return Float8Matrix(weight, scale, (rows // 2, min(width, inner)))
        found = f"{tuple(scale.shape)}, which fits no matrices {tuple(weight.shape)}"
        raise ConfigError(f"model: the scales of {stored.module} are shaped {found}")

    def _scale(self, stored: Stored) -> str:
        """The name of the part with the scales."""
        return "weight_scale_inv" if stored.has("weight_scale_inv") else "weight_scale"


def _spread(found: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]) -> None:
    """Write the numbers of one matrix into another one, of float32."""
    (rows, inner), (height, width) = weight.shape, block
    if width >= inner and (height >= rows or height == 1):
        found.copy_(weight).mul_(scale)
        return
    for each in row_slices(rows, inner, height):
        blocks = scale[each.start // height : -(-each.stop // height)]
        wide = blocks.repeat_interleave(width, dim=1)[:, :inner].repeat_interleave(height, dim=0)
        found[each] = weight[each].float() * wide[: each.stop - each.start]


def _is_float8(stored: Stored) -> bool:
    return str(stored.read("weight").dtype).removeprefix("torch.") in _TYPES
