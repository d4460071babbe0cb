"""JSON schemas as parameters: objects and classes stand for their text, which is taken once."""

from __future__ import annotations

import json
from types import MappingProxyType
from typing import Any

import pytest

from aioinfer import errors
from aioinfer.params import Grammar, SamplingParams
from tests.tiers import SECONDS, rest

SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": [1]}},
    "required": ["a"],
    "additionalProperties": False,
}


class Answer:
    """As a class of pydantic."""

    @classmethod
    def model_json_schema(cls) -> dict[str, Any]:
        return SCHEMA


class Raises:
    @classmethod
    def model_json_schema(cls) -> dict[str, Any]:
        raise TypeError("no schema")


@pytest.mark.parametrize("given", [SCHEMA, MappingProxyType(SCHEMA), Answer, Grammar("json_schema", Answer)])
def test_schemas_are_accepted_as_objects_and_classes(given: Any) -> None:
    params = SamplingParams(grammar=given)
    assert params.structure == Grammar("json_schema", json.dumps(SCHEMA))


def test_a_schema_that_changes_later_has_no_effect() -> None:
    schema: dict[str, Any] = {"type": "object", "properties": {}}
    params = SamplingParams(grammar=schema)
    schema["properties"]["a"] = {"type": "string"}
    assert params.structure is not None
    assert json.loads(params.structure.text) == {"type": "object", "properties": {}}


@rest(SECONDS)
def test_what_is_no_schema_is_refused_by_name() -> None:
    endless: dict[str, Any] = {}
    endless["a"] = endless
    deep: Any = {}
    for _ in range(100_000):
        deep = {"a": deep}
    for given in (
        7,
        "text",
        ["a"],
        str,
        Raises,
        {"a": object()},
        {"a": float("nan")},
        endless,
        deep,
        {(): 1},
    ):
        with pytest.raises(errors.InvalidRequest) as caught:
            SamplingParams(grammar=given)  # type: ignore[arg-type]
        assert caught.value.field == "grammar"
        assert len(str(caught.value)) < 1100
    with pytest.raises(errors.InvalidRequest):
        Grammar("regex", {"a": 1})
    assert Grammar("choice", ["a", "b"]).text == '["a", "b"]'
