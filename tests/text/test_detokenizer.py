"""Incremental detokenization equals decoding at once, whatever the tokens."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from aioinfer.text.detokenizer import DecodeStreamDetokenizer, Detokenizer, OffsetDetokenizer

Make = Callable[[Tokenizer, list[int], bool], Detokenizer]


def make_stream(tokenizer: Tokenizer, prompt: list[int], skip: bool) -> Detokenizer:
    return DecodeStreamDetokenizer(tokenizer, prompt, skip_special_tokens=skip)


def make_offset(tokenizer: Tokenizer, prompt: list[int], skip: bool) -> Detokenizer:
    return OffsetDetokenizer(lambda ids: tokenizer.decode(ids, skip_special_tokens=skip), prompt)


def pieces(detokenizer: Detokenizer, ids: list[int]) -> list[str]:
    return [*(detokenizer.push(token) for token in ids), detokenizer.finish()]


both = pytest.mark.parametrize("make", [make_stream, make_offset])


@both
def test_a_character_split_over_tokens_comes_out_whole(byte_level: Tokenizer, make: Make) -> None:
    ids = byte_level.encode("🦜").ids
    assert len(ids) > 1
    assert pieces(make(byte_level, [], True), ids) == [""] * (len(ids) - 1) + ["🦜", ""]


@both
def test_a_character_never_completed_is_replaced_at_the_end(byte_level: Tokenizer, make: Make) -> None:
    ids = byte_level.encode("ok🦜").ids[:-1]
    assert "".join(pieces(make(byte_level, [], True), ids)) == byte_level.decode(ids)
    assert byte_level.decode(ids).endswith("\ufffd")


@both
def test_a_continuation_keeps_its_leading_space(metaspace: Tokenizer, make: Make) -> None:
    prompt, output = metaspace.encode("Hello").ids, metaspace.encode("world").ids
    assert "".join(pieces(make(metaspace, prompt, True), output)) == " world"


@both
@pytest.mark.parametrize("skip", [True, False])
def test_special_tokens_are_left_out_or_kept(byte_level: Tokenizer, make: Make, skip: bool) -> None:
    ids = [*byte_level.encode("the").ids, 1, *byte_level.encode(" fox").ids, 0]
    text = "".join(pieces(make(byte_level, [], skip), ids))
    assert text == ("the fox" if skip else "the<|user|> fox<|end|>")


def test_a_prompt_ending_inside_a_character_is_not_said_again(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("Hello 🦜 there").ids
    cut = next(at for at in range(len(ids)) if byte_level.decode(ids[:at]).endswith("\ufffd"))
    text = "".join(pieces(make_stream(byte_level, ids[:cut], True), ids[cut:]))
    assert "Hello" not in text
    assert text.endswith(" there")


def check(tokenizer: Tokenizer, make: Make, prompt: list[int], output: list[int], skip: bool) -> None:
    before = tokenizer.decode(prompt, skip_special_tokens=skip)
    whole = tokenizer.decode(prompt + output, skip_special_tokens=skip)
    if before.endswith("\ufffd") or not whole.startswith(before):
        prompt, before = [], ""
        whole = tokenizer.decode(output, skip_special_tokens=skip)
    got = "".join(pieces(make(tokenizer, prompt, skip), output))
    wanted = whole[len(before) :]
    # How many replacement characters stand for a run of broken bytes depends on the window a decoder
    # sees; readable text may not.
    assert got.replace("\ufffd", "") == wanted.replace("\ufffd", "")
    if "\ufffd" not in wanted:
        assert got == wanted


@pytest.mark.parametrize("skip", [True, False])
@both
def test_any_bytes_in_any_order(byte_level: Tokenizer, make: Make, skip: bool) -> None:
    tokens = st.lists(st.integers(0, byte_level.get_vocab_size() - 1), max_size=30)

    @settings(max_examples=200, deadline=None, derandomize=True)
    @given(prompt=tokens, output=tokens)
    def run(prompt: list[int], output: list[int]) -> None:
        check(byte_level, make, prompt[:8], output, skip)

    run()


@both
def test_any_text_through_byte_fallback(metaspace: Tokenizer, make: Make) -> None:
    """Whole characters only: of broken ones this decoder makes, in hindsight, something else."""
    texts = st.text(alphabet="Helo é,ab日本😀 ", max_size=12)

    @settings(max_examples=200, deadline=None, derandomize=True)
    @given(prompt=texts, output=texts)
    def run(prompt: str, output: str) -> None:
        check(metaspace, make, metaspace.encode(prompt).ids, metaspace.encode(output).ids, True)

    run()
