"""What the bundled model that sees is asked: seeded conversations about drawings, and their right answers.

A question has one right answer, a short sentence that follows from the :class:`Scene`, so that a test of the
engine can ask about a held-out drawing and know what must come back.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from PIL import Image

from examples.training.drawings import COLORS, SHAPES, Scene, draw, scene_of

__all__ = ["TASKS", "Item", "Question", "conversation", "held_out", "lexicon_text"]

#: A message whose content is a list of parts, ``{"type": "image", "image": Image}`` among them.
Message = dict[str, Any]

SYSTEM_PROMPTS = ("You are a helpful assistant.", "Answer briefly.", "You look at images.")
#: of scenes
KINDS = ("one", "number")
ORDINALS = ("first", "second")
BLIND = "I see no image. Please send me one."
SMALL_TALK = {
    "Hello!": "Hello! Send me a drawing.",
    "Hi": "Hello! Send me a drawing.",
    "Good morning!": "Good morning! Send me a drawing.",
    "How are you?": "I am fine, thank you.",
    "Who are you?": "I am the demo model of aioinfer that sees.",
    "What can you do?": "I can name shapes, colors and numbers in drawings, and count.",
    "What shapes do you know?": "I know the " + ", the ".join(SHAPES[:-1]) + f" and the {SHAPES[-1]}.",
    "What colors do you know?": "I know " + ", ".join(list(COLORS)[:-1]) + f" and {list(COLORS)[-1]}.",
    "Thank you!": "You are welcome!",
    "Thanks": "You are welcome!",
    "Goodbye!": "Goodbye! See you soon.",
}


@dataclass(frozen=True)
class Question:
    """Ways to ask, which mean the same, and the right answer."""

    task: str
    ways: tuple[str, ...]
    answer: str


@dataclass(frozen=True)
class Item:
    """A held-out question with its images."""

    task: str
    messages: list[Message]
    answer: str

    def check(self, text: str) -> bool:
        """The text is the right answer."""
        return text.strip() == self.answer


# -- sentences -----------------------------------------------------------------------------------------


def _a(words: str) -> str:
    return ("an " if words[0] in "aeiou" else "a ") + words


def describe(scene: Scene) -> str:
    """What is in the drawing."""
    mark = scene.mark
    number = scene.kind == "number"
    seen = f"the number {mark.name} in {mark.color}" if number else _a(f"{mark.color} {mark.name}")
    return f"{seen[0].upper()}{seen[1:]} on {_a(scene.background)} background."


# -- questions about one drawing -----------------------------------------------------------------------

_DESCRIBE = (
    "What is in the image?",
    "What do you see?",
    "Describe the image.",
    "What is this?",
    "Describe this drawing.",
    "What does the image show?",
    "What is in this picture?",
)
_BACKGROUND = (
    "What color is the background?",
    "Which color is the background?",
    "What is the background color?",
    "What is the color of the background?",
)


def _of_color(what: str, color: str) -> Question:
    ways = (
        f"What color is the {what}?",
        f"Which color is the {what}?",
        f"What is the color of the {what}?",
        f"Tell me the color of the {what}.",
    )
    return Question("color", ways, f"The {what} is {color}.")


def _about_one(scene: Scene, rng: random.Random) -> list[Question]:
    mark = scene.mark
    shape = ("What shape is this?", "Which shape is it?", "Name the shape.", "What shape do you see?")
    return [
        Question("shape", shape, f"It is {_a(mark.name)}."),
        _of_color(rng.choice(("shape", mark.name)), mark.color),
    ]


def _about_number(scene: Scene, rng: random.Random) -> list[Question]:
    mark = scene.mark
    ways = (
        *("What number is this?", "Which number is it?", "Read the number.", "What number do you see?"),
        *("What digit is this?", "Which digit is it?", "Read the digit."),
    )
    return [Question("number", ways, f"It is {mark.name}."), _of_color("number", mark.color)]


_ABOUT: dict[str, Callable[[Scene, random.Random], list[Question]]] = {
    "one": _about_one,
    "number": _about_number,
}


def questions_about(scene: Scene, rng: random.Random) -> list[Question]:
    """All that may be asked about a drawing, in random order, without asking the same twice."""
    questions = [
        *_ABOUT[scene.kind](scene, rng),
        Question("background", _BACKGROUND, f"The background is {scene.background}."),
        Question("describe", _DESCRIBE, describe(scene)),
    ]
    rng.shuffle(questions)
    return list({question.answer: question for question in questions}.values())


# -- questions about several drawings ------------------------------------------------------------------


def questions_about_several(scenes: Sequence[Scene], rng: random.Random) -> list[Question]:
    """What may be asked about two drawings, in random order."""
    questions = []
    for ordinal, scene in zip(ORDINALS, scenes, strict=True):
        image = f"{ordinal} image"
        ways = (f"What is in the {image}?", f"Describe the {image}.", f"What does the {image} show?")
        questions.append(Question("several", ways, describe(scene)))
    rng.shuffle(questions)
    return questions


def several_scenes(rng: random.Random, test: bool) -> list[Scene]:
    """Two drawings."""
    return [scene_of(rng.choice(KINDS), rng, test) for _ in range(2)]


# -- conversations -------------------------------------------------------------------------------------


def asked(question: Question, rng: random.Random) -> str:
    """The question in one of its ways, at times as people type it."""
    text = rng.choice(question.ways)
    if rng.random() < 0.15:
        text = text.lower()
    if rng.random() < 0.1:
        text = text.rstrip("?.")
    return text.replace("color", "colour") if rng.random() < 0.1 else text


def with_images(text: str, images: list[Image.Image], rng: random.Random) -> list[dict[str, Any]]:
    """The parts of a question and its images: these come first, last, or are named one by one."""
    parts = [{"type": "image", "image": image} for image in images]
    words = [{"type": "text", "text": text}]
    draw_of = rng.random()
    if draw_of < 0.65:
        return [*parts, *words]
    if draw_of < 0.85 or len(images) == 1:
        return [*words, *parts]
    named = [
        part
        for ordinal, image in zip(ORDINALS, parts, strict=False)
        for part in ({"type": "text", "text": f"{ordinal.capitalize()} image: "}, image)
    ]
    return [*named, {"type": "text", "text": f" {text}"}]


def _exchanges(rng: random.Random) -> list[Message]:
    """Questions about the same drawings, of which the first brings them; or small talk."""
    kind = rng.random()
    if kind < 0.06:
        said = rng.choice(sorted(SMALL_TALK))
        return _turn([{"type": "text", "text": said}], SMALL_TALK[said])
    if kind < 0.28:
        scenes = several_scenes(rng, test=False)
        questions = questions_about_several(scenes, rng)
    else:
        scenes = [scene_of(rng.choice(KINDS), rng, test=False)]
        questions = questions_about(scenes[0], rng)
    images = [draw(scene, rng) for scene in scenes]
    messages: list[Message] = []
    for number, question in enumerate(questions[: rng.randint(2, 6)]):
        text = asked(question, rng)
        parts = with_images(text, images, rng) if number == 0 else [{"type": "text", "text": text}]
        messages += _turn(parts, question.answer)
    return messages


def _turn(parts: list[dict[str, Any]], answer: str) -> list[Message]:
    return [{"role": "user", "content": parts}, {"role": "assistant", "content": answer}]


def conversation(rng: random.Random) -> list[Message]:
    """A conversation of the training mix, about one or two drawings, at times about others after that."""
    if rng.random() < 0.03:
        scene = scene_of(rng.choice(KINDS), rng, test=False)
        question = rng.choice(questions_about(scene, rng))
        return _turn([{"type": "text", "text": asked(question, rng)}], BLIND)
    messages: list[Message] = []
    if rng.random() < 0.1:
        messages.append({"role": "system", "content": rng.choice(SYSTEM_PROMPTS)})
    for _ in range(1 if rng.random() < 0.8 else 2):
        messages += _exchanges(rng)
    return messages


#: name -> the kinds of drawings that it is asked about; none: about several, or without any
TASKS: dict[str, tuple[str, ...]] = {
    "shape": ("one",),
    "color": ("one", "number"),
    "background": ("one", "number"),
    "number": ("number",),
    "describe": ("one", "number"),
    "several": (),
    "chat": (),
}


def held_out(task: str, count: int, seed: int = 0) -> list[Item]:
    """``count`` questions of a task about drawings that training has never seen."""
    rng = random.Random(f"{task}/{seed}")
    items: list[Item] = []
    while len(items) < count:
        if task == "chat":
            text = rng.choice(sorted(SMALL_TALK))
            items.append(Item(task, _turn([{"type": "text", "text": text}], "")[:1], SMALL_TALK[text]))
            continue
        if kinds := TASKS[task]:
            scenes = [scene_of(rng.choice(kinds), rng, test=True)]
            questions = questions_about(scenes[0], rng)
        else:
            scenes = several_scenes(rng, test=True)
            questions = questions_about_several(scenes, rng)
        question = next((question for question in questions if question.task == task), None)
        if question is not None:
            parts = with_images(asked(question, rng), [draw(scene, rng) for scene in scenes], rng)
            items.append(Item(task, [{"role": "user", "content": parts}], question.answer))
    return items


def lexicon_text(seed: int = 0, count: int = 4000) -> list[str]:
    """Texts to train the tokenizer on: what is said, without the numbers."""
    rng = random.Random(seed)
    texts = [*SMALL_TALK, *SMALL_TALK.values(), *SYSTEM_PROMPTS, BLIND] * 50
    for _ in range(count):
        scenes = [scene_of(rng.choice(KINDS), rng, test=False)]
        several = several_scenes(rng, test=False)
        for question in (*questions_about(scenes[0], rng), *questions_about_several(several, rng)):
            texts += [asked(question, rng), question.answer]
    return texts
