"""Formats of quantised safetensors, one file each, chosen by the config's ``quantization_config``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aioinfer.checkpoint.formats.awq import AWQ
from aioinfer.checkpoint.formats.base import Format, QuantisedTensors
from aioinfer.checkpoint.formats.compressed import IntQuantized, PackQuantized
from aioinfer.checkpoint.formats.fp8 import FP8
from aioinfer.checkpoint.formats.gptq import GPTQ
from aioinfer.checkpoint.tensors import Tensors
from aioinfer.errors import ConfigError, shown

__all__ = ["quantised_tensors"]


def _compressed(config: dict[str, Any]) -> Format:
    """The one of several formats that a config of compressed-tensors names."""
    name = config.get("format")
    if name in ("float-quantized", "naive-quantized"):
        return FP8.compressed(config)
    if name == "pack-quantized":
        return PackQuantized(config)
    if name == "int-quantized":
        return IntQuantized(config)
    raise ConfigError(f"model: weights of the format {shown(name)} of compressed-tensors are not supported")


#: by ``quant_method``
_FORMATS: dict[str, Callable[[dict[str, Any]], Format]] = {
    "awq": AWQ,
    "compressed-tensors": _compressed,
    "fp8": FP8,
    "gptq": GPTQ,
}


def quantised_tensors(tensors: Tensors, config: Any) -> Tensors:
    """The tensors of a checkpoint whose config has this ``quantization_config``. Raises ConfigError for a
    format that is not supported, and if a part of a quantised tensor is missing."""
    if not isinstance(config, dict):
        raise ConfigError(f"model: quantization_config must be an object, got {shown(config)}")
    method = config.get("quant_method")
    if not isinstance(method, str) or method not in _FORMATS:
        raise ConfigError(
            f"model: weights quantised by {shown(method)} are not supported: {', '.join(_FORMATS)} are"
        )
    try:
        found = _FORMATS[method](config)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise ConfigError(f"model: quantization_config describes no {method}: {error!r}") from error
    return QuantisedTensors(tensors, found)
