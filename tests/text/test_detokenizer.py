"""Incremental detokenization equals decoding at once, whatever the tokens."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from aioinfer.text.byte_level import ByteLevelDetokenizer, TokenTexts, token_texts
from aioinfer.text.detokenizer import DecodeStreamDetokenizer, Detokenizer, OffsetDetokenizer
from tests.text.byte_levels import BYTE_LEVEL
from tests.tiers import scaled

Make = Callable[[Tokenizer, list[int], bool], Detokenizer]
REPLACEMENT = "\ufffd"
FIRST_BYTE = 3


def make_stream(tokenizer: Tokenizer, prompt: list[int], skip: bool) -> Detokenizer:
    return DecodeStreamDetokenizer(tokenizer, prompt, skip_special_tokens=skip)


def make_offset(tokenizer: Tokenizer, prompt: list[int], skip: bool) -> Detokenizer:
    return OffsetDetokenizer(lambda ids: tokenizer.decode(ids, skip_special_tokens=skip), prompt)


@cache
def tables(tokenizer: Tokenizer) -> Mapping[bool, TokenTexts]:
    found = token_texts(tokenizer)
    assert found is not None
    return found


def make_look_up(tokenizer: Tokenizer, prompt: list[int], skip: bool) -> Detokenizer:
    return ByteLevelDetokenizer(tables(tokenizer)[skip], prompt)


def pieces(detokenizer: Detokenizer, ids: list[int]) -> list[str]:
    found = [*(detokenizer.push(token) for token in ids), detokenizer.finish()]
    assert detokenizer.finish() == ""
    return found


def byte_tokens(text: str) -> list[int]:
    """``text`` in the byte tokens of ``metaspace``."""
    return [FIRST_BYTE + byte for byte in text.encode()]


both = pytest.mark.parametrize("make", [make_stream, make_offset])
#: for byte-level tokenizers
each = pytest.mark.parametrize("make", [make_stream, make_offset, make_look_up])


@each
def test_every_character_comes_with_the_token_that_completes_it(byte_level: Tokenizer, make: Make) -> None:
    ids = byte_level.encode("a 𝄞日 the fox é").ids
    found = pieces(make(byte_level, [], True), ids)
    for end in range(1, len(ids) + 1):
        whole = byte_level.decode(ids[:end])
        if not whole.endswith(REPLACEMENT):
            assert "".join(found[:end]) == whole, "text was held back without need"


@each
def test_a_replacement_character_in_the_prompt_is_not_repeated(byte_level: Tokenizer, make: Make) -> None:
    prompt, output = byte_level.encode("Hello \ufffd").ids, byte_level.encode(" the").ids
    assert "".join(pieces(make(byte_level, prompt, True), output)) == " the"


@both
def test_released_text_is_final_even_if_decoding_changes_it(metaspace: Tokenizer, make: Make) -> None:
    """Byte fallback: one invalid byte turns the whole run into U+FFFD, released characters included."""
    ids = [*byte_tokens("日"), FIRST_BYTE + 0xFF, *metaspace.encode("the fox").ids]
    assert metaspace.decode(ids).startswith(REPLACEMENT * 4)
    found = pieces(make(metaspace, [], True), ids)
    assert found[2] == "日"
    assert "".join(found) == "日\ufffd the fox"


@each
def test_broken_bytes_are_not_held_back_for_ever(byte_level: Tokenizer, make: Make) -> None:
    broken = byte_level.token_to_id("ÿ")
    detokenizer = make(byte_level, [], True)
    released = sum(len(detokenizer.push(broken)) for _ in range(500))
    assert released > 480
    assert released + len(detokenizer.finish()) == 500


def test_the_slow_path_returns_to_the_fast_one(byte_level: Tokenizer) -> None:
    decoded: list[int] = []

    def decode(ids: list[int]) -> str:
        decoded.append(len(ids))
        return str(byte_level.decode(ids))

    detokenizer = DecodeStreamDetokenizer(byte_level, [], skip_special_tokens=True)
    detokenizer._decode = decode  # only the slow path calls it
    text = byte_level.encode("the quick brown fox " * 20).ids
    for token in [byte_level.token_to_id("ÿ")] * 50 + text[:5]:
        detokenizer.push(token)
    assert decoded
    decoded.clear()
    for token in text[5:]:
        detokenizer.push(token)
    assert not decoded, "one broken byte made the rest of the output slow"


@pytest.mark.parametrize("kind", ["special", "broken", "unknown"])
def test_the_cost_of_a_token_does_not_grow_with_the_output(
    byte_level: Tokenizer, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ``ignore_eos`` an output can have thousands of tokens without text."""
    token = {"special": 0, "broken": byte_level.token_to_id("ÿ"), "unknown": 10**6}[kind]
    windows = []

    class Tokenizer:
        def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
            windows.append(len(ids))
            return str(byte_level.decode(ids, skip_special_tokens=skip_special_tokens))

    slow = OffsetDetokenizer(Tokenizer().decode, byte_level.encode("the").ids)
    for _ in range(1000):
        slow.push(token)
    assert max(windows) < 50

    real = decoders.DecodeStream

    class Stream:
        """The library's, whose step costs as much as it holds back."""

        def __init__(self, ids: list[int], skip_special_tokens: bool) -> None:
            self._stream = real(ids=ids, skip_special_tokens=skip_special_tokens)
            self._held = len(ids)

        def step(self, tokenizer: Any, token_id: int) -> str | None:
            text: str | None = self._stream.step(byte_level, token_id)
            self._held = self._held + 1 if text is None else 0
            windows.append(self._held)
            return text

    windows.clear()
    monkeypatch.setattr("tokenizers.decoders.DecodeStream", Stream)
    fast = DecodeStreamDetokenizer(Tokenizer(), byte_level.encode("the").ids, skip_special_tokens=True)
    for _ in range(1000):
        fast.push(token)
    assert len(windows) >= 1000
    assert max(windows) < 50


def test_a_decoder_that_omits_incomplete_bytes_loses_no_character() -> None:
    def decode(ids: list[int]) -> str:
        return bytes(ids).decode(errors="ignore")

    # This decoder omits every lone 0x80; the next character is still whole.
    ids = list("a日𝄞é".encode()) + [0x80] * 40 + list("日".encode())
    detokenizer = OffsetDetokenizer(decode, list(b"Hello"))
    assert [text for text in pieces(detokenizer, ids) if text] == ["a", "日", "𝄞", "é", "日"]


def test_a_bad_id_raises_and_does_not_hang(byte_level: Tokenizer) -> None:
    detokenizer = DecodeStreamDetokenizer(byte_level, [], skip_special_tokens=True)
    with pytest.raises((TypeError, OverflowError)):
        detokenizer.push(-1)


# -- any tokens ---------------------------------------------------------------------------------------


def continuation(tokenizer: Tokenizer, prompt: list[int], output: list[int], skip: bool) -> str:
    """The part of the text of prompt and output that the text of the prompt does not have."""
    before = tokenizer.decode(prompt, skip_special_tokens=skip)
    whole: str = tokenizer.decode(prompt + output, skip_special_tokens=skip)
    while not whole.startswith(before):
        before = before[:-1]
    return whole.removeprefix(before)


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize(
    ("name", "make"),
    [
        *itertools.product([*BYTE_LEVEL, "byte_level"], [make_stream, make_offset, make_look_up]),
        *itertools.product(["unigram"], [make_stream, make_offset]),
    ],
)
def test_any_tokens_and_any_text_cut_anywhere(
    request: pytest.FixtureRequest, name: str, make: Make, skip: bool
) -> None:
    """Exact to the last U+FFFD, prompts that end inside a character included."""
    tokenizer = BYTE_LEVEL[name]() if name in BYTE_LEVEL else request.getfixturevalue(name)
    ids = range(tokenizer.get_vocab_size())
    broken = [token for token in ids if tokenizer.decode([token]).startswith(REPLACEMENT)]
    specials = [at for at, token in tokenizer.get_added_tokens_decoder().items() if token.special]
    some = st.one_of(st.sampled_from(ids), st.sampled_from(broken or ids), st.sampled_from(specials))
    tokens = st.lists(some, max_size=40)
    encoded = st.text(max_size=25).map(lambda text: tokenizer.encode(text).ids)

    @settings(max_examples=scaled(200), deadline=None, derandomize=True)
    @given(tokens | encoded, tokens, st.integers(0, 40))
    def run(first: list[int], then: list[int], cut: int) -> None:
        ids = first + then
        text = "".join(pieces(make(tokenizer, ids[:cut], skip), ids[cut:]))
        assert text == continuation(tokenizer, ids[:cut], ids[cut:], skip)

    run()


def flat(items: list[list[int]]) -> list[int]:
    return [token for item in items for token in item]


#: of ``metaspace``: byte tokens of whole characters, special tokens, pieces
whole_tokens = st.one_of(
    st.sampled_from("日é😀A𝄞\n").map(byte_tokens),
    st.integers(0, 2).map(lambda token: [token]),
    st.integers(FIRST_BYTE + 256, 271).map(lambda token: [token]),
)


@pytest.mark.parametrize("skip", [True, False])
@both
def test_any_characters_through_byte_fallback(metaspace: Tokenizer, make: Make, skip: bool) -> None:
    items = st.lists(whole_tokens, max_size=10)

    @settings(max_examples=scaled(200, 20), deadline=None, derandomize=True)
    @given(items, items, st.integers(0, 3))
    def run(prompt_items: list[list[int]], output_items: list[list[int]], unfinished: int) -> None:
        prompt, output = flat(prompt_items), flat(output_items)
        said = metaspace.decode(prompt, skip_special_tokens=skip)
        if prompt_items and len(prompt_items[-1]) > unfinished > 0:
            # The prompt's last character belongs to the output if the output completes it.
            prompt, output = prompt[:-unfinished], prompt[-unfinished:] + output
            said = metaspace.decode(flat(prompt_items[:-1]), skip_special_tokens=skip)
        whole = metaspace.decode(prompt + output, skip_special_tokens=skip)
        assert "".join(pieces(make(metaspace, prompt, skip), output)) == whole[len(said) :]

    run()


@both
def test_any_bytes_through_byte_fallback(metaspace: Tokenizer, make: Make) -> None:
    """The text between runs of invalid bytes is released in order, whatever the runs decode to."""

    @settings(max_examples=scaled(300, 20), deadline=None, derandomize=True)
    @given(st.lists(st.one_of(whole_tokens, st.integers(3, 258).map(lambda token: [token])), max_size=25))
    def run(items: list[list[int]]) -> None:
        output = flat(items)
        pattern = "".join(
            f"[{re.escape(text)}\ufffd]+" if broken else re.escape(text)
            for broken, text in runs(metaspace, output)
        )
        text = "".join(pieces(make(metaspace, metaspace.encode("Hello").ids, False), output))
        assert re.fullmatch(pattern, text), (pattern, text)

    run()


def runs(tokenizer: Tokenizer, ids: list[int]) -> list[tuple[bool, str]]:
    """Runs of byte tokens and of other tokens; of an invalid run, its valid characters."""
    found: list[tuple[bool, str]] = []
    at = 0
    while at < len(ids):
        end = at
        while end < len(ids) and FIRST_BYTE <= ids[end] < FIRST_BYTE + 256:
            end += 1
        if end > at:
            raw = bytes(token - FIRST_BYTE for token in ids[at:end])
            text = raw.decode(errors="replace")
            found.append((REPLACEMENT in text, text))
        else:
            end = at + 1
            piece = tokenizer.id_to_token(ids[at])
            found.append((False, piece.replace("▁", " ")))
        at = end
    return found


def test_a_decoder_with_clean_up_gives_text_and_no_error() -> None:
    """WordPiece joins " n" and "'" when the next token arrives: DecodeStream's "Invalid prefix" case."""
    vocab = {piece: at for at, piece in enumerate(["[UNK]", "do", "n", "'", "t", "##x", ".", "it"])}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=True)

    @settings(max_examples=scaled(100, 20), deadline=None, derandomize=True)
    @given(st.lists(st.integers(0, len(vocab) - 1), max_size=20))
    def run(ids: list[int]) -> None:
        text = "".join(pieces(make_stream(tokenizer, [], True), ids))
        assert text.replace(" ", "") == tokenizer.decode(ids).replace(" ", "")

    run()


@each
@pytest.mark.parametrize("skip", [True, False])
@settings(max_examples=scaled(60, 20), deadline=None)
@given(data=st.data())
def test_peek_returns_the_next_text_without_a_change(
    byte_level: Tokenizer, make: Make, skip: bool, data: st.DataObject
) -> None:
    text = st.text("a é日𝄞😀the ", max_size=8)
    prompt, ids = byte_level.encode(data.draw(text)).ids, [*byte_level.encode(data.draw(text)).ids, 0]
    at, end = sorted((data.draw(st.integers(0, len(ids))), data.draw(st.integers(0, len(ids)))))
    whole = "".join(pieces(make(byte_level, prompt, skip), ids[:end]))
    detokenizer = make(byte_level, prompt, skip)
    said = "".join(map(detokenizer.push, ids[:at]))
    assert said + detokenizer.peek(ids[at:end]) == whole
    detokenizer.peek(ids[at:end], apart=True)
    said += "".join(map(detokenizer.push, ids[at:end])) + detokenizer.finish()
    assert said == whole
