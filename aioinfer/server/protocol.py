"""Protocol: the bytes of a request in OpenAI's protocol become one checked :class:`Call`.

A body enters this package once, in :func:`parse_chat` or :func:`parse_completion`. Fields that would change
the output and are not supported are refused. Other unknown fields are ignored, because clients send
bookkeeping (``metadata``, ``store``, ``user`` ...) that the engine does not need.
"""

from __future__ import annotations

import copy
import json
import logging
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from aioinfer import plugins
from aioinfer.engine import Prompt
from aioinfer.errors import InvalidRequest
from aioinfer.params import SamplingParams
from aioinfer.server.answers import AnswerFormat, ChatFormat
from aioinfer.server.diffusion import parse_diffusion
from aioinfer.server.failures import Failure, Refused
from aioinfer.server.messages import parse_messages
from aioinfer.server.structured import STRUCTURED_FIELDS, parse_grammar
from aioinfer.server.tools import TOOL_FIELDS, parse_tools

__all__ = ["Call", "Served", "model_not_found", "parse_chat", "parse_completion"]

_log = logging.getLogger("aioinfer.server")

_MAX_CHOICES = 128
_LONGEST_INTEGER = 64
#: body field -> field of SamplingParams
_SAMPLING = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "seed": "seed",
    "max_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "min_tokens": "min_tokens",
    "stop": "stop",
    "stop_regex": "stop_regex",
    "stop_token_ids": "stop_token_ids",
    "ignore_eos": "ignore_eos",
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "skip_special_tokens": "skip_special_tokens",
    "include_stop_str_in_output": "include_stop",
    "logit_bias": "logit_bias",
    "allowed_token_ids": "allowed_token_ids",
    "bad_words": "bad_words",
    **{name: name for name in plugins.names(plugins.FILTERS)},
}
#: Unsupported fields -> the values that leave the output unconstrained and are accepted.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "suffix": (None, ""),
    "use_beam_search": (None, False),
}
_KNOWN = {
    *_SAMPLING,
    *_UNSUPPORTED,
    *STRUCTURED_FIELDS,
    *TOOL_FIELDS,
    "diffusion",
    "logprobs",
    "top_logprobs",
    "prompt_logprobs",
    "model",
    "messages",
    "prompt",
    "n",
    "best_of",
    "echo",
    "stream",
    "stream_options",
    "chat_template_kwargs",
    "user",
    "priority",
    "cache_salt",
    "routing_key",
    "prompt_cache_key",
}


@dataclass(frozen=True, slots=True)
class Served:
    """What a server offers: the model's name, its default parameters and the format of its chat answers; and
    how many messages a chat may have."""

    model: str
    defaults: SamplingParams
    chat: ChatFormat = field(default_factory=ChatFormat)
    max_messages: int = 4096


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
    echo: bool
    chat_template_kwargs: Mapping[str, Any] | None
    #: arguments of :meth:`aioinfer.Engine.generate` for the queue and the prefix cache
    scheduling: Mapping[str, Any]
    #: parsers of the answers; None: answers are plain content
    answer: AnswerFormat | None = None
    #: choices include the denoising round in which each token was written
    step_map: bool = False

    def choices(self) -> list[tuple[Prompt, SamplingParams]]:
        """Prompt and parameters of every choice, by index."""
        return [
            (prompt, self.params if number == 0 else _reseeded(self.params, number))
            for prompt in self.prompts
            for number in range(self.n)
        ]


def parse_chat(raw: bytes, served: Served) -> Call:
    """A body of ``/v1/chat/completions``. Raises InvalidRequest, and Refused for another model."""
    body = _object(raw, served)
    messages = body.get("messages")
    if isinstance(messages, list) and len(messages) > served.max_messages:
        most = f"at most {served.max_messages} (max_messages), got {len(messages)}"
        raise InvalidRequest("messages", most)
    messages = parse_messages(messages)
    kwargs = body.get("chat_template_kwargs")
    if kwargs is not None and not isinstance(kwargs, dict):
        raise InvalidRequest("chat_template_kwargs", "must be an object")
    if kwargs is not None and {"tokenize", "chat_template", "conversation", "tools"} & kwargs.keys():
        raise InvalidRequest("chat_template_kwargs", "may hold variables of the template only")
    top = body.get("top_logprobs")
    if top is not None and not _flag(body, "logprobs"):
        raise InvalidRequest("top_logprobs", "needs logprobs")
    logprobs = (0 if top is None else top) if _flag(body, "logprobs") else None
    tools = parse_tools(body)
    if tools is not None:
        kwargs = {**(kwargs or {}), "tools": [each.for_template() for each in tools.functions]}
    call = _call("chatcmpl", body, served, [messages], logprobs, kwargs)
    params, answer = served.chat.apply(call.params, tools)
    return replace(call, params=params, answer=answer)


def parse_completion(raw: bytes, served: Served) -> Call:
    """A body of ``/v1/completions``; ``max_tokens`` is 16 by default.

    Raises InvalidRequest, and Refused for another model.
    """
    body = _object(raw, served)
    prompt = body.get("prompt")
    prompts: list[Any]
    if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and _is_ids(prompt)):
        prompts = [prompt]
    elif isinstance(prompt, list) and prompt and all(isinstance(item, (str, list)) for item in prompt):
        prompts = prompt
    else:
        raise InvalidRequest("prompt", "must be text, token ids, or a non-empty list of either")
    if body.get("tools"):
        raise InvalidRequest("tools", "are for chats")
    if body.get("best_of") not in (None, body.get("n") or 1):
        raise InvalidRequest("best_of", "must equal n")
    if body.get("max_tokens") is None:
        body["max_tokens"] = 16
    logprobs = body.get("logprobs")
    if logprobs is not None and _flag(body, "echo") and _flag(body, "stream"):
        raise InvalidRequest("logprobs", "of an echoed prompt cannot be streamed")
    return _call("cmpl", body, served, prompts, logprobs)


def model_not_found(served: str, wanted: Any) -> Refused:
    """The failure of a request for another model than the served one."""
    message = f"the model {str(wanted)[:200]!r} does not exist; this server has {served!r}"
    return Refused(Failure(404, "invalid_request_error", message, param="model", code="model_not_found"))


def _object(raw: bytes, served: Served) -> dict[str, Any]:
    """The JSON object of a body for the served model. NaN, infinity and unbounded nesting are refused."""
    try:
        body = json.loads(raw, parse_constant=_no_constant, parse_int=_integer)
    except RecursionError:
        raise InvalidRequest("body", "is nested too deeply") from None
    except ValueError as error:
        raise InvalidRequest("body", f"is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise InvalidRequest("body", "must be a JSON object")
    if body.get("model") not in (None, served.model):
        raise model_not_found(served.model, body["model"])
    return body


def _call(
    kind: str,
    body: Mapping[str, Any],
    served: Served,
    prompts: list[Prompt],
    logprobs: int | None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> Call:
    """The fields that both endpoints have."""
    for name, neutral in _UNSUPPORTED.items():
        if name in body and body[name] not in neutral:
            raise InvalidRequest(name, "is not supported by this server")
    for name in body.keys() - _KNOWN:
        _log.debug("ignoring the unknown field %s", name)
    n = 1 if body.get("n") is None else body["n"]
    if type(n) is not int or not 1 <= n * len(prompts) <= _MAX_CHOICES:
        raise InvalidRequest("n", f"prompts times n must be 1 to {_MAX_CHOICES}")
    diffusion, step_map = parse_diffusion(body, served.defaults.diffusion)
    options = body.get("stream_options") or {}
    if not isinstance(options, dict):
        raise InvalidRequest("stream_options", "must be an object")
    return Call(
        id=f"{kind}-{uuid.uuid4().hex}",
        created=int(time.time()),
        model=served.model,
        prompts=prompts,
        params=_sampling(body, replace(served.defaults, diffusion=diffusion), logprobs),
        n=n,
        stream=_flag(body, "stream"),
        include_usage=_flag(options, "include_usage"),
        echo=_flag(body, "echo"),
        chat_template_kwargs=chat_template_kwargs,
        scheduling={
            "priority": 0 if body.get("priority") is None else body["priority"],
            "cache_salt": body.get("cache_salt") or "",
            "routing_key": body.get("routing_key") or body.get("prompt_cache_key"),
        },
        step_map=step_map,
    )


def _sampling(body: Mapping[str, Any], defaults: SamplingParams, logprobs: int | None) -> SamplingParams:
    """The model's defaults, overridden by the fields of the body that are not null."""
    values = {name: getattr(defaults, name) for name in SamplingParams.__dataclass_fields__}
    for name, param in _SAMPLING.items():
        if body.get(name) is None:
            continue
        values[param] = _bias(body[name]) if name == "logit_bias" else body[name]
    if not isinstance(values["stop_token_ids"], (list, tuple)):
        raise InvalidRequest("stop_token_ids", "must be a list of token ids")
    values["grammar"] = parse_grammar(body)
    values["logprobs"] = logprobs
    if logprobs is not None and _flag(body, "echo"):
        values["prompt_logprobs"] = logprobs
    return SamplingParams(**values)


def _bias(value: Any) -> Any:
    """Token ids as integers: keys of JSON objects are text."""
    if not isinstance(value, dict):
        raise InvalidRequest("logit_bias", "must be an object")
    try:
        return {int(token): bias for token, bias in value.items()}
    except ValueError:
        raise InvalidRequest("logit_bias", "has keys that are not token ids") from None


def _reseeded(params: SamplingParams, number: int) -> SamplingParams:
    """The parameters of choice ``number``: its seed differs, so that the choices differ."""
    if params.seed is None:
        return params
    # A copy skips __post_init__: checking large parameters again for 128 choices would block the event loop.
    other = copy.copy(params)
    object.__setattr__(other, "seed", (params.seed + number) % 2**63)
    return other


def _flag(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise InvalidRequest(name, "must be true or false")
    return value


def _is_ids(values: list[Any]) -> bool:
    return all(isinstance(value, int) and not isinstance(value, bool) for value in values)


def _integer(digits: str) -> int:
    """A Python function, so that other threads run between the integers of a long list; numbers of thousands
    of digits take long, and no field has one."""
    if len(digits) > _LONGEST_INTEGER:
        raise ValueError(f"an integer has {len(digits)} digits")
    return int(digits)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
