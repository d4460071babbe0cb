"""Compiled grammars are kept in a bounded number of bytes, also when their states grow."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from aioinfer.errors import InvalidRequest
from aioinfer.ledger import LEDGER
from aioinfer.text import grammar as grammars
from aioinfer.text.grammar import Compiled, Compiler, Matcher
from aioinfer.text.grammar_spec import Grammar
from tests.text.vocabulary import Vocabulary

MIB = 1 << 20


class Weight:
    """A compiled grammar that says what it takes."""

    stopped, error = False, None

    def __init__(self, size: int) -> None:
        self.size, self.grown = size, 0

    def accept(self, token: int) -> bool:
        return True

    def forced(self) -> list[int]:
        return []

    def copy(self) -> Weight:
        return self


class Backend:
    """Grammars that take as many MiB as they say."""

    def __init__(self) -> None:
        self.compiled: list[str] = []

    def compile(self, grammar: Grammar) -> Compiled:
        self.compiled.append(grammar.text)
        if grammar.text == "broken":
            raise RuntimeError("broken")
        if not grammar.text[0].isdigit():
            raise InvalidRequest("grammar", "is no number")
        return Weight(int(grammar.text.split()[0]) * MIB)

    def fill(self, matchers: Sequence[Matcher], masks: Sequence[Any]) -> None:
        raise AssertionError


def asked(compiler: Compiler, *texts: str) -> list[str]:
    """Those that were compiled for it."""
    assert isinstance(compiler.backend, Backend)
    before = len(compiler.backend.compiled)
    for text in texts:
        compiler.matcher(Grammar("regex", text))
    return compiler.backend.compiled[before:]


def test_few_large_grammars_or_many_small_ones_are_kept() -> None:
    compiler = Compiler(Backend())
    assert asked(compiler, "25 a", "25 b", "25 a", "25 b") == ["25 a", "25 b"]
    assert asked(compiler, "25 c", "25 c") == ["25 c"]
    assert asked(compiler, "25 b", "25 a") == ["25 a"]
    small = [f"1 {at}" for at in range(60)]
    assert asked(compiler, *small, *small) == small
    taken = LEDGER.entries()["grammars"]
    assert taken.taken <= (taken.bound or 0)


def test_what_is_larger_than_all_is_compiled_each_time() -> None:
    compiler = Compiler(Backend())
    assert asked(compiler, "1 small", "1000", "1000", "1 small") == ["1 small", "1000", "1000"]


def test_what_grows_in_use_counts_as_what_it_has_become() -> None:
    compiler = Compiler(Backend())
    first = compiler.matcher(Grammar("regex", "30 a"))
    assert isinstance(first, Weight)
    assert asked(compiler, "30 b") == ["30 b"]
    first.grown = 5 * MIB
    assert asked(compiler, "30 a") == []
    assert asked(compiler, "30 b") == ["30 b"]  # both are too large by now
    first = compiler.matcher(Grammar("regex", "30 b"))
    assert isinstance(first, Weight)
    first.grown = grammars._MOST_GROWN + 1
    assert asked(compiler, "30 b", "30 b") == ["30 b"]


def test_refusals_are_kept_and_errors_are_not() -> None:
    compiler = Compiler(Backend())
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="is no number"):
            asked(compiler, "x")
        with pytest.raises(RuntimeError):
            asked(compiler, "broken")
    assert isinstance(compiler.backend, Backend)
    assert compiler.backend.compiled == ["x", "broken", "broken"]
    compiler.forget(Grammar("regex", "x"))
    with pytest.raises(InvalidRequest):
        asked(compiler, "x")
    assert len(compiler.backend.compiled) == 4


def test_threads_that_ask_at_a_time_wait_for_one_compilation() -> None:
    backend = Backend()
    gate, begun, plain = threading.Event(), threading.Event(), backend.compile

    def compile_(grammar: Grammar) -> Compiled:
        begun.set()
        assert gate.wait(60)
        return plain(grammar)

    backend.compile = compile_  # type: ignore[method-assign]
    compiler = Compiler(backend)
    threads = [threading.Thread(target=asked, args=(compiler, "1")) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert begun.wait(60)
    gate.set()
    for thread in threads:
        thread.join()
    assert backend.compiled == ["1"]


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary()


PAIRS = [[{"properties": {f"{side}{at}": {"type": "integer"}}} for side in "ab"] for at in range(8)]
RANGES = {f"p{at}": {"minimum": at + 0.12345, "maximum": 7654.321 * at} for at in range(500)}
VALUES = [f"v{at * 7919}" for at in range(30_000)]


@pytest.mark.parametrize(
    ("kind", "source", "least"),
    [
        ("json_schema", {"allOf": [{"anyOf": each} for each in PAIRS]}, 7),
        ("json_schema", {"type": "integer", "multipleOf": 99_991}, 30),
        ("json_schema", {"enum": VALUES}, 14),
        ("choice", VALUES, 30),
        ("lark", "start: " + " ".join(f"a{{{at},1000}}" for at in range(500)) + '\na: "x"', 8),
        ("json_schema", {"properties": RANGES}, 11),
    ],
)
def test_what_takes_much_is_said_to(vocabulary: Vocabulary, kind: Any, source: Any, least: int) -> None:
    text = source if isinstance(source, str) else json.dumps(source)
    assert least * MIB < vocabulary.backend.compile(Grammar(kind, text)).size < 20 * least * MIB


def test_new_states_count_for_all_copies(vocabulary: Vocabulary) -> None:
    compiled = vocabulary.backend.compile(Grammar("regex", "(.{0,100}a){0,100}"))
    assert compiled.grown == 0
    mask = np.zeros(-(-vocabulary.size // 32), np.int32)
    for token in (vocabulary.tokenizer.encode(word).ids[0] for word in ("b", "c", "d")):
        matcher = compiled.copy()
        before = compiled.grown
        assert matcher.accept(token)
        vocabulary.backend.fill([matcher, matcher.copy()], [mask, mask.copy()])
        assert compiled.grown > before
