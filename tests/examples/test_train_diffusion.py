"""The script that trains the bundled diffusion model, and what it has made."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

import examples.training.train_diffusion as script
from aioinfer.checkpoint.locate import bundled_models
from aioinfer.config import EngineConfig
from examples.training.common import MASK
from examples.training.diffusion_model import DiffusionConfig, DiffusionModel, load, upcycle
from examples.training.tasks import conversation, held_out
from tests.tiers import SECONDS, grid, rest

BUNDLED = EngineConfig(model="tiny-diffusion").model_path
SIZES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 16, "intermediate_size": 64, "vocab_size": 864,
}  # fmt: skip


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A random Qwen3 in a directory, whose queries hold nothing in the pairs that lose their rotation."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(**SIZES, tie_word_embeddings=True, pad_token_id=0, eos_token_id=1, bos_token_id=None)
    model = Qwen3ForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.2)
        if "q_norm" in name:
            parameter.data[1::2] = 0
    directory = tmp_path_factory.mktemp("chat")
    model.save_pretrained(directory)
    (directory / "tokenizer.json").write_bytes((BUNDLED / "tokenizer.json").read_bytes())
    return directory, model


def scrambled(model: DiffusionModel) -> DiffusionModel:
    """All weights random, biases of the routers and routed experts included."""
    generator = torch.Generator().manual_seed(1)
    for name, tensor in model.state_dict().items():
        values = torch.randn(tensor.shape, generator=generator) * 0.3
        tensor.copy_(1 + values if "norm" in name else values)
    return model


def toy(**changes: Any) -> DiffusionModel:
    return scrambled(DiffusionModel(replace(DiffusionConfig(**SIZES, num_shared_experts=2), **changes)))


def block_mask(length: int, size: int) -> Tensor:
    block = torch.arange(length) // size
    return (block[:, None] >= block)[None, None]


# -- the model -----------------------------------------------------------------------------------------


def test_an_upcycled_model_starts_as_the_chat_model_but_for_the_pairs_that_stand_still(
    chat: tuple[Path, Any],
) -> None:
    directory, original = chat
    model = upcycle(directory, block_size=8)
    ids = torch.randint(6, 864, (2, 20), generator=torch.Generator().manual_seed(2))
    causal = torch.ones(20, 20, dtype=torch.bool).tril()[None, None]
    with torch.inference_mode():
        hidden, _ = model(ids, torch.arange(20).expand(2, -1), causal)
        torch.testing.assert_close(model.logits(hidden), original(ids).logits, rtol=1e-3, atol=1e-3)


# -- training data -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))


def test_a_noised_block_computes_what_the_decoder_computes(tokenizer: Tokenizer) -> None:
    """In a row full of conversations, as if it came alone after clean tokens."""
    model, size, rng = toy(), 8, random.Random(1)
    samples = [script.make_sample(tokenizer, conversation(rng), rng, size) for _ in range(3)]
    while sum(map(len, samples)) > script.ROW:
        samples.remove(max(samples, key=len))
    batch = script.make_batch([samples], size)
    with torch.inference_mode():
        together, _ = model(batch["ids"], batch["positions"], batch["mask"])
        start = checked = 0
        for sample in samples:
            clean = [token for token, keep in zip(sample.ids, sample.clean, strict=True) if keep]
            for at in range(0, len(sample), size):
                ids = clean[: sample.blocks[at] * size] + sample.ids[at : at + size]
                row = torch.tensor([ids])
                alone, _ = model(row, torch.arange(len(ids))[None], block_mask(len(ids), size))
                found = together[:, start + at : start + at + size]
                torch.testing.assert_close(found, alone[:, -size:], rtol=1e-3, atol=1e-3)
                checked += 1
            start += len(sample)
    assert checked >= 8


@rest(SECONDS)
def test_training_runs_and_makes_a_directory(chat: tuple[Path, Any], tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = f"--start {chat[0]} --out {out} --steps 3 --block 8 --processes 1 --rows 2 --no-compile"
    options += " --threads 1 --count 2 --tasks copy"
    script.main(options.split())
    config = json.loads((out / "config.json").read_text())
    assert (config["block_size"], config["hidden_size"], config["num_shared_experts"]) == (8, 32, 2)
    names = set(load_file(out / "model.safetensors"))
    assert {name.replace("layers.1", "layers.5") for name in names if "layers.1" in name} < set(
        load_file(BUNDLED / "model.safetensors")
    )
    before, after = upcycle(chat[0], 8).state_dict(), load(out).state_dict()
    moved = [name for name in before if not torch.allclose(before[name], after[name], rtol=2e-2, atol=1e-6)]
    assert any("query_key_value" in name for name in moved)
    assert any("expert_bias" in name for name in moved)


# -- the bundled model ---------------------------------------------------------------------------------


def test_the_name_finds_the_bundled_directory() -> None:
    assert {"tiny-chat", "tiny-diffusion"} <= set(bundled_models())
    files = {path.name for path in BUNDLED.iterdir()}
    assert files == {path.name for path in EngineConfig(model="tiny-chat").model_path.iterdir()}
    assert sum(path.stat().st_size for path in BUNDLED.iterdir()) <= 8_000_000


def test_its_tokenizer_is_the_chat_models() -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (BUNDLED / name).read_bytes() == (EngineConfig().model_path / name).read_bytes()
    tokenizer = Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))
    text = 'JSON: Wade, who is 16, has a "pet". 17 + 25 = 42\n'
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.token_to_id("<|mask|>") == MASK


@rest(SECONDS)
@pytest.mark.parametrize("dtype", grid([torch.bfloat16], [torch.float32]))
def test_it_answers_held_out_questions(dtype: torch.dtype) -> None:
    from transformers import PreTrainedTokenizerFast

    model = load(BUNDLED, dtype)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(BUNDLED)
    items = [item for task in ("add", "copy", "json") for item in held_out(task, 4, seed=5)]
    replies = script.ask(model, tokenizer, items, 0.95)
    assert sum(item.check(text) for item, (text, _) in zip(items, replies, strict=True)) >= 11
    assert all(answer.ended for _, answer in replies)
    replies = script.ask(model, tokenizer, held_out("letters", 8, seed=5), 0.95)
    steps = [count for _, answer in replies for count in answer.steps]
    assert min(steps) < 8 < max(steps) <= model.config.block_size
    assert all(set(text) <= set("abcdefghijklmnopqrstuvwxyz") for text, _ in replies)
