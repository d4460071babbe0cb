"""Random mixtures of experts, and what the formula says of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from aioinfer.model.moe.experts import ExpertWeights


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
    ) -> Mixture:
        """All tokens go to the first ``used`` experts only; the weights of the others are NaN."""
        used = num_experts if used is None else used
        generator = torch.Generator().manual_seed(seed)

        def noise(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        gate_up = noise(num_experts, 2 * middle, hidden) * 2 * hidden**-0.5
        down = noise(num_experts, hidden, middle) * middle**-0.5
        gate_up[used:] = down[used:] = float("nan")
        return cls(
            noise(tokens, hidden).to(device, dtype),
            torch.rand(tokens, top_k, generator=generator).to(device),
            torch.rand(tokens, used, generator=generator).argsort(-1)[:, :top_k].to(device),
            ExpertWeights(gate_up.to(device, dtype), down.to(device, dtype)),
        )

    def expected(self) -> torch.Tensor:
        """[T, hidden] in float64 on the CPU, pair by pair."""
        hidden, weights, gate_up, down = (
            tensor.double().cpu()
            for tensor in (self.hidden, self.weights, self.stack.gate_up, self.stack.down)
        )
        result = torch.zeros_like(hidden)
        for token, chosen in enumerate(self.experts.tolist()):
            for at, expert in enumerate(chosen):
                gate, up = (gate_up[expert] @ hidden[token]).chunk(2)
                inner = gate * torch.sigmoid(gate) * up
                result[token] += weights[token, at] * (down[expert] @ inner)
        return result

    def of(self, *tokens: int) -> Mixture:
        """The same with these tokens alone, in this order."""
        rows = list(tokens)
        return Mixture(self.hidden[rows], self.weights[rows], self.experts[rows], self.stack)
