"""StreamCheckpoint: how far a stream has come, as a record that an application may store."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, Self

import msgspec
from msgspec import Meta

from aioinfer.budget import TokenBudget
from aioinfer.diffusion.state import BlockState
from aioinfer.errors import InvalidRequest, shown, why
from aioinfer.images.source import ImageSource
from aioinfer.images.stored import StoredImage, restored, stored
from aioinfer.outputs import TokenLogprob
from aioinfer.params import SamplingParams
from aioinfer.request import RequestOptions
from aioinfer.resuming.params_record import params_of, record_of

__all__ = ["VERSION", "StreamCheckpoint", "options_of"]

#: of the record
VERSION = 1
_FIELD = "checkpoint"


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamCheckpoint:
    """A request amid its output. :meth:`aioinfer.Engine.restore` goes on with it, in any engine with the same
    model.

    ``to_json`` and ``from_json`` are its form for storing. It contains prompt and output, as token ids, and
    the cache salt: who can read it can read these.
    """

    #: tells the model's files from others; and the model's name, for messages
    fingerprint: str
    model: str
    #: the arithmetic that computed the tokens
    numerics: str
    #: one deterministic arithmetic computed all of them
    identical: bool
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    #: seed of the sampling noise
    seed: int
    #: the output so far
    token_ids: Sequence[int]
    #: tokens and characters of it that the consumer has read
    delivered_tokens: int = 0
    delivered_characters: int = 0
    #: one per token, if they were asked for
    logprobs: Sequence[TokenLogprob] = ()
    #: logprobs of the prompt's tokens from the second on, as far as they are known
    prompt_logprobs: Sequence[TokenLogprob] = ()
    #: diffusion models: the round that wrote each token, and the block that is not done
    step_map: Sequence[int] | None = None
    block: BlockState | None = None
    request_id: str = ""
    priority: int = 0
    cache_salt: str = ""
    routing_key: str | None = None
    #: the LoRA adapter that computed it besides the model, and what tells its files from others
    adapter: str | None = None
    adapter_fingerprint: str = ""
    #: version of the weights that computed the last token: how often they had been replaced
    weight_version: int = 0
    #: seconds of its deadline that were left
    deadline: float | None = None
    #: output tokens that it shares with others of this process; it has no JSON
    budget: TokenBudget | None = None
    #: the images of the prompt, whose positions have words in ``prompt_token_ids``
    images: Sequence[ImageSource] = ()

    def to_json(self) -> str:
        """One JSON object in one line, 4 to 8 bytes per token of prompt and output without logprobs, besides
        the images in base64. Raises InvalidRequest: it has a ``budget``, which is this process's."""
        if self.budget is not None:
            raise InvalidRequest("budget", "is an object of this process: it cannot be stored")
        record: dict[str, Any] = {"version": VERSION}
        record |= {each.name: getattr(self, each.name) for each in fields(self)}
        record["params"] = record_of(self.params)
        for name in ("logprobs", "prompt_logprobs"):
            record[name] = [(each.token_id, each.logprob, each.top) for each in record[name]]
        if self.block is not None:
            block = {each.name: getattr(self.block, each.name) for each in fields(self.block)}
            if all(token < 0 for token in self.block.path):
                del block["path"]
            if not self.block.tops:
                del block["tops"]
            record["block"] = block
        record["images"] = stored(self.images)
        for name in _RECENT:
            if not record[name]:
                del record[name]
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
            raise InvalidRequest(_FIELD, f"is not JSON, or truncated: {why(error)}") from None
        if not isinstance(record, dict):
            raise InvalidRequest(_FIELD, f"must be an object, got {shown(record)}")
        version = record.pop("version", None)
        if version != VERSION or type(version) is not int:
            raise InvalidRequest(_FIELD, f"has version {shown(version)}; this release reads {VERSION}")
        try:
            values = msgspec.structs.asdict(msgspec.convert(record, _Stored))
            values["params"] = params_of(values["params"])
        except msgspec.ValidationError as error:
            raise InvalidRequest(_FIELD, str(error)) from None
        except InvalidRequest as error:
            raise InvalidRequest(_FIELD, f"params: {error}") from None
        for name in ("logprobs", "prompt_logprobs"):
            values[name] = [TokenLogprob(*each) for each in values[name]]
        values["images"] = restored(values["images"], _FIELD)
        if values["block"] is not None:
            values["block"] = BlockState(**msgspec.structs.asdict(values["block"]))
        return cls(**values)


def options_of(checkpoint: StreamCheckpoint) -> RequestOptions:
    """The options that a request goes on with."""
    return {
        "priority": checkpoint.priority,
        "cache_salt": checkpoint.cache_salt,
        "routing_key": checkpoint.routing_key,
        "adapter": checkpoint.adapter,
        "request_id": checkpoint.request_id or None,
        "deadline": checkpoint.deadline,
        "budget": checkpoint.budget,
    }


#: fields that records of earlier releases do not have: they are written where they say something
_RECENT = ("adapter", "adapter_fingerprint", "weight_version", "deadline", "budget", "images")

_Int = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
_Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
_LogProbability = Annotated[float, Meta(le=0)]
_Top = tuple[tuple[_Int, _LogProbability], ...]
_Logprobs = list[tuple[_Int, _LogProbability, _Top]]


class _StoredBlock(msgspec.Struct, forbid_unknown_fields=True):
    start: _Count
    ids: list[_Int]
    known: list[bool]
    written_in: list[_Int]
    logprobs: list[_LogProbability]
    rounds: _Count
    done: bool
    changed: bool
    failed: bool
    private: tuple[_Int, ...]
    path: list[_Int] = []
    tops: list[_Top] = []


class _Stored(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The JSON of a checkpoint: its fields, typed."""

    fingerprint: str
    model: str
    numerics: str
    identical: bool
    prompt_token_ids: list[_Int]
    params: dict[str, Any]
    seed: _Int
    token_ids: list[_Int]
    delivered_tokens: _Count
    delivered_characters: _Count
    logprobs: _Logprobs
    prompt_logprobs: _Logprobs
    step_map: list[_Int] | None
    block: _StoredBlock | None
    request_id: str
    priority: _Int
    cache_salt: str
    routing_key: str | None
    adapter: str | None = None
    adapter_fingerprint: str = ""
    weight_version: _Count = 0
    deadline: Annotated[float, Meta(gt=0)] | None = None
    images: list[StoredImage] = []
