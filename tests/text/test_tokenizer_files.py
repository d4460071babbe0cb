"""Which tokenizer a directory has: tokenizer.json as it is, or what transformers makes of other files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer

from aioinfer.errors import ConfigError
from aioinfer.text.tokenizer import HFTokenizer

TEXTS = [
    "hi",
    " hi",
    "  hi",
    "</s>hi",
    "</s> hi",
    "<s>hi</s><s>hi",
    "hi\n\nhi",
    "</s>\n<|user|>\nhi</s>",
    "hi▁hi",
]


def llama(*, begins: bool = False, prefix: str = "prepend") -> Tokenizer:
    """A tokenizer of Llama's kind: signs for spaces before each part of a text, or before the first."""
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "▁▁",
        "h",
        "i",
        "▁h",
        "▁hi",
    ]
    merges = [("▁", "h"), ("▁h", "i"), ("▁", "▁")]
    vocabulary = {piece: at for at, piece in enumerate(pieces)}
    made = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if prefix == "prepend":
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prefix, split=False)
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    made.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token in ("<unk>", "<s>", "</s>")]
    )
    if begins:
        made.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
        )
    return made


def write(
    path: Path, settings: dict[str, Any] | None, model_type: str | None, made: Tokenizer | None
) -> None:
    if made is not None:
        made.save(str(path / "tokenizer.json"))
    if settings is not None:
        (path / "tokenizer_config.json").write_text(json.dumps(settings))
    if model_type is not None:
        (path / "config.json").write_text(json.dumps({"model_type": model_type}))


@pytest.mark.parametrize("prefix", ["prepend", "first", "always", "never"])
@pytest.mark.parametrize("model_type", ["llama", "gemma", None])
@pytest.mark.parametrize(
    "settings",
    [
        None,
        *({"tokenizer_class": f"Llama{end}", "eos_token": "</s>"} for end in ("Tokenizer", "TokenizerFast")),
        {"tokenizer_class": "LlamaTokenizer", "legacy": False},
        {"tokenizer_class": "GemmaTokenizer", "legacy": True, "add_prefix_space": True},
        {"tokenizer_class": "PreTrainedTokenizerFast"},
        {"tokenizer_class": "TokenizerOfItsOwnCode", "auto_map": {"AutoTokenizer": ["x.X", None]}},
    ],
)
def test_text_is_cut_as_tokenizer_json_says(
    tmp_path: Path, settings: dict[str, Any] | None, model_type: str | None, prefix: str
) -> None:
    made = llama(begins=prefix == "first", prefix=prefix)
    write(tmp_path, settings, model_type, made)
    found = HFTokenizer.load(tmp_path)
    for text in TEXTS:
        assert found.encode_part(text) == made.encode(text, add_special_tokens=False).ids
        assert found.encode(text) == made.encode(text).ids
    assert found.decode([1, 263, 264], skip_special_tokens=False) == made.decode(
        [1, 263, 264], skip_special_tokens=False
    )


def test_settings_add_roles_tokens_and_the_template(tmp_path: Path) -> None:
    settings = {
        "tokenizer_class": "LlamaTokenizer",
        "eos_token": {"content": "<|done|>", "__type": "AddedToken", "special": True},
        "added_tokens_decoder": {
            "2": {"content": "</s>", "special": True, "normalized": False},
            "265": {"content": "<|done|>", "special": True, "normalized": False},
            "266": {"content": "<tool>", "special": False, "normalized": False},
        },
        "extra_special_tokens": ["<|more|>"],
        "chat_template": "{{ messages[0].content }}{{ eos_token }}",
    }
    write(tmp_path, settings, "llama", llama())
    found = HFTokenizer.load(tmp_path)
    assert found.eos_token_ids == {265}
    assert {name: found.added_tokens[name] for name in ("<|done|>", "<tool>", "<|more|>")} == {
        "<|done|>": 265,
        "<tool>": 266,
        "<|more|>": 267,
    }
    assert found.special_tokens & {"<tool>", "<|more|>"} == {"<|more|>"}
    assert found.render_chat([{"role": "user", "content": "hi"}]) == "hi<|done|>"
    assert found.encode_part("hi<tool>hi") == [264, 266, 264]


@pytest.mark.parametrize(
    ("settings", "model_type", "eos"),
    [
        ({"tokenizer_class": "LlamaTokenizer"}, None, {2}),
        ({"tokenizer_class": "LlamaTokenizerFast", "eos_token": None}, "llama", set()),
        (None, "llama", set()),
        ({"tokenizer_class": "GPT2Tokenizer"}, "llama", set()),
    ],
)
def test_a_class_has_its_tokens_where_the_files_name_none(
    tmp_path: Path, settings: dict[str, Any] | None, model_type: str | None, eos: set[int]
) -> None:
    write(tmp_path, settings, model_type, llama())
    assert HFTokenizer.load(tmp_path).eos_token_ids == eos
    # No token is added for a role.
    assert HFTokenizer.load(tmp_path).vocab_size == 265


def byte_level_files(path: Path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("h", "i"), ("Ġ", "hi")]
    pieces = [*alphabet, *("".join(pair) for pair in merges), "<|endoftext|>"]
    (path / "vocab.json").write_text(json.dumps({piece: at for at, piece in enumerate(pieces)}))
    (path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(pair) for pair in merges) + "\n")


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        ("gpt2", None),
        ("qwen2", None),
        ("qwen3", {"eos_token": "<|endoftext|>"}),
        ("opt", None),
        ("llama", {"tokenizer_class": "GPT2Tokenizer"}),
    ],
)
def test_vocab_and_merges_make_the_tokenizer_that_transformers_makes(
    tmp_path: Path, model_type: str, settings: dict[str, Any] | None
) -> None:
    byte_level_files(tmp_path)
    write(tmp_path, settings, model_type, None)
    found, oracle = HFTokenizer.load(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for text in ["hi hi", "Hi  hi\n123 é", "hi<|endoftext|>hi"]:
        assert found.encode(text) == oracle.encode(text)
    assert found.eos_token_ids == {oracle.eos_token_id}


@pytest.mark.parametrize(
    ("files", "model_type", "message"),
    [
        (
            {"tekken.json": "{}"},
            "mistral",
            r"no tokenizer\.json, and tekken\.json does not say how texts begin",
        ),
        (
            {"tokenizer.model": "x"},
            "llama",
            r"no tokenizer\.json, and tokenizer\.model cannot be read.*save_pretrained",
        ),
        (
            {"tokenizer.model": "x", "tokenizer_config.json": '{"tokenizer_class": "LlamaTokenizer"}'},
            "llama",
            r"tokenizer_config\.json, tokenizer\.model cannot be read",
        ),
        ({"tokenizer_config.json": "{}"}, "qwen2", r"tokenizer_config\.json are no vocabulary"),
        ({"vocab.json": '{"a": 0}'}, "llama", r"vocab\.json cannot be read"),
    ],
)
def test_files_that_make_no_tokenizer_are_named(
    tmp_path: Path, files: dict[str, str], model_type: str, message: str
) -> None:
    write(tmp_path, None, model_type, None)
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=message):
        HFTokenizer.load(tmp_path)
