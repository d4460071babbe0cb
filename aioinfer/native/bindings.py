"""Bindings: the compiled kernels, as functions and handles of Python.

Sizes are counted in elements, and memory is given by its address; the caller keeps it alive. Every call
releases the interpreter's lock while it computes. Addresses are trusted; sizes and indices are checked by the
entry points (``checks.hpp``), and a call that is refused is an :class:`InvalidArguments`.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import weakref
from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal, cast

from aioinfer.forks import in_children
from aioinfer.native.build import UNITS, BuildFailed, build
from aioinfer.native.levels import SHIPPED, origin
from aioinfer.native.processor import PERMITTED, Tiles, choose_tiles
from aioinfer.native.sampling_arguments import ENTRIES, STRUCTURES
from aioinfer.native.structures import Arguments, describe
from aioinfer.native.trust import open_trusted

__all__ = [
    "GATES", "PARTS", "InvalidArguments", "KernelError", "Kernels", "LayoutMismatch", "Number",
    "ThreadPool", "ThreadsUnavailable", "arithmetic", "instructions", "kernels",
    "native_unsupported", "release", "shared_thread_pool",
]  # fmt: skip

#: types of models that there are kernels for
Number = Literal["float32", "bfloat16"]
_NUMBERS: tuple[Number, ...] = ("float32", "bfloat16")
#: parts of a forward's time, in the order of the C++ side
PARTS = ("linear", "attention", "rest")
#: numbers of the functions between the products of a feed-forward part, see ``gates.hpp``
_GATES = ("none", "silu", "gelu_tanh", "clamped_silu", "gelu", "relu", "relu_squared")
GATES = {name: number for number, name in enumerate(_GATES)}

_log = logging.getLogger("aioinfer")
_handle, _done, _text, _int = ctypes.c_void_p, ctypes.c_bool, ctypes.c_char_p, ctypes.c_int
#: Results and arguments of entry points without structures. A null handle and a false ``_done`` are failures.
_COMMON: dict[str, tuple[Any, list[Any]]] = {
    "error": (_text, []),
    "error_kind": (_int, []),
    "layout": (_text, []),
    "lanes": (_int, []),
    "instructions": (_text, []),
    "arithmetic": (_text, []),
    "huge_pages": (_done, [ctypes.c_void_p, ctypes.c_int64]),
    "thread_pool": (_handle, [_int]),
    "free_thread_pool": (None, [_handle]),
    "checksum": (_done, [_handle, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p]),
}
#: Those that exist for every type of model, which follows in their names.
_BY_NUMBER: dict[str, tuple[Any, list[Any]]] = {
    "exchange_weights": (_done, [_handle, _handle]),
    "free_weights": (None, [_handle]),
    "weights_data": (_handle, [_handle]),
    "weights_bytes": (ctypes.c_int64, [_handle]),
    "weights_factors": (ctypes.c_int64, [_handle]),
    "exchange_routers": (_done, [_handle, _handle]),
    "free_router": (None, [_handle]),
    "free_experts": (None, [_handle]),
    "free_decoder": (None, [_handle]),
    "set_residual_scale": (_done, [_handle, ctypes.c_int64, ctypes.c_float]),
    "set_table": (_done, [_handle, ctypes.c_void_p]),
    "adapter": (_handle, [_handle]),
    "free_adapter": (None, [_handle]),
    "set_adapter": (_done, [_handle, ctypes.c_int64, _handle]),
}


class LayoutMismatch(Exception):
    """The library was compiled with other argument structures than those of the bindings."""


class KernelError(Exception):
    """A kernel failed for a reason of its own."""


class InvalidArguments(KernelError, ValueError):
    """A size or an index lies beyond the memory it is for; nothing was computed."""


class ThreadsUnavailable(KernelError):
    """The system refuses a thread."""


#: exceptions by the ``ErrorKind`` of ``interface.hpp``
_ERRORS: tuple[type[Exception], ...] = (MemoryError, InvalidArguments, ThreadsUnavailable, KernelError)


class Kernels:
    """The loaded library."""

    def __init__(self, path: str, tiles: Tiles) -> None:
        """
        Args:
            tiles: those that it was compiled with.

        Raises:
            OSError: the library cannot be loaded; NotTrusted: others could have written it.
            AttributeError: it lacks an entry point.
            LayoutMismatch: an argument structure differs.
        """
        #: of the file: it has a hash of the sources and of what they were compiled for
        self.name = os.path.basename(path)
        self._library = _open_library(path)
        self._origin, self._tiles = origin(path), tiles
        self._functions: dict[str, Callable[..., Any]] = {}
        #: by structure and type of model
        self._entries: dict[tuple[type[Arguments], Number | None], Callable[..., Any]] = {}
        for name, signature in _COMMON.items():
            self._declare(name, *signature)
        self._check_layout()
        for number in _NUMBERS:
            for name, signature in _BY_NUMBER.items():
                self._declare(f"{name}_{number}", *signature)
        for kind, (name, makes, by_number) in ENTRIES.items():
            for each in _NUMBERS if by_number else (None,):
                full, result = f"{name}_{each}" if each else name, _handle if makes else _done
                self._entries[kind, each] = self._declare(full, result, [ctypes.POINTER(kind)])

    def _declare(self, name: str, result: Any, arguments: list[Any]) -> Callable[..., Any]:
        function = getattr(self._library, f"aioinfer_{name}")
        function.restype, function.argtypes = result, arguments
        if result in (_handle, _done):
            function.errcheck = self._check
        self._functions[name] = function
        return cast(Callable[..., Any], function)

    def _check_layout(self) -> None:
        theirs = {line.split()[0]: line for line in (self.function("layout") or b"").decode().splitlines()}
        ours = {structure.__name__: describe(structure) for structure in STRUCTURES}
        for name in sorted(theirs.keys() | ours.keys()):
            here, there = ours.get(name, "").split(), theirs.get(name, "").split()
            for mine, its in zip_longest(here, there, fillvalue="nothing"):
                if mine != its:
                    raise LayoutMismatch(
                        f"argument structure {name}: the library has {its} where the bindings have {mine}"
                    )

    def call(self, arguments: Arguments, number: Number | None = None) -> Any:
        """Call the entry point of these arguments, for a type of model where there is one for each.

        Returns:
            The handle of the new object; True if it makes nothing.

        Raises:
            InvalidArguments: a size or an index is not one of the memory it is for.
            MemoryError: there was not enough, on whichever thread.
            ThreadsUnavailable: the pool lost its threads in a fork, and the system refuses new ones.
            KernelError: anything else.
        """
        return self._entries[type(arguments), number](arguments)

    def function(self, name: str, *arguments: Any) -> Any:
        """Call an entry point without a structure. Raises as :meth:`call` does."""
        return self._functions[name](*arguments)

    @property
    def instructions(self) -> str:
        """The instruction sets that it was compiled for, where, and why these: "AVX2 (level avx2 of the
        package; the processor has no AMX)"."""
        name, reason = self.function("instructions").decode(), self._tiles.reason
        if self._tiles == PERMITTED and name != "AMX tiles":
            reason = "the compiler, or AIOINFER_CXXFLAGS, does without AMX"
        return f"{name} ({'; '.join(filter(None, (self._origin, reason)))})"

    def _check(self, result: Any, function: Any, arguments: Any) -> Any:
        if not result:
            kind, text = self._functions["error_kind"](), self._functions["error"]().decode()
            raise _ERRORS[kind](f"{function.__name__}: {text}")
        return result


def _open_library(path: str) -> ctypes.CDLL:
    """Load the very file that was found to be this user's. Raises OSError."""
    if Path(path).parent == SHIPPED:
        return ctypes.CDLL(path)  # as trustworthy as this code
    opened = open_trusted(Path(path))
    # Kept open: the loader knows a library by its path, and would take this one for another of that number.
    by_descriptor = f"/proc/self/fd/{opened}"
    try:
        return ctypes.CDLL(by_descriptor if os.path.exists(by_descriptor) else path)
    except OSError as error:
        os.close(opened)
        raise OSError(f"{path} cannot be loaded: {error}") from error


def release(owner: object, kernels: Kernels, name: str, handle: int) -> None:
    """Free a handle with its owner, but not when the interpreter exits: a launch thread that is still running
    may be computing with it."""
    weakref.finalize(owner, kernels.function, name, handle).atexit = False


#: seconds between two calls of ``progress`` while another thread compiles
_PULSE = 0.1
#: held while kernels are compiled and loaded
_loading = threading.Lock()
_loaded: Kernels | str | None = None
_pools_lock = threading.Lock()
_pools: weakref.WeakValueDictionary[int, ThreadPool] = weakref.WeakValueDictionary()


@in_children
def _forked() -> None:
    """Threads that held a lock are not there to release it."""
    global _loading, _pools_lock
    _loading, _pools_lock = threading.Lock(), threading.Lock()


def native_unsupported(progress: Callable[[int, int], None] | None = None) -> str | None:
    """The reason why native kernels cannot run on this machine; None if they can.

    Compiles them if that has not been done yet. The answer is the same for the rest of the process.

    ``progress`` is as in :func:`~aioinfer.native.build.build`: its exceptions end the compilers, are raised
    here, and leave the question open.
    """
    global _loaded
    if _loaded is None:
        while not _loading.acquire(timeout=_PULSE):
            if progress is not None:
                progress(0, UNITS)
        try:
            if _loaded is None:
                _loaded = _load(progress)
        finally:
            _loading.release()
    return _loaded if isinstance(_loaded, str) else None


def _load(progress: Callable[[int, int], None] | None) -> Kernels | str:
    """The library, or why there is none."""
    told = False

    def tell(done: int, total: int) -> None:
        nonlocal told
        if not told:
            _log.info("compiling native kernels, once for this processor")
            told = True
        if progress is not None:
            progress(done, total)

    try:
        tiles = choose_tiles()
        return Kernels(str(build(tell, tiles)), tiles)
    except (BuildFailed, ValueError, OSError, AttributeError, LayoutMismatch) as error:
        _log.warning("no native kernels, the CPU will be slower than it could be: %s", error)
        return str(error)


def kernels() -> Kernels:
    """The library. Raises RuntimeError where there is an unsupported_reason."""
    unsupported_reason = native_unsupported()
    if unsupported_reason is not None or not isinstance(_loaded, Kernels):
        raise RuntimeError(f"no native kernels: {unsupported_reason}")
    return _loaded


def instructions() -> str:
    """See :attr:`Kernels.instructions`."""
    return kernels().instructions


def arithmetic(number: Number, *, packed: bool) -> str:
    """The class of the float arithmetic of a model's kernels: results of equal ones have the same bits.

    "fused": every product and sum of a kind is rounded once, on x86 from AVX2 on and on ARM; "unfused": on
    older processors; "tiles" and "bf16 dot": products of bfloat16 by AMX, and of ARM. ``packed``: some
    weights are not rounded to fewer bits.
    """
    found: str = kernels().function("arithmetic").decode()
    # What has an order of its own: tiles, of products and of attention; BFDOT, of products alone.
    own = number == "bfloat16" and (packed or found == "tiles")
    return found if found == "unfused" or own else "fused"


class ThreadPool:
    """Threads that compute together; see ``thread_pool.hpp``. They end with the last reference to it.

    In a forked process they are started anew with the first call there.
    """

    def __init__(self, threads: int) -> None:
        """Raises ThreadsUnavailable if the system refuses one of them."""
        if not 1 <= threads < 1 << 15:
            raise InvalidArguments(f"a pool of {threads} threads")
        self.kernels = kernels()
        self.threads = threads
        self.handle: int = self.kernels.function("thread_pool", threads)
        release(self, self.kernels, "free_thread_pool", self.handle)

    def checksum(self, address: int, size: int) -> int:
        """A hash of ``size`` bytes, 64 bits: to recognise damage, not malice."""
        found = ctypes.c_uint64()
        self.kernels.function("checksum", self.handle, address, size, ctypes.addressof(found))
        return found.value


def shared_thread_pool(threads: int) -> ThreadPool:
    """The process's one pool of this size: engines take turns on it instead of competing for cores."""
    with _pools_lock:
        pool = _pools.get(threads)
    if pool is None:
        pool = ThreadPool(threads)
        with _pools_lock:
            pool = _pools.setdefault(threads, pool)
    return pool
