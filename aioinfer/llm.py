"""LLM: the synchronous engine, for scripts and for study. Same scheduler, same steps, no event loop."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from aioinfer.config import EngineConfig
from aioinfer.errors import EngineClosed
from aioinfer.execution.device import Device, Flight, StepOutOfMemory, StepResult
from aioinfer.loop import factory
from aioinfer.loop.core import Core
from aioinfer.loop.options import Prompt, PromptSource, RequestOptions
from aioinfer.outputs import Result
from aioinfer.params import SamplingParams
from aioinfer.scheduling.step import Step

if TYPE_CHECKING:
    from aioinfer.text.tokenizer import Tokenizer

__all__ = ["LLM"]


class LLM:
    """A language model that is called, not awaited.

    ::

        with LLM(EngineConfig(model="/models/Qwen3-0.6B")) as llm:
            for result in llm.generate(["Hello", "Once upon a time"]):
                print(result.text)

    :meth:`add_request`, :meth:`step` and :meth:`has_unfinished` are the loop in its parts: each ``step``
    computes one forward pass of everything that can run and returns the requests that finished with it.
    Everything happens on the calling thread.
    """

    def __init__(
        self,
        config: EngineConfig | None = None,
        *,
        device: Callable[[EngineConfig], Device] = factory.make_device,
        tokenizer: Callable[[EngineConfig], Tokenizer | None] = factory.load_tokenizer,
    ) -> None:
        """Load the model. Raises ConfigError, OutOfMemory. ``device`` and ``tokenizer`` replace the real
        ones in tests."""
        self.config = config if config is not None else EngineConfig()
        self._device: Device | None = device(self.config)
        loaded = tokenizer(self.config)
        info = factory.with_end_tokens(self._device.open(), loaded)
        self.default_params = factory.default_params(self.config, info)
        decided = factory.decide(self.config, info.block_size, asynchronous=not self._device.synchronous)
        self._overlap_steps = decided.overlap_steps or 0
        self._core = Core(decided, info, loaded, time.monotonic)
        self._flights: deque[tuple[Step, Flight]] = deque()
        self._finished: dict[int, Result] = {}

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._core.tokenizer

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str = "",
        routing_key: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> int:
        """Queue a prompt; returns the key of its result in :meth:`step`. Raises InvalidRequest, Rejected.

        ``priority``, ``cache_salt`` and ``routing_key`` as for :meth:`aioinfer.Engine.generate`.
        """
        self._opened()
        options = RequestOptions(priority=priority, cache_salt=cache_salt, routing_key=routing_key)
        source = PromptSource(prompt, self._core.tokenizer, chat_template_kwargs)
        params = params or self.default_params
        request = self._core.new_request(params, options)
        self._core.submit(request, self._core.prepare(source, params))
        return request.key

    def has_unfinished(self) -> bool:
        """A request has not been returned by :meth:`step` yet."""
        return self._core.scheduler.queues.has_unfinished or bool(self._flights or self._finished)

    def step(self) -> dict[int, Result]:
        """Compute one step and return the requests that finished with it, by key.

        As in the engine, ``overlap_steps`` steps are launched ahead of the one whose result is read. Raises
        what the step raised, after ending its requests. A step that ran out of memory is repeated as smaller
        ones; OutOfMemory is raised for a request that was in two of these without a token in between.
        """
        device = self._opened()
        while len(self._flights) <= self._overlap_steps:
            step = self._core.plan(self._flights[-1][0] if self._flights else None)
            if step is not None:
                self._flights.append((step, _launch(device, step)))
            for request in self._core.take_ended():
                assert request.error is not None
                raise request.error
            if step is None:
                break
        if not self._flights:
            finished, self._finished = self._finished, {}
            return finished
        step, flight = self._flights.popleft()
        try:
            result = flight.wait()
        except StepOutOfMemory as error:
            updated = self._core.fail(step, error)
        except Exception as error:
            self._core.fail(step, error)
            raise
        else:
            updated = self._core.resolve(step, result)
        ended = [request for request in updated if request.finished]
        self._finished.update((request.key, request.result()) for request in ended if not request.error)
        for request in ended:
            if request.error is not None:
                # Other requests that finished in this step are returned by the next one.
                raise request.error
        finished, self._finished = self._finished, {}
        return finished

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
    ) -> list[Result]:
        """Generate for all prompts; results in their order.

        ``params`` is one for all or one for each. ``progress`` shows a bar; by default only on a
        terminal.
        """
        each = list(params) if isinstance(params, Sequence) else [params] * len(prompts)
        if len(each) != len(prompts):
            raise ValueError(f"{len(each)} params for {len(prompts)} prompts")
        results: dict[int, Result] = {}
        keys: list[int] = []
        shown = sys.stderr.isatty() if progress is None else progress
        with _bar(len(prompts), shown) as bar:
            for prompt, chosen in zip(prompts, each, strict=True):
                keys.append(self.add_request(prompt, chosen))
            while len(results) < len(prompts):
                finished = self.step()
                results.update(finished)
                bar.update(len(finished))
        return [results[key] for key in keys]

    def close(self) -> None:
        """Free the model's memory. Idempotent."""
        if self._device is not None:
            self._device.close()
            self._device = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _opened(self) -> Device:
        if self._device is None:
            raise EngineClosed("the LLM is closed")
        return self._device


def _launch(device: Device, step: Step) -> Flight:
    try:
        return device.launch(device.prepare(step))
    except Exception as error:
        return _Failed(error)


class _Failed:
    """The flight of a step whose launch raised; ``wait`` raises the error."""

    __slots__ = ("_error",)

    def __init__(self, error: Exception) -> None:
        self._error = error

    def wait(self) -> StepResult:
        raise self._error


def _bar(total: int, shown: bool) -> Any:
    from tqdm import tqdm

    return tqdm(total=total, unit="request", disable=not shown)
