"""Bodies as JSON objects: what json.loads would take, and nobody should send, is refused."""

from __future__ import annotations

import json
from typing import Any

from aioinfer.errors import InvalidRequest, shown

__all__ = ["json_object"]

_LONGEST_INTEGER = 64


def json_object(raw: bytes) -> dict[str, Any]:
    """The JSON object of a body. NaN, infinity, unbounded nesting, numbers of many digits and a key that is
    there twice are refused with InvalidRequest."""
    try:
        body = json.loads(
            raw.decode(),
            parse_constant=_no_constant,
            parse_int=_integer,
            parse_float=_float,
            object_pairs_hook=_once,
        )
    except InvalidRequest:
        raise
    except RecursionError:
        raise InvalidRequest("body", "is nested too deeply") from None
    except ValueError as error:
        raise InvalidRequest("body", f"is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise InvalidRequest("body", "must be a JSON object")
    return body


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose keys differ: of two equal ones, one would be ignored."""
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise InvalidRequest("body", f"has the key {shown(name)} twice in one object")
            seen.add(name)
    return found


def _integer(digits: str) -> int:
    """A Python function, so that other threads run between the integers of a long list; numbers of thousands
    of digits take long, and no field has one."""
    if len(digits) > _LONGEST_INTEGER:
        raise ValueError(f"an integer has {len(digits)} digits")
    return int(digits)


def _float(digits: str) -> float:
    """As :func:`_integer`."""
    if len(digits) > _LONGEST_INTEGER:
        raise ValueError(f"a number has {len(digits)} digits")
    return float(digits)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
