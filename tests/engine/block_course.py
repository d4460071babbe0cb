"""A small course of a diffusion engine, event by event, and what can happen between any two of them."""

from __future__ import annotations

from collections import abc, deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from aioinfer.config import EngineConfig
from aioinfer.execution.device import StepOutOfMemory
from aioinfer.loop.core import Core
from aioinfer.loop.options import Prepared
from aioinfer.params import DiffusionParams, SamplingParams
from aioinfer.request import Output, Request
from aioinfer.scheduling.audit import check_idle
from aioinfer.scheduling.block_cursor import BlockCursor
from aioinfer.scheduling.sequence import Sequence
from aioinfer.scheduling.step import Step
from tests.engine.block_worlds import Plain, decode
from tests.engine.laws import watch_core
from tests.engine.worlds import VOCAB, Injected
from tests.toys.blocks import ScriptedDevice

SIZE, LONGEST = 4, 40
#: what was found once; all courses have the same script
_EXPECTED: dict[Any, Plain] = {}
Asked = tuple[list[int], SamplingParams]


def ask(prompt: list[int], algorithm: str = "low_confidence", max_tokens: int = 10, **sampling: Any) -> Asked:
    """A greedy request, to be ended by its length only."""
    diffusion = DiffusionParams(algorithm=algorithm, threshold=0.9)
    if algorithm == "joint_threshold":
        diffusion = replace(diffusion, max_post_edits=2)
    options = {"temperature": 0.0, "ignore_eos": True, "logprobs": 0, **sampling}
    return prompt, SamplingParams(max_tokens=max_tokens, diffusion=diffusion, **options)


class Course:
    """One engine without a loop: plan and pack, compute, resolve, in the order of a loop that is quick.

    Between two of these events something may be done to it.
    """

    def __init__(self, asked: abc.Sequence[Asked], **settings: Any) -> None:
        options = {
            "page_size": SIZE,
            "max_running_requests": 4,
            "overlap_steps": 1,
            "num_pages": 40,
            **settings,
        }
        self.config = EngineConfig(model="scripted", **options)
        self.device = ScriptedDevice(
            num_pages=self.config.num_pages or 0,
            page_size=self.config.page_size,
            num_slots=self.config.num_slots,
            max_model_len=LONGEST,
            block_size=SIZE,
            vocab_size=VOCAB,
            mask_token_id=7,
            mean_steps=2.5,
            # Nearly every token of an answer that may be edited is.
            edits=12,
            fault=self._fault,
            late_fault=self._late_fault,
        )
        #: the next forward has no finite logits for the first block
        self.next_logits_broken = False
        self.core = Core(self.config, self.device.open(), None, lambda: 0.0)
        self._whole_forward = self.device._lm.forward
        self.device._lm.forward = self._forward  # type: ignore[assignment]
        self.scheduler = watch_core(self.core)
        self.events = 0
        #: what the next computed step raises, before or after
        self.next_fault: Exception | None = None
        self.next_late_fault: Exception | None = None
        self.parked_until: dict[int, int] = {}
        self._packed: deque[tuple[Step, Any]] = deque()
        self._landed: deque[tuple[Step, Any]] = deque()
        self.requests = [self.submit(each) for each in asked]
        self.asked = list(asked)

    def submit(self, asked: Asked, **options: Any) -> Sequence:
        prompt, params = asked
        request = self.core.submit(Output(Request(params=params, **options)), Prepared(prompt, None))
        assert isinstance(request.cursor, BlockCursor)
        return request

    def arrive(self, asked: Asked, **options: Any) -> None:
        self.asked.append(asked)
        self.requests.append(self.submit(asked, **options))

    def take_away(self, request: Sequence) -> None:
        """Its slot and its pages, be it the eldest."""
        self.scheduler.running_out = True
        self.scheduler.queues.retract(request)
        self.scheduler.running_out = False

    def run(self, at: int = -1, action: Callable[[Course], None] | None = None) -> None:
        """To the end, with an action before event ``at``."""
        while True:
            if self.events == at:
                assert action is not None
                action(self)
            for key, until in list(self.parked_until.items()):
                if self.events >= until:
                    del self.parked_until[key]
                    self.scheduler.queues.unpark(next(each for each in self.requests if each.key == key))
            if not self._event() and not self.parked_until:
                break
            self.events += 1
            self.scheduler.check()
            assert self.events < 400, "it does not end"
        assert not self.scheduler.queues.has_unfinished
        check_idle(self.scheduler.scheduler)

    def _event(self) -> bool:
        if len(self._packed) + len(self._landed) <= (self.config.overlap_steps or 0):
            behind = [*self._landed, *self._packed]
            step = self.core.plan(behind[-1][0] if behind else None)
            if step is not None:
                self._packed.append((step, self.device.prepare(step)))
                return True
        if not self._landed and self._packed:
            step, packed = self._packed.popleft()
            try:
                self._landed.append((step, self.device.launch(packed).wait()))
            except (Injected, StepOutOfMemory) as error:
                self._landed.append((step, error))
            return True
        if self._landed:
            step, landed = self._landed.popleft()
            if isinstance(landed, Exception):
                self.core.fail(step, landed)
            else:
                self.core.resolve(step, landed)
            return True
        return False

    def verify(self, *, may_fail: bool = False) -> None:
        """Everybody has what they were to get, or the beginning of it if they were ended."""
        for request, asked, plain in zip(self.requests, self.asked, self.expected(), strict=True):
            count = len(request.output_ids)
            ended = request.output.finish_reason == "abort"
            assert not ended or may_fail, request.output.error
            assert request.output_ids == plain.ids[:count], (request, asked)
            assert request.cursor.step_map == plain.steps[:count]
            assert [each.logprob for each in request.output.logprobs] == plain.logprobs[:count]
            assert ended or count == len(plain.ids), request

    def expected(self) -> list[Plain]:
        for prompt, params in self.asked:
            key = (*prompt, params)
            if key not in _EXPECTED:
                (_EXPECTED[key],) = decode(self.device, self.device.script, [(prompt, params)], LONGEST)
        return [_EXPECTED[*prompt, params] for prompt, params in self.asked]

    def _forward(self, *arguments: Any) -> torch.Tensor:
        logits = self._whole_forward(*arguments)
        if self.next_logits_broken and len(logits):
            self.next_logits_broken = False
            logits[:SIZE] = torch.nan
        return logits

    def _fault(self, step: Step) -> None:
        error, self.next_fault = self.next_fault, None
        if error is not None:
            raise error

    def _late_fault(self, step: Step) -> None:
        error, self.next_late_fault = self.next_late_fault, None
        if error is not None:
            raise error
