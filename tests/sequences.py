"""Sequences for tests of the scheduler, without an engine."""

from __future__ import annotations

from collections import abc
from typing import Any

from aioinfer.cache.namespace import COMMON, Namespace
from aioinfer.params import SamplingParams
from aioinfer.request import Output, Request
from aioinfer.scheduling.sequence import Sequence
from aioinfer.stream import Stream

__all__ = ["new_sequence", "sequence_of"]


def new_sequence(
    key: int,
    prompt_ids: abc.Sequence[int],
    params: SamplingParams,
    *,
    max_length: int,
    seed: int = 0,
    stop_ids: frozenset[int] = frozenset(),
    arrival: float = 0.0,
    namespace: Namespace = COMMON,
    parts: dict[str, Any] | None = None,
    **options: Any,
) -> Sequence:
    """A sequence of a request with these ``options``; ``parts``: further arguments of Sequence."""
    output = Output(Request(params=params, **options), arrival)
    output.prompt_ids, output.seed = prompt_ids, seed
    place = (key + output.request.queue_behind, key)
    return Sequence(
        key,
        output,
        stop_ids=stop_ids,
        max_length=max_length,
        place=place,
        namespace=namespace,
        **(parts or {}),
    )


def sequence_of(stream: Stream) -> Sequence:
    """The sequence of an open request of an engine."""
    owner: Any = stream._owner
    found = owner.open[stream.cell].sequence
    assert isinstance(found, Sequence)
    return found
