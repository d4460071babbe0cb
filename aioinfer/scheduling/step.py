"""Row and Step: the plan of one forward pass, immutable once launched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from aioinfer.scheduling.decode_batch import Decodes

if TYPE_CHECKING:
    from aioinfer.diffusion.state import BlockState
    from aioinfer.params import SamplingParams
    from aioinfer.scheduling.request import Request
    from aioinfer.text.grammar import GrammarState

__all__ = [
    "Admission",
    "MultiStepBudget",
    "Outcome",
    "Row",
    "Step",
]


class MultiStepBudget:
    """How many rounds a device may compute before it answers: while no block of the step gets done and
    nobody wants in, it goes on with the same rows.

    Written on the loop's thread, read on the device's.
    """

    __slots__ = ("interrupted", "rounds")

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds
        #: no more rounds than one, or than the one it is in
        self.interrupted = False


@dataclass(frozen=True, slots=True)
class Admission:
    """What the device side must know when a request takes a slot: rides on its first row there."""

    params: SamplingParams
    seed: int
    #: ids that end the output; banned until ``params.min_tokens`` tokens were sampled
    stop_ids: frozenset[int]
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    #: what the output must look like
    grammar: GrammarState | None = None
    #: of a diffusion model: the block that was being denoised when the request last lost its slot
    resume: BlockState | None = None


def new_request_data(request: Request) -> Admission | None:
    """For the first row of a request in its slot; None for others."""
    if request.announced:
        return None
    request.announced = True
    return Admission(
        request.params,
        request.seed,
        request.stop_ids,
        request.prompt_ids,
        tuple(request.output_ids),
        request.grammar,
        request.resume,
    )


@dataclass(slots=True)
class Row:
    """One unit of work: compute ``length`` positions of one request from ``start`` on.

    A row with ``ids`` is a prefill chunk whose tokens the host knows. A row without is a decode: its
    single token waits in the relay cell of ``slot``, perhaps still being computed by the step before.

    With a diffusion model, ``ids`` are whole blocks whose tokens are final, perhaps none, and ``blocks``
    says how many blocks follow that live in the slot on the device::

        blocks   positions behind ``ids``
        0        none: a prefill chunk
        1        a block to denoise; of the slot's block if that is final and lies before it, a new one
        2        the slot's block, and behind it the next: if the first is final by now, this forward
                 commits it and denoises the second, else it denoises the first and the second is void
    """

    request: Request
    slot: int
    start: int
    length: int
    #: tokens at positions [start, start + length), or None to read the relay
    ids: Sequence[int] | None
    #: the row reaches the end of what is known, so the token after it is sampled
    samples: bool
    #: pages that joined or changed in the request's page table since its last row, and where they go
    new_pages: Sequence[int]
    first_new_page: int
    admission: Admission | None
    #: positions [first, last) of the row whose next token of the prompt is to be scored
    scores: tuple[int, int] | None = None
    #: blocks of a diffusion model at the end of the row
    blocks: int = 0

    @property
    def kv_length(self) -> int:
        """Positions whose KV exists once the row is computed; also the position it samples for."""
        return self.start + self.length

    @property
    def output_index(self) -> int:
        """How many output tokens precede the one this row samples."""
        return self.kv_length - len(self.request.prompt_ids)


@dataclass(frozen=True, slots=True)
class Step:
    """One forward: decode rows first, as columns, then prefill chunks and the blocks of diffusion models.
    Ids increase by one."""

    id: int
    decodes: Decodes
    prefills: tuple[Row, ...]
    num_tokens: int
    #: of a step in which each row is one block
    horizon: MultiStepBudget | None = None

    @property
    def num_decodes(self) -> int:
        return len(self.decodes)

    @property
    def prefill_tokens(self) -> int:
        """Positions whose tokens the host knows."""
        return sum(0 if row.ids is None else len(row.ids) for row in self.prefills)

    @property
    def num_rows(self) -> int:
        return len(self.decodes) + len(self.prefills)

    @property
    def requests(self) -> list[Request]:
        """By row, whose it is."""
        return [*self.decodes.requests, *(row.request for row in self.prefills)]

    @property
    def rows(self) -> list[Row]:
        """All rows as objects, for whoever looks at them one by one (tests, the toy device);
        made anew at every look."""
        decodes = self.decodes
        tables = {slot: (first, pages) for slot, first, pages in decodes.tables}
        rows = []
        for request, slot, start in zip(
            decodes.requests, decodes.slots.tolist(), decodes.starts.tolist(), strict=True
        ):
            first, pages = tables.get(slot, (0, []))
            rows.append(Row(request, slot, start, 1, None, True, pages, first, None))
        return [*rows, *self.prefills]


class Outcome(Protocol):
    """What a scheduler is told of a step that was computed; the devices' StepResult tells more."""

    @property
    def tokens(self) -> Sequence[int]:
        """One entry per row: the sampled token, or one of the negative values above."""

    @property
    def forced(self) -> Mapping[int, Sequence[int]]:
        """By row, the tokens that follow without having been sampled."""

    @property
    def blocks(self) -> Mapping[int, BlockState]:
        """By row, of those that denoise."""

    @property
    def rounds(self) -> int:
        """Forwards that it took."""
