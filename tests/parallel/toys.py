"""Plain toy engines in virtual time, and how to run a test there."""

from __future__ import annotations

import asyncio
import functools
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, ParamSpec

from aioinfer import SamplingParams
from aioinfer.config import EngineConfig
from aioinfer.engine import Engine
from aioinfer.execution.device import DeviceLost
from aioinfer.parallel import Dispatcher
from aioinfer.parallel.record import Record
from aioinfer.scheduling.step import Step
from aioinfer.speculation.drafter import Drafter
from aioinfer.stream import Stream
from aioinfer.testing import TimedLauncher, VirtualLoop
from tests.toys import ToyDevice, ToyTokenizer, toy_generate

__all__ = [
    "ENDLESS",
    "PARAMS",
    "Toy",
    "attempt_of",
    "end",
    "expected",
    "lose_engine",
    "placed",
    "prompt",
    "record",
    "sent",
    "toys",
    "turn",
    "virtual",
]

_P = ParamSpec("_P")

PARAMS = SamplingParams(max_tokens=8, ignore_eos=True, temperature=0)
ENDLESS = SamplingParams(max_tokens=1000, ignore_eos=True, temperature=0)

#: seconds of a step, and of each of its tokens
STEP, PER_TOKEN = 0.01, 1e-5


def virtual(test: Callable[_P, Coroutine[Any, Any, None]]) -> Callable[_P, None]:
    """The test in virtual time: one that could never go on fails."""

    @functools.wraps(test)
    def run(*arguments: _P.args, **options: _P.kwargs) -> None:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(test(*arguments, **options))

    return run


class Toy(Engine):
    """An engine on a toy device in virtual time, which can hang and be lost."""

    def __init__(
        self,
        *,
        longest: int = 4096,
        vocab_size: int = 64,
        fault: Callable[[Step], None] | None = None,
        tokenizer: Callable[[], Any] | None = None,
        seconds: Callable[[Step], float] = lambda step: STEP + PER_TOKEN * step.num_tokens,
        drafter: Drafter | None = None,
        **settings: Any,
    ) -> None:
        """``seconds``: those that a step takes."""
        defaults = {
            "model": "toy",
            "page_size": 4,
            "num_pages": 16_384,
            "max_running_requests": 64,
            "max_step_tokens": 512,
            "chunk_size": 512,
        }
        config = EngineConfig(**{**defaults, **settings})
        self.launches = 0

        def launcher(_: EngineConfig) -> TimedLauncher:
            self.launches += 1
            self.device = ToyDevice(
                num_pages=config.num_pages or 0,
                page_size=config.page_size,
                num_slots=config.num_slots,
                vocab_size=vocab_size,
                max_model_len=longest,
                fault=fault,
                max_adapters=config.adapter_slots,
            )
            self.launcher = TimedLauncher(self.device, seconds)
            return self.launcher

        make = tokenizer or functools.partial(ToyTokenizer, vocab_size)
        super().__init__(config, launcher=launcher, tokenizer=lambda _: make(), drafter=drafter)

    def lose(self, cause: Exception | None = None) -> None:
        """Its device is gone."""
        lose_engine(self, cause)


def lose_engine(engine: Engine, cause: Exception | None = None) -> None:
    """Its device does not answer any more."""
    assert engine._runtime is not None
    engine._runtime.lost(cause or DeviceLost("the device is lost"))


def toys(count: int, **settings: Any) -> list[Toy]:
    return [Toy(**settings) for _ in range(count)]


def prompt(seed: int, length: int = 16, vocab_size: int = 64) -> list[int]:
    return random.Random(seed).choices(range(vocab_size), k=length)


def expected(prompt: Sequence[int], params: SamplingParams = PARAMS, adapter: int = 0) -> list[int]:
    """``adapter``: its key."""
    return toy_generate(prompt, params, adapter=adapter)


def record(stream: Stream) -> Record:
    owner: Any = stream._owner
    found = owner.open[stream.cell]
    assert isinstance(found, Record)
    return found


def attempt_of(stream: Stream) -> Any:
    """The attempt that computes a stream now, or None."""
    owner: Any = stream._owner
    return owner.attempts.get(record(stream))


def sent(dispatcher: Dispatcher, streams: Sequence[Stream]) -> Counter[str]:
    """How many of these streams are on each replica; without a replica under ""."""
    names = [attempt.replica.name if (attempt := attempt_of(each)) else "" for each in streams]
    return Counter({replica.name: 0 for replica in dispatcher._replicas}) + Counter(names)


async def turn() -> None:
    """The dispatcher has sent what it can."""
    for _ in range(3):
        await asyncio.sleep(0)


async def placed(dispatcher: Dispatcher, streams: Sequence[Stream]) -> Counter[str]:
    """Where the streams are, once all of them are somewhere."""
    while (found := sent(dispatcher, streams))[""]:
        await turn()
    return found


async def end(streams: Sequence[Stream]) -> None:
    for stream in streams:
        stream.close()
    await asyncio.sleep(10 * STEP)
