"""Errors of requests as plain data, and back: by the names of their classes, which are aioinfer's only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aioinfer import errors
from aioinfer.errors import AioInferError, EngineError

__all__ = ["error_of", "error_record"]

#: characters of a message
_MOST = 4000
#: what a class is made of, where it is not the message alone
_PARTS: Mapping[str, tuple[str, ...]] = {
    "InvalidRequest": ("field", "message", "code"),
    "ConstraintFailed": ("fields", "message"),
    "Rejected": ("message", "retry_after"),
    "TimedOut": ("phase", "seconds"),
}
_TYPES: Mapping[str, tuple[type, ...]] = {
    "fields": (list,),
    "code": (str, type(None)),
    "retry_after": (float, int),
    "seconds": (float, int),
}
_CLASSES: Mapping[str, Any] = {
    name: kind
    for name in errors.__all__
    if issubclass(kind := getattr(errors, name), (errors.RequestError, EngineError))
}


def error_record(error: BaseException) -> dict[str, Any]:
    """JSON data: the class, its arguments, and the cause as text. A class that is not one of aioinfer's
    becomes EngineError."""
    name = type(error).__name__
    if _CLASSES.get(name) is not type(error):
        return {"class": "EngineError", "message": f"{name}: {error}"[:_MOST]}
    record: dict[str, Any] = {"class": name}
    for part in _PARTS.get(name, ("message",)):
        value = getattr(error, part, None)
        if part == "message" and value is None:
            value = str(error)
        record[part] = list(value) if isinstance(value, tuple) else value
    if isinstance(record.get("message"), str):
        record["message"] = record["message"][:_MOST]
    if error.__cause__ is not None:
        record["cause"] = f"{type(error.__cause__).__name__}: {error.__cause__}"[:_MOST]
    return record


def error_of(record: Any) -> AioInferError:
    """The error of such data. Raises ValueError: it is none."""
    if not isinstance(record, dict) or record.get("class") not in _CLASSES:
        raise ValueError("no class of errors that can be sent")
    name = record["class"]
    parts = _PARTS.get(name, ("message",))
    values = [record.get(part) for part in parts]
    for part, value in zip(parts, values, strict=True):
        if not isinstance(value, _TYPES.get(part, (str,))):
            raise ValueError(f"{name} with a {part} of type {type(value).__name__}")
        if part == "phase" and value not in ("waiting", "running"):
            raise ValueError(f"{name} with a phase that no request has")
    if name == "InvalidRequest":
        error: AioInferError = errors.InvalidRequest(*values[:2], code=values[2])  # type: ignore[arg-type]
    else:
        error = _CLASSES[name](*values)
    cause = record.get("cause")
    if isinstance(cause, str):
        error.__cause__ = EngineError(cause)
    return error
