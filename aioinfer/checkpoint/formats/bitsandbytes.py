"""bitsandbytes: 4 bits by a table of 16 numbers (QLoRA, arXiv 2305.14314), or whole numbers of 8 bits.

    weight         4 bits: bytes of the whole matrix in any type, two numbers a byte, the higher bits first;
                   8 bits: int8 [outputs, inner]
    weight.quant_map                    [16], what the numbers of 4 bits stand for: nf4, fp4
    weight.absmax                       a factor for each block of the flattened matrix, float32; or uint8, by
    weight.nested_quant_map             [256], which is multiplied by
    weight.nested_absmax                a factor for each block of factors, and added to an offset
    weight.quant_state.bitsandbytes__*  a JSON object in bytes: shape, blocksize; nested_blocksize and _offset
    SCB            8 bits: [outputs], the largest magnitude of each output
    weight_format  8 bits: 0 for rows in order

Native kernels multiply numbers of 4 bits by a table of 8 bits, in blocks that divide a row.
Outliers of LLM.int8 (arXiv 2208.07339) are those of activations, which are not rounded here.
Source: https://github.com/bitsandbytes-foundation/bitsandbytes
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from aioinfer.checkpoint.formats.base import Format, Stored, dequantised, finite, rounding_of_groups
from aioinfer.checkpoint.tensors import QuantisedMatrix, Rounding
from aioinfer.errors import ConfigError, shown, why

if TYPE_CHECKING:
    import torch

__all__ = ["bitsandbytes"]

_STATES = tuple(f"weight.quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4"))
#: types in which files hold bytes
_STORED = ("uint8", "bfloat16", "float16", "float32")
#: blocks of factors; stated where factors are quantised, too
_NESTED = "nested_blocksize"
#: of a factor of 8 bits
_LEVELS = 127
#: bytes that are unpacked at a time
_SLICE = 1 << 21


def bitsandbytes(config: dict[str, Any]) -> Format:
    """The format of a config. Raises ConfigError."""
    return EightBits() if config.get("load_in_8bit") else FourBits()


class FourBits(Format):
    """Numbers of a table, with factors that may be quantised themselves."""

    marker = "weight"
    others = frozenset(
        f"weight.{part}" for part in ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
    ) | frozenset(_STATES)

    def quantised(self, stored: Stored) -> bool:
        return any(map(stored.has, self.others))

    def shape(self, stored: Stored) -> tuple[int, int]:
        state = self._state(stored)
        rows, inner = state["shape"]
        count, weight = rows * inner, stored.typed("weight", *_STORED)
        blocks = -(-count // state["blocksize"])
        wanted = {"weight.quant_map": 16, "weight.absmax": blocks}
        if _NESTED in state:
            wanted |= {"weight.nested_quant_map": 256, "weight.nested_absmax": -(-blocks // state[_NESTED])}
        for part, size in wanted.items():
            if stored.shape(part) != (size,):
                raise ConfigError(
                    f"model: {stored.module}.{part} is shaped {stored.shape(part)}, not ({size},)"
                )
        if weight.nbytes != -(-count // 2):
            raise ConfigError(f"model: {stored.module}.weight has {weight.nbytes} bytes for {rows} x {inner}")
        return rows, inner

    def read(self, stored: Stored) -> torch.Tensor:
        import torch

        state, shape = self._state(stored), self.shape(stored)
        table, factors = stored.floats("weight.quant_map"), self._factors(stored, state)
        packed, count, block = _packed(stored), math.prod(shape), state["blocksize"]
        # Pairs of numbers by their byte.
        pairs = torch.stack((table[torch.arange(256) >> 4], table[torch.arange(256) & 15]), dim=1)
        found = torch.empty(len(packed), 2)
        for start in range(0, len(packed), _SLICE):
            found[start : start + _SLICE] = pairs[packed[start : start + _SLICE].int()]
        flat = found.flatten()[:count]
        whole = count // block * block
        flat[:whole].view(-1, block).mul_(factors[: whole // block, None])
        if whole < count:
            flat[whole:].mul_(factors[-1])
        return flat.view(shape)

    def rounding(self, stored: Stored) -> Rounding | None:
        (_, inner), block = self.shape(stored), self._state(stored)["blocksize"]
        found = rounding_of_groups(4, inner, inner // block) if inner % block == 0 else None
        table = stored.floats("weight.quant_map") * _LEVELS
        if found is None or float(table.abs().max()) > _LEVELS:
            return None
        return found._replace(table=tuple(table.round().int().tolist()))

    def matrix(self, stored: Stored) -> QuantisedMatrix:
        import torch

        (rows, inner), rounding = self.shape(stored), self.rounding(stored)
        assert rounding is not None
        packed, scales = _packed(stored), self._factors(stored, self._state(stored)) / _LEVELS
        values = torch.stack((packed >> 4, packed & 15), dim=1).view(-1)[: rows * inner]
        return QuantisedMatrix(values.view(rows, inner), scales.view(rows, -1), None, rounding)

    def _state(self, stored: Stored) -> Mapping[str, Any]:
        """The object that describes a matrix, with two sizes and its blocks. Raises ConfigError."""
        part = next((part for part in _STATES if stored.has(part)), _STATES[0])
        try:
            state = json.loads(bytes(stored.typed(part, "uint8").tolist()))
            shape, nested = state["shape"], _NESTED in state
            sizes = *shape, state["blocksize"], *([state[_NESTED]] if nested else [])
            fits = len(shape) == 2 and all(type(size) is int and size > 0 for size in sizes)
            fits = fits and math.isfinite(state["nested_offset"] if nested else 0)
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise ConfigError(f"model: {stored.module}.{part} cannot be read: {why(error)}") from error
        if not fits:
            raise ConfigError(f"model: {stored.module}.{part} states {shown(state)}")
        found: dict[str, Any] = state
        return found

    def _factors(self, stored: Stored, state: Mapping[str, Any]) -> torch.Tensor:
        """The factors of all blocks, float32."""
        import torch

        if _NESTED not in state:
            return stored.floats("weight.absmax")
        inner, outer = stored.typed("weight.absmax", "uint8"), stored.floats("weight.nested_absmax")
        blocks, table = torch.arange(len(inner)) // state[_NESTED], stored.floats("weight.nested_quant_map")
        return finite(stored, table[inner.int()] * outer[blocks] + state["nested_offset"])


class EightBits(Format):
    """Whole numbers with a factor for each output."""

    marker = "weight"
    others = frozenset({"SCB", "weight_format"})

    def quantised(self, stored: Stored) -> bool:
        return stored.has("SCB") or str(stored.read("weight").dtype) == "torch.int8"

    def shape(self, stored: Stored) -> tuple[int, ...]:
        shape = stored.shape("weight")
        if len(shape) != 2 or stored.shape("SCB") != shape[:1]:
            raise ConfigError(f"model: the parts of {stored.module} do not fit each other")
        if stored.has("weight_format") and int(stored.read("weight_format").max()):
            raise ConfigError(f"model: the rows of {stored.module} are in another order (weight_format)")
        return shape

    def read(self, stored: Stored) -> torch.Tensor:
        return dequantised(self.matrix(stored))

    def rounding(self, stored: Stored) -> Rounding | None:
        return rounding_of_groups(8, self.shape(stored)[1], 1)

    def matrix(self, stored: Stored) -> QuantisedMatrix:
        values = stored.typed("weight", "int8")
        scales = stored.floats("SCB")[:, None] / _LEVELS
        return QuantisedMatrix(values, scales, None, Rounding(8, 0))


def _packed(stored: Stored) -> torch.Tensor:
    """The bytes of a matrix of 4 bits."""
    import torch

    return stored.read("weight").contiguous().flatten().view(torch.uint8)
