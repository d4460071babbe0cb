"""What is refused for its length must be too long: no output has fewer bytes than is said."""

from __future__ import annotations

import json
from typing import Any

import pytest

from aioinfer.text.grammar_spec import Grammar
from aioinfer.text.least_bytes import least_bytes

LONG = {"type": "string", "minLength": 500}


@pytest.mark.parametrize(
    ("schema", "output"),
    [
        (
            {"type": "array", "prefixItems": [{"type": "boolean"}, True], "items": LONG, "minItems": 2},
            "[true,0]",
        ),
        ({"type": "array", "prefixItems": [True, LONG], "items": LONG, "minItems": 1}, "[0]"),
        ({"type": ["string", "null"], "minLength": 500}, "null"),
        ({"oneOf": [LONG, {"const": 0}]}, "0"),
        ({"type": "object", "properties": {"a": LONG}}, "{}"),
    ],
)
def test_the_least_is_not_more_than_that_of_a_short_output(schema: dict[str, Any], output: str) -> None:
    assert least_bytes(Grammar("json_schema", json.dumps(schema))) <= len(output)


def test_items_behind_the_first_ones_count() -> None:
    schema = {"type": "array", "prefixItems": [{"type": "null"}], "items": LONG, "minItems": 3}
    assert least_bytes(Grammar("json_schema", json.dumps(schema))) == len("[null,,]") + 2 * 502
