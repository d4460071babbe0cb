"""``load_format="random"``: a config.json is a model, its weights repeat and keep activations in range."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

from aioinfer.cli.doctor import examine
from aioinfer.config import EngineConfig
from aioinfer.engine import Engine
from aioinfer.errors import ConfigError, InvalidRequest
from aioinfer.llm import LLM
from aioinfer.model.inspection import LoadOptions
from aioinfer.model.loader import load_model
from aioinfer.model.weights import RandomWeights
from aioinfer.params import SamplingParams
from tests.model.checkpoints import RECURRENT
from tests.model.harness import Driver

CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
SHAPE = {
    "vocab_size": 211, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 80, "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}  # fmt: skip


def config_only(path: Path, prefix: str = "Qwen3", **changes: Any) -> str:
    """A directory with nothing but a config.json."""
    config = getattr(transformers, f"{prefix}Config")(**{**SHAPE, **changes})
    config.architectures = [f"{prefix}ForCausalLM"]
    config.save_pretrained(path)
    assert [file.name for file in path.iterdir()] == ["config.json"]
    return str(path)


def weights(seed: int = 0, dtype: torch.dtype = torch.float32) -> RandomWeights:
    return RandomWeights(dtype=dtype, device=CPU, seed=seed)


async def test_token_ids_need_neither_weights_nor_tokenizer(tmp_path: Path) -> None:
    config = EngineConfig(model=config_only(tmp_path), load_format="random", threads=1)
    async with Engine(config) as engine:
        result = await engine.generate([5, 6, 7], GREEDY)
        with pytest.raises(InvalidRequest, match="no tokenizer"):
            await engine.generate("text", GREEDY)
    assert len(result.token_ids) == 8
    assert result.text == ""


def test_a_checkpoint_is_still_wanted_where_random_is_not(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no model\.safetensors"):
        LLM(EngineConfig(model=config_only(tmp_path)))


@pytest.mark.parametrize("prefix", ["Qwen3", "Llama", "Qwen2"])
def test_transformers_computes_the_same_from_the_same_names(tmp_path: Path, prefix: str) -> None:
    """Own code and transformers' name the tensors alike, so both make the same model of a config."""
    path = config_only(tmp_path, prefix)
    outputs = []
    for fallback in (False, True):
        config = EngineConfig(
            model=path, load_format="random", transformers_fallback=fallback, dtype="float32", threads=1
        )
        with LLM(config) as llm:
            outputs.append([result.token_ids for result in llm.generate([[1, 2, 3], [9] * 20], GREEDY)])
    assert outputs[0] == outputs[1]


def test_a_tensor_depends_on_seed_name_and_shape_alone() -> None:
    first, second = weights(), weights()
    first.take("before", (3, 4))
    assert torch.equal(first.take("a", (5, 6)), second.take("a", (5, 6)))
    assert first.num_parameters == 12 + 30
    assert not torch.equal(second.take("a", (5, 6)), second.take("b", (5, 6)))
    assert not torch.equal(second.take("a", (5, 6)), weights(seed=1).take("a", (5, 6)))
    rows = second.fused(["a", "b"], [5, 2], 6)
    assert torch.equal(rows[:5], second.take("a", (5, 6)))
    assert torch.equal(rows[5:], second.take("b", (2, 6)))


def test_norms_are_one_and_biases_zero() -> None:
    assert weights().take("model.norm.weight", (4,)).tolist() == [1.0] * 4
    assert weights().take("q_proj.bias", (4,)).tolist() == [0.0] * 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_tensor_is_made_in_place_in_the_models_type(dtype: torch.dtype) -> None:
    """No float32 original, no copy on another device: only memory for itself, written once."""
    seen: list[str] = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    with Recorder():
        made = weights(dtype=dtype).take("w", (64, 32))
    assert seen == ["empty", "normal_"]
    assert made.dtype == dtype
    assert made.float().std() == pytest.approx(32**-0.5, rel=0.1)


@pytest.mark.parametrize("family", RECURRENT)
def test_states_stay_in_range(checkpoint: Callable[[str], tuple[Path, Any]], family: str) -> None:
    path, _ = checkpoint(family)
    model = load_model(path, LoadOptions(dtype="bfloat16", device=CPU, load_format="random"))
    (sequence,) = Driver(model, chunk=64).run([list(range(1, 120))], 2, all_logits=True)
    assert torch.stack(list(sequence.logits.values())).isfinite().all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_activations_stay_in_range_through_many_layers(tmp_path: Path, dtype: str) -> None:
    path = Path(config_only(tmp_path, num_hidden_layers=40, hidden_size=64, intermediate_size=192))
    model = load_model(path, LoadOptions(dtype=dtype, device=CPU, load_format="random"))
    (sequence,) = Driver(model, chunk=64).run([list(range(1, 120))], 2, all_logits=True)
    logits = torch.stack(list(sequence.logits.values()))
    assert logits.isfinite().all()
    assert 0.5 < logits.std() < 2


def test_the_doctor_says_so(tmp_path: Path) -> None:
    config = EngineConfig(model=config_only(tmp_path), load_format="random", device="cpu")
    findings = examine(config)
    assert not any(finding.fatal for finding in findings)
    assert any("random weights" in finding.text for finding in findings)
