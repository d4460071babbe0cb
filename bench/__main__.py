"""``python -m bench NAME [options]``; ``python -m bench`` lists the names."""

from __future__ import annotations

import importlib
import sys

BENCHES = {
    "serving": "a load on any OpenAI endpoint or on an engine in this process",
    "scheduler": "microseconds of planning and resolving a step, without a device",
    "admission": "fifo against packing where long prompts stand before short ones",
    "overlap": "how much of the time the device works, by window and launch mode",
    "prefix": "the prefix cache with shared, growing and unrelated prompts",
    "diffusion": "a diffusion model in lock-step, first done first out, and with all that comes on top",
    "cpu": "this engine and others on a CPU, in turns: decode, prefill, memory; --serve for their servers",
    "peers": "installs those others, and makes the checkpoint as each of them reads it",
    "gpu": "kernels, models, a peer and the endpoint on a GPU; --rehearse on a CPU",
}


def main() -> int:
    if len(sys.argv) < 2 or sys.argv[1] not in BENCHES:
        print("usage: python -m bench NAME [options]\n")
        for name, purpose in BENCHES.items():
            print(f"  {name:12s} {purpose}")
        return 2
    name = sys.argv.pop(1)
    sys.argv[0] = f"bench {name}"
    status: int = importlib.import_module(f"bench.{name}").main()
    return status


if __name__ == "__main__":
    sys.exit(main())
