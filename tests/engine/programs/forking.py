"""A task queue with workers as Celery's prefork pool has them: a parent that has computed starts workers,
whose first task loads a model of their own. Prints what they answer, and what the parent's engines say."""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from aioinfer import LLM, AioInferError, Engine, EngineConfig, SamplingParams

#: two threads: those of OpenMP would not be there in a child
CONFIG = EngineConfig(threads=2)
#: calls of the parent's engines; none in a worker that was not forked
EARLY: list[Callable[[], Any]] = []


def text_of(llm: LLM, right: int) -> str:
    chat = [{"role": "user", "content": f"What is 11 + {right}?"}]
    params = SamplingParams(temperature=0, max_tokens=16)
    (result,) = llm.generate([chat], params, progress=False)
    return result.text


@functools.cache
def own() -> LLM:
    return LLM(CONFIG)


def task(right: int) -> tuple[int, str, list[str]]:
    """The worker, its answer, and what calls of the parent's engines raise here."""
    said = []
    for call in EARLY:
        try:
            call()
        except AioInferError as error:
            said.append(str(error))
    return os.getpid(), text_of(own(), right), said


def main(method: str) -> None:
    with LLM(CONFIG) as llm, Engine.in_thread(CONFIG) as engine:
        stream = engine.generate("Once upon a time")
        EARLY.extend([lambda: text_of(llm, 12), lambda: engine.generate("Once").result(), stream.result])
        before = text_of(llm, 30)
        with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context(method)) as pool:
            found = list(pool.map(task, range(20, 28)))
        print(json.dumps({"before": before, "found": found, "after": text_of(llm, 31)}))


if __name__ == "__main__":
    main(sys.argv[1])
