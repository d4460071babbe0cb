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
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from aioinfer.cache.namespace import Namespace
from aioinfer.loop.resumption import take
from aioinfer.loop.service import OpenRequest
from aioinfer.params import SamplingParams
from aioinfer.request import Request
from aioinfer.resuming.record import StreamCheckpoint
from aioinfer.stream import StreamCell

if TYPE_CHECKING:
    from aioinfer.execution.device import DeviceInfo
    from aioinfer.parallel.placing import Wanted
    from aioinfer.parallel.replica import Replica, Rows

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


class Record(OpenRequest):
    """One stream of a dispatcher, from its request to its end."""

    __slots__ = (
        "attempt",
        "characters",
        "losses",
        "lost_at",
        "lost_length",
        "namespace",
        "place",
        "queued",
        "unbegun",
    )

    def __init__(self, cell: StreamCell) -> None:
        super().__init__(cell)
        request = cell.output.request
        #: what computes it now
        self.attempt: Attempt | None = None
        #: its place in the order of arrival
        self.place = (0, 0)
        #: its place in the dispatcher's queue, while it is there
        self.queued: tuple[int, ...] | None = None
        #: errors that ended attempts which had come to the same token, and how many tokens there were
        self.losses: list[BaseException] = []
        self.lost_length = -1
        #: replicas in turn that were lost before they had begun with it
        self.unbegun = 0
        #: when the last one was, until its next token is there
        self.lost_at: float | None = None
        #: of its released text
        self.characters = 0
        #: finds its prefixes. Replicas tell versions of an adapter apart, a dispatcher does not
        name = request.adapter
        self.namespace = Namespace(request.cache_salt, 0 if name is None else 1 + zlib.crc32(name.encode()))

    @property
    def request(self) -> Request:
        return self.output.request

    @property
    def params(self) -> SamplingParams:
        """With the seed of the record: a replica would draw another one."""
        return self.request.params.changed(seed=self.output.seed)

    @property
    def known(self) -> int:
        """Tokens of prompt and output."""
        return len(self.output.prompt_ids) + len(self.output.token_ids)

    def accept(self, prompt_ids: Sequence[int], seed: int, info: DeviceInfo, *, text: bool) -> None:
        """Take the token ids of its prompt. ``text``: the outputs have text."""
        output, params = self.output, self.request.params
        output.prompt_ids, output.seed, output.has_text = prompt_ids, seed, text
        if info.block_size is not None:
            output.step_map = []
        output.plain = text and params.logprobs is None and params.max_tokens != 0 and info.block_size is None
        output.accepted = True

    def begin(self, checkpoint: StreamCheckpoint) -> None:
        """Take what a checkpoint has, but the text: the first attempt brings it."""
        output = self.output
        output.token_ids += checkpoint.token_ids
        output.logprobs += checkpoint.logprobs
        output.prompt_logprobs += checkpoint.prompt_logprobs
        output.token_times += [output.arrival] * len(checkpoint.token_ids)
        if output.step_map is not None:
            output.step_map += checkpoint.step_map or ()
        output.resumed, output.identical = len(checkpoint.token_ids), checkpoint.identical
        output.weight_version = checkpoint.weight_version
        output.adapter_fingerprint = checkpoint.adapter_fingerprint
        output.numerics = checkpoint.numerics
        self.cell.taken_ids, self.cell.delivered = (
            checkpoint.delivered_tokens,
            checkpoint.delivered_characters,
        )

    def time_left(self, now: float) -> tuple[float | None, float | None]:
        """Seconds until the first step, and from there on."""
        request, output = self.request, self.output
        waiting, running = request.waiting_timeout, request.running_timeout
        if output.admitted_at is not None:
            waiting = None
            running = None if running is None else max(_SOON, running - (now - output.admitted_at))
        elif waiting is not None:
            waiting = max(_SOON, waiting - (now - output.arrival))
        return waiting, running

    def checkpoint(self, info: DeviceInfo, *, whole_blocks: bool) -> StreamCheckpoint:
        """From where another attempt goes on: from the end of the last of the ``whole_blocks`` of a diffusion
        model, where it makes the same tokens; else from all tokens that there are."""
        found = take(self.cell, info)
        size, count = info.block_size, len(found.token_ids)
        if size is None or not whole_blocks:
            return dataclasses.replace(found, delivered_tokens=count, delivered_characters=0)
        count = max(0, self.known - self.known % size - len(self.output.prompt_ids))
        return dataclasses.replace(
            found,
            token_ids=found.token_ids[:count],
            delivered_tokens=count,
            delivered_characters=0,
            logprobs=found.logprobs[:count],
            step_map=(found.step_map or ())[:count],
            block=None,
            identical=self.output.identical,
        )

    def finish(self, ending: Ending, now: float) -> None:
        """End the output, complete or failed."""
        output = self.output
        output.finish("abort" if ending.error is not None else ending.finish_reason, ending.error)
        output.stop_reason, output.finished_at = ending.stop_reason, now
        output.make_draft = None
        output.pooled = ending.pooled
        output.accepted_prediction += ending.predicted[0]
        output.rejected_prediction += ending.predicted[1]
        self.attempt = None

    def __repr__(self) -> str:
        return f"<Record {self.place[1]} {self.output!r}>"


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
        self.resumes = bool(record.output.token_ids)
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
            self.record.output.identical = False
        tokens = self._bring_tokens(rows)
        return self._bring_text(rows.at, rows.text) or tokens

    def _bring_tokens(self, rows: Rows) -> bool:
        output, ids, first = self.record.output, rows.ids, rows.first
        version = output.weight_version if self.weight_version is None else self.weight_version
        known = len(output.token_ids) - first
        if known < 0:
            raise ValueError(f"tokens from {first} on, where there are {len(output.token_ids)}")
        if known and ids:
            there = output.token_ids[first : first + len(ids)]
            if there != list(ids[: len(there)]):
                raise Diverged(f"the tokens from {first} on are others than those that were delivered")
        if not output.token_ids and version != output.weight_version:
            output.weight_version = version  # scores and vectors have no tokens
            output.prompt_logprobs.clear()
        if len(ids) <= known:
            return False
        if version != output.weight_version:
            output.note_switch(output.weight_version)
            output.weight_version = version
        output.token_ids += ids[known:] if known else ids
        output.token_times += rows.times[known:] if known else rows.times
        if rows.logprobs and output.request.params.logprobs is not None:
            output.logprobs += rows.logprobs[known:]
        if rows.steps and output.step_map is not None:
            output.step_map += rows.steps[known:]
        return True

    def _bring_text(self, at: int, text: str) -> bool:
        record, known = self.record, self.record.characters - at
        if known < 0:
            raise ValueError(f"text from {at} on, where there is {record.characters}")
        if known and text:
            there = record.output.text[at : at + len(text)]
            if there != text[: len(there)]:
                raise Diverged(f"the text from {at} on is another one than that which was delivered")
        if len(text) <= known:
            return False
        new = text[known:] if known else text
        record.characters += len(new)
        if record.cell.delivered:
            self._split(new)
        else:
            record.output.pieces.append(new)
        return True

    def _split(self, new: str) -> None:
        """Add text, of which the part that was delivered before the restoring is a piece of its own."""
        record = self.record
        pieces = record.output.pieces
        text = "".join([*pieces, new])
        pieces[:] = [
            piece for piece in (text[: record.cell.delivered], text[record.cell.delivered :]) if piece
        ]
        if len(text) >= record.cell.delivered:
            record.cell.delivered = 0
        record.cell.taken_pieces = 1
