"""Routers and experts in C++: the formula, the bits, and the models that have them from end to end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from aioinfer.checkpoint.tensors import SafetensorsTensors
from aioinfer.cli.doctor import examine
from aioinfer.config import EngineConfig
from aioinfer.model.decoder import Decoder
from aioinfer.model.inspection import LoadOptions
from aioinfer.model.loader import load_model
from aioinfer.model.moe.native_experts import NativeRouter
from aioinfer.model.moe.routing import GroupedSigmoidRouter, Rule, SoftmaxRouter
from aioinfer.model.moe.sparse import SparseMLP, StoredExperts
from aioinfer.model.native import NativeDecoder
from aioinfer.model.weights import Weights
from aioinfer.native.bindings import ThreadPool
from tests.model.block_models import block_config, write_config
from tests.model.harness import build_batch, make_pool
from tests.model.mixtures import Mixture, by_native
from tests.model.test_block_diffusion import WIDE, native_attention, tokens

pytestmark = pytest.mark.native
CPU = torch.device("cpu")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_biases_that_do_not_fit_are_refused() -> None:
    task = Mixture.make(1, clamped=True)
    assert task.stack.biases is not None
    task.stack = replace(task.stack, biases=(task.stack.biases[0][:, :-1], task.stack.biases[1]))
    with pytest.raises(ValueError, match="needs 32 contiguous elements"):
        by_native(task)


def softmax(num_experts: int, top_k: int, hidden: int = 32, *, normalize: bool = True) -> SoftmaxRouter:
    return SoftmaxRouter(noise(num_experts, hidden), top_k, normalize)


def sigmoid(*rule: Any, hidden: int = 32, bias: float | None = 0.3) -> GroupedSigmoidRouter:
    num_experts, *rest = rule
    extra = None if bias is None else bias + 0.2 * noise(num_experts, seed=2)
    return GroupedSigmoidRouter(noise(num_experts, hidden), extra, *rest)


@pytest.mark.parametrize("rule", [softmax(9, 3), sigmoid(9, 3, 3, 2, True, 1.0, bias=None)])
def test_of_equal_experts_the_first(rule: Rule) -> None:
    """Three different experts, three times."""
    rule.weight.copy_(noise(3, 32).repeat(3, 1))
    hidden = noise(40, 32, seed=1)
    _, experts = NativeRouter(ThreadPool(2), rule, torch.float32)(hidden)
    best = (hidden @ rule.weight[:3].T).argmax(-1)
    assert torch.equal(experts[:, 0], best)
    if isinstance(rule, SoftmaxRouter):
        assert torch.equal(experts, best[:, None] + torch.tensor([0, 3, 6]))
    else:
        # Groups are equal, too: the first two of three are open.
        assert torch.equal(experts[:, 1], best + 3)


@DTYPES
def test_a_token_has_the_same_bits_in_any_batch(dtype: torch.dtype) -> None:
    sizes = {"top_k": 3, "num_experts": 7, "hidden": 48, "middle": 32}
    task = Mixture.make(61, dtype=dtype, **sizes)
    rule = sigmoid(7, 3, 7, 5, True, 2.5, hidden=48)
    results = []
    for threads in (1, 2, 3):
        part = SparseMLP(NativeRouter(ThreadPool(threads), rule, dtype), by_native(task, threads))
        together = part(task.hidden)
        results.append(together)
        for some in ([60], [5, 4], list(range(0, 61, 2)), list(range(30))):
            assert torch.equal(part(task.hidden[some]), together[some])
    assert all(torch.equal(result, results[0]) for result in results)


@DTYPES
def test_the_same_as_layer_by_layer(tmp_path: Path, dtype: torch.dtype) -> None:
    """With dense layers between sparse ones, whose inner size is another."""
    changes: dict[str, Any] = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
    changes |= {
        "num_hidden_layers": 4,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [3],
        "mask_token_id": None,
    }
    write_config(tmp_path, block_config("sdar_moe", **WIDE, **changes))
    name = str(dtype).removeprefix("torch.")
    batch = build_batch(
        [(tokens(30), 0, [3, 1]), (tokens(3), 0, [2])], 16, num_decodes=0, logits_rows=range(33)
    )
    logits = []
    for experts, kind in (("auto", NativeDecoder), ("loop", Decoder)):
        settings: dict[str, Any] = {"dtype": name, "load_format": "random", "experts": experts}
        model = load_model(tmp_path, LoadOptions(device=CPU, **settings))
        assert isinstance(model, kind)
        logits.append(model.forward(batch, native_attention(make_pool(model.spec, 4, 16))).float())
    bound = 1e-5 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(*logits, rtol=bound, atol=bound * float(logits[1].abs().max()))


@pytest.mark.parametrize("layout", ["one by one", "together", "apart"])
def test_experts_are_read_one_by_one_whatever_the_checkpoint(tmp_path: Path, layout: str) -> None:
    gate, up, down = noise(4, 16, 32), noise(4, 16, 32, seed=1), noise(4, 32, 16, seed=2)
    if layout == "together":
        tensors = {"at.gate_up_proj": torch.cat((gate, up), 1), "at.down_proj": down}
    elif layout == "apart":
        tensors = {"at.gate_proj": gate, "at.up_proj": up, "at.down_proj": down}
    else:
        named = {"gate": gate, "up": up, "down": down}.items()
        tensors = {f"at.{e}.{n}_proj.weight": t[e].clone() for n, t in named for e in range(4)}
    save_file(tensors, tmp_path / "model.safetensors")

    def stored() -> StoredExperts:
        return StoredExperts(
            Weights(SafetensorsTensors(tmp_path), dtype=torch.float32, device=CPU), "at", 4, 32, 16
        )

    stack = stored().stacked()
    seen = set()
    for index, (gate_up, own) in enumerate(stored().each()):
        assert torch.equal(gate_up, stack.gate_up[index])
        assert torch.equal(own, stack.down[index])
        seen.add(gate_up.data_ptr())
    # In one place after the other, or mapped.
    assert len(seen) == (4 if layout == "together" else 1)


@pytest.mark.parametrize(("middle", "experts"), [(32, "native: the device"), (24, "grouped: the layers")])
def test_the_doctor_says_what_computes(tmp_path: Path, middle: int, experts: str) -> None:
    write_config(tmp_path, block_config(**{**WIDE, "moe_intermediate_size": middle}))
    config = EngineConfig(model=str(tmp_path), load_format="random", device="cpu")
    found = {finding.subject: finding.text for finding in examine(config)}
    assert found["experts"].startswith(experts)
    assert found["operations"].startswith("native:" if middle == 32 else "torch: inner dimensions")
