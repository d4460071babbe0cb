"""Sampling parameters as plain data, and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from aioinfer.errors import InvalidRequest, shown
from aioinfer.params import DiffusionParams, Grammar, SamplingParams

__all__ = ["params_of", "record_of"]

#: fields that are dataclasses
_PARTS = {"grammar": Grammar, "diffusion": DiffusionParams}


def record_of(params: SamplingParams) -> dict[str, Any]:
    """JSON data: the fields that are not the default. Raises InvalidRequest: some are functions."""
    if params.logits_processors:
        raise InvalidRequest(
            "logits_processors", "are functions of this process: they cannot be stored or sent to another one"
        )
    record = _changed(params)
    for name in _PARTS.keys() & record.keys():
        record[name] = _changed(record[name])
    if "logit_bias" in record:
        record["logit_bias"] = list(record["logit_bias"].items())  # keys of a JSON object would be text
    return record


def params_of(record: Mapping[str, Any]) -> SamplingParams:
    """The parameters of a record. Raises InvalidRequest."""
    values = dict(record)
    for name, kind in _PARTS.items():
        if name in values:
            if not isinstance(values[name], dict):
                raise InvalidRequest(name, f"must be an object, got {shown(values[name])}")
            values[name] = _made(kind, values[name])
    if values.get("logit_bias") is not None:
        try:
            values["logit_bias"] = dict(values["logit_bias"])
        except (TypeError, ValueError):
            raise InvalidRequest("logit_bias", "must be a list of pairs") from None
    made: SamplingParams = _made(SamplingParams, values)
    return made


def _changed(instance: Any) -> dict[str, Any]:
    found = {each.name: (getattr(instance, each.name), each.default) for each in fields(instance)}
    return {name: value for name, (value, default) in found.items() if value != default}


def _made(kind: Any, values: Mapping[str, Any]) -> Any:
    unknown = values.keys() - {each.name for each in fields(kind)}
    if unknown:
        raise InvalidRequest(min(unknown), "is not known")
    try:
        return kind(**values)
    except TypeError as error:  # a field without a default is missing, or a key cannot be hashed
        raise InvalidRequest("params", str(error)) from None
