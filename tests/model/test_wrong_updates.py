"""Updates whose numbers are wrong: each is refused while it is read, before anything is changed."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from aioinfer.errors import ConfigError
from aioinfer.model.updates.recipe import prepare_update
from tests.checkpoint.gguf_models import write_gguf
from tests.checkpoint.test_mxfp4 import CONFIG as MXFP4
from tests.checkpoint.test_mxfp4 import encode
from tests.model.harness import require
from tests.model.test_weight_updates import FILE, go_on, last, load, logits, quantise, update, write
from tests.tiers import SECONDS, rest

NAN, INF = math.nan, math.inf
#: a layer that comes late
_MODULE = "model.layers.2.self_attn.o_proj"
_NORM = "model.layers.2.input_layernorm.weight"


def changed(path: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    tensors = load_file(path / FILE)
    tensors[name] = change(tensors[name]).contiguous()
    save_file(tensors, path / FILE, {"format": "pt"})


def refused(model: Any, given: Any, message: str, kernels: str) -> None:
    """It is refused, and nothing has changed."""
    before = logits(model, kernels)
    with pytest.raises(ConfigError, match=f"^weights: .*{message}"):
        prepare_update(model, given, go_on)
    assert torch.equal(logits(model, kernels), before)


_FACTORS = r"o_proj\.\w+ has numbers that are not finite"
#: format, what is changed in it, how, and what is said
DAMAGED: list[tuple[str, str, Callable[[torch.Tensor], torch.Tensor], str]] = [
    ("fp8-blocks", f"{_MODULE}.weight_scale_inv", lambda t: t[:, :-1], "weight_scale_inv is shaped"),
    ("fp8-blocks", f"{_MODULE}.weight", lambda t: t.float(), f"{_MODULE}.weight is of torch.float32"),
    ("fp8-blocks", f"{_MODULE}.weight_scale_inv", last(NAN), f"{_MODULE}.weight has infinity or NaN"),
    ("fp8-blocks", _NORM, last(NAN), f"{_NORM} has infinity or NaN"),
    ("gptq", f"{_MODULE}.qweight", lambda t: t.float(), f"{_MODULE}.qweight is of torch.float32"),
    ("gptq", f"{_MODULE}.scales", last(INF), _FACTORS),
    ("gptq-symmetric", f"{_MODULE}.qzeros", lambda t: t * 3, "is said to be symmetric, and its zeros"),
    ("awq", f"{_MODULE}.scales", last(NAN), _FACTORS),
    ("int8", f"{_MODULE}.weight_scale", last(NAN), _FACTORS),
    ("packed-8", _NORM, lambda t: t * NAN, f"{_NORM} has infinity or NaN"),
]


@pytest.mark.parametrize("kernels", ["sdpa", "native"])
@pytest.mark.parametrize("name", sorted({name for name, *_ in DAMAGED}))
def test_a_damaged_quantised_checkpoint_is_refused_and_changes_nothing(
    tmp_path: Path, name: str, kernels: str
) -> None:
    require(kernels)
    one, two = (quantise(write("qwen3-blocks", tmp_path / f"{seed}", seed), name) for seed in (1, 2))
    model, right = load(one, kernels), (two / FILE).read_bytes()
    for each, part, change, message in DAMAGED:
        if each == name:
            (two / FILE).write_bytes(right)
            changed(two, part, change)
            refused(model, two, message, kernels)
    (two / FILE).write_bytes(right)
    update(model, two)
    assert torch.equal(logits(model, kernels), logits(load(two, kernels), kernels))


@rest(SECONDS)
@pytest.mark.parametrize("kernels", ["sdpa", "native"])
def test_damaged_experts_of_four_bits_are_refused(tmp_path: Path, kernels: str) -> None:
    require(kernels)
    path = write("gpt-oss", tmp_path / "experts", 1)
    tensors: dict[str, torch.Tensor] = {}
    for key, tensor in load_file(path / FILE).items():
        if key.endswith(("gate_up_proj", "down_proj")):
            tensors |= {f"{key}{part}": value for part, value in encode(tensor.mT)[0].items()}
        else:
            tensors[key] = tensor
    save_file(tensors, path / FILE, {"format": "pt"})
    stated = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**stated, "quantization_config": MXFP4}))
    model = load(path, kernels)
    changed(path, "model.layers.1.mlp.experts.down_proj_scales", last(255))
    refused(model, path, "down_proj_scales has scales beyond those of bfloat16", kernels)


@pytest.mark.parametrize("kernels", ["sdpa", "native"])
@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_a_gguf_file_with_nan_is_refused(tmp_path: Path, kind: str, kernels: str) -> None:
    require(kernels)
    write("qwen3-blocks", tmp_path / "m", 1)
    write_gguf(tmp_path / "m", tmp_path / "one.gguf", kind)
    model = load(tmp_path / "one.gguf", kernels)
    name = "model.layers.1.post_attention_layernorm.weight"
    changed(tmp_path / "m", name, last(NAN))
    write_gguf(tmp_path / "m", tmp_path / "two.gguf", kind)
    refused(model, tmp_path / "two.gguf", f"{name} has infinity or NaN", kernels)


@rest(SECONDS)
@pytest.mark.parametrize("kind", ["qwen3", "gpt2-wide"])
def test_numbers_that_the_type_of_the_engine_does_not_have_are_refused(tmp_path: Path, kind: str) -> None:
    path = write(kind, tmp_path / kind, 1)
    model = load(path, "sdpa", dtype="float16")
    right = load_file(path / FILE)
    for name, tensor in right.items():
        # The least number that is infinity when it is rounded to float16.
        given = {**right, name: last(65520.0)(tensor)}
        refused(model, [*given.items()], f"{name} has numbers beyond those of torch.float16", "sdpa")
    whole = {name: tensor.bfloat16() for name, tensor in right.items()}
    name = next(name for name in whole if name.endswith(("norm.weight", "ln_f.weight")))
    whole[name] = last(-1e5)(whole[name])
    refused(model, [*whole.items()], f"{name} has numbers beyond those of torch.float16", "sdpa")
    whole[name] = last(-65280.0)(whole[name])
    prepare_update(model, [*whole.items()], go_on)


def test_a_set_that_replaces_nothing_is_refused(tmp_path: Path) -> None:
    """A head alone where that is the embedding, and what no model reads."""
    model = load(write("llama-gqa-tied", tmp_path / "tied", 1), "sdpa")
    head = load_file(tmp_path / "tied" / FILE)["model.embed_tokens.weight"]
    refused(
        model,
        [("lm_head.weight", head + 1)],
        "lm_head.weight is model.embed_tokens.weight here, which is missing",
        "sdpa",
    )
    model = load(write("qwen3.5", tmp_path / "unread", 1), "sdpa")
    refused(model, [("mtp.norm.weight", torch.ones(3))], "no tensor is one that the model has", "sdpa")
