"""Models of text and images: their text part gives what the whole model gives for text."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from aioinfer.checkpoint.tensors import SafetensorsTensors
from aioinfer.cli.doctor import examine
from aioinfer.config import EngineConfig
from aioinfer.errors import ConfigError
from aioinfer.execution.torch_device import TorchDevice
from aioinfer.model.inspection import LoadOptions, inspect_model
from aioinfer.model.transformers_model import TransformersLM
from tests.checkpoint.test_formats import FORMATS, fp8_blocks
from tests.model import harness
from tests.model.checkpoints import VOCAB, assert_greedy
from tests.model.harness import require
from tests.model.multimodal_models import (
    IMAGE,
    MODELS,
    NAMINGS,
    STATEFUL,
    TEXT,
    edit_config,
    edit_tensors,
    is_vision,
    make_wrapper,
    renamed,
)
from tests.tiers import grid

CPU = torch.device("cpu")
TOKENS = 14
MISTRAL = "Mistral3ForConditionalGeneration"
_RNG = random.Random(11)
#: one with tokens that stand for images, which are tokens like others in a text
PROMPTS = [
    [_RNG.randrange(VOCAB) for _ in range(33)],
    [5, IMAGE, IMAGE, 7, 201, 3],
]


def check(path: Path, *oracles: Any, kernels: Any = "sdpa", **options: Any) -> None:
    """The text part continues texts as a whole model does."""
    assert_greedy(path, PROMPTS, TOKENS, *oracles, chunk=7, kernels=kernels, **options)


def load(path: Path, **options: Any) -> Any:
    return harness.load(path, **{"kernels": "sdpa", **options})


@pytest.mark.parametrize("name", [*MODELS, *STATEFUL])
def test_the_text_part_continues_a_text_as_the_whole_model_does(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors of other parts, and layers that predict further tokens, are not read."""
    oracle = make_wrapper(name, tmp_path)
    if name.startswith("qwen3.5"):
        edit_tensors(tmp_path, lambda tensors: {**tensors, "mtp.fc.weight": torch.ones(3, 3)})
    stored, asked = SafetensorsTensors(tmp_path).names, set()
    others = {each for each in stored if is_vision(each) or each.startswith("mtp.")}
    for method in ("read", "shape"):
        original = getattr(SafetensorsTensors, method)

        def watched(self: Any, name: str, original: Any = original) -> Any:
            asked.add(name)
            return original(self, name)

        monkeypatch.setattr(SafetensorsTensors, method, watched)
    model = load(tmp_path, images=False)
    assert asked == set(stored) - others
    assert len(others) > 10
    assert f"; {len(others)} tensors of other parts are not read" in model.spec.part
    assert not isinstance(model, TransformersLM)
    head = 0 if oracle.config.tie_word_embeddings else oracle.lm_head.weight.numel()
    inner = getattr(oracle.model, "language_model", None) or oracle.model.text_model
    text = sum(parameter.numel() for parameter in inner.parameters())
    text += sum("layer_scalar" in buffer for buffer, _ in inner.named_buffers())
    assert model.spec.num_parameters == text + head
    assert model.spec.max_model_len == TEXT["max_position_embeddings"]
    assert model.spec.architecture.endswith("ForCausalLM")
    monkeypatch.undo()
    for kernels in ("sdpa", "native"):
        require(kernels)
        check(tmp_path, oracle, kernels=kernels)


@pytest.mark.parametrize("name", grid(["qwen3-vl", "mistral3"], sorted({*MODELS} - {"qwen3-vl", "mistral3"})))
def test_the_text_part_runs_by_transformers_code_too(tmp_path: Path, name: str) -> None:
    oracle = make_wrapper(name, tmp_path)
    check(tmp_path, oracle, force_transformers=True)


@pytest.mark.parametrize("naming", NAMINGS)
@pytest.mark.parametrize("name", ["qwen3-vl", "qwen2.5-vl", "mistral3"])
def test_every_naming_of_the_tensors_is_known(tmp_path: Path, name: str, naming: str) -> None:
    oracle = make_wrapper(name, tmp_path)
    edit_tensors(tmp_path, lambda tensors: renamed(tensors, naming))
    names = set(SafetensorsTensors(tmp_path).names)
    assert f"{NAMINGS[naming][0]}layers.1.mlp.up_proj.weight" in names
    assert any(each.startswith(f"{NAMINGS[naming][2]}vis") for each in names)
    check(tmp_path, oracle)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("kernels", ["sdpa", "native"])
def test_stacked_experts_are_known_either_way_round(tmp_path: Path, transposed: bool, kernels: str) -> None:
    """The releases have inputs before outputs; transformers saves them as it computes with them."""
    require(kernels)
    oracle = make_wrapper("qwen3-vl-moe", tmp_path)
    oracles = [oracle]

    def turned(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {
            name: tensor.transpose(1, 2) if ".mlp.experts." in name else tensor
            for name, tensor in tensors.items()
        }

    if transposed:
        edit_tensors(tmp_path, turned)
        # As transformers itself reads them.
        oracles.append(type(oracle).from_pretrained(tmp_path, dtype=torch.float32).eval())
    check(tmp_path, *oracles, kernels=kernels)


Encoded = tuple[dict[str, torch.Tensor], torch.Tensor]


def quantise(
    path: Path, oracle: Any, chosen: Callable[[str], bool], encode: Callable[[torch.Tensor], Encoded]
) -> None:
    """Quantise tensors of the text in a checkpoint, and of the oracle, which then has the same. ``encode``:
    to what is stored, by the ends of names, and to the numbers that it stands for."""

    def change(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        found = {name: tensor for name, tensor in tensors.items() if not chosen(name)}
        for name in tensors.keys() - found.keys():
            parts, made = encode(tensors[name])
            found |= {f"{name.removesuffix('.weight')}{end}": value for end, value in parts.items()}
            with torch.no_grad():
                text = oracle.model.language_model
                text.get_parameter("layers." + name.split("layers.")[1]).copy_(made)
        return found

    edit_tensors(path, change)


@pytest.mark.parametrize("transposed", [False, True])
def test_stacked_experts_of_8_bits_are_known_either_way_round(tmp_path: Path, transposed: bool) -> None:
    """With scales of blocks, which are turned as their experts are."""
    oracle = make_wrapper("qwen3-vl-moe", tmp_path)

    def small(tensor: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        parts = [fp8_blocks(matrix, 32) for matrix in tensor]
        values = torch.stack([each.parts["weight"].view(torch.uint8) for each in parts])
        scales = torch.stack([each.parts["weight_scale_inv"] for each in parts])
        values, scales = ((each.mT if transposed else each).contiguous() for each in (values, scales))
        stored = {"": values.view(torch.float8_e4m3fn), "_scale_inv": scales}
        return stored, torch.stack([each.weight for each in parts])

    quantise(tmp_path, oracle, lambda name: ".mlp.experts." in name, small)
    config = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    edit_config(tmp_path, lambda stated: stated.update(quantization_config=config))
    check(tmp_path, oracle)
    assert inspect_model(tmp_path, LoadOptions(dtype="auto", device=CPU)).expert_float8


# -- the head -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [{}, {"tie_word_embeddings": True}])
@pytest.mark.parametrize("fallback", [False, True])
def test_a_head_of_its_own_counts_even_if_the_config_says_otherwise(
    tmp_path: Path, fields: dict[str, Any], fallback: bool
) -> None:
    """As of Mistral3, whose config ties the head unless it says otherwise, and old ones say nothing."""
    oracle = make_wrapper("mistral3", tmp_path)

    def untold(stated: dict[str, Any]) -> None:
        for part in (stated, stated["text_config"]):
            part.pop("tie_word_embeddings", None)
        stated.update(fields)

    edit_config(tmp_path, untold)
    again = type(oracle).from_pretrained(tmp_path, dtype=torch.float32).eval()
    check(tmp_path, again, oracle, force_transformers=fallback)


def test_a_head_that_is_the_embedding_is_not_loaded_twice(tmp_path: Path) -> None:
    make_wrapper("qwen3-vl", tmp_path)
    before = load(tmp_path).spec.num_parameters
    embedding = "model.language_model.embed_tokens.weight"
    edit_tensors(tmp_path, lambda tensors: {**tensors, "lm_head.weight": tensors[embedding].clone()})
    assert load(tmp_path).spec.num_parameters == before


# -- the config ---------------------------------------------------------------------------------------


def flat(stated: dict[str, Any]) -> None:
    """As Qwen2-VL's and Qwen2.5-VL's releases state it."""
    text = stated.pop("text_config")
    rope = text.pop("rope_parameters")
    text |= {
        "rope_theta": rope["rope_theta"],
        "rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]},
        "eos_token_id": 5,
    }
    stated.update({name: value for name, value in text.items() if name != "model_type"})
    stated["torch_dtype"] = "bfloat16"
    stated.pop("dtype")


@pytest.mark.parametrize("name", ["qwen2-vl", "qwen2.5-vl"])
def test_a_flat_config_is_known(tmp_path: Path, name: str) -> None:
    oracle = make_wrapper(name, tmp_path)
    edit_config(tmp_path, flat)
    model = load(tmp_path)
    assert model.spec.eos_token_ids == {5}
    assert inspect_model(tmp_path, LoadOptions(dtype="auto", device=CPU)).dtype == torch.bfloat16
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": []}')
    check(tmp_path, oracle)


@pytest.mark.parametrize(
    ("outer", "inner", "expected"), [(None, 3, {3}), (4, 3, {4}), ([4, 6], None, {4, 6}), (None, None, set())]
)
def test_end_tokens_are_the_outer_ones_first(
    tmp_path: Path, outer: Any, inner: int | None, expected: set[int]
) -> None:
    make_wrapper("mistral3", tmp_path)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)

    def end(stated: dict[str, Any]) -> None:
        stated["text_config"]["eos_token_id"] = inner
        if outer is not None:
            stated["eos_token_id"] = outer

    edit_config(tmp_path, end)
    assert load(tmp_path).spec.eos_token_ids == expected
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 9}')
    assert load(tmp_path).spec.eos_token_ids == {9}


def test_random_weights_need_the_config_alone(tmp_path: Path) -> None:
    make_wrapper("qwen3-vl", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    for fallback in (False, True):
        model = load(tmp_path, load_format="random", force_transformers=fallback)
        part = "text part" if fallback else "text and images"
        assert model.spec.part == f"{part} of Qwen3VLForConditionalGeneration"


# -- what is wrong is said ----------------------------------------------------------------------------


def state(**changes: Any) -> Callable[[Path], object]:
    return lambda path: edit_config(path, lambda stated: stated.update(changes))


def put(name: str) -> Callable[[Path], object]:
    return lambda path: edit_tensors(path, lambda tensors: {**tensors, name: torch.ones(64)})


def without(ending: str) -> Callable[[Path], object]:
    return lambda path: edit_tensors(
        path, lambda tensors: {name: each for name, each in tensors.items() if not name.endswith(ending)}
    )


@pytest.mark.parametrize("fallback", [False, True])
@pytest.mark.parametrize(
    ("name", "edit", "message"),
    [
        ("qwen3-vl", without("layers.1.mlp.up_proj.weight"), r"(lacks|no tensor).*layers\.1\.mlp\.up_proj"),
        ("qwen3-vl", put("audio_tower.a.weight"), r"1 unexpected tensors, first .*a\.weight"),
        ("qwen3-vl", put("language_model.model.norm.weight"), r"is in the checkpoint as .*norm\.weight, too"),
        ("qwen3-vl", state(tie_word_embeddings=False), r"lm_head\.weight"),
        (
            "mistral3",
            state(architectures=["LlavaForConditionalGeneration"], model_type="llava", vision_config={}),
            "no causal language model.*the text part of .*Gemma3.*can be load",
        ),
        (
            "mistral3",
            lambda path: edit_config(path, lambda stated: stated["text_config"].update(model_type="bert")),
            "bert",
        ),
        (
            "mistral3",
            lambda path: (path / "config.json").write_text(
                json.dumps(
                    {**TEXT, "model_type": "mistral", "architectures": ["Mistral3ForConditionalGeneration"]}
                )
            ),
            "has no text_config",
        ),
    ],
)
def test_what_does_not_fit_is_refused(
    tmp_path: Path, name: str, edit: Callable[[Path], object], message: str, fallback: bool
) -> None:
    make_wrapper(name, tmp_path)
    edit(tmp_path)
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, force_transformers=fallback)


# -- quantised checkpoints ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "form", "where"),
    [
        ("qwen3-vl", "packed-4", "outer"),
        ("qwen3-vl", "gptq", "text"),
        ("mistral3", "fp8-channels", "outer"),
    ],
)
def test_a_quantised_text_part_is_the_dequantised_one(
    tmp_path: Path, name: str, form: str, where: str
) -> None:
    oracle = make_wrapper(name, tmp_path)
    config, encode, bits = FORMATS[form]
    config = {**config, "ignore": ["re:.*visual.*", "re:.*vision_tower.*", "lm_head"]}
    config["modules_to_not_convert"] = ["model.visual", "vision_tower", "multi_modal_projector", "lm_head"]

    def state(stated: dict[str, Any]) -> None:
        (stated if where == "outer" else stated["text_config"])["quantization_config"] = config

    def parts(tensor: torch.Tensor) -> Encoded:
        stored, made = encode(tensor)
        return {f".{part}": value for part, value in stored.items()}, made

    quantise(tmp_path, oracle, lambda name: "_proj." in name and not is_vision(name), parts)
    edit_config(tmp_path, state)
    check(tmp_path, oracle)
    check(tmp_path, oracle, force_transformers=True)
    stored = inspect_model(tmp_path, LoadOptions(dtype="auto", device=CPU)).stored_bits
    assert stored == ([bits] if bits else [])


# -- what is said of it -------------------------------------------------------------------------------


def test_the_log_and_the_doctor_say_that_a_part_is_loaded(tmp_path: Path) -> None:
    make_wrapper("qwen2-vl", tmp_path)
    of = "text part of Qwen2VLForConditionalGeneration"
    part = f"Qwen2ForCausalLM ({of}; 19 tensors of other parts are not read)"
    config = EngineConfig(model=str(tmp_path), device="cpu", num_pages=8, threads=1)
    found = {finding.subject: finding.text for finding in examine(config)}
    assert part in found["model"]
    device = TorchDevice(config)
    try:
        assert part in device.open().decisions
    finally:
        device.close()
