"""Messages: the payloads of all frames but rows. Each class has ``pack`` and ``unpack``, which raises
FrameError for bytes that are not such a message."""

from __future__ import annotations

import functools
import json
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple, ParamSpec, Self, TypeVar

from aioinfer.errors import AioInferError, ConfigError, InvalidRequest
from aioinfer.execution.device import DeviceInfo
from aioinfer.loop.options import RequestOptions
from aioinfer.observe.stats import EngineStats
from aioinfer.outputs import AdapterInfo
from aioinfer.parallel.errors_record import error_of, error_record
from aioinfer.parallel.frames import PROTOCOL, FrameError
from aioinfer.params import SamplingParams
from aioinfer.pooling import Pooling
from aioinfer.resuming.params_record import params_of, record_of
from aioinfer.resuming.record import StreamCheckpoint

__all__ = ["Abort", "Adapt", "Adapted", "Hello", "Read", "Reason", "Stats", "Submit", "Welcome"]

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")

#: options of a request that travel
_OPTIONS = (
    "priority",
    "cache_salt",
    "routing_key",
    "waiting_timeout",
    "running_timeout",
    "max_lag",
    "request_id",
    "adapter",
)
_MOST_REASON = 2000


def _checked(unpack: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """What is wrong with a payload can raise anything: it is one type here."""

    @functools.wraps(unpack)
    def checked(*args: _Parameters.args, **named: _Parameters.kwargs) -> _Result:
        try:
            return unpack(*args, **named)
        except FrameError:
            raise
        except Exception as error:
            raise FrameError(f"a message that makes no sense: {error!r}") from error

    return checked


@dataclass(frozen=True, slots=True)
class Hello:
    """The first frame to a replica."""

    token: str = ""
    #: of the model that it must have; empty: any
    fingerprint: str = ""
    protocol: int = PROTOCOL

    def pack(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    @_checked
    def unpack(cls, payload: bytes) -> Self:
        found = json.loads(payload)
        return cls(
            _is(found.get("token"), str), _is(found.get("fingerprint"), str), _is(found["protocol"], int)
        )


@dataclass(frozen=True, slots=True)
class Welcome:
    """Its answer: what there is."""

    info: DeviceInfo
    #: requests that it computes at the same time, and tokens of a step, at most
    slots: int
    step_tokens: int
    stats: EngineStats
    #: it has a prefix cache
    caches: bool = True
    adapters: Sequence[AdapterInfo] = ()

    def pack(self) -> bytes:
        info = asdict(self.info) | {"eos_token_ids": sorted(self.info.eos_token_ids)}
        record = {"info": info, "slots": self.slots, "step_tokens": self.step_tokens, "caches": self.caches}
        record |= {"stats": asdict(self.stats), "adapters": [asdict(each) for each in self.adapters]}
        return json.dumps(record).encode()

    @classmethod
    @_checked
    def unpack(cls, payload: bytes) -> Self:
        found = json.loads(payload)
        slots, step_tokens = _is(found["slots"], int), _is(found["step_tokens"], int)
        if slots < 1 or step_tokens < 1:
            raise FrameError("a replica without slots")
        info, stats = _made(DeviceInfo, found["info"]), _made(EngineStats, found["stats"])
        adapters = _adapters(found["adapters"])
        return cls(info, slots, step_tokens, stats, _is(found["caches"], bool), adapters)


class Stats:
    """The statistics of a replica's engine."""

    @staticmethod
    def pack(stats: EngineStats) -> bytes:
        return json.dumps(asdict(stats), separators=(",", ":")).encode()

    @staticmethod
    @_checked
    def unpack(payload: bytes) -> EngineStats:
        return _made(EngineStats, json.loads(payload))


class Reason:
    """Why a replica refuses, or is lost."""

    @staticmethod
    def pack(reason: str) -> bytes:
        return reason[:_MOST_REASON].encode(errors="replace")

    @staticmethod
    def unpack(payload: bytes) -> str:
        return payload.decode(errors="replace")[:_MOST_REASON]


class Submit(NamedTuple):
    """An attempt."""

    number: int
    prompt_ids: Sequence[int]
    #: with their seed
    params: SamplingParams
    options: RequestOptions
    #: where it goes on
    checkpoint: StreamCheckpoint | None
    #: tokens of the output that its consumer has read, which counts with ``max_lag``
    read: int
    #: the parameters or the checkpoint are not what they should be, in this release
    refused: InvalidRequest | None = None

    def pack(self) -> bytes:
        record: dict[str, Any] = {name: getattr(self.options, name) for name in _OPTIONS}
        record["read"], record["pooling"] = self.read, _pooling_record(self.options.pooling)
        checkpoint = b"" if self.checkpoint is None else self.checkpoint.to_json().encode()
        if not checkpoint:
            record["params"] = record_of(self.params)
        head, ids = json.dumps(record, separators=(",", ":")).encode(), self.prompt_ids
        if checkpoint:
            ids = ()  # they are in the checkpoint, as the parameters are
        numbers = _SUBMIT.pack(self.number, len(head), len(checkpoint))
        return b"".join((numbers, head, checkpoint, struct.pack(f"<{len(ids)}I", *ids)))

    @classmethod
    @_checked
    def unpack(cls, payload: bytes) -> Self:
        number, size, more = _SUBMIT.unpack_from(payload)
        at = _SUBMIT.size + size
        if at + more > len(payload):
            raise FrameError("a request that is shorter than it says")
        record = json.loads(payload[_SUBMIT.size : at])
        read, params = _is(record.pop("read"), int), record.pop("params", None)
        pooling = _pooling(record.pop("pooling"))
        if record.keys() != set(_OPTIONS):
            raise FrameError("a request with other options")
        options = RequestOptions(**record, pooling=pooling)
        count = (len(payload) - at - more) // 4
        ids: Sequence[int] = struct.unpack(f"<{count}I", payload[at + more :])
        try:
            if not more:
                return cls(number, ids, params_of(params), options, None, read)
            found = StreamCheckpoint.from_json(payload[at : at + more])
        except InvalidRequest as error:
            return cls(number, (), SamplingParams(), options, None, read, error)
        return cls(number, found.prompt_token_ids, found.params, options, found, read)


class Abort:
    """Nothing more is wanted of an attempt."""

    @staticmethod
    def pack(number: int) -> bytes:
        return _NUMBER.pack(number)

    @staticmethod
    @_checked
    def unpack(payload: bytes) -> int:
        number: int = _NUMBER.unpack(payload)[0]
        return number


class Read:
    """Of an attempt, so many tokens of the output were read."""

    @staticmethod
    def pack(number: int, tokens: int) -> bytes:
        return _READ.pack(number, tokens)

    @staticmethod
    @_checked
    def unpack(payload: bytes) -> tuple[int, int]:
        number, tokens = _READ.unpack(payload)
        return number, tokens


@dataclass(frozen=True, slots=True)
class Adapt:
    """Load an adapter from a path there; None: unload it. Without a name: leave the load of this number."""

    number: int
    name: str = ""
    path: str | None = None

    def pack(self) -> bytes:
        return json.dumps(asdict(self)).encode(errors="surrogateescape")

    @classmethod
    @_checked
    def unpack(cls, payload: bytes) -> Self:
        found = json.loads(payload)
        path = None if found["path"] is None else _is(found["path"], str)
        return cls(_is(found["number"], int), _is(found["name"], str), path)


@dataclass(frozen=True, slots=True)
class Adapted:
    """What came of it, and the adapters that there are now. Number 0: they were changed elsewhere."""

    number: int
    adapters: Sequence[AdapterInfo]
    error: BaseException | None = None

    def pack(self) -> bytes:
        error = self.error
        config = str(error)[:_MOST_REASON] if isinstance(error, ConfigError) else None
        record = None if error is None or config is not None else error_record(error)
        adapters = [asdict(each) for each in self.adapters]
        parts = {"number": self.number, "adapters": adapters, "error": record, "config": config}
        return json.dumps(parts).encode()

    @classmethod
    @_checked
    def unpack(cls, payload: bytes) -> Self:
        found = json.loads(payload)
        error: AioInferError | None = None
        if found["config"] is not None:
            error = ConfigError(_is(found["config"], str))
        elif found["error"] is not None:
            error = error_of(found["error"])
        return cls(_is(found["number"], int), _adapters(found["adapters"]), error)


def _adapters(found: Any) -> tuple[AdapterInfo, ...]:
    return tuple(_made(AdapterInfo, each) for each in _is(found, list))


_SUBMIT = struct.Struct("<qII")
_NUMBER = struct.Struct("<q")
_READ = struct.Struct("<qI")


def _pooling_record(pooling: Pooling | None) -> Any:
    return None if pooling is None else [pooling.kind, list(pooling.token_ids)]


def _pooling(record: Any) -> Pooling | None:
    if record is None:
        return None
    kind, ids = _is(record, list)
    return Pooling(_is(kind, str), tuple(_is(each, int) for each in _is(ids, list)))


def _is(value: Any, kind: Any) -> Any:
    if type(value) is not kind:
        raise FrameError(f"a value of type {type(value).__name__} where {kind.__name__} is expected")
    return value


#: annotations of the fields of DeviceInfo and EngineStats, and the types of their values in JSON
_KINDS: Mapping[str, tuple[type, ...]] = {
    "int": (int,),
    "int | None": (int, type(None)),
    "float": (float, int),
    "bool": (bool,),
    "str": (str,),
    "frozenset[int]": (list,),
    "Mapping[str, str]": (dict,),
    "Mapping[str, float]": (dict,),
    "Mapping[str, int]": (dict,),
}
_Made = TypeVar("_Made")


def _made(kind: type[_Made], values: Any) -> _Made:
    """A dataclass of plain values, which must have all its fields and nothing else."""
    items = {each.name: each for each in fields(kind)}  # type: ignore[arg-type]
    if not isinstance(values, dict) or values.keys() != items.keys():
        raise FrameError(f"other fields than those of {kind.__name__}: another release, perhaps")
    for name, value in values.items():
        if type(value) not in _KINDS[str(items[name].type)]:
            raise FrameError(f"{kind.__name__}.{name} of type {type(value).__name__}")
    if "eos_token_ids" in values:
        values["eos_token_ids"] = frozenset(_is(each, int) for each in values["eos_token_ids"])
    return kind(**values)
