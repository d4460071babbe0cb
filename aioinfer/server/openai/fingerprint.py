"""The fingerprint in answers: the same seed can give other tokens where it differs."""

from __future__ import annotations

import hashlib

from aioinfer._version import __version__
from aioinfer.config import EngineConfig
from aioinfer.execution.device import DeviceInfo

__all__ = ["fingerprint"]


def fingerprint(model: str, config: EngineConfig, info: DeviceInfo) -> str:
    """``system_fingerprint`` of an engine: of its model's name, this version, and what computes. The same in
    every process that has these."""
    kernels = [f"{part} {name.partition(' (')[0]}" for part, name in sorted(info.kernels.items())]
    parts = [__version__, model, config.quantization, info.implementation, info.dtype, info.device, *kernels]
    if info.rotary_factors:
        parts.append(info.rotary_factors)
    if config.chat_template is not None:
        parts.append(config.chat_template)
    return f"fp_{hashlib.sha256(repr(parts).encode()).hexdigest()[:12]}"
