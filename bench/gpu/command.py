"""``python -m bench gpu``: a model, an offline workload, overlap and the endpoint on a GPU, in minutes.

    python -m bench gpu --rehearse          tiny shapes on the CPU: does the bench itself work?
    python -m bench gpu --rehearse --device cuda    and does anything break on the device?
    python -m bench gpu                     everything on Qwen3-0.6B, about six minutes
    python -m bench gpu model --shape 8b --set attention_backend=sdpa

The weights are random, so no model has to be there. Each part runs in a process of its own with a limit on
its time, because a fault leaves a CUDA context unusable and a kernel that hangs ends with its process only;
it prints a table and is a section of the JSON line. The exit status is 1 if any has failed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import multiprocessing
import os
import signal
import sys
import tempfile
from pathlib import Path

from aioinfer.config import EngineConfig, parse_setting
from aioinfer.errors import AioInferError
from bench.command import BadOptions
from bench.gpu.plan import FULL, PARTS, REHEARSAL, Plan
from bench.report import Report

__all__ = ["add_arguments", "run", "run_part"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    listed = "; ".join(f"{name}: {purpose}" for name, (purpose, _) in PARTS.items())
    parser.add_argument("names", nargs="*", metavar="NAME", help=listed)
    parser.add_argument("--rehearse", action="store_true", help="tiny shapes")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda; the CPU for a rehearsal")
    parser.add_argument("--shape", default="0.6b", choices=["0.6b", "8b", "14b"])
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the engine, repeatable"
    )
    parser.add_argument("--seconds", type=float, help="limit of each part")


def run(options: argparse.Namespace, report: Report) -> None:
    """A section per part."""
    names = options.names or list(PARTS)
    if unknown := [name for name in names if name not in PARTS]:
        raise BadOptions(f"no part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    settings = parse_settings(options.set)
    if options.rehearse:
        plan = Plan(REHEARSAL, options.device or "cpu", "float32", "tiny", settings)
    else:
        plan = Plan(FULL, options.device or "cuda", "bfloat16", options.shape, settings)
    if plan.device == "cpu":
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    for name in names:
        purpose, seconds = PARTS[name]
        section = report.section(name, f"{name}: {purpose}")
        run_part(f"bench.gpu.{name}", plan, options.seconds or seconds, section)
        # A part's process has looked at the device; this one must not.
        report.environment = report.environment or section.environment


def parse_settings(texts: list[str]) -> dict[str, str]:
    """The engine's settings of ``--set``. Raises BadOptions now, and not only after each part has started."""
    try:
        settings = dict(text.split("=", 1) for text in texts)
        EngineConfig(**{key: parse_setting(EngineConfig, key, text) for key, text in settings.items()})
    except (ValueError, KeyError, AioInferError) as error:
        raise BadOptions(f"--set: {error}") from None
    return settings


def run_part(module: str, plan: Plan, seconds: float, report: Report) -> None:
    """Run a part in a process for at most ``seconds``; the report has its rows, also if it dies."""
    with tempfile.TemporaryDirectory() as folder:
        journal = Path(folder) / "journal"
        process = multiprocessing.get_context("spawn").Process(target=_child, args=(module, plan, journal))
        process.start()
        try:
            process.join(seconds)
            late = process.is_alive()
        finally:
            if process.is_alive() and process.pid is not None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                # A process that the driver holds does not end even now; it must not hold up the others.
                process.join(5.0)
        report.replay(journal)
    if late:
        report.error(f"ended after {seconds:.0f} s")
    elif process.exitcode != 0:
        report.error(f"its process died with exit code {process.exitcode}")


def _child(module: str, plan: Plan, journal: Path) -> None:
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)
    report = Report(journal)
    with report.case(module):
        import uvloop

        report.keep_environment()
        work = importlib.import_module(module).run(plan, report)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(work)
    sys.stdout.flush()
    # Threads of a failed part must not keep its process.
    os._exit(0)
