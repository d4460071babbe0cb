"""The drawings and questions that the bundled model that sees was trained on, and what it has made."""

from __future__ import annotations

import random
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer

import examples.training.train_vision as script
from aioinfer.checkpoint.locate import bundled_models
from aioinfer.config import EngineConfig
from examples.training.common import IGNORE
from examples.training.drawing_tasks import (
    KINDS,
    TASKS,
    conversation,
    describe,
    held_out,
    questions_about,
    questions_about_several,
    several_scenes,
)
from examples.training.drawings import COLORS, Mark, Scene, draw, draw_with_map, scene_of
from tests.tiers import SECONDS, rest

BUNDLED = EngineConfig(model="tiny-vision").model_path


# -- drawings ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_says_what_is_drawn_and_how(kind: str) -> None:
    def drawings(seed: int) -> list[tuple[Scene, bytes]]:
        rng = random.Random(seed)
        scenes = [scene_of(kind, rng, test=False) for _ in range(10)]
        return [(scene, draw(scene, rng).tobytes()) for scene in scenes]

    assert drawings(1) == drawings(1)
    assert drawings(1) != drawings(2)


@pytest.mark.parametrize("kind", KINDS)
def test_training_draws_nothing_that_is_held_out(kind: str) -> None:
    rng = random.Random(3)
    training = {scene_of(kind, rng, test=False) for _ in range(800)}
    testing = {scene_of(kind, rng, test=True) for _ in range(100)}
    assert not training & testing
    assert len(testing) >= 8


@pytest.mark.parametrize("kind", KINDS)
def test_drawings_are_small_and_full_of_their_colours(kind: str) -> None:
    """Each mark's colour, and the background's, covers some of the drawing, in spite of JPEG and noise."""
    rng = random.Random(4)
    for _ in range(60):
        scene = scene_of(kind, rng, test=False)
        image = draw(scene, rng)
        assert image.mode == "RGB"
        assert 32 <= min(image.size) <= max(image.size) <= 241
        found = Counter(map(nearest, image.resize((64, 64)).get_flattened_data()))
        assert all(found[color] >= 8 for color in {scene.background, *(mark.color for mark in scene.marks)})


def nearest(pixel: Any) -> str:
    """The colour of whose tints one is nearest."""

    def distance(name: str) -> int:
        tints = COLORS[name]
        return min(sum((a - b) ** 2 for a, b in zip(pixel, tint, strict=True)) for tint in tints)

    return min(COLORS, key=distance)


@pytest.mark.parametrize("kind", KINDS)
def test_a_map_says_where_the_shape_or_digit_is(kind: str) -> None:
    rng = random.Random(9)
    for _ in range(20):
        scene = scene_of(kind, rng, test=False)
        image, where = draw_with_map(scene, rng)
        assert where.width % image.width == where.height % image.height == 0
        assert set(where.get_flattened_data()) == {0, 1}
        labels = script.labels_of(scene, where).astype(bool)
        found = {script.THINGS[at] for at in labels[:, : len(script.THINGS)].any(0).nonzero()[0]}
        assert found == {scene.mark.name}
        assert labels[:, -len(COLORS) :].all(0)[list(COLORS).index(scene.background)]


# -- questions -----------------------------------------------------------------------------------------


def test_a_description_says_all_that_is_in_a_drawing() -> None:
    assert describe(Scene("one", (Mark("cross", "red"),), "white")) == "A red cross on a white background."
    assert describe(Scene("number", (Mark("4", "orange"),), "pink")) == (
        "The number 4 in orange on a pink background."
    )


def test_a_question_has_one_answer() -> None:
    """Whatever is asked twice about the same drawings has the same answer."""
    rng = random.Random(6)
    for _ in range(200):
        scene = scene_of(rng.choice(KINDS), rng, test=False)
        several = several_scenes(rng, test=False)
        for questions in (questions_about(scene, rng), questions_about_several(several, rng)):
            answers = {(way, question.answer) for question in questions for way in question.ways}
            assert len({way for way, _ in answers}) == len(answers)


def test_held_out_questions_are_the_same_each_time_and_have_their_images() -> None:
    for task in TASKS:
        items, again = held_out(task, 5, seed=1), held_out(task, 5, seed=1)
        assert [item.messages for item in items] == [item.messages for item in again]
        assert items != held_out(task, 5, seed=2)
        images = [len(script.images_of(item)) for item in items]
        assert set(images) <= ({0} if task == "chat" else {1} if TASKS[task] else {2})
        assert all(item.check(f" {item.answer}\n") and not item.check("It is.") for item in items)


# -- training ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))


@pytest.fixture(scope="module")
def processor() -> Any:
    from transformers import AutoProcessor

    return AutoProcessor.from_pretrained(BUNDLED)


def test_training_reads_what_the_processor_makes(tokenizer: Tokenizer, processor: Any) -> None:
    rng = random.Random(7)
    seen = 0
    for _ in range(40):
        messages = conversation(rng)
        sample = script.make_sample(tokenizer, messages)
        parts = [part for message in messages for part in message["content"] if isinstance(part, dict)]
        images = [part["image"] for part in parts if part["type"] == "image"]
        text = processor.apply_chat_template(messages)
        made = processor(text=text, images=[images] if images else None, return_tensors="pt")
        assert sample.ids == made["input_ids"][0].tolist()
        for image, values in zip(sample.images, made["pixel_values"][0] if images else (), strict=True):
            torch.testing.assert_close(torch.from_numpy(image.copy()) / 127.5 - 1, values)
            seen += 1
    assert seen > 40


def test_only_answers_are_learnt(tokenizer: Tokenizer) -> None:
    messages = [
        {"role": "user", "content": [{"type": "image", "image": Image.new("RGB", (40, 50), "red")}]},
        {"role": "assistant", "content": "It is a ring."},
    ]
    sample = script.make_sample(tokenizer, messages)
    learnt = [label for label in sample.labels if label != IGNORE]
    assert tokenizer.decode(learnt, skip_special_tokens=False) == "It is a ring.<end_of_utterance>"


def test_a_packed_row_computes_what_the_model_computes_of_one_conversation(tokenizer: Tokenizer) -> None:
    torch.manual_seed(0)
    model = script.make_model(608).eval()
    rng = random.Random(8)
    samples = [script.make_sample(tokenizer, conversation(rng)) for _ in range(12)]
    rows = [[sample] for sample in samples if len(sample.ids) <= script.ROW and sample.images]
    pair = sorted(rows, key=lambda row: len(row[0].ids))[:2]
    batch = script.make_batch([[pair[0][0], pair[1][0]]])
    losses = []
    with torch.inference_mode():
        together = script.loss_of(model, batch)
        for [sample] in pair:
            values = torch.stack([torch.from_numpy(image.copy()) for image in sample.images]) / 127.5 - 1
            output = model(
                input_ids=torch.tensor([sample.ids]),
                pixel_values=values[None],
                labels=torch.tensor([sample.labels]),
            )
            counted = sum(label != IGNORE for label in sample.labels)
            losses.append((float(output.loss) * counted, counted))
    expected = sum(loss for loss, _ in losses) / sum(count for _, count in losses)
    assert float(together) == pytest.approx(expected, rel=0.02)


@rest(SECONDS)
def test_training_runs_and_makes_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "BATCH", 2)
    monkeypatch.setattr(script, "IMAGES", 4)
    monkeypatch.setattr(script, "DRAWINGS", 4)
    script.main(f"--out {tmp_path} --steps 4 --vision-share 0.5 --no-compile --threads 1 --count 1".split())
    files = {path.name for path in tmp_path.iterdir()}
    assert files == {path.name for path in BUNDLED.iterdir()}
    for name in files - {"model.safetensors"}:
        assert (tmp_path / name).read_text().splitlines()[:3] == (BUNDLED / name).read_text().splitlines()[:3]


# -- the bundled model ---------------------------------------------------------------------------------


def test_the_name_finds_the_bundled_directory() -> None:
    assert "tiny-vision" in bundled_models()
    assert sum(path.stat().st_size for path in BUNDLED.iterdir()) <= 6_000_000


def test_its_template_takes_text_and_parts_and_results_of_tools(processor: Any) -> None:
    image = {"type": "image"}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [image, {"type": "text", "text": "What is this?"}]},
        {"role": "assistant", "content": None},
        {"role": "tool", "content": [image]},
    ]
    end = "<end_of_utterance>"
    assert processor.apply_chat_template(messages, add_generation_prompt=True) == (
        f"<|system|>Be brief.{end}<|user|><image>What is this?{end}<|assistant|>{end}"
        f"<|user|><image>{end}<|assistant|>"
    )


@rest(SECONDS)
def test_it_answers_questions_about_held_out_drawings(processor: Any) -> None:
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(BUNDLED, dtype=torch.bfloat16)
    right = asked = 0
    for task in TASKS:
        items = list(islice(held_out(task, 10, seed=5), 10))
        replies = script.answers(model, processor, items)
        right += sum(item.check(text) for item, text in zip(items, replies, strict=True))
        asked += len(items)
    assert right >= 0.93 * asked
