"""StreamCheckpoint: how far a stream has come, as a record that an application may store."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from aioinfer.diffusion.state import BlockState
from aioinfer.errors import InvalidRequest, shown
from aioinfer.outputs import TokenLogprob
from aioinfer.params import SamplingParams
from aioinfer.resuming.params_record import params_of, record_of

__all__ = ["VERSION", "StreamCheckpoint"]

#: of the record
VERSION = 1
_FIELD = "checkpoint"
_INT64 = range(-(1 << 63), 1 << 63)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamCheckpoint:
    """A request amid its output. :meth:`aioinfer.Engine.restore` goes on with it, in any engine with the same
    model.

    ``to_json`` and ``from_json`` are its form for storing. It contains prompt and output, as token ids, and
    the cache salt: who can read it can read these.
    """

    #: which model it is, by its files; and by its name, for messages
    fingerprint: str
    model: str
    #: by which arithmetic the tokens were computed
    numerics: str
    #: all of them by one, deterministic
    identical: bool
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    #: of the sampling noise
    seed: int
    #: the output so far
    token_ids: Sequence[int]
    #: what the consumer has read of it
    delivered_tokens: int = 0
    delivered_characters: int = 0
    #: one per token, if they were asked for
    logprobs: Sequence[TokenLogprob] = ()
    #: of the prompt's tokens from the second on, as far as they are known
    prompt_logprobs: Sequence[TokenLogprob] = ()
    #: of a diffusion model: by token, the round that wrote it, and the block that is not done
    step_map: Sequence[int] | None = None
    block: BlockState | None = None
    request_id: str = ""
    priority: int = 0
    cache_salt: str = ""
    routing_key: str | None = None
    #: the LoRA adapter that computed it besides the model, and what tells its files from others
    adapter: str | None = None
    adapter_fingerprint: str = ""
    #: of the weights that computed the last token; how often they had been replaced
    weight_version: int = 0

    def to_json(self) -> str:
        """One JSON object in one line, 4 to 8 bytes per token of prompt and output without logprobs."""
        record: dict[str, Any] = {"version": VERSION}
        for name in _READERS:
            value = getattr(self, name)
            if name in _OPTIONAL and not value:
                continue
            if name == "params":
                value = record_of(value)
            elif name == "block" and value is not None:
                value = {each: _plain(getattr(value, each)) for each in BlockState.__slots__}
            elif name.endswith("logprobs"):
                value = [[each.token_id, each.logprob, [list(pair) for pair in each.top]] for each in value]
            record[name] = _plain(value)
        return json.dumps(record, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """The record that :meth:`to_json` wrote.

        Raises InvalidRequest with the field ``checkpoint``: it is no such record, truncated for example, or
        one of another version, or a value in it makes no sense.
        """
        try:
            record = json.loads(text)
        except (ValueError, RecursionError, TypeError) as error:
            raise InvalidRequest(_FIELD, f"is not JSON, or truncated: {error}") from None
        if not isinstance(record, dict):
            raise InvalidRequest(_FIELD, f"must be an object, got {shown(record)}")
        version = record.pop("version", None)
        if version != VERSION or type(version) is not int:
            raise InvalidRequest(_FIELD, f"has version {shown(version)}; this release reads {VERSION}")
        for problem, names in (
            ("is not known", record.keys() - _READERS.keys()),
            ("is missing", _READERS.keys() - record.keys() - _OPTIONAL),
        ):
            if names:
                raise InvalidRequest(_FIELD, f"{shown(min(names))} {problem}")
        present = {name: read for name, read in _READERS.items() if name in record}
        return cls(**{name: _read(name, read, record[name]) for name, read in present.items()})


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _read(name: str, read: Callable[[Any], Any], value: Any) -> Any:
    try:
        return read(value)
    except InvalidRequest as error:
        inner = "" if error.field in (_FIELD, name) else f"{error.field}: "
        raise InvalidRequest(_FIELD, f"{name}: {inner}{error.message}") from None


def _of(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise InvalidRequest(_FIELD, f"must be of type {kind.__name__}, got {shown(value)}")
    return value


def _int(value: Any) -> int:
    if type(value) is not int or value not in _INT64:
        raise InvalidRequest(_FIELD, f"must be an integer of 64 bits, got {shown(value)}")
    return value


def _count(value: Any) -> int:
    if _int(value) < 0:
        raise InvalidRequest(_FIELD, f"must not be negative, got {value}")
    return int(value)


def _float(value: Any) -> float:
    if type(value) not in (int, float):
        raise InvalidRequest(_FIELD, f"must be a number, got {shown(value)}")
    try:
        found = float(value)
    except OverflowError:
        found = math.nan
    if math.isnan(found) or found > 0:
        raise InvalidRequest(_FIELD, f"must be a logprob, got {shown(value)}")
    return found


def _text(value: Any) -> str:
    return str(_of(str, value))


def _truth(value: Any) -> bool:
    return bool(_of(bool, value))


def _each(read: Callable[[Any], Any]) -> Callable[[Any], list[Any]]:
    return lambda value: [read(each) for each in _of(list, value)]


def _optional(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else read(value)


def _logprob(value: Any) -> TokenLogprob:
    parts = _of(list, value)
    if len(parts) != 3:
        raise InvalidRequest(
            _FIELD, f"must have a token, a logprob and the most likely ones, got {shown(value)}"
        )
    top = [_of(list, each) for each in _of(list, parts[2])]
    if any(len(each) != 2 for each in top):
        raise InvalidRequest(_FIELD, "the most likely ones must be pairs")
    return TokenLogprob(_int(parts[0]), _float(parts[1]), tuple((_int(a), _float(b)) for a, b in top))


_BLOCK: Mapping[str, Callable[[Any], Any]] = {
    "start": _count,
    "ids": _each(_int),
    "known": _each(_truth),
    "written_in": _each(_int),
    "logprobs": _each(_float),
    "rounds": _count,
    "done": _truth,
    "changed": _truth,
    "failed": _truth,
    "private": lambda value: tuple(_int(each) for each in _of(list, value)),
}


def _block(value: Any) -> BlockState:
    record = _of(dict, value)
    if record.keys() != _BLOCK.keys():
        raise InvalidRequest(_FIELD, f"must have {', '.join(_BLOCK)}")
    return BlockState(**{name: _read(name, read, record[name]) for name, read in _BLOCK.items()})


#: by field, what makes it of JSON data
_READERS: Mapping[str, Callable[[Any], Any]] = {
    "fingerprint": _text,
    "model": _text,
    "numerics": _text,
    "identical": _truth,
    "prompt_token_ids": _each(_int),
    "params": params_of,
    "seed": _int,
    "token_ids": _each(_int),
    "delivered_tokens": _count,
    "delivered_characters": _count,
    "logprobs": _each(_logprob),
    "prompt_logprobs": _each(_logprob),
    "step_map": _optional(_each(_int)),
    "block": _optional(_block),
    "request_id": _text,
    "priority": _int,
    "cache_salt": _text,
    "routing_key": _optional(_text),
    "adapter": _optional(_text),
    "adapter_fingerprint": _text,
    "weight_version": _count,
}
#: fields that records of earlier releases do not have, or that are there where they say something
_OPTIONAL = frozenset({"adapter", "adapter_fingerprint", "weight_version"})
