"""Detokenizing by look-up: the text of every token of a byte-level vocabulary, made once per tokenizer.

The decoder ``ByteLevel`` (GPT-2, Llama 3, Qwen, SmolLM) writes the bytes of the tokens one after the other,
so the text of a token depends on its neighbours only where a character is cut. A table is exact or not used:
:func:`token_texts` compares every entry with what the tokenizer decodes.
"""

from __future__ import annotations

import itertools
import json
import operator
import random
import re
import time
from codecs import utf_8_decode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

__all__ = [
    *("ByteLevelDetokenizer", "TokenTexts", "part_of_character", "record_of", "texts_from_record"),
    "token_texts",
]

_REPLACEMENT = "\ufffd"
#: a token of byte fallback
_BYTE = re.compile("<0x[0-9A-F]{2}>")
#: seconds of this thread that making and checking the tables may take; 150,000 tokens need half of one. What
#: the library decodes on its own threads is not counted, and takes no longer than its file is large.
_MOST_SECONDS = 3.0
_MOST_TOKENS = 1 << 20
#: characters of a token; sequences of them are decoded
_LONGEST_TOKEN = 1 << 15
#: an incomplete character has fewer bytes than this
_LONGEST_CHARACTER = 4
#: tokens that are compared at once
_TOGETHER = 256
#: sequences that are decoded at once
_AT_ONCE = 4096
#: random sequences that are compared, and their length
_SEQUENCES = 64


class TokenTexts:
    """By token id, the text of each token; special tokens have theirs, or none.

    Attributes:
        texts: None for a token that is not made of whole characters.
        parts: the bytes of those tokens.
    """

    __slots__ = ("parts", "texts")

    def __init__(self, texts: list[str | None], parts: dict[int, bytes]) -> None:
        self.texts = texts
        self.parts = parts

    @classmethod
    def of(cls, tokens: Sequence[bytes]) -> TokenTexts:
        """From the bytes of each token."""
        texts: list[str | None] = []
        parts = {}
        for token_id, token in enumerate(tokens):
            try:
                texts.append(token.decode())
            except UnicodeDecodeError:
                texts.append(None)
                parts[token_id] = token
        return cls(texts, parts)

    def bytes_of(self, token_id: int) -> bytes:
        """Empty for an id outside the vocabulary, as in the library. Raises OverflowError if negative."""
        if token_id < 0:
            raise OverflowError(f"a token id is negative: {token_id}")
        if token_id >= len(self.texts):
            return b""
        text = self.texts[token_id]
        return self.parts[token_id] if text is None else text.encode()


class ByteLevelDetokenizer:
    """A :class:`~aioinfer.text.detokenizer.Detokenizer` that looks its texts up.

    Attributes:
        texts: the text of each token if it came next, None where :meth:`push` has to find it; None while a
            character is incomplete.
    """

    __slots__ = ("_held", "_of_prompt", "_table", "texts")

    def __init__(self, table: TokenTexts, prompt_ids: Sequence[int]) -> None:
        self._table = table
        #: the bytes of an incomplete character
        self._held = _incomplete(table, prompt_ids)
        #: the prompt ends inside a character, which the output has not completed
        self._of_prompt = bool(self._held)
        self.texts = None if self._held else table.texts

    def push(self, token_id: int) -> str:
        texts = self.texts
        if texts is not None and 0 <= token_id < len(texts):
            text = texts[token_id]
            if text is not None:
                return text
        table = self._table
        held = self._held + table.bytes_of(token_id)
        text, used = utf_8_decode(held, "replace", False)
        self._held = held[used:]
        self.texts = None if self._held else table.texts
        new = self._without_prompt(text)
        if text:
            self._of_prompt = False
        return new

    def skip(self, token_ids: Sequence[int]) -> None:
        """As if all of these had been pushed, in a time that does not depend on their number: behind whole
        characters nothing is held."""
        texts, at = self._table.texts, len(token_ids)
        while at and not (0 <= token_ids[at - 1] < len(texts) and texts[token_ids[at - 1]]):
            at -= 1
        if at:
            self._held, self._of_prompt, self.texts = b"", False, texts
        for token_id in token_ids[at:]:
            self.push(token_id)

    def peek(self, token_ids: Sequence[int], *, apart: bool = False) -> str:
        tokens = b"".join(map(self._table.bytes_of, token_ids))
        if apart:
            return tokens.decode(errors="replace")
        return self._without_prompt((self._held + tokens).decode(errors="replace"))

    def finish(self) -> str:
        text = self._without_prompt(self._held.decode(errors="replace"))
        self._held, self._of_prompt, self.texts = b"", False, self._table.texts
        return text

    def _without_prompt(self, text: str) -> str:
        """Without the U+FFFD that stands for a character of the prompt that the output did not complete."""
        return text[1:] if self._of_prompt and text.startswith(_REPLACEMENT) else text


def _incomplete(table: TokenTexts, ids: Sequence[int]) -> bytes:
    """The bytes at the end of a text that further ones may complete to a character."""
    end = b""
    for token_id in reversed(ids):
        end = table.bytes_of(token_id)[-_LONGEST_CHARACTER:] + end
        if len(end) >= _LONGEST_CHARACTER:
            break
    end = end[utf_8_decode(end, "replace", False)[1] :]
    # CPython waits for the rest of a surrogate, too, which is two or three broken characters in any case.
    return end if len(end.decode(errors="replace")) == 1 else b""


# -- making the tables --------------------------------------------------------------------------------


def token_texts(
    tokenizer: Any, vocabulary: Mapping[str, int] | None = None
) -> Mapping[bool, TokenTexts] | None:
    """The tables of a ``tokenizers.Tokenizer``, by whether special tokens are left out; None if they could
    differ from what it decodes. Takes 3 microseconds per token, and seconds at the most.

    ``vocabulary``: the tokenizer's, without added tokens, if the caller has it."""
    until = time.thread_time() + _MOST_SECONDS
    try:
        if not _is_byte_level(tokenizer.decoder):
            return None
        tables = _tables(tokenizer, tokenizer.get_vocab(False) if vocabulary is None else vocabulary)
        exact = tables is not None and all(_agrees(tokenizer, tables[skip], skip, until) for skip in tables)
    except Exception:
        return None  # a part written in Python does not say what it does, and the library raises many types
    return tables if exact else None


def _is_byte_level(decoder: Any) -> bool:
    state = None if decoder is None else json.loads(decoder.__getstate__())
    while state is not None and state["type"] == "Sequence" and len(state["decoders"]) == 1:
        state = state["decoders"][0]
    return state is not None and state["type"] == "ByteLevel"


def _tables(tokenizer: Any, given: Mapping[str, int]) -> Mapping[bool, TokenTexts] | None:
    vocabulary = {at: token for token, at in given.items()}
    added = tokenizer.get_added_tokens_decoder()
    vocabulary |= {at: token.content for at, token in added.items()}
    special = {token.content for token in added.values() if token.special}
    size = max(vocabulary, default=-1) + 1
    if size > min(_MOST_TOKENS, 2 * len(vocabulary) + 1024):
        return None
    if max(map(len, vocabulary.values()), default=0) > _LONGEST_TOKEN:
        return None
    spell = _speller()
    tokens = [b""] * size  # an id without a token has no text
    for at, token in vocabulary.items():
        tokens[at] = spell(token)
    return _both(TokenTexts.of(tokens), (at for at, token in vocabulary.items() if token in special))


def _both(kept: TokenTexts, special: Iterable[int]) -> Mapping[bool, TokenTexts]:
    """``kept``: the texts of all tokens; ``special``: those that have none in the other table."""
    texts, parts = kept.texts.copy(), kept.parts.copy()
    for at in special:
        texts[at] = ""
        parts.pop(at, None)
    return {False: kept, True: TokenTexts(texts, parts)}


def record_of(tables: Mapping[bool, TokenTexts]) -> dict[str, Any]:
    """What :func:`texts_from_record` makes the tables of, as JSON has it."""
    kept = tables[False]
    differ = map(operator.ne, kept.texts, tables[True].texts)
    return {
        "texts": kept.texts,
        "parts": {at: part.hex() for at, part in kept.parts.items()},
        "special": [at for at, differs in enumerate(differ) if differs],
    }


def texts_from_record(record: Mapping[str, Any]) -> Mapping[bool, TokenTexts]:
    """The tables that were checked before they were recorded."""
    parts = {int(at): bytes.fromhex(part) for at, part in record["parts"].items()}
    return _both(TokenTexts(record["texts"], parts), record["special"])


def part_of_character(token: str, text: str) -> bytes | None:
    """The bytes of a token that its vocabulary writes as ``token`` and decodes as ``text``, with U+FFFD: one
    byte by its number, or bytes as byte-level vocabularies write them. None if it is neither."""
    if _REPLACEMENT not in text:
        return None
    found = bytes.fromhex(token[3:5]) if _BYTE.fullmatch(token) else _speller()(token)
    return found if found.decode(errors="replace") == text else None


@cache
def _speller() -> Callable[[str], bytes]:
    """A function from a token to the bytes that the decoder writes: those that its characters stand for, if
    all of them do, else its own UTF-8."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [value for value in range(0x100) if value not in printable]
    # To the character of the byte's number; to one beyond bytes, if it stands for none.
    spelled = {value: value if value in printable else 0x100 for value in range(0x100)}
    spelled |= {0x100 + at: value for at, value in enumerate(others)}

    def spell(token: str) -> bytes:
        try:
            return token.translate(spelled).encode("latin-1")
        except UnicodeEncodeError:
            return token.encode()

    return spell


def _agrees(tokenizer: Any, table: TokenTexts, skip: bool, until: float) -> bool:
    """The tokenizer decodes what the table says, and that was known in time. Where special tokens are kept,
    every token is compared by itself."""
    tokens = [
        table.parts[token_id] if text is None else text.encode() for token_id, text in enumerate(table.texts)
    ]
    samples = _samples(table)
    if not skip:
        samples = itertools.chain(([token_id] for token_id in range(len(tokens))), samples)
    while batch := list(itertools.islice(samples, _AT_ONCE)):
        # Without the interpreter's lock.
        found = tokenizer.decode_batch(batch, skip_special_tokens=skip)
        known = [b"".join([tokens[token_id] for token_id in ids]).decode(errors="replace") for ids in batch]
        if found != known or time.thread_time() > until:
            return False
    return True


def _samples(table: TokenTexts) -> Iterator[list[int]]:
    """All tokens, many at a time, and random ones, half of which have cut characters."""
    size = len(table.texts)
    for first in range(0, size, _TOGETHER):
        yield list(range(first, min(size, first + _TOGETHER)))
    dice = random.Random(size)
    pools = [pool for pool in (list(table.parts), range(size)) if pool]
    for _ in range(_SEQUENCES if pools else 0):
        yield [dice.choice(dice.choice(pools)) for _ in range(_SEQUENCES)]
