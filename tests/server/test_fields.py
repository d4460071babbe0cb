"""Every field of a body is honoured, listed as harmless, or refused by its name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from aioinfer.chat.answers import ChatFormat
from aioinfer.chat.bodies import Object
from aioinfer.chat.messages import parse_messages
from aioinfer.errors import InvalidRequest
from aioinfer.params import SamplingParams
from aioinfer.server.http.failures import Refused
from aioinfer.server.openai.fields import ChatBody, CompletionBody
from aioinfer.server.openai.protocol import Call, Served, parse_chat, parse_completion
from aioinfer.text.template import names_read
from aioinfer.text.tool_calls import Gemma4, Granite, Hermes

USER = {"role": "user", "content": "abc"}
TOOL = {"type": "function", "function": {"name": "f"}}
CALLED = [USER, {"role": "assistant", "content": None, "tool_calls": [
    {"type": "function", "id": "1", "function": {"name": "f", "arguments": "{}"}}]},
    {"role": "tool", "content": "1", "tool_call_id": "1"}]  # fmt: skip
#: as content
CALL_TEXT = (
    '<|tool_call|>[{"name": "f", "arguments": {"a": "ü"}}, {"name": "f", "arguments": {}},'
    ' {"name": "f", "arguments": {broken}]'
)
ANSWERED = {"role": "assistant", "content": "x", **dict.fromkeys(
    ("refusal", "audio", "function_call", "tool_calls", "parsed")), "annotations": []}  # fmt: skip
SCHEMA = {"schema": {"type": "object"}, "name": "response", "description": "d", "strict": True}
READ = frozenset({"thinking_mode", "tools", "tool_calls"})
SERVED = Served("toy", SamplingParams(), ChatFormat(tools=Hermes, template_names=READ))

#: fields that could change an answer
NOT_IN_CHATS = (
    *("guided_whitespace_pattern", "reasoning_effort", "chat_template", "documents"),
    *("best_of", "lora_path", "length_penalty", "typical_p", "modalities", "return_hidden_states", "echo"),
    *("prompt_embeds", "no_repeat_ngram_size", "dry_multiplier", "min_length", "logits_processors", "store"),
    *("service_tier", "functions", "use_beam_search", "repeat_penalty", "stream_reasoning", "max_length"),
    *("prompt", "suffix", "temprature"),
)
NOT_IN_COMPLETIONS = (
    *("messages", "chat_template_kwargs", "tools", "tool_choice", "top_logprobs", "best_of", "temprature"),
    "add_generation_prompt",
)
REFUSED_ON_CHAT: list[tuple[str, Any]] = [
    *((name, ["x"]) for name in NOT_IN_CHATS),
    ("enable_thinking", True),
    ("thinking", True),
    ("thinking", {"type": "enabled"}),
    ("thinking", {"type": "enabled", "budget_tokens": 5}),
    ("", 0),
    ("x" * 10_000, 0),
    ("structured_outputs", {"jsn": {}}),
    ("structured_outputs", {"json": {}, "whitespace_pattern": " "}),
    ("response_format", {"type": "json_object", "strict": True}),
    ("response_format", {"type": "text", "json_schema": {"schema": {}}}),
    ("response_format", {"type": "json_schema", "json_schema": {"schema": {}, "mode": 1}}),
    ("stream_options", {"include_usag": True}),
    ("tools", [{**TOOL, "defer": True}]),
    ("tools", [{"type": "function", "function": {"name": "f", "returns": {}}}]),
    ("tool_choice", {"type": "function", "function": {"name": "f"}, "disable": True}),
    ("tool_choice", {"type": "function", "function": {"name": "f", "x": True}}),
    ("messages", [{**USER, "prefix": True}]),
    ("messages", [{**USER, "mood": "good"}]),
    ("messages", [{"role": "user", "content": [{"type": "text", "text": "a", "lang": "en"}]}]),
    ("messages", [{"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f"}, "x": 1}]}]),
    ("messages", [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "x": 1}}]}]),
    ("chat_template_kwargs", {"enable_thinking": False}),
    ("logit_bias", {"1_0": 1}),
    ("logit_bias", {" 1": 1}),
    ("logit_bias", {"01": 1, "1": 2}),
]


def chat(**fields: Any) -> Call:
    return parse_chat(json.dumps({"messages": [USER], **fields}).encode(), SERVED)


def completion(**fields: Any) -> Call:
    return parse_completion(json.dumps({"prompt": "abc", **fields}).encode(), SERVED)


@pytest.mark.parametrize(("field", "value"), REFUSED_ON_CHAT)
def test_what_a_chat_does_not_honour_is_refused_by_name(field: str, value: Any) -> None:
    tools = {"tools": [TOOL]} if field == "tool_choice" else {}
    with pytest.raises(InvalidRequest) as caught:
        chat(**tools, **{field: value})
    assert caught.value.field.startswith(field[:80])
    assert len(str(caught.value)) < 300
    if field != "logit_bias":
        assert caught.value.code in ("unknown_parameter", "unsupported_parameter", None)


@pytest.mark.parametrize("field", NOT_IN_COMPLETIONS)
def test_what_a_completion_does_not_honour_is_refused_by_name(field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        completion(**{field: 3})
    assert caught.value.field == field
    assert caught.value.code in ("unknown_parameter", "unsupported_parameter")


def test_unknown_fields_have_their_own_code() -> None:
    for field, code in (("temprature", "unknown_parameter"), ("typical_p", "unsupported_parameter")):
        with pytest.raises(InvalidRequest) as caught:
            chat(**{field: 0.2})
        assert caught.value.code == code


@pytest.mark.parametrize(
    ("kind", "parse"), [(ChatBody, chat), (CompletionBody, completion)], ids=["chat", "completion"]
)
def test_harmless_fields_and_neutral_values_change_nothing(kind: type[Object], parse: Any) -> None:
    plain = comparable(parse())
    values: dict[str, tuple[Any, ...]] = {name: ("x", 1, {"a": 1}, []) for name in kind.harmless}
    values |= {name: rule.neutral for name, rule in kind.refused.items()}
    for name in (kind.honoured | values.keys()) - {"messages", "prompt"}:
        for value in (None, *values.get(name, ())):
            assert comparable(parse(**{name: value})) == plain, name


#: field -> a value that changes the call, for the fields that are honoured
CHANGES: dict[str, Any] = {
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 5,
    "min_p": 0.5,
    "top_n_sigma": 1.0,
    "seed": 1,
    "max_tokens": 5,
    "min_tokens": 2,
    "stop": "x",
    "stop_regex": "x+",
    "stop_token_ids": [3],
    "ignore_eos": True,
    "repetition_penalty": 1.5,
    "presence_penalty": 1,
    "frequency_penalty": 1,
    "skip_special_tokens": False,
    "logit_bias": {"3": 1},
    "allowed_token_ids": [3],
    "bad_words": ["x"],
    "max_completion_tokens": 5,
    "max_new_tokens": 5,
    "min_new_tokens": 2,
    "n_predict": 5,
    "random_seed": 1,
    "prediction": {"type": "content", "content": "An answer."},
    "speculate": False,
    "thinking_budget": 5,
    "thinking_token_budget": 5,
    "thinking_grace": 5,
    "thinking_end": "So.",
    "prompt_logprobs": 2,
    "logprob_start_len": 2,
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
    "add_special_tokens": False,
    "truncate_prompt_tokens": 3,
    "waiting_timeout": 1,
    "running_timeout": 1,
    "deadline": 1,
    "ttft_target": 1,
    "itl_target": 1,
    "max_lag": 1,
    "include_stop_str_in_output": True,
    "n": 2,
    "use_beam_search": True,
    "stream": True,
    "priority": 3,
    "cache_salt": "x",
    "routing_key": "x",
    "prompt_cache_key": "x",
    "request_id": "x-1",
    "diffusion": {"steps": 3},
    "stream_options": {"include_usage": True},
    "guided_json": {},
    "guided_json_object": True,
    "guided_regex": "a",
    "guided_choice": ["a"],
    "guided_grammar": 'start: "a"',
    "json_schema": {},
    "regex": "a",
    "ebnf": 'start: "a"',
    "grammar": 'start: "a"',
    "response_format": {"type": "json_object"},
    "structured_outputs": {"choice": ["a"]},
    "messages": [USER, USER],
    "prompt": "abcd",
    "logprobs": True,
    "tools": [TOOL],
    "chat_template_kwargs": {"thinking_mode": 1},
    "add_generation_prompt": False,
    "continue_final_message": True,
    "echo": True,
    "suffix": "b",
}
#: fields that have no effect alone -> what they are checked with
TOGETHER: dict[str, dict[str, Any]] = {
    "top_logprobs": {"logprobs": True, "top_logprobs": 3},
    "tool_choice": {"tools": [TOOL], "tool_choice": "required"},
    "parallel_tool_calls": {"tools": [TOOL], "parallel_tool_calls": False},
    "length_penalty": {"use_beam_search": True, "length_penalty": 2.0},
    "early_stopping": {"use_beam_search": True, "early_stopping": "never"},
}
#: refused or checked, with no effect otherwise; the template decides about some of them, and the format of
#: reasoning about others, which tests/server/test_dialects.py has
CHECKED = {"model", "best_of", "documents", "reasoning_effort", "enable_thinking", "think", "thinking"}
CHECKED |= {"include_reasoning", "separate_reasoning", "session"}


@pytest.mark.parametrize(
    ("kind", "parse"), [(ChatBody, chat), (CompletionBody, completion)], ids=["chat", "completion"]
)
def test_every_honoured_field_changes_the_call(kind: type[Object], parse: Any) -> None:
    plain = comparable(parse())
    for name in kind.honoured - CHECKED:
        if name in TOGETHER:
            fields = TOGETHER[name]
            without = comparable(parse(**{each: fields[each] for each in fields if each != name}))
            assert comparable(parse(**fields)) != without, name
        else:
            value = 3 if (name, kind) == ("logprobs", CompletionBody) else CHANGES[name]
            assert comparable(parse(**{name: value})) != plain, name


def comparable(call: Call) -> Any:
    ident = call.id if call.id.endswith("-x-1") else None
    return (ident, call.prompts, call.params, call.n, call.stream, call.include_usage, call.continuous_usage,
            call.echo, dict(call.chat_template_kwargs or {}), dict(call.scheduling), call.answer,
            call.token_ids, call.prompt_logprobs, call.tokens_by_id, call.form, call.beams,
            call.suffix)  # fmt: skip


def test_fields_that_the_template_reads_reach_it() -> None:
    names = frozenset({"documents", "reasoning_effort", "thinking", "mood"})
    served = Served("toy", SamplingParams(), ChatFormat(template_names=names))
    body = {
        "messages": [{**USER, "mood": "good"}],
        "documents": [{"text": "a"}],
        "reasoning_effort": "high",
        "chat_template_kwargs": {"thinking": True},
    }
    call = parse_chat(json.dumps(body).encode(), served)
    assert call.chat_template_kwargs == {
        "documents": [{"text": "a"}], "reasoning_effort": "high", "thinking": True
    }  # fmt: skip
    assert call.prompts == [[{**USER, "mood": "good"}]]
    unknown = Served("toy", SamplingParams(), ChatFormat(template_names=None))
    assert parse_chat(json.dumps({**body, "messages": [USER]}).encode(), unknown).chat_template_kwargs


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"tools": [TOOL]}, "tools"),
        ({"tools": [TOOL], "tool_choice": "auto"}, "tools"),
        ({"messages": CALLED}, "messages[1].tool_calls"),
    ],
    ids=str,
)
def test_tools_that_the_template_does_not_read_are_refused(body: dict[str, Any], field: str) -> None:
    served = Served("toy", SamplingParams(), ChatFormat(tools=Gemma4, template_names=frozenset({"messages"})))
    raw = json.dumps({"messages": [USER], **body}).encode()
    with pytest.raises(InvalidRequest, match="not read by the model's chat template") as refused:
        parse_chat(raw, served)
    assert (refused.value.field, refused.value.code) == (field, "unsupported_parameter")
    assert parse_chat(raw, SERVED).prompts


def test_tools_reach_a_template_in_the_variable_that_it_has() -> None:
    raw = json.dumps({"messages": [USER], "tools": [TOOL]}).encode()
    for names, variable in (("tools", "tools"), ("xml_tools", "xml_tools"), ("tools xml_tools", "tools")):
        served = Served(
            "toy", SamplingParams(), ChatFormat(tools=Hermes, template_names=frozenset(names.split()))
        )
        assert [*(parse_chat(raw, served).chat_template_kwargs or {})] == [variable]


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (None, CALL_TEXT),
        ("Hm.", f"Hm.\n{CALL_TEXT}"),
        ([{"type": "text", "text": "Hm."}], [{"type": "text", "text": each} for each in ("Hm.", CALL_TEXT)]),
    ],
)
def test_calls_are_text_where_the_template_does_not_read_them(content: Any, found: Any) -> None:
    served = Served(
        "toy", SamplingParams(), ChatFormat(tools=Granite, template_names=frozenset({"messages"}))
    )
    given: list[Any] = [each | ({"content": content} if "tool_calls" in each else {}) for each in CALLED]
    given[1]["tool_calls"] = [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        for arguments in ('{"a": "ü"}', "", "{broken")
    ]
    ((user, called, result),) = parse_chat(json.dumps({"messages": given}).encode(), served).prompts
    assert called == {"role": "assistant", "content": found}
    assert (user, result["content"]) == (given[0], given[2]["content"])


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}], ids=str)
def test_calls_that_a_grammar_requires_need_no_template(choice: Any) -> None:
    served = Served("toy", SamplingParams(), ChatFormat(tools=Hermes, template_names=frozenset({"messages"})))
    body = {"messages": [USER], "tools": [TOOL], "tool_choice": choice}
    assert parse_chat(json.dumps(body).encode(), served).params.structure


def test_a_key_that_is_there_twice_is_refused() -> None:
    message = b'{"messages": [{"role": "user", "content": "a"%s}]%s}'
    for raw in (message % (b"", b', "n": 1, "n": 2'), message % (b', "content": "b"', b"")):
        with pytest.raises(InvalidRequest, match="twice in one object"):
            parse_chat(raw, SERVED)


def test_the_names_that_a_template_reads() -> None:
    ending = "{% if x is defined %}{% break %}{% endif %}"
    loop = "{% for m in messages %}{{ m['role'] + m.name }}" + ending + "{% endfor %}"
    found = names_read([loop])
    assert {"messages", "role", "name", "x"} <= found
    assert "reasoning_effort" not in found
    assert "y" in names_read(["{% generation %}{{ y }}{% endgeneration %}"])


def test_two_names_of_one_parameter_must_agree() -> None:
    assert chat(max_tokens=5, max_completion_tokens=5).params.max_tokens == 5
    with pytest.raises(InvalidRequest, match="differs from max_tokens") as caught:
        chat(max_tokens=5, max_completion_tokens=6)
    assert caught.value.field == "max_completion_tokens"
    assert completion(max_completion_tokens=30).params.max_tokens == 30


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"include_stop_str_in_output": 3}, "include_stop_str_in_output"),
        ({"logprobs": True, "top_logprobs": 99}, "top_logprobs"),
        ({"guided_json": 7}, "guided_json"),
        ({"structured_outputs": {"choice": 7}}, "structured_outputs.choice"),
        ({"structured_outputs": {"json_object": 7}}, "structured_outputs.json_object"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": 7}}}, "response_format"),
        ({"stream_options": {"include_usage": 7}}, "stream_options.include_usage"),
        ({"request_id": "a b"}, "request_id"),
    ],
)
def test_errors_name_the_field_of_the_body(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(**fields)
    assert caught.value.field == named


def test_values_in_errors_are_bounded_and_nesting_is_safe() -> None:
    deep: Any = "x"
    for _ in range(900):
        deep = [deep]
    wide = ["y" * 10_000] * 100
    long = "z" * 100_000
    for value in (deep, wide, long, {long: long}):
        for field in ("temperature", "max_tokens", "n", "tool_choice", "request_id", "stop"):
            with pytest.raises(InvalidRequest) as caught:
                chat(**{"tools": [TOOL], field: value})
            assert len(str(caught.value)) < 500, field
        for nested in ({"type": value}, {"type": "json_schema", "json_schema": value}):
            with pytest.raises(InvalidRequest) as caught:
                chat(response_format=nested)
            assert len(str(caught.value)) < 500


#: what clients send on their own, besides the fields that every test has
CLIENTS: dict[str, dict[str, Any]] = {
    "openai": {"user": "u", "store": False, "service_tier": "auto", "metadata": {"a": "b"}},
    "openai, second turn": {"messages": [USER, ANSWERED, USER], "safety_identifier": "x"},
    "guidellm": {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True},
                 "max_completion_tokens": 9, "ignore_eos": True},
    "lm-eval": {"messages": [{**USER, "type": "text"}], "max_tokens": 3, "stop": ["\n"], "seed": 1234},
    "langchain": {"stream": False, "n": 1, "parallel_tool_calls": True, "tools": [TOOL], "messages": CALLED},
    "ai-sdk": {"response_format": {"type": "json_schema", "json_schema": SCHEMA}},
    "litellm": {"messages": [{"role": "assistant", "content": "x", "provider_specific_fields": None,
                              "cache_control": {"type": "ephemeral"}}, USER], "logit_bias": {}},
    "vllm": {"best_of": 1, "use_beam_search": False, "length_penalty": 1.0, "add_generation_prompt": True,
             "spaces_between_special_tokens": True, "continue_final_message": False, "echo": False,
             "add_special_tokens": False, "top_k": -1, "min_p": 0.0, "include_reasoning": True,
             "kv_transfer_params": None},
}  # fmt: skip


@pytest.mark.parametrize("client", CLIENTS)
def test_what_clients_send_on_their_own_is_accepted(client: str) -> None:
    assert chat(model="toy", **CLIENTS[client]).prompts


def test_neutral_values_are_compared_as_json() -> None:
    assert chat(length_penalty=1).params == chat(length_penalty=1.0).params == chat().params
    for value in (True, "1", [1]):
        with pytest.raises(InvalidRequest):
            chat(length_penalty=value)
    with pytest.raises(InvalidRequest):
        chat(use_beam_search=0)


@pytest.mark.parametrize("model", ["", "gpt-4", 5, [], {}, "x" * 100_000])
def test_only_the_served_name_is_a_model(model: Any) -> None:
    with pytest.raises(Refused) as caught:
        chat(model=model)
    assert (caught.value.failure.status, caught.value.failure.code) == (404, "model_not_found")
    assert len(caught.value.failure.message) < 300
    assert chat(model=None).model == chat().model == "toy"


def test_reasoning_of_earlier_answers_is_named_as_the_template_reads_it() -> None:
    def parsed(names: set[str], **message: Any) -> dict[str, Any]:
        return parse_messages([{"role": "assistant", "content": "", **message}], frozenset(names))[0]

    for field in ("reasoning_content", "reasoning"):
        assert parsed({"thinking"}, **{field: "hm"})["thinking"] == "hm"
        assert "thinking" not in parsed({"thinking", "reasoning_content"}, **{field: "hm"})
    assert parsed({"thinking"}, thinking="a", reasoning_content="b")["thinking"] == "a"
    assert "thinking" not in parsed({"thinking"})
    assert "thinking" not in parsed(set(), reasoning_content="hm")
