"""A stand-in for CUDA graphs on the CPU: every operation of a call is recorded, and done again at replay on
the tensors it was recorded with. What Python decided while recording is settled for good, as in a graph.

Graphs of one pool have their memory from each other: a replay may overwrite whatever any of them made while
it was captured. Here it always does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["HostRead", "Recording", "launch", "record", "recorded"]

_READS = ("item", "_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2")


class HostRead(RuntimeError):
    """The host looked at a value that only the device knows: that cannot be captured."""


class Recording(TorchDispatchMode):
    """Records by being entered; see :class:`~aioinfer.execution.graphs.Graph`."""

    def __init__(self) -> None:
        super().__init__()
        self._operations: list[Callable[[], None]] = []
        #: memory that came to be while it was recorded
        self._made: list[torch.Tensor] = []
        #: the graphs that it shares memory with, itself among them
        self.pool: list[Recording] = [self]
        self.replays = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket.__name__ in _READS:
            raise HostRead(str(func))
        results = func(*args, **kwargs)
        operation = _Operation(func, args, kwargs, results)
        self._operations.append(operation)
        self._made += operation.made
        return results

    def replay(self) -> None:
        self.replays += 1
        for graph in self.pool:
            for tensor in graph._made:
                tensor.fill_(float("nan") if tensor.is_floating_point() else 77)
        for operation in self._operations:
            operation()

    def launch(self, kernel: Callable[[], None]) -> None:
        """A kernel that torch knows nothing of."""
        kernel()
        self._operations.append(kernel)


class _Operation:
    """One call of torch, whose results go where they went the first time."""

    def __init__(self, func: Any, args: Any, kwargs: Any, results: Any) -> None:
        self._call = func, args, kwargs
        #: of the shapes they have now, whatever becomes of them in place
        self._results = [tensor.detach() for tensor in _tensors(results)]
        given = {tensor.untyped_storage().data_ptr() for tensor in _tensors((args, kwargs))}
        #: results in place; views of what was given need no call at all
        self._there = all(tensor.untyped_storage().data_ptr() in given for tensor in self._results)
        self._view = self._there and (not func._schema.is_mutable or torch.Tag.inplace_view in func.tags)

    @property
    def made(self) -> list[torch.Tensor]:
        return [] if self._there else self._results

    def __call__(self) -> None:
        if self._view:
            return
        func, args, kwargs = self._call
        results = _tensors(func(*args, **kwargs))
        if not self._there:
            for old, new in zip(self._results, results, strict=True):
                old.copy_(new)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def launch(recording: Recording, kernel: Callable[[], None]) -> None:
    """Within what is recorded, a kernel that torch knows nothing of. It works on copies of its arguments, by
    operations of torch that are no part of the graph."""
    with torch.utils._python_dispatch._disable_current_modes():
        recording.launch(kernel)


@contextmanager
def recorded(recording: Recording) -> Iterator[None]:
    """What happens meanwhile is recorded, Triton's kernels, too."""
    from triton.runtime import interpreter

    run = interpreter.GridExecutor.__call__

    def launched(self: Any, *args: Any, **kwargs: Any) -> None:
        launch(recording, lambda: run(self, *args, **kwargs))

    interpreter.GridExecutor.__call__ = launched
    try:
        with recording:
            yield
    finally:
        interpreter.GridExecutor.__call__ = run


def record(call: Callable[[], None]) -> Recording:
    """See :data:`~aioinfer.execution.graphs.Capture`."""
    recording = Recording()
    with recorded(recording):
        call()
    return recording
