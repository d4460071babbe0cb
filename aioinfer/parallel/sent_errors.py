"""SentError: an error of aioinfer as plain data, by the name of its class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

import msgspec

from aioinfer import errors
from aioinfer.errors import AioInferError, EngineError

__all__ = ["SentError", "sendable"]

#: characters of a message
_MOST = 4000
_OTHERS = (errors.InvalidRequest, errors.ConstraintFailed, errors.Rejected, errors.TimedOut)
#: classes that are made of a message alone
_CLASSES: Mapping[str, type[AioInferError]] = {
    name: kind
    for name in errors.__all__
    if issubclass(kind := getattr(errors, name), AioInferError) and kind not in _OTHERS
}
_KINDS = frozenset({*_CLASSES, *(kind.__name__ for kind in _OTHERS)})


class SentError(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A class of :mod:`aioinfer.errors`, its arguments, and its cause as text. Any other class becomes
    EngineError."""

    kind: str
    message: str = ""
    field: str = ""
    code: str | None = None
    fields: tuple[str, ...] = ()
    retry_after: float = 1.0
    phase: Literal["waiting", "running"] = "waiting"
    seconds: float = 0.0
    cause: str = ""

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise ValueError("no class of errors that can be sent")

    @classmethod
    def of(cls, error: BaseException) -> Self:
        """The data of an error."""
        kind, values = type(error).__name__, dict[str, Any]()
        if type(error) in _OTHERS:
            found = {name: value for name, value in vars(error).items() if name in cls.__struct_fields__}
            values = {
                name: sendable(value) if isinstance(value, str) else value for name, value in found.items()
            }
        elif _CLASSES.get(kind) is not type(error):
            return cls("EngineError", sendable(f"{kind}: {error}"))
        values.setdefault("message", sendable(str(error)))
        if error.__cause__ is not None:
            values["cause"] = sendable(f"{type(error.__cause__).__name__}: {error.__cause__}")
        return cls(kind, **values)

    def error(self) -> AioInferError:
        """The error again."""
        error: AioInferError
        match self.kind:
            case "InvalidRequest":
                error = errors.InvalidRequest(self.field, self.message, code=self.code)
            case "ConstraintFailed":
                error = errors.ConstraintFailed(self.fields, self.message)
            case "Rejected":
                error = errors.Rejected(self.message, self.retry_after, self.code or "queue_full")
            case "TimedOut":
                error = errors.TimedOut(self.phase, self.seconds)
            case kind:
                error = _CLASSES[kind](self.message)
        if self.cause:
            error.__cause__ = EngineError(self.cause)
        return error


def sendable(text: str, most: int = _MOST) -> str:
    """The beginning of a text, without unpaired surrogates, which have no encoding."""
    return text[:most].encode(errors="replace").decode()
