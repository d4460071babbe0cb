"""How byte-level tokenizers of GGUF files cut text: as those do that they were made of."""

from __future__ import annotations

import functools
import json
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX as QWEN2
from transformers.models.qwen3_5.tokenization_qwen3_5 import PRETOKENIZE_REGEX as QWEN35

from aioinfer.checkpoint.files import GGUFCheckpoint
from aioinfer.text.tokenizer import HFTokenizer
from tests.checkpoint.gguf_models import write_file

TEXTS = [
    "Hello, world!", " two  spaces\tand\n\nlines ", "I'll say 12345 it's 3.14", "naïve Ünï — e\u0301 日本",
    "def f(x):\n    return x ** 2  # 100%", "<|im_start|>user\nHi<|im_end|>", "a" * 40, "", " ", "\n\n",
    "WE'LL I'Ll iPhone HTMLParser ÉCOLE École ǅ ʰa", " 1234567 ½ ²³ ٣٤٥", "   \r\n  x\r\r\n\n y ",
    "$5+<3=>^~|`x` (a_b)\\[c]{d}", "中文，句号。ＡＢ１２‘引’", "ひらがなカタカナ 한국어 นี่ हिन्दी",
    "//path/to/x\n/y", "Ა ἀ 𐐀",
]  # fmt: skip
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
WORDS = pre_tokenizers.ByteLevel(add_prefix_space=False)
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
Steps = list[Any]

#: as Llama 3, GLM-4 and OLMo 2 state it in their tokenizer.json
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
#: Mistral Nemo, and GPT-4o
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
    r" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
HAN = "[一-龥ࠀ-一가-퟿]+"
#: Kimi K2's, in the form that its tokenizer.json has in place of tiktoken's
KIMI = (
    r"[\p{Han}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|"
    r"\s+(?!\S)|\s+"
)
SEED = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
BLOOM = r" ?[^(\s|[.,!?…。，、।۔،])]+"


#: Youtu-LLM's signs and letters of East Asia, and then as Tekken with contractions
YOUTU = (
    "[\uac00-\ud7a3\u3131-\u318e]+|"
    "[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+|"
    "[\u3105-\u312f]+|[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
)


def splits(*patterns: str) -> Steps:
    return [pre_tokenizers.Split(Regex(pattern), "isolated", invert=False) for pattern in patterns]


def digits() -> Steps:
    return [pre_tokenizers.Digits(individual_digits=True)]


#: how the authors publish it: steps, and whether they compose
PUBLISHED: dict[str, tuple[Steps, bool]] = {
    **dict.fromkeys(("gpt-2", "phi-2", "exaone4"), ([WORDS], False)),
    "granite-docling": ([WORDS], False),
    **dict.fromkeys(("mpt", "olmo"), ([WORDS], True)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell"), ([*digits(), WORDS], False)),
    "command-r": ([*digits(), WORDS], True),
    "falcon": (
        [
            pre_tokenizers.Punctuation("contiguous"),
            WORDS,
            pre_tokenizers.Digits(),
            *splits("[0-9][0-9][0-9]"),
        ],
        False,
    ),
    **dict.fromkeys(
        ("smaug-bpe", "dbrx", "glm4", "chatglm-bpe", "llama-bpe", "lfm2", "falcon3", "pixtral"),
        ([*splits(LLAMA3), BYTES], False),
    ),
    "qwen2": ([*splits(QWEN2), BYTES], True),
    "hunyuan": ([*splits(QWEN2), BYTES], False),
    "qwen35": ([*splits(QWEN35), BYTES], True),
    "tekken": ([*splits(TEKKEN), BYTES], False),
    "gpt-4o": ([*splits(GPT4O), BYTES], False),
    "tiny_aya": ([*splits(r"\d{1,3}(?=(?:\d{3})*\b)", GPT4O), BYTES], False),
    "minicpm5": ([*splits(r"\p{N}{1,3}", LLAMA3.replace("{1,3}", "+")), BYTES], False),
    "kimi-k2": ([*splits(KIMI), BYTES], False),
    "bailingmoe2": ([*splits(BAILING), BYTES], False),
    "seed-coder": ([*splits(SEED), BYTES], False),
    "youtu": ([*splits(YOUTU, GPT4O.replace("{1,3}", "")), BYTES], False),
    "stablelm2": ([*splits(QWEN2), BYTES], False),
    "poro-chat": ([*splits(BLOOM), BYTES], False),
    "viking": ([*splits(BLOOM), *digits(), BYTES], False),
    "deepseek-coder": ([*splits(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", HAN), *digits(), BYTES], False),
    "deepseek-llm": (
        [
            *splits(r"[\r\n]", r"\s?[\p{Lu}\p{Ll}\p{Lt}]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", HAN),
            *digits(),
            BYTES,
        ],
        False,
    ),
    "deepseek-v3": ([*splits(r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", DEEPSEEK), BYTES], False),
}


@functools.cache
def original(pre: str) -> Tokenizer:
    """A tokenizer as its model's authors publish it, of a small vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    steps, composed = PUBLISHED[pre]
    if composed:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        special_tokens=[*SPECIAL],
    )
    tokenizer.train_from_iterator(TEXTS * 5 + [Path(__file__).read_text("utf-8")], trainer)
    return tokenizer


def stated(tokenizer: Tokenizer, pre: str | None) -> dict[str, Any]:
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    found = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in SPECIAL else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": 0,
        "tokenizer.chat_template": "{{ messages[0].content }}",
        "tokenizer.ggml.add_bos_token": False,
    }
    return found if pre is None else {**found, "tokenizer.ggml.pre": pre}


def made(path: Path, metadata: dict[str, Any], architecture: str = "llama") -> HFTokenizer:
    write_file(path / "t.gguf", metadata, architecture)
    found = HFTokenizer.of(GGUFCheckpoint(path / "t.gguf"))
    assert found is not None
    return found


@pytest.mark.parametrize("pre", PUBLISHED)
def test_a_tokenizer_encodes_as_the_one_that_it_was_made_of(tmp_path: Path, pre: str) -> None:
    tokenizer = original(pre)
    found = made(tmp_path, stated(tokenizer, pre))
    rng = random.Random(pre)
    mixed = ["".join(rng.choice("".join(TEXTS)) for _ in range(30)) for _ in range(60)]
    for text in TEXTS + mixed:
        assert found.encode(text) == tokenizer.encode(text).ids, text
        assert found.decode(found.encode(text)) == tokenizer.decode(tokenizer.encode(text).ids)
    assert found.special_tokens == {*SPECIAL}
    assert found.render_chat([{"role": "user", "content": "Hi"}]) == "Hi"
    assert 2 in found.eos_token_ids


def pieces(tokenizer: HFTokenizer, text: str) -> list[str]:
    """The parts that no token reaches across, in a vocabulary where all of their pairs merge."""
    backend: Any = tokenizer._fast
    return [part for part, _ in backend.pre_tokenizer.pre_tokenize_str(text)]


def test_a_file_that_names_no_rule_is_cut_as_llama_cpp_does(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = made(tmp_path, stated(original("gpt-2"), None))
    assert "does not say how it cuts text" in caplog.text
    named = made(tmp_path, stated(original("gpt-2"), "default"))
    for text in TEXTS:
        assert plain.encode(text) == named.encode(text)
    assert pieces(plain, "it's $12345.67") == ["it", "'", "s", "Ġ", "$", "123", "45", ".", "67"]
    caplog.clear()
    # Those whose architecture has but one.
    known = made(tmp_path, stated(original("gpt-2"), None), "gpt2")
    assert pieces(known, "it's 12345") == ["it", "'s", "Ġ12345"]
    assert not caplog.records
