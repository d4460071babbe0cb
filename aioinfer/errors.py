"""The exceptions of aioinfer.

    AioInferError
    ├── ConfigError          (ValueError)    a field of a config is invalid or not supported here
    ├── RequestError                         one request failed or was ended; the engine continues
    │   ├── InvalidRequest   (ValueError)    refused before it is queued; ``.field`` names the argument
    │   ├── Rejected                         the queue is full, or it would be late; ``.retry_after`` seconds
    │   ├── ConstraintFailed                 its constraints allow no further token; ``.fields``
    │   ├── ProcessorFailed                  one of its logits processors raised; see ``__cause__``
    │   ├── TimedOut         (TimeoutError)  a waiting or running deadline passed; ``.phase``
    │   └── Cancelled                        the request was ended by ``Engine.abort``
    └── EngineError                          the engine could not serve the request
        ├── StepFailed                       the step that held the request raised; see ``__cause__``
        ├── EngineFailed                     the engine or its device has failed; see ``__cause__``
        ├── OutOfMemory                      the model, its KV pages or a step exceed the memory
        ├── EngineClosed                     not started, draining or closed
        └── WrongLoop        (RuntimeError)  used from another event loop or thread

``asyncio.CancelledError`` is never replaced: a cancelled caller receives it unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

__all__ = [
    "AioInferError",
    "Cancelled",
    "ConfigError",
    "ConstraintFailed",
    "EngineClosed",
    "EngineError",
    "EngineFailed",
    "InvalidRequest",
    "OutOfMemory",
    "ProcessorFailed",
    "Rejected",
    "RequestError",
    "StepFailed",
    "TimedOut",
    "WrongLoop",
]

#: characters of an error's message, and of a value within it
_MAX_MESSAGE = 1000
_MAX_SHOWN = 80


class AioInferError(Exception):
    """Base class of all exceptions of aioinfer. They can be copied and pickled, without ``__cause__``."""

    #: of the request that ended with it, if it is one request's
    request_id: str | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        # Exception's own calls the class with ``args``, which are not the arguments of every class.
        return _restored, (type(self), self.args, self.__dict__)


class ConfigError(AioInferError, ValueError):
    """A configuration value is invalid, or this machine or model does not support it."""


class RequestError(AioInferError):
    """One request failed or was ended; other requests are not affected."""


class InvalidRequest(RequestError, ValueError):
    """An argument is invalid; raised before the request is queued.

    ``field`` is the name of the argument (``"temperature"``, ``"prompt"``, ...); ``code`` is a word for
    programs, if there is one: ``"context_length_exceeded"``, ``"unknown_parameter"``,
    ``"unsupported_parameter"``.
    """

    def __init__(self, field: str, message: str, *, code: str | None = None) -> None:
        field, message = field[:_MAX_MESSAGE], message[:_MAX_MESSAGE]
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message
        self.code = code


class ConstraintFailed(RequestError):
    """The constraints of a request leave no token that may come next, or its grammar reached a limit.

    ``fields`` are the names of the constraints (``"grammar"``, ``"bad_words"``, ...).
    """

    def __init__(self, fields: Sequence[str], message: str) -> None:
        super().__init__(f"{', '.join(fields)}: {message[:_MAX_MESSAGE]}")
        self.fields = tuple(fields)
        self.message = message[:_MAX_MESSAGE]


class ProcessorFailed(RequestError):
    """A logits processor of the request raised, which is the ``__cause__``, or returned what is no token."""

    @classmethod
    def because(cls, cause: BaseException | None) -> Self:
        """With a cause."""
        error = cls(f"a logits processor failed: {cause!r}")
        error.__cause__ = cause
        return error


class Rejected(RequestError):
    """The queue is full, in requests or in tokens (``code`` is "queue_full"), or a request would miss its
    ``ttft_target`` or its ``deadline`` (which is the code). Retry after ``retry_after`` seconds."""

    def __init__(self, message: str, retry_after: float = 1.0, code: str = "queue_full") -> None:
        super().__init__(message)
        self.retry_after = retry_after
        self.code = code

    @property
    def full(self) -> bool:
        """There will be room."""
        return self.code == "queue_full"


class TimedOut(RequestError, TimeoutError):
    """A deadline passed while the request was ``phase`` ("waiting" or "running")."""

    def __init__(self, phase: str, seconds: float) -> None:
        super().__init__(f"request timed out after {seconds:g} s {phase}")
        self.phase = phase
        self.seconds = seconds


class Cancelled(RequestError):
    """The request was aborted by a caller other than its consumer."""


class EngineError(AioInferError):
    """The engine could not serve the request."""


class StepFailed(EngineError):
    """The step that computed this request raised, the second time for it alone; ``__cause__`` is the device's
    exception."""


class EngineFailed(EngineError):
    """The engine or its device has failed permanently; ``__cause__`` is the reason."""


class OutOfMemory(EngineError):
    """The model or its KV pages exceed the memory; or a request's step ran out of memory, and the smaller
    steps of its retry did so again before the request had another token."""


class EngineClosed(EngineError):
    """The engine is not started, draining or closed."""


class WrongLoop(EngineError, RuntimeError):
    """The engine belongs to another event loop than the running one."""


def renamed(error: BaseException, names: Mapping[str, str]) -> BaseException:
    """The error with the names that its caller knows in place of the engine's arguments."""
    other: RequestError
    match error:
        case InvalidRequest():
            other = InvalidRequest(renamed_field(error.field, names), error.message, code=error.code)
        case ConstraintFailed():
            other = ConstraintFailed([renamed_field(each, names) for each in error.fields], error.message)
        case _:
            return error
    other.__cause__, other.request_id = error.__cause__, error.request_id
    return other


def renamed_field(field: str, names: Mapping[str, str]) -> str:
    """The field with the longest part of its path that ``names`` has replaced: ``messages[0].role`` is
    ``input[0].role`` where ``messages[0]`` is ``input[0]``."""
    end = len(field)
    while end > 0:
        if (name := names.get(field[:end])) is not None:
            return name + field[end:]
        end = max(field.rfind(".", 0, end), field.rfind("[", 0, end))
    return field


def _restored(kind: type[AioInferError], args: tuple[Any, ...], state: Mapping[str, Any]) -> AioInferError:
    error = kind.__new__(kind, *args)
    error.args = args  # OSError, a base of TimedOut, sets them in __init__ only
    error.__dict__.update(state)
    return error


def why(error: Exception) -> str:
    """What another package's reader says of a text."""
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)


def shown(value: Any) -> str:
    """A value in an error message, in a few characters and bounded time, whatever it is."""
    if isinstance(value, str):
        return repr(value) if len(value) <= _MAX_SHOWN else f"{value[:_MAX_SHOWN]!r}..."
    if isinstance(value, int) and value.bit_length() > 64:
        return f"an integer of {value.bit_length()} bits"
    if value is None or isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, dict):
        return f"an object of {len(value)} keys"
    if isinstance(value, (list, tuple)):
        return f"a list of {len(value)}"
    return f"an object of type {type(value).__name__}"
