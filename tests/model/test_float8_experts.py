"""Experts of floats of 8 bits: their products against float64; and models whose layers and experts are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from aioinfer.checkpoint.tensors import Float8Matrix
from aioinfer.cli.doctor import examine
from aioinfer.config import EngineConfig
from aioinfer.errors import ConfigError
from aioinfer.model import kernels as choices
from aioinfer.model.backend import Backend
from aioinfer.model.float8 import rounded_matrix
from aioinfer.model.float8_linear import Float8Linear, ScaledLinear
from aioinfer.model.inspection import LoadOptions, inspect_model
from aioinfer.model.kernels import check_quantization
from aioinfer.model.moe.experts import Float8ExpertWeights
from aioinfer.model.moe.float8_experts import Float8Experts
from aioinfer.model.moe.sparse import SparseMLP
from aioinfer.model.updates.recipe import prepare_update
from tests.checkpoint.test_formats import FORMATS
from tests.model import harness
from tests.model.checkpoints import make_model
from tests.model.harness import Driver
from tests.model.kernels import interpreted_only, kernels_or_skip
from tests.model.mixtures import Mixture, float8_experts
from tests.tiers import INTERPRETER, grid, nightly, points

CPU = torch.device("cpu")
E4M3 = torch.float8_e4m3fn
#: of gate and up, and of down, for sizes of 192 and 96
ROWS = ((1, 192), (1, 96))
BLOCKS = ((32, 64), (32, 32))
#: matrices; halves and a block that is no divisor of the rows; blocks with rows of gate and of up
OTHER_BLOCKS = [((192, 192), (192, 96)), ((96, 192), (40, 96)), ((64, 96), (100, 32))]


# -- products ------------------------------------------------------------------------------------------


@nightly(INTERPRETER)
@pytest.mark.parametrize("dtype", grid([torch.bfloat16, torch.float32], [torch.float16], INTERPRETER))
@pytest.mark.parametrize(("tokens", "num_experts"), [(3, 16), (40, 2)])
@pytest.mark.parametrize("blocks", grid([ROWS, BLOCKS], OTHER_BLOCKS, INTERPRETER), ids=str)
def test_experts_are_those_of_the_widened_weights(
    device: str, tokens: int, num_experts: int, dtype: torch.dtype, blocks: Any
) -> None:
    from aioinfer.model.moe.triton_experts import ExpertTuning

    task = Mixture.make(tokens, num_experts=num_experts, hidden=192, middle=96, dtype=dtype, device=device)
    large = ExpertTuning.of(dtype, tokens * 2, num_experts) != ExpertTuning.of(dtype, 1, num_experts)
    assert large == (tokens == 40 and dtype.itemsize == 2)
    got = float8_experts(task, blocks)(task.hidden, task.weights, task.experts)
    assert got.dtype == dtype
    task.check(got)


def test_what_does_not_fit_is_refused(device: str) -> None:
    task = Mixture.make(3, hidden=64, device=device)
    experts = float8_experts(task, ((8, 32), (8, 16)))
    right = experts.stack
    for block, scales in (((8, 64), right.gate_up.scales), ((8, 16), right.gate_up.scales.repeat(1, 1, 2))):
        gate_up = Float8Matrix(right.gate_up.values, scales, block)
        experts.stack = Float8ExpertWeights(gate_up, right.down)
        with pytest.raises(ValueError, match="do not fit"):
            experts(task.hidden, task.weights, task.experts)
    turned = right.gate_up.scales.mT.contiguous().mT
    experts.stack = Float8ExpertWeights(Float8Matrix(right.gate_up.values, turned, (8, 32)), right.down)
    with pytest.raises(ValueError, match="contiguous"):
        experts(task.hidden, task.weights, task.experts)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 70])
def test_a_captured_layer_follows_what_is_written_over_its_weights(tokens: int) -> None:
    kernels_or_skip("cuda")
    tasks = [Mixture.make(tokens, hidden=192, middle=96, device="cuda", dtype=torch.bfloat16, seed=seed)
             for seed in (1, 2)]  # fmt: skip
    layer, other = (float8_experts(task, BLOCKS) for task in tasks)
    hidden, weights, experts = tasks[0].hidden, tasks[0].weights, tasks[0].experts
    layer(hidden, weights, experts)  # compiled before it is captured
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = layer(hidden, weights, experts)
    for own, new in zip(
        (layer.stack.gate_up, layer.stack.down), (other.stack.gate_up, other.stack.down), strict=True
    ):
        own.values.view(torch.uint8).copy_(new.values.view(torch.uint8))
        own.scales.copy_(new.scales)
    graph.replay()
    assert torch.equal(out, other(hidden, weights, experts))


# -- models --------------------------------------------------------------------------------------------

_SIZES: dict[str, Any] = {
    "head_dim": 32, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 48, "tie_word_embeddings": False,
    "mlp_only_layers": [0],
}  # fmt: skip
_BLOCKS: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": [32, 32]}
#: name -> config and the parts of a matrix
_FORMS = {
    "blocks": (_BLOCKS, lambda weight: FORMATS["fp8-blocks"][1](weight, 32)),
    "channels": FORMATS["fp8-channels"][:2],
    "tensor": FORMATS["fp8-tensor"][:2],
}


def write(folder: Path, form: str | None, seed: int = 1, *, stacked: bool = False) -> Path:
    """A checkpoint of a Qwen3-MoE, a dense layer and two sparse ones, whose matrices, but for routers and
    head, are quantised in a format."""
    make_model("Qwen3Moe", _SIZES, folder, seed=seed, save_original_format=not stacked)
    if form is None:
        return folder
    config, encode = _FORMS[form]
    tensors: dict[str, torch.Tensor] = {}
    for key, tensor in load_file(folder / "model.safetensors").items():
        if "_proj" not in key:
            tensors[key] = tensor
        elif tensor.dim() == 2:
            parts = encode(tensor).parts
            tensors |= {f"{key.removesuffix('.weight')}.{part}": value for part, value in parts.items()}
        else:
            each = [encode(matrix).parts for matrix in tensor]
            tensors[key] = torch.stack([parts["weight"].view(torch.uint8) for parts in each]).view(E4M3)
            scales = "weight_scale_inv" if "weight_scale_inv" in each[0] else "weight_scale"
            end = scales.removeprefix("weight")
            tensors[f"{key}{end}"] = torch.stack([parts[scales] for parts in each])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    stated = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**stated, "quantization_config": config}))
    return folder


def load(path: Path, kernels: Any = "triton", *told: Any, **options: Any) -> Any:
    experts = "triton" if kernels == "triton" else "loop"
    return harness.load(path, *told, kernels=kernels, **{"experts": experts, **options})


def logits(model: Any, kernels: Any = "triton") -> torch.Tensor:
    """Of a prompt in chunks and two tokens."""
    driver = Driver(model, chunk=5, kernels=kernels)
    (found,) = driver.run([[(7 * i + 3) % 100 for i in range(9)]], 2, all_logits=True)
    return torch.stack([found.logits[at] for at in range(9)])


def experts_of(model: Any) -> list[Any]:
    return [layer.mlp.experts for layer in model._trunk.layers if isinstance(layer.mlp, SparseMLP)]


def linears_of(model: Any) -> list[Any]:
    """The fused linear layers that are none of experts."""
    first, *_ = layers = model._trunk.layers
    return [first.mlp.gate_up, first.mlp.down, *(layer.mixer.qkv for layer in layers)]


@nightly(INTERPRETER)
@interpreted_only
@pytest.mark.parametrize(
    ("form", "stacked", "blocks"),
    points([("blocks", False, ((16, 32), (32, 32))), ("blocks", True, ((32, 32), (32, 32)))],
           [("channels", False, ((1, 64), (1, 48))), ("channels", True, ((1, 64), (1, 48))),
            ("tensor", False, ((48, 64), (64, 48))), ("tensor", True, ((96, 64), (64, 48)))],
           INTERPRETER),
)  # fmt: skip
def test_floats_of_8_bits_of_a_checkpoint_stay_as_they_are(
    device: str, tmp_path: Path, form: str, stacked: bool, blocks: Any
) -> None:
    path = write(tmp_path, form, stacked=stacked)
    kept, widened_model = load(path, max_lora_rank=0), load(path, "sdpa")
    assert all(type(made) is Float8Linear for made in linears_of(kept))
    for made in experts_of(kept):
        assert isinstance(made, Float8Experts)
        assert made.blocks == blocks
        assert made.stack.gate_up.values.shape == (4, 96, 64)
        assert (made.stack.gate_up.values.dtype, made.stack.down.values.dtype) == (E4M3, E4M3)
    assert kept.spec.layer_reason.endswith("weights of 8 bits as they are stored")
    assert kept.spec.num_parameters == widened_model.spec.num_parameters
    torch.testing.assert_close(logits(kept), logits(widened_model, "sdpa"), rtol=1e-3, atol=1e-3)
    assert inspect_model(path, LoadOptions(dtype="auto", device=CPU)).stored_float8
    assert "stored" not in load(path, quantization="none").spec.layer_reason


@interpreted_only
@pytest.mark.parametrize("stacked", [False, True])
def test_what_is_said_of_experts_of_8_bits_and_of_their_memory(
    device: str, tmp_path: Path, stacked: bool
) -> None:
    path = write(tmp_path, "blocks", stacked=stacked)
    tensors = load_file(path / "model.safetensors")
    numbers = {name: each for name, each in tensors.items() if not name.endswith("scale_inv")}
    sizes: list[int] = []
    load(path, "triton", None, sizes.append)
    load(path, "triton", None, sizes.append, quantization="none")
    # In float32 but for those of 8 bits.
    stored = sum(each.numel() * each.element_size() for each in numbers.values())
    assert sizes == [stored, 4 * sum(each.numel() for each in numbers.values())]
    options: dict[str, Any] = {"model": str(path), "device": "cpu", "attention_backend": "triton"}

    def said(**changes: Any) -> list[str]:
        found = examine(EngineConfig(**{**options, "moe_backend": "triton", **changes}))
        return [finding.text for finding in found if finding.subject == "weights"]

    layers, experts = "floats of 8 bits in the checkpoint", "experts of floats of 8 bits in the checkpoint"
    assert said() == [f"{layers}, kept", f"{experts}, kept"]
    assert said(moe_backend="loop") == [f"{layers}, kept", f"{experts}, dequantised"]
    for changes in ({"quantization": "none"}, {"deterministic": True}):
        assert said(**changes) == [f"{layers}, dequantised", f"{experts}, dequantised"]


@interpreted_only
def test_experts_that_are_not_all_of_one_kind_are_dequantised(device: str, tmp_path: Path) -> None:
    path = write(tmp_path, "channels")
    tensors = load_file(path / "model.safetensors")
    name = "model.layers.2.mlp.experts.3.up_proj.weight"
    scale = tensors.pop(f"{name}_scale")
    del tensors[f"{name.removesuffix('.weight')}.input_scale"]
    tensors[name] = tensors[name].float() * scale
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    first, second = experts_of(load(path))
    assert isinstance(first, Float8Experts)
    assert not isinstance(second, Float8Experts)
    # And rounded where all shall be.
    assert [made.blocks for made in experts_of(load(path, quantization="fp8"))] == [((1, 64), (1, 48))] * 2


@nightly(INTERPRETER)
@interpreted_only
def test_weights_are_rounded_when_they_are_loaded(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "plain", None)
    model = load(path, quantization="fp8")
    assert [made.blocks for made in experts_of(model)] == [((1, 64), (1, 48))] * 2
    rounded, exact = logits(model), logits(load(path, "sdpa"), "sdpa")
    assert not torch.equal(rounded, exact)
    # What was rounded is what a checkpoint of rounded weights has.
    stored = write(tmp_path / "stored", "channels")
    torch.testing.assert_close(rounded, logits(load(stored, "sdpa"), "sdpa"), rtol=1e-3, atol=1e-3)
    assert not inspect_model(path, LoadOptions(dtype="auto", device=CPU)).stored_float8
    # Activations are rounded for dense layers only.
    monkeypatch.setattr(choices, "scaled_unsupported", lambda *_: None)
    for way, kind in (("fp8", Float8Linear), ("fp8-dynamic", ScaledLinear)):
        made = load(path, quantization=way, max_lora_rank=0)
        assert all(isinstance(experts, Float8Experts) for experts in experts_of(made))
        assert all(type(linear) is kind for linear in linears_of(made))


@nightly(INTERPRETER)
@interpreted_only
@pytest.mark.parametrize("family", ["gpt-oss", "gemma4-experts"])
def test_experts_of_other_kinds_are_rounded(device: str, checkpoint: Any, family: str) -> None:
    """With biases, alternating rows and other gates."""
    path, _ = checkpoint(family)
    rough, exact = (logits(load(path, quantization=each)) for each in ("fp8", "auto"))
    assert not torch.equal(rough, exact)
    assert float((rough - exact).norm() / exact.norm()) < 0.25


@nightly(INTERPRETER)
@interpreted_only
@pytest.mark.parametrize(
    ("before", "after", "quantization"),
    points([(("blocks", False), ("blocks", False), "auto"), ((None, False), (None, True), "fp8")],
           [(("blocks", True), ("blocks", True), "auto"), (("tensor", False), ("tensor", False), "auto"),
            (("channels", True), ("channels", False), "auto"), (("channels", False), (None, False), "fp8"),
            ((None, True), ("channels", False), "fp8")],
           INTERPRETER),
)  # fmt: skip
def test_an_updated_model_has_the_bits_of_one_that_was_loaded_anew(
    device: str, tmp_path: Path, before: Any, after: Any, quantization: str
) -> None:
    one = write(tmp_path / "one", before[0], 1, stacked=before[1])
    two = write(tmp_path / "two", after[0], 2, stacked=after[1])
    expected = logits(load(two, quantization=quantization))
    model = load(one, quantization=quantization)
    assert not torch.equal(logits(model), expected)
    places = [made.stack.gate_up.values.data_ptr() for made in experts_of(model)]
    prepare_update(model, two, lambda: None).install()
    assert torch.equal(logits(model), expected)
    assert [made.stack.gate_up.values.data_ptr() for made in experts_of(model)] == places


@interpreted_only
def test_experts_in_memory_are_rounded_in_the_blocks_of_those_that_were_loaded(
    device: str, tmp_path: Path
) -> None:
    model = load(write(tmp_path / "one", "blocks", 1))
    plain = load_file(write(tmp_path / "two", None, 2) / "model.safetensors")
    given = {name: tensor for name, tensor in plain.items() if "layers.2.mlp.experts" in name}
    first = experts_of(model)[0].stack.down.values.view(torch.uint8).clone()
    prepare_update(model, [*given.items()], lambda: None).install()
    one, two = experts_of(model)
    assert torch.equal(one.stack.down.values.view(torch.uint8), first)
    for expert in range(4):
        weight = given[f"model.layers.2.mlp.experts.{expert}.down_proj.weight"]
        expected = rounded_matrix(weight, (32, 32))
        assert torch.equal(two.stack.down.values[expert].view(torch.uint8), expected.values.view(torch.uint8))
        assert torch.equal(two.stack.down.scales[expert], expected.scales)


@interpreted_only
def test_biases_are_replaced_with_their_experts(device: str, tmp_path: Path, checkpoint: Any) -> None:
    path, _ = checkpoint("gpt-oss")
    model = load(path, quantization="fp8")
    tensors = load_file(path / "model.safetensors")
    given = {name: tensor * 2 for name, tensor in tensors.items() if "layers.1.mlp.experts" in name}
    before = [bias.clone() for bias in experts_of(model)[1].stack.biases]
    scales = experts_of(model)[1].stack.down.scales.clone()
    prepare_update(model, [*given.items()], lambda: None).install()
    stack = experts_of(model)[1].stack
    assert all(torch.equal(bias, 2 * old) for bias, old in zip(stack.biases, before, strict=True))
    assert torch.equal(stack.down.scales, 2 * scales)


@nightly(INTERPRETER)
@interpreted_only
@pytest.mark.parametrize("stacked", [False, True])
def test_experts_with_nan_are_refused(device: str, tmp_path: Path, stacked: bool) -> None:
    good, path = (write(tmp_path / each, "blocks", stacked=stacked) for each in ("good", "bad"))
    tensors = load_file(path / "model.safetensors")
    name = "model.layers.1.mlp.experts.2.down_proj.weight"
    name = "model.layers.1.mlp.experts.down_proj" if stacked else name
    raw = tensors[name].view(torch.uint8)
    raw.view(-1)[-1] = 0xFF
    save_file({**tensors, name: raw.view(E4M3)}, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"^model: the experts of model\.layers\.1\.mlp\.experts have NaN"):
        load(path)
    model = load(good)
    before = logits(model)
    with pytest.raises(ConfigError, match=f"^weights: {name} has infinity or NaN"):
        prepare_update(model, path, lambda: None)
    assert torch.equal(logits(model), before)


@interpreted_only
def test_what_cannot_be_rounded_is_refused(device: str, tmp_path: Path) -> None:
    path = write(tmp_path, None)
    with pytest.raises(ConfigError, match="quantization: fp8 needs layers by Triton, these are torch: asked"):
        load(path, "sdpa", quantization="fp8")
    with pytest.raises(ConfigError, match=r"fp8-dynamic was asked for, and the results of torch\._scaled_mm"):
        load(path, quantization="fp8-dynamic")
    with pytest.raises(ConfigError, match="fp8 needs experts by Triton, these are loop: asked for"):
        load(path, quantization="fp8", experts="loop")
    triton, loop = Backend("triton", "the device"), Backend("loop", "asked for")
    check_quantization("fp8", triton, "X", triton)
    for way in ("fp8", "fp8-dynamic"):
        with pytest.raises(
            ConfigError, match=f"^quantization: {way} needs experts by Triton, these are loop"
        ):
            check_quantization(way, triton, "X", loop)  # type: ignore[arg-type]
