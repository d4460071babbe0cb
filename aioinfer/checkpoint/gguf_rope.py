"""The rotary positions that the metadata and factors of a GGUF file state, as config.json would."""

from __future__ import annotations

from typing import Any

from aioinfer.checkpoint.gguf_file import GGUFFile
from aioinfer.errors import ConfigError, shown

__all__ = ["DEFAULT_BASE", "rope_of"]

#: of files that state none
DEFAULT_BASE = 10_000.0
_NUMBER = (int, float)
#: parameters of YaRN in a config, and their names in metadata; transformers' defaults apply without them
_YARN = {"attention_factor": "yarn_attn_factor", "beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}


def rope_of(file: GGUFFile, prefix: str, size: int) -> dict[str, Any]:
    """Plain, scaled as the metadata say, or as Llama 3 does by a tensor of factors. ``size``: of a head.
    Raises ConfigError for a scaling that is not known."""
    base = float(file.value(f"{prefix}.rope.freq_base", _NUMBER, DEFAULT_BASE))
    plain = {"rope_type": "default", "rope_theta": base}
    rotated = file.value(f"{prefix}.rope.dimension_count", int, size)
    if size != rotated:
        plain["partial_rotary_factor"] = rotated / size
    if "rope_freqs.weight" in file.tensors:
        return {**plain, **_llama3(file, base, size)}
    if "rope_factors_long.weight" in file.tensors or "rope_factors_short.weight" in file.tensors:
        raise ConfigError("model: rotary positions that depend on the length (LongRoPE) are not supported")
    # Old files have a factor under another name, and no type.
    factor = file.value(
        f"{prefix}.rope.scaling.factor", _NUMBER, file.metadata.get(f"{prefix}.rope.scale_linear", 1.0)
    )
    kind = file.value(f"{prefix}.rope.scaling.type", str, "linear")
    if kind == "none" or (kind == "linear" and factor in (0, 1)):
        return plain
    if kind == "linear":
        return {**plain, "rope_type": "linear", "factor": float(factor)}
    if kind == "yarn":
        return {**plain, **_yarn(file, f"{prefix}.rope.scaling"), "factor": float(factor)}
    raise ConfigError(f"model: rotary positions scaled by {shown(kind)} are not supported")


def _yarn(file: GGUFFile, prefix: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        "rope_type": "yarn",
        "original_max_position_embeddings": file.value(f"{prefix}.original_context_length", int),
    }
    for name, stated in _YARN.items():
        if f"{prefix}.{stated}" in file.metadata:
            found[name] = float(file.value(f"{prefix}.{stated}", _NUMBER))
    return found


def _llama3(file: GGUFFile, base: float, size: int) -> dict[str, Any]:
    """Llama 3's scaling, whose parameters are not in the file, by the factors that follow from them.

    All models that are so scaled differ in one parameter, which is the largest factor. Raises ConfigError if
    the factors are not those that follow from it."""
    import numpy as np

    stored = file.tensors["rope_freqs.weight"]
    if stored.kind.name != "F32" or stored.shape != (size // 2,):
        raise ConfigError(f"model: rope_freqs.weight is {stored.kind.name} {stored.shape}")
    factors = stored.data.view("<f4")[0].astype(np.float64)
    parameters = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    factor = float(factors.max())
    wavelengths = 2 * np.pi * base ** (np.arange(0, size, 2) / size)
    smooth = np.clip((8192 / wavelengths - 1) / 3, 0, 1)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if not np.allclose(factors, expected, rtol=1e-3):
        raise ConfigError(
            "model: the rotary factors of the GGUF file are not Llama 3's, others are not supported"
        )
    return {"rope_type": "llama3", "factor": factor, **parameters}
