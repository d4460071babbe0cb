"""JSON schemas as parameters: objects and classes stand for their text, which is taken once."""

from __future__ import annotations

import json
import sys
from types import MappingProxyType
from typing import Any

import pytest

from aioinfer import errors
from aioinfer.params import Grammar, SamplingParams
from tests.engine.conftest import MakeEngine
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


async def test_nesting_is_bounded_by_the_config(make_engine: MakeEngine) -> None:
    schema: dict[str, Any] = {"const": 1}
    for _ in range(5):
        schema = {"type": "array", "items": schema, "minItems": 1, "maxItems": 1}
    for depth, passes in ((4, False), (6, True)):
        async with make_engine(max_grammar_depth=depth) as engine:
            try:
                await engine.generate([1, 2], SamplingParams(grammar=schema, max_tokens=2))
            except errors.RequestError as refused:
                # The toy's vocabulary has no brackets.
                assert ("nested" in str(refused)) == (not passes), refused


async def test_without_the_extra_the_refusal_names_it(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    async with make_engine() as engine:
        with pytest.raises(errors.InvalidRequest, match=r"aioinfer\[structured\]") as caught:
            await engine.generate([1, 2], SamplingParams(grammar=SCHEMA))
        assert caught.value.field == "grammar"
        assert len((await engine.generate([1, 2], SamplingParams(max_tokens=2))).token_ids) <= 2
