"""Fields of vLLM's and SGLang's dialects that are about the prompt, the queue or the form of the answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from aioinfer.errors import InvalidRequest

__all__ = ["MAX_TOKENS", "OPTIONS", "Extras", "parse_extras"]

#: the names of ``max_tokens``
MAX_TOKENS = ("max_tokens", "max_completion_tokens", "max_new_tokens", "n_predict")
#: options of a request that the server's own bound
OPTIONS = ("waiting_timeout", "running_timeout", "max_lag")


@dataclass(frozen=True, slots=True)
class Extras:
    """What a call asks for beyond OpenAI's fields.

    Attributes:
        token_ids: choices have their token ids, and the answer those of the prompt.
        tokens_by_id: logprobs name tokens by their ids.
        prompt_logprobs: the answer has the logprobs of the prompt.
        form: arguments of :meth:`aioinfer.Engine.prompt`.
    """

    token_ids: bool = False
    tokens_by_id: bool = False
    prompt_logprobs: bool = False
    form: Mapping[str, Any] = field(default_factory=dict)


def parse_extras(body: Mapping[str, Any], most: Mapping[str, float | None]) -> tuple[Extras, dict[str, Any]]:
    """The extras of a body, and its options for :meth:`aioinfer.Engine.generate`.

    ``most``: what the server's config allows for these. Raises InvalidRequest.
    """
    form = {
        name: body[name]
        for name in ("add_special_tokens", "truncate_prompt_tokens")
        if body.get(name) is not None
    }
    if "truncate_prompt_tokens" in form and body.get("echo"):
        raise InvalidRequest("truncate_prompt_tokens", "cannot be combined with echo")
    extras = Extras(
        token_ids=_flag(body, "return_token_ids"),
        tokens_by_id=_flag(body, "return_tokens_as_token_ids"),
        prompt_logprobs=body.get("prompt_logprobs") is not None,
        form=form,
    )
    return extras, {name: _option(body, name, most) for name in OPTIONS if body.get(name) is not None}


def _option(body: Mapping[str, Any], name: str, most: Mapping[str, float | None]) -> Any:
    value, bound = body[name], most.get(name)
    # The engine checks the rest.
    if bound is not None and type(value) in (int, float) and value > bound:
        raise InvalidRequest(name, f"may be {bound:g} at most, as the server is configured")
    return value


def _flag(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    if not isinstance(value, (bool, type(None))):
        raise InvalidRequest(name, "must be true or false")
    return bool(value)
