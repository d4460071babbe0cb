"""Lists of answers without asyncio: rows of their own, errors in their places, and nothing done is lost."""

from __future__ import annotations

from typing import Any

import pytest

from aioinfer import ChatResult, ChatRow, Embedding, Result, SamplingParams, errors
from tests.engine.making import make_llm
from tests.toys import toy_generate

SHORT = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
CHAT: Any = [{"role": "user", "content": "hi"}]


def test_prompts_that_fail_have_their_errors_in_their_places() -> None:
    prompts: Any = [[1, 2], [10**9], [3], "", 7]
    params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in range(1, 6)]
    with make_llm() as llm:
        found = llm.generate(prompts, params, on_error="return", progress=False)
        assert [type(each) for each in found] == [
            Result, errors.InvalidRequest, Result, errors.InvalidRequest, errors.InvalidRequest
        ]  # fmt: skip
        for at in (0, 2):
            each = found[at]
            assert isinstance(each, Result)
            assert each.token_ids == toy_generate(prompts[at], params[at])
        assert not llm.has_unfinished()
        with pytest.raises(errors.InvalidRequest) as caught:
            llm.generate(prompts, params, progress=False)
        assert caught.value.field == "prompts[1]"
        assert caught.value.results == [None] * 5  # type: ignore[attr-defined]


def test_a_deadline_of_one_row_costs_no_other() -> None:
    with make_llm() as llm:
        found = llm.generate([[1], [2]], SHORT, running_timeout=1e-9, on_error="return", progress=False)
        assert [type(each) for each in found] == [errors.TimedOut] * 2
        with pytest.raises(errors.TimedOut) as caught:
            llm.generate([[1], [2]], SHORT, running_timeout=1e-9, progress=False)
        assert caught.value.results == [None, None]  # type: ignore[attr-defined]


@pytest.mark.parametrize("chats", [CHAT, ChatRow(CHAT), [CHAT], [ChatRow(CHAT)]])
def test_one_chat_in_any_form_is_a_list_of_one(chats: Any) -> None:
    with make_llm() as llm:
        (result,) = llm.chat(chats, SHORT, progress=False)
        assert isinstance(result, ChatResult)
        assert result.result.token_ids == llm.generate(CHAT, SHORT, progress=False)[0].token_ids
        assert llm.chat([], progress=False) == []


def test_rows_have_names_and_parameters_and_their_own_errors() -> None:
    rows = [
        ChatRow(CHAT, id="a", params=SHORT),
        ChatRow([], id="b"),
        ChatRow(CHAT, id="c", tools=[{"type": "function", "function": {"name": "f"}}]),
        CHAT,
    ]
    with make_llm() as llm:
        found = llm.chat(rows, SamplingParams(temperature=0, max_tokens=2), on_error="return", progress=False)
        good, *bad, last = found
        assert isinstance(good, ChatResult)
        assert isinstance(last, ChatResult)
        assert (good.result.request_id, good.usage.completion_tokens) == ("a", 6)
        assert last.usage.completion_tokens <= 2
        assert [each.request_id for each in bad] == ["b", "c"]  # type: ignore[union-attr]
        with pytest.raises(errors.InvalidRequest, match=r"^chats\[1\]\.messages"):
            llm.chat(rows, progress=False)


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        ("tools", {"tools": 7}),
        ("response_format", {"response_format": 9}),
        ("params", {"params": 3}),
        ("params", {"params": [SHORT]}),
        ("on_error", {"on_error": "ignore"}),
        ("priority", {"priority": "high"}),
        ("adapter", {"adapter": "absent"}),
    ],
)
def test_what_is_wrong_with_all_chats_is_raised_once(field: str, arguments: Any) -> None:
    with make_llm() as llm, pytest.raises(errors.InvalidRequest) as caught:
        llm.chat([CHAT, CHAT], **{"on_error": "return", "progress": False, **arguments})
    assert caught.value.field == field


def test_inputs_that_fail_have_their_errors_in_their_places() -> None:
    with make_llm() as llm:
        found = llm.embed(["a", "", "b"], on_error="return", progress=False)
        assert [type(each) for each in found] == [Embedding, errors.InvalidRequest, Embedding]
        scores = llm.score("a", ["b", "", "b"], method="cosine", on_error="return", progress=False)
        assert list(scores.errors) == [1]
        assert scores.scores[0] == scores.scores[2]
        assert scores.scores[1] != scores.scores[1]
        with pytest.raises(errors.InvalidRequest, match=r"documents\[1\]"):
            llm.score("a", ["b", ""], method="cosine", progress=False)
