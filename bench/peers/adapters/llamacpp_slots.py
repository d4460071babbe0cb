"""llama.cpp: a sequence that is saved to a file, or restored from one, and goes on greedily.

These are the functions behind the slots of its server (``llama_state_seq_save_file``). Arguments are a JSON
object on stdin, the answer is the last line of stdout.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

from bench.peers.adapters.llamacpp_batches import LlamaCpp
from bench.peers.adapters.protocol import Settings


class Slot(LlamaCpp):
    """One sequence."""

    def prefill(self, prompt: list[int]) -> float:
        """Seconds."""
        start = time.perf_counter()
        self._decode([prompt], [0])
        return time.perf_counter() - start

    def save(self, path: str, ids: list[int]) -> float:
        """Seconds. Raises RuntimeError."""
        import llama_cpp

        known = (llama_cpp.llama_token * len(ids))(*ids)
        start = time.perf_counter()
        size = llama_cpp.llama_state_seq_save_file(self._context, path.encode(), 0, known, len(ids))
        seconds = time.perf_counter() - start
        if not size:
            raise RuntimeError("llama_state_seq_save_file")
        return seconds

    def restore(self, path: str, ids: list[int]) -> float:
        """Seconds. Raises RuntimeError."""
        import ctypes

        import llama_cpp

        known, count = (llama_cpp.llama_token * len(ids))(), ctypes.c_size_t()
        start = time.perf_counter()
        size = llama_cpp.llama_state_seq_load_file(
            self._context, path.encode(), 0, known, len(ids), ctypes.byref(count)
        )
        seconds = time.perf_counter() - start
        if not size or list(known[: count.value]) != ids:
            raise RuntimeError("llama_state_seq_load_file")
        return seconds

    def go_on(self, start: int, more: list[int], output: int) -> tuple[float, list[int], list[float]]:
        """Seconds to the first token, ids, and the logit of each."""
        import llama_cpp
        import numpy

        ids: list[int] = []
        logits: list[float] = []
        begin, first = time.perf_counter(), 0.0
        step = more
        for _ in range(output):
            (new,) = self._decode([step], [start])
            first = first or time.perf_counter() - begin
            row = numpy.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(self._context, -1), (self._vocab,))
            ids.append(new)
            logits.append(float(row[new]))
            start, step = start + len(step), [new]
        return first, ids, logits


def main(arguments: dict[str, Any]) -> dict[str, Any]:
    prompt, more, path = arguments["prompt"], arguments["more"], arguments["path"]
    slot = Slot()
    longest = -(-(len(prompt) + len(more) + arguments["output"]) // 256) * 256
    slot.load(Settings(arguments["model"], arguments["threads"], 0.0, longest, 1))
    slot.prefill(more)  # to warm up
    slot.clear()
    if arguments["restore"]:
        seconds = slot.restore(path, prompt)
        ttft, ids, logits = slot.go_on(len(prompt), more, arguments["output"])
    else:
        ttft = slot.prefill(prompt)
        seconds = slot.save(path, prompt)
        _, ids, logits = slot.go_on(len(prompt), more, arguments["output"])
    size = os.stat(path).st_size
    return {"seconds": seconds, "ttft": ttft, "bytes": size, "ids": ids, "logprobs": logits}


if __name__ == "__main__":
    print("\n" + json.dumps(main(json.load(sys.stdin))), flush=True)
    os._exit(0)  # finalizers of libraries have kept processes from ending
