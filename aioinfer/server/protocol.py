"""Protocol: OpenAI's request bodies into what the engine takes, and results into its response bodies.

Fields that would change the output and cannot be honoured are refused; anything else that is unknown is
ignored, because clients send bookkeeping (``metadata``, ``store``, ``user`` ...) that no engine needs.
"""

from __future__ import annotations

import copy
import json
import logging
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from aioinfer.engine import Prompt
from aioinfer.errors import InvalidRequest
from aioinfer.outputs import Usage
from aioinfer.params import SamplingParams
from aioinfer.server.answers import AnswerFormat, ChatFormat
from aioinfer.server.diffusion import parse_diffusion
from aioinfer.server.messages import parse_messages
from aioinfer.server.structured import STRUCTURED_FIELDS, parse_grammar
from aioinfer.server.tools import TOOL_FIELDS, parse_tools

__all__ = ["Call", "parse_body", "parse_chat", "parse_completion", "usage_body"]

_log = logging.getLogger("aioinfer.server")

_MAX_CHOICES = 128
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
}
#: Fields that constrain the output, with the values that ask for nothing.
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
class Call:
    """One API call, checked: every prompt is generated for ``n`` times."""

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
    #: what :meth:`aioinfer.Engine.generate` takes for its queue and its cache
    scheduling: Mapping[str, Any]
    #: how answers are read; None: they are content
    answer: AnswerFormat | None = None
    #: choices say in which round of its block each token was written
    step_map: bool = False

    def choices(self) -> list[tuple[Prompt, SamplingParams]]:
        """Prompt and parameters of every choice, in the order of their indexes."""
        return [
            (prompt, self.params if number == 0 else _reseeded(self.params, number))
            for prompt in self.prompts
            for number in range(self.n)
        ]


def parse_body(raw: bytes) -> dict[str, Any]:
    """A JSON object. Raises InvalidRequest, also for NaN, infinity and bottomless nesting."""
    try:
        body = json.loads(raw, parse_constant=_no_constant)
    except RecursionError:
        raise InvalidRequest("body", "is nested too deeply") from None
    except ValueError as error:
        raise InvalidRequest("body", f"is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise InvalidRequest("body", "must be a JSON object")
    return body


def parse_chat(
    body: Mapping[str, Any], defaults: SamplingParams, model: str, chat_format: ChatFormat
) -> Call:
    """A body of ``/v1/chat/completions``."""
    messages = parse_messages(body.get("messages"))
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
        kwargs = {**(kwargs or {}), "tools": [each.offer() for each in tools.functions]}
    call = _call("chatcmpl", body, [messages], defaults, model, kwargs, logprobs)
    params, answer = chat_format.apply(call.params, tools)
    return replace(call, params=params, answer=answer)


def parse_completion(body: Mapping[str, Any], defaults: SamplingParams, model: str) -> Call:
    """A body of ``/v1/completions``, whose ``max_tokens`` is 16 unless it says otherwise."""
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
        raise InvalidRequest("best_of", "other than n is not supported")
    if body.get("max_tokens") is None:
        body = {**body, "max_tokens": 16}
    logprobs = body.get("logprobs")
    if logprobs is not None and _flag(body, "echo") and _flag(body, "stream"):
        raise InvalidRequest("logprobs", "of an echoed prompt cannot be streamed")
    return _call("cmpl", body, prompts, defaults, model, None, logprobs)


def usage_body(usages: Sequence[Usage], n: int) -> dict[str, Any]:
    """Usage of a call: a prompt counts once, however many choices it has."""
    prompt = sum(usage.prompt_tokens for usage in usages[::n])
    completion = sum(usage.completion_tokens for usage in usages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in usages[::n])},
    }


def _call(
    kind: str,
    body: Mapping[str, Any],
    prompts: list[Prompt],
    defaults: SamplingParams,
    model: str,
    chat_template_kwargs: Mapping[str, Any] | None,
    logprobs: int | None,
) -> Call:
    for name, neutral in _UNSUPPORTED.items():
        if name in body and body[name] not in neutral:
            raise InvalidRequest(name, "is not supported by this server")
    for name in body.keys() - _KNOWN:
        _log.debug("ignoring the unknown field %s", name)
    n = 1 if body.get("n") is None else body["n"]
    if type(n) is not int or not 1 <= n * len(prompts) <= _MAX_CHOICES:
        raise InvalidRequest("n", f"prompts times n must be 1 to {_MAX_CHOICES}")
    diffusion, step_map = parse_diffusion(body, defaults.diffusion)
    options = body.get("stream_options") or {}
    if not isinstance(options, dict):
        raise InvalidRequest("stream_options", "must be an object")
    return Call(
        id=f"{kind}-{uuid.uuid4().hex}",
        created=int(time.time()),
        model=model,
        prompts=prompts,
        params=_sampling(body, replace(defaults, diffusion=diffusion), logprobs),
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
    """The model's own defaults, overridden by what the body says; null says nothing."""
    values = {name: getattr(defaults, name) for name in SamplingParams.__dataclass_fields__}
    for name, field in _SAMPLING.items():
        if body.get(name) is None:
            continue
        values[field] = _bias(body[name]) if name == "logit_bias" else body[name]
    if not isinstance(values["stop_token_ids"], (list, tuple)):
        raise InvalidRequest("stop_token_ids", "must be a list of token ids")
    values["grammar"] = parse_grammar(body)
    values["logprobs"] = logprobs
    if logprobs is not None and _flag(body, "echo"):
        values["prompt_logprobs"] = logprobs
    return SamplingParams(**values)


def _bias(value: Any) -> Any:
    """JSON's keys are text."""
    if not isinstance(value, dict):
        raise InvalidRequest("logit_bias", "must be an object")
    try:
        return {int(token): bias for token, bias in value.items()}
    except ValueError:
        raise InvalidRequest("logit_bias", "has keys that are no token ids") from None


def _reseeded(params: SamplingParams, number: int) -> SamplingParams:
    """The same parameters for another choice: a given seed must not give the same text again."""
    if params.seed is None:
        return params
    # Nothing else is checked again: with large parameters and many choices that would take a second.
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


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
