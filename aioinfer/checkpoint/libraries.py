"""Loading torch and transformers beside an event loop that goes on, one thread at a time.

Importing torch loads libraries of hundreds of megabytes and runs their initialisers, and Python's import
keeps the interpreter's lock meanwhile: the loop would stand still, whichever thread makes the import.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from aioinfer.forks import in_children
from aioinfer.system.support import c_function, library_file

__all__ = ["import_extensions", "importing_transformers", "preload_torch"]

#: as torch loads them, in this order: the first one makes its symbols visible to the second
_LIBRARIES = (("libtorch_global_deps", "RTLD_GLOBAL"), ("libtorch_python", "RTLD_LOCAL"))
#: other modules with compiled parts that an engine needs
_EXTENSIONS = (
    *("importlib.metadata", "jinja2", "mmap", "msgspec", "numpy", "pydantic", "tokenizers", "xxhash"),
    "zoneinfo",
)
#: held while transformers is imported, and while torch's libraries are loaded
_importing, _loading = threading.Lock(), threading.Lock()


@in_children
def _forked() -> None:
    global _importing, _loading
    _importing, _loading = threading.Lock(), threading.Lock()


@contextmanager
def importing_transformers() -> Iterator[None]:
    """Within it, and nowhere else, parts of transformers are imported. Blocks, for seconds the first time.

    The modules of transformers import each other when they are used, and of several threads that begin with
    them at once some find halves of them. Some of them import torch.
    """
    preload_torch()
    with _importing:
        from transformers import AutoConfig, PreTrainedTokenizerFast  # noqa: F401

        yield


def import_extensions() -> None:
    """Import the modules with compiled parts that an engine needs, but torch. While torch's libraries are
    loaded, loading another one waits with the interpreter's lock."""
    for name in _EXTENSIONS:
        importlib.import_module(name)


def preload_torch() -> bool:
    """Load torch's libraries without the interpreter's lock, so that its import finds them loaded. Blocks.

    Returns whether they are loaded now. Where they are not, because torch is not installed or its files have
    other names, its import loads them as ever.
    """
    if "torch" in sys.modules:
        return True
    spec = importlib.util.find_spec("torch")
    # A function that ctypes calls runs without the interpreter's lock; ctypes.CDLL itself keeps it.
    load = c_function("dlopen")
    if spec is None or spec.origin is None or load is None:
        return False
    place = Path(spec.origin).parent / "lib"
    paths = [(place / library_file(name), getattr(os, mode)) for name, mode in _LIBRARIES]
    load.restype, load.argtypes = ctypes.c_void_p, [ctypes.c_char_p, ctypes.c_int]
    with _loading:
        return all(path.is_file() and load(os.fsencode(path), mode | os.RTLD_NOW) for path, mode in paths)
