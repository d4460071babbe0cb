"""GGUF files: their tensors, configs and tokenizers are those of what they were made of."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from aioinfer.checkpoint.files import GGUFCheckpoint, open_checkpoint
from aioinfer.checkpoint.gguf.blocks import BLOCKS
from aioinfer.checkpoint.gguf.config import end_tokens
from aioinfer.checkpoint.gguf.file import GGUFFile
from aioinfer.checkpoint.gguf.tensors import GGUFTensors
from aioinfer.checkpoint.locate import locate
from aioinfer.checkpoint.tensors import Rounding
from aioinfer.config import EngineConfig
from aioinfer.errors import ConfigError
from aioinfer.llm import LLM
from aioinfer.model.inspection import LoadOptions
from aioinfer.model.loader import load_model
from aioinfer.model.native_linear import NativeLinear
from aioinfer.model.weights import StoredMatrix, Weights
from aioinfer.native.bindings import shared_thread_pool
from aioinfer.params import SamplingParams
from aioinfer.text.tokenizer import HFTokenizer
from tests.checkpoint.gguf_models import EVERY, MORE, make_family, write_file, write_gguf
from tests.model.checkpoints import greedy, make_checkpoint
from tests.model.harness import require
from tests.native.support import prompt_logits
from tests.tiers import FURTHER, SECONDS, grid, rest

#: families of tests/model/checkpoints.py that a GGUF file can hold as they are
FAMILIES = [
    "llama-gqa-tied", "llama-mha-untied", "llama-mqa", "llama-biases", "llama-rope-linear", "llama-rope-yarn",
    "llama-head-dim", "qwen2", "qwen3", "qwen3-wide-untied", "qwen3-moe", "gemma", "gemma-mqa", "gemma2",
    "gemma2-uncapped", "gemma3", "gemma3-window", "smollm3-interval", "olmo2", "olmo2-biases", "olmo3",
    "olmo3-yarn", "glm4", "glm4-whole-rotary", "phi3", "phi3-partial-rotary", "gpt2", "gpt2-inner",
]  # fmt: skip
GREEDY = SamplingParams(temperature=0, max_tokens=12)
#: of the blocks that hold a float of 16 bits, where in a block it lies
FACTORS = {
    "Q8_0": [0], "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q4_K": [0, 2], "Q5_K": [0, 2],
    "Q6_K": [208], "Q2_K": [80, 82], "Q3_K": [108], "IQ4_NL": [0], "IQ4_XS": [0], "IQ1_S": [0],
    "IQ2_XXS": [0], "IQ2_XS": [0], "IQ2_S": [0], "IQ3_XXS": [0], "IQ3_S": [0], "TQ1_0": [52], "TQ2_0": [64],
}  # fmt: skip


# -- tensors -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_tensors_and_config_are_those_of_the_directory(tmp_path: Path, family: str) -> None:
    model = make_family(family, tmp_path / "hf")
    tensors = write_gguf(tmp_path / "hf", tmp_path / "m.gguf")
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    found = checkpoint.tensors()
    experts = [name for name in tensors if ".experts." in name]
    assert set(found.names) >= tensors.keys() - set(experts)
    for name in tensors.keys() - set(experts):
        if name.endswith("norm.weight"):
            # Of Gemma, 1 was added to them and taken off again.
            torch.testing.assert_close(found.read(name), tensors[name], rtol=0, atol=1e-6)
        else:
            assert torch.equal(found.read(name), tensors[name]), name
        assert found.shape(name) == tuple(tensors[name].shape)
    stated, made = checkpoint.config(), model.config.to_dict()
    names = ["vocab_size", "tie_word_embeddings", "model_type", "dtype"]
    if family.startswith("gpt2"):
        names += ["n_embd", "n_head", "n_layer", "n_positions", "layer_norm_epsilon"]
    else:
        names += ["hidden_size", "num_key_value_heads", "rms_norm_eps"]
    for name in names:
        expected = pytest.approx(made[name]) if isinstance(made[name], float) else made[name]
        assert stated[name] == expected, name
    for name in ("layer_types", "sliding_window", "query_pre_attn_scalar"):
        assert stated.get(name) == made.get(name) or name not in stated, name
    for found_rope, made_rope in _ropes(stated["rope_parameters"], made.get("rope_parameters", {})):
        for name in found_rope.keys() & made_rope.keys():
            assert found_rope[name] == made_rope[name], name


def _ropes(found: dict[str, Any], made: dict[str, Any]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Rotations of both: one, or one of each type of layers."""
    if "full_attention" not in made:
        return [(found, made)]
    assert found.keys() == made.keys()
    return [(found[kind], made[kind]) for kind in made]


@pytest.mark.parametrize("family", grid(EVERY, MORE, FURTHER))
def test_greedy_ids_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    oracle = make_family(family, tmp_path / "hf")
    architecture = "mistral3" if family == "mistral3" else None
    write_gguf(tmp_path / "hf", tmp_path / "m.gguf", architecture=architecture)
    rng = random.Random(family)
    prompts = [[rng.randrange(200) for _ in range(length)] for length in (1, 7, 19)]
    with LLM(EngineConfig(model=str(tmp_path / "m.gguf"), num_pages=64, page_size=8, threads=1)) as llm:
        results = llm.generate(prompts, GREEDY)
    for prompt, result in zip(prompts, results, strict=True):
        assert result.token_ids == greedy(oracle, prompt, 12, result.token_ids)


def blocks(kind: str, rows: int, inner: int, seed: int) -> np.ndarray[Any, Any]:
    """Random bytes with factors that are numbers."""
    rng = np.random.default_rng(seed)
    elements, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    data = rng.integers(0, 256, (rows, inner // elements, size), dtype=np.uint8)
    if kind == "IQ1_M":
        # The float has its upper bits in the last byte.
        data[:, :, -1] &= 0xBF
    for at in FACTORS.get(kind, []):
        factor = rng.normal(size=(rows, inner // elements, 1)).astype("<f2")
        data[:, :, at : at + 2] = factor.view(np.uint8)
    return data.reshape(rows, -1)


@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks_are_taken_apart_without_loss(kind: str) -> None:
    """Against the package's own dequantisation, of any bytes."""
    data = blocks(kind, 5, 512, seed=3)
    rounding, unpack = BLOCKS[kind]
    values, scales, offsets = unpack(data)
    assert values.shape == (5, 512)
    assert scales.shape == (5, 512 // rounding.group)
    assert values.dtype == (np.int8 if rounding.bits == 8 else np.uint8)
    assert set(rounding.table) <= {*range(-127, 128)}
    numbers = np.array(rounding.table)[values] if rounding.table else values
    wide = numbers.astype(np.float32).reshape(5, -1, rounding.group)
    with np.errstate(over="ignore"):  # the largest exponents of MXFP4
        if offsets is None:
            wide = (wide - rounding.zero) * scales[..., None]
        else:
            wide = wide * scales[..., None] + offsets[..., None]
        expected = gguf.dequantize(data, gguf.GGMLQuantizationType[kind])
    np.testing.assert_array_equal(wide.reshape(5, 512), expected)


@pytest.mark.parametrize(
    ("kinds", "rounding"),
    [
        (["Q4_K", "Q4_0", "Q8_0"], Rounding(8, 32)),
        (["Q4_K", "Q4_K", "Q6_K"], Rounding(6, 16)),
        (["Q5_K", "Q5_0", "Q4_1"], Rounding(6, 32)),
        (["Q6_K", "Q8_0", "Q4_0"], Rounding(8, 16)),
        (["Q4_K", "Q2_K", "IQ4_XS"], Rounding(8, 16)),
        (["Q3_K", "Q3_K", "Q6_K"], Rounding(8, 16)),
    ],
)
def test_a_matrix_of_differing_types_keeps_all_of_them(
    tmp_path: Path, kinds: list[str], rounding: Rounding
) -> None:
    """Queries of 4 bits with offsets and values of 6 in one product, as Q4_K_M files have them."""
    stored = {
        f"blk.0.attn_{part}.weight": (blocks(kind, 8, 256, seed=seed), gguf.GGMLQuantizationType[kind])
        for seed, (part, kind) in enumerate(zip("qkv", kinds, strict=True))
    }
    write_file(tmp_path / "m.gguf", {}, "qwen2", stored)
    config = dict.fromkeys(("num_attention_heads", "num_key_value_heads", "num_hidden_layers"), 1)
    tensors = GGUFTensors(GGUFFile(tmp_path / "m.gguf"), config)
    weights = Weights(tensors, dtype=torch.float32, device=torch.device("cpu"))
    names = [f"model.layers.0.self_attn.{part}_proj" for part in "qkv"]
    matrix = StoredMatrix(weights, names, [8, 8, 8], 256)
    assert matrix.rounding == rounding
    found = matrix.quantised()
    wide = found.values.float().reshape(24, -1, rounding.group) * found.scales[..., None]
    wide = (wide + found.offsets[..., None]).reshape(24, 256)
    # The scale of a group has up to 19 bits, and the product with a number is rounded.
    torch.testing.assert_close(wide, matrix.load(), rtol=1e-5, atol=2e-3)
    require("native")
    linear = NativeLinear.given(shared_thread_pool(1), found, None, dtype=torch.float32)
    torch.testing.assert_close(linear.dequantised(), wide, rtol=0, atol=0)


def test_a_file_in_parts_is_one_model(tmp_path: Path) -> None:
    make_checkpoint("qwen2", tmp_path / "hf")
    write_gguf(tmp_path / "hf", tmp_path / "whole.gguf")
    whole = GGUFFile(tmp_path / "whole.gguf")
    first, second = tmp_path / "m-00001-of-00002.gguf", tmp_path / "m-00002-of-00002.gguf"
    first.write_bytes((tmp_path / "whole.gguf").read_bytes())
    write_file(second, {})
    with pytest.raises(ConfigError, match=r"both hold token_embd\.weight"):
        GGUFFile(first)
    second.unlink()
    with pytest.raises(ConfigError, match=r"m-00002-of-00002\.gguf is missing"):
        GGUFFile(first)
    write_file(second, {}, "qwen2", {"further": np.ones((1, 4), dtype=np.float32)})
    found = GGUFFile(first)
    assert found.tensors.keys() == whole.tensors.keys() | {"further"}
    assert found.files == [first, second]


def test_the_files_of_a_model_are_named_without_reading_them(tmp_path: Path) -> None:
    parts = [tmp_path / f"m-0000{part}-of-00002.gguf" for part in (1, 2)]
    for part in parts:
        part.write_bytes(b"")
    assert GGUFCheckpoint(parts[0]).files() == parts


def test_llama_3s_rotary_factors_are_recognised(tmp_path: Path) -> None:
    base, factor = 500_000.0, 8.0
    names = ("block_count", "context_length", "feed_forward_length", "attention.head_count")
    stated = {
        **{f"llama.{name}": 2 for name in names},
        "llama.rope.freq_base": base,
        "llama.embedding_length": 128,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
    }
    wavelengths = 2 * np.pi * base ** (np.arange(0, 64, 2) / 64)
    smooth = np.clip((8192 / wavelengths - 1) / 3, 0, 1)
    factors = (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)
    embedding = np.zeros((2, 128), dtype=np.float32)
    for wanted, changed in ((True, factors), (False, factors * 1.5)):
        tensors = {"token_embd.weight": embedding, "rope_freqs.weight": changed}
        write_file(tmp_path / "m.gguf", stated, tensors=tensors)
        checkpoint = GGUFCheckpoint(tmp_path / "m.gguf")
        if not wanted:
            with pytest.raises(ConfigError, match="not Llama 3's"):
                checkpoint.config()
            continue
        rope = checkpoint.config()["rope_parameters"]
        assert rope["rope_type"] == "llama3"
        assert rope["factor"] == pytest.approx(8.0)


def test_rotary_positions_are_scaled_as_the_file_says_or_refused(tmp_path: Path) -> None:
    make_checkpoint("llama-gqa-tied", tmp_path / "hf")
    file = tmp_path / "m.gguf"

    def rope(**more: Any) -> dict[str, Any]:
        stated = {f"llama.rope.{name.replace('__', '.')}": value for name, value in more.items()}
        write_gguf(tmp_path / "hf", file, more=stated)
        found: dict[str, Any] = open_checkpoint(file).config()["rope_parameters"]
        return found

    assert rope()["rope_type"] == "default"
    assert rope(scale_linear=4)["factor"] == 4
    assert rope(scaling__factor=2)["rope_type"] == "linear"
    assert rope(scaling__type="none", scaling__factor=2)["rope_type"] == "default"
    with pytest.raises(ConfigError, match="scaled by 'longrope'"):
        rope(scaling__type="longrope")


def test_turns_end_at_control_tokens_that_files_do_not_name(tmp_path: Path) -> None:
    file = tmp_path / "t.gguf"
    metadata = {
        "tokenizer.ggml.tokens": ["a", "</s>", "<|eot_id|>", "<|im_end|>"],
        "tokenizer.ggml.token_type": [1, 3, 3, 1],
        "tokenizer.ggml.eos_token_id": 1,
    }
    write_file(file, metadata)
    assert end_tokens(GGUFFile(file)) == [1, 2]


def test_a_directory_that_holds_one_model_is_that(tmp_path: Path) -> None:
    for name in ("m-00001-of-00002.gguf", "m-00002-of-00002.gguf", "mmproj-m.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    assert locate(str(tmp_path)) == tmp_path / "m-00001-of-00002.gguf"
    (tmp_path / "other.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match="holds several models"):
        locate(str(tmp_path))


# -- tokenizers ----------------------------------------------------------------------------------------


def test_sentence_pieces_merge_by_their_scores(tmp_path: Path) -> None:
    pieces = ["▁", "a", "b", "ab", "▁ab", "▁a"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    scores = [0.0] * 259 + [-9.0, -8.0, -8.0, -1.0, -2.0, -3.0]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * 6],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    write_file(tmp_path / "t.gguf", metadata)
    found = HFTokenizer.of(GGUFCheckpoint(tmp_path / "t.gguf"))
    assert found is not None
    at = {token: index for index, token in enumerate(tokens)}
    assert found.encode("ab a") == [1, at["▁ab"], at["▁a"]]
    assert found.encode("é") == [1, at["▁"], at["<0xC3>"], at["<0xA9>"]]
    assert found.decode(found.encode("ab aé b")) == "ab aé b"


def test_what_cannot_be_read_is_said(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    tokens, merges = ["<s>", "</s>", "a", "b", "ab"], ["a b"]
    for message, stated in (
        ("cuts text by the rule 'unheard-of'", {"model": "gpt2", "pre": "unheard-of", "merges": merges}),
        ("of the kind 't5'", {"model": "t5"}),
        ("name tokens that it does not have", {"model": "gpt2", "pre": "qwen2", "merges": ["a <s>"]}),
    ):
        write_file(
            file, {f"tokenizer.ggml.{name}": each for name, each in {"tokens": tokens, **stated}.items()}
        )
        with pytest.raises(ConfigError, match=message):
            GGUFCheckpoint(file).tokenizer()
    write_file(file, {})
    assert GGUFCheckpoint(file).tokenizer() is None
    with pytest.raises(ConfigError, match=r"does not state llama\.attention\.head_count"):
        GGUFCheckpoint(file).config()
    write_file(file, {}, "mamba")
    with pytest.raises(
        ConfigError, match=r"architecture 'mamba' are not supported: .*qwen2, qwen2moe, qwen3"
    ):
        GGUFCheckpoint(file).config()


def test_what_a_directory_offers_and_a_file_does_not(tmp_path: Path) -> None:
    make_checkpoint("qwen3-blocks", tmp_path / "hf")
    write_gguf(tmp_path / "hf", tmp_path / "m.gguf", "Q8_0")
    with pytest.raises(ConfigError, match="GGUF files cannot be loaded"):
        LLM(EngineConfig(model=str(tmp_path / "m.gguf"), num_pages=64, transformers_fallback=True))


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_weights_are_mapped_from_the_cache_as_they_are_quantised(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    require("native")
    monkeypatch.setenv("AIOINFER_CACHE", str(tmp_path / "cache"))
    make_checkpoint("qwen3-blocks", tmp_path / "hf")
    write_gguf(tmp_path / "hf", tmp_path / "m.gguf", kind)
    options = LoadOptions(device=torch.device("cpu"), kernels="native")
    wanted = load_model(tmp_path / "m.gguf", options)
    for done in ("were cached and mapped", "are mapped from the cache"):
        found = load_model(tmp_path / "m.gguf", replace(options, cache_weights=True))
        assert found.spec.layer_reason == f"{wanted.spec.layer_reason}; weights {done}"
        assert torch.equal(prompt_logits(found), prompt_logits(wanted))


# -- damage --------------------------------------------------------------------------------------------


def examine(path: Path) -> None:
    """All that a start reads of a file."""
    checkpoint = open_checkpoint(path)
    checkpoint.config()
    tensors = checkpoint.tensors()
    for name in tensors.names:
        tensors.shape(name)
        tensors.read(name)
        if tensors.rounding(name) is not None:
            tensors.quantised(name, 0 if len(tensors.shape(name)) > 2 else None)
    checkpoint.tokenizer()


@pytest.mark.native
def test_scales_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    make_checkpoint("qwen3-blocks", tmp_path / "hf")
    write_gguf(tmp_path / "hf", tmp_path / "m.gguf", "Q8_0")
    reader = gguf.GGUFReader(tmp_path / "m.gguf", "r+")
    (damaged,) = (each for each in reader.tensors if each.name == "blk.1.ffn_up.weight")
    damaged.data[0, :2] = np.frombuffer(np.float16(np.nan).tobytes(), np.uint8)
    reader.data.flush()
    with pytest.raises(ConfigError, match=r"mlp\.up_proj\.weight has scales that are not finite"):
        load_model(tmp_path / "m.gguf", LoadOptions(device=torch.device("cpu"), kernels="native"))


@rest(SECONDS)
def test_damaged_files_are_errors_in_words(tmp_path: Path) -> None:
    """Cut anywhere, with any byte of the header changed, and with sizes that promise anything."""
    make_checkpoint("qwen3", tmp_path / "hf")
    target = tmp_path / "m.gguf"
    write_gguf(tmp_path / "hf", target, more={"tokenizer.ggml.model": "gpt2"})
    good = target.read_bytes()
    header = good.index(b"blk.0.")
    rng = random.Random(20)
    damaged = [good[: rng.randrange(len(good))] for _ in range(30)]
    for _ in range(60):
        at = rng.randrange(8, header + 2000)
        damaged.append(good[:at] + bytes([rng.randrange(256)]) + good[at + 1 :])
    for _ in range(30):
        at = rng.randrange(8, header + 2000)
        huge = rng.choice([2**63, 2**64 - 1, 2**40, 2**31]).to_bytes(8, "little")
        damaged.append(good[:at] + huge + good[at + 8 :])
    damaged += [b"", b"GGUF", b"GGUF" + b"\xff" * 40, good[:4] + b"\x00\x00\x00\x03" + good[8:]]
    refused = 0
    for contents in damaged:
        target.write_bytes(contents)
        try:
            examine(target)
        except ConfigError as error:
            refused += 1
            assert str(error), contents[:40]
    assert refused >= 60
    target.write_bytes(good)
    examine(target)
