"""Loading experts: however the checkpoint stores them, once, and with a clear word for what is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode

from aioinfer.cli.doctor import examine
from aioinfer.config import EngineConfig
from aioinfer.execution.torch_device import TorchDevice
from aioinfer.model.mlp import GatedMLP
from aioinfer.model.moe.sparse import SparseMLP
from tests.model import harness
from tests.model.checkpoints import assert_greedy, make_checkpoint

CPU = torch.device("cpu")


def load(path: Path, dtype: str = "auto") -> Any:
    return harness.load(path, dtype=dtype)


@pytest.mark.parametrize("save", [{}, {"save_original_format": False}, {"max_shard_size": "30KB"}])
def test_one_by_one_stacked_or_sharded(tmp_path: Path, save: dict[str, Any]) -> None:
    oracle = make_checkpoint("qwen3-moe-mixed", tmp_path, **save)
    names = {name for file in tmp_path.glob("*.safetensors") for name in load_file(file)}
    assert ("model.layers.1.mlp.experts.gate_up_proj" in names) == ("save_original_format" in save)
    model = load(tmp_path)
    assert model.spec.num_parameters == sum(parameter.numel() for parameter in oracle.parameters())
    assert_greedy(tmp_path, [[3, 1, 4, 1, 5]], 6, oracle, dtype="auto")


@pytest.mark.parametrize(
    ("changes", "sparse"),
    [
        ({}, [0, 1, 2, 3]),
        ({"decoder_sparse_step": 2}, [1, 3]),
        ({"decoder_sparse_step": 3}, [2]),
        ({"mlp_only_layers": [0, 2]}, [1, 3]),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [0, 1]}, [3]),
        ({"decoder_sparse_step": 5}, []),
        ({"num_local_experts": 0}, []),
    ],
)
def test_the_config_says_which_layers_are_sparse(
    tmp_path: Path, changes: dict[str, Any], sparse: list[int]
) -> None:
    """As transformers has it, by whose model the checkpoint is written."""
    import transformers

    settings = {"hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 8, "head_dim": 8}
    settings |= {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 50}
    config = transformers.Qwen3MoeConfig(**settings, num_local_experts=changes.pop("num_local_experts", 4))
    config.num_experts_per_tok = 2
    for name, value in changes.items():
        setattr(config, name, value)
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(tmp_path)
    model = load(tmp_path)
    kinds = [type(layer.mlp) for layer in model._trunk.layers]
    assert kinds == [SparseMLP if index in sparse else GatedMLP for index in range(4)]
    assert model.spec.expert_kernels == ("grouped" if sparse else None)


class Allocations(TorchDispatchMode):
    """Counts the bytes of tensors made while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        mine = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, torch.Tensor)}
        if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() not in mine:
            self.bytes += result.untyped_storage().nbytes()
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_are_never_there_twice(tmp_path: Path, dtype: torch.dtype) -> None:
    make_checkpoint("qwen3-moe", tmp_path, dtype)
    with Allocations() as made:
        model = load(tmp_path)
    stacks = [layer.mlp.experts.stack for layer in model._trunk.layers]
    experts = sum(stack.gate_up.nbytes + stack.down.nbytes for stack in stacks)
    rest = model.spec.num_parameters * dtype.itemsize - experts
    assert experts > rest
    # Tables of angles and, in half precision, the frequencies behind them; 256 positions.
    assert experts < made.bytes < experts + 2 * rest


def test_with_a_dtype_other_than_the_checkpoints(tmp_path: Path) -> None:
    make_checkpoint("qwen3-moe", tmp_path, torch.bfloat16)
    wide, narrow = load(tmp_path, "float32"), load(tmp_path)
    ours, stored = (model._trunk.layers[0].mlp.experts.stack.gate_up for model in (wide, narrow))
    assert (ours.dtype, stored.dtype) == (torch.float32, torch.bfloat16)
    assert torch.equal(ours, stored.float())


def test_the_doctor_says_what_computes_the_experts(tmp_path: Path) -> None:
    make_checkpoint("qwen3-moe", tmp_path)

    def report(**settings: Any) -> tuple[str | None, str]:
        config = EngineConfig(model=str(tmp_path), device="cpu", num_pages=8, max_model_len=64, **settings)
        found = {finding.subject: finding.text for finding in examine(config)}
        device = TorchDevice(config)
        description = device.open().description
        device.close()
        return found.get("experts"), description

    text, description = report()
    assert text == "grouped: the layers are not native"
    assert "attention, grouped experts" in description
    text, description = report(moe_backend="loop")
    assert text == "loop: asked for"
    assert "loop experts" in description
    text, description = report(transformers_fallback=True)
    assert text is None
    assert "experts" not in description
