"""Bounds on the number of tokens of a text, before it is tokenized."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["ASSUMED_LONGEST", "exceeds_bytes", "longest_token"]

#: bytes of a text per token where no bound is known: of words that become one unknown token, for example
ASSUMED_LONGEST = 512
#: bytes of a text per byte of its normal form, at most, by type of normalizer
_SHRINKING = {"NFC": 4, "NFD": 4, "NFKC": 16, "NFKD": 16, "Lowercase": 3, "Prepend": 1, "ByteLevel": 1}
#: pre-tokenizers that omit nothing; of those with a "behavior", all but "Removed" keep what they split at
_KEEPING = frozenset(
    {"ByteLevel", "Metaspace", "Digits", "Split", "Punctuation", "UnicodeScripts", "FixedLength", "Sequence"}
)
_BYTES = frozenset(f"<0x{value:02X}>" for value in range(256))


def longest_token(tokenizer: Any, vocabulary: Mapping[str, int] | None = None) -> int | None:
    """The most bytes of a text that one token of a ``tokenizers.Tokenizer`` can stand for; None if no bound
    is known, because it can omit text or merge any number of unknown characters into one token.

    ``vocabulary``: the tokenizer's, without added tokens, if the caller has it."""
    try:
        return _longest(tokenizer, tokenizer.get_vocab(False) if vocabulary is None else vocabulary)
    except Exception:
        return None  # a part written in Python does not say what it does


def _longest(tokenizer: Any, vocab: Mapping[str, int]) -> int | None:
    added = tokenizer.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip for token in added):
        return None  # such a token takes all the spaces beside it
    normalizers = list(_parts(_state(tokenizer.normalizer), "normalizers"))
    pieces = list(_parts(_state(tokenizer.pre_tokenizer), "pretokenizers"))
    shrinking = _shrinking(normalizers)
    if shrinking is None or not all(map(_keeps, pieces)):
        return None
    byte_level = "ByteLevel" in {part["type"] for part in [*pieces, *normalizers]}
    if not _covers(tokenizer.model, vocab, byte_level=byte_level):
        return None
    # A byte-level vocabulary has one character for each byte.
    size = len if byte_level else _utf8
    longest = max((size(token) for token in vocab), default=0)
    return shrinking * max(4, longest, *(_utf8(token.content) for token in added), 0)


def exceeds_bytes(text: str, limit: int) -> bool:
    """``text`` has more than ``limit`` bytes in UTF-8. Counts them only where its length leaves it open."""
    if len(text) > limit:
        return True
    return 4 * len(text) > limit and _utf8(text) > limit


def _utf8(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


def _state(part: Any) -> Mapping[str, Any] | None:
    """A normalizer or pre-tokenizer as in ``tokenizer.json``."""
    state: Mapping[str, Any] | None = None if part is None else json.loads(part.__getstate__())
    return state


def _parts(state: Mapping[str, Any] | None, name: str) -> Iterable[Mapping[str, Any]]:
    """The members of a sequence; the part itself if it is none."""
    if state is None:
        return
    if state["type"] != "Sequence":
        yield state
    for part in state.get(name, ()):
        yield from _parts(part, name)


def _shrinking(normalizers: Iterable[Mapping[str, Any]]) -> int | None:
    """Bytes of a text per byte of its normal form, at most; None: no bound is known."""
    product = 1
    for part in normalizers:
        factor = _replacing(part) if part["type"] == "Replace" else _SHRINKING.get(part["type"])
        if factor is None:
            return None
        product *= factor
    return product


def _replacing(part: Mapping[str, Any]) -> int | None:
    pattern, content = part["pattern"].get("String"), part["content"]
    if not pattern or not content:
        return None  # a regular expression, or something that is omitted
    return max(1, -(-_utf8(pattern) // _utf8(content)))


def _keeps(piece: Mapping[str, Any]) -> bool:
    return piece["type"] in _KEEPING and piece.get("behavior") != "Removed"


def _covers(model: Any, vocab: Mapping[str, int], *, byte_level: bool) -> bool:
    """Every character becomes at least one token."""
    from tokenizers.pre_tokenizers import ByteLevel

    kind = type(model).__name__
    if kind not in ("BPE", "Unigram"):
        return False
    if byte_level and vocab.keys() >= set(ByteLevel.alphabet()):
        return True
    if model.byte_fallback and vocab.keys() >= _BYTES:
        return True
    return kind == "BPE" and model.unk_token is not None and not model.fuse_unk
