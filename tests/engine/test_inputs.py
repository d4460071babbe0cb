"""A caller's data is kept as values of Python's own types, and other types are refused by name."""

from __future__ import annotations

import array
import itertools
import json
from collections import UserDict
from dataclasses import fields
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from aioinfer import errors
from aioinfer.budget import TokenBudget
from aioinfer.config import EngineConfig, ServerConfig
from aioinfer.inputs import PLAIN, freeze
from aioinfer.params import DiffusionParams, Grammar, SamplingParams
from aioinfer.pooling import Pooling
from aioinfer.request import Request
from tests.engine.asking import KeepingTokenizer
from tests.engine.conftest import MakeEngine
from tests.engine.test_restoring import KINDS
from tests.tiers import SECONDS, rest

SHORT = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


SUBCLASSES = {kind: type(f"My{kind.__name__}", (kind,), {}) for kind in (str, int, float, bytes)}
NUMPY = {str: np.str_, int: np.int64, float: np.float64, bytes: np.bytes_, bool: np.bool_}


def disguised(value: Any, kinds: dict[type, Any] = SUBCLASSES) -> Any:
    """The value with instances of subclasses for text and numbers, at any depth."""
    if isinstance(value, (list, tuple)):
        return type(value)(disguised(item, kinds) for item in value)
    if isinstance(value, dict):
        return {disguised(key, kinds): disguised(item, kinds) for key, item in value.items()}
    return kinds[type(value)](value) if type(value) in kinds else value


def kinds_within(value: Any) -> set[type]:
    """The types of all that is kept of a value."""
    if isinstance(value, (list, tuple)):
        return {type(value)}.union(*map(kinds_within, value))
    if isinstance(value, dict):
        return kinds_within(list(value.items()))
    if hasattr(value, "__dataclass_fields__"):
        return {type(value)}.union(*(kinds_within(getattr(value, each.name)) for each in fields(value)))
    return {type(value)}


#: a valid value for every field that takes text or numbers; a new field needs one here
VALUES: dict[type, dict[str, Any]] = {
    SamplingParams: {
        **{name: value for kind in KINDS.values() for name, value in kind.items()},
        "seed": 7,
        "max_tokens": 9,
        "logits_processors": [print],
        "grammar": {"type": "object", "properties": {"a": {"type": "integer", "minimum": 1}}},
        "diffusion": DiffusionParams(),
        "template": [3, None],
    },
    DiffusionParams: {
        "algorithm": "joint_threshold",
        "threshold": 0.5,
        "steps": 4,
        "edit_threshold": 0.5,
        "max_post_edits": 2,
        "penalty": 1.5,
        "factor": 2.0,
        "entropy_bound": 0.5,
        "t_min": 0.4,
        "t_max": 0.8,
        "stability_threshold": 1,
        "confidence_threshold": 0.005,
        "draft": True,
    },
    Grammar: {"kind": "regex", "source": "a+", "reasoning": "qwen3"},
    Request: {
        "priority": 3,
        "cache_salt": "salt",
        "routing_key": "key",
        "request_id": "order 7",
        "queue_behind": 2,
        "waiting_timeout": 1.5,
        "running_timeout": 2,
        "deadline": 2.5,
        "ttft_target": 2.5,
        "itl_target": 2.5,
        "budget": TokenBudget(7),
        "max_lag": 5,
        "pooling": Pooling("choices", (1, 2)),
        "adapter": "sql",
    },
}
CASES = [(cls, each.name) for cls in VALUES for each in fields(cls) if each.name != "params"]
KEPT = PLAIN | {tuple, Grammar, DiffusionParams, Pooling, SamplingParams, Request, TokenBudget}


def made(cls: Any, name: str, value: Any) -> Any:
    return cls(**({**VALUES[Grammar], name: value} if issubclass(cls, Grammar) else {name: value}))


@pytest.mark.parametrize("kinds", [SUBCLASSES, NUMPY], ids=["subclasses", "numpy"])
@pytest.mark.parametrize(("cls", "name"), CASES, ids=lambda each: getattr(each, "__name__", each))
def test_every_field_keeps_plain_values(cls: Any, name: str, kinds: dict[type, Any]) -> None:
    value = VALUES[cls][name]
    wanted, found = made(cls, name, value), made(cls, name, disguised(value, kinds))
    assert kinds_within(getattr(found, name)) <= KEPT | kinds_within(wanted)
    assert getattr(found, name) == getattr(wanted, name)
    assert hash(found) == hash(wanted)


# -- arrays and their scalars -----------------------------------------------------------------------


@pytest.mark.parametrize("make", [np.array, lambda ids: array.array("i", ids), tuple, set, iter])
@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids"])
def test_token_ids_may_be_of_any_collection(name: str, make: Any) -> None:
    for ids in ([1, 2], [0], [5]):
        assert getattr(SamplingParams(**{name: make(ids)}), name) == tuple(ids)
    assert SamplingParams(bad_words=[np.array([0]), "x"]).bad_words == ((0,), "x")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *itertools.product(
            ["stop", "stop_regex", "stop_token_ids", "bad_words", "allowed_token_ids"],
            [0, 5, False, True, 0.0, b"", b"a", bytearray(), {}, {1: 2}, object(), np.array(0)],
        ),
        *itertools.product(["stop", "stop_regex"], ["", [""], [b"a"], [5], itertools.repeat("x")]),
        *itertools.product(
            ["stop_token_ids", "allowed_token_ids"],
            ["", "12", ["1"], [True], [0.5], np.array([0.5]), np.array([[1]]), itertools.count()],
        ),
        *itertools.product(["bad_words"], [["", "x"], "x", [[]], [None], [0], [b"a"], [{}]]),
    ],
    ids=lambda each: each if isinstance(each, str) else type(each).__name__,
)
def test_what_is_no_list_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(errors.InvalidRequest) as caught:
        SamplingParams(**{name: value})
    assert caught.value.field == name


async def test_messages_and_variables_of_the_template_become_plain(make_engine: MakeEngine) -> None:
    for value, kinds in itertools.product(("hello", 3, 0.5, False, b"x"), (SUBCLASSES, NUMPY)):
        given: Any = disguised(value, kinds)
        tokenizer = KeepingTokenizer()
        async with make_engine(tokenizer=lambda kept=tokenizer: kept) as engine:
            message: Any = {"role": "user", "content": given, "more": [{"a": (given,)}], given: 1}
            await engine.generate([message], SHORT, chat_template_kwargs={"flag": given})
        ((messages, kwargs),) = tokenizer.seen
        assert messages == [{"role": "user", "content": value, "more": [{"a": (value,)}], value: 1}]
        assert kwargs == {"flag": value}
        assert kinds_within(tokenizer.seen) <= PLAIN | {list, tuple}


@rest(SECONDS)
@pytest.mark.parametrize(
    "value",
    [
        bytearray(b"x"),
        memoryview(b"x"),
        array.array("i", [1]),
        np.array([1, 2]),
        np.datetime64("2026-01-01"),
        np.complex64(1),
        1j,
        object(),
        {("a", "b"): 1},
        {frozenset(): 1},
        [0] * 200_001,
        [[] for _ in range(100_001)],
        dict.fromkeys(range(200_001)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_plain_data_is_refused_by_name(value: Any) -> None:
    for nested in (value, [value], {"a": value}, UserDict(a=[{"b": (value,)}])):
        with pytest.raises(errors.InvalidRequest) as caught:
            freeze("messages", nested)
        assert caught.value.field == "messages"


# -- numbers that no float can hold -----------------------------------------------------------------


@pytest.mark.parametrize("digits", [309, 400, 5000])
@pytest.mark.parametrize(
    ("cls", "name"),
    [case for case in CASES if type(VALUES[case[0]][case[1]]) in (int, float) and case[1] != "max_lag"],
    ids=lambda each: getattr(each, "__name__", each),
)
def test_a_number_that_is_too_large_is_refused_by_name(cls: Any, name: str, digits: int) -> None:
    for number in (10**digits, -(10**digits), float("inf"), float("nan")):
        with pytest.raises(errors.InvalidRequest) as caught:
            cls(**{name: number})
        assert caught.value.field == name
        assert len(str(caught.value)) < 200


# -- configs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [1.0, True, False, np.float64(1), np.True_])
def test_a_number_of_steps_must_be_an_integer(value: Any) -> None:
    for name in ("overlap_steps", "max_running_requests", "page_size"):
        with pytest.raises(errors.ConfigError, match=f"^{name} must"):
            EngineConfig(**{name: value})


@pytest.mark.parametrize("cls", [EngineConfig, ServerConfig])
def test_configs_keep_plain_values(cls: Any) -> None:
    wanted = cls()
    found = cls(**{each.name: disguised(getattr(wanted, each.name)) for each in fields(cls)})
    assert kinds_within(found) <= PLAIN | {cls, tuple}
    assert found == wanted
    assert type(EngineConfig(overlap_steps=np.int64(1)).num_slots) is int  # type: ignore[arg-type]


# -- schemas: objects and classes stand for their text, which is taken once ----------------------------------

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
