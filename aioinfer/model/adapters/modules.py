"""Adapters of the modules of a model of transformers: those whose results are a linear layer's of all tokens.

Which ones these are is seen in a forward, not guessed: a module that is not called, as its weight is read by
other code, or that is called with some of the tokens only, cannot be adapted from outside.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from aioinfer.checkpoint.libraries import importing_transformers
from aioinfer.model.adapters.slots import TorchAdapters

__all__ = ["adapt_modules", "watch_modules"]


@contextlib.contextmanager
def watch_modules(model: Any) -> Iterator[dict[str, list[int]]]:
    """The numbers of rows with which the forwards that run meanwhile call each linear module, by name."""
    calls: dict[str, list[int]] = {}

    def watch(name: str, inputs: int) -> Callable[..., None]:
        def hook(module: Any, arguments: tuple[torch.Tensor, ...]) -> None:
            # Nothing if what it reads is passed by a name: that is not adapted.
            calls[name].append(arguments[0].numel() // inputs if arguments else 0)

        return hook

    handles = []
    for name, module in model.named_modules():
        found = _linear(module)
        # Some have no inputs: a shared expert that the config makes none of.
        if found is not None and min(found[:2]) > 0:
            calls[name] = []
            handles.append(module.register_forward_pre_hook(watch(name, found[0])))
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def adapt_modules(
    model: Any, adapters: TorchAdapters, calls: Mapping[str, list[int]], expected: list[int]
) -> None:
    """Have the modules that were called with ``expected`` rows, see :func:`watch_modules`, compute adapters.
    So have the head and the embedding their own way."""
    head = model.get_output_embeddings()
    _adapt_words(model, adapters)
    for name, rows in calls.items():
        module = model.get_submodule(name)
        found = _linear(module)
        if rows != expected or found is None:
            continue
        inputs, outputs, transposed = found
        base = partial(_base, module, transposed)
        if module is head:
            adapters.add_head(outputs, inputs, base)
            module.forward = _adapted_head(module.forward, adapters)
            continue
        index = adapters.targets.add_module(name, inputs, outputs, base, transposed=transposed)
        if index is not None:
            module.forward = _adapted(module.forward, adapters, index)


def _linear(module: Any) -> tuple[int, int, bool] | None:
    """Inputs and outputs, and whether the weight is stored as [inputs, outputs]; None: it is no linear
    layer, or one that computes more."""
    with importing_transformers():
        from transformers.pytorch_utils import Conv1D

    if isinstance(module, torch.nn.Linear) and type(module).forward is torch.nn.Linear.forward:
        return module.in_features, module.out_features, False
    if isinstance(module, Conv1D) and type(module).forward is Conv1D.forward:
        inputs, outputs = module.weight.shape
        return inputs, outputs, True
    return None


def _base(module: Any, transposed: bool, _: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The weight [outputs, inputs] of a module, and its bias or None; on the CPU, float32."""
    weight, bias = module.weight.detach().cpu().float(), getattr(module, "bias", None)
    return weight.T if transposed else weight, None if bias is None else bias.detach().cpu().float()


def _adapt_words(model: Any, adapters: TorchAdapters) -> None:
    """Have the embedding of tokens read the vectors of adapters, if it is torch's."""
    module = model.get_input_embeddings()
    if type(module).forward is not torch.nn.Embedding.forward:
        return  # it scales them, in its own way
    name = next(name for name, each in model.named_modules() if each is module)
    adapters.targets.add_words(name, tuple(module.weight.shape), partial(_base, module, False))
    forward = module.forward

    def adapted(ids: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = forward(ids)
        batch = adapters.batch
        words = None if batch is None else adapters.with_words(batch, 1.0)
        if words is not None:
            result.view(-1, result.shape[-1])[words.rows] = words.vectors[0]
        return result

    module.forward = adapted


def _adapted_head(
    forward: Callable[[torch.Tensor], torch.Tensor], adapters: TorchAdapters
) -> Callable[[torch.Tensor], torch.Tensor]:
    def adapted(values: torch.Tensor) -> torch.Tensor:
        result, batch = forward(values), adapters.batch
        if batch is not None:
            size = values.shape[-1], result.shape[-1]
            adapters.to_logits(batch, values.reshape(-1, size[0]), result.view(-1, size[1]))
        return result

    return adapted


def _adapted(
    forward: Callable[[torch.Tensor], torch.Tensor], adapters: TorchAdapters, index: int
) -> Callable[[torch.Tensor], torch.Tensor]:
    def adapted(values: torch.Tensor) -> torch.Tensor:
        result, step = forward(values), adapters.step
        if step is not None:
            step.add(index, values.reshape(-1, values.shape[-1]), result.view(-1, result.shape[-1]))
        return result

    return adapted
