"""``python -m bench gpu``: kernels, models, peers and the endpoint on a GPU, in minutes.

    python -m bench gpu --rehearse          tiny shapes on the CPU: does the bench itself work?
    python -m bench gpu --rehearse --device cuda    and does anything break on the device?
    python -m bench gpu                     everything on Qwen3-0.6B, less than six minutes
    python -m bench gpu --quick             less than three
    python -m bench gpu offline overlap     some of it
    python -m bench gpu model-8b model-14b --set attention_backend=sdpa

The weights are random, so no model has to be there. Each part runs in a process of its own with a bound on
its time, prints a table and is a section of the JSON line; one that fails stops no other. The exit status
is 1 if any has failed.
"""

from __future__ import annotations

import argparse
import os
import time

from aioinfer.config import EngineConfig, parse_setting
from aioinfer.errors import AioInferError
from bench.command import BadOptions
from bench.gpu.isolation import Isolated
from bench.gpu.plan import FULL, PARTS, QUICK, REHEARSAL, Part, Plan
from bench.report import Report

__all__ = ["add_arguments", "run"]

#: seconds for every part of a rehearsal; a laptop's cores may be busy
_REHEARSAL_BOUND = 60.0
#: left out unless named: they load or tell more than a first look needs
_OPTIONAL = ("model-8b", "model-14b", "launching")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    listed = "; ".join(f"{name}: {part.purpose}" for name, part in PARTS.items())
    parser.add_argument("names", nargs="*", metavar="NAME", help=listed)
    parser.add_argument("--quick", action="store_true", help="fewer cases, half the time")
    parser.add_argument("--rehearse", action="store_true", help="tiny shapes")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda; the CPU for a rehearsal")
    parser.add_argument(
        "--shape", default="0.6b", choices=["0.6b", "8b", "14b"], help="of all but the model-s"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the engine, repeatable"
    )
    parser.add_argument("--seconds", type=float, help="instead of each part's own bound")


def run(options: argparse.Namespace, report: Report) -> None:
    """A section per part."""
    names = options.names or [name for name in PARTS if name not in _OPTIONAL]
    if unknown := [name for name in names if name not in PARTS]:
        raise BadOptions(f"no part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    plan = make_plan(options)
    if plan.device == "cpu":
        # Before triton is imported: its kernels then run in its interpreter.
        os.environ["TRITON_INTERPRET"] = "1"
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    jobs = [(name, PARTS[name], bound(options, PARTS[name])) for name in names]
    report.fact("at_most_s", sum(seconds for _, _, seconds in jobs))
    report.add(size="rehearsal" if options.rehearse else "quick" if options.quick else "full")
    run_all(jobs, plan, report)


def parse_settings(texts: list[str]) -> dict[str, str]:
    """The engine's settings of ``--set``. Raises BadOptions now, and not only after each part has started."""
    try:
        settings = dict(text.split("=", 1) for text in texts)
        EngineConfig(**{key: parse_setting(EngineConfig, key, text) for key, text in settings.items()})
    except (ValueError, KeyError, AioInferError) as error:
        raise BadOptions(f"--set: {error}") from None
    return settings


def make_plan(options: argparse.Namespace) -> Plan:
    settings = parse_settings(options.set)
    if options.rehearse:
        return Plan(REHEARSAL, options.device or "cpu", "float32", "tiny", settings, rehearsal=True)
    size = QUICK if options.quick else FULL
    return Plan(size, options.device or "cuda", "bfloat16", options.shape, settings)


def bound(options: argparse.Namespace, part: Part) -> float:
    """Seconds for one part."""
    if options.seconds is not None:
        return float(options.seconds)
    if options.rehearse:
        return _REHEARSAL_BOUND
    return part.quick if options.quick else part.full


def run_all(jobs: list[tuple[str, Part, float]], plan: Plan, report: Report) -> None:
    """Run the parts in turn, a section of the report each."""
    ahead = [Isolated(jobs[0][1], plan)]
    try:
        for at, (name, part, seconds) in enumerate(jobs):
            current = ahead.pop()
            if at + 1 < len(jobs):
                ahead.append(Isolated(jobs[at + 1][1], plan))
            section = report.section(name, f"{name}: {part.purpose} (at most {seconds:.0f} s)")
            listen(current, seconds, section)
            # A part's process has looked at the device; this one must not.
            report.environment = report.environment or section.environment
    finally:
        for process in ahead:
            process.end()


def listen(process: Isolated, seconds: float, report: Report) -> None:
    """Pass on everything that a part tells, and the seconds from its go to its end."""
    start = time.monotonic()
    for kind, value in process.run(seconds):
        if kind == "environment":
            report.environment = value
            start = time.monotonic()
        elif kind == "fact":
            report.fact(*value)
        elif kind == "row":
            report.row(**value)
        elif kind == "note":
            report.note(value)
        else:
            report.error(value)
    report.fact("seconds", time.monotonic() - start)
