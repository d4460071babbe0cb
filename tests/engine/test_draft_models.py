"""Draft models change no bit of an output, and a good one saves steps."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from aioinfer.config import EngineConfig
from aioinfer.errors import ConfigError
from aioinfer.llm import LLM
from aioinfer.params import SamplingParams
from tests.engine.test_speculation import alike
from tests.model.harness import require
from tests.tiers import SECONDS, rest

BUNDLED = EngineConfig().model_path


@rest(SECONDS)
@pytest.mark.parametrize("temperature", [0.0, 1.0, 2.5])
def test_a_model_that_drafts_for_itself_catches_up_with_a_prompt_and_is_always_right(
    temperature: float,
) -> None:
    """It computes a chunk of the prompt per step, drafts when it has all, and has the target's noise."""
    require("native")
    prompt = [3 + at % 400 for at in range(200)]
    params = SamplingParams(temperature=temperature, seed=5, max_tokens=40, ignore_eos=True, top_p=0.95)
    settings: dict[str, Any] = {"threads": 1, "deterministic": True, "chunk_size": 16, "overlap_steps": 0}
    with LLM(EngineConfig(speculation="off", **settings)) as plain:
        (wanted,) = plain.generate([prompt], params)
    config = EngineConfig(speculation="tiny-chat", adaptive_drafts=False, max_draft_tokens=5, **settings)
    with LLM(config) as llm:
        (found,) = llm.generate([prompt], params)
        stats = llm.stats()
    alike(found, wanted)
    assert stats.rejected_tokens == 0
    assert 13 + 12 < stats.steps < 13 + 12 + 10


def test_requests_with_grammars_are_not_drafted_by_a_model() -> None:
    schema = {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 3}
    with LLM(EngineConfig(threads=1, speculation="tiny-chat", adaptive_drafts=False)) as llm:
        (result,) = llm.generate(["A list:"], SamplingParams(max_tokens=100, grammar=schema))
    assert isinstance(json.loads(result.text), list)


@rest(SECONDS)
def test_a_diffusion_model_drafts_the_rest_of_a_block() -> None:
    """Both demo models answer such questions alike."""
    require("native")
    params = SamplingParams(temperature=0, max_tokens=60)
    questions = [[{"role": "user", "content": "What is 17 + 25?"}], [{"role": "user", "content": "Hello!"}]]
    with LLM(EngineConfig(threads=1, deterministic=True, speculation="off")) as plain:
        wanted = plain.generate(questions, params)
        steps = plain.stats().steps
    config = EngineConfig(threads=1, deterministic=True, speculation="tiny-diffusion", adaptive_drafts=False)
    with LLM(config) as llm:
        found = llm.generate(questions, params)
        stats = llm.stats()
    for one, other in zip(found, wanted, strict=True):
        alike(one, other)
    assert stats.steps < steps / 3
    assert stats.accepted_tokens > 20


# -- what cannot draft ---------------------------------------------------------------------------------


def started(model: str | Path, draft: str | Path) -> None:
    with LLM(EngineConfig(model=str(model), speculation=str(draft), threads=1, dtype="float32")):
        pass


def test_a_draft_model_with_other_tokens_is_refused_before_weights_are_read(tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(BUNDLED, other)
    (other / "model.safetensors").unlink()
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    first, second = list(vocab)[40:42]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match=r"speculation: other has another tokenizer .*\(model\)"):
        started("tiny-chat", other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "vocab_size": 600}))
    with pytest.raises(ConfigError, match="speculation: other has 600 tokens"):
        started("tiny-chat", other)


def test_models_of_other_kinds_are_refused() -> None:
    with pytest.raises(ConfigError, match="speculation: "):
        started("tiny-diffusion", "tiny-chat")


@pytest.mark.parametrize("name", ["no-such-model", "", " ", "a\0b"])
def test_a_draft_model_that_is_not_there_is_an_error_of_its_setting(name: str) -> None:
    with pytest.raises(ConfigError, match="speculation"):
        started("tiny-chat", name)


@rest(SECONDS)
def test_a_draft_model_with_a_shorter_context_drafts_up_to_its_end(tmp_path: Path) -> None:
    require("native")
    short = tmp_path / "short"
    shutil.copytree(BUNDLED, short)
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 32}))
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    found = []
    for speculation in ("off", str(short)):
        settings: dict[str, Any] = {"deterministic": True, "adaptive_drafts": False, "threads": 1}
        with LLM(EngineConfig(speculation=speculation, **settings)) as llm:
            found.append([each.token_ids for each in llm.generate([[5] * 3, [5] * 30, [5] * 60], params)])
            assert bool(llm.stats().accepted_tokens) is (speculation != "off")
    assert found[0] == found[1]
