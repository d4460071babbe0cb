"""What tests ask of engines, and to see what they make of a chat."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from aioinfer.engine import Engine
from aioinfer.params import Grammar, SamplingParams
from examples.training.tasks import held_out
from tests.toys import ToyTokenizer


async def greedy_ids(engine: Engine, prompt: Sequence[int], **params: Any) -> list[int]:
    """Token ids of a greedy answer that is as long as it may be, but for what ``params`` change."""
    wanted = SamplingParams(**{"temperature": 0.0, "ignore_eos": True, **params})
    return (await engine.generate(prompt, wanted)).token_ids


#: has tokens that are forced, and others
SCHEMA = Grammar(
    "json_schema",
    json.dumps(
        {
            "type": "object",
            "properties": {
                "favourite_colour": {"enum": ["red", "green", "a rather long name of a colour"]},
                "first_name": {"type": "string", "maxLength": 8},
                "number_of_children": {"type": "integer", "minimum": 0, "maximum": 12},
            },
            "required": ["favourite_colour", "first_name", "number_of_children"],
            "additionalProperties": False,
        }
    ),
)


def bundled_requests() -> list[tuple[Any, SamplingParams]]:
    """Questions to the bundled model, and stories with all that changes how a token is chosen."""
    found: list[tuple[Any, SamplingParams]] = []
    for task in ("add", "copy", "key_value", "json", "second_turn"):
        found += [(item.messages, SamplingParams(temperature=0, max_tokens=40)) for item in held_out(task, 1)]
    wishes: tuple[dict[str, Any], ...] = (
        {"temperature": 1.3, "top_p": 0.95, "logprobs": 2, "prompt_logprobs": 1},
        {"temperature": 0.8, "top_k": 20, "min_p": 0.02},
        {"frequency_penalty": 1.0, "repetition_penalty": 1.2},
        {"temperature": 2.0, "presence_penalty": 1.5, "stop_token_ids": [305]},
        {"logit_bias": {75: 3, 90: -9}, "allowed_token_ids": range(60, 400)},
        {"temperature": 0, "repetition_penalty": 3.0, "min_tokens": 20, "bad_words": ("the", "and")},
        {"grammar": SCHEMA},
        {"grammar": Grammar("regex", "[a-z ]{40}")},
    )
    story = held_out("story", 1)[0].messages
    found += [
        (story, SamplingParams(seed=seed, max_tokens=30, **wish)) for seed in range(2) for wish in wishes
    ]
    return found


class KeepingTokenizer(ToyTokenizer):
    """Keeps the messages and the template's variables that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Any, Any]] = []

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], /, **template_kwargs: Any) -> list[int]:
        self.seen.append((messages, template_kwargs))
        return [1, 2, 3]
