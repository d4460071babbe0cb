"""The ids and pixels of prompts with images are those of transformers."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer, Idefics3Processor
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from aioinfer.checkpoint.files import Directory
from aioinfer.errors import ConfigError, InvalidRequest, Rejected
from aioinfer.images.processor import ImageProcessor
from aioinfer.images.prompt import PromptImages, shown
from aioinfer.images.rotary import rotary_positions
from aioinfer.images.source import ImageSource
from aioinfer.ledger import LEDGER
from aioinfer.system.memory import Available
from tests.images.checkpoints import picture, smolvlm

SIZES = [(96, 96), (40, 80), (32, 32), (200, 17), (1, 1), (33, 31)]


def source(width: int, height: int, seed: int = 0) -> ImageSource:
    return ImageSource(picture(width, height, seed).tobytes(), (width, height))


def processor_of(path: Path) -> ImageProcessor:
    tokens = AutoTokenizer.from_pretrained(path).get_added_vocab()
    found = ImageProcessor.of(Directory(path), tokens)
    assert found is not None
    return found


@pytest.mark.parametrize("family", ["SmolVLM", "Idefics3"])
@pytest.mark.parametrize("split", [True, False])
def test_smolvlm_has_the_ids_and_pixels_of_transformers(tmp_path: Path, family: str, split: bool) -> None:
    smolvlm(tmp_path, family=family, split=split, within=split)
    kind = {"SmolVLM": SmolVLMImageProcessorPil, "Idefics3": Idefics3ImageProcessorPil}[family]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    # The other class needs packages for videos; the text of its images is this one's.
    whole = Idefics3Processor(kind.from_pretrained(tmp_path), tokenizer, image_seq_len=16)
    ours = processor_of(tmp_path)
    text = "first<image>".join("abcdefg"[: len(SIZES) + 1])
    pictures = [picture(*size) for size in SIZES]
    expected = whole(text=[text], images=[pictures], return_tensors="np")

    images = [ours.process(source(*size)) for size in SIZES]
    ids = tokenizer.encode(ours.expand(text, images), add_special_tokens=False)
    assert ids == expected["input_ids"][0].tolist()
    found, prompt = ours.fold(ids, images)
    assert shown(found, ours.token_id) == ids
    tiles = np.stack([unit.pixels["pixel_values"] for unit in prompt.units])
    assert np.array_equal(tiles, expected["pixel_values"][0])
    assert all(
        min(found[unit.start : unit.stop]) < 0 > max(found[unit.start : unit.stop]) for unit in prompt.units
    )
    assert sum(unit.length for unit in prompt.units) == ids.count(ours.token_id)


# -- words ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def processor(tmp_path_factory: pytest.TempPathFactory) -> ImageProcessor:
    path = tmp_path_factory.mktemp("smolvlm")
    smolvlm(path)
    return processor_of(path)


def folded(processor: ImageProcessor, *sources: ImageSource) -> tuple[list[int], PromptImages]:
    images = [processor.process(each) for each in sources]
    ids = [7, 8]
    for image in images:
        for unit in image.parts.units:
            ids += [5, *[processor.token_id] * unit.length]
    return processor.fold([*ids, 9], images)


def test_the_same_image_has_the_same_words_and_keys(processor: ImageProcessor) -> None:
    ids, images = folded(processor, source(40, 40), source(40, 40))
    half = len(images.units) // 2
    one, other = images.units[:half], images.units[half:]
    assert [unit.key for unit in one] == [unit.key for unit in other]
    assert len({unit.key for unit in one}) == half
    for left, right in zip(one, other, strict=True):
        assert ids[left.start : left.stop] == ids[right.start : right.stop]
    assert min(ids) >= -(1 << 31)


@pytest.mark.parametrize("place", [0, 2399, 4799])
def test_one_value_changed_is_another_image_from_its_first_word_on(
    processor: ImageProcessor, place: int
) -> None:
    before = source(40, 40)
    data = bytearray(before.data)
    data[place] ^= 1
    one, other = (folded(processor, each) for each in (before, ImageSource(bytes(data), (40, 40))))
    assert [unit.start for unit in one[1].units] == [unit.start for unit in other[1].units]
    assert {unit.key for unit in one[1].units}.isdisjoint(unit.key for unit in other[1].units)
    pairs = [(a, b) for a, b in zip(one[0], other[0], strict=True) if a < 0]
    assert all(a != b for a, b in pairs)


def test_a_file_of_another_size_and_other_settings_are_other_images(tmp_path: Path) -> None:
    digests = set()
    for number, split in enumerate((True, False)):
        path = tmp_path / str(number)
        path.mkdir()
        smolvlm(path, split=split)
        ours = processor_of(path)
        pixels = source(40, 20).data
        for size in ((40, 20), (20, 40)):
            digests.add(ours.process(ImageSource(pixels, size)).digest)
    assert len(digests) == 4


def test_a_prompt_is_restored_from_its_ids_and_images(processor: ImageProcessor) -> None:
    sources = [source(40, 40), source(32, 32)]
    ids, images = folded(processor, *sources)
    again = processor.restore(ids, sources)
    assert [(each.start, each.length, each.key) for each in again.units] == [
        (each.start, each.length, each.key) for each in images.units
    ]
    for wrong in (sources[::-1], sources[:1], [*sources, sources[0]], [sources[0], source(32, 32, 1)]):
        with pytest.raises(InvalidRequest):
            processor.restore(ids, wrong)


def test_counts_of_placeholders_and_positions_must_be_right(processor: ImageProcessor) -> None:
    image = processor.process(source(32, 32))
    for text in ("", "<image><image>"):
        with pytest.raises(InvalidRequest, match=f"writes {text.count('<image>')} images of 1"):
            processor.expand(text, [image])
    length = image.length
    for ids in ([processor.token_id] * (length - 1), [processor.token_id] * (length + 1)):
        with pytest.raises(InvalidRequest, match="positions of images"):
            processor.fold(ids, [image])
    with pytest.raises(InvalidRequest, match="beside each other"):
        processor.fold([processor.token_id, 1] * length, [image])


def test_pixels_are_counted_in_the_memory(processor: ImageProcessor, monkeypatch: pytest.MonkeyPatch) -> None:
    before = LEDGER.entries().get("images of prompts")
    given = source(40, 40)
    images = [processor.process(given)]
    taken = LEDGER.entries()["images of prompts"].taken - (0 if before is None else before.taken)
    pixels = sum(unit.pixels["pixel_values"].nbytes for unit in images[0].parts.units)
    assert taken == pixels + len(given.data)
    monkeypatch.setattr(LEDGER, "available", lambda: Available(taken - 1, "test"))
    images.clear()
    with pytest.raises(Rejected, match="images of prompts"):
        processor.process(source(40, 40))


@pytest.mark.parametrize("change", [{"image_seq_len": 15}, {"image_processor_type": "OtherImageProcessor"}])
def test_settings_that_do_not_fit_are_refused(tmp_path: Path, change: dict[str, object]) -> None:
    smolvlm(tmp_path)
    for name in ("processor_config.json", "preprocessor_config.json"):
        file = tmp_path / name
        stated = json.loads(file.read_text())
        file.write_text(
            json.dumps({**stated, **{key: each for key, each in change.items() if key in stated}})
        )
    with pytest.raises(ConfigError):
        processor_of(tmp_path)


def test_a_missing_pillow_is_told_by_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smolvlm(tmp_path)
    monkeypatch.setitem(sys.modules, "PIL", None)
    monkeypatch.delitem(sys.modules, "PIL.Image", raising=False)
    with pytest.raises(ConfigError, match=r"aioinfer\[images\]"):
        processor_of(tmp_path)
    with pytest.raises(InvalidRequest, match=r"aioinfer\[images\]"):
        ImageSource.of(np.zeros((2, 2), np.uint8), "image")


# -- M-RoPE ---------------------------------------------------------------------------------------------


def test_rotary_positions_go_on_behind_the_longer_side() -> None:
    found, delta = rotary_positions(10, [(2, (2, 3))])
    assert found.tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6],
    ]
    assert delta == -3
    assert found.dtype == np.int32
