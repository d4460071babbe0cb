"""Resumption: how a request begins that has an output already.

It is what a retracted request is: its tokens are known, and its KV is computed again. So penalties, noise,
grammars and stops continue as if nothing had happened. The output never becomes a part of the prompt.
"""

from __future__ import annotations

import math
from collections import abc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aioinfer.diffusion.pins import Pins, clash
from aioinfer.diffusion.state import BlockState
from aioinfer.errors import InvalidRequest, shown
from aioinfer.inputs import check_ids
from aioinfer.params import DiffusionParams, SamplingParams
from aioinfer.resuming.record import StreamCheckpoint
from aioinfer.scheduling.block_cursor import BlockCursor
from aioinfer.text.stop import TooSlow

if TYPE_CHECKING:
    from aioinfer.cells import StreamCell
    from aioinfer.execution.device import DeviceInfo
    from aioinfer.request import Output
    from aioinfer.scheduling.sequence import Sequence
    from aioinfer.text.grammar import GrammarState
    from aioinfer.text.output import OutputText

__all__ = ["Resumption", "check", "check_adapter", "replay", "replay_block", "take", "unknown_block"]

_FIELD = "checkpoint"
#: rounds of a block
_MOST_ROUNDS = 1 << 20


@dataclass(frozen=True, slots=True)
class Resumption:
    """Output and text that a resumed request is given before it is queued."""

    checkpoint: StreamCheckpoint
    #: of all its tokens
    text: OutputText
    #: the output is that of an undisturbed request, to the bit
    identical: bool
    #: the place in the queue that it gets one behind; None: a new one
    queued: tuple[int, ...] | None = None
    #: its prompt as a key of the prefix cache, if that is known
    prompt_key: bytes | None = None
    #: the sequence that it was forked from, and positions that they share
    forked: tuple[Sequence, int] | None = None

    @classmethod
    def prepare(cls, checkpoint: StreamCheckpoint, text: OutputText, info: DeviceInfo) -> Resumption:
        """Push all tokens through ``text``, which is new. May take long. Raises InvalidRequest: the output
        had ended with one of them, or the consumer has read more than they are."""
        for at, token in enumerate(checkpoint.token_ids):
            try:
                stop = text.push(token)
            except TooSlow as error:
                raise InvalidRequest("stop_regex", str(error)) from error
            if stop is not None:
                raise InvalidRequest(_FIELD, f"token_ids: the output ends with token {at}: {stop!r} stops it")
        released, read = text.text, checkpoint.delivered_characters
        if read > len(released):
            message = f"delivered_characters: {read}, and the text has {len(released)}"
            raise InvalidRequest(_FIELD, message)
        text.pieces[:] = [piece for piece in (released[:read], released[read:]) if piece]
        same = checkpoint.numerics == info.numerics and info.deterministic
        return cls(checkpoint, text, checkpoint.identical and same)

    def begin(self, output: Output) -> None:
        """Give an output what there is already, before it has a sequence."""
        checkpoint = self.checkpoint
        output.seed = checkpoint.seed
        output.token_ids += checkpoint.token_ids
        output.logprobs += checkpoint.logprobs
        output.prompt_logprobs += checkpoint.prompt_logprobs
        output.token_times += [output.arrival] * len(checkpoint.token_ids)
        output.resumed, output.identical = len(checkpoint.token_ids), self.identical

    def place(self, sequence: Sequence, cell: StreamCell | None, weight_version: int) -> None:
        """Set the cursors of a sequence and of its consumer. ``weight_version``: of the weights that go on
        with it."""
        checkpoint, cursor, output = self.checkpoint, sequence.cursor, sequence.output
        same = checkpoint.weight_version == weight_version
        if not same and checkpoint.token_ids:
            output.note_switch(checkpoint.weight_version)
        elif not same:
            output.prompt_logprobs.clear()  # no output followed them
        sequence.take_version(weight_version)
        if isinstance(cursor, BlockCursor):
            # With other weights its block begins again.
            cursor.take_up(checkpoint.step_map or (), checkpoint.block if same else None)
            output.block = cursor.under_way
        # As after a retraction, but that no row was launched: what is scored is not scored again.
        sequence.restart()
        sequence.rewind(0)
        sequence.forked = self.forked
        if cell is not None:
            cell.taken_ids = checkpoint.delivered_tokens
            cell.taken_pieces = int(checkpoint.delivered_characters > 0)


def replay(
    grammar: GrammarState,
    ids: abc.Sequence[int],
    named: abc.Callable[[int], tuple[str, str]] = lambda _: (_FIELD, "token_ids: "),
) -> GrammarState:
    """The state of a grammar after an output. May take long. Raises InvalidRequest: it refuses a token;
    ``named``: field and beginning of the message, by the number of tokens before that."""
    tried = grammar.restarted(ids)
    tried.accept(ids)
    if tried.failed is not None:
        field, what = named(tried.position - tried.begin)
        raise InvalidRequest(field, f"{what}{tried.failed}")
    return grammar.restarted(ids)


def replay_block(grammar: GrammarState, checkpoint: StreamCheckpoint, stop_ids: frozenset[int]) -> None:
    """Raise InvalidRequest unless what the block has behind the output, up to its first unknown position, may
    follow: no search comes to a block that has none. May take long."""
    if (block := checkpoint.block) is None:
        return
    output = checkpoint.token_ids
    first = len(checkpoint.prompt_token_ids) + len(output) - block.start
    last = next((at for at in range(first, len(block.ids)) if not block.known[at]), len(block.ids))
    written = list(block.ids[first:last])
    end = next((at for at, token in enumerate(written) if token in stop_ids), len(written))
    tried = grammar.restarted(())
    tried.accept([*output, *written[:end]])
    if tried.failed is None and not tried.matcher.stopped:
        tried.accept(written[end : end + 1])
    if tried.failed is not None:
        raise InvalidRequest(_FIELD, f"block: ids: {tried.failed}")


def check(checkpoint: StreamCheckpoint, info: DeviceInfo, stop_ids: frozenset[int]) -> None:
    """Raise InvalidRequest for a checkpoint that this engine cannot go on with."""
    if checkpoint.fingerprint != info.fingerprint:
        raise InvalidRequest(
            _FIELD,
            f"is of the model {checkpoint.model!r} with other files than this engine's ({info.model!r}): "
            f"{checkpoint.fingerprint} and {info.fingerprint}",
        )
    ids, params = checkpoint.token_ids, checkpoint.params
    try:
        check_ids("token_ids", ids, info.vocab_size)
    except InvalidRequest as error:
        raise InvalidRequest(_FIELD, f"token_ids: {error.message}") from None
    end = next((at for at, token in enumerate(ids) if token in stop_ids), None)
    if end is not None:
        raise InvalidRequest(_FIELD, f"token_ids: the output ends with token {end}, which stops it")
    if (at := clash(params.template, ids)) is not None:
        raise InvalidRequest(_FIELD, f"token_ids: token {at} is not that of the template")
    if params.max_tokens is not None and len(ids) >= params.max_tokens:
        raise InvalidRequest(_FIELD, "token_ids: the output is complete: it has max_tokens")
    prompt, most = len(checkpoint.prompt_token_ids), info.max_model_len
    if prompt + len(ids) >= info.longest(prompt):
        message = f"prompt and output leave no room in this engine's context of {most} tokens"
        raise InvalidRequest(_FIELD, message, code="context_length_exceeded")
    if params.seed is not None and params.seed != checkpoint.seed:
        raise InvalidRequest(_FIELD, "seed: is not that of the params")
    _check_lists(checkpoint)
    _check_blocks(checkpoint, info)


def check_adapter(checkpoint: StreamCheckpoint, loaded: Mapping[str, str]) -> None:
    """Raise InvalidRequest unless the output's adapter is one of those ``loaded``, fingerprints by name."""
    name = checkpoint.adapter
    if name is None:
        return
    if name not in loaded:
        raise InvalidRequest(_FIELD, f"adapter: its output is of {shown(name)}, which is not loaded")
    known, found = checkpoint.adapter_fingerprint, loaded[name]
    if known != found:
        raise InvalidRequest(
            _FIELD, f"adapter: {shown(name)} was loaded here from other files: {known} and {found}"
        )


def _check_lists(checkpoint: StreamCheckpoint) -> None:
    ids, params = checkpoint.token_ids, checkpoint.params
    wanted = 0 if params.logprobs is None else len(ids)
    scored = 0 if params.prompt_logprobs is None else len(checkpoint.prompt_token_ids) - 1
    for name, count, least, most in (
        ("logprobs", len(checkpoint.logprobs), wanted, wanted),
        ("prompt_logprobs", len(checkpoint.prompt_logprobs), 0, scored),
        ("delivered_tokens", checkpoint.delivered_tokens, 0, len(ids)),
    ):
        if not least <= count <= most:
            raise InvalidRequest(_FIELD, f"{name}: {count}, where {least} to {most} are possible")


def _check_blocks(checkpoint: StreamCheckpoint, info: DeviceInfo) -> None:
    ids, steps, block = checkpoint.token_ids, checkpoint.step_map, checkpoint.block
    size = info.block_size
    if size is None:
        if steps is not None or block is not None:
            raise InvalidRequest(_FIELD, "is of a diffusion model, and this engine's is none")
        return
    if steps is None or len(steps) != len(ids):
        raise InvalidRequest(_FIELD, f"step_map: must have one entry for each of {len(ids)} tokens")
    known = len(checkpoint.prompt_token_ids) + len(ids)
    start = info.block_start(known, len(checkpoint.prompt_token_ids))
    if block is None:
        if known > max(start, len(checkpoint.prompt_token_ids)):
            raise InvalidRequest(_FIELD, "block: is missing, and the output ends within it")
        return
    if block.start != start or any(
        len(each) != size for each in (block.ids, block.known, block.written_in, block.logprobs)
    ):
        raise InvalidRequest(_FIELD, f"block: is not the one of {size} positions at the output's end")
    sequence = [*checkpoint.prompt_token_ids, *ids]
    _check_state(block, sequence[start:], checkpoint.params, info)


def _check_state(
    block: BlockState, sequence: abc.Sequence[int], params: SamplingParams, info: DeviceInfo
) -> None:
    """``sequence``: the tokens of prompt and output in the block."""
    from aioinfer.diffusion.registry import algorithm_class  # needs torch, which the device has, too

    algorithm = algorithm_class((params.diffusion or DiffusionParams()).algorithm)
    rest = [*zip(block.known, block.ids, strict=True)][len(sequence) :]
    for name, right in (
        ("ids", all(0 <= token < info.vocab_size for token in block.ids)),
        ("known", all(block.known[: len(sequence)]) and list(block.ids[: len(sequence)]) == [*sequence]),
        ("known", all(known is not (token == info.mask_token_id) for known, token in rest)),
        ("logprobs", all(map(math.isfinite, block.logprobs))),
        ("tops", len(block.tops) in (0, len(block.ids))),
        ("tops", all(0 <= token < info.vocab_size for top in block.tops for token, _ in top)),
        ("rounds", block.rounds < _MOST_ROUNDS),
        ("written_in", all(-1 <= each < _MOST_ROUNDS for each in block.written_in)),
        (
            "private",
            len(block.private) == algorithm.private(len(block.ids)) or not (block.private or block.rounds),
        ),
        ("private", all(0 <= each < 1 << 63 for each in block.private)),
        ("done", not (block.done or block.failed)),
    ):
        if not right:
            raise InvalidRequest(_FIELD, f"block: {name}: no block that is under way has these values")


def take(cell: StreamCell, info: DeviceInfo, at: int | None = None) -> StreamCheckpoint:
    """A checkpoint of a request so far, or of its first ``at`` output tokens, as if none had been read.

    Raises RuntimeError before its prompt is tokenized, if its output is complete and not cut, and if it has
    none: what only scores or pools a prompt starts anew."""
    output = cell.output
    request, params = output.request, output.request.params
    if params.max_tokens == 0 or request.pooling is not None:
        raise RuntimeError("it generates nothing (max_tokens 0), so there is nothing to go on with")
    if not output.accepted:
        raise RuntimeError("the prompt, or what was injected, is not tokenized yet: await stream.accepted()")
    if at is None and output.ended and output.finish_reason != "abort":
        raise RuntimeError("the output is complete: there is nothing to go on with")
    count = len(output.token_times) if at is None else at
    taken, characters = 0, 0
    if at is None:
        taken = min(cell.taken_ids, count)
        characters = cell.delivered or sum(map(len, output.pieces[: cell.taken_pieces]))
    block, identical = None, output.identical and info.deterministic
    if info.block_size is not None:
        if output.newest_version == output.weight_version and (at is None or not output.finished):
            block = output.block  # and not one that other weights began than the record says
        known = len(output.prompt_ids) + count
        start = info.block_start(known, len(output.prompt_ids))
        if at is not None and at < len(output.token_ids):
            block = None  # it has more tokens
        if known > max(start, len(output.prompt_ids)) and (block is None or block.start != start):
            # It is cut, its text is late, or its weights were replaced, and the rounds of this block are
            # gone, unless a template has all of it: it goes on from its tokens.
            block = unknown_block(output.known_ids(start, known), start, info)
            first = max(start, len(output.prompt_ids))
            pins = Pins.of(params, len(output.prompt_ids))
            identical = identical and pins is not None and not any(pins.writable(first, known - first))
    return StreamCheckpoint(
        fingerprint=info.fingerprint,
        model=info.model,
        numerics=output.numerics or info.numerics,
        identical=identical,
        prompt_token_ids=tuple(output.prompt_ids),
        params=params,
        seed=output.seed,
        token_ids=tuple(output.token_ids[:count]),
        delivered_tokens=taken,
        delivered_characters=characters,
        logprobs=() if params.logprobs is None else tuple(output.logprobs[:count]),
        prompt_logprobs=tuple(output.prompt_logprobs),
        step_map=None if output.step_map is None else tuple(output.step_map[:count]),
        block=block,
        request_id=output.request_id,
        priority=request.priority,
        cache_salt=request.cache_salt,
        routing_key=request.routing_key,
        adapter=request.adapter,
        adapter_fingerprint=output.adapter_fingerprint,
        weight_version=output.version_at(count),
        budget=request.budget,
        images=() if output.images is None else output.images.sources,
    )


def unknown_block(tokens: abc.Sequence[int], start: int, info: DeviceInfo) -> BlockState:
    """The block of a diffusion model that begins at ``start`` with these tokens, before its first round."""
    assert info.block_size is not None
    assert info.mask_token_id is not None
    return BlockState.unknown(start, tokens, info.block_size, info.mask_token_id)
