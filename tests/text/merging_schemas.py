"""JSON schemas that become large when they are merged.

``python -m tests.text.merging_schemas SEED COUNT MB`` compiles random ones with so much memory more than the
process has when it begins, and prints how many were refused for their merges and how many not. Native code
that is given no more memory ends the process.
"""

from __future__ import annotations

import json
import random
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aioinfer.errors import InvalidRequest
from aioinfer.text.grammar_spec import Grammar
from tests.text.grammar_shapes import backend

__all__ = ["BOMBS", "JsonSchema", "random_schema"]

JsonSchema = dict[str, Any]


def chain(levels: int, link: Callable[[JsonSchema], JsonSchema]) -> JsonSchema:
    """Definitions that each hold two of the next one, as ``link`` makes of a reference to it."""
    definitions: JsonSchema = {f"d{levels}": {"type": "object"}}
    for at in range(levels):
        inner = link({"$ref": f"#/$defs/d{at + 1}"})
        definitions[f"d{at}"] = {"type": "object", "properties": {"x": inner, "y": inner}}
    return {"$defs": definitions, "$ref": "#/$defs/d0"}


def wide(count: int) -> JsonSchema:
    """One property that has many."""
    names = {f"p{at}": True for at in range(count)}
    return {"type": "object", "properties": {"x": {"type": "object", "properties": names}}}


def by_pattern(reference: JsonSchema) -> JsonSchema:
    patterns = {"^z": {"type": "object", "minProperties": 0}}
    return {"type": "object", "properties": {"z": reference}, "patternProperties": patterns}


#: what grows -> a schema of a size that grows with a number
BOMBS: dict[str, Callable[[int], JsonSchema]] = {
    "references in allOf": lambda size: chain(size, lambda ref: {"allOf": [ref, {"minItems": 1}]}),
    "references with siblings": lambda size: chain(size, lambda ref: {**ref, "minProperties": 0}),
    "references with alternatives": lambda size: chain(
        size, lambda ref: {**ref, "anyOf": [{}, {"type": "object"}]}
    ),
    "references under patterns": lambda size: chain(size, by_pattern),
    "alternatives": lambda size: {
        "allOf": [wide(1 << size), {"anyOf": [{"minProperties": 0}] * (1 << size)}]
    },
    "products of alternatives": lambda size: {
        "allOf": [{"anyOf": [{"type": "object", "required": [f"r{at}"]} for at in range(size)]}] * 4
    },
    "oneOf": lambda size: {"allOf": [wide(1 << size), {"oneOf": [{"minProperties": 0}] * (1 << size)}]},
    "additional properties": lambda size: {
        "allOf": [
            {"type": "object", "properties": {f"p{at}": {"type": "object"} for at in range(1 << size)}},
            {"type": "object", "additionalProperties": wide(1 << size)},
        ]
    },
    "items": lambda size: {
        "allOf": [
            {"type": "array", "prefixItems": [True] * (1 << size)},
            {"type": "array", "items": wide(1 << size)},
        ]
    },
    "long texts": lambda size: {
        "allOf": [
            {"type": "string", "pattern": "a" * (16 << size)},
            {"enum": [f"{at}" for at in range(1 << size)]},
        ]
    },
}


def random_schema(rng: random.Random) -> JsonSchema:
    """Definitions that refer to later ones, with everything that merges."""
    count = rng.randint(2, 14)
    leaves: list[Any] = [True, {"enum": ["x", 1, {"a": [1]}]}, {"minItems": 1}, {"minProperties": 1}]
    leaves += [{"type": "object"}, {"type": "string"}]

    def some(at: int, depth: int) -> Any:
        leaf = rng.choice([*leaves, *[{"$ref": f"#/$defs/d{rng.randint(at + 1, min(count, at + 2))}"}] * 4])
        if not depth:
            return leaf
        inner = [some(at, depth - 1) for _ in range(rng.randint(1, 3))]
        names = {rng.choice("abcd"): each for each in inner}
        return rng.choice(
            [
                {rng.choice(["allOf", "anyOf"]): inner, **rng.choice([{}, {"minProperties": 0}])},
                {"type": "object", "properties": names, "required": sorted(names)[:1]},
                {"type": "object", "properties": names, "patternProperties": {"^[ab]": inner[0]}},
                {"type": "object", "additionalProperties": inner[0]},
                {"type": "array", "prefixItems": inner, "items": inner[0]},
                {"$ref": f"#/$defs/d{rng.randint(at + 1, count)}", "properties": names},
                leaf,
                leaf,
            ]
        )

    definitions: JsonSchema = {f"d{at}": some(at, rng.randint(1, 3)) for at in range(count)}
    definitions[f"d{count}"] = {"type": "object", "properties": {"a": {"type": "null"}}}
    return {"$defs": definitions, "$ref": "#/$defs/d0"}


if __name__ == "__main__":
    seed, schemas, more = map(int, sys.argv[1:])
    generator, guidance = random.Random(seed), backend()
    held = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_DATA, (held + (more << 20),) * 2)
    refused = 0
    for _ in range(schemas):
        grammar = Grammar("json_schema", json.dumps(random_schema(generator)))
        try:
            guidance.compile(grammar)
        except InvalidRequest as error:
            refused += "merge" in str(error)
    sys.stdout.write(f"{refused} {schemas - refused}\n")
