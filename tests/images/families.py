"""The families that read images: random small checkpoints, and what transformers' models take of a prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from aioinfer.images.prompt import PromptImages, shown
from tests.images.checkpoints import lfm2_vl, smolvlm
from tests.images.gemma import gemma3, gemma4
from tests.images.internvl_models import internvl
from tests.images.qwen_models import qwen

__all__ = ["FAMILIES", "generated"]

Units = Sequence[dict[str, Any]]


class Family(NamedTuple):
    """Writes a checkpoint and returns transformers' model; makes of the arrays of units its arguments."""

    write: Callable[[Path], Any]
    arguments: Callable[[Units], dict[str, torch.Tensor]]
    #: the name of the argument that tells images from text; empty: there is none
    types: str = ""


def _tiles(units: Units) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.from_numpy(np.stack([unit["pixel_values"] for unit in units]))}


def _listed_tiles(units: Units) -> dict[str, torch.Tensor]:
    return {"pixel_values": _tiles(units)["pixel_values"][None]}


def _grids(units: Units) -> dict[str, torch.Tensor]:
    pixels = np.concatenate([unit["pixel_values"] for unit in units])
    grids = [[1, *unit["grid"].tolist()] for unit in units]
    return {"pixel_values": torch.from_numpy(pixels), "image_grid_thw": torch.tensor(grids)}


def _padded(units: Units, name: str, value: int = 0) -> torch.Tensor:
    arrays = [unit[name] for unit in units]
    longest = max(map(len, arrays))
    pads = [((0, longest - len(each)), *[(0, 0)] * (each.ndim - 1)) for each in arrays]
    return torch.from_numpy(
        np.stack([np.pad(each, pad, constant_values=value) for each, pad in zip(arrays, pads, strict=True)])
    )


def _naflex(units: Units) -> dict[str, torch.Tensor]:
    counts = torch.tensor([len(unit["pixel_values"]) for unit in units])
    pixels = _padded(units, "pixel_values")
    return {
        "pixel_values": pixels,
        "spatial_shapes": torch.from_numpy(np.stack([unit["spatial_shape"] for unit in units])),
        "pixel_attention_mask": (torch.arange(pixels.shape[1]) < counts[:, None]).int(),
    }


def _gemma4(units: Units) -> dict[str, torch.Tensor]:
    places = []
    for unit in units:
        rows, columns = unit["grid"].tolist()
        places.append({"place": np.stack(np.meshgrid(range(columns), range(rows)), -1).reshape(-1, 2)})
    return {"pixel_values": _padded(units, "patches"), "image_position_ids": _padded(places, "place", -1)}


FAMILIES: dict[str, Family] = {
    "smolvlm": Family(smolvlm, _listed_tiles),
    "idefics3": Family(partial(smolvlm, family="Idefics3", split=False), _listed_tiles),
    "internvl": Family(internvl, _tiles),
    "lfm2-vl": Family(lfm2_vl, _naflex),
    "gemma3": Family(gemma3, _tiles, "token_type_ids"),
    "gemma4": Family(partial(gemma4, use_bidirectional_attention="vision"), _gemma4, "mm_token_type_ids"),
    "qwen3-vl": Family(qwen, _grids, "mm_token_type_ids"),
    "qwen3-vl-moe": Family(partial(qwen, family="Qwen3VLMoe"), _grids, "mm_token_type_ids"),
    "qwen3.5": Family(partial(qwen, family="Qwen3_5"), _grids, "mm_token_type_ids"),
    "qwen3.5-moe": Family(partial(qwen, family="Qwen3_5Moe"), _grids, "mm_token_type_ids"),
}


def generated(
    family: Family, model: Any, ids: Sequence[int], images: PromptImages | None, token_id: int, count: int
) -> list[int]:
    """What transformers' ``model`` writes behind a prompt, greedily, whatever ends it."""
    prompt = torch.tensor([shown(ids, token_id)])
    arguments: dict[str, Any] = {}
    if images is not None:
        arguments = family.arguments([dict(unit.pixels) for unit in images.units])
        if family.types:
            arguments[family.types] = (prompt == token_id).int()
    with torch.no_grad():
        found = model.generate(
            input_ids=prompt, attention_mask=torch.ones_like(prompt), **arguments,
            max_new_tokens=count, min_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
    tokens: list[int] = found[0, len(ids) :].tolist()
    return tokens
