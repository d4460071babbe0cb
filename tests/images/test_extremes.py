"""Images of extreme shapes: each family makes something of one, or refuses it with a reason."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
from PIL import Image

from aioinfer.errors import InvalidRequest
from aioinfer.images import processor as processors
from aioinfer.images.source import ImageSource
from tests.images.families import FAMILIES
from tests.images.test_decoding import saved
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


@pytest.mark.parametrize("whole", [True, False])
def test_the_memory_of_a_refused_image_is_given_back(
    whole: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FAMILIES["qwen3-vl"].write(tmp_path)
    processor, size = processor_of(tmp_path), (1, 5000)
    file = saved(Image.effect_noise(size, 90), "PNG")
    alive: list[int] = []

    def give_back() -> None:
        alive.append(sum(isinstance(each, Image.Image) and each.size == size for each in gc.get_objects()))

    monkeypatch.setattr(processors, "give_back", give_back)
    with pytest.raises(InvalidRequest):
        processor.process(ImageSource(file if whole else file[:-900]), "part")
    assert alive == [0]
