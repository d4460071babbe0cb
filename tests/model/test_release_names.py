"""Names of architectures as releases have them, and configs without any: the model type says the class."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from aioinfer.errors import ConfigError
from aioinfer.model.transformers_model import TransformersLM
from tests.model.checkpoints import assert_greedy, make_checkpoint
from tests.model.harness import load

SMALL = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": None,
}
#: name in releases, the config's class, its settings, the class of transformers, and whether our code runs
RELEASES = [
    (
        "PhiMoEForCausalLM",
        "Phimoe",
        {"num_local_experts": 2, "num_experts_per_tok": 1},
        "PhimoeForCausalLM",
        False,
    ),
    ("Ernie4_5_ForCausalLM", "Ernie4_5", {"head_dim": 12}, "Ernie4_5ForCausalLM", True),
    ("ExaoneForCausalLM", "Exaone", {}, "LlamaForCausalLM", False),
    (
        "InternLM3ForCausalLM",
        "InternLM3",
        {"head_dim": 12, "qkv_bias": True, "bias": True},
        "LlamaForCausalLM",
        True,
    ),
    ("IQuestCoderForCausalLM", "IQuestCoder", {"head_dim": 16}, "LlamaForCausalLM", True),
    ("LLaMAForCausalLM", "Llama", {}, "LlamaForCausalLM", True),
    ("QWen2ForCausalLM", "Qwen2", {}, "Qwen2ForCausalLM", True),
    (None, "Llama", {}, "LlamaForCausalLM", True),
    (None, "Persimmon", {}, "PersimmonForCausalLM", False),
]


def state(path: Path, **fields: Any) -> None:
    file = path / "config.json"
    stated = {**json.loads(file.read_text()), **fields}
    file.write_text(json.dumps({name: value for name, value in stated.items() if value is not None}))


@pytest.mark.parametrize(("name", "kind", "more", "architecture", "own"), RELEASES)
def test_a_name_of_a_release_is_the_class_of_its_model_type(
    tmp_path: Path, name: str | None, kind: str, more: dict[str, Any], architecture: str, own: bool
) -> None:
    config = getattr(transformers, f"{kind}Config")(**{**SMALL, **more})
    oracle = transformers.AutoModelForCausalLM.from_config(config).eval()
    assert type(oracle).__name__ == architecture
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in oracle.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    oracle.save_pretrained(tmp_path)
    state(tmp_path, architectures=name and [name])
    model = load(tmp_path)
    assert model.spec.architecture == architecture
    assert isinstance(model, TransformersLM) != own
    if kind == "Exaone":
        # transformers writes the names of the releases.
        assert "transformer.wte.weight" in (tmp_path / "model.safetensors").read_bytes()[:4000].decode(
            "latin1"
        )
    assert_greedy(tmp_path, [[3, 1, 4, 1, 5], [9, 2]], 6, oracle)


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ({"architectures": None, "model_type": "clip"}, r"'clip': add architectures to config\.json"),
        ({"architectures": [3]}, "must be names"),
        ({"architectures": "Qwen3ForCausalLM"}, "must be names"),
        # One that states a model type and computes something else.
        ({"architectures": ["Qwen3CustomModel"]}, "Qwen3CustomModel is no causal language model"),
        (
            {"architectures": ["Qwen3WithStateForCausalLM"]},
            "if it is computed as Qwen3ForCausalLM, architectures",
        ),
    ],
)
def test_other_names_are_refused(tmp_path: Path, stated: dict[str, Any], message: str) -> None:
    make_checkpoint("qwen3", tmp_path)
    state(tmp_path, **stated)
    with pytest.raises(ConfigError, match=message):
        load(tmp_path)
