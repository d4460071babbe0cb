"""The doctor reports what an engine would run, and errors, without loading a model."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from aioinfer.cli.doctor import examine
from aioinfer.cli.main import main
from aioinfer.config import EngineConfig
from aioinfer.errors import ConfigError
from aioinfer.execution import graphs
from aioinfer.execution.torch_device import TorchDevice
from aioinfer.model.inspection import LoadOptions
from aioinfer.model.loader import load_model
from aioinfer.model.quantization import Quantization
from tests.model.block_models import block_config, write_checkpoint
from tests.model.checkpoints import make_model
from tests.model.harness import require
from tests.native.compilers import unsettled, unshipped

__all__ = ["unsettled", "unshipped"]


def report(config: EngineConfig) -> dict[str, str]:
    return {finding.subject: finding.text for finding in examine(config)}


@pytest.mark.usefixtures("unshipped")
def test_without_a_compiler_the_report_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, unsettled: None
) -> None:
    for name in ("CXX", "AIOINFER_CXX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AIOINFER_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "ziglang" else find(name, *more)
    )
    found = report(EngineConfig(device="cpu"))
    for subject in ("attention", "operations", "sampling"):
        assert found[subject].endswith("pip install 'aioinfer[compiler]' brings one"), subject


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_the_memory_that_is_told_is_what_a_model_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quantization: Quantization
) -> None:
    require("native")
    sizes = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 8192, "head_dim": 64}
    make_model("Qwen3", {**sizes, "tie_word_embeddings": True}, tmp_path / "model", seed=0)
    settings = {"device": "cpu", "dtype": "bfloat16", "quantization": quantization}
    config = EngineConfig(model=str(tmp_path / "model"), num_pages=125, page_size=8, **settings)
    said = report(config)["it takes"]
    device = TorchDevice(config)
    kv_bytes = device.open().kv_bytes
    device.close()
    monkeypatch.setenv("AIOINFER_CACHE", str(tmp_path / "cache"))
    options = LoadOptions(
        device=torch.device("cpu"), dtype="bfloat16", quantization=quantization, cache_weights=True
    )
    load_model(config.model_path, options)
    [packed] = (tmp_path / "cache").glob("*.packed")
    found = re.fullmatch(r"weights (\d+) MiB, KV ([\d.]+) MiB for 1,000 tokens; .*", said)
    assert found is not None, said
    assert float(found[2]) == pytest.approx(kv_bytes / 2**20, abs=0.05)
    assert int(found[1]) == pytest.approx(packed.stat().st_size / 2**20, rel=0.05, abs=0.6)


def test_the_report_of_the_bundled_model_is_what_runs(capsys: pytest.CaptureFixture[str]) -> None:
    require("native")
    config = EngineConfig(device="cpu")
    found = report(config)
    device = TorchDevice(config)
    description = device.open().description
    device.close()
    assert found["attention"] == "native: the device is a cpu"
    assert found["operations"] == "native: the device is a cpu"
    assert "native attention" in description
    architecture = found["model"].split()[1].rstrip(",")
    assert architecture in description
    assert "own code" in found["model"]
    assert "torch" in found["packages"]
    assert "transformers' code" in report(EngineConfig(transformers_fallback=True))["model"]
    assert main(["doctor", "--device", "cpu"]) == 0
    assert found["model"] in capsys.readouterr().out


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({}, "up to 64 rows"),
        ({"max_decode_rows": 9}, "up to 9 rows"),
        ({"decode_graph_rows": 5}, "up to 5 rows"),
        ({"decode_graph_rows": 0}, "none: asked for"),
    ],
)
def test_decode_graphs_are_those_that_will_be_captured(
    settings: dict[str, int], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "graphs_unsupported", lambda *arguments: None)
    found = report(EngineConfig(device="cpu", **settings))
    assert found["decode graphs"] == text


def test_the_report_of_a_diffusion_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "graphs_unsupported", lambda *arguments: None)
    write_checkpoint(tmp_path, block_config("sdar"))
    for settings, subject, text in (
        ({}, "decode graphs", "up to 128 blocks"),
        ({"max_step_tokens": 200}, "decode graphs", "up to 25 blocks"),
        ({}, "diffusion", "block size 8, mask token"),
        ({"block_size": 4}, "diffusion", "block size 4,"),
    ):
        found = report(EngineConfig(model=str(tmp_path), device="cpu", **{"block_size": 8, **settings}))
        assert found[subject].startswith(text)
    assert "diffusion" not in report(EngineConfig(device="cpu"))


@pytest.mark.parametrize("what", ["no such directory", "cuda without a GPU"])
def test_a_config_that_cannot_start_is_a_problem_and_an_exit_status(
    what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    flags = [str(tmp_path / "missing")] if what == "no such directory" else ["--device", "cuda"]
    assert main(["doctor", *flags]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("problem")
    assert ("missing" if "directory" in what else "CUDA") in last


@pytest.mark.parametrize(
    "settings",
    [
        {"quantization": "int8", "attention_backend": "sdpa"},
        {"quantization": "int8", "transformers_fallback": True},
        {"deterministic": True, "attention_backend": "sdpa"},
        {"deterministic": True, "transformers_fallback": True},
    ],
)
def test_settings_that_an_engine_refuses_are_refused(settings: dict[str, Any]) -> None:
    config = EngineConfig(device="cpu", **settings)
    problem = examine(config)[-1]
    assert problem.fatal
    assert problem.text.startswith(next(iter(settings)))
    with pytest.raises(ConfigError, match=next(iter(settings))):
        TorchDevice(config).open()
