"""The adapters' end of the conversation: JSON lines over stdin and stdout, with the standard library alone.

A request is ``{"id": 1, "do": "load" | "run" | "quit", ...}``; its answer is ``{"id": 1, "ok": {...}}`` or
``{"id": 1, "error": "..."}``. Libraries print to stdout, so stdout becomes stderr before any is imported and
answers go to what stdout was; nor do their child processes get the requests' stdin.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Protocol

__all__ = ["Adapter", "Settings", "serve"]


@dataclass(frozen=True)
class Settings:
    """Settings that are equal for all engines."""

    #: the checkpoint in the form that the library reads: a directory or a file
    model: str
    threads: int
    #: budget of the KV cache in GiB
    kv_gib: float
    #: longest prompt plus output in tokens
    max_len: int
    #: most sequences at a time
    max_batch: int
    #: this engine's own settings, by the names that its library has for them
    options: dict[str, Any] = field(default_factory=dict)


class Adapter(Protocol):
    """A library with two functions."""

    def load(self, settings: Settings) -> dict[str, Any]:
        """Get ready; returns facts for the report (versions, precisions)."""

    def run(self, prompts: Sequence[list[int]], new_tokens: int) -> list[list[int]]:
        """Greedy continuations of exactly ``new_tokens`` tokens each; this call is timed.

        No prompt may be cached for the next run.
        """


def serve(make: Callable[[], Adapter]) -> None:
    """Answer requests until "quit" or the end of stdin. An exception is the answer to its request."""
    requests, answers = _take_over()
    adapter: Adapter | None = None
    for line in requests:
        request = json.loads(line)
        try:
            if request["do"] == "load":
                adapter = make()
                start = time.perf_counter()
                facts = adapter.load(Settings(**request["settings"]))
                answer = {"seconds": time.perf_counter() - start, "facts": facts}
            elif request["do"] == "run":
                assert adapter is not None, "nothing is loaded"
                answer = _run(adapter, request["prompts"], request["new_tokens"])
            elif request["do"] == "quit":
                answer = {}
            else:
                raise ValueError(f"cannot {request['do']!r}")
            told = {"id": request["id"], "ok": answer}
        except Exception as error:
            traceback.print_exc()
            told = {"id": request["id"], "error": f"{type(error).__name__}: {error}"[:2000]}
        answers.write(json.dumps(told).encode() + b"\n")
        answers.flush()
        if request["do"] == "quit":
            break
    # Threads and finalizers of libraries have kept more than one process from ending.
    sys.stderr.flush()
    os._exit(0)


def _run(adapter: Adapter, prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
    gc.collect()
    start = time.perf_counter()
    tokens = adapter.run(prompts, new_tokens)
    seconds = time.perf_counter() - start
    counts = [len(ids) for ids in tokens]
    if counts != [new_tokens] * len(prompts):
        raise ArithmeticError(f"{sum(counts)} tokens came, {new_tokens * len(prompts)} were asked for")
    return {"seconds": seconds, "tokens": tokens}


def _take_over() -> tuple[BinaryIO, BinaryIO]:
    """Requests and answers, on descriptors that no child process inherits."""
    sys.stdout.flush()
    requests = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return requests, answers
