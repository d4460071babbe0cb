"""Configs of quantised weights with settings by module, and fields that nobody here knows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from aioinfer.checkpoint.formats import quantised_tensors
from aioinfer.checkpoint.tensors import FLOAT4, Rounding, SafetensorsTensors, Tensors
from aioinfer.errors import ConfigError
from tests.checkpoint.float_formats import compressed_fp4
from tests.checkpoint.test_formats import FORMATS, fp8_blocks, gptq, int8, packed

Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj"
UP = "model.layers.0.mlp.up_proj"


def group(targets: list[str], **weights: Any) -> dict[str, Any]:
    stated = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    return {"targets": targets, "weights": {**stated, **weights}, "input_activations": None}


def compressed(form: str, *groups: dict[str, Any], **more: Any) -> dict[str, Any]:
    named = {f"group_{number}": each for number, each in enumerate(groups)}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": named, **more}


def read(
    path: Path,
    config: dict[str, Any],
    more: dict[str, torch.Tensor] | None = None,
    **modules: dict[str, torch.Tensor],
) -> Tensors:
    tensors = {
        f"{module}.{part}": tensor.clone()
        for module, parts in zip((Q, DOWN), modules.values(), strict=True)
        for part, tensor in parts.items()
    }
    save_file({**tensors, **(more or {}), "norm.weight": torch.ones(3)}, path / "model.safetensors")
    return quantised_tensors(SafetensorsTensors(path), config)


def weight(seed: int) -> torch.Tensor:
    return torch.randn(64, 128, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (["re:.*self_attn.*"], ["re:.*down_proj"]),
        (["Linear"], [DOWN]),
        (["Linear"], [r"re:.*\.mlp\.(gate|up|down)_proj$"]),
        # A name comes before a pattern, and that before a class.
        (["re:.*_proj"], [DOWN, "Linear"]),
    ],
)
def test_groups_of_modules_have_bits_and_zeros_of_their_own(
    tmp_path: Path, first: list[str], second: list[str]
) -> None:
    one, two = packed(weight(1)), packed(weight(2), 8, symmetric=False)
    config = compressed(
        "pack-quantized", group(first), group(second, num_bits=8, symmetric=False), ignore=["lm_head"]
    )
    tensors = read(tmp_path, config, q=one.parts, down=two.parts)
    torch.testing.assert_close(tensors.read(f"{Q}.weight"), one.weight)
    torch.testing.assert_close(tensors.read(f"{DOWN}.weight"), two.weight)
    assert [tensors.rounding(f"{name}.weight") for name in (Q, DOWN)] == [Rounding(4, 32), Rounding(8, 32)]
    assert tensors.quantised(f"{DOWN}.weight").rounding.bits == 8


def test_groups_of_rows_and_of_blocks_are_told_apart(tmp_path: Path) -> None:
    rows, blocks = int8(weight(1)), fp8_blocks(weight(2))
    whole = group(["re:.*q_proj"], num_bits=8, strategy="channel", group_size=None)
    config = compressed("int-quantized", whole, group([DOWN], num_bits=8, strategy="tensor"))
    single = {**rows.parts, "weight_scale": torch.tensor([0.5])}
    tensors = read(tmp_path, config, q=rows.parts, down=single)
    torch.testing.assert_close(tensors.read(f"{Q}.weight"), rows.weight)
    torch.testing.assert_close(tensors.read(f"{DOWN}.weight"), rows.parts["weight"] * 0.5)
    config = compressed(
        "float-quantized",
        group(["Linear"], num_bits=8, type="float", strategy="channel"),
        group([DOWN], num_bits=8, type="float", strategy="block", block_structure=[48, 48]),
    )
    parts = {name.removesuffix("_inv"): part for name, part in blocks.parts.items()}
    channels = {"weight": parts["weight"], "weight_scale": torch.ones(64, 1)}
    tensors = read(tmp_path, config, q=channels, down=parts)
    torch.testing.assert_close(tensors.read(f"{DOWN}.weight"), blocks.weight)
    assert tensors.float8(f"{Q}.weight") is not None


@pytest.mark.parametrize("form", ["mixed-precision", "pack-quantized"])
def test_groups_of_modules_have_formats_of_their_own(tmp_path: Path, form: str) -> None:
    four, floats, rows = packed(weight(1)), compressed_fp4(weight(2)), int8(weight(3))
    fp4 = group(["re:.*down_proj"], type="float", group_size=16)
    whole = group(["re:.*up_proj"], num_bits=8, strategy="channel", group_size=None)
    config = compressed(
        form,
        {**group(["Linear"]), "format": "pack-quantized"},
        {**fp4, "format": "nvfp4-pack-quantized"},
        {**whole, "format": "int-quantized"},
    )
    up = {f"model.layers.0.mlp.up_proj.{part}": tensor for part, tensor in rows.parts.items()}
    tensors = read(tmp_path, config, up, q=four.parts, down=floats.parts)
    torch.testing.assert_close(tensors.read(f"{Q}.weight"), four.weight)
    torch.testing.assert_close(tensors.read(f"{DOWN}.weight"), floats.weight)
    torch.testing.assert_close(tensors.read("model.layers.0.mlp.up_proj.weight"), rows.weight)
    assert [tensors.rounding(f"{name}.weight") for name in (Q, DOWN)] == [
        Rounding(4, 32),
        Rounding(4, 16, FLOAT4),
    ]
    assert "norm.weight" in tensors.names


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([group(["re:.*q_proj"]), group(["re:.*up_proj"], num_bits=8)], f"has {DOWN} among its targets"),
        (
            [group(["re:("]), group(["re:.*"], num_bits=8)],
            "the target 're:.' in config_groups cannot be used",
        ),
        (
            [group(["Linear"]), {**group([DOWN], num_bits=8), "format": "int-quantized"}],
            f"{DOWN} is quantised, and the checkpoint has no {DOWN}.weight",
        ),
        ([{**group(["Linear"]), "format": "mixed-precision"}], "format 'mixed-precision' of compressed"),
        ([{"targets": ["Linear"], "weights": None}], "packed weights of None bits"),
        ([group(["Linear"], rotation="hadamard")], "weights of the group 'group_0' .* has 'rotation'"),
        ([{**group(["Linear"]), "outliers": [1]}], "group 'group_0' in config_groups has 'outliers'"),
    ],
)
def test_groups_that_cannot_be_read_are_named(
    tmp_path: Path, groups: list[dict[str, Any]], message: str
) -> None:
    parts = packed(weight(1)).parts
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, compressed("pack-quantized", *groups), q=parts, down=parts)


@pytest.mark.parametrize(
    "dynamic",
    [
        {"-:.*attn.*": {}, "-:.*mtp.*": {}},
        {r"-:.*layers\.17\..*": {"bits": 8}},
        {"+:.*down.*": {"bits": 4}, ".*up.*": {}},
        None,
    ],
)
def test_patterns_of_what_gptq_leaves_out_are_not_needed(tmp_path: Path, dynamic: Any) -> None:
    made = gptq(weight(1))
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "dynamic": dynamic}
    tensors = read(tmp_path, config, q={"weight": weight(3)}, down=made.parts)
    torch.testing.assert_close(tensors.read(f"{DOWN}.weight"), made.weight)
    assert torch.equal(tensors.read(f"{Q}.weight"), weight(3))


#: as tools and releases write them, beside what the format is
HARMLESS: dict[str, list[dict[str, Any]]] = {
    "gptq": [
        {"damp_percent": 0.01, "static_groups": False, "true_sequential": True, "model_name_or_path": None,
         "model_file_base_name": "model"},
        {"checkpoint_format": "gptq", "lm_head": False, "pack_dtype": "int32", "meta": {"quantizer": ["x:1"]},
         "dynamic": None, "damp_auto_increment": 0.0025},
        {"block_name_to_quantize": "model.layers", "dataset": "c4", "exllama_config": {"version": 1},
         "modules_in_block_to_quantize": [["self_attn.q_proj"]], "use_exllama": True, "pad_token_id": 0},
        {"autoround_version": "0.4.1", "data_type": "int", "iters": 200, "amp": True, "seqlen": 2048,
         "backend": "auto_round:gptq:exllamav2", "low_gpu_mem_usage": True, "enable_quanted_input": True,
         "to_quant_block_names": [["model.layers.0"]], "scale_dtype": "torch.float16", "lr": 0.005},
        {"act_bits": 16, "act_data_type": "int", "act_dynamic": True, "act_group_size": 128, "act_sym": True},
        {"provider": "auto-round", "method": "gptq", "hyb_act": False, "unheard_of": None, "rotation": ""},
    ],
    "awq": [
        {"zero_point": True, "modules_to_not_convert": ["visual"], "do_fuse": False, "backend": "autoawq",
         "q_group_size": 128, "w_bit": 4, "exllama_config": None},
    ],
    "packed-4": [
        {"global_compression_ratio": 1.5, "ignore": ["lm_head"], "kv_cache_scheme": {"num_bits": 8},
         "quantization_status": "compressed", "sparsity_config": {"format": "dense"}, "transform_config": {},
         "version": "0.13.0"},
    ],
    "fp8-blocks": [
        {"activation_scheme": "dynamic", "fmt": "e4m3", "modules_to_not_convert": ["lm_head"],
         "scale_fmt": "ue8m0", "dequantize": False, "kv_cache_scheme": None},
    ],
}  # fmt: skip


@pytest.mark.parametrize(("name", "more"), [(name, each) for name, sets in HARMLESS.items() for each in sets])
def test_fields_that_change_no_weight_are_read_over(tmp_path: Path, name: str, more: dict[str, Any]) -> None:
    config, encode, _ = FORMATS[name]
    made = encode(weight(1))
    tensors = read(tmp_path, {**config, **more}, q={"weight": weight(2)}, down=made.parts)
    torch.testing.assert_close(tensors.read(f"{DOWN}.weight"), made.weight)


@pytest.mark.parametrize(
    ("name", "more", "message"),
    [
        (
            "packed-4",
            {"transform_config": {"config_groups": {"R": {}}}},
            "has 'transform_config', which is not",
        ),
        ("int8", {"transform_config": {"x": 1}}, "'transform_config'"),
        ("fp8-channels", {"transform_config": {"x": 1}}, "'transform_config'"),
        (
            "packed-4",
            {"sparsity_config": {"format": "sparse-24-bitmask"}},
            "sparse weights in the format 'sparse",
        ),
        ("gptq", {"adapter": {"path": "eora"}}, "quantization_config has 'adapter'"),
        ("gptq", {"extra_config": {"lm_head": {"bits": 8}}}, "'extra_config'"),
        ("gptq", {"is_marlin_format": True}, "'is_marlin_format'"),
        ("gptq", {"checkpoint_format": "marlin"}, "layout 'marlin'"),
        ("gptq", {"dynamic": {"+:.*down.*": {"bits": 5}}}, "GPTQ of 5 bits"),
        ("gptq", {"dynamic": {".*down.*": {"rotation": "x"}}}, "'.*down.*' in dynamic has 'rotation'"),
        ("awq", {"rotation": "hadamard"}, "'rotation'"),
        ("fp8-blocks", {"outliers": [3]}, "'outliers'"),
    ],
)
def test_fields_that_may_change_weights_are_refused_by_name(
    tmp_path: Path, name: str, more: dict[str, Any], message: str
) -> None:
    config, encode, _ = FORMATS[name]
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, {**config, **more}, q={"weight": weight(2)}, down=encode(weight(1)).parts)


@pytest.mark.parametrize(
    "stated",
    [
        {
            "quant_method": "auto-round",
            "extra_config": {DOWN: {"bits": 2}, UP: {"bits": 8}, "lm_head": {"bits": 16}},
        },
        {"quant_method": "auto-round", "extra_config": {r".*\.down_proj": {"bits": 2}, UP: {"bits": 8}}},
        {"quant_method": "gptq", "dynamic": {"+:.*down.*": {"bits": 2}, UP: {"bits": 8}, "-:lm_head": {}}},
    ],
)
def test_modules_have_bits_of_their_own(tmp_path: Path, stated: dict[str, Any]) -> None:
    """By name, by a pattern, and such that are not quantised."""
    whole, plain = gptq(weight(3), 8), torch.ones(4, 4)
    more = {f"{UP}.{part}": tensor for part, tensor in whole.parts.items()}
    q, down = gptq(weight(1)), gptq(weight(2), 2)
    config = {"bits": 4, **stated}
    tensors = read(tmp_path, config, more | {"lm_head.weight": plain}, q=q.parts, down=down.parts)
    for module, made in ((Q, q), (DOWN, down), (UP, whole)):
        torch.testing.assert_close(tensors.read(f"{module}.weight"), made.weight)
    assert tensors.read("lm_head.weight").equal(plain)
