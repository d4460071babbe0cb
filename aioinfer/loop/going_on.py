"""Going on: streams that branch, and streams that take back what they have.

A fork, a rewind and an injection are one thing: a request that begins with an output, as one does that is
restored from a checkpoint. A fork has a stream of its own. What is rewritten goes on in the same stream: its
cell gets another output, and the sequence of the one before ends unseen.

The pages are found in the prefix cache, where those of a running parent are put first. The text is found in
that of the parent, where a few tokens show how long it is, or on a worker thread from all of its tokens.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from aioinfer.cells import Cut, StreamCell
from aioinfer.diffusion.pins import clash
from aioinfer.errors import Cancelled, EngineError, InvalidRequest, RequestError, shown
from aioinfer.inputs import check_ids, entries, plain
from aioinfer.loop.opened import OpenRequest
from aioinfer.loop.options import Prepared, seconds_left
from aioinfer.loop.resumption import Resumption, replay, take, unknown_block
from aioinfer.loop.service import EngineState, Later, Service
from aioinfer.loop.texts import output_text
from aioinfer.outputs import TokenLogprob
from aioinfer.params import SamplingParams, inherited
from aioinfer.request import Output, Request, RequestOptions
from aioinfer.resuming.record import StreamCheckpoint
from aioinfer.stream import Stream
from aioinfer.text.length import ASSUMED_LONGEST, exceeds_bytes
from aioinfer.text.output import OutputText
from aioinfer.text.stop import TooSlow

if TYPE_CHECKING:
    from aioinfer.execution.device import DeviceInfo
    from aioinfer.images.prompt import PromptImages
    from aioinfer.scheduling.sequence import Sequence as ModelSequence

__all__ = ["GoingOn"]

_Opened = TypeVar("_Opened", bound=OpenRequest)

#: forks of one call, as choices of one prompt
_MOST_FORKS = 128
_SEED_LIMIT = 2**63
#: tokens behind the cut that are detokenized at once
_NEAR = 64
#: parameters without which tokens ahead of the output, in a block that is not done, do not stay
_WRITTEN_UNDER = ("diffusion", "grammar", "bad_words", "min_tokens", "allowed_token_ids")
#: options that are the parent's where they are None
_LIMITS = ("waiting_timeout", "running_timeout", "max_lag")


@dataclass(frozen=True, slots=True)
class _Branch:
    """From where a request goes on."""

    #: of its tokens; without those of ``then`` while that is text
    checkpoint: StreamCheckpoint
    #: how many of them are of the parent
    kept: int
    then: str | Sequence[int]
    #: as it was asked for
    cut: Cut
    #: tokens and characters that the reader has, as far as these are kept; None: all that is kept
    read: tuple[int, int] | None = None
    #: as of a Resumption
    queued: tuple[int, ...] | None = None
    #: its prompt as a key of the prefix cache, if somebody has that
    prompt_key: bytes | None = None
    #: the sequence whose pages it shares
    parent: ModelSequence | None = None
    #: of its prompt
    images: PromptImages | None = None

    def resumption(self, text: OutputText, shown: int, info: DeviceInfo) -> Resumption:
        """``text``: of all tokens. ``shown``: characters of it that came with those that are kept."""
        checkpoint, (tokens, read) = self.checkpoint, self.read or (self.kept, shown)
        tokens, read = min(tokens, self.kept), min(read, shown)
        if (tokens, read) != (checkpoint.delivered_tokens, checkpoint.delivered_characters):
            checkpoint = replace(checkpoint, delivered_tokens=tokens, delivered_characters=read)
        released = text.text
        text.pieces[:] = [piece for piece in (released[:read], released[read:]) if piece]
        same = checkpoint.numerics == info.numerics and info.deterministic
        identical = checkpoint.identical and same
        shared = len(checkpoint.prompt_token_ids) + self.kept
        forked = None if self.parent is None else (self.parent, shared)
        return Resumption(checkpoint, text, identical, self.queued, self.prompt_key, forked)


class GoingOn(Service[_Opened]):
    """A service whose streams can be forked and rewritten."""

    # -- as StreamOwner -------------------------------------------------------------------------

    def fork(
        self, cell: StreamCell, n: int, cut: Cut, params: SamplingParams | None, options: RequestOptions
    ) -> list[Stream]:
        self._check(cell, new=not cut.beside)
        if type(n) is not int or not 1 <= n <= _MOST_FORKS:
            raise InvalidRequest("n", f"must be 1 to {_MOST_FORKS}, got {shown(n)}")
        if options.get("pooling") is not None:
            raise InvalidRequest("pooling", "has no effect on a fork, which generates")
        then = self._then(cut)
        kept, output = self._cut(cell, cut), cell.output
        if params is not None:
            kept = self._with_params(kept, inherited(params, output.request.params))
        begun = self._extended(kept, then, cut)
        given: dict[str, Any] = {**output.request.options(), "request_id": None, "queue_behind": 0}
        now = self.clock()
        given |= {"budget": output.request.budget, "deadline": output.deadline_left(now), **options}
        given["deadline"] = seconds_left(given["deadline"])
        for name in _LIMITS:
            given[name] = getattr(output.request, name) if given[name] is None else given[name]
        behind, count = given.pop("queue_behind"), len(kept.token_ids)
        text = self._text_of(output, count, begun.params)
        characters, opened = len(text or ""), self.open.get(cell)
        key, parent = self._share(cell) or (None, None)
        queued = self._place(opened)[:1] if cut.beside and opened is not None else None
        streams: list[Stream] = []
        try:
            for number in range(n):
                own, seed = begun.params, (output.seed + 1 + number) % _SEED_LIMIT
                if params is not None and params.seed is not None:
                    seed = (params.seed + number) % _SEED_LIMIT if number else params.seed
                if own.seed is not None:
                    own = own.changed(seed=seed)
                checkpoint = replace(
                    begun, params=own, seed=seed, delivered_tokens=count, delivered_characters=characters
                )
                branch = _Branch(checkpoint, count, then, cut, None, queued, key, parent, output.images)
                request = Request(params=own, queue_behind=behind + number, **given)
                child = StreamCell(Output(request, now))
                self._begin_branch(child, branch, self._at_once(branch, text))
                streams.append(Stream(self, child))
        except BaseException:
            for stream in streams:
                stream.close()
            raise
        return streams

    def rewrite(self, cell: StreamCell, cut: Cut) -> None:
        self._check(cell)
        if cell.closed:
            raise Cancelled("the stream was closed")
        then = self._then(cut)
        if cut.then_name and not then:
            raise InvalidRequest(cut.then_name, "is empty")
        kept, before, opened = self._cut(cell, cut), cell.output, self.open.get(cell)
        count = len(kept.token_ids)
        if (cell.concluded and before.ended) or (cell.parsed and count < cell.taken_ids):
            what = "it has ended" if before.ended else f"{cell.taken_ids} of its tokens were read"
            raise InvalidRequest(cut.at_name, f"a chat or session knows that {what}: fork it instead")
        characters = cell.delivered or sum(map(len, before.pieces[: cell.taken_pieces]))
        branch = _Branch(
            *(self._extended(kept, then, cut), count, then, cut, (cell.taken_ids, characters)),
            queued=None if opened is None else self._place(opened),
            images=before.images,
        )
        prepared = self._at_once(branch, self._text_of(before, count, kept.params))
        output = Output(before.request, self.clock() if opened is None else before.arrival)
        output.label = before.label
        taken = cell.taken_ids, cell.taken_pieces, cell.taken_draft, cell.delivered
        cell.taken_ids = cell.taken_pieces = cell.taken_draft = cell.delivered = 0
        cell.parked = False
        if opened is not None:
            output.admitted_at = before.admitted_at
            self._swap(opened, output)
            if self.observers:
                self.observers.ended(before)
                self.observers.opened(output, chat=False)
            self._go_on(opened, branch, prepared)
            return
        cell.output = output
        try:
            self._begin_branch(cell, branch, prepared)
        except BaseException:
            cell.output = before
            cell.taken_ids, cell.taken_pieces, cell.taken_draft, cell.delivered = taken
            raise

    # -- what computes the requests -------------------------------------------------------------

    @abstractmethod
    def _share(self, cell: StreamCell) -> tuple[bytes, ModelSequence] | None:
        """Let others have the pages of a request now, if it holds some; returns its prompt as a key of the
        prefix cache, and its sequence, if that is here."""

    @abstractmethod
    def _place(self, opened: _Opened) -> tuple[int, ...]:
        """The place of a request in the queue."""

    @abstractmethod
    def _swap(self, opened: _Opened, output: Output) -> None:
        """End what is computed for a request, and give it and its cell a new output."""

    def _check(self, cell: StreamCell, *, new: bool = False) -> None:
        """As ``check_serving``, but for an engine that closes when its open requests have ended: what is not
        ``new`` belongs to these."""
        self.check_loop()
        if new or cell not in self.open or self.state is not EngineState.DRAINING:
            self.check_running()

    # -- the cut --------------------------------------------------------------------------------

    def _then(self, cut: Cut) -> str | Sequence[int]:
        """What follows, checked and copied. Raises InvalidRequest."""
        given: Any = plain(cut.then)
        name, info = cut.then_name, self.info
        if not isinstance(given, str):
            ids = entries(name, given, info.max_model_len, "token ids")
            check_ids(name, ids, info.vocab_size)
            return ids
        if self.tokenizer is None:
            raise InvalidRequest(name, "the model has no tokenizer: give token ids")
        if exceeds_bytes(given, info.max_model_len * (self.tokenizer.longest_token or ASSUMED_LONGEST)):
            raise self._no_room(name)
        return given

    def _cut(self, cell: StreamCell, cut: Cut) -> StreamCheckpoint:
        """What is kept of an output. Raises RuntimeError, InvalidRequest."""
        output = cell.output
        known = len(output.token_times)
        stopped = output.ended and output.finish_reason == "stop"
        at: Any = plain(cut.at)
        if at is None and cut.at_name == "at":
            at = known - stopped
            if cut.iterated:
                at = min(at, cell.taken_ids)
        fits = type(at) is int and 0 <= at <= known
        found = take(cell, self.info, at if fits else 0)
        if not fits:
            message = f"must be a number of output tokens, 0 to {known}, got {shown(at)}"
            raise InvalidRequest(cut.at_name, message)
        ends = self.checks.stop_ids(found.params) if stopped and at == known else ()
        if found.token_ids and found.token_ids[-1] in ends:
            raise InvalidRequest(cut.at_name, "the last token ends the output")
        return found

    def _with_params(self, kept: StreamCheckpoint, params: SamplingParams) -> StreamCheckpoint:
        """The same with other parameters. Raises InvalidRequest."""
        before, info = kept.params, self.info
        self.checks.check(params, None, len(kept.prompt_token_ids) + len(kept.token_ids))
        if params.max_tokens == 0:
            raise InvalidRequest("max_tokens", "must be a positive number: a fork generates")
        if params.logprobs is not None and before.logprobs is None and kept.token_ids:
            raise InvalidRequest("logprobs", "were not asked of the tokens that are kept")
        if not self.checks.stop_ids(params).isdisjoint(kept.token_ids):
            raise InvalidRequest("stop_token_ids", "a token that is kept would have ended the output")
        changes: dict[str, Any] = {"params": params}
        if params.logprobs is None:
            changes["logprobs"] = ()
        asked = params.prompt_logprobs, params.logprob_start_len
        if asked != (before.prompt_logprobs, before.logprob_start_len):
            changes["prompt_logprobs"] = ()
        if kept.block is not None and any(
            getattr(params, name) != getattr(before, name) for name in _WRITTEN_UNDER
        ):
            changes["block"] = _block_of(kept, (), info)
        return replace(kept, **changes)

    def _extended(self, kept: StreamCheckpoint, then: str | Sequence[int], cut: Cut) -> StreamCheckpoint:
        """The same with the tokens that follow, if they are known. Raises InvalidRequest."""
        params, info, name = kept.params, self.info, cut.then_name
        count = len(kept.token_ids) + (bool(then) if isinstance(then, str) else len(then))
        if params.max_tokens is not None and count >= params.max_tokens:
            message = f"{params.max_tokens} leaves no room behind {count} output tokens"
            raise InvalidRequest("max_tokens", message)
        prompt = len(kept.prompt_token_ids)
        if prompt + count >= info.longest(prompt):
            raise self._no_room(name if then else cut.at_name)
        if isinstance(then, str):
            return kept
        if (at := clash(params.template, (*kept.token_ids, *then))) is not None:
            field = name if at >= len(kept.token_ids) else "template"
            raise InvalidRequest(field, f"token {at} of the output is not that of the template")
        if not then:
            return kept
        if not self.checks.stop_ids(params).isdisjoint(then):
            raise InvalidRequest(name, "has a token that ends the output")
        logprobs, steps = kept.logprobs, kept.step_map
        if params.logprobs is not None:
            logprobs = (*logprobs, *(TokenLogprob(token, 0.0) for token in then))
        return replace(
            kept,
            token_ids=(*kept.token_ids, *then),
            logprobs=logprobs,
            step_map=None if steps is None else (*steps, *[0] * len(then)),
            block=None if steps is None else _block_of(kept, then, info),
        )

    def _no_room(self, name: str) -> InvalidRequest:
        return InvalidRequest(
            name,
            f"prompt and output leave no room in this model's context of {self.info.max_model_len} tokens",
            code="context_length_exceeded",
        )

    # -- text -----------------------------------------------------------------------------------

    def _text_of(self, output: Output, at: int, params: SamplingParams) -> str | None:
        """The text that was released with the first ``at`` tokens; None if all of them have to be pushed, for
        that or for what comes next."""
        before, known = output.request.params, len(output.token_times)
        last = known - (output.finish_reason == "stop" and not before.include_stop)
        stops = params.stop or params.stop_regex or before.stop or before.stop_regex
        if stops or params.skip_special_tokens != before.skip_special_tokens:
            return None
        if known - at > _NEAR or at > last or output.text_behind:
            return None
        if at == known and not output.finished:
            return output.text
        behind = output_text(self.tokenizer, output.prompt_ids, params)
        if not behind.skip(output.token_ids[:at]):
            return None
        for token in output.token_ids[at:last]:
            behind.push(token)
        if output.finish_reason in ("stop", "length"):
            behind.finish()
        text = output.text
        return text[: len(text) - len(behind.text)]

    def _at_once(self, branch: _Branch, text: str | None) -> Prepared | None:
        """What a request begins with, if nothing has to be worked out for it. ``text``: of what is kept."""
        checkpoint, then = branch.checkpoint, branch.then
        params, ids = checkpoint.params, checkpoint.prompt_token_ids
        if text is None or isinstance(then, str) or params.worked_out or not self.replays:
            return None
        new = output_text(self.tokenizer, ids, params)
        if not new.skip(checkpoint.token_ids[: branch.kept]):
            return None
        new.pieces.append(text)
        for token in then:
            new.push(token)
        return self._resumed(self._complete(ids, params, None), branch, new, len(text))

    def _worked_out(self, branch: _Branch) -> Prepared:
        """The same from all tokens, on a worker thread. Raises InvalidRequest."""
        checkpoint, kept, name = branch.checkpoint, branch.kept, branch.cut.then_name
        if isinstance(branch.then, str) and branch.then:
            assert self.tokenizer is not None
            try:
                then = self.tokenizer.encode_part(branch.then)
            except InvalidRequest as error:
                raise InvalidRequest(name, error.message) from error
            checkpoint = self._extended(checkpoint, then, branch.cut)
            branch = replace(branch, checkpoint=checkpoint)
        params, ids = checkpoint.params, checkpoint.prompt_token_ids
        prepared = self._complete(ids, params, None)
        text, shown = output_text(self.tokenizer, ids, params), 0
        for at, token in enumerate(checkpoint.token_ids, 1):
            try:
                stop = text.push(token)
            except TooSlow as error:
                raise InvalidRequest("stop_regex", str(error)) from error
            if stop is not None:
                raise InvalidRequest(name if at > kept else "stop", f"{stop!r} ends the output there")
            if at == kept:
                shown = len(text.text)
        return self._resumed(prepared, branch, text, shown)

    def _resumed(self, prepared: Prepared, branch: _Branch, text: OutputText, shown: int) -> Prepared:
        """With the output, and with what has a state that follows from it. Raises InvalidRequest."""
        ids, grammar, steering = branch.checkpoint.token_ids, prepared.grammar, prepared.steering
        if grammar is not None and ids:
            name = branch.cut.then_name
            grammar = replay(grammar, ids, lambda at: (name if at >= branch.kept else "grammar", ""))
        if steering is not None:
            steering = steering.restarted(ids)
        resumption = branch.resumption(text, shown, self.info)
        return prepared._replace(
            grammar=grammar, steering=steering, resumption=resumption, images=branch.images
        )

    # -- queueing -------------------------------------------------------------------------------

    def _begin_branch(self, cell: StreamCell, branch: _Branch, prepared: Prepared | None) -> None:
        """Queue a new request. Raises InvalidRequest, Rejected."""
        checkpoint = branch.checkpoint
        least = len(checkpoint.prompt_token_ids) + len(checkpoint.token_ids)
        opened = self._opened(cell, checkpoint)
        self._begin(opened, least, prepared, checkpoint, self._later(branch))

    def _later(self, branch: _Branch) -> Later:
        async def later() -> tuple[Prepared, StreamCheckpoint | None]:
            prepared = await self._intake.work_out(self._worked_out, branch)
            assert prepared.resumption is not None
            return prepared, prepared.resumption.checkpoint

        return later

    def _go_on(self, opened: _Opened, branch: _Branch, prepared: Prepared | None) -> None:
        """Queue a request again that was queued before."""
        checkpoint = branch.checkpoint
        if prepared is None:
            least = len(checkpoint.prompt_token_ids) + len(checkpoint.token_ids)
            self._begin_later(opened, least, self._later(branch))
            return
        try:
            self._accept(opened, prepared, checkpoint)
        except (RequestError, EngineError) as error:
            opened.output.refuse(error)
            self._ended(opened)
        opened.cell.notify()


def _block_of(kept: StreamCheckpoint, then: Sequence[int], info: DeviceInfo) -> Any:
    """The block in which an output goes on, with these tokens behind what is kept; None at its start."""
    assert info.block_size is not None
    prompt = kept.prompt_token_ids
    known = len(prompt) + len(kept.token_ids) + len(then)
    start = info.block_start(known, len(prompt))
    if known == max(start, len(prompt)):
        return None
    tokens = [*kept.token_ids, *then]
    first = start - len(prompt)
    return unknown_block([*prompt[start:], *tokens[max(0, first) :]], start, info)
