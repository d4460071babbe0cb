"""Row and Step: the plan of one forward pass, immutable once launched.

A step has two parts. ``generating`` are rows whose input lives in the slot on the device, perhaps still being
computed by the step before: a token each, or blocks. They are kept as columns, because most rows of most
steps are of this kind. ``prefilling`` are rows whose tokens the host knows. A token is a block of one::

    q_len    input                                             result
    1        relay[slot]                                       the next token
    1 + k    relay[slot], then k drafts                        the tokens after the right ones
    B, 2B    blocks[slot], perhaps with the block after it     the block after one more round
    chunk    tokens that the host knows                        the next token, or none
"""

from __future__ import annotations

import sys
from collections import abc
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from aioinfer.scheduling.outcome import Outcome

if TYPE_CHECKING:
    from aioinfer.diffusion.state import BlockState
    from aioinfer.images.prompt import ImageUnit
    from aioinfer.params import SamplingParams
    from aioinfer.scheduling.sequence import Sequence
    from aioinfer.steering.state import SteeringState
    from aioinfer.text.grammar import GrammarState

__all__ = [
    "NO_ROWS",
    "UNDRAWN",
    "DraftInput",
    "EncodeWork",
    "Encoding",
    "Generating",
    "MultiStepBudget",
    "NewRequestData",
    "Outcome",
    "Row",
    "RowFeatures",
    "Step",
    "TableUpdate",
    "new_request_data",
]

#: in the place of a draft that a model draws on the device
UNDRAWN = -1
#: slot, index of the first page in its table, pages
TableUpdate = tuple[int, int, abc.Sequence[int]]


class MultiStepBudget:
    """The number of rounds that a device may compute before it answers: it goes on with the same rows while
    no block of the step gets done and no request wants to join.

    Written on the loop's thread, read on the device's.
    """

    __slots__ = ("interrupted", "rounds")

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds
        #: no more rounds than one, or than the one under way
        self.interrupted = False


@dataclass(frozen=True, slots=True)
class NewRequestData:
    """Facts that the device side needs when a request takes a slot; sent with its first row there."""

    params: SamplingParams
    seed: int
    #: ids that end the output; banned until ``params.min_tokens`` tokens were sampled
    stop_ids: frozenset[int]
    prompt_ids: abc.Sequence[int]
    output_ids: abc.Sequence[int]
    #: what the output must look like
    grammar: GrammarState | None = None
    #: what else decides how it goes on
    steering: SteeringState | None = None
    #: of a diffusion model: the block that was being denoised when the request last lost its slot
    resume: BlockState | None = None
    #: slot of its adapter on the device; 0: it has none
    adapter: int = 0
    #: of prompt and output together
    max_length: int = sys.maxsize
    #: of a prompt with images and M-RoPE: what is added to positions behind it
    rotary_delta: int | None = None


def new_request_data(sequence: Sequence) -> NewRequestData | None:
    """For the first row of a request in its slot; None for others."""
    if sequence.kv.announced:
        return None
    sequence.kv.announced = True
    images = sequence.output.images
    return NewRequestData(
        sequence.params,
        sequence.seed,
        sequence.stop_ids,
        sequence.output.shown_ids,
        tuple(sequence.output_ids),
        sequence.grammar,
        sequence.steering,
        sequence.cursor.resume,
        0 if sequence.adapter is None else sequence.adapter.slot,
        sequence.max_length,
        None if images is None or images.rotary is None else images.delta,
    )


class RowFeatures(NamedTuple):
    """Positions of a row that are an image's."""

    #: the first of them, counted from the row's first
    at: int
    #: number of the unit's features on the device, and the first of its positions that is meant
    number: int
    first: int
    length: int


class EncodeWork(NamedTuple):
    """A slice of the layers of the image encoder, for one unit: the slice ``part`` of ``parts``."""

    #: of the unit's features on the device
    number: int
    unit: ImageUnit
    part: int = 0
    parts: int = 1

    @property
    def ends(self) -> bool:
        """The features are there then."""
        return self.part + 1 == self.parts


@dataclass(frozen=True, slots=True)
class Encoding:
    """What a step without rows does: it computes features of images."""

    works: tuple[EncodeWork, ...]
    #: numbers of features that no later step has
    dropped: tuple[int, ...]
    #: the request that waits for them
    sequence: Sequence


@dataclass(slots=True)
class Row:
    """One unit of work: compute ``length`` positions of one request from ``start`` on.

    The positions are ``ids``, whose tokens the host knows, and after them ``blocks`` units that live in the
    slot on the device. For tokens a unit is one position; a row has either ids (a prefill chunk) or one unit
    (a decode, which reads the relay). For a diffusion model a unit is a block, and a row may have both::

        blocks   positions after ``ids``
        0        none: a prefill chunk
        1        a block to denoise; of the slot's block if that is final and lies before it, a new one
        2        the slot's block, and after it the next: if the first is final by now, this forward
                 commits it and denoises the second, else it denoises the first and the second is void
    """

    sequence: Sequence
    slot: int
    start: int
    length: int
    #: tokens at the row's first positions
    ids: abc.Sequence[int]
    #: the row generates: a token is sampled after its last position, or a block is denoised
    samples: bool
    #: pages that joined or changed in the request's page table since its last row, and where they go
    new_pages: abc.Sequence[int]
    first_new_page: int
    new_request: NewRequestData | None
    #: positions [first, last) of the row whose next token of the prompt is to be scored
    scores: tuple[int, int] | None = None
    blocks: int = 0
    #: cells of recurrent state, if the model has any: see :class:`~aioinfer.scheduling.states.StateCells`
    state_read: int = 0
    state_write: int = 0
    #: positions [first, last) whose hidden states, or logits, are pooled: see :mod:`aioinfer.pooling`
    pools: tuple[int, int] | None = None
    #: of a decode: what may follow its token. They are the row's last positions, and each position samples.
    #: A state that the row leaves is that in front of them
    drafts: abc.Sequence[int] = ()
    #: positions in front of the row's first that its state takes in before: drafts that were right
    replays: int = 0
    #: positions of images among them
    features: abc.Sequence[RowFeatures] = ()

    @property
    def kv_length(self) -> int:
        """Positions whose KV exists once the row is computed; also the position it samples for."""
        return self.start + self.length

    @property
    def ends(self) -> bool:
        """Nothing of its request follows it, not even a token: a request that only prefills ends here."""
        return not self.samples and self.kv_length >= self.sequence.max_length

    @property
    def table_update(self) -> TableUpdate:
        """The change in the page table of the row's slot; perhaps none."""
        return self.slot, self.first_new_page, self.new_pages

    @property
    def output_index(self) -> int:
        """The number of output tokens that precede the one this row samples."""
        return self.kv_length - len(self.sequence.prompt_ids)


class DraftInput(NamedTuple):
    """Positions of one request that a draft model computes in a step, for its KV."""

    slot: int
    #: the first position, and the tokens from there on
    start: int
    ids: abc.Sequence[int]
    #: the row whose own token follows and whose drafts are drawn after it; -1: none
    row: int


@dataclass(slots=True)
class Generating:
    """The rows of a step whose input lives on the device, as columns of G entries. Never changed: not
    declared frozen, because that doubles the time to make one."""

    sequences: list[Sequence]
    #: int64 [G]
    slots: npt.NDArray[np.int64]
    #: int64 [G]: the first position each row computes
    starts: npt.NDArray[np.int64]
    #: int64 [G]: positions of each row; None where all have one
    lengths: npt.NDArray[np.int64] | None = None
    #: positions of a unit: 1, or those of a block
    unit: int = 1
    #: pages that joined or changed in the rows' page tables
    tables: list[TableUpdate] = field(default_factory=list)
    #: by slot, of requests whose first row there is among these
    new_requests: dict[int, NewRequestData] = field(default_factory=dict)
    #: requests whose last token, by length, is sampled here
    ending: list[Sequence] = field(default_factory=list)
    #: requests that get no row before these have resolved
    alone: abc.Sequence[Sequence] = ()
    #: drafts of the last rows, which verify them: see :mod:`aioinfer.speculation`
    drafts: list[abc.Sequence[int]] = field(default_factory=list)
    #: int64 [G], of a model with recurrent state: positions that the states of rows take in before those of
    #: the row, see :class:`Row`; None where no row has any. Of the rows without drafts these are the last
    replays: npt.NDArray[np.int64] | None = None
    #: of a draft model, and what it drafts at a time: 1, or the positions of a block
    draft_inputs: list[DraftInput] = field(default_factory=list)
    draft_unit: int = 1

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def num_decodes(self) -> int:
        """Rows of one token without drafts; they come first."""
        return 0 if self.unit > 1 else len(self.sequences) - len(self.drafts)

    @property
    def num_tokens(self) -> int:
        return len(self.sequences) if self.lengths is None else int(self.lengths.sum())

    @property
    def rows(self) -> list[Row]:
        """The rows as objects, made anew at every call; for tests and for devices that are not fast."""
        tables = {slot: (first, pages) for slot, first, pages in self.tables}
        lengths = [1] * len(self) if self.lengths is None else self.lengths.tolist()
        rows = []
        columns = zip(self.sequences, self.slots.tolist(), self.starts.tolist(), lengths, strict=True)
        for sequence, slot, start, length in columns:
            first, pages = tables.get(slot, (0, []))
            new, blocks = self.new_requests.get(slot), length // self.unit
            row = Row(sequence, slot, start, length, (), True, pages, first, new, blocks=blocks)
            row.state_read = row.state_write = slot
            rows.append(row)
        for row, drafts in zip(rows[self.num_decodes :], self.drafts, strict=False):
            row.drafts = drafts
        if self.replays is not None:
            for row, replays in zip(rows, self.replays.tolist(), strict=True):
                row.replays = replays
        return rows


NO_ROWS = Generating([], np.empty(0, np.int64), np.empty(0, np.int64))


@dataclass(frozen=True, slots=True)
class Step:
    """One forward: generating rows first, then prefilling ones. Ids increase by one."""

    id: int
    generating: Generating
    prefilling: tuple[Row, ...]
    num_tokens: int
    #: of a step in which each row is one block
    multi_step: MultiStepBudget | None = None
    #: in place of rows
    encoding: Encoding | None = None

    @property
    def num_generating(self) -> int:
        return len(self.generating)

    @property
    def prefill_tokens(self) -> int:
        """Positions whose tokens the host knows."""
        return sum(len(row.ids) for row in self.prefilling)

    @property
    def num_rows(self) -> int:
        return len(self.generating) + len(self.prefilling)

    @property
    def sequences(self) -> list[Sequence]:
        """The request of each row."""
        return [*self.generating.sequences, *(row.sequence for row in self.prefilling)]

    @property
    def concerned(self) -> list[Sequence]:
        """The requests that something is computed for."""
        return self.sequences if self.encoding is None else [self.encoding.sequence]

    @property
    def new_requests(self) -> list[Sequence]:
        """Requests whose first row in their slot is in this step."""
        new = self.generating.new_requests
        found = [sequence for sequence in self.generating.sequences if sequence.kv.slot in new] if new else []
        return found + [row.sequence for row in self.prefilling if row.new_request is not None]

    @property
    def rows(self) -> list[Row]:
        """All rows as objects, made anew at every call; for tests and for devices that are not fast."""
        return [*self.generating.rows, *self.prefilling]
