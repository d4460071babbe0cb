"""KeptFiles: what transformers made of a checkpoint's small files, in the user's cache, for later starts.

transformers takes longer to import than a small model to load. What it makes of config.json and of the files
of a tokenizer is plain values, which are kept beside the packed weights. They belong to one state of these
files and one version of the libraries.
"""

from __future__ import annotations

import ast
import copy
import json
import logging
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

from aioinfer.model.weights_cache import UNUSED, hash_of, own_code
from aioinfer.native.build import BuildFailed, cache_directory
from aioinfer.native.trust import check_folder, make_folder, open_trusted

__all__ = ["KeptConfig", "KeptFiles", "found_or_made"]

_log = logging.getLogger("aioinfer")
#: what the values depend on, besides the files
_LIBRARIES = ("transformers", "tokenizers")
#: modules of the room text that make and read what is kept of a tokenizer
_TEXT = ("fast_tokenizer", "byte_level", "length")
#: of a config, what transformers' code makes of the others, and other names of these that it warns of
_MADE = frozenset({"per_layer_config", "torch_dtype", "use_return_dict"})


class KeptConfig:
    """The fields of a config of transformers, which has read a file, without its code.

    Fields that the config's class declares are attributes of the class here, too; others are of the object.
    """

    def __new__(cls, record: Mapping[str, Any]) -> KeptConfig:
        """``record``: from :meth:`record_of`."""
        made: KeptConfig = object.__new__(type(cls.__name__, (cls,), ast.literal_eval(record["declared"])))
        vars(made).update(ast.literal_eval(record["stated"]))
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> KeptConfig:
        kind = type(self)
        declared = {name: value for name, value in vars(kind).items() if not name.startswith("_")}
        made: KeptConfig = object.__new__(type(kind.__name__, kind.__bases__, copy.deepcopy(declared, memo)))
        vars(made).update(copy.deepcopy(vars(self), memo))
        return made

    def get_text_config(self) -> KeptConfig:
        return self

    def standardize_rope_params(self) -> None:
        """Does nothing: transformers had done it."""

    @staticmethod
    def record_of(config: Any) -> dict[str, str] | None:
        """What it is made of; None for a config whose fields are not plain values, or that has parts."""
        import torch

        if getattr(config, "is_heterogeneous", False) or config.get_text_config() is not config:
            return None
        declared, fields = {*dir(type(config))}, {*dir(config), *config.attribute_map} - _MADE
        found: dict[bool, dict[str, Any]] = {True: {}, False: {}}
        for name in sorted(name for name in fields if not name.startswith("_")):
            try:
                value = getattr(config, name)
            except AttributeError:
                continue
            except Exception:
                return None  # a config of several layers' has no such field
            if isinstance(value, torch.dtype):
                value = str(value).removeprefix("torch.")
            if callable(value):
                continue
            try:
                if ast.literal_eval(repr(value)) != value:
                    return None
            except (ValueError, SyntaxError):
                return None
            found[name in declared][name] = value
        return {"declared": repr(found[True]), "stated": repr(found[False])}


def _own_text() -> bytes:
    """The code that makes and reads what is kept of a tokenizer."""
    folder = Path(__file__).parents[1] / "text"
    return b"".join((folder / f"{name}.py").read_bytes() for name in _TEXT)


class KeptFiles:
    """The kept values of one checkpoint."""

    def __init__(self, path: Path) -> None:
        """``path``: of the checkpoint, a directory or a file, which exists."""
        self._directory: Path | None = None
        with suppress(BuildFailed):
            self._directory = cache_directory()
        self._group = hash_of(str(path.resolve()))
        files = [path] if path.is_file() else sorted(file for file in path.glob("*") if file.is_file())
        files += sorted(file for file in path.glob("additional_chat_templates/*") if file.is_file())
        stats = [(str(file), (stat := file.stat()).st_size, stat.st_mtime_ns, stat.st_ino) for file in files]
        self._state = hash_of(stats, own_code(), _own_text(), *map(version, _LIBRARIES))

    def find(self, kind: str) -> Any:
        """What was kept under a name; None if nothing was, or others could have written it."""
        if self._directory is None:
            return None
        path = self._path(kind)
        try:
            check_folder(self._directory)
            with open(open_trusted(path), "rb") as file:
                found = json.loads(file.read())
            with suppress(OSError):  # of root, or in a file system for reading only
                os.utime(path)  # the time of its last use
        except (OSError, ValueError):
            return None
        return found

    def keep(self, kind: str, value: Any) -> None:
        """Keep what JSON can hold. An error of the file system is logged."""
        if self._directory is None:
            return
        path = self._path(kind)
        try:
            make_folder(self._directory)
            opened, name = tempfile.mkstemp(dir=self._directory, prefix=f"{path.name}.")
            os.close(opened)
            try:
                Path(name).write_text(json.dumps(value))
                Path(name).chmod(0o644)  # others may read what root has put into an image
                os.replace(name, path)
            except BaseException:
                Path(name).unlink()
                raise
            self._prune(path, kind)
        except OSError as error:
            _log.warning("%s of the checkpoint is not kept for later starts: %s", kind, error)

    def _path(self, kind: str) -> Path:
        assert self._directory is not None
        return self._directory / f"{kind}-{self._group}-{self._state}.kept"

    def _prune(self, path: Path, kind: str) -> None:
        """Remove files that ``path`` has replaced, and those that were not used for long."""
        assert self._directory is not None
        now = time.time()
        for other in self._directory.glob("*.kept*"):
            named = other.name.startswith(f"{kind}-{self._group}-") and other.suffix == ".kept"
            replaced = named and other != path
            with suppress(OSError):
                if replaced or now - other.stat().st_mtime > UNUSED:
                    other.unlink()


def found_or_made(
    kept: KeptFiles | None,
    kind: str,
    read: Callable[[Any], Any],
    make: Callable[[], Any],
    record_of: Callable[[Any], Any],
) -> Any:
    """What ``read`` makes of the values that were kept, or ``make`` without; these are then kept."""
    if kept is None:
        return make()
    record = kept.find(kind)
    if record is not None:
        try:
            return read(record)
        except Exception as error:
            _log.warning("the kept %s is made anew: %s", kind, error)
    made = make()
    try:
        if made is not None and (record := record_of(made)) is not None:
            kept.keep(kind, record)
    except Exception as error:
        _log.warning("%s of the checkpoint is not kept for later starts: %r", kind, error)
    return made
