"""Options: how the fields of a config are declared, checked and loaded."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar, cast

from aioinfer.config.values import (
    check_type,
    field_options,
    load_settings,
    read_settings_file,
    shown,
    shown_bound,
    warn_of_variables,
)
from aioinfer.errors import ConfigError
from aioinfer.inputs import keep_plain

__all__ = [
    "AT_LEAST_ONE",
    "GROUPS",
    "NOT_NEGATIVE",
    "POSITIVE",
    "UNIT_INTERVAL",
    "Bounds",
    "Settings",
    "check_fields",
    "option",
    "register",
]

_Config = TypeVar("_Config")
#: every config, in the order of its import
_KINDS: list[Any] = []
#: Upper bound of the fields without one: excludes infinity, and integers that no float can hold.
_LARGEST = sys.float_info.max


@dataclass(frozen=True, slots=True)
class Bounds:
    """Values that a numeric field accepts: finite, in [low, high] or (low, high]."""

    low: float
    high: float = _LARGEST
    low_open: bool = False

    def check(self, name: str, value: float) -> None:
        """Raises ConfigError with the field's name."""
        if self.low <= value <= self.high and not (self.low_open and value == self.low):
            return
        if self.high < _LARGEST:
            bracket = "(" if self.low_open else "["
            wanted = f"be in {bracket}{shown_bound(self.low)}, {shown_bound(self.high)}]"
        elif self.low:
            wanted = f"be at least {shown_bound(self.low)}"
        else:
            wanted = "be positive" if self.low_open else "not be negative"
        raise ConfigError(f"{name} must {wanted}, got {shown(value)}")


AT_LEAST_ONE = Bounds(1)
NOT_NEGATIVE = Bounds(0)
POSITIVE = Bounds(0, low_open=True)
UNIT_INTERVAL = Bounds(0, 1)

#: Group of a field -> title of its flags in ``--help``, in this order.
GROUPS = {
    "model": "model",
    "adapters": "LoRA adapters",
    "kernels": "device and kernels",
    "memory": "KV memory and prefix cache",
    "batching": "batching",
    "scheduling": "queue policy and admission",
    "overlap": "overlap and event loop",
    "speculation": "speculation",
    "sampling": "sampling and grammars",
    "diffusion": "diffusion models",
    "images": "images in prompts",
    "chat": "chats: tool calls, reasoning, template",
    "limits": "limits and timeouts",
    "observing": "metrics, log lines and traces",
    "server": "HTTP server",
    "connections": "HTTP connections",
    "sessions": "sessions and held prefixes",
    "replicas": "several engines that serve as one",
}


def option(default: Any, group: str, help: str, bounds: Bounds | None = None) -> Any:
    """A field with its group in ``--help``, its help text and, for numbers, the values that it accepts."""
    assert group in GROUPS
    return field(default=default, metadata={"group": group, "help": help, "bounds": bounds})


class Settings:
    """Base class of configs."""

    __slots__ = ()

    @classmethod
    def load(
        cls, path: str | Path | None = None, environ: Mapping[str, str] | None = None, **settings: Any
    ) -> Self:
        """A config from the sources of the command line.

        Args:
            path: a YAML file; None: no file. It may hold the fields of the other configs, too.
            environ: variables, ``AIOINFER_CHUNK_SIZE`` for ``chunk_size``; None: those of the process.
            settings: fields; they take precedence over the variables, these over the file, and the file over
                the defaults.

        Raises:
            ConfigError: a value is invalid, or the file cannot be read or has an unknown key.
            TypeError: one of ``settings`` is no field.
        """
        #: by name, the config that was imported first of those that have the field
        known = {item.name: kind for kind in reversed(_KINDS) for item in dataclasses.fields(kind)}
        if unknown := sorted(settings.keys() - {item.name for item in dataclasses.fields(cast(Any, cls))}):
            raise TypeError(f"{cls.__name__} has no field {unknown[0]}")
        environ = os.environ if environ is None else environ
        warn_of_variables(environ, known, {name for name, kind in known.items() if kind is cls})
        file = {} if path is None else read_settings_file(path, known)
        found: Self = load_settings(cls, settings, environ, file)
        return found


def register(cls: type[_Config]) -> type[_Config]:
    """Let files and variables have the names of a config's fields."""
    _KINDS.append(cls)
    return cls


def check_fields(config: Any) -> None:
    """Make every field plain and check its type, then check the bounds of the numbers. Raises ConfigError."""
    keep_plain(config)
    items = dataclasses.fields(config)
    for item in items:
        check_type(item.name, getattr(config, item.name), field_options(type(config), item.name))
    for item in items:
        value, bounds = getattr(config, item.name), item.metadata["bounds"]
        if bounds is not None and value is not None:
            bounds.check(item.name, value)
