"""``python -m bench gpu``: kernels, models, peers and the endpoint on a GPU, in minutes.

    python -m bench gpu --rehearse          tiny shapes on the CPU: does the bench itself work?
    python -m bench gpu --rehearse --device cuda    and does anything break on the device?
    python -m bench gpu                     everything on Qwen3-0.6B, less than six minutes
    python -m bench gpu --quick             less than three
    python -m bench gpu offline windows     some of it
    python -m bench gpu model-8b model-14b --set attention=sdpa

The weights are random, so no model has to be there. Each bench runs in a process of its own with a bound on
its time, prints a table and appends a JSON line; one that fails stops no other. The exit status is 1 if
any has failed.
"""

from bench.gpu.command import main

__all__ = ["main"]
