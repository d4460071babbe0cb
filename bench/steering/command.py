"""``python -m bench steering``: streams that one can steer: what it brings and costs, beside what is asked.

    python -m bench steering --only off --against REVISION
    python -m bench steering --only processors
    python -m bench steering --only best_of fork
    python -m bench.peers install vllm
    python -m bench steering --only beam

``off``         without processors: the scheduler, and 32 rows, beside another checkout (``--against``)
``processors``  a plain processor of numpy, and a coroutine that sleeps for 50 ms, on one row of 32: what the
                others lose
``best_of``     the best of 16 outputs of a prompt: tokens computed, pages in use
``fork``        microseconds of a fork of a running stream
``beam``        beam search of width 10 beside vLLM's, in turns

Where two ways are compared, they take turns within the run, and a ratio is that of neighbours in time; what
is compared with the bound is the median. ``off`` and ``processors`` have all models, ``best_of`` and ``fork``
the last one, which needs room for 2,200 tokens; ``beam`` needs one that vLLM reads, too, and is ``python -m
bench cpu --peers aioinfer-beams vllm-beams`` with settings of its own.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable, Coroutine

from bench.command import BadOptions
from bench.peers.install import add_place
from bench.report import Report
from bench.steering.beam import beam
from bench.steering.beside import processors
from bench.steering.branches import best_of, fork
from bench.steering.off import off
from bench.steering.setting import DEMO, path_of

__all__ = ["add_arguments", "run"]

_Part = Callable[[argparse.Namespace, Report], Coroutine[None, None, None] | None]
_PARTS: dict[str, tuple[str, _Part]] = {
    "off": ("without processors, beside another checkout", off),
    "processors": ("a processor on one row of 32", processors),
    "best_of": ("the best of 16", best_of),
    "fork": ("forks of a running stream", fork),
    "beam": ("beam search of width 10", beam),
}
_QUICK = {
    "models": [DEMO, "tiny"], "threads": 1, "rounds": 1, "forks": 3, "fork_tokens": 64, "prompt": 64,
    "tail": 16, "prompts": [1],
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", choices=[*_PARTS], nargs="+", default=[*_PARTS])
    parser.add_argument(
        "--models", nargs="+", default=[DEMO, "0.6b"], metavar="MODEL",
        help=f"{DEMO}, shapes (0.6b, ...), model directories",
    )  # fmt: skip
    parser.add_argument("--threads", type=int, default=2, help=f"1 with {DEMO}")
    parser.add_argument(
        "--rounds", type=int, default=16, help=f"half as many with models but {DEMO}, an eighth of beams"
    )
    parser.add_argument("--against", metavar="CHECKOUT", help="of off: a directory or a revision")
    parser.add_argument("--prompt", type=int, default=2048, help="tokens, of best_of")
    parser.add_argument("--tail", type=int, default=128, help="new tokens, of best_of")
    parser.add_argument("--forks", type=int, default=300)
    parser.add_argument("--fork-tokens", type=int, default=1024, help="of prompt and output together")
    parser.add_argument("--prompts", type=int, nargs="+", default=[1, 4], help="of beam, at a time")
    parser.add_argument("--quick", action="store_true", help="small models and sizes: that it runs")
    add_place(parser)


def run(options: argparse.Namespace, report: Report) -> None:
    """A section per part."""
    import uvloop

    if options.quick:
        vars(options).update(_QUICK)
    try:
        for model in options.models:
            path_of(model, options)
    except FileNotFoundError as error:
        raise BadOptions(str(error)) from None
    for name in options.only:
        title, part = _PARTS[name]
        section = report.section(name, title)
        with section.case(name):
            work = part(options, section)
            if work is not None:
                with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                    runner.run(work)
