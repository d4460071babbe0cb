"""Where tools state how weights are quantised: mostly in ``quantization_config``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aioinfer.checkpoint.tensors import read_json_object

__all__ = ["side_files", "stated_quantisation"]

#: files beside config.json, of old AutoGPTQ and AutoAWQ and of ModelOpt, and the method
_FILES = {"hf_quant_config.json": "modelopt", "quantize_config.json": "gptq", "quant_config.json": "awq"}


def side_files(path: Path) -> list[Path]:
    """The files beside config.json of a directory that may state it."""
    return [file for name in _FILES if (file := path / name).is_file()]


def stated_quantisation(path: Path, config: Mapping[str, Any]) -> Any | None:
    """The ``quantization_config`` of a directory with a config.json, or what stands for it; None if its
    weights are not quantised. Raises ConfigError for a file that cannot be read."""
    found = config.get("quantization_config")
    by_mlx = config.get("quantization")
    if isinstance(by_mlx, dict) and "bits" in by_mlx:
        # It repeats its own field under the usual name, without a method.
        return {"quant_method": "mlx", **by_mlx, **(found if isinstance(found, dict) else {})}
    if found is None and isinstance(older := config.get("compression_config"), dict):
        return {"quant_method": "compressed-tensors", **older}
    if found is not None:
        return found
    for file in side_files(path):
        stated = read_json_object(file)
        inner = stated.get("quantization")
        return {"quant_method": _FILES[file.name], **stated, **(inner if isinstance(inner, dict) else {})}
    return None
