"""Images of extreme shapes: each family makes something of one, or refuses it with a reason."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from aioinfer.errors import InvalidRequest
from aioinfer.images.source import ImageSource
from tests.images.families import FAMILIES
from tests.images.test_prompts import processor_of
from tests.tiers import SECONDS, rest

SHAPES = [
    (1, 1),
    (2, 1),
    (3, 3),
    (1, 200),
    (600, 3),
    (1, 5000),
    (5000, 1),
    (20_000, 1),
    (1, 65_535),
    (33, 31),
]


@rest(SECONDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_shape_is_processed_or_refused_by_its_field(family: str, tmp_path: Path) -> None:
    FAMILIES[family].write(tmp_path)
    processor = processor_of(tmp_path)
    for width, height in SHAPES:
        source = ImageSource.of(Image.new("RGB", (width, height), "red"), "part")
        try:
            found = processor.process(source, "part")
        except InvalidRequest as refused:
            assert refused.field == "part"
            said = refused.message.removeprefix(f"the model takes no image of {width} x {height} pixels: ")
            assert 8 < len(said) < len(refused.message)
        else:
            assert found.length == sum(unit.length for unit in found.parts.units) > 0
            assert all(array.size for unit in found.parts.units for array in unit.pixels.values())
