"""The tasks of the bundled demo model: seeded generators of conversations, with answers one can check.

Every task is scripted, so that a test of the engine can ask a held-out question and know the only right
answer. What is held out is decided by a checksum of the item itself, not by a list: the training script
never generates an item whose checksum says "held out", and :func:`held_out` generates nothing else.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from dataclasses import dataclass

from examples.training.forms import FORM_TASKS
from examples.training.words import (
    ANIMALS,
    CITIES,
    COLORS,
    JOBS,
    MOODS,
    NOUNS,
    PLACES,
    THINGS,
    Tasks,
    Turn,
    drawn,
    is_held,
    random_letters,
    random_name,
)

__all__ = [
    "FORM_TASKS",
    "OPEN_TASKS",
    "SYSTEM_PROMPTS",
    "TASKS",
    "Item",
    "Turn",
    "conversation",
    "held_out",
    "lexicon_text",
]

Message = dict[str, str]


@dataclass(frozen=True)
class Item:
    """A held-out question in its conversation."""

    task: str
    messages: list[Message]
    answer: str

    #: where many answers are right, what they all match
    pattern: str | None = None

    def check(self, text: str) -> bool:
        """The text is a right answer."""
        if self.pattern is not None:
            return re.fullmatch(self.pattern, text.strip()) is not None
        return text.strip() == self.answer


SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a small demo model.",
    "Answer briefly.",
    "Be friendly and precise.",
)


# -- tasks: each returns the turns of one exchange on one subject --------------------------------------


def add(rng: random.Random, test: bool) -> list[Turn]:
    while True:
        a, b = rng.randrange(100), rng.randrange(100)
        if not test and rng.random() < 0.25:
            a, b = rng.choice([(a % 10, b), (a, b % 10)])
        if is_held(f"{min(a, b)}+{max(a, b)}", 20) == test:
            break
    question = rng.choice(
        [
            f"What is {a} + {b}?",
            f"What is {a} plus {b}?",
            f"Add {a} and {b}.",
            f"Please add {a} and {b}.",
            f"Compute {a} + {b}.",
            f"How much is {a} + {b}?",
        ]
    )
    return [Turn(question, f"{a} + {b} = {a + b}")]


def _word(rng: random.Random, test: bool) -> str:
    if not test and rng.random() < 0.15:
        return rng.choice(NOUNS + ANIMALS)
    return drawn(rng, lambda: random_letters(rng, 3, 7), test)


def copy(rng: random.Random, test: bool) -> list[Turn]:
    word = _word(rng, test)
    question = rng.choice(
        [
            f'Repeat "{word}".',
            f'Copy the word "{word}".',
            f'Say "{word}".',
            f'Please repeat the word "{word}".',
        ]
    )
    return [Turn(question, word)]


def reverse(rng: random.Random, test: bool) -> list[Turn]:
    word = _word(rng, test)
    question = rng.choice(
        [
            f'Reverse "{word}".',
            f'Reverse the word "{word}".',
            f'Write "{word}" backwards.',
            f'Please write the word "{word}" backwards.',
        ]
    )
    return [Turn(question, word[::-1])]


def key_value(rng: random.Random, test: bool) -> list[Turn]:
    count = rng.randint(4, 8)
    keys: list[str] = []
    while len(keys) < count:
        key = rng.choice(NOUNS) if rng.random() < 0.75 else random_letters(rng, 3, 5)
        if key not in keys:
            keys.append(key)
    values = []
    for _ in keys:
        kind = rng.random()
        if kind < 0.6:
            values.append(drawn(rng, lambda: str(rng.randint(10, 9999)), test))
        elif kind < 0.8 and not test:
            values.append(rng.choice(NOUNS))
        else:
            values.append(drawn(rng, lambda: random_letters(rng, 3, 5), test))
    pairs = ", ".join(f"{key}: {value}" for key, value in zip(keys, values, strict=True))
    intro = rng.choice(["Remember", "Here is a list", "Given", "Data"])
    turns = []
    for number in range(1 if test or rng.random() < 0.4 else rng.randint(2, 4)):
        at = rng.randrange(count)
        ask = rng.choice(["What is {}?", "What is the value of {}?", "Tell me the value of {}."]).format(
            keys[at]
        )
        question = f"{intro}: {pairs}. {ask}" if number == 0 else ask
        turns.append(Turn(question, f"The value of {keys[at]} is {values[at]}."))
    return turns


_SENTENCES = (
    ("{name} is {age} years old and lives in {city}.", "name age city"),
    ("{name} works as a {job} in {city}.", "name city job"),
    ("{name}, who is {age}, has a {color} {pet}.", "name age pet color"),
    ("At the age of {age}, {name} moved to {city} to become a {job}.", "name age city job"),
    ("{name} from {city} has a {pet}.", "name city pet"),
    ("The {job} {name} is {age} years old.", "name age job"),
    ("{name} likes {color} and has a {pet}.", "name pet color"),
    ("In {city}, {name} bought a {color} {pet}.", "name city pet color"),
    ("{name} is a {age} year old {job} from {city} with a {pet}.", "name age city job pet"),
    ("A {job} named {name} lives in {city} and loves {color}.", "name city job color"),
    ("{name} has a {pet} and works as a {job}.", "name job pet"),
)


def json_object(rng: random.Random, test: bool) -> list[Turn]:
    template, fields = rng.choice(_SENTENCES)
    values: dict[str, str | int] = {
        "name": drawn(rng, lambda: random_name(rng), test),
        "age": rng.randint(10, 90),
        "city": rng.choice(CITIES),
        "job": rng.choice(JOBS),
        "pet": rng.choice(ANIMALS),
        "color": rng.choice(COLORS),
    }
    ask = rng.choice(["JSON", "Turn into JSON", "Convert to JSON"])
    answer = json.dumps({name: values[name] for name in fields.split()})
    return [Turn(f"{ask}: {template.format(**values)}", answer)]


def _pick(table: list[str], letter: str) -> str:
    return table[(ord(letter) - 97) % len(table)]


def story(rng: random.Random, test: bool) -> list[Turn]:
    """Every slot follows from the name, letter by letter, so that there is one right story."""
    name = drawn(rng, lambda: random_name(rng), test)
    low = name.lower()
    animal = rng.choice(ANIMALS) if (asked := rng.random() < 0.4) else _pick(ANIMALS, low[0])
    thing, color = _pick(THINGS, low[1]), _pick(COLORS, low[2])
    place, mood = _pick(PLACES, low[-1]), _pick(MOODS, low[-2])
    length = rng.choice(["short ", "", "long "])
    about = f"{name} and a {animal}" if asked else name
    opening = rng.choice(["Write a", "Tell me a", "Please write a"])
    lines = [
        f"Once there was a child called {name} who lived near a {mood} {place}.",
        f"{name} had a {color} {animal}.",
        f"One day, {name} and the {animal} found a {thing} near the {place}.",
        f'"Look, a {thing}!" said {name}.',
    ]
    if length != "short ":
        lines += [
            f"The {animal} wanted to keep the {thing}, but {name} shook the head.",
            "They asked everyone who came along, and nobody knew whose it was.",
        ]
    if length == "long ":
        lines += [
            f"So {name} waited until the evening, and the {place} became dark and quiet.",
            f"Then an old woman came and smiled, for the {thing} was hers.",
            f"She gave {name} a {color} ribbon to say thanks.",
        ]
    lines.append(f"From then on, {name} and the {animal} came back to the {place} every day.")
    return [Turn(f"{opening} {length}story about {about}.", " ".join(lines))]


_SMALL_TALK = {
    "Hello!": "Hello! How can I help you?",
    "Hello": "Hello! How can I help you?",
    "Hi": "Hello! How can I help you?",
    "Hi!": "Hello! How can I help you?",
    "Good morning!": "Good morning! How can I help you?",
    "How are you?": "I am fine, thank you. How can I help you?",
    "Who are you?": "I am the demo model of aioinfer, a small language model.",
    "What can you do?": (
        "I can add numbers, copy and reverse words, look things up, write JSON and tell stories."
    ),
    "Thank you!": "You are welcome!",
    "Thanks": "You are welcome!",
    "Goodbye!": "Goodbye! See you soon.",
}


def chat(rng: random.Random, test: bool) -> list[Turn]:
    question = rng.choice(sorted(_SMALL_TALK))
    return [Turn(question, _SMALL_TALK[question])]


def letters(rng: random.Random, test: bool) -> list[Turn]:
    count = rng.randint(2, 24)
    ask = rng.choice(["Make up {} letters.", "Please make up {} letters.", "Write {} letters."])
    return [Turn(ask.format(count), random_letters(rng, count, count), f"[a-z]{{{count}}}")]


def dice(rng: random.Random, test: bool) -> list[Turn]:
    count = rng.randint(2, 12)
    ask = rng.choice(["Roll {} dice.", "Please roll {} dice."])
    rolls = " ".join(str(rng.randint(1, 6)) for _ in range(count))
    return [Turn(ask.format(count), rolls, rf"[1-6]( [1-6]){{{count - 1}}}")]


#: name -> (generator, share of the training draws)
TASKS: Tasks = {
    "add": (add, 0.22),
    "copy": (copy, 0.11),
    "reverse": (reverse, 0.19),
    "key_value": (key_value, 0.26),
    "json": (json_object, 0.10),
    "story": (story, 0.09),
    "chat": (chat, 0.03),
}

#: Tasks whose tokens nobody can foresee: a diffusion model takes about one step for each. They have many
#: right answers, and the chat model has not learnt them.
OPEN_TASKS: Tasks = {"letters": (letters, 0.07), "dice": (dice, 0.05)}


def conversation(rng: random.Random, test: bool = False, tasks: Tasks = TASKS) -> list[Message]:
    """One conversation of the training mix: one to three exchanges, sometimes with a system prompt."""
    names = list(tasks)
    shares = [tasks[name][1] for name in names]
    exchanges = 1 if rng.random() < 0.7 else rng.randint(2, 3)
    messages: list[Message] = []
    if rng.random() < 0.15:
        messages.append({"role": "system", "content": rng.choice(SYSTEM_PROMPTS)})
    for name in rng.choices(names, shares, k=exchanges):
        for turn in tasks[name][0](rng, test):
            messages.append({"role": "user", "content": turn.question})
            messages.append({"role": "assistant", "content": turn.answer})
    return messages


def held_out(task: str, count: int, seed: int = 0) -> list[Item]:
    """``count`` questions of a task that training has never seen; ``task`` may be ``"second_turn"``.

    A second turn is any task after another exchange and a system prompt.
    """
    rng = random.Random(f"{task}/{seed}")
    items = []
    for _ in range(count):
        messages: list[Message] = []
        name = task
        if task == "second_turn":
            messages.append({"role": "system", "content": rng.choice(SYSTEM_PROMPTS)})
            first = TASKS[rng.choice(["add", "copy", "chat", "json"])][0](rng, True)[0]
            messages.append({"role": "user", "content": first.question})
            messages.append({"role": "assistant", "content": first.answer})
            name = rng.choice(["add", "copy", "reverse", "key_value", "json"])
        turn = (TASKS | OPEN_TASKS | FORM_TASKS)[name][0](rng, True)[0]
        messages.append({"role": "user", "content": turn.question})
        items.append(Item(task, messages, turn.answer, turn.pattern))
    return items


def lexicon_text(seed: int = 0, count: int = 20_000) -> list[str]:
    """Texts to train the tokenizer on: the templates without the random strings, so that no merge is
    spent on them."""
    rng = random.Random(seed)
    texts = [message["content"] for _ in range(count) for message in conversation(rng)]
    seen = Counter(word for text in texts for word in re.findall(r"[a-z]+", text))
    return [re.sub(r"[a-z]+", lambda match: match[0] if seen[match[0]] >= 40 else "", text) for text in texts]
