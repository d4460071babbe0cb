"""Pins: tokens that an output has at given positions, known before the first forward.

::

    prompt_ids     template: a token, or None for a hole
    |------------|--|????|-----|??|---|         behind it: as any output goes on, or nothing
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from aioinfer.diffusion.state import BlockState
from aioinfer.params import SamplingParams

__all__ = ["Pins", "clash"]


def clash(template: Sequence[int | None] | None, output_ids: Sequence[int]) -> int | None:
    """The first place at which an output has another token than its template; None: there is none."""
    both = enumerate(zip(template or (), output_ids, strict=False))
    return next((at for at, (pin, token) in both if pin is not None and pin != token), None)


@dataclass(frozen=True, slots=True)
class Pins:
    """The template of an output, by positions of its sequence."""

    prompt_length: int
    template: Sequence[int | None]
    #: nothing is written behind the template
    closed: bool

    @classmethod
    def of(cls, params: SamplingParams, prompt_length: int) -> Self | None:
        """Those of a request with these parameters, if it has any."""
        template, most = params.template, params.max_tokens
        if template is None:
            return None
        return cls(prompt_length, template, closed=most is not None and most <= len(template))

    def at(self, position: int) -> int | None:
        """The token at a position; None if a round writes it."""
        place = position - self.prompt_length
        return self.template[place] if 0 <= place < len(self.template) else None

    def writable(self, start: int, count: int) -> list[bool]:
        """Of positions from ``start`` on, those that rounds write."""
        begin, end = self.prompt_length, self.prompt_length + len(self.template)
        return [
            position >= begin and self.at(position) is None and not (self.closed and position >= end)
            for position in range(start, start + count)
        ]

    def shapes(self, start: int, count: int) -> bool:
        """Rounds do not write all positions from ``start`` on."""
        return not all(self.writable(start, count))

    def put(self, state: BlockState) -> BlockState:
        """A block in which the pinned tokens are known."""
        ids, known = [*state.ids], [*state.known]
        for place, there in enumerate(known):
            token = None if there else self.at(state.start + place)
            if token is not None:
                ids[place], known[place] = token, True
        done = state.done or not any(self.writable(state.start, len(ids)))
        return replace(state, ids=ids, known=known, done=done)
