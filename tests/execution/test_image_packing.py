"""What packed steps have for images, position by position."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from aioinfer.execution.features import ImagePacker
from aioinfer.images.prompt import ImageUnit, PromptImages, words
from aioinfer.images.rotary import rotary_positions
from aioinfer.images.support import ImageSupport
from aioinfer.scheduling.features import FeatureCache
from aioinfer.scheduling.step import Step
from tests.scheduling.desk import Desk

#: of an image: rows and columns
GRID = (2, 3)


def prompt(before: int, behind: int) -> tuple[list[int], PromptImages]:
    unit = ImageUnit(before, 6, b"cat", 6, {})
    ids = [*range(before), *words(b"cat", 6), *range(behind)]
    return ids, PromptImages((), (unit,), *rotary_positions(len(ids), [(before, GRID)]))


class Packing:
    """A desk whose steps are packed."""

    def __init__(self, **limits: int) -> None:
        two_way = "chunk_size" not in limits
        self.desk = Desk(features=FeatureCache(64, 64, two_way=two_way), prefix_cache=False, **limits)
        self._packer = ImagePacker(ImageSupport(token_id=1, two_way=two_way, m_rope=True), 12)

    def pack(self) -> tuple[Step, dict[str, npt.NDArray[np.int64]]]:
        """The next step with rows; it resolves."""
        step = self.desk.launch()
        while step.encoding is not None:
            self.desk.bring(step)
            step = self.desk.launch()
        rows = step.rows
        for row in rows:
            if row.new_request is not None:
                self._packer.admit(row.slot, row.new_request)
        slots = np.asarray([row.slot for row in rows])
        cu_q = np.cumsum([0, *(row.length for row in rows)])
        positions = np.concatenate([np.arange(row.start, row.kv_length) for row in rows])
        own, features = self._packer.pack(step, slots, cu_q, positions)
        assert self._packer.needs_own_step(step, slots) == bool(features or "rotary" in own)
        self.desk.bring(step)
        return step, own


def test_positions_of_an_image_see_each_other_to_the_last() -> None:
    packing = Packing()
    packing.desk.submit(5, max_tokens=9)
    packing.pack()
    ids, images = prompt(3, 2)
    packing.desk.submit(ids, 2, images)
    _, text = packing.pack()
    assert "ends" not in text
    step, own = packing.pack()
    assert [(row.start, row.length) for row in step.rows] == [(6, 1), (3, 8)]
    assert own["feature_rows"].tolist() == [*range(1, 7)]
    assert own["ends"].tolist() == [7, *[9] * 6, 10, 11]


def test_positions_of_three_coordinates_follow_the_prompt_in_chunks_and_behind_it() -> None:
    packing = Packing(chunk_size=4, page_size=2)
    ids, images = prompt(3, 2)
    packing.desk.submit(ids, 3, images)
    assert images.rotary is not None
    seen = 0
    while seen < len(ids) + 2:
        step, own = packing.pack()
        (row,) = step.rows
        assert row.start == seen
        known = images.rotary[:, row.start : row.kv_length]
        behind = np.tile(np.arange(max(len(ids), row.start), row.kv_length) + images.delta, (3, 1))
        assert own["rotary"].reshape(3, -1).tolist() == np.concatenate((known, behind), axis=1).tolist()
        seen = row.kv_length


def test_the_next_request_in_a_slot_has_positions_of_its_own() -> None:
    packing = Packing()
    ids, images = prompt(3, 2)
    packing.desk.submit(ids, 1, images)
    step, _ = packing.pack()
    slot = step.rows[0].slot
    while packing.desk.scheduler.queues.has_work:
        packing.pack()
    packing.desk.submit(4, max_tokens=9)
    step, own = packing.pack()
    assert step.rows[0].slot == slot
    assert "rotary" not in own
    packing.desk.submit(ids, 1, images)
    step, own = packing.pack()
    assert [(row.slot == slot, row.start, row.length) for row in step.rows] == [(True, 4, 1), (False, 0, 11)]
    assert own["rotary"].reshape(3, -1)[:, 0].tolist() == [4, 4, 4]
