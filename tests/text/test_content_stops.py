"""Stops end an answer in its content only, however the text is split."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from aioinfer.errors import InvalidRequest
from aioinfer.params import SamplingParams
from aioinfer.resuming.params_record import params_of, record_of
from aioinfer.text.content_stops import ContentStops
from aioinfer.text.output import OutputText
from aioinfer.text.reader import AnswerReader
from aioinfer.text.stop import StopMatcher
from aioinfer.text.stop_regex import StopRegex
from tests.text.call_formats import FORMATS
from tests.tiers import scaled


class Pieces:
    """A detokenizer whose tokens are pieces of a text."""

    def __init__(self, pieces: list[str], tail: str = "") -> None:
        self._pieces = pieces
        self._tail = tail

    def push(self, token_id: int) -> str:
        return self._pieces[token_id]

    def peek(self, token_ids: Any, *, apart: bool = False) -> str:
        return ""

    def finish(self) -> str:
        tail, self._tail = self._tail, ""
        return tail


HERMES = '<tool_call>\n{"name": "f", "arguments": {"a": "stop"}}\n</tool_call>'
CODER = "<tool_call>\n<function=f>\n<parameter=a>\nstop\n</parameter>\n</function>\n</tool_call>"
LLAMA = '{"name": "f", "parameters": {"a": "stop"}}'
BARE = CODER.removeprefix("<tool_call>\n")
FINAL = "<|channel|>analysis<|message|>I stop.<|end|><|start|>assistant<|channel|>final<|message|>4 stop 5"

#: formats of calls and reasoning, the end of the prompt, a text, and its part before the stop
CASES: dict[str, tuple[tuple[str | None, str | None], str, str, str | None]] = {
    "no thought": ((None, "qwen3"), "", "a stop b", "a "),
    "in a thought": ((None, "qwen3"), "", "<think>stop</think>\n\n4 stop 5", "<think>stop</think>\n\n4 "),
    "only in a thought": ((None, "qwen3"), "", "<think>stop</think>\n\n4", None),
    "in a thought of the prompt": ((None, "qwen3"), "<think>\n", "stop</think>4 stop", "stop</think>4 "),
    "the prompt closed it": ((None, "qwen3"), "<think>\n\n</think>\n\n", "a stop b", "a "),
    "a thought from the start": ((None, "deepseek-r1"), "", "stop</think>4 stop", "stop</think>4 "),
    "in a second thought": (
        (None, "qwen3"),
        "",
        "<think>a</think>b<think>stop</think>c stop",
        "<think>a</think>b<think>stop</think>c ",
    ),
    "between thoughts": ((None, "qwen3"), "", "<think>a</think>b stop<think>c", "<think>a</think>b "),
    "in a thought that is cut": ((None, "qwen3"), "", "<think>stop", None),
    "in arguments": (("hermes", None), "", f"a{HERMES}b", None),
    "before a call": (("hermes", "qwen3"), "", f"a stop {HERMES}", "a "),
    "behind a call": (("hermes", "qwen3"), "", f"{HERMES}\na stop", f"{HERMES}\na "),
    "in a thought and arguments": (("hermes", "qwen3"), "", f"<think>stop</think>{HERMES}", None),
    "in a value": (("qwen3-coder", "qwen3"), "", f"<think>stop</think>{CODER}", None),
    "in a call without its opening tag": (("qwen3-coder", "qwen3"), "", BARE, None),
    "what could have been a tag": (("hermes", "qwen3"), "", "a <tool stop <thi", "a <tool "),
    "in the analysis": (("harmony", "harmony"), "", FINAL, FINAL[: FINAL.rindex("stop")]),
    "between calls": (("hermes", None), "", f"{HERMES}\n{HERMES}", None),
    "in a call amid text": (("llama3", None), "", f"a {LLAMA} stop", f"a {LLAMA} "),
    "in brackets": ((None, "mistral"), "", "[THINK]stop[/THINK]4 stop", "[THINK]stop[/THINK]4 "),
    "in a channel": (
        (None, "gemma4"),
        "",
        "<|channel>thought\nstop<channel|>4 stop",
        "<|channel>thought\nstop<channel|>4 ",
    ),
}


def output(
    names: tuple[str | None, str | None], prompt_end: str, pieces: list[str], tail: str = "", **stops: Any
) -> tuple[str, str | None]:
    """The text, and the stop."""
    answer = AnswerReader.named((*names, None, "f", "g"), prompt_end)
    found = OutputText(Pieces(pieces, tail), answer=answer, **{"stop": ["stop"], **stops})
    for at in range(len(pieces)):
        if (stop := found.push(at)) is not None:
            return found.text, stop
    stop = found.finish()
    return found.text, stop


def cuts(text: str, seed: int) -> list[list[str]]:
    """The text in one, in characters, and at random."""
    dice = random.Random(seed)
    several = []
    for _ in range(scaled(10)):
        places = sorted(dice.sample(range(len(text) + 1), min(len(text), 4)))
        several.append([text[a:b] for a, b in itertools.pairwise([0, *places, len(text)])])
    return [[text], list(text), *several]


@pytest.mark.parametrize("stops", [{"stop": ["stop"]}, {"stop": (), "stop_regex": ["st[o]p"]}],
                         ids=["string", "pattern"])  # fmt: skip
@pytest.mark.parametrize("name", CASES)
def test_a_stop_acts_on_the_content(name: str, stops: Any) -> None:
    names, prompt_end, text, before = CASES[name]
    stop = [*stops["stop"], *stops.get("stop_regex", ())][0]
    for pieces in cuts(text, len(name)):
        found = output(names, prompt_end, pieces, **stops)
        assert found == ((text, None) if before is None else (before, stop)), pieces
        kept = output(names, prompt_end, pieces, **stops, include_stop=True)
        assert kept[0] == (text if before is None else f"{before}stop"), pieces


@pytest.mark.parametrize("name", FORMATS)
def test_calls_of_every_format_may_contain_a_stop(name: str) -> None:
    form = FORMATS[name]
    calls = [form.tell(function, {"text": "stop, stop"}) for function in "fg"]
    text = form.begin + form.between.join(calls) + form.end
    reasoning = "harmony" if name == "harmony" else "qwen3"
    for stop in ("stop", "top", '"', ":", "st"):
        for pieces in cuts(text, len(name)):
            assert output((name, reasoning), "", pieces, stop=[stop]) == (text, None), (stop, pieces)


def test_no_match_spans_a_tag() -> None:
    """Neither from a thought into the content, nor around a call."""
    text = "<think>ab</think>cd"
    for stop in ("b</think>c", "bc", "</think>", ">c", "hink"):
        for pieces in cuts(text, 1):
            assert output((None, "qwen3"), "", pieces, stop=[stop]) == (text, None)
    text = f"ab{HERMES}cd"
    for stop in ("bc", f"b{HERMES[:3]}", ">cd", "tool"):
        for pieces in cuts(text, 1):
            assert output(("hermes", None), "", pieces, stop=[stop]) == (text, None)


def test_line_breaks_around_calls_and_thoughts_are_no_content() -> None:
    text = f"\n\n<think>a</think>\n\n{HERMES}\n\n{HERMES}\n\n\na\n\n{HERMES}b"
    for stop in ("\n", "\n\n"):
        for pieces in cuts(text, 4):
            assert output(("hermes", "qwen3"), "", pieces, stop=[stop]) == (text, None)
            lines = [*pieces, f"b{stop}", "c"]
            assert output(("hermes", "qwen3"), "", lines, stop=[stop]) == (f"{text}b", stop)
            assert output(("hermes", "qwen3"), "", lines[:-1], stop=[stop]) == (f"{text}b", stop)


def test_what_may_begin_a_tag_is_content_at_the_end() -> None:
    for text, stop, before in (("a <thi", "<t", "a "), ("a <", "<", "a "), ("a <x", "<", "a ")):
        for pieces in cuts(text, 2):
            assert output(("hermes", "qwen3"), "", pieces, stop=[stop]) == (before, stop)
            assert output(("hermes", "qwen3"), "", pieces[:-1], pieces[-1], stop=[stop]) == (before, stop)


def test_without_a_stop_all_text_is_released_as_it_is() -> None:
    for _, (names, prompt_end, text, _) in CASES.items():
        for pieces in cuts(text, 3):
            assert output(names, prompt_end, pieces, stop=["never"]) == (text, None)
            assert output(names, prompt_end, pieces, stop=[text[-1] + "x"]) == (text, None)


def test_what_cannot_become_a_stop_is_not_held_back() -> None:
    stops = ContentStops(lambda: StopMatcher(["stop"]), AnswerReader.named(("hermes", "qwen3", None)))
    released = [
        stops.push(each)[0] for each in ("<think>s", "top</think>", "s", "a", "<", "b", "<tool_call>")
    ]
    assert released == ["<think>s", "top</think>", "", "sa", "", "<b", "<tool_call>"]
    assert stops.push("<t")[0] == "<t"[:0]
    assert stops.held == "<t"


def test_patterns_begin_anew_in_each_part_of_the_content() -> None:
    answer = AnswerReader.named((None, "qwen3", None))
    stops = ContentStops(lambda: StopRegex(["ab+c"]), answer)
    assert stops.push("ab<think>c</think>bc abbc") == ("ab<think>c</think>bc ", "ab+c")
    assert stops.matched == "abbc"


def test_the_names_are_those_of_formats_and_kept_in_records() -> None:
    params = SamplingParams(stop="a", stop_format=["hermes", None, "<think>", "f", "g"])
    assert params_of(record_of(params)) == params
    with pytest.raises(InvalidRequest) as refused:
        AnswerReader.named(("hermes", "none such", None))
    assert refused.value.field == "stop_format"
    wrongs: list[Any] = ["hermes", ["hermes"], [1, None, None], [None] * 4, {"a": 1}]
    for wrong in wrongs:
        with pytest.raises(InvalidRequest) as refused:
            SamplingParams(stop_format=wrong)
        assert refused.value.field == "stop_format"


@pytest.mark.parametrize("name", CASES)
def test_a_stop_of_the_first_tokens_is_content(name: str) -> None:
    names, prompt_end, text, _ = CASES[name]
    for pieces in cuts(text, len(name)):
        assert output(names, prompt_end, pieces, min_tokens=len(pieces)) == (text, None), pieces
