"""Vectors of tokens of an adapter's own: they replace those of the model for the tokens that have it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from aioinfer.model.adapters.rows import runs
from aioinfer.model.batch import Batch
from aioinfer.model.vision.base import Features

__all__ = ["with_words"]


def with_words(batch: Batch, tables: Mapping[int, torch.Tensor], scale: float) -> Features | None:
    """What a step reads in place of the vectors of its tokens: features of images, and those from the tables
    [vocab_size, hidden] of adapters, by slot. ``scale``: factor of the vectors."""
    found = [run for run in runs(batch.adapter_slots or (), batch.q_lens) if run.slot in tables]
    features = batch.features
    if not found:
        return features
    device = batch.input_ids.device
    each = (F.embedding(batch.input_ids[run.first : run.stop], tables[run.slot]) for run in found)
    rows, vectors = (
        torch.cat([torch.arange(run.first, run.stop, device=device) for run in found]),
        torch.cat([*each]),
    )
    vectors = vectors if scale == 1.0 else vectors * scale
    if features is None:
        return Features(rows, vectors[None])
    # Positions of images have no tokens; and layers add nothing to those that have some.
    others = ~torch.isin(rows, features.rows)
    rows, vectors = torch.cat((rows[others], features.rows)), vectors[others]
    more = vectors.new_zeros(len(features.vectors), *vectors.shape)
    more[0] = vectors
    return Features(rows, torch.cat((more, features.vectors), dim=1))
