"""Quantised checkpoints of models that transformers computes: their weights are dequantised as they load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from aioinfer.cli.doctor import examine
from aioinfer.config import EngineConfig
from aioinfer.engine import Engine
from aioinfer.errors import ConfigError
from aioinfer.model.updates.recipe import prepare_update
from aioinfer.params import SamplingParams
from tests.checkpoint.float_formats import Parts
from tests.checkpoint.test_formats import FORMATS, requantise
from tests.model.checkpoints import assert_greedy, greedy, make_checkpoint, make_model
from tests.model.harness import load
from tests.tiers import thinned

#: each kind of format
SOME = ["awq", "gptq", "packed-4-zeros", "int8", "fp8-blocks", "fp8-tensor", "bnb-nf4", "bnb-8", "nvfp4"]
#: a variant that has no own code
FOREIGN = {"hidden_size": 64, "intermediate_size": 96, "hidden_act": "gelu"}


def quantised(folder: Path, oracle: Any, name: str) -> None:
    """Quantise the linear layers of all but the first layer of a checkpoint, and its oracle's."""
    config, encode, _ = FORMATS[name]
    tensors: Parts = {}
    with torch.no_grad():
        for key, tensor in load_file(folder / "model.safetensors").items():
            if tensor.dim() != 2 or ".layers." not in key or ".layers.0." in key:
                tensors[key] = tensor
                continue
            parts, made = encode(tensor)
            module = key.removesuffix(".weight")
            tensors |= {f"{module}.{part}": value for part, value in parts.items()}
            oracle.get_parameter(key).copy_(made)
    requantise(folder, tensors, config)


@pytest.mark.parametrize("name", thinned(SOME, 3))
def test_a_dequantised_model_of_transformers_has_its_ids(tmp_path: Path, name: str) -> None:
    oracle = make_model("Llama", FOREIGN, tmp_path, seed=3)
    quantised(tmp_path, oracle, name)
    assert_greedy(tmp_path, [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7]], 6, oracle)


async def test_the_start_says_what_dequantised_weights_take(tmp_path: Path) -> None:
    oracle = make_model("Llama", FOREIGN, tmp_path, seed=3)
    quantised(tmp_path, oracle, "gptq")
    config = EngineConfig(model=str(tmp_path), dtype="float32", num_pages=64, threads=1)
    async with Engine(config) as engine:
        assert "; weights by gptq are dequantised, 0.00 GiB)" in engine.info.decisions
        found = await engine.generate([3, 1, 4], SamplingParams(max_tokens=6, temperature=0))
        assert [*found.token_ids] == greedy(oracle, [3, 1, 4], 6)


def test_biases_of_zeros_are_left_out_and_others_are_not(tmp_path: Path) -> None:
    oracle = make_model("Llama", FOREIGN, tmp_path, seed=3)
    quantised(tmp_path, oracle, "gptq")
    tensors = load_file(tmp_path / "model.safetensors")
    name = next(key for key in tensors if "o_proj" in key).rpartition(".")[0]
    assert f"{name}.bias" not in tensors
    for value in (0, 1):
        requantise(tmp_path, {**tensors, f"{name}.bias": torch.full((64,), float(value))}, FORMATS["gptq"][0])
        if value:
            with pytest.raises(ConfigError, match=f"1 unexpected tensors, first {name}.bias"):
                load(tmp_path)
        else:
            load(tmp_path)


def test_quantised_checkpoints_replace_the_weights_of_transformers_models(tmp_path: Path) -> None:
    oracle = make_model("Llama", FOREIGN, tmp_path / "a", seed=3)
    other = make_model("Llama", FOREIGN, tmp_path / "b", seed=4)
    quantised(tmp_path / "a", oracle, "gptq")
    quantised(tmp_path / "b", other, "fp8-tensor")
    model = load(tmp_path / "a")
    prepare_update(model, tmp_path / "b", lambda: None).install()
    for name, tensor in other.state_dict().items():
        torch.testing.assert_close(model.state()[name], tensor)


def test_own_code_says_that_it_dequantises(tmp_path: Path) -> None:
    oracle = make_checkpoint("qwen3-blocks", tmp_path)
    quantised(tmp_path, oracle, "gptq-shuffled")
    assert "; weights by gptq are dequantised" in load(tmp_path).spec.layer_reason


def test_doctor_says_what_dequantised_weights_take(tmp_path: Path) -> None:
    oracle = make_model("Llama", FOREIGN, tmp_path, seed=3)
    quantised(tmp_path, oracle, "int8")
    config = EngineConfig(model=str(tmp_path), dtype="float32")
    found = {finding.subject: finding.text for finding in examine(config)}
    assert found["weights"] == "by compressed-tensors in the checkpoint, dequantised, 0 MiB"
