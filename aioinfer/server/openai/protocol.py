"""Protocol: the bytes of a request in OpenAI's protocol become one checked :class:`Call`.

A body enters this package once, in :func:`parse_chat` or :func:`parse_completion`. No field is ignored: see
:mod:`aioinfer.server.openai.fields`. An error names the field of the body, and not the parameter that it
stands for.
"""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from aioinfer.chat.answers import AnswerFormat, ChatFormat
from aioinfer.chat.fields import Honoured, Table, check
from aioinfer.chat.messages import parse_messages
from aioinfer.chat.structured import parse_grammar
from aioinfer.chat.tools import Tools, parse_tools
from aioinfer.chat.variables import template_variables
from aioinfer.engine import Prompt
from aioinfer.errors import EngineClosed, InvalidRequest, renamed, shown
from aioinfer.params import SamplingParams
from aioinfer.server.http.failures import Failure, Refused
from aioinfer.server.openai.diffusion import parse_diffusion
from aioinfer.server.openai.extras import MAX_TOKENS, Extras, parse_extras
from aioinfer.server.openai.fields import CHAT, COMPLETION, MAX_CHOICES, NESTED, REQUEST_ID
from aioinfer.server.openai.prediction import parse_prediction

__all__ = [
    "Call",
    "Served",
    "chat_call",
    "conversation",
    "flag_of",
    "model_not_found",
    "object_of",
    "parse_chat",
    "parse_completion",
]

_LONGEST_INTEGER = 64
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")
_REQUEST_ID = re.compile(REQUEST_ID)


@dataclass(frozen=True, slots=True)
class Served:
    """What a server offers: the model's name, its default parameters and the format of its chat answers; how
    many messages a chat may have; and what computes the answers. Of one request: its id; empty: a new one."""

    model: str
    defaults: SamplingParams
    chat: ChatFormat = field(default_factory=ChatFormat)
    max_messages: int = 4096
    fingerprint: str = ""
    #: options of :meth:`aioinfer.Engine.generate` that a request may lower; None: it may set any
    most: Mapping[str, float | None] = field(default_factory=dict)
    #: further names of the model
    aliases: frozenset[str] = frozenset()
    #: names of the adapters that are loaded
    adapters: frozenset[str] = frozenset()
    #: the engine serves, so that these are all names that there are
    ready: bool = True
    request_id: str = ""

    def adapter(self, wanted: Any) -> str | None:
        """The adapter of a call that asks for the model ``wanted``; None: the model alone."""
        adapters = self.adapters - self.aliases - {self.model}
        return wanted if isinstance(wanted, str) and wanted in adapters else None

    def name(self, wanted: Any) -> str:
        """The name in the answer to a call that asks for the model ``wanted``; None: any. Raises Refused;
        EngineClosed: it may be a name later."""
        if wanted is None or wanted == self.model:
            return self.model
        if isinstance(wanted, str) and (wanted in self.aliases or wanted in self.adapters):
            return wanted
        if not self.ready:
            raise EngineClosed("the engine does not serve, and its adapters are not known")
        raise model_not_found(self.model, wanted)


@dataclass(frozen=True, slots=True)
class Call:
    """One API call, checked. It has ``n`` choices per prompt."""

    id: str
    created: int
    model: str
    prompts: list[Prompt]
    params: SamplingParams
    n: int
    stream: bool
    include_usage: bool
    #: the events of a stream have the token counts of their choice so far
    continuous_usage: bool
    echo: bool
    chat_template_kwargs: Mapping[str, Any] | None
    #: arguments of :meth:`aioinfer.Engine.generate` for the queue and the prefix cache
    scheduling: Mapping[str, Any]
    #: parsers of the answers; None: answers are plain content
    answer: AnswerFormat | None = None
    #: choices include the denoising round in which each token was written
    step_map: bool = False
    fingerprint: str = ""
    #: what it asks for beyond OpenAI's fields
    extras: Extras = field(default_factory=Extras)
    #: argument of the engine -> field of the body that it comes from, where the names differ
    names: Mapping[str, str] = field(default_factory=dict)
    #: what the answers of other protocols take from the body
    repeated: Mapping[str, Any] = field(default_factory=dict)

    def named(self, error: BaseException) -> BaseException:
        """The error of this call with the names of the body's fields."""
        return renamed(error, self.names)

    def choices(self) -> list[tuple[Prompt, SamplingParams]]:
        """Prompt and parameters of every choice, by index."""
        return [
            (prompt, self.params.for_choice(number)) for prompt in self.prompts for number in range(self.n)
        ]


def parse_chat(raw: bytes, served: Served) -> Call:
    """A body of ``/v1/chat/completions``. Raises InvalidRequest, and Refused for another model."""
    return chat_call(object_of(raw, served, CHAT), served)


def chat_call(body: Mapping[str, Any], served: Served, prefix: str = "chatcmpl-") -> Call:
    """The call of the fields of a chat, which the parsers of other protocols translate their bodies to.

    ``prefix`` begins the id of the answer. Raises InvalidRequest of a field of ``body``; fields in no table
    must have been refused.
    """
    messages, kwargs, tools = conversation(body, served)
    top = body.get("top_logprobs")
    if top is not None and not flag_of(body, "logprobs"):
        raise InvalidRequest("top_logprobs", "needs logprobs")
    logprobs = (0 if top is None else top) if flag_of(body, "logprobs") else None
    names = {"prompt": "messages", "logprobs": "logprobs" if top is None else "top_logprobs"}
    call = _call(prefix, body, served, [messages], logprobs, CHAT, names, kwargs or None)
    begins = served.chat.continued(messages[-1]) if kwargs.get("continue_final_message") else None
    try:
        params, answer = served.chat.apply(
            call.params,
            tools,
            separate=_unless_false(body, "separate_reasoning"),
            shown=_unless_false(body, "include_reasoning"),
            begins=begins,
        )
    except InvalidRequest as refused:
        raise call.named(refused) from None
    if answer is not None and answer.constrained:
        names["grammar"] = "tools"  # the grammar was built from their schemas
    return replace(call, params=params, answer=answer)


def conversation(
    body: Mapping[str, Any], served: Served
) -> tuple[list[dict[str, Any]], dict[str, Any], Tools | None]:
    """The messages of a chat, the variables of its template and its tools. Raises InvalidRequest."""
    template_names = served.chat.template_names
    messages = body.get("messages")
    if isinstance(messages, list) and len(messages) > served.max_messages:
        most = f"at most {served.max_messages} (max_messages), got {len(messages)}"
        raise InvalidRequest("messages", most)
    messages = parse_messages(messages, template_names)
    kwargs = template_variables(body, served.chat)
    tools = parse_tools(body)
    if tools is not None:
        kwargs["tools"] = served.chat.offered(tools)
    return messages, kwargs, tools


def parse_completion(raw: bytes, served: Served) -> Call:
    """A body of ``/v1/completions``; ``max_tokens`` is 16 by default.

    Raises InvalidRequest, and Refused for another model.
    """
    body = object_of(raw, served, COMPLETION)
    prompt = body.get("prompt")
    prompts: list[Any]
    if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and _is_ids(prompt)):
        prompts = [prompt]
    elif (
        isinstance(prompt, list)
        and prompt
        and all(
            isinstance(item, str) or (isinstance(item, list) and item and _is_ids(item)) for item in prompt
        )
    ):
        prompts = prompt
    else:
        raise InvalidRequest("prompt", "must be text, token ids, or a non-empty list of either")
    best_of, n = body.get("best_of"), 1 if body.get("n") is None else body["n"]
    if best_of is not None and (type(best_of) is not int or best_of != n):
        raise InvalidRequest("best_of", "must equal n", code="unsupported_parameter")
    if all(body.get(name) is None for name in MAX_TOKENS):
        body["max_tokens"] = 16
    logprobs = body.get("logprobs")
    if logprobs is not None and flag_of(body, "echo") and flag_of(body, "stream"):
        raise InvalidRequest("logprobs", "of an echoed prompt cannot be streamed")
    return _call("cmpl-", body, served, prompts, logprobs, COMPLETION, {})


def model_not_found(served: str, wanted: Any) -> Refused:
    """The failure of a request for another model than the served one."""
    message = f"the model {shown(wanted)} does not exist; this server has {served!r}"
    return Refused(Failure(404, "invalid_request_error", message, param="model", code="model_not_found"))


def object_of(raw: bytes, served: Served, table: Table) -> dict[str, Any]:
    """The JSON object of a body for the served model. NaN, infinity, unbounded nesting and fields not in
    ``table`` are refused with InvalidRequest, another model with Refused."""
    try:
        body = json.loads(
            raw.decode(),
            parse_constant=_no_constant,
            parse_int=_integer,
            parse_float=_float,
            object_pairs_hook=_once,
        )
    except InvalidRequest:
        raise
    except RecursionError:
        raise InvalidRequest("body", "is nested too deeply") from None
    except ValueError as error:
        raise InvalidRequest("body", f"is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise InvalidRequest("body", "must be a JSON object")
    served.name(body.get("model"))
    check(body, table)
    return body


def _call(
    prefix: str,
    body: Mapping[str, Any],
    served: Served,
    prompts: list[Prompt],
    logprobs: int | None,
    table: Table,
    names: dict[str, str],
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> Call:
    """The fields that both endpoints have. ``names`` is completed."""
    n = 1 if body.get("n") is None else body["n"]
    if type(n) is not int or not 1 <= n * len(prompts) <= MAX_CHOICES:
        raise InvalidRequest("n", f"prompts times n must be 1 to {MAX_CHOICES}")
    diffusion, step_map = parse_diffusion(body, served.defaults.diffusion)
    options = {} if body.get("stream_options") is None else body["stream_options"]
    if not isinstance(options, dict):
        raise InvalidRequest("stream_options", "must be an object")
    check(options, NESTED["stream_options"], "stream_options.")
    defaults = replace(served.defaults, diffusion=diffusion)
    params = _sampling(body, defaults, logprobs, table, names)
    extras, options_given = parse_extras(body, served.most)
    other_key = body.get("routing_key") is None
    names |= {"routing_key": "prompt_cache_key" if other_key else "routing_key", "adapter": "model"}
    return Call(
        id=f"{prefix}{_request_id(body, served)}",
        created=int(time.time()),
        model=served.name(body.get("model")),
        prompts=prompts,
        params=params,
        n=n,
        stream=flag_of(body, "stream"),
        include_usage=flag_of(options, "include_usage", "stream_options."),
        continuous_usage=flag_of(options, "continuous_usage_stats", "stream_options."),
        echo=flag_of(body, "echo"),
        chat_template_kwargs=chat_template_kwargs,
        scheduling={
            "priority": 0 if body.get("priority") is None else body["priority"],
            "cache_salt": "" if body.get("cache_salt") is None else body["cache_salt"],
            "routing_key": body.get("prompt_cache_key") if other_key else body["routing_key"],
            "adapter": served.adapter(body.get("model")),
            **options_given,
        },
        step_map=step_map,
        fingerprint=served.fingerprint,
        extras=extras,
        names=names,
    )


def _request_id(body: Mapping[str, Any], served: Served) -> str:
    given = body.get("request_id")
    if given is None:
        return served.request_id or uuid.uuid4().hex
    if not isinstance(given, str) or not _REQUEST_ID.fullmatch(given):
        raise InvalidRequest("request_id", "must be 1 to 128 letters, digits and characters of ._:-")
    return given


def _sampling(
    body: Mapping[str, Any],
    defaults: SamplingParams,
    logprobs: int | None,
    table: Table,
    names: dict[str, str],
) -> SamplingParams:
    """The model's defaults, overridden by the fields of the body that are not null. Enters the fields into
    ``names``, by parameter."""
    values = {name: getattr(defaults, name) for name in SamplingParams.__dataclass_fields__}
    for name, rule in table.items():
        if not isinstance(rule, Honoured) or rule.param is None or body.get(name) is None:
            continue
        value = _CONVERTED[name](body[name]) if name in _CONVERTED else body[name]
        if name == "n_predict" and value == -1:
            value = None  # no limit, in llama.cpp
        if rule.param in names and values[rule.param] != value:
            raise InvalidRequest(name, f"differs from {names[rule.param]}")
        values[rule.param], names[rule.param] = value, name
    if not isinstance(values["stop_token_ids"], (list, tuple)):
        raise InvalidRequest("stop_token_ids", "must be a list of token ids")
    grammar = parse_grammar(body)
    if grammar is not None:
        names["grammar"], values["grammar"] = grammar
    values["logprobs"] = logprobs
    if values["prompt_logprobs"] is not None and flag_of(body, "stream"):
        raise InvalidRequest("prompt_logprobs", "cannot be streamed")
    if logprobs is not None and flag_of(body, "echo"):
        if values["prompt_logprobs"] not in (None, logprobs):
            raise InvalidRequest("prompt_logprobs", "differs from the logprobs of the echoed prompt")
        values["prompt_logprobs"], names["prompt_logprobs"] = logprobs, "echo"
    try:
        if table is CHAT and values["max_tokens"] == 0:
            raise InvalidRequest(
                "max_tokens", "must be a positive number: only completions may have no tokens"
            )
        return SamplingParams(**values)
    except InvalidRequest as refused:
        raise renamed(refused, names) from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose keys differ: of two equal ones, one would be ignored."""
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidRequest("body", f"has the key {shown(twice)} twice in one object")
    return found


def _bias(value: Any) -> Any:
    """Token ids as integers: keys of JSON objects are text."""
    if not isinstance(value, dict):
        raise InvalidRequest("logit_bias", "must be an object")
    for token in value:
        # No other spelling of a number, so that no two keys are the same token.
        if not _TOKEN_ID.fullmatch(token):
            raise InvalidRequest("logit_bias", f"{shown(token)} is not a token id")
    return {int(token): bias for token, bias in value.items()}


#: fields that have another form as parameters
_CONVERTED: Mapping[str, Callable[[Any], Any]] = {"logit_bias": _bias, "prediction": parse_prediction}


def flag_of(body: Mapping[str, Any], name: str, path: str = "") -> bool:
    """A field that is true or false; absent or null it is false. Raises InvalidRequest."""
    value = body.get(name)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise InvalidRequest(f"{path}{name}", "must be true or false")
    return value


def _unless_false(body: Mapping[str, Any], name: str) -> bool:
    return body.get(name) is None or flag_of(body, name)


def _is_ids(values: list[Any]) -> bool:
    return all(isinstance(value, int) and not isinstance(value, bool) for value in values)


def _integer(digits: str) -> int:
    """A Python function, so that other threads run between the integers of a long list; numbers of thousands
    of digits take long, and no field has one."""
    if len(digits) > _LONGEST_INTEGER:
        raise ValueError(f"an integer has {len(digits)} digits")
    return int(digits)


def _float(digits: str) -> float:
    """As :func:`_integer`."""
    if len(digits) > _LONGEST_INTEGER:
        raise ValueError(f"a number has {len(digits)} digits")
    return float(digits)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
