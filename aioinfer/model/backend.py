"""Backend: the implementation of one part of a model, and the rule that chooses it.

The parts are attention, layers and experts (:mod:`aioinfer.model.kernels`), and sampling
(:mod:`aioinfer.sampling.backend`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from aioinfer.errors import ConfigError

__all__ = ["Backend", "UnsupportedReason", "choose_backend"]

#: Returns why a backend cannot run, in words for the user; None if it can.
UnsupportedReason = Callable[[], str | None]


@dataclass(frozen=True, slots=True)
class Backend:
    """The chosen implementation of one part of a model."""

    #: a value of the option that the user may set: "triton", "native", ...
    name: str
    #: the reason for the choice, in words for the user
    reason: str


def choose_backend(
    option: str,
    wanted: str,
    candidates: Mapping[str, UnsupportedReason],
    automatic: Sequence[str],
    device: torch.device,
) -> Backend:
    """The backend that the user named, or the first of ``automatic`` that can run.

    Only the candidates that are tried are called: finding out whether native kernels can run compiles them.

    Args:
        option: name of the configuration field, for error messages.
        wanted: its value, "auto" or a key of ``candidates``.
        candidates: every backend that can be named.
        automatic: the backends that "auto" tries, the preferred one first.
        device: the device on which the backend will run, for ``Backend.reason``.

    Raises:
        ConfigError: if the backend that was named cannot run, or none of ``automatic`` can.
    """
    if wanted != "auto":
        unsupported_reason = candidates[wanted]()
        if unsupported_reason is not None:
            raise ConfigError(f"{option}: {wanted} was asked for, and {unsupported_reason}")
        return Backend(wanted, "asked for")
    rejected: list[str] = []
    for name in automatic:
        unsupported_reason = candidates[name]()
        if unsupported_reason is None:
            words = "the device is CUDA" if device.type == "cuda" else f"the device is a {device.type}"
            return Backend(name, ", and ".join(rejected) or words)
        rejected.append(unsupported_reason)
    raise ConfigError(f"{option}: no backend can run: {', and '.join(rejected)}")
