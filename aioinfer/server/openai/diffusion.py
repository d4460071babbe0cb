"""Block diffusion in the API: the ``diffusion`` object of requests; drafts and step maps of answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aioinfer.chat.bodies import Object
from aioinfer.diffusion.registry import algorithm_class
from aioinfer.errors import InvalidRequest
from aioinfer.outputs import Chunk
from aioinfer.params import DiffusionParams

__all__ = ["chunk_fields", "parse_diffusion", "step_map_field"]


def parse_diffusion(
    given: Object | None, default: DiffusionParams | None
) -> tuple[DiffusionParams | None, bool]:
    """The denoising parameters, and whether the answer includes a step map.

    The fields of the body's object ``diffusion`` override the model's. Raises InvalidRequest of the field
    "diffusion" for parameters that its algorithm does not have.
    """
    if given is None:
        return default, False
    values = given.model_dump(exclude={"step_map"}, exclude_unset=True)
    try:
        params = DiffusionParams(**values)
        params = params if default is None else params.inherit(default)
        algorithm_class(params.algorithm).check(params)
    except InvalidRequest as refused:
        raise InvalidRequest("diffusion", str(refused)) from None
    return params, bool(getattr(given, "step_map", False))


def chunk_fields(chunk: Chunk, step_map: bool) -> dict[str, Any]:
    """Fields of a streamed choice beyond OpenAI's. With drafts enabled, an event without a draft clears the
    previous one."""
    found = step_map_field(chunk.step_map, step_map)
    if chunk.draft is not None:
        draft = chunk.draft
        found["draft"] = {"start": draft.start, "token_ids": draft.token_ids, "text": draft.text}
    return found


def step_map_field(steps: Sequence[int] | None, wanted: bool) -> dict[str, Any]:
    """For each token of a choice or a part of it, the round of its block that wrote it, from 0 on."""
    return {"step_map": steps} if wanted and steps is not None else {}
