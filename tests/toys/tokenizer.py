"""ToyTokenizer: texts for the toy device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from aioinfer.images.processor import ImageProcessor
from aioinfer.text.byte_level import ByteLevelDetokenizer, TokenTexts
from aioinfer.text.detokenizer import Detokenizer

__all__ = ["ByteTokenizer", "ToyTokenizer"]


class ToyTokenizer:
    """One to three characters per token, some of them beyond ASCII; enough to try text and stops on.

    ``looks_up``: outputs are detokenized by look-up, as those of byte-level tokenizers; or else one call at
    a time.
    """

    def __init__(self, vocab_size: int = 64, *, looks_up: bool = True) -> None:
        self.vocab_size = vocab_size
        self.eos_token_ids = frozenset({0})
        self.has_chat_template = True
        self.added_tokens: Mapping[str, int] = {}
        self.special_tokens: frozenset[str] = frozenset()
        #: a token for each character
        self.longest_token: int | None = 4
        self.chat_templates: tuple[str, ...] = ()
        self.template_names: frozenset[str] | None = None
        self.images: ImageProcessor | None = None
        self._pieces = ["", *(_piece(index) for index in range(1, vocab_size))]
        self._looks_up = looks_up

    def encode(self, text: str) -> list[int]:
        return [1 + ord(character) % (self.vocab_size - 1) for character in text]

    def encode_part(self, text: str) -> list[int]:
        return self.encode(text)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], /, **template_kwargs: Any) -> list[int]:
        return self.encode("".join(f"{message['role']}:{message['content']}\n" for message in messages))

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(self._pieces[token] for token in ids)

    def token_bytes(self, token_id: int) -> bytes:
        return self._pieces[token_id].encode()

    def for_grammars(self) -> Any:
        import llguidance

        pieces = [b"<end>", *(piece.encode() for piece in self._pieces[1:])]
        return llguidance.TokenizerWrapper(_ToyVocabulary(pieces))

    def detokenizer(self, prompt_ids: Sequence[int], *, skip_special_tokens: bool) -> Detokenizer:
        if self._looks_up:
            return ByteLevelDetokenizer(TokenTexts([*self._pieces], {}), prompt_ids)
        return _ToyDetokenizer(self._pieces)


class ByteTokenizer(ToyTokenizer):
    """A token for every byte, some for several, and the mask: texts of any kind, JSON for example."""

    def __init__(self) -> None:
        parts = ['{"', '": ', ", ", "true", "null", "ab", "日本", " the", '"}', "12"]
        single = [bytes([value]) for value in range(256)]
        self._bytes = [b"", *single, *(part.encode() for part in parts), b""]
        super().__init__(1)
        self.vocab_size = len(self._bytes)
        self.longest_token = max(map(len, self._bytes))

    def encode(self, text: str) -> list[int]:
        return [1 + value for value in text.encode()]

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        return b"".join(self._bytes[token] for token in ids).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return self._bytes[token_id]

    def for_grammars(self) -> Any:
        import llguidance

        return llguidance.TokenizerWrapper(_ToyVocabulary([b"<end>", *self._bytes[1:-1], b"<mask>"]))

    def detokenizer(self, prompt_ids: Sequence[int], *, skip_special_tokens: bool) -> Detokenizer:
        return ByteLevelDetokenizer(TokenTexts.of(self._bytes), prompt_ids)


class _ToyVocabulary:
    """What ``llguidance.TokenizerWrapper`` wraps."""

    eos_token_id = 0
    bos_token_id = None
    special_token_ids = (0,)

    def __init__(self, tokens: list[bytes]) -> None:
        self.tokens = tokens

    def __call__(self, text: bytes) -> list[int]:
        ids, rest = [], bytes(text)
        while rest:
            at = max(
                range(1, len(self.tokens)),
                key=lambda at: rest.startswith(self.tokens[at]) * len(self.tokens[at]),
            )
            ids.append(at)
            rest = rest[len(self.tokens[at]) :]
        return ids


class _ToyDetokenizer:
    __slots__ = ("_pieces",)

    def __init__(self, pieces: list[str]) -> None:
        self._pieces = pieces

    def push(self, token_id: int) -> str:
        return self._pieces[token_id]

    def peek(self, token_ids: Sequence[int], *, apart: bool = False) -> str:
        return "".join(self._pieces[token] for token in token_ids)

    def finish(self) -> str:
        return ""


def _piece(index: int) -> str:
    letter = "abcdefghijklmnopqrstuvwxyzäöüß"[index % 30]
    return letter if index < 30 else letter + "abc"[index % 3]
