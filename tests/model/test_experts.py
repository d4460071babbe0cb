"""Experts on torch's kernels against the formula; which kernels are chosen, and what is said of it."""

from __future__ import annotations

import pytest
import torch

from aioinfer.model.linear import TorchLinear
from aioinfer.model.mlp import GatedMLP
from aioinfer.model.moe.experts import ExpertWeights, GroupedExperts, LoopExperts
from aioinfer.model.moe.routing import GroupedSigmoidRouter, SoftmaxRouter
from aioinfer.model.moe.sparse import SparseMLP
from aioinfer.model.operations.torch_operations import TorchOperations

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
