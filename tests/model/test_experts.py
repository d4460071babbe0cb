"""Experts on torch's kernels against the formula; which kernels are chosen, and what is said of it."""

from __future__ import annotations

import pytest
import torch

from aioinfer.errors import ConfigError
from aioinfer.model import kernels as backends
from aioinfer.model.backend import Backend
from aioinfer.model.kernels import choose_experts, make_experts
from aioinfer.model.linear import TorchLinear
from aioinfer.model.mlp import GatedMLP
from aioinfer.model.moe.experts import ExpertWeights, GroupedExperts, LoopExperts
from aioinfer.model.moe.routing import GroupedSigmoidRouter, SoftmaxRouter
from aioinfer.model.moe.sparse import SparseMLP
from aioinfer.model.operations.torch_operations import TorchOperations
from tests.model.kernels import assert_close
from tests.model.mixtures import Mixture

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
KINDS = pytest.mark.parametrize("kind", [GroupedExperts, LoopExperts])


def randomize(block: torch.nn.Module, dtype: torch.dtype) -> torch.Tensor:
    """Fill a block of transformers, and return tokens for it, [50, 64]."""
    generator = torch.Generator().manual_seed(0)
    for tensor in (*block.parameters(), *block.buffers()):
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.2)
    block.to(dtype)
    return torch.randn(50, 64, generator=generator).to(dtype)


def assert_near(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Within the rounding of what is added up."""
    bound = 1e-5 if ours.dtype == torch.float32 else 0.01
    torch.testing.assert_close(ours, theirs, rtol=bound, atol=bound * float(theirs.abs().max()))


@KINDS
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_a_block_of_qwen3(
    kind: type[GroupedExperts] | type[LoopExperts], dtype: torch.dtype, normalize: bool
) -> None:
    from transformers.models.qwen3_moe import modeling_qwen3_moe as theirs

    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 16, "num_experts_per_tok": 4}
    block = theirs.Qwen3MoeSparseMoeBlock(theirs.Qwen3MoeConfig(**sizes, norm_topk_prob=normalize))
    hidden = randomize(block, dtype)
    stack = ExpertWeights(block.experts.gate_up_proj, block.experts.down_proj)
    ours = SparseMLP(SoftmaxRouter(block.gate.weight, 4, normalize), kind(stack))
    assert_near(ours(hidden), block(hidden[None])[0])


@KINDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_a_block_of_deepseek(kind: type[GroupedExperts] | type[LoopExperts], dtype: torch.dtype) -> None:
    """Groups, a bias on the choice, a scale, and a shared expert: what LLaDA2 has."""
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as theirs

    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "n_routed_experts": 32, "n_shared_experts": 2}
    rule = {"num_experts_per_tok": 4, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}
    block = theirs.DeepseekV3MoE(theirs.DeepseekV3Config(**sizes, **rule, norm_topk_prob=True))
    hidden = randomize(block, dtype)
    bias = block.gate.e_score_correction_bias.float()
    assert bias.abs().max() > 0.1
    router = GroupedSigmoidRouter(block.gate.weight.float(), bias, 4, 4, 2, True, 2.5)
    shared = block.shared_experts
    gate_up = torch.cat((shared.gate_proj.weight, shared.up_proj.weight))
    stack = ExpertWeights(block.experts.gate_up_proj, block.experts.down_proj)
    shared_mlp = GatedMLP(
        TorchLinear(gate_up), TorchLinear(shared.down_proj.weight), "silu", TorchOperations()
    )
    ours = SparseMLP(router, kind(stack), shared_mlp)
    assert_near(ours(hidden), block(hidden[None])[0])


def test_sizes_that_torch_does_not_take_are_looped_over() -> None:
    assert choose_experts(CPU, 48, 24, torch.float32) == Backend("grouped", "the layers are not native")
    assert choose_experts(CPU, 48, 24, torch.bfloat16).name == "grouped"
    odd = choose_experts(CPU, 48, 22, torch.float32)
    assert odd == Backend("loop", "the layers are not native, and sizes 48 and 22 are no multiples of 4")
    task = Mixture.make(5, hidden=18, middle=7)
    assert_close(
        make_experts(task.stack, odd)(task.hidden, task.weights, task.experts), task.expected(), torch.float32
    )


def test_a_torch_without_grouped_multiplication_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> torch.Tensor:
        raise RuntimeError("not here\nlong story")

    monkeypatch.setattr(backends, "grouped_mm", refuse)
    backend = choose_experts(CPU, 48, 24, torch.float32)
    assert backend == Backend("loop", "the layers are not native, and torch says: not here")
    with pytest.raises(ConfigError, match="grouped was asked for, and torch says: not here"):
        choose_experts(CPU, 48, 24, torch.float32, "grouped")


def test_what_is_asked_for_is_taken_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_experts(CPU, 48, 24, torch.float32, "loop") == Backend("loop", "asked for")
    assert choose_experts(CPU, 48, 24, torch.float32, "grouped") == Backend("grouped", "asked for")
    with pytest.raises(ConfigError, match="no multiples"):
        choose_experts(CPU, 48, 22, torch.float32, "grouped")
    with pytest.raises(ConfigError, match="triton was asked for, and there are no kernels for float64"):
        choose_experts(CPU, 48, 24, torch.float64, "triton")


def test_on_cuda_triton_is_first_and_grouped_second(monkeypatch: pytest.MonkeyPatch) -> None:
    reasons = iter([None, "triton is not installed"])
    monkeypatch.setattr(backends, "triton_unsupported", lambda device: next(reasons))
    monkeypatch.setattr(backends, "_grouped_unsupported", lambda *args: None)
    assert choose_experts(CUDA, 48, 24, torch.bfloat16) == Backend("triton", "the device is CUDA")
    assert choose_experts(CUDA, 48, 24, torch.bfloat16) == Backend("grouped", "triton is not installed")
