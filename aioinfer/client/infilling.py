"""Infilling: what stands between a prompt and a suffix, by the means that a model has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from aioinfer.errors import InvalidRequest
from aioinfer.loop.options import PromptSource
from aioinfer.params import SamplingParams

if TYPE_CHECKING:
    from aioinfer.client.requests import Requests

__all__ = ["infilled"]

#: by family, the tokens before the prompt, before the suffix and before what is between, and perhaps one that
#: ends that: Qwen and CodeGemma, StarCoder and Granite, its first release, CodeLlama, DeepSeek
_MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
)


async def infilled(
    engine: Requests, prompt: PromptSource, suffix: str, params: SamplingParams
) -> tuple[PromptSource, SamplingParams]:
    """Prompt and parameters of a request for the text between ``prompt`` and ``suffix``.

    An autoregressive model gets both between the tokens that it was trained with. A diffusion model gets the
    suffix behind a hole of ``max_tokens``, as far as it is in view there: within the hole's last block.
    Raises InvalidRequest: the model has no such tokens.
    """
    info = engine._serving().info
    if info.block_size is None:
        begin, behind, between, *end = _marks(engine)
        ids, after = await engine.tokenize(prompt), await _part(engine, suffix)
        first = await _leading(engine, ids)
        whole = engine.prompt([*ids[:first], begin, *ids[first:], behind, *after, between])
        return whole, replace(params, stop_token_ids=[*params.stop_token_ids, *end])
    if not params.max_tokens:
        raise InvalidRequest("max_tokens", "must be at least 1 with a suffix: the tokens before it at most")
    ids, after = await engine.tokenize(prompt), await _part(engine, suffix)
    room = info.max_model_len - len(ids)
    hole = max(1, min(params.max_tokens, room))
    template = [*[None] * hole, *after[: min(info.block_size, max(0, room - hole))]]
    return prompt, replace(params, template=template, max_tokens=hole)


def _marks(engine: Requests) -> list[int]:
    tokenizer = engine.tokenizer
    added = {} if tokenizer is None else tokenizer.added_tokens
    for names in _MARKS:
        found = [added[name] for name in names if name in added]
        if len(found) >= 3:
            return found
    raise InvalidRequest("suffix", "the model has no tokens that mark what is before, behind and between")


async def _part(engine: Requests, text: str) -> list[int]:
    try:
        return await engine.tokenize(text, add_special_tokens=False)
    except InvalidRequest as error:
        raise InvalidRequest("suffix", error.message, code=error.code) from None


async def _leading(engine: Requests, ids: Sequence[int]) -> int:
    """How many special tokens the tokenizer has put before a prompt."""
    whole, part = await engine.tokenize("a"), await _part(engine, "a")
    count = max(0, len(whole) - len(part))
    return count if whole[count:] == part and [*ids[:count]] == whole[:count] else 0
