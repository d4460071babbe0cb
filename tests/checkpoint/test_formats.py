"""Quantised safetensors: every format against an encoder that is written here, from its description."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from aioinfer.checkpoint.formats import quantised_tensors
from aioinfer.checkpoint.formats.base import dequantised
from aioinfer.checkpoint.tensors import SafetensorsTensors
from aioinfer.config import EngineConfig
from aioinfer.errors import ConfigError
from aioinfer.llm import LLM
from aioinfer.model.inspection import LoadOptions, inspect_model
from aioinfer.model.loader import load_model
from aioinfer.params import SamplingParams
from tests.checkpoint.float_formats import (
    BITSANDBYTES,
    Encoded,
    Parts,
    bnb4,
    bnb8,
    compressed_fp4,
    modelopt_fp4,
    mxfp4,
)
from tests.checkpoint.whole_formats import (
    GROUP,
    awq,
    fp8_blocks,
    fp8_channels,
    fp8_tensor,
    gptq,
    int8,
    packed,
    shuffled,
    symmetric,
)
from tests.model.checkpoints import greedy, make_checkpoint
from tests.model.harness import require
from tests.tiers import SECONDS, rest


def _groups(
    bits: int,
    kind: str = "int",
    form: str = "pack-quantized",
    strategy: str = "group",
    *,
    symmetric: bool = True,
    size: int = GROUP,
) -> dict[str, Any]:
    facts = {"num_bits": bits, "type": kind, "symmetric": symmetric}
    weights = {**facts, "strategy": strategy, "group_size": size}
    return {
        "quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }  # fmt: skip


def requantise(folder: Path, tensors: Parts, config: Any, **further: Any) -> None:
    """Replace the weights of a model directory, and state how they are quantised."""
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    state(folder, quantization_config=config, **further)


def state(folder: Path, **fields: Any) -> None:
    """Change the config of a model directory."""
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def generate(
    folder: Path,
    prompt: list[int],
    tokens: int = 10,
    kernels: Any = "auto",
    quantization: Any = "auto",
    **params: Any,
) -> Any:
    """The result of a greedy generation with a model directory."""
    config = EngineConfig(
        model=str(folder), dtype="float32", num_pages=64, threads=1, attention_backend=kernels,
        quantization=quantization,
    )  # fmt: skip
    with LLM(config) as llm:
        (result,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=tokens, **params))
    return result


def assert_experts_stay(folder: Path, oracle: Any, prompt: list[int], bits: int, within: float = 0.2) -> None:
    """With numbers that are dequantised ids are those of transformers; native kernels keep them as they are,
    and round activations to 8 bits: logprobs are ``within`` so much of transformers'."""
    expected = oracle(torch.tensor([prompt])).logits[0, -1].detach().log_softmax(0)
    ids = greedy(oracle, prompt, 10)
    assert generate(folder, prompt, kernels="sdpa").token_ids == ids
    require("native")
    assert generate(folder, prompt, kernels="native", quantization="none").token_ids == ids
    options = LoadOptions(dtype="float32", device=torch.device("cpu"), kernels="native")
    assert f"weights of {bits} bits as they are stored" in load_model(folder, options).spec.layer_reason
    assert inspect_model(folder, options).stored_bits == [bits]
    (first,) = generate(folder, prompt, 1, "native", logprobs=3).logprobs
    for token, logprob in first.top:
        assert logprob == pytest.approx(float(expected[token]), abs=within)


#: name -> (quantization_config, encoder, bits of the numbers that native kernels take as they are, 0: none)
FORMATS: dict[str, tuple[dict[str, Any], Callable[[torch.Tensor], Encoded], int]] = {
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}, awq, 4),
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": GROUP}, gptq, 4),
    "gptq-8": ({"quant_method": "gptq", "bits": 8}, lambda weight: gptq(weight, 8), 8),
    "gptq-3": ({"quant_method": "gptq", "bits": 3}, lambda weight: gptq(weight, 3), 4),
    "gptq-2": ({"quant_method": "gptq", "bits": 2}, lambda weight: gptq(weight, 2), 4),
    "gptq-3-v2": (
        {"quant_method": "gptq", "bits": 3, "format": "gptq_v2"}, lambda weight: gptq(weight, 3, less=0), 4,
    ),
    "autoround": (
        {"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:auto_gptq"}, gptq, 4,
    ),
    "autoround-v2": (
        {"quant_method": "intel/auto-round", "bits": 4, "backend": "autoround:exllamav2"},
        lambda weight: gptq(weight, less=0), 4,
    ),
    "autoround-3": (
        {"quant_method": "auto-round", "bits": 3, "packing_format": "auto_round"},
        lambda weight: gptq(weight, 3, less=0), 4,
    ),
    "autoround-awq": (
        {"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:auto_awq"}, awq, 4,
    ),
    "gptq-v2": (
        {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"},
        lambda weight: gptq(weight, less=0), 4,
    ),
    "gptq-v2-by-format": (
        {"quant_method": "gptq", "bits": 4, "format": "GPTQ_V2"}, lambda weight: gptq(weight, less=0), 4,
    ),
    "gptq-symmetric": (
        {"quant_method": "gptq", "bits": 4, "sym": True}, lambda weight: symmetric(weight, 1), 4,
    ),
    "gptq-symmetric-v2": (
        {"quant_method": "gptq", "bits": 4, "sym": True, "checkpoint_format": "gptq"},
        lambda weight: symmetric(weight, 0), 4,
    ),
    "gptq-shuffled": ({"quant_method": "gptq", "bits": 4, "desc_act": True}, shuffled, 0),
    "packed-4": (_groups(4), packed, 4),
    "packed-8": (_groups(8), lambda weight: packed(weight, 8), 8),
    "packed-4-zeros": (_groups(4, symmetric=False), lambda weight: packed(weight, symmetric=False), 4),
    "int8": (_groups(8, form="int-quantized", strategy="channel"), int8, 8),
    "fp8-blocks": ({"quant_method": "fp8", "weight_block_size": [48, 48]}, fp8_blocks, 0),
    "fp8-channels": (_groups(8, "float", form="float-quantized"), fp8_channels, 0),
    "fp8-tensor": (_groups(8, "float", form="float-quantized"), fp8_tensor, 0),
    "bnb-nf4": (BITSANDBYTES, bnb4, 4),
    "bnb-fp4": (BITSANDBYTES, lambda weight: bnb4(weight, "fp4", nested=False), 4),
    "bnb-8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, bnb8, 8),
    "modelopt-fp8": ({"quant_method": "modelopt", "quant_algo": "FP8"}, fp8_tensor, 0),
    "modelopt-fp4": ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}, modelopt_fp4, 4),
    "nvfp4": (_groups(4, "float", "nvfp4-pack-quantized", size=16), compressed_fp4, 4),
    "mxfp4": (_groups(4, "float", "mxfp4-pack-quantized"), mxfp4, 4),
}  # fmt: skip


def repeat(scales: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Those of blocks, of every element."""
    return scales.repeat_interleave(block[0], dim=0).repeat_interleave(block[1], dim=1)


def random_weight(name: str) -> torch.Tensor:
    """Of sizes that words of a format divide, and its blocks do not."""
    rows = 96 if FORMATS[name][0].get("bits") in (2, 3) else 72
    return torch.randn(rows, 128, generator=torch.Generator().manual_seed(1))


def stored(
    name: str, folder: Path, weight: torch.Tensor
) -> tuple[SafetensorsTensors, dict[str, Any], torch.Tensor]:
    config, encode, _ = FORMATS[name]
    parts, made = encode(weight)
    plain = {"other.weight": torch.ones(3, 4), "norm.weight": torch.ones(5)}
    save_file(
        {**{f"at.{part}": tensor for part, tensor in parts.items()}, **plain}, folder / "model.safetensors"
    )
    return SafetensorsTensors(folder), config, made


@pytest.mark.parametrize("name", FORMATS)
def test_a_weight_is_what_was_encoded(tmp_path: Path, name: str) -> None:
    weight = random_weight(name)
    files, config, made = stored(name, tmp_path, weight)
    tensors = quantised_tensors(files, config)
    assert set(tensors.names) == {"at.weight", "other.weight", "norm.weight"}
    assert tensors.shape("at.weight") == weight.shape
    torch.testing.assert_close(tensors.read("at.weight"), made, rtol=1e-5, atol=1e-6)
    assert torch.equal(tensors.read("other.weight"), torch.ones(3, 4))
    floats, is_float = tensors.float8("at.weight"), "fp8" in name
    assert (floats is not None) == is_float
    if floats is not None:
        wide = repeat(floats.scales, floats.block)[: len(weight), :128]
        torch.testing.assert_close(floats.values.float() * wide, made, rtol=1e-6, atol=0)
    assert tensors.float8("other.weight") is None
    kept = FORMATS[name][2]
    assert (tensors.rounding("at.weight") is not None) == bool(kept)
    assert tensors.rounding("other.weight") is None
    if kept:
        matrix = tensors.quantised("at.weight")
        assert matrix.rounding == tensors.rounding("at.weight")
        # Tables of bitsandbytes are of floats, those of kernels of 8 bits.
        near = float(made.abs().max()) / 250 if "bnb-" in name and kept == 4 else 1e-5
        torch.testing.assert_close(dequantised(matrix), made, rtol=1e-4, atol=near)


def test_other_floats_of_8_bits_are_dequantised(tmp_path: Path) -> None:
    parts = fp8_tensor(torch.ones(8, 32)).parts
    parts["weight"] = parts["weight"].float().to(torch.float8_e5m2)
    save_file({f"at.{part}": value for part, value in parts.items()}, tmp_path / "model.safetensors")
    tensors = quantised_tensors(SafetensorsTensors(tmp_path), FORMATS["fp8-tensor"][0])
    assert tensors.float8("at.weight") is None
    torch.testing.assert_close(tensors.read("at.weight"), torch.ones(8, 32))


@pytest.mark.parametrize("name", FORMATS)
def test_a_weight_without_one_of_its_parts_is_an_error(tmp_path: Path, name: str) -> None:
    weight = random_weight(name)
    config, encode, _ = FORMATS[name]
    parts, _ = encode(weight)
    optional = {"input_scale", "input_global_scale", "weight", "qweight", "weight_format", "weight_packed"}
    if name != "gptq-shuffled":
        optional.add("g_idx")
    for missing in parts.keys() - optional:
        rest = {f"at.{part}": tensor for part, tensor in parts.items() if part != missing}
        save_file(rest, tmp_path / "model.safetensors")
        with pytest.raises(
            ConfigError,
            match=rf"at is quantised, and the checkpoint has no at\.{missing.split('_inv')[0][:30]}",
        ):
            quantised_tensors(SafetensorsTensors(tmp_path), config)


@pytest.mark.parametrize("name", FORMATS)
def test_parts_that_do_not_fit_are_an_error(tmp_path: Path, name: str) -> None:
    """Every part with a row or a column less: an error, or the part does not matter."""
    weight = random_weight(name)
    config, encode, _ = FORMATS[name]
    parts, made = encode(weight)
    for part, tensor in parts.items():
        for dimension in range(tensor.dim()):
            if tensor.shape[dimension] < 2:
                continue
            short = tensor.narrow(dimension, 0, tensor.shape[dimension] - 1).contiguous()
            changed = {f"at.{each}": short if each == part else value for each, value in parts.items()}
            save_file(changed, tmp_path / "model.safetensors")
            try:
                tensors = quantised_tensors(SafetensorsTensors(tmp_path), config)
                tensors.read("at.weight")
                # Only a whole matrix may come of it, of another size: which the config refuses.
                assert tensors.shape("at.weight") != made.shape, (part, dimension)
            except ConfigError as error:
                assert re.search(r"\bat\b", str(error)), error


@rest(SECONDS)
@pytest.mark.parametrize("name", FORMATS)
def test_a_model_of_a_format_is_the_dequantised_one(tmp_path: Path, name: str) -> None:
    """Greedy ids of torch's kernels; of native ones, which multiply the numbers as they are, logits."""
    oracle = make_checkpoint("qwen3-blocks", tmp_path)
    config, encode, _ = FORMATS[name]
    tensors: Parts = {}
    with torch.no_grad():
        for key, tensor in load_file(tmp_path / "model.safetensors").items():
            module = key.removesuffix(".weight")
            # A layer without, and one of three parts that are multiplied as one.
            if "_proj" not in key or "layers.1.self_attn" in key or "layers.2.self_attn.k_proj" in key:
                tensors[key] = tensor
                continue
            parts, made = encode(tensor)
            tensors |= {f"{module}.{part}": value for part, value in parts.items()}
            # As tools write it that have no models without biases.
            tensors[f"{module}.bias"] = torch.zeros(len(tensor))
            oracle.get_parameter(key).copy_(made)
    requantise(tmp_path, tensors, config)
    prompt = [random.Random(3).randrange(200) for _ in range(9)]
    assert generate(tmp_path, prompt, kernels="sdpa").token_ids == greedy(oracle, prompt, 10)
    require("native")
    model = load_model(tmp_path, LoadOptions(dtype="float32", device=torch.device("cpu"), kernels="native"))
    bits = FORMATS[name][2]
    assert ("bits as they are stored" in model.spec.layer_reason) == bool(bits)
    info = inspect_model(tmp_path, LoadOptions(dtype="auto", device=torch.device("cpu")))
    assert info.stored_bits == ([bits] if bits else [])
    expected = oracle(torch.tensor([prompt])).logits[0, -1].detach().log_softmax(0)
    (first,) = generate(tmp_path, prompt, 1, "native", logprobs=3).logprobs
    for token, logprob in first.top:
        assert logprob == pytest.approx(float(expected[token]), abs=0.2)


def test_float16_on_a_cpu_is_computed_in_bfloat16(tmp_path: Path) -> None:
    """Which native kernels have; unless it is asked for."""
    make_checkpoint("qwen3-blocks", tmp_path)
    tensors: Parts = {}
    for key, tensor in load_file(tmp_path / "model.safetensors").items():
        module = key.removesuffix(".weight")
        parts = awq(tensor).parts if "_proj" in key else {"weight": tensor}
        tensors |= {f"{module}.{part}": value for part, value in parts.items()}
    requantise(tmp_path, tensors, FORMATS["awq"][0], dtype="float16")
    for device, dtype, wanted in (
        ("cpu", "auto", torch.bfloat16), ("cpu", "float16", torch.float16), ("cuda", "auto", torch.float16),
    ):  # fmt: skip
        options = LoadOptions(dtype=dtype, device=torch.device(device))
        assert inspect_model(tmp_path, options).dtype == wanted


def test_experts_stay_as_they_are_stored(tmp_path: Path) -> None:
    oracle = make_checkpoint("mixtral", tmp_path)
    names = {"w1": "gate", "w3": "up", "w2": "down"}
    tensors: Parts = {}
    with torch.no_grad():
        for key, tensor in load_file(tmp_path / "model.safetensors").items():
            module = key.removesuffix(".weight")
            if ".experts." not in key:
                tensors[key] = tensor
                continue
            parts, made = awq(tensor)
            tensors |= {f"{module}.{part}": value for part, value in parts.items()}
            _, _, layer, _, _, expert, part = module.split(".")
            experts = oracle.model.layers[int(layer)].mlp.experts
            middle = experts.gate_up_proj.shape[1] // 2
            if names[part] == "down":
                experts.down_proj[int(expert)] = made
            else:
                first = 0 if names[part] == "gate" else middle
                experts.gate_up_proj[int(expert), first : first + middle] = made
    requantise(tmp_path, tensors, FORMATS["awq"][0])
    assert_experts_stay(tmp_path, oracle, [3, 1, 4, 1, 5, 9, 2], 4)


@rest(SECONDS)
def test_a_shared_expert_stays_as_it_is_stored_beside_others_that_are_not_quantised(tmp_path: Path) -> None:
    oracle = make_checkpoint("qwen3.5-moe", tmp_path)
    config, encode, _ = FORMATS["int8"]
    tensors: Parts = {}
    for key, tensor in load_file(tmp_path / "model.safetensors").items():
        if "shared_expert." not in key:
            tensors[key] = tensor
            continue
        parts, made = encode(tensor)
        tensors |= {f"{key.removesuffix('.weight')}.{part}": value for part, value in parts.items()}
        with torch.no_grad():
            oracle.get_parameter(key).copy_(made)
    requantise(tmp_path, tensors, config)
    prompt = random.Random(3).choices(range(200), k=9)
    # A recurrent state keeps what rounding has done to it: the mean error is 0.1.
    assert_experts_stay(tmp_path, oracle, prompt, 8, within=0.4)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"quant_method": "quanto"},
            "quantised by 'quanto' are not supported: auto-round, awq, bits",
        ),
        ({}, "quantised by None"),
        ([], "must be an object"),
        ({"quant_method": "awq", "bits": 3}, "AWQ of 3 bits"),
        ({"quant_method": "gptq", "bits": 5}, "GPTQ of 5 bits"),
        ({"quant_method": "gptq", "bits": True}, "GPTQ of True bits"),
        ({"quant_method": "auto-round", "bits": 5}, "GPTQ of 5 bits"),
        (
            {"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:nvfp4"},
            "AutoRound's packing 'auto_round:nvfp4' of 'int' is not supported",
        ),
        (
            {"quant_method": "auto-round", "bits": 4, "data_type": "mx_fp"},
            "AutoRound's packing 'auto_round:auto_gptq' of 'mx_fp' is not supported",
        ),
        ({"quant_method": "auto-round", "bits": "4"}, "GPTQ of '4' bits"),
        ({"quant_method": "auto-round", "bits": 4, "extra_config": {"a": 3}}, "describes no auto-round"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "'marlin-24' of compressed-tensors"),
        (
            {"quant_method": "compressed-tensors", "format": "pack-quantized"},
            "describes no compressed-tensors",
        ),
        (_groups(8, form="int-quantized", symmetric=False), "zero points"),
        (_groups(4, "float"), "of the type 'float'"),
        ({"quant_method": "fp8", "weight_block_size": [0, 1]}, "weight_block_size must be two sizes"),
    ],
)
def test_what_is_not_supported_is_said(tmp_path: Path, config: Any, message: str) -> None:
    save_file({"a.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=message):
        quantised_tensors(SafetensorsTensors(tmp_path), config)
