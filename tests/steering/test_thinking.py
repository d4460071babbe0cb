"""The budget of thought, alone: which tokens it forces, for every format of reasoning."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from aioinfer.chat.answers import ChatFormat
from aioinfer.errors import InvalidRequest
from aioinfer.loop.thinking import ready_processors
from aioinfer.params import Grammar, SamplingParams
from aioinfer.resuming.params_record import params_of, record_of
from aioinfer.steering.thinking import ThinkingBudget
from aioinfer.text.harmony import CHANNEL, START
from aioinfer.text.reader import AnswerReader
from aioinfer.text.reasoning import REASONING_PARSERS, Gemma4, Harmony, Qwen3, ReasoningParser
from tests.steering.pieces import WORDS, PieceTokenizer, written

NOTHING = np.zeros(0, np.int64), np.zeros(0, np.float32)
TOKENIZER = PieceTokenizer()
#: tags are spelled, as in models without tokens for them
SPELLED = PieceTokenizer(WORDS)
BETWEEN = {"harmony": "<|start|>assistant<|channel|>final<|message|>"}
every_format = pytest.mark.parametrize("name", REASONING_PARSERS)


def opening_of(form: type[ReasoningParser]) -> str:
    return form.opening + (f"{form.header}\n" if form.header else "")


def budget(
    form: type[ReasoningParser], tokens: int, tokenizer: PieceTokenizer = TOKENIZER, **more: object
) -> ThinkingBudget:
    return ThinkingBudget(form, tokenizer, tokens, **more)  # type: ignore[arg-type]


def oracle(name: str, script: Sequence[int], most: int, opened: bool, tokenizer: PieceTokenizer) -> list[int]:
    """The output, by a walk over whole tags: where thoughts of the script begin and end is known there."""
    form = REASONING_PARSERS[name]
    opening, closing = tokenizer.encode_part(opening_of(form)), tokenizer.encode_part(form.closing)
    again = tokenizer.encode_part(form.opening)
    output: list[int] = []
    spent, within, quoted, at, blank = 0, opened, False, 0, True
    before = 0
    while True:
        if within and spent >= most:
            output, within = output + closing, False
        if at == len(script):
            return output
        if within and form is Harmony and tokenizer.pieces[script[at]] in (CHANNEL, START):
            within = False  # another message begins
        elif within and script[at : at + 1] == closing:
            output, within, at = output + closing, False, at + len(closing)
        elif within and blank and script[at : at + 1] == again:
            output, spent, at = output + again, before, at + 1
        elif not within and not quoted and script[at : at + len(opening)] == opening:
            output, within, blank, at, before = output + opening, True, True, at + len(opening), spent
        else:
            token, at = script[at], at + 1
            output.append(token)
            if within:
                blank = blank and not tokenizer.pieces[token].strip()
                spent += 1
            elif form is not Harmony:
                quoted ^= tokenizer.pieces[token] == "`"


@every_format
def test_every_thought_has_the_tokens_of_the_budget_or_fewer(name: str) -> None:
    """Scripts of random tags and words, with thoughts opened by the prompt and by the output."""
    form, draw = REASONING_PARSERS[name], random.Random(name)
    opening, closing = TOKENIZER.encode_part(opening_of(form)), TOKENIZER.encode_part(form.closing)
    words = [TOKENIZER.encode_part(each) for each in ("hm", " so", ".", "\n", "`", BETWEEN.get(name, "x"))]
    for _ in range(400):
        parts = [draw.choice([opening, closing, *words]) for _ in range(draw.randrange(24))]
        script = [each for part in parts for each in part]
        most, opened = draw.randrange(6), draw.random() < 0.5
        end = form.opening + form.header if opened else form.closing if form.opened else ""
        if name == "harmony":
            end = form.opening if opened else "<|start|>assistant"
        found = written(budget(form, most, prompt_end=end), script)
        assert found == oracle(name, script, most, opened, TOKENIZER), (parts, most, opened)


@every_format
@pytest.mark.parametrize("tokenizer", [TOKENIZER, SPELLED], ids=["tokens", "spelled"])
@pytest.mark.parametrize("opened", [False, True])
def test_a_thought_is_closed_at_its_budget_and_the_answer_is_read(
    name: str, tokenizer: PieceTokenizer, opened: bool
) -> None:
    form = REASONING_PARSERS[name]
    opened = opened or form.opened is True
    lead = [] if opened else tokenizer.encode_part(opening_of(form))
    end = form.opening + form.header if opened else ""
    thought = tokenizer.encode_part("hm so.hm so.hm")
    closing = tokenizer.encode_part(form.closing)
    script = lead + thought + closing + tokenizer.encode_part(BETWEEN.get(name, "") + "42")
    for most in range(len(thought) + 1):
        found = written(budget(form, most, tokenizer, prompt_end=end), script)
        closed = lead + thought[:most] + closing
        assert found[: len(closed)] == closed
        reader = AnswerReader(None, form(end))
        list(reader.read(tokenizer.decode(closed), ended=True))
        assert reader.take()[:2] == (tokenizer.decode(thought[:most]), "")
    # The tokens of a tag are the thought's until it is whole.
    for most in range(len(thought) + len(closing), 2 * len(script)):
        assert written(budget(form, most, tokenizer, prompt_end=end), script) == script


def text(
    tokens: int, script: str, form: type[ReasoningParser] = Qwen3, template: str = "", **more: Any
) -> str:
    tokenizer = PieceTokenizer(template=template)
    return tokenizer.decode(written(budget(form, tokens, tokenizer, **more), tokenizer.encode_part(script)))


QWEN = r"{{ '<think>\n' + reasoning + '\n</think>\n\n' + content }}{{ content.split('</think>')[-1] }}"
OPENED: Any = {"prompt_end": "<think>\n"}


def test_line_breaks_are_those_of_the_template() -> None:
    assert text(0, "42", template=QWEN, **OPENED) == "\n</think>\n\n42"
    assert text(1, "hm42", template=QWEN, **OPENED) == "hm\n</think>\n\n42"
    assert text(1, "!\n42", template=QWEN, **OPENED) == "!\n</think>\n\n42"
    assert text(1, "hm42", template=QWEN.replace(r"\n", "\n"), **OPENED) == "hm\n</think>\n\n42"
    assert text(1, "hm42", template="{{ '<think>\n\n</think>\n\n' }}", **OPENED) == "hm</think>42"
    assert text(1, "hm42", template="<think>{{ reasoning }}</think>", **OPENED) == "hm</think>42"
    # and the break behind the header of a channel is no token of the thought
    gemma = "{{ '<|channel>thought\\n' + reasoning + '\\n<channel|>' }}"
    assert text(0, "<|channel>thought\n hm", Gemma4, gemma) == "<|channel>thought\n\n<channel|> hm"
    assert text(1, "thought\nhm so", Gemma4, gemma, prompt_end="<|channel>") == "thought\nhm\n<channel|> so"


def test_a_sentence_is_written_before_the_tag() -> None:
    assert text(1, "hm so", end=" So.", template=QWEN, **OPENED) == "hm So.\n</think>\n\n so"
    assert text(1, "hm so", end=" So.\n\n", template=QWEN, **OPENED) == "hm So.\n\n</think>\n\n so"
    assert text(1, "hm so", end=".</think>!\n", template=QWEN, **OPENED) == "hm.</think>!\n so"
    assert text(3, "hm</think> so", end=" So.", template=QWEN, **OPENED) == "hm</think> so"


def test_a_grace_lets_a_sentence_end() -> None:
    def at(grace: int, tokens: int = 2, script: str = "hm so hm. so!\n hm") -> str:
        return text(tokens, script, grace=grace, **OPENED).split("</think>")[0]

    assert [at(grace) for grace in range(4)] == ["hm so", "hm so ", "hm so hm", "hm so hm."]
    assert at(9) == "hm so hm."
    assert at(9, 5) == "hm so hm."
    assert at(9, 6) == "hm so hm. so!\n"
    assert at(9, 0) == ""
    assert at(9, 1, "hm\n so") == "hm\n"
    assert at(2, 1, "3.) hm") == "3."
    # It is not had twice.
    assert text(1, "hm so</think><think>hm", grace=4, **OPENED) == "hm so</think><think></think>hm"


def test_the_budget_is_one_for_all_thoughts() -> None:
    script = "hm so</think>a<think>hm so.</think>b<think> so"
    assert text(3, script, **OPENED) == "hm so</think>a<think>hm</think> so.</think>b<think></think> so"
    assert text(9, script, **OPENED) == script
    assert text(0, "`<think>` hm<think> so") == "`<think>` hm<think></think> so"
    assert text(0, "a<think>hm", alone=True) == "a<think>hm"
    assert text(1, "<think>hm so</think><think>hm", alone=True) == "<think>hm</think> so</think><think>hm"
    assert text(0, "<think>hm", alone=True, prompt_end="</think>") == "<think>hm"


def test_the_channels_of_gpt_oss() -> None:
    def harmony(tokens: int, script: str, end: str = "<|start|>assistant") -> str:
        return text(tokens, script, Harmony, prompt_end=end)

    final = "<|start|>assistant<|channel|>final<|message|>a<|return|>"
    thought = "<|channel|>analysis<|message|>hm so"
    again = "<|end|><|start|>assistant"
    assert harmony(1, thought) == "<|channel|>analysis<|message|>hm<|end|> so"
    assert harmony(0, "hm", "<|channel|>analysis<|message|>") == "<|end|>hm"
    assert harmony(3, thought + "<|end|>" + final) == thought + "<|end|>" + final
    assert harmony(3, thought + again + thought) == f"{thought}{again}{thought.removesuffix(' so')}<|end|> so"
    call = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>"
    for others in (call, "<|channel|>analysis to=python<|message|>hm so<|call|>", final):
        assert harmony(0, others) == others
    # A message to itself is a thought, and one that is not ended ends where another begins.
    itself = " to=assistant<|channel|>commentary<|message|>"
    assert harmony(0, f"{itself}hm") == f"{itself}<|end|>hm"
    cut = thought + "<|channel|>final<|message|>hm so"
    assert harmony(3, cut) == cut


def test_an_output_that_went_on_otherwise_is_counted_as_it_is() -> None:
    """As in a fork with a smaller budget, or behind an injection."""
    for script in ("hm so hm so.</think>hm", "hm\n</think>hm", "hm\nso</think>hm", "hm\n</think>\nhm"):
        ids = TOKENIZER.encode_part(script)
        for at in range(len(ids) + 1):
            processor = budget(Qwen3, 1, PieceTokenizer(template=QWEN), **OPENED)
            for token in ids[:at]:
                processor.accept(token)
            found = TOKENIZER.decode(written(processor, ids[at:], before=ids[:at]))
            ended = TOKENIZER.decode(ids[:at])
            assert found.count("</think>") >= 1 or not at
            if "</think>" in ended and not "\n</think>\n\n".startswith(ended[2:]):
                assert found == script


def test_who_has_no_thoughts_is_told() -> None:
    def ready(tokenizer: Any = TOKENIZER, name: str | None = "qwen3", **params: Any) -> Any:
        return ready_processors(SamplingParams(thinking_budget=5, **params), tokenizer, [1], name)

    assert ready_processors(SamplingParams(), None, [1], None) == ()
    for arguments in ((None, "qwen3"), (TOKENIZER, None), (TOKENIZER, "auto")):
        with pytest.raises(InvalidRequest, match="thinking_budget: the model has no format of reasoning"):
            ready(*arguments)
    assert len(ready(PieceTokenizer(template=QWEN), "auto")) == 1
    assert len(ready(grammar=Grammar("answer", 'rest: "a"', "qwen3"))) == 1
    with pytest.raises(InvalidRequest, match="thinking_budget: cannot be combined"):
        ready(grammar=Grammar("regex", "a*"))


def test_a_message_that_is_continued_is_where_its_tags_say() -> None:
    for begins, found in ((None, ()), ("<think>", TOKENIZER.encode_part("</think>")), ("</think>", ())):
        params = SamplingParams(thinking_budget=0, stop_format=(None, None, begins))
        (processor,) = ready_processors(params, TOKENIZER, TOKENIZER.encode_part("hm so"), "qwen3")  # type: ignore[arg-type]
        assert tuple(processor(*NOTHING) or ()) == tuple(found)  # type: ignore[arg-type, call-overload]
    chat = ChatFormat(reasoning=Qwen3)
    params, _ = chat.apply(SamplingParams(thinking_budget=3), None, begins="<think>")
    assert params.stop_format == (None, "qwen3", "<think>")
    assert chat.apply(SamplingParams(thinking_budget=3), None)[0].stop_format is None


@pytest.mark.parametrize(
    ("field", "value"),
    [("thinking_budget", -1), ("thinking_budget", 1.5), ("thinking_grace", -1), ("thinking_grace", None),
     ("thinking_end", 3), ("thinking_end", None), ("thinking_end", "a" * 1025), ("thinking_end", "\ud800")],
)  # fmt: skip
def test_what_is_no_budget_is_refused(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as refused:
        SamplingParams(**{field: value})
    assert refused.value.field == field


def test_budgets_are_plain_data() -> None:
    params = SamplingParams(thinking_budget=3, thinking_grace=2, thinking_end="So.")
    assert params_of(json.loads(json.dumps(record_of(params)))) == params
