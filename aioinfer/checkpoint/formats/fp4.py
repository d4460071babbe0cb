"""Floats of 4 bits (e2m1) with a scale for each group: NVFP4 of ModelOpt and compressed-tensors, and MXFP4.

    NVFP4 of ModelOpt    weight [outputs, inner / 2], uint8, two numbers a byte, the lower bits first;
                         weight_scale [outputs, inner / 16], float8 (e4m3); weight_scale_2, a factor of all
    compressed-tensors   weight_packed, weight_scale likewise; weight_global_scale, a divisor of all; of MXFP4
                         weight_scale [outputs, inner / 32], uint8, exponents of two plus 127

Twice the numbers are whole ones, so native kernels multiply them by a table.
Source: https://github.com/NVIDIA/TensorRT-Model-Optimizer, https://github.com/vllm-project/compressed-tensors
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aioinfer.checkpoint.formats.base import Delegating, Format, Stored, dequantised, finite
from aioinfer.checkpoint.formats.fp8 import FP8
from aioinfer.checkpoint.tensors import FLOAT4, QuantisedMatrix, Rounding
from aioinfer.errors import ConfigError, shown

if TYPE_CHECKING:
    import torch

__all__ = ["FP4", "ModelOpt"]

_E4M3 = "float8_e4m3fn"
_BIAS = 127
#: algorithms of ModelOpt whose weights are stored so, or as FP8
_ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "MIXED_PRECISION", "NVFP4", "W4A16_NVFP4")


class FP4(Format):
    """Floats of 4 bits in groups."""

    others = frozenset(
        {
            *("input_global_scale", "input_scale", "weight_global_scale", "weight_scale", "weight_scale_2"),
        }
    )

    def __init__(self, marker: str, overall: str | None, group: int = 16) -> None:
        """``overall``: the part with the scale of the whole matrix; None: there is none, and the scales of
        groups are powers of two."""
        self.marker, self._overall, self._group = marker, overall, group

    @classmethod
    def compressed(cls, weights: dict[str, Any]) -> FP4:
        """As compressed-tensors describes weights. Raises ConfigError."""
        group = weights.get("group_size")
        facts = weights.get("num_bits"), weights.get("type"), weights.get("symmetric", True)
        if facts != (4, "float", True) or group not in (16, 32):
            raise ConfigError(
                f"model: packed floats of {shown(facts[0])} bits in groups of {shown(group)} or with "
                "zero points are not supported"
            )
        return cls("weight_packed", "weight_global_scale" if group == 16 else None, group)

    def quantised(self, stored: Stored) -> bool:
        alone = self._overall is not None and stored.has(self._overall)
        return self.marker != "weight" or alone or str(stored.read("weight").dtype) == "torch.uint8"

    def shape(self, stored: Stored) -> tuple[int, int]:
        outputs, half = stored.shape(self.marker)
        if stored.shape("weight_scale") != (outputs, 2 * half // self._group) or 2 * half % self._group:
            raise ConfigError(f"model: the parts of {stored.module} do not fit each other")
        if self._overall is not None and stored.shape(self._overall) not in ((), (1,)):
            raise ConfigError(f"model: {stored.module}.{self._overall} is no single number")
        return outputs, 2 * half

    def read(self, stored: Stored) -> torch.Tensor:
        return dequantised(self.matrix(stored))

    def rounding(self, stored: Stored) -> Rounding | None:
        return Rounding(4, self._group, FLOAT4)

    def matrix(self, stored: Stored) -> QuantisedMatrix:
        import torch

        packed = stored.typed(self.marker, "uint8")
        values = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
        return QuantisedMatrix(values, self._scales(stored) / 2, None, Rounding(4, self._group, FLOAT4))

    def _scales(self, stored: Stored) -> torch.Tensor:
        import torch

        if self._overall is None:
            exponents = stored.typed("weight_scale", "uint8").int() - _BIAS
            return finite(stored, torch.ldexp(torch.ones(exponents.shape), exponents))
        scales = stored.typed("weight_scale", _E4M3).float()
        overall = stored.typed(self._overall, "float32").flatten()
        return finite(stored, scales * overall if self._overall == "weight_scale_2" else scales / overall)


class ModelOpt(Delegating):
    """The formats of ModelOpt, of which a checkpoint may have several."""

    def __init__(self, config: dict[str, Any]) -> None:
        algorithm = config.get("quant_algo")
        if algorithm not in _ALGORITHMS:
            known = ", ".join(_ALGORITHMS)
            raise ConfigError(
                f"model: weights of ModelOpt's {shown(algorithm)} are not supported: {known} are"
            )
        self._fp4, self._fp8 = FP4("weight", "weight_scale_2"), FP8({})
        super().__init__([self._fp4, self._fp8])

    def _of(self, stored: Stored) -> Format:
        return self._fp4 if self._fp4.quantised(stored) else self._fp8
