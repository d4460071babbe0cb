"""``python -m bench cpu``: this engine and its peers on a CPU, side by side in one run.

    python -m bench peers install openvino vllm     once
    python -m bench cpu                             decode at 1, 8 and 32 at a time, one long prefill
    python -m bench cpu --peers aioinfer --rounds 1 --set aioinfer.window=0
    python -m bench cpu --serve                     through the servers: staggered arrivals, TTFT and ITL
    python -m bench cpu --busy                      this engine's forward beside a loop that has other work
    python -m bench cpu --accuracy                  8-bit weights beside bfloat16 and float32

Every engine computes the same random prompts (never the same twice, no prefix caches) with the same number
of threads and the same KV budget, greedily, whatever the end token is. A cell is run twice a round, for 1
and for N new tokens: with T1 and TN seconds, C sequences decode C * (N - 1) / (TN - T1) tokens/s, end to end
it is C * N / TN, and prefill C * prompt / T1. The decode rate is what a disturbed T1 moves most: look at the
end-to-end rate, too.

Engines take turns, cell by cell, so that whatever else goes on meets all of them; who begins changes from
round to round. All are loaded and warm from the start, and whoever is not measured is stopped (SIGSTOP),
with all its processes: an idle engine costs no CPU then, whatever its threads wait on, and loading is not
repeated. Where memory does not suffice for that, each is loaded for its turn and ended behind it. A peer
that is not installed is left out; one that fails or hangs is ended, the others go on, and the status is 1.
A sample during which others used more than --noise of a core is taken again; of --attempts that are all
disturbed the least disturbed counts.
Memory is the resident set summed over an engine's processes, ten times a second; private is without mapped
files. Some touch their whole KV budget at the start, others take of it what they need.
"""

from bench.cpu.command import main

__all__ = ["main"]
