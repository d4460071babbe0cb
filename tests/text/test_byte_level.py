"""Texts by look-up are exactly what the tokenizer decodes, or they are not used."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders
from transformers import PreTrainedTokenizerFast

from aioinfer.text import byte_level as module
from aioinfer.text.byte_level import (
    ByteLevelDetokenizer,
    TokenTexts,
    record_of,
    texts_from_record,
    token_texts,
)
from aioinfer.text.detokenizer import DecodeStreamDetokenizer
from aioinfer.text.output import OutputText
from aioinfer.text.tokenizer import HFTokenizer
from tests.text.byte_levels import BUNDLED, BYTE_LEVEL, made
from tests.text.test_detokenizer import continuation
from tests.tiers import scaled

REPLACEMENT = "\ufffd"


def tables(tokenizer: Tokenizer) -> Mapping[bool, TokenTexts]:
    found = token_texts(tokenizer)
    assert found is not None, "the table of a byte-level tokenizer is not used"
    return found


# -- exact ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BYTE_LEVEL)
@pytest.mark.parametrize("skip", [True, False])
def test_the_table_says_what_a_push_appends(name: str, skip: bool) -> None:
    table = tables(BYTE_LEVEL[name]())[skip]
    token = st.integers(0, len(table.texts) + 5) | st.sampled_from(sorted(table.parts))

    @settings(max_examples=scaled(200), deadline=None, derandomize=True)
    @given(st.lists(token, max_size=8), st.lists(token, max_size=60))
    def run(prompt: list[int], output: list[int]) -> None:
        text = OutputText(ByteLevelDetokenizer(table, prompt))
        for token_id in output:
            ready = None if text.texts is None or token_id >= len(table.texts) else text.texts[token_id]
            count = len(text.pieces)
            text.push(token_id)
            if ready is not None:
                assert text.pieces[count:] == ([ready] if ready else [])
        assert all(text.pieces)

    run()


def test_the_half_of_a_surrogate_in_a_prompt_is_not_completed() -> None:
    tokenizer = made([])
    for prompt, output in (
        ([0xED, 0xA0], [0x80]),
        ([0xED], [0xA0, 0x80]),
        ([0xED, 0xA0], []),
        ([0xED], [0xA0]),
    ):
        detokenizer = ByteLevelDetokenizer(tables(tokenizer)[True], prompt)
        got = "".join(map(detokenizer.push, output)) + detokenizer.finish()
        assert got == continuation(tokenizer, prompt, output, True) == REPLACEMENT * len(output)


def test_nothing_is_looked_up_while_a_character_is_incomplete() -> None:
    table = tables(made([b"fox"]))[True]
    text = OutputText(ByteLevelDetokenizer(table, []))
    assert text.texts is table.texts
    text.push(0xC3)
    assert text.texts is None
    text.push(0xA9)
    assert text.texts is table.texts
    text.finish()
    assert text.texts is None, "nothing follows the end"
    assert text.pieces == ["é"]
    assert OutputText(ByteLevelDetokenizer(table, [0xC3])).texts is None


def test_texts_that_are_searched_are_not_looked_up() -> None:
    table = tables(made([]))[True]
    assert OutputText(ByteLevelDetokenizer(table, []), ["x"]).texts is None
    assert OutputText(ByteLevelDetokenizer(table, []), stop_regex=["x"]).texts is None
    assert OutputText(None).texts is None


def test_an_id_outside_the_vocabulary_has_no_text_and_a_negative_one_raises() -> None:
    detokenizer = ByteLevelDetokenizer(tables(made([]))[True], [])
    assert detokenizer.push(10**9) == ""
    with pytest.raises(OverflowError):
        detokenizer.push(-1)
    assert detokenizer.push(ord("a")) == "a"


def test_the_end_of_a_long_prompt_is_all_that_is_read() -> None:
    class Counting(list[int]):
        read = 0

        def __reversed__(self) -> Any:
            for token in super().__reversed__():
                self.read += 1
                yield token

    prompt = Counting([ord("a")] * 10_000 + list("日".encode())[:2])
    detokenizer = ByteLevelDetokenizer(tables(made([]))[True], prompt)
    assert detokenizer.push("日".encode()[2]) == "日"
    assert prompt.read < 10


@pytest.mark.parametrize("name", BYTE_LEVEL)
def test_tables_are_the_same_from_their_record(name: str) -> None:
    made = tables(BYTE_LEVEL[name]())
    again = texts_from_record(json.loads(json.dumps(record_of(made))))
    for skip in (True, False):
        assert (again[skip].texts, again[skip].parts) == (made[skip].texts, made[skip].parts)


# -- or not used ----------------------------------------------------------------------------------------


def test_other_decoders_have_no_table(metaspace: Tokenizer, unigram: Tokenizer) -> None:
    word_pieces = made([])
    word_pieces.decoder = decoders.WordPiece()
    stripping = made([])
    stripping.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    without = made([])
    without.decoder = None
    for other in (metaspace, unigram, word_pieces, stripping, without):
        assert token_texts(other) is None
    alone = made([])
    alone.decoder = decoders.Sequence([decoders.ByteLevel()])
    assert token_texts(alone) is not None


class Lying:
    """A byte-level tokenizer that decodes some sequences differently."""

    def __init__(self, tokenizer: Tokenizer, lies: Any) -> None:
        self._tokenizer = tokenizer
        self._lies = lies

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        text = str(self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))
        return text + "!" if self._lies(ids, text, skip_special_tokens) else text

    def decode_batch(self, batch: list[list[int]], skip_special_tokens: bool = True) -> list[str]:
        return [self.decode(ids, skip_special_tokens) for ids in batch]


@pytest.mark.parametrize(
    "lies",
    [
        lambda ids, text, skip: ids == [300],
        lambda ids, text, skip: ids == [0xE6] and not skip,
        lambda ids, text, skip: skip and 300 in ids,
        lambda ids, text, skip: REPLACEMENT * 2 in text,
        lambda *_: 1 / 0,
    ],
    ids=["one token", "a cut token", "special tokens left out", "broken bytes", "an error"],
)
def test_a_tokenizer_that_decodes_anything_else_has_no_table(lies: Any) -> None:
    tokenizer = made([b"word%d" % number for number in range(100)])
    assert token_texts(Lying(tokenizer, lambda *given: False)) is not None
    assert token_texts(Lying(tokenizer, lies)) is None


def test_checking_does_not_take_longer_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = made([])
    assert token_texts(tokenizer) is not None
    monkeypatch.setattr(module, "_MOST_SECONDS", -1.0)
    assert token_texts(tokenizer) is None


def renumbered(number: int) -> Tokenizer:
    """Two tokens, the second of which has this id."""
    state = json.loads(made([b"a", b"b"], bytes_too=False).to_str())
    state["model"]["vocab"]["b"] = number
    return Tokenizer.from_str(json.dumps(state))


def test_huge_ids_and_tokens_have_no_table() -> None:
    """Sequences of tokens are decoded to check a table: these would take the memory of the machine."""
    assert token_texts(renumbered(1 << 30)) is None
    assert token_texts(made([b"x" * 30_000])) is not None
    assert token_texts(made([b"x" * 40_000])) is None


def test_vocabularies_with_gaps_and_without_single_bytes_have_exact_tables() -> None:
    assert tables(renumbered(9))[True].texts == ["a", *[""] * 8, "b"]
    detokenizer = ByteLevelDetokenizer(tables(made([b"\xe6\x97", b"\xa5", b"a"], bytes_too=False))[True], [])
    assert [detokenizer.push(token) for token in (0, 1, 2)] == ["", "日", "a"]


PARTS = [
    b"a",
    b"\xe6\x97\xa5",
    b"\xe6",
    b"\x97",
    b"\xa5",
    b"\xed\xa0",
    b"\x80",
    b"\xf0\x9f",
    b"",
    b"\x97b",
    b"\xff",
]


@given(
    st.lists(st.integers(0, len(PARTS) - 1), max_size=8),
    st.lists(st.integers(0, len(PARTS) - 1), max_size=12),
    st.integers(0, 12),
)
@settings(max_examples=scaled(2000, 200))
def test_what_is_skipped_leaves_the_state_of_what_is_pushed(
    prompt: list[int], ids: list[int], at: int
) -> None:
    table = TokenTexts.of(PARTS)
    pushed, skipped = ByteLevelDetokenizer(table, prompt), ByteLevelDetokenizer(table, prompt)
    for token in ids[:at]:
        pushed.push(token)
    skipped.skip(ids[:at])
    assert skipped.texts is pushed.texts
    assert skipped.peek([]) == pushed.peek([])
    for token in ids[at:]:
        assert skipped.push(token) == pushed.push(token)
    assert skipped.finish() == pushed.finish()


# -- of a model -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", BUNDLED, ids=[path.name for path in BUNDLED])
def test_bundled_models_look_their_texts_up(path: Path) -> None:
    tokenizer = HFTokenizer.load(path)
    for skip in (True, False):
        prompt, output = tokenizer.encode("Once 😀")[:-1], tokenizer.encode("upon a time, 日本 <|end|>")
        detokenizer = tokenizer.detokenizer(prompt, skip_special_tokens=skip)
        assert isinstance(detokenizer, ByteLevelDetokenizer)
        text = "".join(map(detokenizer.push, output)) + detokenizer.finish()
        assert text == continuation(BYTE_LEVEL[path.name](), prompt, output, skip)


def test_other_models_decode_step_by_step(metaspace: Tokenizer, unigram: Tokenizer) -> None:
    for other in (metaspace, unigram):
        tokenizer = HFTokenizer(PreTrainedTokenizerFast(tokenizer_object=other, eos_token="</s>"))
        detokenizer = tokenizer.detokenizer([], skip_special_tokens=True)
        assert isinstance(detokenizer, DecodeStreamDetokenizer)
        output = OutputText(detokenizer)
        assert output.texts is None
        ids = other.encode("Hello world").ids
        for token in ids:
            output.push(token)
        output.finish()
        assert output.text == tokenizer.decode(ids) == "Hello world"
