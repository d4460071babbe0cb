"""A device whose steps take a set time and no processor, with the tokens of a real text."""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from aioinfer.config import EngineConfig
from aioinfer.engine import Engine
from aioinfer.execution.device import DeviceInfo, StepResult
from aioinfer.execution.launcher import ThreadLauncher
from aioinfer.observe.timeline import DeviceLane, now
from aioinfer.sampling.outcomes import NO_TOKEN
from aioinfer.scheduling.step import Step
from aioinfer.text.tokenizer import HFTokenizer
from tests.toys.adapters import NoAdapters

__all__ = ["MAX_TOKENS", "NullDevice", "null_engine"]

_ROOT = Path(__file__).parents[1]
#: more tokens than a stream gets while it is measured
MAX_TOKENS = 100_000
_PAGE = 4096
#: distance in the text between outputs whose prompts begin with neighbouring tokens
_STRIDE = 37
#: other scripts than those of the documentation
_SCRIPTS = '„Größe“ 漢字かな交じり文 🙂👩‍👩‍👧 naïve — "quoted"\\ \t Привет, мир! 한국어 ∑x² ≤ ½\n'


class NullDevice(NoAdapters):
    """Asynchronous as a GPU: one step after the other, each of ``seconds``."""

    synchronous = False

    def __init__(self, text_ids: Sequence[int], info: DeviceInfo, *, seconds: float, num_slots: int) -> None:
        self.lane = DeviceLane()
        self.seconds = seconds
        self._ids = np.asarray(text_ids, np.int64)
        self._info = info
        #: by slot: position in the text, less the position in the sequence
        self._base = np.zeros(num_slots, np.int64)
        #: time at which the last step ends
        self._free = 0.0

    def open(self, progress: Any = None) -> DeviceInfo:
        return self._info

    def prepare(self, step: Step) -> Step:
        return step

    def launch(self, step: Step) -> _Flight:
        start = max(now(), self._free)
        self._free = start + self.seconds
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


def null_engine(streams: int, step_ms: float, **settings: Any) -> tuple[Engine, NullDevice]:
    """An engine for ``streams`` streams over a null device, with the bundled tokenizer; and the device.

    Its tokens are those of this project's documentation, and of a line in other scripts now and then.
    """
    pages = [path.read_text("utf-8") for path in sorted([_ROOT / "README.md", *_ROOT.glob("docs/*.md")])]
    tokenizer = HFTokenizer.load(EngineConfig().model_path)
    num_pages = streams * (MAX_TOKENS // _PAGE + 2)
    given: dict[str, Any] = {
        "model": "null",
        "page_size": _PAGE,
        "num_pages": num_pages,
        "max_running_requests": streams,
        "max_step_tokens": 16 * streams,
        "max_queued_requests": 2 * streams,
        "prefix_cache": False,
        "overlap_steps": 1,
    }
    config = EngineConfig(**{**given, **settings})
    device = NullDevice(
        tokenizer.encode_part(_SCRIPTS.join(pages)),
        DeviceInfo(tokenizer.vocab_size, 2 * MAX_TOKENS, num_pages, frozenset(), "takes its time"),
        seconds=step_ms / 1e3,
        num_slots=config.num_slots + 1,
    )
    return Engine(config, launcher=lambda _: ThreadLauncher(device), tokenizer=lambda _: tokenizer), device
