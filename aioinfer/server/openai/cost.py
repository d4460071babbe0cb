"""Cost: refuses calls whose answers would be too large, before anything is computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeGuard

from aioinfer.engine import Prompt
from aioinfer.errors import InvalidRequest
from aioinfer.server.http.limits import CHARACTERS_PER_ENTRY, Limits
from aioinfer.server.openai.protocol import Call

__all__ = ["check_answer"]

#: characters of a token of an echoed prompt
_CHARACTERS_PER_TOKEN = 8


def check_answer(call: Call, limits: Limits) -> None:
    """Raise InvalidRequest for a call whose answer may have more logprobs or more of its prompts."""
    repeated = call.echo or call.token_ids
    echoed = call.n * sum(_characters(prompt) for prompt in call.prompts) if repeated else 0
    if echoed > limits.echo:
        raise InvalidRequest(
            "echo" if call.echo else "return_token_ids",
            f"{echoed} characters would be repeated (choices x prompt); this server repeats at most "
            f"{limits.echo} ({CHARACTERS_PER_ENTRY} x max_answer_logprobs): ask for fewer choices",
        )
    params = call.params
    entries = 0
    if params.logprobs is not None:
        tokens = limits.context if params.max_tokens is None else params.max_tokens
        entries += min(tokens, limits.context) * (1 + params.logprobs)
    if params.prompt_logprobs is not None:
        tokens = max(len(prompt) if _is_ids(prompt) else limits.context for prompt in call.prompts)
        entries += min(tokens, limits.context) * (1 + params.prompt_logprobs)
    entries *= len(call.prompts) * call.n
    if entries > limits.logprobs:
        raise InvalidRequest(
            "logprobs" if params.logprobs is not None else "prompt_logprobs",
            f"{entries} of them may be in the answer (choices x tokens x alternatives); this server "
            f"returns at most {limits.logprobs} (max_answer_logprobs): ask for fewer choices or "
            "alternatives, or a smaller max_tokens",
        )


def _is_ids(prompt: Prompt) -> TypeGuard[Sequence[int]]:
    """The prompt is token ids, and neither text nor the messages of a chat."""
    return isinstance(prompt, Sequence) and not isinstance(prompt, str) and isinstance(prompt[0], int)


def _characters(prompt: Prompt) -> int:
    """About the length of a prompt as text."""
    if isinstance(prompt, str):
        return len(prompt)
    return _CHARACTERS_PER_TOKEN * len(prompt) if _is_ids(prompt) else 0
