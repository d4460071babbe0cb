"""Record: one stream of a dispatcher. Attempts at it come and go; what it has stays.

The output is appended here exactly once. Every attempt says where in the output its tokens and its text are,
so one that begins again behind a loss, or is heard twice, is compared with the record and adds only what is
new::

    record     t0 t1 t2 t3 t4                    delivered, or to be delivered
    attempt    t0 t1 t2 t3 t4 | lost
    attempt        t2 t3 t4 t5 t6                t2 to t4 must be the same; t5 and t6 are new
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from aioinfer.cache.namespace import Namespace
from aioinfer.diffusion.state import BlockState
from aioinfer.outputs import Draft
from aioinfer.resuming.record import StreamCheckpoint
from aioinfer.scheduling.cursor import CursorOwner, TokenCursor
from aioinfer.scheduling.pooled import Pooled
from aioinfer.scheduling.request import Request, RequestState
from aioinfer.speculation.drafter import NO_IDS, DraftRequest
from aioinfer.speculation.drafting import Drafting
from aioinfer.stream import StreamCell
from aioinfer.text.output import OutputText

if TYPE_CHECKING:
    from aioinfer.execution.device import DeviceInfo
    from aioinfer.loop.options import RequestOptions
    from aioinfer.parallel.placing import Wanted
    from aioinfer.parallel.replica import Replica, Rows
    from aioinfer.params import SamplingParams

__all__ = ["Attempt", "Diverged", "Ending", "Record", "Unwanted"]


#: seconds that are left when none are: the timer for it runs next
_SOON = 1e-6


class Diverged(Exception):
    """An attempt brought other tokens or another text than the record has."""


class Unwanted(Exception):
    """An attempt goes on with other weights than it must."""


class Ending:
    """How an attempt ended, when it was not lost."""

    __slots__ = ("error", "finish_reason", "pooled", "predicted", "stop_reason")

    def __init__(
        self,
        finish_reason: Any,
        stop_reason: str | int | None = None,
        error: BaseException | None = None,
        predicted: tuple[int, int] = (0, 0),
        pooled: Any = None,
    ) -> None:
        self.finish_reason = finish_reason
        self.stop_reason = stop_reason
        self.error = error
        #: tokens of the prediction that were right, and that were not
        self.predicted = predicted
        #: of a request that pools, what it pooled
        self.pooled = pooled


class _BlockCursor(TokenCursor):
    """Of the output of a diffusion model: has its step map and its drafts."""

    __slots__ = ("_draft_version", "newest_draft", "steps")

    def __init__(self, prompt_length: int, output_ids: list[int], max_length: int) -> None:
        super().__init__(prompt_length, output_ids, max_length)
        self.steps: list[int] = []
        self._draft_version = 0
        #: makes the newest draft, or None if its block is gone
        self.newest_draft: Callable[[], Draft | None] | None = None

    @property
    def step_map(self) -> list[int] | None:
        return self.steps

    @property
    def draft_version(self) -> int:
        return self._draft_version

    def draft(self, request: CursorOwner) -> Draft | None:
        return None if self.newest_draft is None else self.newest_draft()

    def redrafted(self, draft: Callable[[], Draft | None]) -> None:
        self._draft_version += 1
        self.newest_draft = draft


def _namespace(options: RequestOptions) -> Namespace:
    """Where a dispatcher looks for prefixes. Its replicas tell versions of an adapter apart, it does not."""
    name = options.adapter
    return Namespace(options.cache_salt or "", 0 if name is None else 1 + zlib.crc32(name.encode()))


class Record(Request):
    """One stream of a dispatcher, from its request to its end. Streams read it as they read a request."""

    __slots__ = (
        "adapter_fingerprint",
        "attempt",
        "characters",
        "delivered",
        "losses",
        "lost_at",
        "lost_length",
        "numerics",
        "options",
        "queued",
        "unbegun",
    )

    #: what computes it now
    attempt: Attempt | None
    #: why attempts were lost that had come to the same token, and how many tokens there were
    losses: list[BaseException]
    lost_length: int
    #: replicas in turn that were lost before they had begun with it
    unbegun: int
    #: when the last one was, until its next token is there
    lost_at: float | None
    #: of its released text, and of its beginning that its consumer has had before
    characters: int
    delivered: int
    #: by which arithmetic its tokens were computed
    numerics: str
    options: RequestOptions
    #: of the adapter that computed its output so far
    adapter_fingerprint: str
    #: its place in the dispatcher's queue, while it is there
    queued: tuple[int, ...] | None

    @classmethod
    def arriving(cls, params: SamplingParams, options: RequestOptions, arrival: float) -> Record:
        """A request that arrives now, in state PREPARING until :meth:`prepared`."""
        record = cls.preparing(
            params,
            arrival=arrival,
            priority=options.priority,
            namespace=_namespace(options),
            routing_key=options.routing_key,
            queue_behind=options.queue_behind,
            label=options.request_id,
        )
        record.options = options
        if options.pooling is not None:
            record.pooled = Pooled(options.pooling)
        record.attempt, record.queued, record.losses, record.lost_at = None, None, [], None
        record.characters, record.delivered, record.numerics, record.lost_length = 0, 0, "", -1
        record.unbegun, record.adapter_fingerprint = 0, ""
        return record

    def prepared(
        self, key: int, prompt_ids: Sequence[int], seed: int, arrivals: int, info: DeviceInfo, *, text: bool
    ) -> None:
        """Its prompt is tokenized. ``text``: the outputs have text."""
        passive = OutputText(None)
        passive.enabled = text
        self.set_prompt(
            key,
            prompt_ids,
            seed=seed,
            stop_ids=frozenset(),
            max_length=info.max_model_len,
            text=passive,
            cursor=None if info.block_size is None else _BlockCursor,
            arrivals=arrivals,
        )
        self.state = RequestState.WAITING

    def begin(self, checkpoint: StreamCheckpoint) -> None:
        """Take what a checkpoint has, but the text: the first attempt brings it."""
        self.output_ids += checkpoint.token_ids
        self.logprobs += checkpoint.logprobs
        self.prompt_logprobs += checkpoint.prompt_logprobs
        self.token_times += [self.arrival] * len(checkpoint.token_ids)
        if isinstance(self.cursor, _BlockCursor):
            self.cursor.steps += checkpoint.step_map or ()
        self.resumed, self.identical = len(checkpoint.token_ids), checkpoint.identical
        self.numerics, self.weight_version = checkpoint.numerics, checkpoint.weight_version
        self.adapter_fingerprint = checkpoint.adapter_fingerprint
        self.delivered = checkpoint.delivered_characters
        assert isinstance(self.consumer, StreamCell)
        self.consumer.taken_ids = checkpoint.delivered_tokens

    def time_left(self, now: float) -> tuple[float | None, float | None]:
        """Seconds until the first step, and from there on."""
        options = self.options
        waiting, running = options.waiting_timeout, options.running_timeout
        if self.admitted_at is not None:
            waiting = None
            running = None if running is None else max(_SOON, running - (now - self.admitted_at))
        elif waiting is not None:
            waiting = max(_SOON, waiting - (now - self.arrival))
        return waiting, running

    def checkpoint(self, info: DeviceInfo) -> StreamCheckpoint:
        """From where another attempt makes the same tokens: of a diffusion model, behind its last whole
        block."""
        count = len(self.output_ids)
        steps: tuple[int, ...] | None = None
        if info.block_size is not None:
            known = len(self.prompt_ids) + count
            count = max(0, known - known % info.block_size - len(self.prompt_ids))
            steps = tuple((self.cursor.step_map or ())[:count])
        return StreamCheckpoint(
            fingerprint=info.fingerprint,
            model=info.model,
            numerics=self.numerics or info.numerics,
            identical=self.identical,
            prompt_token_ids=self.prompt_ids,
            params=self.params,
            seed=self.seed,
            token_ids=tuple(self.output_ids[:count]),
            delivered_tokens=count,
            logprobs=() if self.params.logprobs is None else tuple(self.logprobs[:count]),
            prompt_logprobs=tuple(self.prompt_logprobs),
            step_map=steps,
            request_id=self.request_id,
            priority=self.priority,
            cache_salt=self.namespace.salt,
            routing_key=self.routing_key,
            weight_version=self.newest_version,
            adapter=self.options.adapter,
            adapter_fingerprint=self.adapter_fingerprint,
        )

    def read_checkpoint(self, info: DeviceInfo) -> StreamCheckpoint:
        """From where an application goes on: with what the consumer has read."""
        cell = self.consumer
        assert isinstance(cell, StreamCell)
        read = sum(map(len, self.text.pieces[: cell.taken_pieces]))
        return dataclasses.replace(
            self.checkpoint_of_tokens(info),
            delivered_tokens=min(cell.taken_ids, len(self.output_ids)),
            delivered_characters=self.delivered or read,
        )

    def checkpoint_of_tokens(self, info: DeviceInfo) -> StreamCheckpoint:
        """From where an attempt goes on that would make other tokens of the last block: with all that there
        are. The rounds of a block under way are known in the replica only."""
        found = self.checkpoint(info)
        if info.block_size is None or len(found.token_ids) == len(self.output_ids):
            return found
        assert info.mask_token_id is not None
        known = self.known
        start = known - known % info.block_size
        tokens = self.known_ids(start, known)
        return dataclasses.replace(
            found,
            token_ids=tuple(self.output_ids),
            delivered_tokens=len(self.output_ids),
            logprobs=tuple(self.logprobs),
            step_map=tuple(self.cursor.step_map or ()),
            block=BlockState.unknown(start, tokens, info.block_size, info.mask_token_id),
            identical=False,
        )

    def redrafted(self, draft: Callable[[], Draft | None]) -> None:
        """There is a new draft, which this makes."""
        if isinstance(self.cursor, _BlockCursor):
            self.cursor.redrafted(draft)

    def finish(self, ending: Ending, now: float) -> None:
        """The output is complete, or has failed."""
        self.state = RequestState.FINISHED
        self.finish_reason = "abort" if ending.error is not None else ending.finish_reason
        self.stop_reason, self.error, self.finished_at = ending.stop_reason, ending.error, now
        self.attempt = None
        if self.pooled is not None and ending.pooled is not None:
            self.pooled.complete(ending.pooled)
        if any(ending.predicted):
            self.drafting = self.drafting or Drafting(DraftRequest(NO_IDS))
            self.drafting.accepted_prediction += ending.predicted[0]
            self.drafting.rejected_prediction += ending.predicted[1]


class Attempt:
    """One replica's work on a record. When it has ended, nothing more that comes from it counts."""

    __slots__ = ("ended", "handle", "number", "pages", "record", "replica", "resumes", "tokens",
                 "uncached", "wanted", "weight_version")  # fmt: skip

    def __init__(self, record: Record, replica: Replica, number: int) -> None:
        """``number``: rises with every attempt of a dispatcher."""
        self.record = record
        self.replica = replica
        self.number = number
        #: the output has begun before
        self.resumes = bool(record.output_ids)
        #: what it must go on with, until its first token is there
        self.wanted: Wanted | None = None
        self.ended = False
        #: what the replica knows it by
        self.handle: Any = None
        #: of the replica's load: tokens in all, those to compute before the first one, hashes of its prefixes
        self.tokens = 0
        self.uncached = 0
        #: of the weights that computed what it has brought last; None: unknown
        self.weight_version: int | None = None
        self.pages: Sequence[int] = ()

    @property
    def params(self) -> SamplingParams:
        """With the seed of the record: a replica would draw another one."""
        return self.record.params.changed(seed=self.record.seed)

    def bring(self, rows: Rows) -> bool:
        """Compare what a step brought with the record, and append what is new there; whether anything is.
        Raises Unwanted, Diverged, and ValueError for rows that leave a gap."""
        if rows.weight_version is not None:
            self.weight_version = rows.weight_version
            self.replica.note_version(rows.weight_version)
        if self.wanted is not None:
            if rows.ids and self.weight_version not in (None, self.wanted.weights):
                raise Unwanted
            if not rows.ids and rows.ending is None:
                return self._bring_text(rows.at, rows.text)  # what computes it is not known yet
            self.wanted = None
        if not rows.identical:
            self.record.identical = False
        tokens = self._bring_tokens(rows)
        return self._bring_text(rows.at, rows.text) or tokens

    def _bring_tokens(self, rows: Rows) -> bool:
        record, ids, first = self.record, rows.ids, rows.first
        version = record.weight_version if self.weight_version is None else self.weight_version
        output, known = record.output_ids, len(record.output_ids) - first
        if known < 0:
            raise ValueError(f"tokens from {first} on behind {len(output)}")
        if known and ids:
            there = output[first : first + len(ids)]
            if there != list(ids[: len(there)]):
                raise Diverged(f"the tokens from {first} on are others than those that were delivered")
        if not output and version != record.weight_version:
            record.weight_version = version  # scores and vectors have no tokens
            record.prompt_logprobs.clear()
        if len(ids) <= known:
            return False
        if version != record.weight_version:
            record.note_switch(record.weight_version)
            record.weight_version = version
        output += ids[known:] if known else ids
        record.token_times += rows.times[known:] if known else rows.times
        if rows.logprobs and record.params.logprobs is not None:
            record.logprobs += rows.logprobs[known:]
        if rows.steps and isinstance(record.cursor, _BlockCursor):
            record.cursor.steps += rows.steps[known:]
        return True

    def _bring_text(self, at: int, text: str) -> bool:
        record, known = self.record, self.record.characters - at
        if known < 0:
            raise ValueError(f"text from {at} on behind {record.characters}")
        if known and text:
            there = record.text.text[at : at + len(text)]
            if there != text[: len(there)]:
                raise Diverged(f"the text from {at} on is another one than that which was delivered")
        if len(text) <= known:
            return False
        new = text[known:] if known else text
        record.characters += len(new)
        if record.delivered:
            self._split(new)
        else:
            record.text.pieces.append(new)
        return True

    def _split(self, new: str) -> None:
        """A part of the text was delivered before the request was restored: it is a piece of its own."""
        record = self.record
        pieces = record.text.pieces
        text = "".join([*pieces, new])
        pieces[:] = [piece for piece in (text[: record.delivered], text[record.delivered :]) if piece]
        if len(text) >= record.delivered:
            record.delivered = 0
        assert isinstance(record.consumer, StreamCell)
        record.consumer.taken_pieces = 1
