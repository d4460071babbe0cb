"""A plugin of pytest: the CPU does the work of the emulated device.

torch's operations on CUDA are overridden, all of them: each becomes work of the current stream, to be done on
tensors of the CPU at the same addresses, which keep no memory alive, as on a device. So does every launch of
a kernel, in Triton's interpreter. Most engines have torch's stand-ins for kernels, see :mod:`.stand_ins`.
"""

from __future__ import annotations

import ctypes
import itertools
import sys
import traceback
import warnings
from collections.abc import Callable, Generator
from typing import Any

import numpy as np
import pytest
import torch
import triton.runtime.interpreter
from torch import library

import aioinfer.model.triton_support

# Before any other module of the package imports the function.
aioinfer.model.triton_support.triton_unsupported = lambda device: None

from tests.model import kernels  # noqa: E402

_runtime = ctypes.CDLL("libcudart.so.13")
_runtime.emulated_work.argtypes = [ctypes.c_void_p, ctypes.c_long, ctypes.c_char_p, ctypes.c_int]
_numbers = itertools.count(1)
#: by number, with whether a graph may ask for it again
_work: dict[int, tuple[Callable[[], object], bool]] = {}
#: what went wrong since somebody was told
_failures: list[str] = []


def _execute(number: int) -> None:
    call, again = _work[number]
    try:
        with torch.inference_mode():
            call()
    except BaseException:
        # Nobody above could be told; the test is.
        _failures.append(traceback.format_exc())
    if not again:
        del _work[number]


#: kept, for the runtime calls it as long as the process lives
_callback = ctypes.CFUNCTYPE(None, ctypes.c_long)(_execute)
_runtime.emulated_python(_callback)


def take_failures() -> str:
    """Traces of the work that has failed since the last call; empty if there is none."""
    torch.cuda.synchronize()
    text = "".join(_failures)
    _failures.clear()
    return text


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None]:
    """A test fails, too, if work has failed."""
    try:
        yield
    finally:
        text = take_failures()
        sys.stderr.write(text)
    if text:
        pytest.fail(f"emulated CUDA: {text}", pytrace=False)


def enqueue(call: Callable[[], object], name: str, *, late: bool = False) -> None:
    """Have the current stream do something, or the graph that is being captured."""
    number = next(_numbers)
    _work[number] = call, torch.cuda.is_current_stream_capturing()
    error = _runtime.emulated_work(torch.cuda.current_stream().cuda_stream, number, name.encode(), late)
    if error:
        raise RuntimeError(f"CUDA error: {error} in {name}")


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, for the CPU."""
    storage = tensor.untyped_storage()
    if storage.nbytes() == 0:
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
    memory = (ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr())
    bytes_ = torch.from_numpy(np.ctypeslib.as_array(memory)).untyped_storage()
    offset, size, stride = tensor.storage_offset(), tensor.size(), tensor.stride()
    with torch.inference_mode():
        return torch.empty(0, dtype=tensor.dtype).set_(bytes_, offset, size, stride)


# -- torch's operations --------------------------------------------------------------------------------

#: what makes memory and views of it is the host's, and what reads single values copies
_OWN = {
    *("empty.memory_format", "empty_strided", "resize_", "as_strided", "view", "_reshape_alias", "unfold"),
    *("_local_scalar_dense", "record_stream", "is_pinned", "_pin_memory", "is_set_to", "set_", "alias"),
    *("set_.source_Storage", "set_.source_Storage_storage_offset", "set_.source_Tensor", "view.dtype"),
    *("_efficientzerotensor", "view_as_real", "view_as_complex", "copy_", "_copy_from"),
    *("_copy_from_and_resize", "_scaled_dot_product_flash_attention"),
    "_scaled_dot_product_efficient_attention",
}
_UNUSED = (
    *("_cudnn", "_thnn", "cudnn", "_foreach", "_fused_adam", "_fused_sgd", "_fused_adagrad", "_amp", "_cslt"),
    *("_nested", "sparse", "_sparse", "_fake", "_validate", "_assert", "miopen", "_use_cudnn", "_debug"),
    "_dirichlet",
)


def _scaled_mm(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor,
    bias: torch.Tensor | None = None, scale_result: None = None, out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> torch.Tensor:  # fmt: skip
    found = (a.float() * scale_a) @ (b.float() * scale_b)
    return (found if bias is None else found + bias).to(out_dtype or a.dtype)


#: what a CPU has in part only
_ON_CPU: dict[str, Callable[..., Any]] = {"_scaled_mm": _scaled_mm}


def _each(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """A value with its tensors changed."""
    if isinstance(value, torch.Tensor):
        return change(value)
    return type(value)(_each(item, change) for item in value) if isinstance(value, (list, tuple)) else value


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    return alias(tensor) if tensor.is_cuda else tensor.clone()


def _like(tensor: torch.Tensor, device: str) -> torch.Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)


def _meta(tensor: torch.Tensor) -> torch.Tensor:
    return _like(tensor, "meta") if tensor.is_cuda else tensor


class Operation:
    """One operation of torch on CUDA."""

    def __init__(self, name: str, call: Any) -> None:
        self._name, self._call = name, call
        self._computes = _ON_CPU.get(name, call)
        arguments = call._schema.arguments
        self._names = [argument.name for argument in arguments]
        self._numbers = [str(argument.type) == "Tensor" for argument in arguments]
        self._written = [
            at
            for at, argument in enumerate(arguments)
            if argument.alias_info and argument.alias_info.is_write
        ]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Python's numbers come as they are where tensors are meant.
        pairs = itertools.zip_longest(args, self._numbers[: len(args)])
        args = tuple(torch.tensor(arg) if n and isinstance(arg, (int, float)) else arg for arg, n in pairs)
        out = kwargs.get("out")
        if out is not None and out.numel() == 0:
            out.resize_(self._shapes(args, kwargs).size())
        inputs = [_each(arg, _on_cpu) for arg in args]
        named = {name: _each(value, _on_cpu) for name, value in kwargs.items()} | _device(kwargs, "cpu")
        if self._written:
            enqueue(lambda: self._computes(*inputs, **named), self._name)
            changed = [args[at] if at < len(args) else kwargs[self._names[at]] for at in self._written]
            return changed[0] if len(changed) == 1 else tuple(changed)
        try:
            shapes = self._shapes(args, kwargs)
        except Exception:
            # They depend on values, for which the host waits.
            torch.cuda.current_stream().synchronize()
            results = self._computes(*inputs, **named)
            if isinstance(results, (bool, int, float)):
                return results
            outputs = _each(results, lambda result: _like(result, "cuda"))
        else:
            outputs, results = _each(shapes, lambda shape: _like(shape, "cuda")), None
        targets = _flat(_each(outputs, alias))

        def work() -> None:
            made = self._computes(*inputs, **named) if results is None else results
            for target, result in zip(targets, _flat(made), strict=True):
                target.copy_(result)

        enqueue(work, self._name)
        return outputs

    def _shapes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        named = {name: _each(value, _meta) for name, value in kwargs.items()} | _device(kwargs, "meta")
        return self._call(*[_each(arg, _meta) for arg in args], **named)


def _device(kwargs: dict[str, Any], name: str) -> dict[str, Any]:
    return {"device": torch.device(name)} if "device" in kwargs else {}


def _flat(value: Any) -> list[torch.Tensor]:
    return [value] if isinstance(value, torch.Tensor) else [item for item in value if item is not None]


def _copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    to = alias(target) if target.is_cuda else target
    pageable = not (target.is_cuda or target.is_pinned()) or not (source.is_cuda or source.is_pinned())
    # Pinned memory is read when the device comes to it, other memory at once.
    origin = alias(source) if source.is_cuda else source if source.is_pinned() else source.clone()
    enqueue(lambda: to.copy_(origin), "copy_", late=not target.is_cuda)
    between = not (target.is_cuda and source.is_cuda)
    if between and not torch.cuda.is_current_stream_capturing() and (pageable or not non_blocking):
        torch.cuda.current_stream().synchronize()
    return target


def _override() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for full in torch._C._dispatch_get_all_op_names():
            space, _, name = full.partition("::")
            if space != "aten" or name in _OWN or "backward" in name or name.startswith(_UNUSED):
                continue
            base, _, overload = name.partition(".")
            call = getattr(getattr(torch.ops.aten, base, None), overload or "default", None)
            if call is not None and torch._C._dispatch_has_kernel_for_dispatch_key(full, "CUDA"):
                library.impl(full, "CUDA", Operation(name, call))
        library.impl("aten::copy_", "CUDA", _copy)
    # Attention of torch's own is made of operations that a CPU has, too.
    for fused in ("flash", "mem_efficient", "cudnn"):
        getattr(torch.backends.cuda, f"enable_{fused}_sdp")(False)


_override()


# -- Triton's interpreter --------------------------------------------------------------------------------

_interpret = triton.runtime.interpreter.GridExecutor.__call__


def _launch(self: Any, *args: Any, **kwargs: Any) -> Any:
    if not any(isinstance(arg, torch.Tensor) and arg.is_cuda for arg in (*args, *kwargs.values())):
        return _interpret(self, *args, **kwargs)
    inputs = [_each(arg, _on_cpu) for arg in args]
    named = {name: _each(value, _on_cpu) for name, value in kwargs.items()}
    expected = np.geterr()

    def work() -> None:
        # What numpy warns of is up to the code that launches, which may be done when this happens.
        with np.errstate(**expected):
            _interpret(self, *inputs, **named)

    return enqueue(work, self.fn.__name__)


triton.runtime.interpreter.GridExecutor.__call__ = _launch
kernels.remember_builtins()
