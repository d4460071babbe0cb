"""Loading: files in every legal shape, and a clear word for every illegal one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from aioinfer.config import EngineConfig
from aioinfer.errors import ConfigError
from aioinfer.llm import LLM
from aioinfer.model.loader import load_model
from aioinfer.params import SamplingParams
from tests.model.checkpoints import greedy, make_checkpoint

CPU = torch.device("cpu")


def load(path: Path, **options: Any) -> Any:
    return load_model(path, dtype=options.pop("dtype", "auto"), device=CPU, **options)


def test_sharded_files_load_like_a_single_one(tmp_path: Path) -> None:
    oracle = make_checkpoint("qwen3", tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    seen: list[tuple[str, int, int]] = []
    load(tmp_path, progress=lambda *args: seen.append(args))
    assert seen[-1][0] == "weights"
    assert seen[-1][1] == seen[-1][2]
    with LLM(EngineConfig(model=str(tmp_path), threads=1)) as llm:
        (result,) = llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=8))
    assert result.token_ids == greedy(oracle, [1, 2, 3], 8)


def test_the_checkpoint_says_its_dtype_unless_the_caller_does(tmp_path: Path) -> None:
    make_checkpoint("qwen3", tmp_path, torch.bfloat16)
    assert load(tmp_path).spec.dtype == torch.bfloat16
    assert load(tmp_path, dtype="float32").spec.dtype == torch.float32


def broken(make: Callable[[Path], None], message: str) -> Any:
    return pytest.param(make, message, id=message)


def edit_config(**changes: Any) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        config = json.loads((path / "config.json").read_text())
        config.update(changes)
        (path / "config.json").write_text(json.dumps(config))

    return edit


def edit_weights(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        tensors = load_file(path / "model.safetensors")
        change(tensors)
        save_file(tensors, path / "model.safetensors")

    return edit


@pytest.mark.parametrize(
    ("make", "message"),
    [
        broken(lambda path: (path / "config.json").unlink(), "no config.json"),
        broken(lambda path: (path / "model.safetensors").unlink(), "no model.safetensors"),
        broken(lambda path: (path / "config.json").write_text("{"), "cannot be used"),
        broken(edit_config(architectures=None), "names no architecture"),
        broken(edit_config(quantization_config={"quant_method": "gptq", "bits": 4}), "quantised"),
        broken(edit_weights(lambda tensors: tensors.pop("model.norm.weight")), "no tensor model.norm.weight"),
        broken(
            edit_weights(lambda tensors: tensors.update({"model.norm.weight": torch.ones(3)})),
            "model.norm.weight is shaped",
        ),
        broken(edit_weights(lambda tensors: tensors.update(extra=torch.ones(3))), "unexpected tensors"),
        broken(lambda path: (path / "model.safetensors").write_bytes(b"nonsense"), "cannot be read"),
    ],
)
def test_a_broken_checkpoint_says_what_is_wrong(
    tmp_path: Path, make: Callable[[Path], None], message: str
) -> None:
    make_checkpoint("qwen3", tmp_path)
    make(tmp_path)
    with pytest.raises(ConfigError, match=message):
        load(tmp_path)


def test_a_directory_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match="/no/such/place"):
        load(Path("/no/such/place"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_model_len": 10_000}, "max_model_len"),
        ({"max_model_len": 256, "num_pages": 2}, "pages hold"),
        ({"device": "cuda"}, "cuda"),
    ],
)
def test_settings_that_the_model_cannot_meet_are_refused(
    tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    if settings.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    make_checkpoint("qwen3", tmp_path)
    with pytest.raises(ConfigError, match=message):
        LLM(EngineConfig(model=str(tmp_path), **settings))
