"""Bindings: the compiled kernels, as functions and handles of Python.

Everything is counted in elements and handed over as addresses; who calls keeps the memory alive. Every call
releases the interpreter's lock for as long as it computes.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Literal

from aioinfer.native.build import BuildFailed, build

__all__ = [
    "Kernels", "Number", "PackedExperts", "PackedRouter", "PackedWeights", "Stack", "ThreadPool", "kernels",
    "native_unsupported", "shared_thread_pool",
]  # fmt: skip

#: types of models that there are kernels for
Number = Literal["float32", "bfloat16"]
_NUMBERS = ("float32", "bfloat16")
#: parts of a forward's time, in the order of the C++ side
PARTS = ("linear", "attention", "rest")

_log = logging.getLogger("aioinfer")
_pointer, _int, _float, _bool = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_bool
#: what a function returns and takes; what fails returns a pointer or a truth value that is false
_COMMON: dict[str, tuple[Any, list[Any]]] = {
    "team": (_pointer, [ctypes.c_int]),
    "free_team": (None, [_pointer]),
    "lanes": (ctypes.c_int, []),
    "error": (ctypes.c_char_p, []),
    "huge_pages": (_bool, [_pointer, _int]),
    "sample": (
        _bool,
        [_pointer] * 2 + [_int] * 3 + [_pointer] * 6 + [_int, _pointer, _pointer, _int, _pointer],
    ),
    "penalise": (_bool, [_pointer] * 2 + [_int] * 3 + [_pointer] * 6 + [_int, _pointer]),
    "apply_masks": (_bool, [_pointer] * 2 + [_int] * 3 + [_pointer] * 2 + [_int]),
    "logprobs": (_bool, [_pointer] * 2 + [_int] * 4 + [_pointer] * 3),
}
_ROWS = [_int, _pointer, _pointer, _pointer, _int]
_SCORING = [_float, _float, _int, _int]
_BY_NUMBER: dict[str, tuple[Any, list[Any]]] = {
    "weights": (_pointer, [_pointer] * 3 + [_int, _int, _bool, _bool]),
    "free_weights": (None, [_pointer]),
    "linear": (_bool, [_pointer, _pointer, _pointer, _int, _int, _pointer]),
    "router": (_pointer, [_pointer, _pointer, _bool, _int, _int, _int, _bool, _float]),
    "free_router": (None, [_pointer]),
    "route": (_bool, [_pointer] * 3 + [_int, _int, _pointer, _pointer]),
    "experts": (_pointer, [_int] * 3 + [_bool]),
    "free_experts": (None, [_pointer]),
    "set_expert": (_bool, [_pointer, _pointer, _int, _pointer, _pointer]),
    "mix": (_bool, [_pointer] * 3 + [_int, _int] + [_pointer] * 3),
    "attend": (
        _bool,
        [_pointer] * 4 + [_int] * 5 + [_pointer, _float, _pointer, _pointer, _int, _pointer, _int]
        + [*_SCORING, _int, _pointer, *_ROWS, _pointer],
    ),
    "decoder": (_pointer, [_pointer] * 3 + [_int] * 3 + [_float, _pointer, _pointer, *[_int] * 3, _float]),
    "free_decoder": (None, [_pointer]),
    "add_layer": (_bool, [_pointer] * 10 + _SCORING),
    "forward": (
        _bool,
        [_pointer] * 3 + [_int, _int] + [_pointer] * 3 + _ROWS + [_int] + [_pointer] * 3,
    ),
}  # fmt: skip


class Kernels:
    """The loaded library."""

    def __init__(self, path: str) -> None:
        """Raises OSError if it cannot be loaded."""
        self._library = ctypes.CDLL(path)
        self._functions = {name: self._declare(name, *signature) for name, signature in _COMMON.items()}
        for number in _NUMBERS:
            for name, signature in _BY_NUMBER.items():
                self._functions[f"{name}_{number}"] = self._declare(f"{name}_{number}", *signature)

    def _declare(self, name: str, result: Any, arguments: list[Any]) -> Callable[..., Any]:
        function = getattr(self._library, f"aioinfer_{name}")
        function.restype, function.argtypes = result, arguments
        if result in (_pointer, _bool):
            function.errcheck = self._check
        return function  # type: ignore[no-any-return]

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a function of the library. Raises MemoryError if it says that it failed: nothing but memory
        and threads can be short in there."""
        return self._functions[name](*arguments)

    def _check(self, result: Any, function: Any, arguments: Any) -> Any:
        if not result:
            raise MemoryError(f"{function.__name__}: {self._functions['error']().decode()}")
        return result

    def release(self, name: str, handle: int) -> None:
        """Free a handle."""
        self._functions[name](handle)


def _release(owner: object, kernels: Kernels, name: str, handle: int) -> None:
    """Have a handle freed with its owner, but not when the interpreter exits: a launch thread that was left
    behind may be computing with it."""
    weakref.finalize(owner, kernels.release, name, handle).atexit = False


_lock = threading.Lock()
_loaded: Kernels | str | None = None
_teams: weakref.WeakValueDictionary[int, ThreadPool] = weakref.WeakValueDictionary()


def native_unsupported(progress: Callable[[int, int], None] | None = None) -> str | None:
    """What keeps native kernels from running on this machine, in words; None if nothing does.

    Compiles them if that has not been done yet. What it comes to is settled once per process.
    """
    global _loaded

    def tell(done: int, total: int) -> None:
        if done == 0:
            _log.info("compiling native kernels, once for this processor")
        if progress is not None:
            progress(done, total)

    with _lock:
        if _loaded is None:
            try:
                _loaded = Kernels(str(build(tell)))
            except (BuildFailed, OSError, AttributeError) as error:
                _loaded = str(error)
                _log.warning("no native kernels, the CPU will be slower than it could be: %s", error)
        return _loaded if isinstance(_loaded, str) else None


def kernels() -> Kernels:
    """The library. Raises RuntimeError where there is an unsupported_reason."""
    unsupported_reason = native_unsupported()
    if unsupported_reason is not None or not isinstance(_loaded, Kernels):
        raise RuntimeError(f"no native kernels: {unsupported_reason}")
    return _loaded


class ThreadPool:
    """Threads that compute together; see ``thread_pool.hpp``. They end with its last reference."""

    __slots__ = ("__weakref__", "handle", "kernels", "threads")

    def __init__(self, threads: int) -> None:
        self.kernels = kernels()
        self.threads = threads
        self.handle: int = self.kernels.call("team", threads)
        _release(self, self.kernels, "free_team", self.handle)


def shared_thread_pool(threads: int) -> ThreadPool:
    """The one team of so many threads: a process's engines take turns rather than be in each other's way."""
    with _lock:
        team = _teams.get(threads)
    if team is None:
        team = ThreadPool(threads)
        with _lock:
            team = _teams.setdefault(threads, team)
    return team


class PackedWeights:
    """Weights of a linear layer in the layout of the kernels; the original is not needed any more."""

    __slots__ = ("__weakref__", "gated", "handle", "inner", "number", "outputs", "team")

    def __init__(
        self,
        team: ThreadPool,
        number: Number,
        rows: int,
        bias: int | None,
        outputs: int,
        inner: int,
        *,
        gated: bool = False,
        rounded: bool = False,
    ) -> None:
        """``rows``: address of [outputs, inner], or, gated, of [2 * outputs, inner], gates first. ``bias``:
        address of as many elements as there are rows, or None. ``rounded``: to 8 bits, with a factor for
        every output."""
        self.team, self.number, self.outputs, self.inner, self.gated = team, number, outputs, inner, gated
        call = team.kernels.call
        self.handle: int = call(f"weights_{number}", team.handle, rows, bias, outputs, inner, gated, rounded)
        _release(self, team.kernels, f"free_weights_{number}", self.handle)

    def apply(self, values: int, count: int, out: int) -> None:
        """[count, inner] to [count, outputs]; gated: ``silu(gate) * up``."""
        call = self.team.kernels.call
        call(f"linear_{self.number}", self.team.handle, self.handle, values, count, self.inner, out)


class PackedRouter:
    """Sends tokens to experts; see ``routing.hpp``."""

    __slots__ = ("__weakref__", "_weight", "handle", "number", "top_k")

    def __init__(
        self,
        number: Number,
        weight: PackedWeights,
        bias: int | None,
        *,
        sigmoid: bool,
        top_k: int,
        groups: tuple[int, int],
        normalize: bool,
        scale: float,
    ) -> None:
        """``weight``: float32, an output for each expert. ``bias``: address of as many float32, or None.
        ``groups``: how many there are, and to how many of them a token may go."""
        self.number, self.top_k, self._weight = number, top_k, weight
        kernels = weight.team.kernels
        rule = sigmoid, top_k, *groups, normalize, scale
        self.handle: int = kernels.call(f"router_{number}", weight.handle, bias, *rule)
        _release(self, kernels, f"free_router_{number}", self.handle)

    def apply(self, values: int, count: int, weights: int, experts: int) -> None:
        """[count, inner] to weights, float32, and experts, int64, [count, top_k] each."""
        team, inner = self._weight.team, self._weight.inner
        team.kernels.call(
            f"route_{self.number}", team.handle, self.handle, values, count, inner, weights, experts
        )


class PackedExperts:
    """The SwiGLUs of a layer in the layout of the kernels; see ``experts.hpp``."""

    __slots__ = ("__weakref__", "count", "handle", "hidden", "middle", "number", "team")

    def __init__(
        self, team: ThreadPool, number: Number, count: int, hidden: int, middle: int, *, rounded: bool = False
    ) -> None:
        """Room for them, which :meth:`pack` fills. ``rounded``: to 8 bits."""
        self.team, self.number, self.count, self.hidden, self.middle = team, number, count, hidden, middle
        self.handle: int = team.kernels.call(f"experts_{number}", count, hidden, middle, rounded)
        _release(self, team.kernels, f"free_experts_{number}", self.handle)

    def pack(self, expert: int, gate_up: int, down: int) -> None:
        """Pack one expert, from [2 * middle, hidden], gates first, and [hidden, middle]."""
        call = self.team.kernels.call
        call(f"set_expert_{self.number}", self.team.handle, self.handle, expert, gate_up, down)

    def apply(self, values: int, count: int, top_k: int, chosen: int, weights: int, out: int) -> None:
        """[count, hidden] to the same, by ``chosen`` int64 and ``weights`` float32, [count, top_k] each."""
        call, team = self.team.kernels.call, self.team
        arguments = values, count, top_k, chosen, weights, out
        call(f"mix_{self.number}", team.handle, self.handle, *arguments)


class Stack:
    """All layers of a decoder, computed by one call."""

    __slots__ = ("__weakref__", "_forward", "_kept", "handle", "number", "team")

    def __init__(self, team: ThreadPool, number: Number, head: PackedWeights, *arguments: Any) -> None:
        """See ``decoder`` in ``models.cpp`` for the arguments: embedding, norm, then those behind head."""
        self.team, self.number = team, number
        embedding, norm, *rest = arguments
        self.handle: int = team.kernels.call(f"decoder_{number}", embedding, norm, head.handle, *rest)
        self._kept: list[object] = [head]
        self._forward = f"forward_{number}"
        _release(self, team.kernels, f"free_decoder_{number}", self.handle)

    def add_layer(
        self,
        norms: tuple[int, int | None, int],
        weights: Sequence[PackedWeights | None],
        experts: tuple[PackedRouter, PackedExperts] | None,
        scoring: tuple[float, float, int, int],
    ) -> None:
        """Norms of attention, heads and feed-forward part; weights qkv, out, gate_up and down, the last two
        None where experts are all there is; scale, soft cap (0: none), window (0: all) and block."""
        attention, heads, mlp = norms
        qkv, out, gate_up, down = (packed and packed.handle for packed in weights)
        router, stack = (packed.handle for packed in experts) if experts else (None, None)
        self.team.kernels.call(
            f"add_layer_{self.number}",
            *(self.handle, attention, qkv, heads, out, mlp, gate_up, down, router, stack),
            *scoring,
        )
        self._kept += [*weights, *(experts or ())]

    def forward(self, *arguments: int) -> None:
        """See ``forward`` in ``models.cpp`` for the arguments behind team."""
        self.team.kernels.call(self._forward, self.handle, self.team.handle, *arguments)
