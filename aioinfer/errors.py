"""Every exception that aioinfer raises on purpose.

    AioInferError
    ├── ConfigError          (ValueError)    a field of a config is wrong or cannot be met
    ├── RequestError                         one request is at fault or was ended; the engine goes on
    │   ├── InvalidRequest   (ValueError)    refused before queueing; ``.field`` names the argument
    │   ├── Rejected                         the queue is full; ``.retry_after`` seconds
    │   ├── TimedOut         (TimeoutError)  a waiting or running deadline passed; ``.phase``
    │   └── Cancelled                        somebody else ended the request (``Engine.abort``)
    └── EngineError                          the engine could not serve the request
        ├── StepFailed                       the step that held the request raised; see ``__cause__``
        ├── EngineFailed                     the engine or its device is lost; see ``__cause__``
        ├── OutOfMemory                      the model, its KV pages or a step do not fit
        ├── EngineClosed                     not started, draining or closed
        └── WrongLoop        (RuntimeError)  used from another event loop or thread

``asyncio.CancelledError`` is never replaced: a cancelled caller sees exactly that.
"""

from __future__ import annotations

__all__ = [
    "AioInferError",
    "Cancelled",
    "ConfigError",
    "EngineClosed",
    "EngineError",
    "EngineFailed",
    "InvalidRequest",
    "OutOfMemory",
    "Rejected",
    "RequestError",
    "StepFailed",
    "TimedOut",
    "WrongLoop",
]


class AioInferError(Exception):
    """Base of everything below."""


class ConfigError(AioInferError, ValueError):
    """A configuration value is wrong, or the machine or model cannot meet it."""


class RequestError(AioInferError):
    """One request is at fault or was ended; every other request goes on."""


class InvalidRequest(RequestError, ValueError):
    """An argument was refused before the request was queued.

    ``field`` is the name of the offending argument (``"temperature"``, ``"prompt"``, ...).
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


class Rejected(RequestError):
    """The engine has as many queued requests or tokens as it accepts. Try again in ``retry_after`` s."""

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class TimedOut(RequestError, TimeoutError):
    """A deadline passed while the request was ``phase`` ("waiting" or "running")."""

    def __init__(self, phase: str, seconds: float) -> None:
        super().__init__(f"request timed out after {seconds:g} s {phase}")
        self.phase = phase
        self.seconds = seconds


class Cancelled(RequestError):
    """The request was aborted by somebody other than its consumer."""


class EngineError(AioInferError):
    """The engine could not serve the request."""


class StepFailed(EngineError):
    """The step that computed this request raised; ``__cause__`` is the device's own exception."""


class EngineFailed(EngineError):
    """The engine or its device is lost for good; ``__cause__`` says why."""


class OutOfMemory(EngineError):
    """The model or its KV pages do not fit into the memory there is; or a request was in a step that did not,
    was tried again in smaller ones, and ran out of memory again before it had another token."""


class EngineClosed(EngineError):
    """The engine is not started, draining or closed."""


class WrongLoop(EngineError, RuntimeError):
    """The engine belongs to another event loop than the one running here."""
