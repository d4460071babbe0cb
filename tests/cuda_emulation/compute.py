"""A plugin of pytest: the CPU does the work of the emulated device.

torch's operations on CUDA are overridden, all of them: each becomes work of the current stream, to be done on
tensors of the CPU at the same addresses, which keep no memory alive, as on a device. Our kernels of attention
and of the layers' small operations do what their twins in torch do, those of mixtures of experts run in
Triton's interpreter but for those with weights of 8 bits. torch's sampler takes the place of Triton's.
"""

from __future__ import annotations

import ctypes
import itertools
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton.runtime.interpreter
from torch import library

import aioinfer.model.triton_support

# Before any other module of the package imports the function.
aioinfer.model.triton_support.triton_unsupported = lambda device: None

from aioinfer.model import triton_float8  # noqa: E402
from aioinfer.model.attention import triton_attention  # noqa: E402
from aioinfer.model.attention.base import AttentionParams  # noqa: E402
from aioinfer.model.attention.pool import KVScales  # noqa: E402
from aioinfer.model.attention.sdpa import visible  # noqa: E402
from aioinfer.model.heads import HeadNorm, split_heads  # noqa: E402
from aioinfer.model.moe import triton_experts  # noqa: E402
from aioinfer.model.moe.experts import ExpertWeights, Float8ExpertWeights, LoopExperts  # noqa: E402
from aioinfer.model.operations import triton_operations  # noqa: E402
from aioinfer.model.operations.torch_operations import TorchOperations  # noqa: E402
from aioinfer.model.rope import Rotary  # noqa: E402
from aioinfer.sampling import backend  # noqa: E402
from tests.model.float8 import rounded_heads, widened  # noqa: E402

_runtime = ctypes.CDLL("libcudart.so.13")
_runtime.emulated_work.argtypes = [ctypes.c_void_p, ctypes.c_long, ctypes.c_char_p, ctypes.c_int]
_numbers = itertools.count(1)
#: by number, with whether a graph may ask for it again
_work: dict[int, tuple[Callable[[], object], bool]] = {}


def _execute(number: int) -> None:
    call, again = _work[number]
    try:
        with torch.inference_mode():
            call()
    except BaseException:
        # Nobody above could be told.
        sys.stderr.write(f"emulated CUDA: {traceback.format_exc()}\n")
    if not again:
        del _work[number]


#: kept, for the runtime calls it as long as the process lives
_callback = ctypes.CFUNCTYPE(None, ctypes.c_long)(_execute)
_runtime.emulated_python(_callback)


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
            enqueue(lambda: self._call(*inputs, **named), self._name)
            changed = [args[at] if at < len(args) else kwargs[self._names[at]] for at in self._written]
            return changed[0] if len(changed) == 1 else tuple(changed)
        try:
            shapes = self._shapes(args, kwargs)
        except Exception:
            # They depend on values, for which the host waits.
            torch.cuda.current_stream().synchronize()
            results = self._call(*inputs, **named)
            outputs = _each(results, lambda result: _like(result, "cuda"))
        else:
            outputs, results = _each(shapes, lambda shape: _like(shape, "cuda")), None
        targets = _flat(_each(outputs, alias))

        def work() -> None:
            made = self._call(*inputs, **named) if results is None else results
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
    return enqueue(lambda: _interpret(self, *inputs, **named), self.fn.__name__)


triton.runtime.interpreter.GridExecutor.__call__ = _launch


# -- replacements of the kernels in torch, which are faster than the interpreter ------------------------


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None, scale: float,
    window: int | None, soft_cap: float | None, block: int,
) -> torch.Tensor:  # fmt: skip
    """Of a sequence's last positions."""
    k, v = (side.float().repeat_interleave(q.shape[1] // k.shape[1], 1) for side in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float() * scale, k)
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    seen = visible(len(q), 0, len(k), AttentionParams(scale, window, block=block), q.device)
    scores = scores.masked_fill_(~seen, float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks.float()[:, None, None].expand(-1, len(q), 1)), -1)
    weights = scores.softmax(-1)[..., : len(k)]
    return torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)


def _paged(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, table: torch.Tensor, cu_q: torch.Tensor,
    kv_len: torch.Tensor, out: torch.Tensor, sinks: torch.Tensor | None, scales: KVScales | None,
    **scoring: Any,
) -> None:  # fmt: skip
    if scales is not None:
        keys, values = widened(keys, scales.keys), widened(values, scales.values)
    ends = cu_q.tolist()
    for row, length in enumerate(kv_len.tolist()):
        begin, end = ends[row : row + 2]
        if length == 0 or begin == end:
            out[begin:end] = 0
            continue
        pages = table[row, : -(-length // keys.shape[1])].long()
        k, v = (side[pages].flatten(0, 1)[:length] for side in (keys, values))
        out[begin:end] = _attend(q[begin:end], k, v, sinks, **scoring)


def paged_prefill(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, block_table: torch.Tensor, cu_q: torch.Tensor,
    kv_len: torch.Tensor, *, scale: float, window: int | None, soft_cap: float | None, block: int = 1,
    sinks: torch.Tensor | None = None, out: torch.Tensor | None = None, num_tokens: int, tuning: object,
    splits: int = 1, scales: KVScales | None = None,
) -> torch.Tensor:  # fmt: skip
    out = torch.empty_like(q) if out is None else out
    tensors: list[Any] = [alias(tensor) for tensor in (q, keys, values, block_table, cu_q, kv_len, out)]
    tensors.append(None if sinks is None else alias(sinks))
    tensors.append(None if scales is None else KVScales(*map(alias, scales)))
    scoring: dict[str, Any] = {"scale": scale, "window": window, "soft_cap": soft_cap, "block": block}
    enqueue(lambda: _paged(*tensors, **scoring), "paged_prefill")
    return out


def paged_decode(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, block_table: torch.Tensor,
    kv_len: torch.Tensor, **options: Any,
) -> torch.Tensor:  # fmt: skip
    cu_q = torch.arange(len(q) + 1, device=q.device)
    return paged_prefill(q, keys, values, block_table, cu_q, kv_len, num_tokens=len(q), **options)


def store_kv(
    k: torch.Tensor, v: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slot_mapping: torch.Tensor,
    scales: KVScales | None = None,
) -> None:  # fmt: skip
    if scales is None:
        keys.flatten(0, 1).index_put_((slot_mapping,), k)
        values.flatten(0, 1).index_put_((slot_mapping,), v)
        return
    tensors = [alias(tensor) for tensor in (k, v, keys, values, slot_mapping, *scales)]
    enqueue(lambda: _store_rounded(*tensors), "store_kv")


def _store_rounded(
    k: torch.Tensor, v: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor,
    key_scales: torch.Tensor, value_scales: torch.Tensor,
) -> None:  # fmt: skip
    for given, cells, scales in ((k, keys, key_scales), (v, values, value_scales)):
        rounded, exponents = rounded_heads(given)
        cells.flatten(0, 1).view(torch.uint8)[slots.long()] = rounded.view(torch.uint8)
        scales.flatten(0, 1)[slots.long()] = exponents


def rotate_and_store(
    qkv: torch.Tensor, norm: HeadNorm | None, rotary: Rotary | None, keys: torch.Tensor,
    values: torch.Tensor, slot_mapping: torch.Tensor, *, shared: bool = False,
    scales: KVScales | None = None,
) -> torch.Tensor:  # fmt: skip
    q, k, v = split_heads(qkv, 0 if shared else keys.shape[2], norm, rotary)
    if not shared:
        store_kv(k, v, keys, values, slot_mapping, scales)
    return q


def float8_linear(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, block: tuple[int, int],
    bias: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    out = x.new_empty(len(x), len(weight))
    tensors: list[Any] = [alias(tensor) for tensor in (x, weight, scales, out)]
    tensors.append(None if bias is None else alias(bias))
    enqueue(lambda: _float8_product(block, *tensors), "float8_linear")
    return out


def _float8_product(
    block: tuple[int, int], x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, out: torch.Tensor,
    bias: torch.Tensor | None,
) -> None:  # fmt: skip
    wide = _dequantised(weight, scales, block)
    out.copy_(torch.nn.functional.linear(x.float(), wide, None if bias is None else bias.float()))


def _dequantised(values: torch.Tensor, scales: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """A matrix, or a stack of such, in float32."""
    rows, inner = values.shape[-2:]
    wide = scales.repeat_interleave(block[0], -2)[..., :rows, :]
    return values.float() * wide.repeat_interleave(block[1], -1)[..., :inner]


_interpreted_experts = triton_experts.fused_experts


def fused_experts(
    hidden: torch.Tensor, stack: ExpertWeights | Float8ExpertWeights, weights: torch.Tensor,
    experts: torch.Tensor, tuning: triton_experts.ExpertTuning,
) -> torch.Tensor:  # fmt: skip
    if isinstance(stack, ExpertWeights):
        return _interpreted_experts(hidden, stack, weights, experts, tuning)
    out = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)
    gate_up, down = stack.gate_up, stack.down
    tensors = [alias(tensor) for tensor in (hidden, weights, experts, out, *gate_up[:2], *down[:2])]
    biases = [alias(bias) for bias in stack.biases or ()]

    def work() -> None:
        x, factors, chosen, to, *parts = tensors
        wide = _dequantised(*parts[:2], gate_up.block), _dequantised(*parts[2:], down.block)
        added = (biases[0].float(), biases[1].float()) if biases else None
        to.copy_(LoopExperts(ExpertWeights(*wide, stack.gate, added))(x.float(), factors, chosen))

    enqueue(work, "fused_experts")
    return out


# The names that the attention's module looks its kernels up by.
for twin in (paged_decode, paged_prefill, rotate_and_store, store_kv):
    setattr(triton_attention, twin.__name__, twin)
triton_float8.float8_linear = float8_linear  # type: ignore[assignment]
triton_experts.fused_experts = fused_experts
triton_operations.TritonOperations.add_norm = TorchOperations.add_norm  # type: ignore[assignment]
triton_operations.TritonOperations.gate_mul = TorchOperations.gate_mul  # type: ignore[assignment]
_choose = backend.choose_sampling
backend.choose_sampling = lambda device, wanted="auto": _choose(
    device, "torch" if wanted == "auto" else wanted
)
_choose_proposing = backend.choose_proposing
backend.choose_proposing = lambda device, wanted="auto": _choose_proposing(
    device, "torch" if wanted == "auto" else wanted
)
