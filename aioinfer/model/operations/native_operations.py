"""NativeOperations: norms by the kernels in C++ (:mod:`aioinfer.native`), on a CPU."""

from __future__ import annotations

import torch

from aioinfer.model.norm import Norm
from aioinfer.model.operations.torch_operations import TorchOperations
from aioinfer.native.arguments import AddNormArguments
from aioinfer.native.bindings import ThreadPool
from aioinfer.native.tensors import NUMBERS, address

__all__ = ["NativeOperations"]

#: of sizes of norms
_MULTIPLE = 16


class NativeOperations(TorchOperations):
    """Operations between native layers, in one pass and by the same threads: those of torch, once woken, wait
    for more work for milliseconds, on the cores that the next layer needs. As in native decoders, values
    are rounded when they are stored, and at no other place."""

    __slots__ = ("_pool",)

    def __init__(self, pool: ThreadPool) -> None:
        self._pool = pool

    def add_norm(
        self, hidden: torch.Tensor, delta: torch.Tensor | None, norm: Norm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dtype, size, float32 = hidden.dtype, hidden.shape[-1], torch.float32
        if size % _MULTIPLE or dtype not in NUMBERS:
            return super().add_norm(hidden, delta, norm)
        hidden, delta = hidden.contiguous(), None if delta is None else delta.contiguous()
        weight, bias = norm.weight.float(), None if norm.bias is None else norm.bias.float()
        out, sums = torch.empty_like(hidden), None if delta is None else torch.empty_like(hidden)
        count = hidden.numel()
        arguments = AddNormArguments(
            pool=self._pool.handle,
            hidden=address(hidden, dtype, count),
            delta=None if delta is None else address(delta, dtype, count),
            count=count // size,
            size=size,
            weight=address(weight, float32, size),
            bias=None if bias is None else address(bias, float32, size),
            eps=norm.eps,
            sums=None if sums is None else sums.data_ptr(),
            out=out.data_ptr(),
        )
        self._pool.kernels.call(arguments, NUMBERS[dtype])
        return hidden if sums is None else sums, out
