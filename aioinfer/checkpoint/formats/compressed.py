"""compressed-tensors: whole numbers of 8 bits, or of 4 or 8 in words of 32; floats are read elsewhere.

    int-quantized      weight [outputs, inner], int8; weight_scale
    pack-quantized     weight_packed [outputs, words], int32, the lowest bits first, unsigned: 8 more than the
                       number of 4 bits; weight_shape [2]; weight_scale [outputs, groups];
                       weight_zero_point [outputs * bits / 32, groups], packed along the outputs, or none;
                       weight_g_idx [inner], the group of each element, if those are not in order

Source: https://github.com/vllm-project/compressed-tensors
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import regex

from aioinfer.checkpoint.formats.base import (
    Delegating,
    Format,
    Stored,
    ZeroPoints,
    dequantised,
    dequantised_elements,
    rounding_of_groups,
    unpacked,
)
from aioinfer.checkpoint.formats.fields import check_fields
from aioinfer.checkpoint.formats.fp4 import FP4
from aioinfer.checkpoint.formats.fp8 import FP8
from aioinfer.checkpoint.tensors import QuantisedMatrix, Rounding
from aioinfer.errors import ConfigError, shown, why

if TYPE_CHECKING:
    import torch

__all__ = ["LINEAR", "Grouped", "compressed"]


#: fields of a group, and of its weights, that are read, or that change no weight
_GROUP = frozenset({"format", "input_activations", "output_activations", "targets", "weights"})
_WEIGHTS = frozenset(
    {
        *("actorder", "block_structure", "dynamic", "group_size", "num_bits", "observer", "observer_kwargs"),
        *("scale_dtype", "strategy", "symmetric", "type", "zp_dtype"),
    }
)
#: of a config whose groups have formats of their own
_SEVERAL = "mixed-precision"
#: the class of modules whose weights are quantised
LINEAR = "Linear"
#: bound on the time of one match
_SECONDS = 0.5


def compressed(config: dict[str, Any]) -> Format:
    """The format of a config: one of several that it names, or one for each of its groups of modules. Raises
    ConfigError."""
    name = config.get("format")
    if name != _SEVERAL:
        _named(name)
    sparsity = (config.get("sparsity_config") or {}).get("format", "dense")
    if sparsity != "dense":
        raise ConfigError(f"model: sparse weights in the format {shown(sparsity)} are not supported")
    groups = {key: group for key, group in config["config_groups"].items() if group["weights"]}
    made: list[tuple[dict[str, Any], Format]] = []
    for key, group in groups.items():
        check_fields(group, _GROUP, f"group {shown(key)} in config_groups")
        check_fields(group["weights"], _WEIGHTS, f"weights of the group {shown(key)} in config_groups")
        form = _named(group.get("format") or name)
        made.append(({**group["weights"], "format": form}, form(group["weights"])))
    if not made:
        return _named(name)({})
    first, found = made[0]
    if all(each == first for each, _ in made):
        return found
    return Grouped([(group["targets"], form) for group, (_, form) in zip(groups.values(), made, strict=True)])


def _named(name: object) -> Callable[[dict[str, Any]], Format]:
    """A format, of a description of weights. Raises ConfigError."""
    form = _FORMATS.get(name) if isinstance(name, str) else None
    if form is None:
        raise ConfigError(
            f"model: weights of the format {shown(name)} of compressed-tensors are not supported"
        )
    return form


class Grouped(Delegating):
    """Groups of modules, each with settings of its own."""

    def __init__(self, groups: list[tuple[list[str], Format]]) -> None:
        """``groups``: names of modules, patterns of them, or their class, and a format."""
        super().__init__([form for _, form in groups])
        self._groups = groups
        self._found: dict[str, Format] = {}

    def _of(self, stored: Stored) -> Format:
        """The format of a module: of the group that names it, else of one with a pattern that it matches,
        else of one of all of its class. Raises ConfigError."""
        module = stored.module
        if module not in self._found:
            fits = (module.__eq__, lambda target: _matches(target, module), LINEAR.__eq__)
            found = (
                form
                for fit in fits
                for targets, form in self._groups
                if any(fit(target) is True for target in targets)
            )
            form = next(found, None)
            if form is None:
                raise ConfigError(f"model: no group in config_groups has {module} among its targets")
            self._found[module] = form
        return self._found[module]


def _matches(target: str, module: str) -> bool:
    """Whether a target is a pattern that the begin of a name matches. Raises ConfigError."""
    prefix, _, pattern = target.partition(":")
    if prefix != "re":
        return False
    try:
        # ``concurrent``: without the interpreter's lock.
        return regex.match(pattern, module, timeout=_SECONDS, concurrent=True) is not None
    except (regex.error, TimeoutError, RecursionError, OverflowError) as error:
        raise ConfigError(
            f"model: the target {shown(target)} in config_groups cannot be used: {why(error)}"
        ) from error


def _group(stated: dict[str, Any]) -> int | None:
    """Elements that share a scale; None: a whole row."""
    return int(stated["group_size"]) if stated.get("strategy") == "group" else None


class IntQuantized(Format):
    """Numbers of 8 bits with scales."""

    marker = "weight"
    others = frozenset({"weight_scale", "weight_zero_point", "input_scale", "input_zero_point"})

    def __init__(self, stated: dict[str, Any]) -> None:
        bits = stated.get("num_bits")
        if bits != 8 or not stated.get("symmetric", True):
            raise ConfigError(
                f"model: int-quantized weights of {shown(bits)} bits or with zero points are not supported"
            )
        self._group = _group(stated)

    def quantised(self, stored: Stored) -> bool:
        return stored.has("weight_scale") or str(stored.read("weight").dtype) == "torch.int8"

    def shape(self, stored: Stored) -> tuple[int, int]:
        outputs, inner = stored.shape("weight")
        scale, groups = stored.shape("weight_scale"), -(-inner // (self._group or inner))
        whole = ((1,), ()) if self._group is None else ()
        if inner % (self._group or inner) or (scale not in whole and scale != (outputs, groups)):
            raise ConfigError(f"model: the parts of {stored.module} do not fit each other")
        return outputs, inner

    def rounding(self, stored: Stored) -> Rounding | None:
        inner = self.shape(stored)[1]
        return rounding_of_groups(8, inner, inner // (self._group or inner))

    def matrix(self, stored: Stored) -> QuantisedMatrix:
        rounding = self.rounding(stored)
        assert rounding is not None
        values = stored.typed("weight", "int8")
        return QuantisedMatrix(values, self._scales(stored, len(values)), None, rounding)

    def read(self, stored: Stored) -> torch.Tensor:
        values = stored.typed("weight", "int8")
        scales = self._scales(stored, len(values))
        return dequantised(
            QuantisedMatrix(values, scales, None, Rounding(8, values.shape[1] // scales.shape[1]))
        )

    def _scales(self, stored: Stored, outputs: int) -> torch.Tensor:
        scales = stored.floats("weight_scale")
        return scales.expand(outputs).reshape(outputs, 1) if scales.numel() == 1 else scales.contiguous()


class PackQuantized(ZeroPoints):
    """Numbers of 4 or 8 bits in words, with scales and perhaps zeros."""

    marker = "weight_packed"
    others = frozenset({"weight_shape", "weight_scale", "weight_zero_point", "weight_g_idx"})

    def __init__(self, stated: dict[str, Any]) -> None:
        bits, kind = stated.get("num_bits"), stated.get("type", "int")
        if bits not in (4, 8) or kind != "int":
            raise ConfigError(
                f"model: packed weights of {shown(bits)} bits of the type {shown(kind)} are not supported"
            )
        self.bits = bits
        self._group = _group(stated)
        self.symmetric = bool(stated.get("symmetric", True))
        self._shuffled = stated.get("actorder") == "group"

    def shape(self, stored: Stored) -> tuple[int, int]:
        outputs, words = stored.shape("weight_packed")
        if stored.shape("weight_shape") != (2,):
            raise ConfigError(f"model: {stored.module}.weight_shape is shaped {stored.shape('weight_shape')}")
        rows, inner = (int(size) for size in stored.read("weight_shape").tolist())
        groups = -(-inner // (self._group or inner)) if inner > 0 else 0
        fits = rows == outputs and words == -(-inner * self.bits // 32)
        fits = fits and stored.shape("weight_scale") == (rows, groups)
        if fits and not self.symmetric:
            fits = stored.shape("weight_zero_point") == (-(-rows * self.bits // 32), groups)
        if fits and self._in_any_order(stored):
            fits = stored.shape("weight_g_idx") == (inner,)
        if not fits:
            raise ConfigError(f"model: the parts of {stored.module} do not fit each other")
        return rows, inner

    def groups(self, stored: Stored) -> int:
        return stored.shape("weight_scale")[1]

    def order(self, stored: Stored) -> torch.Tensor | None:
        return stored.group_index("weight_g_idx", self.groups(stored)) if self._in_any_order(stored) else None

    def read(self, stored: Stored) -> torch.Tensor:
        import torch

        values, scales, zeros = self.parts(stored)
        inner, groups = values.shape[1], self.order(stored)
        if groups is None:
            # The last one may be shorter than the others.
            groups = torch.arange(inner) // (self._group or inner)
        return dequantised_elements(values, scales, zeros, groups)

    def _in_any_order(self, stored: Stored) -> bool:
        """Whether a part says to which group each element belongs."""
        return self._shuffled or stored.has("weight_g_idx")

    def parts(self, stored: Stored) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        import torch

        outputs, inner = self.shape(stored)
        values = unpacked(stored.typed("weight_packed", "int32"), self.bits)[:, :inner].contiguous()
        scales = stored.floats("weight_scale").contiguous()
        if self.symmetric:
            return values, scales, torch.full_like(scales, 2 ** (self.bits - 1))
        packed = stored.typed("weight_zero_point", "int32").T.contiguous()
        return values, scales, unpacked(packed, self.bits)[:, :outputs].T.float()


#: by ``format``; of the description of weights
_FORMATS: Mapping[str, Callable[[dict[str, Any]], Format]] = {
    "float-quantized": FP8.compressed,
    "naive-quantized": FP8.compressed,
    "pack-quantized": PackQuantized,
    "int-quantized": IntQuantized,
    "nvfp4-pack-quantized": FP4.compressed,
    "mxfp4-pack-quantized": FP4.compressed,
}
