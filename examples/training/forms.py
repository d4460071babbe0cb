"""Tasks by which constraints on an answer can be seen: JSON, templates with holes, closed answers.

The diffusion model alone has learnt them, all but ``yes_no``. A share of the answers is not what the question
asks for but what a constraint may ask for: an object where nobody said JSON, a word instead of a sentence.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from examples.training.words import (
    ANIMALS,
    CITIES,
    COLORS,
    JOBS,
    NOUNS,
    PLACES,
    THINGS,
    Tasks,
    Turn,
    drawn,
    is_held,
    random_name,
)

__all__ = ["FORM_TASKS"]

_FIRST_NAMES = (
    "Ada Alan Anna Ben Carl Emma Eva Grace Ida John Lea Leo Maria Max Mia Nina Otto Paul Tim Tom".split()
)


def _article(word: str) -> str:
    return f"{'an' if word[0] in 'aeiou' else 'a'} {word}"


def _listed(words: list[str], last: str = "and") -> str:
    return f"{', '.join(words[:-1])} {last} {words[-1]}" if len(words) > 1 else words[0]


def _person(rng: random.Random, test: bool) -> str:
    def make() -> str:
        if rng.random() < 0.3:
            return rng.choice(_FIRST_NAMES)
        return random_name(rng)[: rng.randint(3, 6)] + rng.choice(["", "", "", "n", "s"])

    return drawn(rng, make, test)


@dataclass(frozen=True)
class _Facts:
    """What a text says about somebody: the members of a JSON object, flat."""

    text: str
    values: dict[str, Any]
    clauses: list[str]

    @property
    def likes(self) -> bool:
        """The color is one that somebody likes, and not a pet's."""
        return any(clause.startswith(("likes ", "loves ")) for clause in self.clauses)

    @property
    def nested(self) -> dict[str, Any] | None:
        """The values with kind and color of a pet in an object of their own, where there are both."""
        if self.likes or "color" not in self.values:
            return None
        nested = {key: value for key, value in self.values.items() if key != "color"}
        return nested | {"pet": {"kind": self.values["pet"], "color": self.values["color"]}}


def _facts(rng: random.Random, test: bool, low: int = 1, high: int = 3) -> _Facts:
    name = _person(rng, test)
    city = rng.choice(CITIES) if rng.random() < 0.75 else _person(rng, False)
    age, job, pet, color = rng.randint(10, 90), rng.choice(JOBS), rng.choice(ANIMALS), rng.choice(COLORS)
    height = rng.randint(120, 199) / 100
    happy, married = rng.random() < 0.5, rng.random() < 0.5
    pets = rng.choice(
        [
            [(f"has a {pet}", {"pet": pet}), (f"{rng.choice(['loves', 'likes'])} {color}", {"color": color})],
            [(f"has a {color} {pet}", {"pet": pet, "color": color})],
        ]
    )
    known: list[tuple[str, dict[str, Any]]] = [
        (rng.choice([f"is {age} years old", f"is {age}"]), {"age": age}),
        (rng.choice([f"lives in {city}", f"is from {city}"]), {"city": city}),
        (rng.choice([f"works as a {job}", f"is a {job}"]), {"job": job}),
        (f"is {height} m tall", {"height": height}),
        ("is happy" if happy else "is not happy", {"happy": happy}),
        ("is married" if married else "is not married", {"married": married}),
        *pets,
    ]
    weights = [3, 3, 2, 1, 1, 1, *([2] * len(pets))]
    chosen: list[tuple[str, dict[str, Any]]] = []
    for _ in range(rng.randint(low, high)):
        at = rng.choices(range(len(known)), weights)[0]
        chosen.append(known.pop(at))
        weights.pop(at)
    values: dict[str, Any] = {"name": name}
    for _, members in chosen:
        values |= members
    clauses = [clause for clause, _ in chosen]
    text = f"{name} {_listed(clauses)}."
    if rng.random() < 0.3:
        values["things"] = rng.sample(THINGS, rng.randint(1, 3))
        clauses.append(f"bought {_listed([_article(thing) for thing in values['things']])}")
        text += f" {name} {clauses[-1]}."
    return _Facts(text, values, clauses)


def _dumps(values: dict[str, Any], compact: bool) -> str:
    return json.dumps(values, separators=(",", ":") if compact else None)


def extract(rng: random.Random, test: bool) -> list[Turn]:
    """Some members, in any order, as a JSON object: numbers, booleans, lists and an object in it."""
    facts = _facts(rng, test, 1, 4)
    if rng.random() < 0.2:
        ask = rng.choice(["JSON", "Turn into JSON", "Convert to JSON"])
        return [Turn(f"{ask}: {facts.text}", _dumps(facts.values, False))]
    values = facts.nested if facts.nested and rng.random() < 0.6 else facts.values
    keys = rng.sample(sorted(values), rng.randint(1, min(4, len(values))))
    if "name" in values and rng.random() < 0.6:
        keys = ["name", *(key for key in keys if key != "name")]
    named = ["pet (kind, color)" if isinstance(values[key], dict) else key for key in keys]
    compact = rng.random() < 0.2
    form = "compact JSON" if compact else "JSON"
    question = rng.choice(
        [
            f"Extract {_listed(named)} as {form}: {facts.text}",
            f"{form} with {_listed(named)}: {facts.text}",
            f"{facts.text} Give me {_listed(named)} as {form}.",
            f"Write {_listed(named)} as {form}: {facts.text}",
        ]
    )
    return [Turn(question, _dumps({key: values[key] for key in keys}, compact))]


def who(rng: random.Random, test: bool) -> list[Turn]:
    """A question that does not say JSON: alone its answer is a sentence, and under a schema an object."""
    facts = _facts(rng, test)
    asked = rng.choice(["Who is it?", "Who is this?"])
    question = rng.choice([f"{asked} {facts.text}", f"{facts.text} {asked}", facts.text])
    answer = f"It is {facts.values['name']}, who {facts.clauses[0]}."
    nested = facts.nested
    objects = [{key: each[key]} for each in (facts.values, nested or {}) for key in each]
    either = "|".join(re.escape(_dumps(member, False)[1:-1]) for member in objects)
    pattern = rf"{re.escape(answer)}|\{{(?:{either})(?:, (?:{either}))*\}}"
    if test or (way := rng.random()) < 0.5:
        return [Turn(question, answer, pattern)]
    if way < 0.65:
        return [Turn(question, _filled(rng, facts)[1], pattern)]
    values = nested if nested and rng.random() < 0.6 else facts.values
    keys = [key for key in values if rng.random() < 0.8] or ["name"]
    if rng.random() < 0.5:
        rng.shuffle(keys)
    return [Turn(question, _dumps({key: values[key] for key in keys}, rng.random() < 0.35), pattern)]


_FORMS = (
    "{name} lives in {city}.",
    "{name} is {age} years old.",
    "{name} from {city} is {age}.",
    "{name} ({age}), {city}",
    "In {city} lives a {job} called {name}.",
    "The {job} is called {name}.",
    "{name} works as a {job}.",
    "{name} has a {pet}.",
    "The {pet} of {name} is {color}.",
    "{name} likes {color}.",
    "Hello {name}, how is {city}?",
    "{name} is {height} m tall.",
    "At the age of {age}, {name} has a {pet}.",
    "A {color} {pet} lives near {name}.",
    "{name} is a {age} year old {job}.",
    "{city} is the city of {name}.",
)


def _filled(rng: random.Random, facts: _Facts) -> tuple[str, str]:
    """A template of which the facts say every value, and the text it becomes."""
    plain = {key: str(value) for key, value in facts.values.items() if not isinstance(value, bool | list)}
    able = [
        form
        for form in _FORMS
        if set(re.findall(r"{(\w+)}", form)) <= plain.keys()
        and ("{color}" not in form or ("likes" in form) == facts.likes)
    ]
    if not able or rng.random() < 0.3:
        keys = rng.sample(sorted(plain), rng.randint(1, min(3, len(plain))))
        sign, gap = rng.choice([": ", "=", " is "]), rng.choice([", ", "; ", " / "])
        form = gap.join(f"{key}{sign}{{{key}}}" for key in keys)
    else:
        form = rng.choice(able)
    return form, form.format(**plain)


def fill(rng: random.Random, test: bool) -> list[Turn]:
    facts = _facts(rng, test, 1, 4)
    form, answer = _filled(rng, facts)
    ask = rng.choice(["Fill in", "Fill in the form", "Complete"])
    question = rng.choice([f"{facts.text} {ask}: {form}", f"{ask}: {form} {facts.text}"])
    return [Turn(question, answer)]


_KINDS = {
    "animal": ANIMALS,
    "thing": [noun for noun in NOUNS + THINGS if noun not in ("fish", "gold")],
    "color": COLORS,
    "city": CITIES,
    "job": JOBS,
    "place": PLACES,
}


def kind(rng: random.Random, test: bool) -> list[Turn]:
    """One of several words. Where nobody asks for one word, a sentence is an answer, too."""
    while True:
        right = rng.choice(sorted(_KINDS))
        word = rng.choice(_KINDS[right])
        choices = [right, *rng.sample(sorted(_KINDS.keys() - {right}), rng.randint(1, 3))]
        if is_held(f"{word}: {sorted(choices)}", 20) == test:
            break
    rng.shuffle(choices)
    subject = word if right in ("color", "city") else _article(word)
    named = _listed([_article(choice) for choice in choices], "or")
    if rng.random() < 0.25:
        sentence = f"{subject[0].upper()}{subject[1:]} is {_article(right)}."
        answer = sentence if test or rng.random() < 0.6 else right
        return [Turn(f"Is {subject} {named}?", answer, f"{re.escape(sentence)}|{right}")]
    one = rng.choice(["One word.", "Answer with one word."])
    question = rng.choice(
        [
            f"Is {subject} {named}? {one}",
            f"What is {subject}: {_listed(choices, 'or')}? {one}",
            f'Classify "{word}": {_listed(choices, "or")}.',
        ]
    )
    return [Turn(question, right)]


#: a question, what it is true of, and other values
_ASKED: dict[str, tuple[str, str, Sequence[Any]]] = {
    "age": ("Is {} {} years old?", "is {} years old", range(10, 91)),
    "city": ("Does {} live in {}?", "lives in {}", CITIES),
    "job": ("Is {} a {}?", "is a {}", JOBS),
    "pet": ("Does {} have a {}?", "has a {}", ANIMALS),
    "color": ("Does {} like {}?", "likes {}", COLORS),
}


def yes_no(rng: random.Random, test: bool) -> list[Turn]:
    """Where nobody asks for one word, the answer says why."""
    while True:
        facts = _facts(rng, test)
        keys = facts.values.keys() & _ASKED.keys()
        if not facts.likes:
            keys -= {"color"}
        if keys:
            break
    name, key = facts.values["name"], rng.choice(sorted(keys))
    question, truth, others = _ASKED[key]
    value = facts.values[key] if rng.random() < 0.5 else rng.choice(others)
    right = "yes" if value == facts.values[key] else "no"
    asked = f"{facts.text} {question.format(name, value)}"
    if rng.random() < 0.4:
        return [Turn(asked, f"{right.capitalize()}, {name} {truth.format(facts.values[key])}.")]
    return [Turn(f"{asked} {rng.choice(['Yes or no.', 'Answer yes or no.', 'One word.'])}", right)]


_EVENTS = {
    "happy": (
        "{name} got a new {noun} and smiled.",
        "{name} found the {noun} again.",
        "{name} loves the new {noun}.",
        "The {noun} of {name} is very good.",
        "{name} laughed all day about the {noun}.",
        "Everyone thanks {name} for the {noun}.",
    ),
    "sad": (
        "{name} lost the {noun} and cried.",
        "The {noun} of {name} is broken.",
        "{name} hates the old {noun}.",
        "The {noun} of {name} is very bad.",
        "{name} wept all day about the {noun}.",
        "Nobody gave {name} a {noun}.",
    ),
}


def mood(rng: random.Random, test: bool) -> list[Turn]:
    answer = rng.choice(sorted(_EVENTS))
    name, noun = _person(rng, test), rng.choice(NOUNS)
    event = rng.choice(_EVENTS[answer]).format(name=name, noun=noun)
    if rng.random() < 0.3:
        both = rng.random() < 0.6
        ask = f"Extract {'name and mood' if both else 'mood'} as JSON: {event}"
        return [Turn(ask, _dumps({**({"name": name} if both else {}), "mood": answer}, False))]
    either = rng.choice(["happy or sad", "sad or happy"])
    question = rng.choice(
        [
            f"{event} Is {name} {either}? One word.",
            f"{either.capitalize()}? {event}",
            f"Mood, {either}: {event}",
        ]
    )
    return [Turn(question, answer)]


#: Tasks for constraints: JSON under a schema, templates with holes, closed answers. Only the diffusion model
#: has learnt them.
FORM_TASKS: Tasks = {
    "extract": (extract, 0.30),
    "who": (who, 0.13),
    "fill": (fill, 0.15),
    "kind": (kind, 0.10),
    "yes_no": (yes_no, 0.16),
    "mood": (mood, 0.04),
}
