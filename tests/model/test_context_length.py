"""How long a sequence may be: where rotary positions are scaled, longer than max_position_embeddings."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import transformers

from aioinfer.config import EngineConfig
from aioinfer.engine import Engine
from aioinfer.errors import ConfigError, InvalidRequest
from aioinfer.llm import LLM
from aioinfer.model.rope import longest
from aioinfer.model.updates.recipe import prepare_update
from aioinfer.params import SamplingParams
from tests.model.checkpoints import assert_greedy, greedy, make_checkpoint, make_model
from tests.model.harness import load
from tests.tiers import thinned

SCALED = [
    # As the cards of Qwen3 and Qwen2.5 have one add it.
    ("Qwen3", {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 80, 256),
    ("Qwen2", {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 64, 256),
    ("Llama", {"rope_type": "yarn", "factor": 2.0}, 80, 160),
    # Configs that state the length that it makes.
    ("Qwen3", {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256, 256),
    ("Qwen3", {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 300, 300),
    ("Llama", {"rope_type": "linear", "factor": 4.0}, 64, 256),
    ("Llama", {"type": "linear", "factor": 2.5}, 64, 160),
    ("Gemma3", {"rope_type": "linear", "factor": 8.0}, 128, 128),
    ("Llama", {"rope_type": "dynamic", "factor": 4.0}, 64, 64),
    ("Llama", {"rope_type": "default", "factor": 4.0}, 64, 64),
    ("Llama", {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 32}, 128, 128),
]  # fmt: skip


@pytest.mark.parametrize(("prefix", "scaling", "stated", "expected"), SCALED)
def test_scaling_by_a_factor_makes_a_context_longer(
    prefix: str, scaling: dict[str, Any], stated: int, expected: int
) -> None:
    kind = getattr(transformers, f"{prefix}TextConfig" if prefix == "Gemma3" else f"{prefix}Config")
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    config = kind(**sizes, max_position_embeddings=stated, rope_scaling=scaling)
    assert longest(config) == expected


@pytest.mark.parametrize("forced", [False, True])
@pytest.mark.parametrize("kind", ["yarn", "linear"])
def test_tokens_behind_the_stated_length_are_those_of_transformers(
    tmp_path: Path, kind: str, forced: bool
) -> None:
    rope = {"rope_type": kind, "rope_theta": 10_000.0, "factor": 4.0}
    if kind == "yarn":
        rope["original_max_position_embeddings"] = 64
    changes = {"max_position_embeddings": 80, "rope_parameters": rope, "head_dim": 16}
    oracle = make_model("Qwen3", changes, tmp_path, seed=3)
    prompt = [(7 * at * at + 3) % 200 for at in range(200)]
    assert_greedy(tmp_path, [prompt, prompt[:70]], 6, oracle, chunk=40, force_transformers=forced)
    assert load(tmp_path, force_transformers=forced).spec.max_model_len == (256 if kind == "yarn" else 320)


def test_longer_contexts_are_refused_with_what_decides(tmp_path: Path) -> None:
    make_model("Qwen3", {"max_position_embeddings": 80}, tmp_path, seed=3)
    config = EngineConfig(model=str(tmp_path), dtype="float32", threads=1, max_model_len=81)
    with pytest.raises(ConfigError, match=r"the model knows 80 positions, which max_position_embeddings"):
        LLM(config)
    rope = {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 1e9,
        "original_max_position_embeddings": 64,
    }
    make_model("Qwen3", {"rope_parameters": rope}, tmp_path / "long", seed=3)
    with pytest.raises(ConfigError, match=r"scaled to 6\.4e\+10 positions"):
        load(tmp_path / "long")


def _long(model: Any) -> Any:
    """transformers' model of LongRoPE with its long factors for every length."""
    config = copy.deepcopy(model.config)
    config.rope_parameters["short_factor"] = config.rope_parameters["long_factor"]
    other = type(model)(config).eval()
    other.load_state_dict(model.state_dict())
    return other


@pytest.mark.parametrize("how", thinned([{}, {"kernels": "sdpa"}, {"force_transformers": True}], 2))
def test_longer_sequences_than_the_original_length_have_the_long_factors(
    tmp_path: Path, how: dict[str, Any]
) -> None:
    oracle = make_checkpoint("phi3-longrope", tmp_path)
    prompt = [(7 * at * at + 3) % 200 for at in range(200)]
    inside, beyond = [prompt[:60], prompt[:110]], [prompt[:129], prompt]
    assert_greedy(tmp_path, inside, 6, oracle, chunk=40, **how)
    assert_greedy(tmp_path, inside, 6, oracle, chunk=40, **how, max_model_len=128)
    assert_greedy(tmp_path, beyond, 6, oracle, _long(oracle), chunk=40, **how, max_model_len=129)
    # All have the same, so those inside are not those of transformers, which looks at each.
    assert_greedy(tmp_path, [*inside, prompt[:120]], 20, _long(oracle), chunk=40, **how, max_model_len=256)


async def test_engines_choose_the_factors_by_their_length(tmp_path: Path) -> None:
    oracle = make_checkpoint("phi3-longrope", tmp_path)
    prompt = [(7 * at * at + 3) % 200 for at in range(150)]
    settings: dict[str, Any] = {"model": str(tmp_path), "dtype": "float32", "threads": 1}
    greedily = SamplingParams(max_tokens=6, temperature=0.0)
    async with Engine(EngineConfig(**settings)) as short:
        assert short.info.max_model_len == 128
        assert "its short rotary factors; a larger max_model_len" in short.info.decisions
        with pytest.raises(InvalidRequest, match="a larger max_model_len takes the long ones"):
            await short.generate(prompt, greedily)
    async with Engine(EngineConfig(**settings, max_model_len=200)) as long:
        assert long.info.max_model_len == 200
        assert long.info.numerics != short.info.numerics
        found = [*(await long.generate(prompt, greedily)).token_ids]
        assert found == greedy(oracle, prompt, 6, found)
    with pytest.raises(ConfigError, match="the model knows 256 positions"):
        LLM(EngineConfig(**settings, max_model_len=257))


def test_weights_of_a_model_with_long_factors_are_replaced(tmp_path: Path) -> None:
    make_checkpoint("phi3-longrope", tmp_path)
    for how in ({}, {"force_transformers": True}):
        model = load(tmp_path, max_model_len=200, **how)
        prepare_update(model, tmp_path, lambda: None).install()
