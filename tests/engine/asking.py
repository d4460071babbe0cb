"""Short ways to ask a running engine, and to see what it makes of a chat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from aioinfer.engine import Engine
from aioinfer.params import SamplingParams
from tests.toys import ToyTokenizer


async def greedy_ids(engine: Engine, prompt: Sequence[int], **params: Any) -> list[int]:
    """Token ids of a greedy answer that is as long as it may be, but for what ``params`` change."""
    wanted = SamplingParams(**{"temperature": 0.0, "ignore_eos": True, **params})
    return (await engine.generate(prompt, wanted)).token_ids


class KeepingTokenizer(ToyTokenizer):
    """Keeps the messages and the template's variables that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Any, Any]] = []

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], /, **template_kwargs: Any) -> list[int]:
        self.seen.append((messages, template_kwargs))
        return [1, 2, 3]
