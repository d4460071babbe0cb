"""The protocol between what all steps have in common and what a way of decoding adds.

::

    loop thread     Packer  = pages, positions, ids      + RowPacker (sections and work of its own)
    launch thread   Runner  = sections, forward          + Decoding  (gather, step)
                    StepGraphs = replay of a forward     + Captured  (rows that lie still, step)
    result          Runner.read                          + Decoding  (read)

Tokens (``tokens.py``) and blocks of diffusion models (``blocks.py``) implement all three.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

    from aioinfer.config import EngineConfig
    from aioinfer.diffusion.state import Tops
    from aioinfer.execution.device import StepResult
    from aioinfer.execution.grammar_worker import GrammarWorker
    from aioinfer.execution.graph_shapes import GraphShape, GraphShapes
    from aioinfer.execution.packed import Layout, PackedStep
    from aioinfer.model.attention.base import Attention
    from aioinfer.model.canvas import Canvas
    from aioinfer.model.spec import CausalLM
    from aioinfer.model.state import StatePool
    from aioinfer.scheduling.step import NewRequestData, Step

__all__ = ["Captured", "Decoding", "Guided", "Kind", "Output", "RowPacker", "Send", "Transfer"]

#: sends an array of the host to the device, enqueued after everything before
Send: TypeAlias = "Callable[[npt.NDArray[Any]], torch.Tensor]"


class Transfer(Protocol):
    """Between host and device, for one step."""

    def send(self, array: npt.NDArray[Any], /) -> torch.Tensor:
        """Send an array of the host to the device, enqueued after everything before."""

    def await_last_result(self) -> None:
        """Wait until the host has read the result of the step before."""


class Guided(NamedTuple):
    """Of a block that is steered, what the host is told besides its record."""

    #: see :class:`~aioinfer.diffusion.state.BlockState`
    tops: Tops
    #: its constraints leave no token
    exhausted: bool


@dataclass(slots=True)
class Output:
    """Results of a step on the device, for the host to read."""

    #: everything that has to be copied; ``Decoding.read`` gets the copies in this order
    tensors: list[torch.Tensor]
    #: by sampling row, tokens that follow without having been sampled
    forced: dict[int, list[int]] = field(default_factory=dict)
    #: of these, what logits processors want
    steered: dict[int, list[int]] = field(default_factory=dict)
    #: by block row that is steered, what its record does not have
    guided: dict[int, Guided] = field(default_factory=dict)
    #: forwards that the step took
    rounds: int = 1
    #: when the masks were there, on the timeline's clock; None: nothing waited for masks
    masked: float | None = None
    #: seconds on the timeline's clock: the host began, was through with the forward, had the masks, and ended
    times: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)


class RowPacker(Protocol):
    """The host's half: keeps by slot what rows do not repeat. Loop thread only."""

    #: stands in ``input_ids`` where the host knows no token
    unknown_id: int

    def admit(self, new: Mapping[int, NewRequestData]) -> None:
        """Requests, perhaps none, take these slots in the step that is packed next."""

    def graph_need(self, step: Step) -> GraphShape | None:
        """The least shape of a captured step that can compute this one; None if none can."""

    def pack(self, step: Step, layout: Layout) -> tuple[dict[str, npt.NDArray[np.int64]], Any]:
        """The sections of a step that only this decoding has, and the parts that stay on the host."""


class Decoding(Protocol):
    """The device's half: what a slot carries from step to step, and what is done with logits. Launch thread
    only, except for ``read``."""

    #: the canvases of the step that was gathered; None if there are none
    canvas: Canvas | None

    def warm_up(self) -> None:
        """Whatever must not wait for the first step. Reads back from the device."""

    def begin(self, packed: PackedStep, transfer: Transfer) -> None:
        """Prepare a replayed step, in place of :meth:`gather`: what requests that take slots bring along, and
        what must go on while the forward runs."""

    def gather(
        self, packed: PackedStep, parts: dict[str, torch.Tensor], transfer: Transfer
    ) -> tuple[torch.Tensor, Any]:
        """Fill in the input ids that only the device knows; returns which tokens' logits are wanted, int64,
        and the state of the step."""

    def step(
        self,
        logits: torch.Tensor,
        packed: PackedStep,
        parts: dict[str, torch.Tensor],
        state: Any,
        transfer: Transfer,
    ) -> Output:
        """Sample or denoise; the slots then hold the result."""

    def again(self, packed: PackedStep, parts: dict[str, torch.Tensor], state: Any, rounds: int) -> bool:
        """True if another forward over the same rows follows in this step; fills in its input ids."""

    def read(self, packed: PackedStep, output: Output, copies: Sequence[torch.Tensor]) -> StepResult:
        """The result of a step from host copies of ``output.tensors``."""

    def captured(
        self,
        model: CausalLM,
        attention: Attention,
        *,
        shapes: GraphShapes,
        max_pages: int,
        page_size: int,
        states: StatePool | None = None,
    ) -> Captured:
        """The steps that graphs of these shapes replay. ``states``: of a model with recurrent state."""


class Captured(Protocol):
    """Work on memory that lies still, so that it can be captured and replayed. Rows beyond a step's own are
    padding: slot 0, null page, no context; positions beyond those of its chunks are a row of padding."""

    #: bool [C]: the last position of a chunk of the last forward is not finite; valid until the next forward
    broken: torch.Tensor

    def prepare(self) -> None:
        """Called before the first capture: make what must not be made during one."""

    def clear(self, shape: GraphShape) -> None:
        """Fill the inputs of ``forward(shape)`` with padding, before the first step."""

    def variants(self, size: int) -> Iterable[object]:
        """Variants of ``step`` that are captured with ``size`` rows."""

    def forward(self, shape: GraphShape) -> None:
        """Compute the logits of a step of this shape."""

    def step(self, size: int, variant: Any) -> None:
        """Sample or denoise ``size`` rows from the last forward's logits."""

    def update(self, packed: PackedStep, shape: GraphShape, send: Send) -> bool:
        """Make the rows those of the step, followed by padding, as ``forward(shape)`` reads them. False if
        they were so already."""

    def moved_on(self) -> None:
        """A replayed forward moved its rows on."""

    def forget(self) -> None:
        """A step failed: the state of the rows is unknown."""

    def logits(self, packed: PackedStep) -> torch.Tensor:
        """Logits of the last forward, valid until the next forward."""

    def finish(self, packed: PackedStep, replay: Callable[[int, object], bool]) -> Output | None:
        """Sample or denoise the last forward's step with ``replay(rows, variant)``; that is False, and does
        nothing, where the variant was not captured for as many rows. None if it must be done without. The
        output is valid for ``KEPT`` calls."""


class Kind(Protocol):
    """Factory of the classes above for one way of generating."""

    def fit(self, config: EngineConfig) -> EngineConfig:
        """The config as this model needs it. Raises ConfigError where it cannot work."""

    def rows(self, config: EngineConfig) -> RowPacker: ...

    def decoding(self, config: EngineConfig, device: torch.device, grammars: GrammarWorker) -> Decoding: ...

    def graph_shapes(self, config: EngineConfig) -> GraphShapes:
        """Shapes to capture."""

    def largest_steps(self, config: EngineConfig, max_len: int) -> Iterable[Step]:
        """A prefill and a generating step, as large as may be, on the null page alone, to warm up with.
        ``max_len``: positions that a request may have."""
