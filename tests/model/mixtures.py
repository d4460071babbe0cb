"""Random mixtures of experts, and what the formula says of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from aioinfer.checkpoint.tensors import Float8Matrix, Rounding
from aioinfer.model.float8 import rounded_matrix
from aioinfer.model.moe.experts import ExpertWeights, Float8ExpertWeights
from aioinfer.model.moe.float8_experts import Float8Experts


@dataclass(slots=True)
class Mixture:
    """Tokens, the experts each of them goes to, and the experts."""

    hidden: torch.Tensor
    weights: torch.Tensor
    experts: torch.Tensor
    stack: ExpertWeights

    @classmethod
    def make(
        cls,
        tokens: int,
        *,
        top_k: int = 2,
        num_experts: int = 5,
        hidden: int = 32,
        middle: int = 16,
        used: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        seed: int = 0,
        clamped: bool = False,
    ) -> Mixture:
        """All tokens go to the first ``used`` experts only; the weights of the others are NaN. ``clamped``:
        with clamped gates, of which some are, and biases."""
        used = num_experts if used is None else used
        generator = torch.Generator().manual_seed(seed)

        def noise(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        gate_up = noise(num_experts, 2 * middle, hidden) * 2 * hidden**-0.5
        down = noise(num_experts, hidden, middle) * middle**-0.5
        gate_up[used:] = down[used:] = float("nan")
        task = cls(
            noise(tokens, hidden).to(device, dtype),
            torch.rand(tokens, top_k, generator=generator).to(device),
            torch.rand(tokens, used, generator=generator).argsort(-1)[:, :top_k].to(device),
            ExpertWeights(gate_up.to(device, dtype), down.to(device, dtype)),
        )
        if clamped:
            biases = 5 * noise(num_experts, 2 * middle), noise(num_experts, hidden)
            first, second = (each.to(device, dtype) for each in biases)
            task.stack = replace(task.stack, gate="clamped_silu", biases=(first, second))
        return task

    def expected(self) -> torch.Tensor:
        """[T, hidden] in float64 on the CPU, pair by pair."""
        hidden, weights, gate_up, down = (
            tensor.double().cpu()
            for tensor in (self.hidden, self.weights, self.stack.gate_up, self.stack.down)
        )
        result = torch.zeros_like(hidden)
        for token, chosen in enumerate(self.experts.tolist()):
            for at, expert in enumerate(chosen):
                both, out = gate_up[expert] @ hidden[token], torch.zeros(())
                if self.stack.biases is not None:
                    first, out = (each[expert].double().cpu() for each in self.stack.biases)
                    both = both + first
                gate, up = both.chunk(2)
                inner = gate * torch.sigmoid(gate) * up
                if self.stack.gate == "gelu_tanh":
                    steep = 2 * (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)
                    inner = gate * torch.sigmoid(steep) * up
                if self.stack.gate == "clamped_silu":
                    gate, up = gate.minimum(torch.tensor(7.0)), up.maximum(torch.tensor(-7.0))
                    up = up.minimum(torch.tensor(7.0))
                    inner = gate / (1 + torch.exp(-1.702 * gate)) * (up + 1)
                result[token] += weights[token, at] * (down[expert] @ inner + out)
        return result

    def check(self, got: torch.Tensor) -> None:
        """Raise AssertionError if results are further off than what is added up rounds."""
        expected = self.expected()
        bound = 1e-5 if got.dtype == torch.float32 else 0.02
        atol = bound * float(expected.abs().max())
        torch.testing.assert_close(got.double().cpu(), expected, rtol=bound, atol=atol)

    def of(self, *tokens: int) -> Mixture:
        """The same with these tokens alone, in this order."""
        rows = list(tokens)
        return Mixture(self.hidden[rows], self.weights[rows], self.experts[rows], self.stack)


def by_native(task: Mixture, threads: int = 2) -> Any:
    """The experts of a task on native kernels."""
    from aioinfer.native.bindings import ThreadPool

    return native_experts(ThreadPool(threads), task.stack)


def native_experts(pool: Any, stack: ExpertWeights, rounding: Rounding | None = None) -> Any:
    """The same of a stack, rounded or not."""
    from aioinfer.model.moe.native_experts import NativeExperts
    from aioinfer.model.native_linear import NativeLinear

    def layer(weights: torch.Tensor, bias: torch.Tensor | None, *, gated: bool) -> NativeLinear:
        own = None if rounding is None else rounding.for_size(weights.shape[1])
        return NativeLinear(pool, weights, bias, own, gated=gated)

    first, second = stack.biases or ((None,) * len(stack.down),) * 2
    layers = [
        (layer(gate_up, one, gated=True), layer(down, other, gated=False))
        for gate_up, down, one, other in zip(stack.gate_up, stack.down, first, second, strict=True)
    ]
    return NativeExperts(pool, layers, stack.gate)


def rounded_stack(weights: torch.Tensor, block: tuple[int, int]) -> Float8Matrix:
    """A stack of matrices in floats of 8 bits."""
    parts = [rounded_matrix(each.float(), block) for each in weights]
    values = torch.stack([part.values.view(torch.uint8) for part in parts]).view(torch.float8_e4m3fn)
    return Float8Matrix(values, torch.stack([part.scales for part in parts]), block)


def widened_stack(stack: Float8Matrix) -> torch.Tensor:
    """A stack of floats of 8 bits in float64."""
    (_, rows, inner), (height, width) = stack.values.shape, stack.block
    wide = stack.scales.double().repeat_interleave(height, 1)[:, :rows]
    return stack.values.double() * wide.repeat_interleave(width, 2)[:, :, :inner]


def float8_experts(task: Mixture, blocks: tuple[tuple[int, int], tuple[int, int]]) -> Float8Experts:
    """The experts of a task in floats of 8 bits, which become those of the task, too."""
    given = task.stack
    gate_up, down = rounded_stack(given.gate_up, blocks[0]), rounded_stack(given.down, blocks[1])
    task.stack = ExpertWeights(widened_stack(gate_up), widened_stack(down), given.gate, given.biases)
    return Float8Experts(Float8ExpertWeights(gate_up, down, given.gate, given.biases))
