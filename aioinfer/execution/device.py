"""Device: the protocol between the launch thread and a device that computes steps.

Implemented by :mod:`aioinfer.execution.torch_device` on ``cpu`` and on ``cuda``, by the scripted device of
:mod:`aioinfer.testing`, which needs no torch, and by the toy devices of the tests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from aioinfer.images.support import ImageSupport
from aioinfer.model.adapters.base import PreparedAdapter
from aioinfer.model.spec import Progress
from aioinfer.observe.timeline import DeviceLane, now
from aioinfer.outputs import TokenLogprob
from aioinfer.scheduling.outcome import Outcome

if TYPE_CHECKING:
    from aioinfer.config import EngineConfig
    from aioinfer.scheduling.step import Step

__all__ = [
    "CompletedFlight",
    "Device",
    "DeviceInfo",
    "DeviceLost",
    "Flight",
    "HostPages",
    "Progress",
    "StepOutOfMemory",
    "StepResult",
]


class DeviceLost(Exception):
    """No later step can succeed on this device; raised by :meth:`Device.check`."""


class StepOutOfMemory(Exception):
    """There was not the memory that a step needed; nothing else is wrong. Devices raise it from what they got
    from their allocator, when a step is launched or waited for.

    The requests of the step start over, in smaller steps. The device must be ready for that: what the step
    left behind, in pages and slots of its own rows only, is never read, and neither is what steps that are
    in flight already compute for the same requests.
    """


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """Limits and properties of a device that is ready. They are final: the scheduler works with these."""

    vocab_size: int
    max_model_len: int
    #: pages a request may hold; page 0 is the null page and not among them
    num_pages: int
    eos_token_ids: frozenset[int]
    #: for banners: device, dtype, parameters, kernels
    description: str
    #: positions per page; None: those of the config
    page_size: int | None = None
    #: of a diffusion model, positions per block
    block_size: int | None = None
    #: of a diffusion model, what stands where nothing is known
    mask_token_id: int | None = None
    #: of a diffusion model, tokens that delete a position and that split it in two; None: there are none
    edit_token_ids: tuple[int, int] | None = None
    #: its blocks are canvases, which begin right behind the prompt
    canvas: bool = False
    #: "own" for this package's code, "transformers" for its implementation over paged attention; and why that
    implementation: str = ""
    fallback_reason: str = ""
    #: which factors of LongRoPE the keys of all sequences have, "short" or "long"; empty if there is one kind
    rotary_factors: str = ""
    dtype: str = ""
    device: str = ""
    #: by part (attention, layers, experts, sampling), the backend and why it: "native (the device is a cpu)";
    #: where one is native, also the "instructions" of these kernels: "AVX2 (the processor has no AMX)"
    kernels: Mapping[str, str] = field(default_factory=dict)
    #: where all of the model is native, the class of its float arithmetic:
    #: see :func:`aioinfer.native.bindings.arithmetic`
    arithmetic: str = ""
    #: of the CPU that compute; 0 on other devices
    threads: int = 0
    #: bytes of the KV pool
    kv_bytes: int = 0
    #: bytes of a page, if the host reaches them (HostPages); 0: it does not
    page_bytes: int = 0
    #: of these bytes and those of recurrent states, the order: pages of one layout can be copied
    page_layout: str = ""
    #: numbers of a hidden state; None: the model gives none
    hidden_size: int | None = None
    #: of a classifier, how many classes it knows
    num_labels: int = 0
    #: the model has a head that gives tokens
    generates: bool = True
    #: every position sees all of its prompt, which is one row and never cut
    whole_prompts: bool = False
    #: of a model with an image encoder; None: it has none
    images: ImageSupport | None = None
    #: of a model with recurrent state: how many states can be kept for cached prefixes; None: it has none
    num_snapshots: int | None = None
    #: drafts can be verified
    verifies: bool = True
    #: bytes of all recurrent states
    state_bytes: int = 0
    #: tokens that a draft model drafts at a time: 1, or the positions of a block; None: there is none
    draft_unit: int | None = None
    #: positions that the draft model, or head, knows
    draft_length: int = 0
    #: it has a recurrent state, which takes in no drafts
    draft_recurrent: bool = False
    #: kind of the draft head; empty: there is none; and how many tokens it drafts at most; None: any number
    draft_head: str = ""
    draft_most: int | None = None
    #: slots for adapters, from 1 on; 0: there are none, and why
    max_adapters: int = 0
    adapter_reason: str = ""
    #: requests that can hold a slot, if memory has states for fewer than the config asks for
    max_running_requests: int | None = None
    #: settings that the config left open and that follow from the device's memory
    settled: Mapping[str, int] = field(default_factory=dict)
    #: positions that the model knows
    model_positions: int | None = None
    #: why ``max_model_len`` is less than these, and which setting changes that; empty if it is not
    length_reason: str = ""
    #: of the engine, as resolved for this device
    overlap_steps: int | None = None
    deterministic: bool = False
    #: the model's name, and what tells its files from others: see :mod:`aioinfer.checkpoint.identity`
    model: str = ""
    fingerprint: str = ""
    #: the arithmetic: deterministic engines of one model where it is equal compute the same tokens and
    #: logprobs, to the bit
    numerics: str = ""

    def block_start(self, known: int, prompt: int) -> int:
        """Where the block of the position ``known`` begins, behind a prompt of so many tokens; of a diffusion
        model."""
        assert self.block_size is not None
        return known - (known - prompt * self.canvas) % self.block_size

    def longest(self, prompt: int) -> int:
        """Tokens that a prompt of so many and its output may have together: canvases are whole."""
        rest = (self.max_model_len - prompt) % (self.block_size or 1)
        return self.max_model_len - rest * self.canvas

    def settle(self, config: EngineConfig) -> EngineConfig:
        """The config with what follows from the device, where it says nothing else."""
        values: dict[str, Any] = {
            name: value for name, value in self.settled.items() if getattr(config, name) is None
        }
        if self.max_running_requests is not None:
            values["max_running_requests"] = min(
                self.max_running_requests, config.max_running_requests or self.max_running_requests
            )
        if config.max_step_tokens is not None and "max_running_requests" in values:
            # A replica may have settled under another config than the dispatcher's.
            values["max_running_requests"] = min(values["max_running_requests"], config.max_step_tokens)
        return replace(config, **values)

    @property
    def decisions(self) -> str:
        """Decisions of the start, in one line for the log."""
        parts = [self.description]
        if self.implementation:
            why = f" ({self.fallback_reason})" if self.fallback_reason else ""
            code = "own code" if self.implementation == "own" else "transformers' code"
            parts = [f"{self.description}, by {code}{why}"]
        if self.kernels:
            parts.append("kernels: " + ", ".join(f"{part} {name}" for part, name in self.kernels.items()))
        if self.threads:
            parts.append(f"{self.threads} threads")
        pages = f"{self.num_pages} KV pages"
        if self.page_size is not None:
            pages += f" of {self.page_size}, {self.num_pages * self.page_size} tokens"
        parts.append(f"{pages}, {self.kv_bytes / 2**30:.2f} GiB" if self.kv_bytes else pages)
        if self.num_snapshots is not None:
            size = f", {self.state_bytes / 2**30:.2f} GiB" if self.state_bytes else ""
            parts.append(f"{self.num_snapshots} snapshots of recurrent state{size} with those of the slots")
        if self.max_running_requests is not None:
            knob = "gpu_memory_utilization" if self.device.startswith("cuda") else "kv_memory_gib"
            why = f"half of what {knob} gives has recurrent states for no more"
            parts.append(f"max_running_requests {self.max_running_requests} ({why})")
        why = f" ({self.length_reason})" if self.length_reason else ""
        parts.append(f"max_model_len {self.max_model_len}{why}")
        parts += [f"{name} {value} (the GPU's memory)" for name, value in self.settled.items()]
        parts.append(f"overlap_steps {self.overlap_steps}")
        parts.append(f"deterministic {str(self.deterministic).lower()}")
        return "; ".join(parts)


@dataclass(slots=True)
class StepResult(Outcome):
    """Result of a step: the scheduler's Outcome, and logprobs and times."""

    #: by row, of its sampled tokens, where they were asked for
    logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict)
    #: by row, of the prompt's tokens from position ``row.scores[0] + 1`` on
    prompt_logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict)
    #: when the host had it, on the clock of the timeline
    done_at: float = field(default_factory=now)


class Flight(Protocol):
    """A launched step whose result has not been read."""

    def wait(self) -> StepResult:
        """Block until the step is done, without holding the GIL meanwhile. Raises what the device raised:
        StepOutOfMemory if that is all there is to it."""


class CompletedFlight:
    """A flight that is done already, as those of synchronous devices are."""

    __slots__ = ("_result",)

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def wait(self) -> StepResult:
        return self._result


class Device(Protocol):
    """``open``, ``launch`` and ``close`` are called on one thread, the launch thread; ``check``, too, or on
    the thread that waits for flights, while the other may launch.

    ``prepare`` is called on the loop's thread right after planning, in the order of the steps, and must
    neither block nor touch the device.
    """

    #: ``launch`` returns only when the step is done, so ``wait`` never blocks
    synchronous: bool
    #: where it tells when it did what; set before ``open``
    lane: DeviceLane

    def open(self, progress: Progress | None = None) -> DeviceInfo:
        """Load the model and take the memory. Raises ConfigError or OutOfMemory.

        ``progress`` may raise, to end the opening: it is called several times a second where that can take
        long, also when nothing is new. What it raises leaves ``open``; ``close`` follows.
        """

    def prepare(self, step: Step) -> Any:
        """Pack a step on the host into the argument of :meth:`launch`."""

    def launch(self, prepared: Any) -> Flight:
        """Enqueue a step after all earlier ones. Raises as :meth:`Flight.wait` does."""

    def prepare_adapter(self, path: Path) -> PreparedAdapter:
        """Read and check an adapter's files. On any thread but the launch thread; may take long. Raises
        ConfigError, which names what is wrong with which tensor or field."""

    def install_adapter(self, slot: int, adapter: Any) -> None:
        """Put what :meth:`prepare_adapter` returned into an empty slot: rows of later steps may have it. On
        the launch thread, between two steps; takes microseconds."""

    def remove_adapter(self, slot: int) -> None:
        """Empty a slot that no step in flight reads. On the launch thread. One that is empty stays so."""

    def check(self) -> None:
        """Return, after any failure of a step, if later steps can succeed, else raise
        DeviceLost."""

    def close(self) -> None:
        """Give everything back. Idempotent."""


@runtime_checkable
class HostPages(Device, Protocol):
    """A device whose KV pages lie in the memory of the host."""

    def page_views(self, page: int) -> Sequence[memoryview]:
        """The bytes of a page, in pieces of a fixed order, which may be written to. On any thread, while
        steps compute: of pages that no launched step writes, and to write them, that none reads either."""

    def state_views(self, cell: int) -> Sequence[memoryview]:
        """The same of a cell of recurrent state; see :mod:`aioinfer.model.state`."""


@runtime_checkable
class UpdatableDevice(Device, Protocol):
    """A device whose model can be given other weights."""

    def prepare_weights(self, given: Any, go_on: Callable[[], None]) -> Any:
        """Read and check other weights, a path or a list of names and tensors, for
        :meth:`install_weights`. On a worker thread, while steps are computed; changes nothing. ``go_on``
        is called again and again, and may raise. Raises ConfigError."""

    def install_weights(self, prepared: Any) -> None:
        """Compute with other weights from now on. On the launch thread, with no step in flight. After an
        exception no step can be computed."""
