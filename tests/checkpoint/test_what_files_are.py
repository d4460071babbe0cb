"""Files that people have, whole or not: they load as what they are, or the error says what they are."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from aioinfer.checkpoint.files import open_checkpoint
from aioinfer.checkpoint.gguf.file import GGUFFile
from aioinfer.errors import ConfigError
from aioinfer.model.inspection import LoadOptions, inspect_model
from tests.checkpoint.gguf_models import write_file
from tests.checkpoint.test_formats import awq, fp8_tensor, gptq, state
from tests.model.checkpoints import assert_greedy, make_checkpoint
from tests.model.harness import load

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 123\n"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PROMPTS = [[3, 1, 4, 1, 5], [9, 2]]


def requantised(path: Path, encode: Callable[[torch.Tensor], Any], family: str = "qwen3-blocks") -> Any:
    """A model whose projections are quantised; returns transformers' with what they stand for."""
    oracle, tensors = make_checkpoint(family, path), {}
    with torch.no_grad():
        for name, tensor in load_file(path / WEIGHTS).items():
            if "_proj" not in name:
                tensors[name] = tensor
                continue
            parts, made = encode(tensor)
            tensors |= {f"{name.removesuffix('weight')}{part}": value for part, value in parts.items()}
            oracle.get_parameter(name).copy_(made)
    save_file(tensors, path / WEIGHTS, metadata={"format": "pt"})
    return oracle


@pytest.mark.parametrize(
    ("encode", "file", "stated"),
    [
        (
            gptq,
            "quantize_config.json",
            {"bits": 4, "group_size": 32, "damp_percent": 0.01, "desc_act": False},
        ),
        (awq, "quant_config.json", {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}),
        (
            fp8_tensor,
            "hf_quant_config.json",
            {
                "producer": {"name": "modelopt", "version": "0.29"},
                "quantization": {
                    "quant_algo": "FP8",
                    "kv_cache_quant_algo": None,
                    "exclude_modules": ["lm_head"],
                },
            },
        ),
    ],
)
def test_settings_beside_the_config_are_found(
    tmp_path: Path, encode: Callable[[torch.Tensor], Any], file: str, stated: dict[str, Any]
) -> None:
    oracle = requantised(tmp_path, encode)
    (tmp_path / file).write_text(json.dumps(stated))
    assert_greedy(tmp_path, PROMPTS, 6, oracle, quantization="none")
    assert tmp_path / file in open_checkpoint(tmp_path).files()
    assert_greedy(tmp_path, PROMPTS, 6, oracle, force_transformers=True)


@pytest.mark.parametrize("name", ["quantization_config", "compression_config"])
def test_fp8_of_modelopt_and_older_configs_are_read(tmp_path: Path, name: str) -> None:
    oracle = requantised(tmp_path, fp8_tensor)
    if name == "compression_config":
        weights = {"num_bits": 8, "type": "float", "strategy": "tensor"}
        stated: dict[str, Any] = {
            "format": "float-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        }
    else:
        stated = {"quant_method": "modelopt", "quant_algo": "FP8", "producer": {"name": "modelopt"}}
    state(tmp_path, **{name: stated})
    assert_greedy(tmp_path, PROMPTS, 6, oracle)


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        (
            {"quantization": {"group_size": 64, "bits": 4}},
            "quantised by 'mlx' are not supported: auto-round,",
        ),
        (
            {
                "quantization": {"group_size": 64, "bits": 4, "mode": "affine"},
                "quantization_config": {"group_size": 64, "bits": 4, "mode": "affine"},
            },
            "quantised by 'mlx' are not supported",
        ),
        (
            {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}},
            "of ModelOpt's 'NVFP4_AWQ' are not supported: FP8, ",
        ),
        ({"compression_config": {"format": "marlin-24"}}, "'marlin-24' of compressed-tensors"),
    ],
)
def test_quantised_weights_that_are_not_read_are_named(
    tmp_path: Path, stated: dict[str, Any], message: str
) -> None:
    make_checkpoint("qwen3", tmp_path)
    state(tmp_path, **stated)
    for read in (load, lambda path: inspect_model(path, LoadOptions(device=torch.device("cpu")))):
        with pytest.raises(ConfigError, match=message):
            read(tmp_path)


def split(path: Path) -> None:
    tensors = sorted(load_file(path / WEIGHTS).items())
    half = len(tensors) // 2
    for number, part in enumerate((tensors[:half], tensors[half:]), 1):
        save_file(dict(part), path / f"model-{number:05}-of-00002.safetensors", metadata={"format": "pt"})


def test_parts_without_an_index_are_read_if_all_are_there(tmp_path: Path) -> None:
    oracle = make_checkpoint("qwen3", tmp_path)
    split(tmp_path)
    (tmp_path / WEIGHTS).unlink()
    assert_greedy(tmp_path, PROMPTS, 6, oracle)
    (tmp_path / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(ConfigError, match=f"has no {INDEX}, and 1 of 2 parts of its weights are missing"):
        load(tmp_path)


def test_a_single_file_comes_before_an_index_of_others(tmp_path: Path) -> None:
    oracle = make_checkpoint("qwen3", tmp_path)
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "gone.safetensors"}}
    (tmp_path / INDEX).write_text(json.dumps(index))
    assert_greedy(tmp_path, PROMPTS, 6, oracle)
    # One that names it is of it.
    index["weight_map"]["c"] = WEIGHTS
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"names gone\.safetensors, which is missing"):
        load(tmp_path)


@pytest.mark.parametrize("family", ["llama-gqa-tied", "gemma2", "lfm2"])
def test_a_tied_matrix_may_have_the_name_of_the_head(tmp_path: Path, family: str) -> None:
    oracle = make_checkpoint(family, tmp_path)
    tensors = load_file(tmp_path / WEIGHTS)
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, tmp_path / WEIGHTS, metadata={"format": "pt"})
    assert_greedy(tmp_path, PROMPTS, 6, oracle)


@pytest.mark.parametrize("name", [WEIGHTS, "config.json", INDEX, "tokenizer.json", "generation_config.json"])
def test_pointers_of_git_lfs_are_named(tmp_path: Path, name: str) -> None:
    make_checkpoint("qwen3", tmp_path)
    (tmp_path / name).write_text(POINTER)
    with pytest.raises(ConfigError, match=rf"^model: {name} is a pointer of Git LFS.* git lfs pull"):
        open_checkpoint(tmp_path).tokenizer()
        load(tmp_path)


def test_parts_and_other_orders_of_gguf_are_named(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    write_file(file, {"split.count": 3, "split.no": 0})
    with pytest.raises(
        ConfigError, match=r"first of 3 parts of a model \(split.count\).*-00001-of-00003\.gguf"
    ):
        GGUFFile(file)
    file.rename(tmp_path / "m-00001-of-00001.gguf")
    with pytest.raises(ConfigError, match="first of 3 parts"):
        GGUFFile(tmp_path / "m-00001-of-00001.gguf")
    # Joined by llama.cpp's tool.
    write_file(file, {"split.count": 0})
    assert GGUFFile(file).tensors
    file.write_bytes(b"GGUF" + struct.pack(">IQQ", 3, 0, 0))
    with pytest.raises(ConfigError, match=r"it is big-endian.*gguf-convert-endian"):
        GGUFFile(file)
    file.write_text(POINTER)
    with pytest.raises(ConfigError, match="pointer of Git LFS"):
        GGUFFile(file)
