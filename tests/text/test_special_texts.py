"""Special tokens written out in a grammar are text: no token stands for them."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from aioinfer.text.grammar_spec import Grammar
from aioinfer.text.text_template import TextTemplate
from tests.text.vocabulary import Vocabulary

_GRAMMARS: list[tuple[Any, str, str]] = [
    ("choice", '["a <|user|> b"]', "a <|user|> b"),
    ("regex", r"a <\|user\|> b", "a <|user|> b"),
    ("lark", 'start: "a <|" "user|> b"', "a <|user|> b"),
    ("json_schema", '{"const": "a<|user|>"}', '"a<|user|>"'),
    ("json_schema", '{"enum": ["\\u003c|user|\\u003e"]}', '"<|user|>"'),
    ("template", TextTemplate.of("<|over|>{x}", {"x": ["<|user|> b"]}).grammar().text, "<|over|><|user|> b"),
]


@functools.cache
def vocabulary() -> Vocabulary:
    return Vocabulary()


@pytest.mark.parametrize(("kind", "source", "text"), _GRAMMARS)
def test_special_tokens_in_a_grammar_are_text(kind: Any, source: str, text: str) -> None:
    known = vocabulary()
    matcher: Any = known.backend.compile(Grammar(kind, source)).copy()
    mask, written = np.zeros(-(-known.size // 32), np.int32), list[int]()
    while not matcher.stopped:
        known.backend.fill([matcher], [mask])
        allowed = [token for token in range(known.size) if mask[token // 32] >> token % 32 & 1]
        for token in matcher.forced() or allowed[-1:]:
            assert matcher.accept(token)
            written.append(token)
    if written[-1] == known.end:
        written.pop()
    assert known.tokenizer.decode(written, skip_special_tokens=True) == text
