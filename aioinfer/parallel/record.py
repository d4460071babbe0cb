"""Record: one stream of a dispatcher. Attempts at it come and go; what it has stays."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from aioinfer.cache.namespace import Namespace
from aioinfer.cache.radix import token_key
from aioinfer.cells import StreamCell
from aioinfer.loop.holding import Prefix
from aioinfer.loop.opened import OpenRequest
from aioinfer.loop.resumption import take
from aioinfer.parallel.roles import Role
from aioinfer.params import SamplingParams
from aioinfer.prompt_ids import key_of
from aioinfer.request import SOON, Output, Request
from aioinfer.resuming.record import StreamCheckpoint

if TYPE_CHECKING:
    from aioinfer.execution.device import DeviceInfo
    from aioinfer.parallel.rows import Ending

__all__ = ["Record", "TimeLeft", "namespace_of"]


class TimeLeft(NamedTuple):
    """Seconds until the first step, from there on, until the deadline and until the first token. None: no
    limit."""

    waiting: float | None
    running: float | None
    deadline: float | None
    ttft_target: float | None


def namespace_of(cache_salt: str, adapter: str | None) -> Namespace:
    """What a dispatcher finds prefixes by."""
    return Namespace(cache_salt, 0 if adapter is None else 1 + zlib.crc32(adapter.encode()))


class Record(OpenRequest):
    """One stream of a dispatcher, from its request to its end."""

    __slots__ = (
        "characters",
        "handed_over",
        "home",
        "lane",
        "losses",
        "lost_at",
        "lost_length",
        "namespace",
        "near",
        "place",
        "queued",
        "stored",
    )

    def __init__(self, cell: StreamCell) -> None:
        super().__init__(cell)
        request = cell.output.request
        #: its place in the order of arrival
        self.place: tuple[int, ...] = (0, 0)
        #: its place in the dispatcher's queue, while it is there
        self.queued: tuple[int, ...] | None = None
        #: the role of the replicas that it is for, while it is there
        self.lane: Role = "decode"
        #: known tokens that have their KV where replicas leave it for each other, and the one replica that
        #: has it; empty: all that share a store
        self.stored, self.near = 0, ""
        #: the replica that it was sent to before has let go of it
        self.handed_over = False
        #: the replica that it was sent to last
        self.home = ""
        #: errors that ended attempts which had come to the same token, and how many tokens there were
        self.losses: list[BaseException] = []
        self.lost_length = -1
        #: when the last one was, until its next token is there
        self.lost_at: float | None = None
        #: of its released text
        self.characters = 0
        #: finds its prefixes. Replicas tell versions of an adapter apart, a dispatcher does not
        self.namespace = namespace_of(request.cache_salt, request.adapter)

    @property
    def request(self) -> Request:
        return self.output.request

    @property
    def params(self) -> SamplingParams:
        """With the seed of the record, where tokens are drawn: a replica would draw another one."""
        params = self.request.params
        return params.changed(seed=self.output.seed) if params.temperature else params

    @property
    def known(self) -> int:
        """Tokens of prompt and output."""
        return len(self.output.prompt_ids) + len(self.output.token_ids)

    @property
    def key(self) -> bytes:
        """Of these, as prefix caches have it."""
        output = self.output
        return key_of(output.prompt_ids) + token_key(output.token_ids)

    @property
    def prefix(self) -> Prefix:
        """All that is known."""
        return Prefix(self.output.known_ids(0, self.known), self.request.cache_salt, self.request.adapter)

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

    def rewritten(self, output: Output) -> None:
        """Go on with another output, which nothing was lost of."""
        self.output = self.cell.output = output
        self.characters, self.losses, self.lost_length, self.lost_at = 0, [], -1, None
        self.stored, self.near, self.handed_over = 0, "", False

    def time_left(self, now: float) -> TimeLeft:
        """What is left for an attempt that begins now."""
        request, output = self.request, self.output
        waiting, running, first = request.waiting_timeout, request.running_timeout, request.ttft_target
        if first is not None:
            first = None if output.token_ids else max(SOON, first - (now - output.arrival))
        if output.admitted_at is not None:
            waiting = None
            running = None if running is None else max(SOON, running - (now - output.admitted_at))
        elif waiting is not None:
            waiting = max(SOON, waiting - (now - output.arrival))
        return TimeLeft(waiting, running, output.deadline_left(now), first)

    def checkpoint(self, info: DeviceInfo, *, whole_blocks: bool) -> StreamCheckpoint:
        """From where another attempt goes on: from the end of the last of the ``whole_blocks`` of a diffusion
        model, where it makes the same tokens; else from all tokens that there are."""
        found = take(self.cell, info)
        size, count = info.block_size, len(found.token_ids)
        if size is None or not whole_blocks:
            return dataclasses.replace(found, delivered_tokens=count, delivered_characters=0)
        prompt = len(self.output.prompt_ids)
        count = max(0, info.block_start(self.known, prompt) - prompt)
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

    def __repr__(self) -> str:
        return f"<Record {self.place[1]} {self.output!r}>"
