"""Block diffusion in the API: the ``diffusion`` object of requests; drafts and step maps of answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from aioinfer.diffusion.registry import algorithm_class
from aioinfer.errors import InvalidRequest
from aioinfer.outputs import Chunk
from aioinfer.params import DiffusionParams

__all__ = ["chunk_fields", "parse_diffusion", "step_map_field"]

_PARAMS = tuple(each.name for each in fields(DiffusionParams))


def parse_diffusion(
    body: Mapping[str, Any], default: DiffusionParams | None
) -> tuple[DiffusionParams | None, bool]:
    """The denoising parameters, and whether the answer includes a step map.

    ``{"diffusion": {"threshold": 0.9, "draft": true, "step_map": true}}``: the fields of
    :class:`~aioinfer.params.DiffusionParams`, which override the model's, and ``step_map``; null is the
    default. Raises InvalidRequest of the field "diffusion" for any error within.
    """
    given = body.get("diffusion")
    if given is None:
        return default, False
    if not isinstance(given, dict):
        raise InvalidRequest("diffusion", "must be an object")
    unknown = sorted(given.keys() - {*_PARAMS, "step_map"})
    if unknown:
        known = ", ".join([*_PARAMS, "step_map"])
        raise InvalidRequest("diffusion", f"{unknown[0][:40]!r} is not one of its fields: {known}")
    step_map = given.get("step_map")
    if not isinstance(step_map, (bool, type(None))):
        raise InvalidRequest("diffusion", "step_map must be true or false")
    values = {name: given[name] for name in _PARAMS if given.get(name) is not None}
    try:
        params = DiffusionParams(**values)
        params = params if default is None else params.inherit(default)
        algorithm_class(params.algorithm).check(params)
    except InvalidRequest as refused:
        raise InvalidRequest("diffusion", str(refused)) from None
    return params, bool(step_map)


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
