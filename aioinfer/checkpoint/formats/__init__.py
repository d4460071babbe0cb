"""Formats of quantised safetensors, one file each, chosen by the config's ``quantization_config``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aioinfer.checkpoint.formats.autoround import autoround
from aioinfer.checkpoint.formats.awq import AWQ
from aioinfer.checkpoint.formats.base import Format, NothingQuantised, QuantisedTensors
from aioinfer.checkpoint.formats.bitsandbytes import bitsandbytes
from aioinfer.checkpoint.formats.compressed import compressed
from aioinfer.checkpoint.formats.fields import FIELDS, check_fields
from aioinfer.checkpoint.formats.fp4 import ModelOpt
from aioinfer.checkpoint.formats.fp8 import FP8
from aioinfer.checkpoint.formats.gptq import gptq
from aioinfer.checkpoint.formats.mxfp4 import MXFP4Tensors
from aioinfer.checkpoint.tensors import Tensors
from aioinfer.errors import ConfigError, shown

__all__ = ["NothingQuantised", "quantised_tensors"]


#: the name of AutoRound's method in older files
_OLD_AUTOROUND = "intel/auto-round"


def _by_modules(form: Callable[[dict[str, Any]], Format]) -> Callable[[Tensors, dict[str, Any]], Tensors]:
    """Reads a format that stores the weight of a module in parts."""
    return lambda tensors, config: QuantisedTensors(tensors, form(config))


#: by ``quant_method``
_FORMATS: dict[str, Callable[[Tensors, dict[str, Any]], Tensors]] = {
    "auto-round": _by_modules(autoround),
    "awq": _by_modules(AWQ),
    "bitsandbytes": _by_modules(bitsandbytes),
    "compressed-tensors": _by_modules(compressed),
    "fp8": _by_modules(FP8),
    "gptq": _by_modules(gptq),
    "modelopt": _by_modules(ModelOpt),
    "mxfp4": lambda tensors, _: MXFP4Tensors(tensors),
}


def quantised_tensors(tensors: Tensors, config: Any) -> Tensors:
    """The tensors of a checkpoint whose config has this ``quantization_config``. Raises ConfigError for a
    format that is not supported, and if a part of a quantised tensor is missing."""
    if not isinstance(config, dict):
        raise ConfigError(f"model: quantization_config must be an object, got {shown(config)}")
    method = config.get("quant_method")
    if method == _OLD_AUTOROUND:
        method = "auto-round"
    if not isinstance(method, str) or method not in _FORMATS:
        raise ConfigError(
            f"model: weights quantised by {shown(method)} are not supported: {', '.join(_FORMATS)} are, and "
            "the model that they were made of"
        )
    check_fields(config, FIELDS[method], "quantization_config")
    try:
        return _FORMATS[method](tensors, config)
    except ConfigError:
        raise
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise ConfigError(f"model: quantization_config describes no {method}: {error!r}") from error
