"""Fields of the bodies of ``/v1/chat/completions`` and ``/v1/completions``, and what other bodies share."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainValidator,
    TypeAdapter,
    WithJsonSchema,
    create_model,
)

from aioinfer import plugins
from aioinfer.bounds import BOUNDS, LONGEST_END, MOST
from aioinfer.chat.bodies import CLIENTS, NO, OFF, Items, Object, Refused, TextOr, admit, field, later
from aioinfer.chat.fields import ChosenTool, GrammarFields, Message, StructuredOutputs, Tool
from aioinfer.chat.tools import MAX_TOOLS
from aioinfer.chat.variables import EFFORTS
from aioinfer.errors import InvalidRequest, shown
from aioinfer.params import DiffusionParams, SamplingParams
from aioinfer.request import MAX_LABEL

__all__ = [
    "ALIASES",
    "EFFORT_BUDGETS",
    "MAX_CHOICES",
    "MAX_TOKENS",
    "PARAMS",
    "VERBOSITIES",
    "Budget",
    "ChatBody",
    "ChatTemplateFields",
    "CompletionBody",
    "Extensions",
    "Kept",
    "Label",
    "Model",
    "Priority",
    "Seconds",
    "TokenId",
    "TokenLimit",
    "as_list",
    "prompts",
]

#: what the values of an effort are as ``thinking_budget``
EFFORT_BUDGETS = "a `thinking_budget` of " + ", ".join(
    f"{tokens:,} (`{effort}`)" for effort, tokens in EFFORTS.items() if tokens is not None
)
#: choices of one call: prompts x n
MAX_CHOICES = 128
#: values of ``verbosity``, which no chat template reads; clients send it with some models' names
VERBOSITIES = ("low", "medium", "high")
#: fields of bodies that are fields of SamplingParams
PARAMS = frozenset(SamplingParams.__dataclass_fields__) - {
    *("logprobs", "grammar", "diffusion", "stop_format", "template")
}

_TOKEN_ID = re.compile("0|[1-9][0-9]{0,9}")
Model = Annotated[Any, later(str)]
Label = Annotated[str, Field(max_length=MAX_LABEL)]
Seconds = Annotated[float, Field(gt=0)]
Priority = Annotated[int, Field(ge=-(2**31), le=2**31 - 1)]
_Choices = Annotated[int, Field(ge=1, le=MAX_CHOICES)]


def _number(name: str) -> Any:
    low, high, whole, low_open = BOUNDS[name]
    kind: Any = int if whole else float
    if whole:
        return Annotated[kind, Field(ge=int(low), le=int(high))]
    return Annotated[kind, Field(gt=low, le=high) if low_open else Field(ge=low, le=high)]


TokenId = Annotated[int, Field(ge=0, le=int(BOUNDS["token_id"].high))]
#: an answer has a token at least; a completion may have none
TokenLimit = Annotated[int, Field(ge=1, le=int(BOUNDS["max_tokens"].high))]
#: tokens of thought
Budget = Annotated[int, Field(ge=0, le=int(BOUNDS["thinking_budget"].high))]
_Ids = Annotated[list[TokenId], Field(min_length=1)]
_TopLogprobs = Annotated[int, Field(ge=0, le=int(BOUNDS["logprobs"].high))]


def _kept(count: int) -> int:
    if count == 0:
        raise InvalidRequest("", "must be a positive number of tokens, or -1, got 0")
    return count


#: tokens that a prompt is cut to; -1: as many as there may be
Kept = Annotated[int, Field(ge=-1), AfterValidator(_kept)]


def prompts(most: int) -> PlainValidator:
    """The check of a text, token ids, or a list of up to ``most`` of either. Lists of ids are walked in
    Python, so that other threads run meanwhile."""

    def check(given: Any) -> Any:
        items = as_list(given)
        if not isinstance(items, list) or not 1 <= len(items) <= most:
            raise InvalidRequest("", f"must be text, token ids, or a list of 1 to {most} of either")
        for at, each in enumerate(items):
            if not (isinstance(each, str) or (isinstance(each, list) and each and all(map(_is_id, each)))):
                raise InvalidRequest(f"[{at}]" if items is given else "", "must be text or token ids")
        return given

    text = Annotated[str, Field(min_length=1)]
    several = Annotated[list[text | _Ids], Field(min_length=1, max_length=most)]
    return PlainValidator(check, json_schema_input_type=text | _Ids | several)


def as_list(given: Any) -> Any:
    """A list of prompts, also of one that stands alone."""
    alone = isinstance(given, str) or (isinstance(given, list) and given and _is_id(given[0]))
    return [given] if alone else given


def _is_id(value: Any) -> bool:
    return type(value) is int


def _lists() -> dict[str, Any]:
    """The types of the parameters that are lists or mappings, which SamplingParams checks."""
    most = {name: dict(zip(("max_length", "longest"), sizes, strict=True)) for name, sizes in MOST.items()}

    def text(name: str) -> Any:
        return Annotated[str, Field(min_length=1, max_length=most[name]["longest"])]

    def listed(name: str, item: Any, least: int = 0) -> Any:
        bounds = Field(min_length=least, max_length=most[name]["max_length"])
        return Annotated[list[item], bounds]

    ids = Annotated[list[TokenId], Field(min_length=1, max_length=most["bad_words"]["longest"])]
    bias = {
        "type": "object",
        "propertyNames": {"pattern": f"^({_TOKEN_ID.pattern})$"},
        "additionalProperties": TypeAdapter(_number("bias")).json_schema(),
        "maxProperties": most["logit_bias"]["max_length"],
    }
    return {
        **{name: text(name) | listed(name, text(name)) for name in ("stop", "stop_regex")},
        "stop_token_ids": listed("stop_token_ids", TokenId),
        "allowed_token_ids": listed("allowed_token_ids", TokenId, 1),
        "bad_words": listed("bad_words", text("bad_words") | ids),
        "logit_bias": Annotated[Any, WithJsonSchema(bias)],
    }


class PredictedPart(Object):
    """A part of a prediction."""

    type: Literal["text"] = field("`text`", ...)
    text: str = field("text", ...)


class Prediction(Object):
    """The text that an answer is expected to be."""

    type: Literal["content"] = field("`content`", ...)
    content: TextOr[Items[PredictedPart]] = field("text or a list of parts of text", ...)

    @property
    def text(self) -> str:
        parts = self.content
        return parts if isinstance(parts, str) else "".join([part.text for part in parts])


_LISTS = _lists()
_AS = "as in `SamplingParams`"
#: field -> the field of SamplingParams that it stands for, and what it means
_SAMPLING: Mapping[str, tuple[str, str]] = {
    **{
        name: (name, _AS)
        for name in (
            *("temperature", "top_p", "top_k", "min_p", *plugins.names(plugins.FILTERS), "seed"),
            *("min_tokens", "stop_regex", "stop_token_ids", "ignore_eos", "repetition_penalty"),
            *("presence_penalty", "frequency_penalty", "skip_special_tokens", "logit_bias"),
            *("allowed_token_ids", "bad_words"),
        )
    },
    "include_stop_str_in_output": ("include_stop", "`include_stop` of `SamplingParams`"),
    "min_new_tokens": ("min_tokens", "SGLang's and Hugging Face's name of `min_tokens`"),
    "random_seed": ("seed", "Mistral's name of `seed`"),
    "logprob_start_len": (
        "logprob_start_len",
        "SGLang's name of the first token of the prompt that has a logprob; those before it have null",
    ),
    "speculate": ("speculate", "false: nothing is drafted; the answer is the same"),
    **{name: (name, _AS) for name in ("thinking_budget", "thinking_grace", "thinking_end")},
    "thinking_token_budget": ("thinking_budget", "vLLM's name of `thinking_budget`"),
}
_TOKENS: Mapping[str, tuple[str, str]] = {
    "max_tokens": ("max_tokens", _AS),
    "max_completion_tokens": ("max_tokens", "OpenAI's newer name of `max_tokens`"),
    "max_new_tokens": ("max_tokens", "SGLang's and Hugging Face's name of `max_tokens`"),
    "n_predict": ("max_tokens", "llama.cpp's name of `max_tokens`; -1: no limit"),
}
#: other names of fields of SamplingParams
ALIASES: Mapping[str, str] = {name: param for name, (param, _) in {**_SAMPLING, **_TOKENS}.items()}
#: the names of ``max_tokens`` in OpenAI's bodies
MAX_TOKENS = frozenset(_TOKENS)


def _unlimited(given: Any) -> Any:
    return None if type(given) is int and given == -1 else given


def _bias(given: Any) -> Any:
    """Token ids as integers: keys of JSON objects are text."""
    if not isinstance(given, dict):
        raise InvalidRequest("", f"must be an object, got {shown(given)}")
    for token in given:
        # No other spelling of a number, so that no two keys are the same token.
        if not _TOKEN_ID.fullmatch(token):
            raise InvalidRequest("", f"{shown(token)} is not a token id")
    return {int(token): bias for token, bias in given.items()}


def _params(title: str, table: Mapping[str, tuple[str, str]], least: int = 1) -> Any:
    """A model of fields of SamplingParams. ``least``: tokens of an answer."""
    limit = Annotated[int, Field(ge=least, le=int(BOUNDS["max_tokens"].high))]
    declared: dict[str, Any] = {}
    for name, (param, meaning) in table.items():
        kind: Any
        if name == "n_predict":
            schema: Any = Literal[-1] | limit | None
            kind = Annotated[limit | None, BeforeValidator(_unlimited, json_schema_input_type=schema)]
        elif name == "logit_bias":
            kind = Annotated[Any, PlainValidator(_bias, json_schema_input_type=_LISTS[param] | None)]
        elif param == "max_tokens":
            kind = limit | None
        elif param == "thinking_end":
            kind = Annotated[str, Field(max_length=LONGEST_END)] | None
        elif param in _LISTS:
            kind = Annotated[Any, later(_LISTS[param])]
        else:
            kind = (_number(param) if param in BOUNDS else bool) | None
        declared[name] = (kind, field(meaning))
    return create_model(title, __base__=Object, **declared)


if TYPE_CHECKING:

    class _Shared(Object): ...

    class _OpenAI(Object): ...

    class _Completion(Object):
        max_tokens: int | None


if not TYPE_CHECKING:
    _Shared = _params("Shared", _SAMPLING | {name: _TOKENS[name] for name in ("max_new_tokens", "n_predict")})
    _OpenAI = _params(
        "OpenAI",
        {
            **_TOKENS,
            "stop": ("stop", _AS),
            "prompt_logprobs": (
                "prompt_logprobs",
                "the answer has the logprobs of the prompt, with this number of alternatives; not streamed",
            ),
        },
    )
    _Completion = _params("Completion", _TOKENS, 0)


class Extensions(_Shared):
    """The fields that the bodies of all protocols have."""

    #: field -> the field of SamplingParams that it stands for, where the names differ
    aliases: ClassVar[Mapping[str, str]] = ALIASES

    model: Model = field("name of the served model (the default), or of an adapter")
    prediction: Prediction | None = field(
        "OpenAI's object of what the answer is expected to be: as far as it is, it comes sooner, and `usage` "
        "counts how many tokens of it were"
    )
    structured_outputs: Annotated[Any, later(StructuredOutputs)] = field("vLLM's object of one constraint")
    stream: bool = field("server-sent events", False)
    priority: Priority = field("see scheduling", 0)
    cache_salt: Label = field("see scheduling", "")
    routing_key: Label | None = field("see scheduling")
    request_id: str | None = field(
        "the second half of the answer's `id`; 1 to 128 letters, digits, `.`, `_`, `:`, `-`",
        pattern="^[A-Za-z0-9._:-]{1,128}$",
    )


class StreamOptions(Object, harmless={"include_obfuscation": "padding of events"}):
    """Parts of a stream."""

    include_usage: bool = field("token counts as the last event", False)
    continuous_usage_stats: bool = field("every event has the token counts of its choice so far", False)


def _denoising() -> Any:
    """The object ``diffusion``: the fields of DiffusionParams, and ``step_map``."""
    declared: dict[str, Any] = {"algorithm": Literal[plugins.names(plugins.ALGORITHMS)]}
    for each in fields(DiffusionParams):
        if each.name in BOUNDS:
            declared[each.name] = _number(each.name)
    declared["draft"] = bool
    optional: dict[str, Any] = {
        name: (kind | None, field("as in `DiffusionParams`")) for name, kind in declared.items()
    }
    told = "the answer has the round in which each token was written"
    optional["step_map"] = (bool | None, field(told))
    return create_model("Diffusion", __base__=Object, **optional)


if TYPE_CHECKING:
    Diffusion = Object
if not TYPE_CHECKING:
    Diffusion = _denoising()

_ZERO, _ONE, _EMPTY = Refused((0,)), Refused((1,)), Refused(({},))
#: field -> the refused field without which it has no effect
_WITH_OTHERS = {
    **dict.fromkeys(("mirostat_tau", "mirostat_eta"), "mirostat"),
    **dict.fromkeys(
        ("dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers"), "dry_multiplier"
    ),
    "repeat_last_n": "repeat_penalty",
    "xtc_threshold": "xtc_probability",
    "dynatemp_exponent": "dynatemp_range",
}
_HARMLESS = {
    **dict.fromkeys(("user", "safety_identifier", "metadata"), CLIENTS),
    "prompt_cache_retention": "how long a prefix stays cached",
    "keep_alive": "how long a model stays loaded",
    **{name: f"has an effect with `{other}` only" for name, other in _WITH_OTHERS.items()},
}
_REFUSED = {
    **dict.fromkeys(
        (
            *("web_search_options", "audio", "prompt_embeds", "input_embeds", "custom_logit_processor"),
            *("lora_path", "samplers"),
        ),
        NO,
    ),
    **dict.fromkeys(
        (*("return_hidden_states", "penalize_nl", "safe_prompt", "watermark", "details"),),
        OFF,
    ),
    **dict.fromkeys(
        (
            *("top_a", "epsilon_cutoff", "eta_cutoff", "no_repeat_ngram_size", "mirostat", "mirostat_mode"),
            *("dry_multiplier", "xtc_probability", "dynatemp_range", "smoothing_factor", "n_keep"),
        ),
        _ZERO,
    ),
    **dict.fromkeys(("typical_p", "tfs_z", "encoder_repetition_penalty"), _ONE),
    **dict.fromkeys(("kv_transfer_params", "vllm_xargs", "session_params", "options"), _EMPTY),
    **dict.fromkeys(("spaces_between_special_tokens", "cache_prompt"), Refused((True,))),
    "logits_processors": Refused(([],)),
    "store": Refused((False,), "only /v1/responses stores"),
    "service_tier": Refused(("auto", "default")),
    "functions": Refused(([],), "use tools"),
    "function_call": Refused(("none", "auto"), "use tool_choice"),
    "verbosity": Refused(VERBOSITIES),
    "modalities": Refused((["text"],)),
    "no_stop_trim": Refused((False,), "use include_stop_str_in_output"),
    "repeat_penalty": Refused((1,), "use repetition_penalty"),
    "do_sample": Refused((True,), "use temperature 0"),
    "min_length": Refused((0,), "use min_tokens"),
    "max_length": Refused((), "use max_tokens"),
    "n_probs": Refused((0,), "use logprobs"),
    "id_slot": Refused((-1,)),
    "return_full_text": Refused((False,), "use echo"),
    "format": Refused((), "use response_format"),
}


class _Body(GrammarFields, _OpenAI, Extensions, harmless=_HARMLESS, refused=_REFUSED):
    """The fields of both endpoints."""

    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = field("choices per prompt", 1)
    use_beam_search: bool = field("the choices are the best of a beam search of width `n`, best first", False)
    length_penalty: float = field("above 0, a beam search prefers long outputs", 1.0, ge=-5, le=5)
    early_stopping: Literal[False, True, "never"] = field("when it ends: as of `Engine.beam`", False)
    stream_options: StreamOptions = field("what a stream includes", StreamOptions)
    diffusion: Diffusion | None = field("how a diffusion model denoises")
    session: str | None = field(
        "the id of a session that the call goes on with; `messages` or `prompt` are what is new then"
    )
    prompt_cache_key: Label | None = field("`routing_key`, unless that is given")
    return_token_ids: bool = field("choices have `token_ids`, and the answer `prompt_token_ids`", False)
    return_tokens_as_token_ids: bool = field("logprobs name tokens as `token_id:5`", False)
    add_special_tokens: bool | None = field(
        "the special tokens that the model expects around a text; by default added to a text prompt and not "
        "to a chat, whose template has them. Token ids are taken as they are"
    )
    truncate_prompt_tokens: Kept | None = field(
        "number of tokens that are kept, of the prompt's end, -1 for as many as leave room for `max_tokens`; "
        "not with `echo`"
    )
    waiting_timeout: Seconds | None = field("seconds until the first step; at most the server's own")
    running_timeout: Seconds | None = field("seconds from the first step on; at most the server's own")
    deadline: Seconds | None = field("seconds in which it should end; see scheduling")
    ttft_target: Seconds | None = field("seconds in which its first token should come; see scheduling")
    itl_target: Seconds | None = field("seconds of steps that prompts share with it; see scheduling")
    max_lag: Annotated[int, Field(ge=1)] | None = field(
        "unread tokens beyond which nothing more is computed; at most the server's own"
    )


class ThinkingSwitch(Object):
    """Anthropic's object that switches thinking."""

    type: Literal["enabled", "disabled"] = field("whether the model thinks", ...)


def _switched(given: Any) -> Any:
    return admit(ThinkingSwitch, given).type == "enabled" if isinstance(given, dict) else given


_Switch = Annotated[bool, BeforeValidator(_switched, json_schema_input_type=bool | ThinkingSwitch)]
_TEMPLATE = Refused((), "use chat_template_kwargs, if the model's template has such a variable")


class ChatTemplateFields(Object):
    """The fields that a chat is rendered from."""

    tools: Annotated[Any, later(Annotated[list[Tool], Field(max_length=MAX_TOOLS)])] = field(
        "functions that the model may call"
    )
    tool_choice: Annotated[Any, later(Literal["none", "auto", "required"] | ChosenTool)] = field(
        "`none`, `auto`, `required`, or one function"
    )
    parallel_tool_calls: bool | None = field("false: one call at most")
    chat_template_kwargs: dict[str, Any] | None = field(
        "variables of the chat template; one that it does not read is refused"
    )
    add_generation_prompt: bool | None = field("false: the prompt ends with the last message")
    continue_final_message: bool | None = field("the answer continues the last message")
    documents: Any = field("goes to the chat template; refused if that does not read it")
    reasoning_effort: Any = field(
        "goes to the chat template; if that does not read it, `none` may switch thinking off, and other "
        f"values limit a model that thinks: {EFFORT_BUDGETS}; refused of others"
    )


class ChatBody(
    ChatTemplateFields,
    _Body,
    refused={
        "prompt": Refused((), "is for /v1/completions"),
        "best_of": _ONE,
        "echo": OFF,
        "suffix": Refused(("",), "is for /v1/completions"),
        "chat_template": NO,
        "mm_processor_kwargs": _EMPTY,
        "stream_reasoning": Refused((True,)),
        "reasoning": _TEMPLATE,
    },
):
    """A body of ``/v1/chat/completions``."""

    messages: Annotated[Any, later(Annotated[list[Message], Field(min_length=1)], required=True)] = field(
        "the conversation", ...
    )
    logprobs: bool = field("whether logprobs of the tokens are reported", False)
    top_logprobs: _TopLogprobs | None = field("number of likely alternatives")
    enable_thinking: bool | None = field("switches thinking on or off, as the chat template can")
    think: bool | None = field("Ollama's name of `enable_thinking`")
    thinking: _Switch | None = field("the same, also as an object")
    include_reasoning: bool = field("false: the reasoning is left out of the answer", True)
    separate_reasoning: bool = field("false: the reasoning stays in the content", True)


_CHATS = "is for /v1/chat/completions"


class CompletionBody(
    _Completion,
    _Body,
    refused={
        "messages": Refused((), _CHATS),
        "tools": Refused(([],), _CHATS),
        "tool_choice": Refused(("none", "auto"), _CHATS),
        "parallel_tool_calls": Refused((True, False)),
        "chat_template_kwargs": Refused(({},), _CHATS),
        "reasoning_effort": Refused((), _CHATS),
        "top_logprobs": Refused((), "use logprobs"),
    },
):
    """A body of ``/v1/completions``."""

    prompt: Annotated[Any, prompts(MAX_CHOICES)] = field("text, token ids, or a list of either", ...)
    logprobs: _TopLogprobs | None = field("logprobs of the tokens with this number of likely alternatives")
    echo: bool = field("the answer begins with the prompt", False)
    suffix: str = field("what follows the answer, which is written between: see diffusion and serving", "")
    best_of: _Choices | None = field("must equal `n`")
