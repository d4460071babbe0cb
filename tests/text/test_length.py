"""The bound on the number of tokens holds for every tokenizer that has one, and the others have none."""

from __future__ import annotations

import random
import unicodedata
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from aioinfer.config import EngineConfig
from aioinfer.loop.factory import load_tokenizer
from aioinfer.text.length import exceeds_bytes, longest_token

ALPHABET = pre_tokenizers.ByteLevel.alphabet()
BYTES = {f"<0x{value:02X}>": value for value in range(256)}


def byte_level(normalizer: Any = None, *before: Any, added: Any = ()) -> Tokenizer:
    vocab = {piece: at for at, piece in enumerate([*ALPHABET, "aa", "aaaa", "ĠĠ", "ĠĠĠĠ"])}
    merges = [("a", "a"), ("aa", "aa"), ("Ġ", "Ġ"), ("ĠĠ", "ĠĠ")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*before, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.add_special_tokens(list(added))
    return tokenizer


def byte_fallback(**options: Any) -> Tokenizer:
    vocab = {**BYTES, "▁": 256, "a": 257, "▁a": 258, "<unk>": 259}
    model = models.BPE(vocab=vocab, merges=[("▁", "a")], byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return tokenizer


BOUNDED = {
    "bundled": lambda: load_tokenizer(EngineConfig())._fast,
    "byte level": byte_level,
    "nfc": lambda: byte_level(normalizers.NFC()),
    "nfkc": lambda: byte_level(normalizers.NFKC()),
    "lower": lambda: byte_level(normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])),
    "replace": lambda: byte_level(normalizers.Replace("aaaa", "b")),
    "split": lambda: byte_level(None, pre_tokenizers.Split("a", "isolated"), pre_tokenizers.Digits()),
    "added": lambda: byte_level(added=[AddedToken("<|a very long special token|>")]),
    "byte fallback": byte_fallback,
}

UNBOUNDED = {
    "strip": lambda: byte_level(normalizers.Strip()),
    "regex": lambda: byte_level(normalizers.Replace(__import__("tokenizers").Regex(" +"), " ")),
    "removed": lambda: byte_level(None, pre_tokenizers.Split(" ", "removed")),
    "whitespace": lambda: byte_level(None, pre_tokenizers.WhitespaceSplit()),
    "rstrip": lambda: byte_level(added=[AddedToken("<|x|>", rstrip=True)]),
    "accents": lambda: byte_level(normalizers.StripAccents()),
    "word level": lambda: Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]")),
    "word piece": lambda: Tokenizer(models.WordPiece({"a": 0, "[UNK]": 1}, unk_token="[UNK]")),
    "fused": lambda: Tokenizer(models.BPE({"a": 0, "u": 1}, [], unk_token="u", fuse_unk=True)),
    "dropped": lambda: Tokenizer(models.BPE({"a": 0}, [])),
}

HARD = [
    "a" * 1000,
    " " * 1000,
    "aaaa " * 300,
    "\N{KELVIN SIGN}" * 500,
    unicodedata.normalize("NFD", "\N{HANGUL SYLLABLE GAG}" * 300),
    unicodedata.normalize("NFD", "\N{GREEK SMALL LETTER IOTA WITH DIALYTIKA AND TONOS}" * 300),
    "\N{MATHEMATICAL BOLD CAPITAL A}" * 300,
    "<|a very long special token|>" * 50,
    "\N{GRINNING FACE}" * 300,
]


@pytest.mark.parametrize("kind", BOUNDED)
def test_no_text_has_fewer_tokens_than_its_bytes_allow(kind: str) -> None:
    tokenizer = BOUNDED[kind]()
    longest = longest_token(tokenizer)
    assert longest is not None
    seed = random.randrange(1 << 32)
    rng = random.Random(seed)
    texts = [
        *HARD,
        *("".join(rng.choices("a é\u0301\u1100\u1161ＡK<|x>", k=rng.randrange(1, 400))) for _ in range(100)),
    ]
    for text in texts:
        count = len(tokenizer.encode(text, add_special_tokens=False).ids)
        assert count * longest >= len(text.encode()), (seed, kind, text[:20])


@pytest.mark.parametrize("kind", UNBOUNDED)
def test_a_tokenizer_that_can_omit_or_merge_without_end_has_no_bound(kind: str) -> None:
    assert longest_token(UNBOUNDED[kind]()) is None


def test_the_bundled_tokenizer_has_a_tight_bound() -> None:
    """Its longest token is a tag; a text of one token per 13 bytes exists."""
    assert longest_token(BOUNDED["bundled"]()) == 13


@pytest.mark.parametrize("text", ["", "abcd", "ééé", "\N{GRINNING FACE}", "\ud800"])
def test_bytes_are_counted_exactly(text: str) -> None:
    count = len(text.encode("utf-8", "surrogatepass"))
    assert exceeds_bytes(text, count - 1)
    assert not exceeds_bytes(text, count)
