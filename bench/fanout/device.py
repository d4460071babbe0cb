"""NullDevice: steps that take exactly their time and no processor, and have the tokens of a real text."""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from aioinfer.execution.device import DeviceInfo, NoAdapters, StepResult
from aioinfer.observe.timeline import DeviceLane, now
from aioinfer.sampling.outcomes import NO_TOKEN
from aioinfer.scheduling.step import Step

__all__ = ["NullDevice", "expected_ids", "real_text"]

_ROOT = Path(__file__).parents[2]
#: how far apart in the text two outputs begin whose prompts begin with neighbouring tokens
_STRIDE = 37
#: other scripts than those of the documentation
_SCRIPTS = '„Größe“ 漢字かな交じり文 🙂👩‍👩‍👧 naïve — "quoted"\\ \t Привет, мир! 한국어 ∑x² ≤ ½\n'


def real_text() -> str:
    """What the tokens are of: this project's documentation, and a line in other scripts now and then."""
    pages = [path.read_text("utf-8") for path in sorted([_ROOT / "README.md", *_ROOT.glob("docs/*.md")])]
    return _SCRIPTS.join(pages)


def expected_ids(text_ids: Sequence[int], first: int, count: int) -> list[int]:
    """The output behind a prompt that begins with the token ``first``."""
    return [text_ids[(first * _STRIDE + at) % len(text_ids)] for at in range(count)]


class NullDevice(NoAdapters):
    """As a GPU: asynchronous, one step behind the other, each of ``seconds``.

    ``packing`` and ``launching``: seconds of Python that a step takes of the loop and of the launch thread.
    """

    synchronous = False

    def __init__(
        self,
        text_ids: Sequence[int],
        info: DeviceInfo,
        *,
        seconds: float,
        packing: float = 0.0,
        launching: float = 0.0,
        num_slots: int,
    ) -> None:
        self.lane = DeviceLane()
        self._ids = np.asarray(text_ids, np.int64)
        self._info = info
        self._seconds = seconds
        self._packing = packing
        self._launching = launching
        #: by slot: position in the text, less the position in the sequence
        self._base = np.zeros(num_slots, np.int64)
        #: when the last step ends
        self._free = 0.0

    def open(self, progress: Any = None) -> DeviceInfo:
        return self._info

    def prepare(self, step: Step) -> Step:
        _compute(self._packing)
        return step

    def launch(self, step: Step) -> _Flight:
        _compute(self._launching)
        start = max(now(), self._free)
        self._free = start + self._seconds
        return _Flight(self, step.id, self._tokens(step), start, self._free)

    def check(self) -> None:
        """Never lost."""

    def close(self) -> None:
        """Nothing to give back."""

    def _tokens(self, step: Step) -> list[int]:
        rows, base = step.generating, self._base
        for slot, new in rows.new_requests.items():
            base[slot] = _base_of(new.prompt_ids)
        found: npt.NDArray[np.int64] = self._ids[(base[rows.slots] + rows.starts) % len(self._ids)]
        tokens: list[int] = found.tolist()
        for row in step.prefilling:
            if row.new_request is not None:
                base[row.slot] = _base_of(row.new_request.prompt_ids)
            at = int(base[row.slot]) + row.start + row.length - 1
            tokens.append(int(self._ids[at % len(self._ids)]) if row.samples else NO_TOKEN)
        return tokens


def _base_of(prompt_ids: Sequence[int]) -> int:
    return prompt_ids[0] * _STRIDE - (len(prompt_ids) - 1)


def _compute(seconds: float) -> None:
    """Pure Python for so long: time in which this thread waits for the interpreter's lock does not count."""
    end = time.thread_time() + seconds
    while seconds and time.thread_time() < end:
        pass


class _Flight:
    __slots__ = ("_device", "_end", "_start", "_step", "_tokens")

    def __init__(self, device: NullDevice, step: int, tokens: list[int], start: float, end: float) -> None:
        self._device = device
        self._step = step
        self._tokens = tokens
        self._start = start
        self._end = end

    def wait(self) -> StepResult:
        if (left := self._end - now()) > 0:
            if sys.platform == "linux":
                ctypes.CDLL(None).prctl(29, 1, 0, 0, 0)  # PR_SET_TIMERSLACK: wake up in time
            time.sleep(left)
        self._device.lane.step(self._step, self._start, self._start, self._start, self._end)
        return StepResult(self._tokens)
