"""Features of images on their way: encoded by steps without rows, and put into the rows that follow.

Read with :mod:`aioinfer.scheduling.features`, which decides what is encoded, kept and dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from aioinfer.images.support import ImageSupport
from aioinfer.scheduling.step import Encoding, NewRequestData, Row, RowFeatures, Step

if TYPE_CHECKING:
    import torch

    from aioinfer.model.vision.base import Encoder, Features

__all__ = ["FeatureStore", "ImagePacker"]


class ImagePacker:
    """What packed steps have for images. Loop thread only.

    It knows by slot what M-RoPE adds to positions of its tenant, for rows that generate behind images.
    """

    def __init__(self, support: ImageSupport, num_slots: int) -> None:
        self._support = support
        #: by slot, of M-RoPE: what is added to positions behind the prompt, and whether anything is
        self._deltas = np.zeros(num_slots + 1, np.int64)
        self._turned = np.zeros(num_slots + 1, np.bool_)

    def admit(self, slot: int, data: NewRequestData) -> None:
        """A request takes a slot."""
        self._turned[slot] = data.rotary_delta is not None
        self._deltas[slot] = data.rotary_delta or 0

    def needs_own_step(self, step: Step, slots: npt.NDArray[np.int64]) -> bool:
        """Captured steps have no place for what its rows bring."""
        return bool(self._turned[slots].any()) or any(row.features for row in step.prefilling)

    def pack(
        self,
        step: Step,
        slots: npt.NDArray[np.int64],
        cu_q: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
    ) -> tuple[dict[str, npt.NDArray[np.int64]], list[RowFeatures]]:
        """The sections of a step, and the features of ``feature_rows`` in their order."""
        own: dict[str, npt.NDArray[np.int64]] = {}
        with_images = [
            (int(cu_q[at]), row)
            for at, row in enumerate(step.prefilling, step.num_generating)
            if row.features
        ]
        features = [each for _, row in with_images for each in row.features]
        if features:
            own["feature_rows"] = np.concatenate(
                [
                    np.arange(first + each.at, first + each.at + each.length)
                    for first, row in with_images
                    for each in row.features
                ]
            )
        if self._support.two_way and features:
            own["ends"] = self._ends(with_images, positions)
        if self._turned[slots].any():
            own["rotary"] = self._rotary(step, slots, cu_q, positions).reshape(-1)
        return own, features

    def _ends(
        self, rows: Sequence[tuple[int, Row]], positions: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        ends = positions + 1
        for first, row in rows:
            for each in row.features:
                at = first + each.at
                ends[at : at + each.length] = row.start + each.at + each.length
        return ends

    def _rotary(
        self,
        step: Step,
        slots: npt.NDArray[np.int64],
        cu_q: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
    ) -> npt.NDArray[np.int64]:
        """int64 [3, T]"""
        rotary = np.tile(positions + np.repeat(self._deltas[slots], np.diff(cu_q)), (3, 1))
        for at, row in enumerate(step.prefilling, step.num_generating):
            images = row.sequence.output.images
            if images is None or images.rotary is None:
                continue
            known = images.rotary[:, row.start : row.start + row.length]
            rotary[:, cu_q[at] : cu_q[at] + known.shape[1]] = known
        return rotary


class FeatureStore:
    """The features on the device, by their numbers. Launch thread only."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        #: [1 + deep, length, hidden] each
        self._encoded: dict[int, torch.Tensor] = {}
        #: states between two slices of the encoder's layers
        self._begun: dict[int, Any] = {}

    def encode(self, encoding: Encoding) -> None:
        """Compute a step of the encoder."""
        for number in encoding.dropped:
            self._encoded.pop(number, None)
            self._begun.pop(number, None)
        encoder = self._encoder
        for work in encoding.works:
            state = self._begun.pop(work.number, None)
            if work.part == 0:
                state = encoder.begin(work.unit.pixels)
            elif state is None:
                raise LookupError("an earlier slice of the image's layers failed")
            first, last = (encoder.depth * at // work.parts for at in (work.part, work.part + 1))
            for index in range(first, last):
                state = encoder.layer(index, state)
            if work.ends:
                self._encoded[work.number] = encoder.end(state)
            else:
                self._begun[work.number] = state

    def features(self, rows: torch.Tensor, parts: Sequence[RowFeatures]) -> Features:
        """Those of the tokens ``rows`` of a step. Raises LookupError: the step that encoded some failed."""
        import torch

        from aioinfer.model.vision.base import Features

        found = []
        for part in parts:
            encoded = self._encoded.get(part.number)
            if encoded is None:
                raise LookupError("the step that was to encode the row's image failed")
            found.append(encoded[:, part.first : part.first + part.length])
        return Features(rows, torch.cat(found, dim=1).contiguous())
