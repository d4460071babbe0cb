"""Byte-level tokenizers: those of the bundled models, and made ones with tokens cut anywhere."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

import aioinfer

__all__ = ["BUNDLED", "BYTE_LEVEL", "made"]

BUNDLED = sorted((Path(aioinfer.__file__).parent / "bundled").iterdir())
#: by byte, the character that stands for it in a byte-level vocabulary
PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
CHARACTERS = {byte: chr(byte) for byte in PRINTABLE}
CHARACTERS |= {byte: chr(0x100 + at) for at, byte in enumerate(sorted({*range(256)} - CHARACTERS.keys()))}


def spelled(token: bytes) -> str:
    return "".join(CHARACTERS[byte] for byte in token)


def made(tokens: list[bytes], *, added: list[AddedToken] | None = None, bytes_too: bool = True) -> Tokenizer:
    """A byte-level tokenizer that has these tokens, and all single bytes."""
    pieces = [*([bytes([byte]) for byte in range(256)] if bytes_too else []), *tokens]
    vocab = {spelled(token): at for at, token in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(added or [])
    return tokenizer


@cache
def synthetic(seed: int) -> Tokenizer:
    """Tokens that begin and end anywhere in characters, broken ones, and special and added tokens."""
    dice = random.Random(seed)
    text = "naïve 日本語 😀🦜 한국어 \ufffd\ufeff \U0010ffff\ud7ff é𝄞 the fox\n".encode()
    tokens = []
    for _ in range(400):
        at = dice.randrange(len(text))
        tokens.append(text[at : at + dice.randint(1, 6)])
    tokens += [dice.randbytes(dice.randint(1, 5)) for _ in range(200)]
    added = [
        AddedToken("<|end|>", special=True, normalized=False),
        AddedToken("<think>", special=False, normalized=False),
        AddedToken(" two words ", special=False, normalized=False),
        AddedToken("é", special=True, normalized=False),
        AddedToken("日本", special=dice.random() < 0.5, normalized=False),
    ]
    return made(tokens, added=added)


@cache
def bundled(path: Path) -> Tokenizer:
    return Tokenizer.from_file(str(path / "tokenizer.json"))


#: name -> the tokenizer
BYTE_LEVEL: dict[str, Callable[[], Tokenizer]] = {
    **{path.name: partial(bundled, path) for path in BUNDLED},
    **{f"synthetic-{seed}": partial(synthetic, seed) for seed in range(2)},
}
