"""The bundled model's vocabulary for grammars, and what a grammar allows in it."""

from __future__ import annotations

from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer

from aioinfer.config import EngineConfig
from aioinfer.text.grammar import Matcher
from aioinfer.text.guidance import GuidanceBackend
from aioinfer.text.reasoning import REASONING_PARSERS
from aioinfer.text.tool_calls import PARSERS, Hermes
from aioinfer.text.tool_grammar import AnswerGrammar

__all__ = ["CITY", "FUNCTIONS", "Vocabulary"]

_TAGS = [*(each.tags for each in REASONING_PARSERS.values()), *(each.tags for each in PARSERS.values())]
TAGS = [*dict.fromkeys(tag for tags in _TAGS for tag in tags)]
CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
FUNCTIONS: dict[str, Any] = {"weather": {**CITY, "additionalProperties": False}, "now": {"type": "object"}}


class Vocabulary:
    """With ``special`` it has tokens for the tags of answers: special ones, or others."""

    def __init__(self, special: bool | None = None, *, max_depth: int = 64) -> None:
        # gpt-oss ends messages with what ends the answers of the bundled model.
        text = (EngineConfig().model_path / "tokenizer.json").read_text().replace("<|end|>", "<|over|>")
        self.tokenizer = Tokenizer.from_str(text)
        self.end = int(self.tokenizer.token_to_id("<|over|>") or 0)
        self.tokens: dict[str, int] = {}
        if special is not None:
            self.tokenizer.add_tokens([AddedToken(tag, special=special, normalized=False) for tag in TAGS])
            vocabulary = self.tokenizer.get_vocab()
            self.tokens = {tag: vocabulary[tag] for tag in TAGS}
        self.size = self.tokenizer.get_vocab_size()
        self.backend = GuidanceBackend(self.tokenizer.to_str(), self.size, [self.end], max_depth=max_depth)

    def follows(self, matcher: Matcher, text: str) -> bool:
        """The text is a whole output, token by token allowed by the masks."""
        mask = np.zeros(-(-self.size // 32), np.int32)
        left = self._ids(text)
        while left:
            if matcher.stopped:
                return left == [self.end]
            self.backend.fill([matcher], [mask])
            if not self._allowed(mask, left[0]):
                # Text that is forced is tokenized without the text in front of it.
                left = self._ids(self.tokenizer.decode(left[:-1], skip_special_tokens=False))
                if not self._allowed(mask, left[0]):
                    return False
            assert matcher.accept(left.pop(0))
        return True

    def _ids(self, text: str) -> list[int]:
        return [*self.tokenizer.encode(text, add_special_tokens=False).ids, self.end]

    @staticmethod
    def _allowed(mask: np.ndarray, token: int) -> bool:
        return bool(mask[token // 32] >> (token % 32) & 1)

    def allows(self, output: str, /, **options: Any) -> bool:
        """The output is a whole answer; ``options`` are those of AnswerGrammar."""
        defaults = {"parser": Hermes, "functions": FUNCTIONS, "tokens": self.tokens}
        prompt_end = options.pop("prompt_end", "")
        grammar = AnswerGrammar(**{**defaults, **options}).build().behind(prompt_end)
        return self.follows(self.backend.compile(grammar), output)
