"""Settings: values of the config dataclasses from text, from the environment and from YAML files."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import logging
import os
import reprlib
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from aioinfer.errors import ConfigError

__all__ = [
    "BOOLEANS",
    "check_type",
    "field_options",
    "first_line",
    "load_settings",
    "parse_setting",
    "read_settings_file",
    "read_yaml",
    "shown",
    "shown_bound",
    "value_names",
    "warn_of_variables",
]

_log = logging.getLogger("aioinfer")

#: texts of booleans, in lower case
BOOLEANS = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off"), False),
}
_PREFIX = "AIOINFER_"
#: bytes of the largest settings file
_LARGEST_FILE = 1 << 20

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = _repr.maxlong = 80


def shown(value: Any) -> str:
    """``repr(value)`` at bounded length, for error messages."""
    return _repr.repr(value)


def first_line(error: Exception) -> str:
    """The first line of an error of another package, at bounded length: torch's have whole stacks."""
    return str(error).partition("\n")[0][:500]


def shown_bound(bound: float) -> str:
    """A bound in full: 1048576, not 1.04858e+06."""
    return str(int(bound)) if bound == int(bound) else repr(bound)


def load_settings(
    cls: type[Any],
    flags: Mapping[str, Any] = types.MappingProxyType({}),
    environ: Mapping[str, str] | None = None,
    file: Mapping[str, Any] = types.MappingProxyType({}),
) -> Any:
    """Build a config dataclass from flags, environment and file settings, in this order of precedence.

    Keys of ``file`` that are not fields of ``cls`` are ignored: one file can configure several classes.
    """
    environ = os.environ if environ is None else environ
    values: dict[str, Any] = {}
    for item in dataclasses.fields(cls):
        variable = f"AIOINFER_{item.name.upper()}"
        if item.name in flags:
            values[item.name] = flags[item.name]
        elif variable in environ:
            try:
                values[item.name] = parse_setting(cls, item.name, environ[variable])
            except ConfigError as error:
                raise ConfigError(f"{error} (the variable {variable})") from None
        elif item.name in file:
            values[item.name] = file[item.name]
    return cls(**values)


def parse_setting(cls: type[Any], name: str, text: str) -> Any:
    """The value of a field from the text of a flag or an environment variable. Raises ConfigError."""
    options = field_options(cls, name)
    if type(None) in options and text.lower() in ("", "none", "null"):
        return None
    if bool in options:
        if text.lower() not in BOOLEANS:
            raise ConfigError(f"{name} must be true or false, got {shown(text)}")
        return BOOLEANS[text.lower()]
    for kind in (int, float):
        if kind in options or any(isinstance(option, kind) for option in options):
            try:
                return kind(text)
            except ValueError:
                raise ConfigError(f"{name} must be a number, got {shown(text)}") from None
    return text


#: the annotations of a class, evaluated once
_hints: Callable[..., dict[str, Any]] = functools.cache(typing.get_type_hints)


def value_names(cls: type[Any], name: str) -> tuple[str, ...]:
    """The values of a field that is a Literal or a bool, as text; empty for other fields."""
    options = field_options(cls, name)
    if bool in options:
        return ("true", "false")
    return tuple(str(option) for option in options if not isinstance(option, type))


def field_options(cls: type[Any], name: str) -> tuple[Any, ...]:
    """The types that a field accepts, and the values of a Literal."""
    hint = _hints(cls)[name]
    # ``Literal[...] | None`` is a typing.Union.
    union = typing.get_origin(hint) in (types.UnionType, typing.Union)
    parts = typing.get_args(hint) if union else (hint,)
    return tuple(
        option
        for part in parts
        for option in (typing.get_args(part) if typing.get_origin(part) is Literal else (part,))
    )


def check_type(name: str, value: Any, options: tuple[Any, ...]) -> None:
    """Raise ConfigError unless a plain value has one of the types, or is one of the values, of
    :func:`field_options`."""
    kind = type(value)
    if kind in options or (kind is int and float in options):
        return
    if type in options and isinstance(value, type):  # a class of any metaclass
        return
    if kind is bool:
        raise ConfigError(f"{name} must not be true or false, got {shown(value)}")
    if any(kind is type(option) and value == option for option in options):  # 1.0 equals the option 1
        return
    wanted = ", ".join(getattr(option, "__name__", repr(option)) for option in options)
    raise ConfigError(f"{name} must be one of {wanted}; got {shown(value)}")


def read_settings_file(path: str | Path, known: Collection[str]) -> dict[str, Any]:
    """The settings in a YAML file.

    Args:
        path: the file, of at most 1 MiB.
        known: the names that may occur.

    Raises:
        ConfigError: the file cannot be read, is no mapping, or has a key that is unknown or occurs twice. The
            message is one line that begins with the path.
    """
    settings = read_yaml(path)
    if settings is None:
        return {}
    if not isinstance(settings, dict):
        raise ConfigError(f"{path} must hold a mapping of settings, not {type(settings).__name__}")
    unknown = sorted(key for key in map(str, settings) if key not in known)
    if unknown:
        raise ConfigError(f"{path} has unknown settings: {', '.join(_suggested(unknown, known))}")
    return settings


def read_yaml(path: str | Path) -> Any:
    """Content of a YAML file of at most 1 MiB. Raises ConfigError: one line that begins with the path."""
    import yaml

    try:
        with open(path, "rb") as file:
            content = file.read(_LARGEST_FILE + 1)
        if len(content) > _LARGEST_FILE:
            raise ConfigError(f"{path} is larger than {_LARGEST_FILE >> 20} MiB: it holds no settings")
        return yaml.load(content.decode("utf-8"), _yaml_loader())
    except ConfigError:
        raise
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        problem = ": ".join(filter(None, (error.context, error.problem)))
        raise ConfigError(f"{path}{line}: {problem}") from error
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} is not UTF-8: byte {error.start} is {content[error.start]:#04x}"
        ) from error
    except RecursionError as error:
        raise ConfigError(f"{path} is nested too deeply to hold settings") from error
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from error


def warn_of_variables(environ: Mapping[str, str], known: Collection[str], own: Collection[str]) -> None:
    """Log variables that look like settings and are none, as ``AIOINFER_CHUNKSIZE``, if one of a config's
    ``own`` is the closest of all that are ``known``: a command loads several configs.

    They are not refused: orchestrators make variables of any name.
    """
    names = {name.removeprefix(_PREFIX).lower() for name in environ if name.startswith(_PREFIX)}
    for name in sorted(names.difference(known)):
        close = difflib.get_close_matches(name, known, 1, 0.85)
        if close and close[0] in own:
            variable, meant = (f"{_PREFIX}{each.upper()}" for each in (name, close[0]))
            _log.warning("the variable %s is no setting; did you mean %s?", variable, meant)


def _suggested(names: Iterable[str], known: Collection[str]) -> list[str]:
    """Names with what may have been meant; the first few."""
    found = []
    for name in list(names)[:5]:
        close = difflib.get_close_matches(name.lower().replace("-", "_"), known, 1)
        found.append(f"{shown(name)[1:-1]} (did you mean {close[0]}?)" if close else shown(name)[1:-1])
    return found


@functools.cache
def _yaml_loader() -> type[Any]:
    """YAML's safe loader, without keys that occur twice."""
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            keys: list[Any] = []
            for key, _ in node.value:
                name = key.value if isinstance(key, yaml.ScalarNode) else None
                if name is not None and name in keys:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"{shown(name)[1:-1]} occurs twice", key.start_mark
                    )
                keys.append(name)
            found: dict[Any, Any] = super().construct_mapping(node, deep)
            return found

    return Loader
