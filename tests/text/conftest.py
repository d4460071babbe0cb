"""Small tokenizers: byte-level BPE, Metaspace with byte fallback as in Llama 2, and Unigram."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

TEXTS = [
    "Hello world, how are you today?",
    "naïve café 😀😀 日本語 한국어 ünïcödé",
    " 日本 日本語 😀😀🦜",
    "the the the quick brown fox",
]
TEMPLATE = (
    "{% for m in messages %}<|user|>{{ m['role'] }}:{{ m['content'] }}{{ m.name }}{% endfor %}"
    "{% if add_generation_prompt %}<|user|>answer:{% endif %}"
    "{% if bad == 'raise' %}{{ raise_exception('no such thing') }}{% endif %}"
    "{% if bad == 'divide' %}{{ 1 // 0 }}{% endif %}"
    "{% if bad == 'range' %}{% for i in range(1000000000) %}{% endfor %}{% endif %}"
)
#: the first byte token of ``metaspace``
FIRST_BYTE = 3


@pytest.fixture(scope="session")
def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<|end|>", "<|user|>", "<|begin|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS * 5, trainer)
    return tokenizer


@pytest.fixture(scope="session")
def metaspace() -> Tokenizer:
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocab |= {f"<0x{byte:02X}>": FIRST_BYTE + byte for byte in range(256)}
    for piece in ["▁", "▁Hello", "▁world", "H", "e", "l", "o", "▁the", "fox", "é", ",", "▁a", "b"]:
        vocab.setdefault(piece, len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


@pytest.fixture(scope="session")
def unigram() -> Tokenizer:
    pieces = ["<unk>", "▁", "▁Hello", "▁world", "a", "b", "日", "\ufffd"]
    tokenizer = Tokenizer(models.Unigram([(piece, -float(at)) for at, piece in enumerate(pieces)], 0, False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["</s>"])
    return tokenizer


@pytest.fixture
def directory(byte_level: Tokenizer, tmp_path: Path) -> Path:
    """A model directory with tokenizer files, which set truncation and padding."""
    copy = Tokenizer.from_str(byte_level.to_str())
    copy.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", 2)]
    )
    copy.enable_truncation(4)
    copy.enable_padding(length=16)
    fast = PreTrainedTokenizerFast(tokenizer_object=copy, eos_token="<|end|>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(tmp_path)
    return tmp_path
