"""Bounds: the values that parameters of a request can have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

__all__ = ["BOUNDS", "LONGEST_END", "MOST", "MOST_PROCESSORS", "SEED_LIMIT", "Bounds"]

SEED_LIMIT = 2**63
_MAX_TOP_LOGPROBS = 20
_MAX_ROUNDS = 4096


class Bounds(NamedTuple):
    """The values that a number can have: from ``low`` to ``high``, both included unless ``low_open``."""

    low: float
    high: float
    whole: bool = False
    low_open: bool = False


def _whole(low: int, high: int) -> Bounds:
    return Bounds(low, high, whole=True)


#: the bounds of the fields of SamplingParams and DiffusionParams that are numbers
BOUNDS: Mapping[str, Bounds] = {
    "temperature": Bounds(0.0, 100.0),
    "top_p": Bounds(0.0, 1.0, low_open=True),
    "top_k": _whole(-1, 2**31 - 1),
    "min_p": Bounds(0.0, 1.0),
    "top_n_sigma": Bounds(0.0, 100.0),
    "seed": _whole(-SEED_LIMIT, SEED_LIMIT - 1),
    "max_tokens": _whole(0, 2**31 - 1),
    "thinking_budget": _whole(0, 2**31 - 1),
    "thinking_grace": _whole(0, 2**31 - 1),
    "min_tokens": _whole(0, 2**31 - 1),
    # Logits that are divided by less could overflow.
    "repetition_penalty": Bounds(0.01, 100.0),
    "presence_penalty": Bounds(-2.0, 2.0),
    "frequency_penalty": Bounds(-2.0, 2.0),
    "logprobs": _whole(0, _MAX_TOP_LOGPROBS),
    "prompt_logprobs": _whole(0, _MAX_TOP_LOGPROBS),
    "logprob_start_len": _whole(0, 2**31 - 1),
    "threshold": Bounds(0.0, 1.0),
    "edit_threshold": Bounds(0.0, 1.0),
    "steps": _whole(1, _MAX_ROUNDS),
    "max_post_edits": _whole(0, _MAX_ROUNDS),
    "penalty": Bounds(0.0, 100.0),
    "factor": Bounds(0.0, 1000.0, low_open=True),
    "entropy_bound": Bounds(0.0, 1000.0),
    "t_min": Bounds(0.0, 100.0, low_open=True),
    "t_max": Bounds(0.0, 100.0, low_open=True),
    "stability_threshold": _whole(0, _MAX_ROUNDS),
    "confidence_threshold": Bounds(0.0, 1000.0),
    # values of logit_bias, and ids of tokens wherever they are
    "bias": Bounds(-100.0, 100.0),
    "token_id": _whole(0, 2**31 - 1),
}
#: logits processors of a request
MOST_PROCESSORS = 16
#: characters of ``thinking_end``
LONGEST_END = 1024
#: entries of a list, and characters of each of its texts or ids of each of its lists, at most
MOST: Mapping[str, tuple[int, int]] = {
    "stop": (16, 1024),
    "stop_regex": (8, 512),
    "stop_token_ids": (1024, 0),
    "logit_bias": (1024, 0),
    "bad_words": (256, 256),
    "allowed_token_ids": (1 << 17, 0),
}
