"""Messages: the payloads of frames, as msgspec structs in msgpack arrays."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Annotated, Any, Self, TypeAlias

import msgspec
from msgspec import Meta

from aioinfer.execution.device import DeviceInfo
from aioinfer.images.source import ImageSource
from aioinfer.observe.stats import EngineStats
from aioinfer.outputs import AdapterInfo, Draft, TokenLogprob
from aioinfer.parallel.frames import FrameError
from aioinfer.parallel.rows import Rows, restored, sendable_part
from aioinfer.parallel.sent_errors import sendable
from aioinfer.request import Request, SentOptions
from aioinfer.resuming.params_record import params_of, record_of
from aioinfer.resuming.record import StreamCheckpoint

__all__ = ["PIECE", "PROTOCOL", "Abort", "Adapt", "Adapted", "Answers", "Decoder", "Fetch", "Fetched",
           "Flush", "Held", "Hello", "Hold", "Holding", "Keep", "Kept", "Leaving", "Lost", "Message",
           "Numbered", "Orders", "Pages", "Pause", "Paused", "Ping", "Read", "Refused", "Release", "Resume",
           "Share", "Shared", "Stats", "StepRows", "Store", "Stored", "Submit", "Use", "Welcome",
           "encoded"]  # fmt: skip

_MOST_REASON = 2000
_Positive = Annotated[int, Meta(ge=1)]
#: an id, or a word of an image, which is negative
_Token = Annotated[int, Meta(ge=-(1 << 31), lt=1 << 32)]
_Name = Annotated[bytes, Meta(min_length=16, max_length=16)]
#: bytes of a page in one message
PIECE = 1 << 20
_Piece = Annotated[bytes, Meta(max_length=PIECE)]


def _protocol(version: int) -> str:
    """The version, and a digest of the fields of what travels as it is: releases that differ in these refuse
    each other."""
    kinds = (DeviceInfo, EngineStats, Request, AdapterInfo, Draft, TokenLogprob)
    text = repr([(kind.__name__, [(each.name, str(each.type)) for each in fields(kind)]) for kind in kinds])
    return f"{version}-{hashlib.blake2b(text.encode(), digest_size=4).hexdigest()}"


#: a peer that speaks another one is refused
PROTOCOL = _protocol(9)


class Message(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """Base class."""


# -- to a replica --------------------------------------------------------------------------------------


class Hello(Message, tag=1):
    """The first message to a replica."""

    token: str = ""
    protocol: str = PROTOCOL


class Submit(Message, tag=2):
    """An attempt: from its beginning, or from a checkpoint, which has the prompt and the parameters."""

    number: int
    prompt_ids: list[_Token]
    params: dict[str, Any]
    options: SentOptions
    #: a :class:`StreamCheckpoint` as JSON, without its images
    checkpoint: str | None
    #: tokens of the output that its consumer has read, which counts with ``max_lag``
    read: int
    #: bytes and size of those of the prompt
    images: list[tuple[bytes, tuple[int, int] | None]] = []

    @classmethod
    def of(
        cls,
        number: int,
        prompt_ids: Sequence[int],
        request: Request,
        checkpoint: StreamCheckpoint | None,
        read: int,
        images: Sequence[ImageSource] = (),
    ) -> Self:
        """The message for an attempt; the request's parameters have their seed."""
        options, sent = request.options(), [(each.data, each.size) for each in images]
        if checkpoint is not None:
            return cls(number, [], {}, options, replace(checkpoint, images=()).to_json(), read, sent)
        return cls(number, list(prompt_ids), record_of(request.params), options, None, read, sent)

    def asked(self) -> tuple[Sequence[int], Request, StreamCheckpoint | None, Sequence[ImageSource]]:
        """Prompt, request, checkpoint and images. Raises InvalidRequest: they are not those of this
        release."""
        images = [ImageSource(*each) for each in self.images]
        if self.checkpoint is None:
            return self.prompt_ids, Request(params=params_of(self.params), **self.options), None, images
        found = replace(StreamCheckpoint.from_json(self.checkpoint), images=images)
        return found.prompt_token_ids, Request(params=found.params, **self.options), found, images


class Abort(Message, tag=3):
    """Nothing more is wanted of an attempt."""

    number: int


class Read(Message, tag=4):
    """The consumer of an attempt with ``max_lag`` has read this many tokens of the output."""

    number: int
    tokens: int


class Pause(Message, tag=5):
    """Launch no step until :class:`Resume`; answered by :class:`Paused`."""


class Resume(Message, tag=6):
    """Undo :class:`Pause`."""


class Flush(Message, tag=7):
    """Empty the prefix cache."""


class Ping(Message, tag=8):
    """The dispatcher is alive."""


class Adapt(Message, tag=9):
    """Load an adapter from a path there; None: unload it. Without a name: cancel the load of this number."""

    number: int
    name: str = ""
    #: in the encoding of the file system
    path: bytes | None = None


class Share(Message, tag=13):
    """Keep pages of KV for other replicas, and find theirs; answered by :class:`Shared`."""

    number: int
    #: of all of them, at most
    max_bytes: _Positive
    #: where it shares them with others of its machine, in the encoding of the file system; None: others get
    #: them by messages
    directory: bytes | None = None


class Store(Message, tag=10):
    """Put the KV of a prefix, as far as it is cached, where other replicas get it; answered by
    :class:`Stored`."""

    number: int
    ids: list[_Token]
    cache_salt: str = ""
    adapter: str | None = None


class Fetch(Message, tag=11):
    """Send a piece of a page that was stored, from a byte on; answered by :class:`Fetched`."""

    number: int
    name: _Name
    at: Annotated[int, Meta(ge=0)]


class Keep(Message, tag=12):
    """A piece of a page of another replica; answered by :class:`Kept`. Those of a page follow each
    other; several pages may come in at the same time."""

    number: int
    name: _Name
    at: Annotated[int, Meta(ge=0)]
    #: bytes of the page
    total: _Positive
    data: _Piece


class Hold(Message, tag=14):
    """Hold what is cached of a prefix; answered by :class:`Held`, now and whenever that changes."""

    number: int
    ids: list[_Token] = []
    cache_salt: str = ""
    adapter: str | None = None
    #: without use, after which it is held no longer; None: until :class:`Release`
    seconds: float | None = None
    #: compute first what is not cached
    compute: bool = False
    #: instead of ``ids``: what a hold of this number has; 0: none
    of: int = 0


class Use(Message, tag=15):
    """What is held is used."""

    number: int


class Release(Message, tag=32):
    """Hold it no longer."""

    number: int


# -- from a replica ------------------------------------------------------------------------------------


class Welcome(Message, tag=16):
    """The answer to :class:`Hello`: what the replica is."""

    info: DeviceInfo
    #: requests that it computes at the same time, and tokens of a step, at most
    slots: _Positive
    step_tokens: _Positive
    stats: EngineStats
    #: it has a prefix cache
    caches: bool = True
    adapters: tuple[AdapterInfo, ...] = ()
    #: names the engine: another one, with another name, counts from 0
    life: str = ""


class Refused(Message, tag=17):
    """The other answer, and why."""

    reason: str


class StepRows(Message, tag=18):
    """The output of one step or of several."""

    #: by the numbers of their attempts
    rows: list[tuple[int, Rows]]


class Stats(Message, tag=19):
    """The statistics of its engine, which also say that it is alive."""

    stats: EngineStats


class Paused(Message, tag=20):
    """No step is in flight."""


class Leaving(Message, tag=21):
    """It was told to end: its streams should go on elsewhere."""


class Lost(Message, tag=22):
    """Its engine is lost, and why."""

    reason: str

    @classmethod
    def of(cls, cause: BaseException) -> Self:
        return cls(sendable(str(cause), _MOST_REASON))


class Adapted(Message, tag=23):
    """The outcome of :class:`Adapt`, and the adapters that there are now. Number 0: they were changed
    elsewhere."""

    number: int
    adapters: tuple[AdapterInfo, ...]
    error: BaseException | None = None


class Stored(Message, tag=24):
    """The outcome of :class:`Store`."""

    number: int
    #: from the first on, that have their KV where others get it, and the names of their pages
    tokens: Annotated[int, Meta(ge=0)]
    names: list[_Name] = []


class Fetched(Message, tag=25):
    """The piece for :class:`Fetch`. None of it: the page is not there any more."""

    number: int
    #: bytes of the page
    total: Annotated[int, Meta(ge=0)] = 0
    data: _Piece = b""


class Kept(Message, tag=26):
    """Whether a piece was taken."""

    number: int
    kept: bool


class Shared(Message, tag=27):
    """The outcome of :class:`Share`: why it cannot; empty: it does."""

    number: int
    why: str = ""


class Held(Message, tag=28):
    """The tokens that are held, by the number of :class:`Hold`."""

    number: int
    tokens: Annotated[int, Meta(ge=0)] = 0
    error: BaseException | None = None


Pages: TypeAlias = Share | Store | Fetch | Keep
Holding: TypeAlias = Hold | Use | Release
Orders: TypeAlias = Submit | Abort | Read | Pause | Resume | Flush | Ping | Adapt | Pages | Holding
#: those that have a number of an order
Numbered: TypeAlias = Adapted | Shared | Stored | Fetched | Kept | Held
Answers: TypeAlias = StepRows | Stats | Paused | Leaving | Lost | Numbered

_encoder = msgspec.msgpack.Encoder(enc_hook=sendable_part)


def encoded(message: Message) -> bytes:
    """The payload of a message. Raises FrameError: a text in it has no encoding."""
    try:
        return _encoder.encode(message)
    except (UnicodeEncodeError, OverflowError) as error:
        raise FrameError(f"a message that cannot be sent: {error}") from error


class Decoder:
    """Reads messages of some types."""

    def __init__(self, types: Any) -> None:
        self._decode = msgspec.msgpack.Decoder(types, dec_hook=restored).decode

    def __call__(self, payload: bytes) -> Any:
        """The message. Raises FrameError: it is none of these."""
        try:
            return self._decode(payload)
        except Exception as error:  # any kind: a payload can be anything
            raise FrameError(f"a message that makes no sense: {error}") from error
