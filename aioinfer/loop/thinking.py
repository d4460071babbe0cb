"""Thinking: the logits processors that stand for parameters of a request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from aioinfer.errors import InvalidRequest
from aioinfer.params import SamplingParams
from aioinfer.steering.processors import LogitsProcessor
from aioinfer.steering.thinking import ThinkingBudget
from aioinfer.text.reasoning import parser_of
from aioinfer.text.tokenizer import end_of

if TYPE_CHECKING:
    from aioinfer.text.tokenizer import Tokenizer

__all__ = ["ready_processors"]


def ready_processors(
    params: SamplingParams, tokenizer: Tokenizer | None, prompt_ids: Sequence[int], reasoning: str | None
) -> tuple[LogitsProcessor, ...]:
    """The processors that come before those of the request; ``reasoning``: the ``reasoning_parser`` of the
    engine's config. Raises InvalidRequest. Blocks for as long as it takes to tokenize ``thinking_end``."""
    if params.thinking_budget is None:
        return ()
    form = None if tokenizer is None else parser_of(reasoning, tokenizer.chat_templates)
    if form is None or tokenizer is None:
        raise InvalidRequest(
            "thinking_budget",
            "the model has no format of reasoning (reasoning_parser), so there are no thoughts to count",
            code="unsupported_parameter",
        )
    grammar = params.structure
    if grammar is not None and grammar.kind != "answer":
        raise InvalidRequest("thinking_budget", "cannot be combined with a grammar of the whole output")
    begins = None if params.stop_format is None else params.stop_format[2]
    budget = ThinkingBudget(
        form,
        tokenizer,
        params.thinking_budget,
        grace=params.thinking_grace,
        end=params.thinking_end,
        prompt_end=begins or end_of(prompt_ids, tokenizer),
        alone=grammar is not None,
    )
    return (budget,)
