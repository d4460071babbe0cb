"""StopRegex, against a search of the whole text after every piece; bounded time and space."""

from __future__ import annotations

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from aioinfer.errors import InvalidRequest
from aioinfer.params import SamplingParams
from aioinfer.text import stop_regex
from aioinfer.text.stop import StopMatcher, TooSlow
from aioinfer.text.stop_regex import StopRegex, check_pattern
from tests.tiers import SECONDS, rest, scaled

PATTERNS = [
    "ab", "a+b", "a[ab]{2}c", "(?:ab|b)c", "a.*c", "c$", "^ba", "^c", r"\bc", "a(?!b)", "a(?=bc)", "(?<=a)c",
    "(?>a|ab)c", "(a|b)\\1c", "a++b", "b{2,3}a", "(?i)A B", "a\\nb", "(?m)^b", "[^ab]{2}", "x",
]  # fmt: skip


def naive(patterns: list[str], chunks: list[str]) -> tuple[str, str | None]:
    """Search the whole text after each chunk; the earliest end wins, then the earliest beginning."""
    seen = ""
    for chunk in chunks:
        seen += chunk
        found = [(match, source) for source in patterns if (match := regex.search(source, seen)) is not None]
        if found:
            match, source = min(found, key=lambda pair: (pair[0].end(), pair[0].start()))
            return seen[: match.start()], source
    return seen, None


@rest(SECONDS)
@settings(max_examples=scaled(1500), deadline=None, derandomize=True)
@given(
    patterns=st.lists(st.sampled_from(PATTERNS), min_size=1, max_size=3),
    chunks=st.lists(st.text("abc \n", min_size=1, max_size=5), max_size=10),
)
def test_pieces_match_like_a_search_of_the_whole_text(patterns: list[str], chunks: list[str]) -> None:
    matcher = StopRegex(patterns)
    released, hit, seen = "", None, ""
    for chunk in chunks:
        seen += chunk
        safe, hit = matcher.push(chunk)
        released += safe
        assert seen.startswith(released)
        if hit is not None:
            break
    assert matcher.push("more")[0] == "" or hit is None
    if hit is None:
        matcher = StopRegex(patterns)
        released = "".join(matcher.push(chunk)[0] for chunk in chunks) + matcher.flush()
    assert (released, hit) == naive(patterns, chunks)
    assert matcher.flush() == ""


@settings(max_examples=scaled(300), deadline=None, derandomize=True)
@given(
    stops=st.lists(st.text("ab.$", min_size=1, max_size=4), min_size=1, max_size=4),
    chunks=st.lists(st.text("abc.$", min_size=1, max_size=5), max_size=10),
)
def test_stop_strings_match_with_and_without_patterns(stops: list[str], chunks: list[str]) -> None:
    alone, beside = StopMatcher(stops), StopRegex(["zzz"], stops)
    for chunk in chunks:
        found, wanted = beside.push(chunk), alone.push(chunk)
        assert found == wanted
        assert beside.matched == alone.matched
    assert alone.flush() == beside.flush()


def test_only_a_possible_prefix_of_a_match_is_held_back() -> None:
    matcher = StopRegex([r"<end\d+>", "\n\nQ"])
    assert matcher.push("one <") == ("one ", None)
    assert matcher.push("two") == ("<two", None)
    assert matcher.push("<end12") == ("", None)
    assert matcher.push("x\n\n") == ("<end12x", None)
    assert matcher.push("A<end1") == ("\n\nA", None)
    assert matcher.push("7>!") == ("", r"<end\d+>")
    assert matcher.matched == "<end17>"


@rest(SECONDS)
def test_held_and_searched_text_are_bounded() -> None:
    matcher = StopRegex(["a.*b"])
    released = "".join(matcher.push("a" * 10)[0] for _ in range(1000))
    assert len(released) == 10_000 - 512
    assert len(matcher._buffer) <= 512 + 64
    # The text before the window is released, so the match begins inside the window.
    assert matcher.push("b")[1] == "a.*b"
    assert len(matcher.matched) == 513
    # Released text is still context: ``^`` does not match behind it.
    matcher = StopRegex(["^x", "(?<=yz)!"])
    for _ in range(100):
        assert matcher.push("yzx" * 10) == ("yzx" * 10, None)
    assert matcher.push("yz") == ("yz", None)
    assert matcher.push("!") == ("", "(?<=yz)!")


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("(a+)+$", "a" * 999 + "!"),
        ("(a|aa)+$", "a" * 999 + "!"),
        ("(.*a){20}b", "a" * 999),
        ("(?:foo){e<=5}bar", "a" * 999),
        ("(?P<x>a(?&x)?b)+", "a" * 999),
    ],
)
def test_a_catastrophic_pattern_ends_in_an_error(pattern: str, text: str) -> None:
    with pytest.raises(TooSlow, match="takes too long"):
        StopRegex(["fine", pattern]).push(text)


def test_cpu_time_of_other_threads_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library counts the CPU time of the process: other threads make its timeout expire early."""
    given: list[float] = []

    class Hasty:
        flags = 0

        def search(self, text: str, pos: int = 0, partial: bool = False, timeout: float = 0.0) -> None:
            given.append(timeout)
            if len(given) < 6:
                raise TimeoutError

    monkeypatch.setattr(stop_regex, "check_pattern", lambda source: Hasty())
    monkeypatch.setattr(stop_regex.time, "thread_time", lambda: 7.0)
    assert StopRegex(["slow"]).push("text") == ("text", None)
    assert given == [0.005 * 2**at for at in range(6)]


REFUSED = {
    "malformed": "(",
    "no such name": r"\L<x>",
    "empty text": "a*",
    "end alone": "$",
    "backwards": "(?r)ab",
    "endless": "(?R)",
    "bomb of counts": "((((a?){99}){99}){99}){99}b",
    "bomb in the open": "(?x) (?:a?) # [\n {99} {99} {99} b",
    "bomb of pluses": "(?:" * 60 + "a?" + ")+" * 60 + "b",
    "one large count": "(?:a|b?){1000000}c",
    "folded sets": r"(?if)[\p{L}\p{N}]{2000}z",
    "folded sets by default": r"(?V1i)[\p{L}\p{N}]{2000}z",
    "folded sets well hidden": "(?x)(?i#:\nf)[\\p{L}\\p{N}]{2000}z",
    "a larger count": "a{" + "9" * 300 + "}",
}


@pytest.mark.parametrize("name", REFUSED)
def test_malformed_and_too_large_patterns_are_refused(name: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  (the reasons differ)
        check_pattern(REFUSED[name])
    with pytest.raises(InvalidRequest, match="stop_regex"):
        SamplingParams(stop_regex=REFUSED[name])


def test_parameters_take_one_pattern_or_a_few() -> None:
    assert SamplingParams(stop_regex="a+b").stop_regex == ("a+b",)
    ordinary = [
        r"(?if)stra[\xdfs]{1,2}e",
        "\n\n+",
        r"\d{3}-\d{4}",
        r"(?:\d{1,3}\.){3}\d{1,3}",
        r"```\s*$",
        ".{0,200}foo.{0,200}x",
    ]
    assert SamplingParams(stop_regex=ordinary).stop_regex == tuple(ordinary)
    for bad in (["a"] * 9, "a" * 513, [""], [1], 7, {"a": 1}):
        with pytest.raises(InvalidRequest, match="stop_regex"):
            SamplingParams(stop_regex=bad)  # type: ignore[arg-type]
