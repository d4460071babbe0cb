"""A peer without a library: ``python tests/bench/fake_peer.py MODE``, where the mode says what goes wrong.

Continues a prompt by counting from its sum.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from bench.peers.adapters.protocol import Settings, serve

#: of the load request, as far as it matters
SETTINGS: dict[str, Any] = {"model": "none", "threads": 2, "kv_gib": 1.0, "max_len": 64, "max_batch": 4}
MODE = sys.argv[1] if __name__ == "__main__" else ""


def command_of(mode: str) -> list[str]:
    """The command that starts it."""
    return [sys.executable, __file__, mode]


class FakePeer:
    def __init__(self) -> None:
        self._known: set[tuple[int, ...]] = set()

    def load(self, settings: Settings) -> dict[str, Any]:
        if MODE == "prints":
            print("loading the model: 100 %")
            os.write(1, b'{"id": 1, "ok": {"seconds": 0}}\n')
            subprocess.run(["echo", "printed by a child"], check=True)
        if MODE == "refuses to load":
            raise MemoryError("too large")
        if MODE == "family":
            # A child in a session of its own, which only its parent knows of.
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        return {"threads": settings.threads, "options": settings.options}

    def run(self, prompts: Sequence[list[int]], new_tokens: int) -> list[list[int]]:
        if MODE == "dies" and new_tokens > 4:
            print("no memory left", file=sys.stderr)
            os._exit(3)
        if MODE == "hangs" and new_tokens > 4:
            time.sleep(600)
        if MODE == "raises" and len(prompts) > 1:
            raise RuntimeError("one at a time, please")
        if MODE == "stops early":
            new_tokens -= 1
        for prompt in map(tuple, prompts):
            if prompt in self._known:
                raise ValueError("the same prompt twice measures a cache")
            self._known.add(prompt)
        sums = [sum(prompt) + (MODE == "differs") for prompt in prompts]
        return [[(begin + at) % 50 for at in range(new_tokens)] for begin in sums]


if __name__ == "__main__":
    if MODE == "rubbish":
        # Before stdout is taken over: not JSON, JSON of another kind, and answers to other requests.
        sys.stdout.write('warning: {\n[1]\nnull\n{"id": 7, "ok": {}}\n{"id": 1, "ok": 3}\n\xff\n')
    serve(FakePeer)
