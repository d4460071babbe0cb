"""Sampling parameters as plain data, and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from aioinfer.errors import InvalidRequest
from aioinfer.params import DiffusionParams, Grammar, SamplingParams

__all__ = ["params_of", "record_of"]

#: fields that are dataclasses
_PARTS = {"grammar": Grammar, "diffusion": DiffusionParams}


def record_of(params: SamplingParams) -> dict[str, Any]:
    """JSON data: the fields that are not the default."""
    record = _changed(params)
    for name in _PARTS.keys() & record.keys():
        record[name] = _changed(record[name])
    if "logit_bias" in record:
        # Keys of a JSON object are text.
        record["logit_bias"] = [list(pair) for pair in record["logit_bias"].items()]
    for name, value in record.items():
        if isinstance(value, tuple):
            record[name] = [list(each) if isinstance(each, tuple) else each for each in value]
    return record


def params_of(record: Any) -> SamplingParams:
    """The parameters that :func:`record_of` made it of. Raises InvalidRequest."""
    values = dict(_mapping("params", record))
    for name, kind in _PARTS.items():
        if name in values:
            values[name] = _made(kind, _mapping(name, values[name]))
    bias = values.get("logit_bias")
    if bias is not None:
        if not (isinstance(bias, list) and all(isinstance(each, list) and len(each) == 2 for each in bias)):
            raise InvalidRequest("logit_bias", "must be a list of pairs")
        try:
            values["logit_bias"] = dict(bias)
        except TypeError as error:
            raise InvalidRequest("logit_bias", str(error)) from None
    made: SamplingParams = _made(SamplingParams, values)
    return made


def _changed(instance: Any) -> dict[str, Any]:
    found = {each.name: (getattr(instance, each.name), each.default) for each in fields(instance)}
    return {name: value for name, (value, default) in found.items() if value != default}


def _mapping(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise InvalidRequest(name, f"must be an object, got {type(value).__name__}")
    return value


def _made(kind: Any, values: Mapping[str, Any]) -> Any:
    unknown = values.keys() - {each.name for each in fields(kind)}
    if unknown:
        raise InvalidRequest(min(unknown), "is not known")
    try:
        return kind(**values)
    except TypeError as error:  # a field without a default is missing, or a key cannot be hashed
        raise InvalidRequest("params", str(error)) from None
