"""Stop strings: the earliest end wins, no prefix leaks, nothing is held back for longer than needed."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioinfer.text.output import OutputText
from aioinfer.text.stop import StopMatcher
from aioinfer.twin import ToyTokenizer


def naive(stops: list[str], text: str) -> tuple[str, str | None]:
    """Text before the match that ends first (the longest of equals), and the match."""
    for end in range(1, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            stop = max(hits, key=len)
            return text[: end - len(stop)], stop
    return text, None


@settings(max_examples=500, deadline=None, derandomize=True)
@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4),
    chunks=st.lists(st.text("abc", max_size=5), max_size=10),
)
def test_any_chunking_gives_what_the_whole_text_gives(stops: list[str], chunks: list[str]) -> None:
    matcher = StopMatcher(stops)
    released, hit, seen = "", None, ""
    for chunk in chunks:
        seen += chunk
        safe, hit = matcher.push(chunk)
        released += safe
        if hit is not None:
            break
        held = seen[len(released) :]
        assert any(stop.startswith(held) for stop in stops), "held back what no stop can begin with"
        assert not any(
            stop.startswith(seen[at:]) for at in range(len(released)) for stop in stops if seen[at:]
        )
    if hit is None:
        released += matcher.flush()
    assert (released, hit) == naive(stops, "".join(chunks))


def test_only_a_suffix_that_can_still_match_is_held_back() -> None:
    matcher = StopMatcher(["<end>"])
    assert matcher.push("one <") == ("one ", None)
    assert matcher.push("two") == ("<two", None)
    assert matcher.push("<en") == ("", None)
    assert matcher.push("d>x") == ("", "<end>")


def toy_output(ids: list[int], stop: list[str], include_stop: bool = False) -> tuple[str, str | None]:
    tokenizer = ToyTokenizer()
    output = OutputText(tokenizer.detokenizer([], skip_special_tokens=True), stop, include_stop)
    for token in ids:
        hit = output.push(token)
        if hit is not None:
            assert output.push(5) is None, "nothing comes after a stop"
            output.finish()
            return output.text, hit
    output.finish()
    output.finish()
    return output.text, None


@pytest.mark.parametrize(("include", "text"), [(False, "b"), (True, "bcd")])
def test_the_stop_is_cut_or_kept(include: bool, text: str) -> None:
    assert toy_output([1, 2, 3, 4], ["cd"], include) == (text, "cd")


def test_held_back_text_is_released_at_the_end() -> None:
    assert toy_output([1, 2], ["cd"]) == ("bc", None)


def test_without_a_tokenizer_there_is_no_text() -> None:
    output = OutputText(None)
    assert output.push(1) is None
    output.finish()
    assert output.text == ""
    assert not output.enabled
