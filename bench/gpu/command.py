"""The command: which benches run, one after the other, each isolated; what they say becomes tables."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

from aioinfer.config import EngineConfig, parse_setting
from aioinfer.errors import AioInferError
from bench.gpu.isolation import Isolated
from bench.gpu.plan import BENCHES, FULL, QUICK, REHEARSAL, Bench, Plan
from bench.gpu.report import LiveTable

__all__ = ["main"]

_RESULTS = Path(__file__).parents[1] / "results" / "gpu.jsonl"
#: seconds for every bench of a rehearsal; a laptop's cores may be busy
_REHEARSAL_BOUND = 60.0
#: left out unless named: they load more than a first look needs
_OPTIONAL = ("model-8b", "model-14b")


def main() -> int:
    options = parse()
    names = options.names or [name for name in BENCHES if name not in _OPTIONAL]
    plan = make_plan(options)
    if plan.device == "cpu":
        # Before triton is imported: its kernels then run in its interpreter.
        os.environ["TRITON_INTERPRET"] = "1"
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    jobs = [(name, BENCHES[name], bound(options, BENCHES[name])) for name in names]
    print(f"at most {sum(seconds for _, _, seconds in jobs):.0f} s and the first start", flush=True)
    failed = run_all(jobs, plan, options)
    print("failed: " + ", ".join(failed) if failed else "all went well")
    return 1 if failed else 0


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    import bench.gpu

    parser = argparse.ArgumentParser(
        description=bench.gpu.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    listed = "; ".join(f"{name}: {bench.purpose}" for name, bench in BENCHES.items())
    parser.add_argument("names", nargs="*", metavar="NAME", help=listed)
    parser.add_argument("--quick", action="store_true", help="fewer cases, half the time")
    parser.add_argument("--rehearse", action="store_true", help="tiny shapes; writes no file")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda; the CPU for a rehearsal")
    parser.add_argument(
        "--shape", default="0.6b", choices=["0.6b", "8b", "14b"], help="of all but the model-s"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the engine, repeatable"
    )
    parser.add_argument("--seconds", type=float, help="instead of each bench's own bound")
    parser.add_argument("--json", type=Path, help="append JSON lines here, not to bench/results/gpu.jsonl")
    parser.add_argument("--commit", help="recorded where there is no git to ask")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.names if name not in BENCHES]:
        parser.error(f"no bench {', '.join(unknown)}; there are {', '.join(BENCHES)}")
    try:
        options.settings = dict(text.split("=", 1) for text in options.set)
        # Here, and not only after each bench has started.
        EngineConfig(
            **{key: parse_setting(EngineConfig, key, text) for key, text in options.settings.items()}
        )
    except (ValueError, KeyError, AioInferError) as error:
        parser.error(f"--set: {error}")
    return options


def make_plan(options: argparse.Namespace) -> Plan:
    settings = options.settings
    if options.rehearse:
        return Plan(REHEARSAL, options.device or "cpu", "float32", "tiny", settings, rehearsal=True)
    size = QUICK if options.quick else FULL
    return Plan(size, options.device or "cuda", "bfloat16", options.shape, settings)


def bound(options: argparse.Namespace, bench: Bench) -> float:
    """Seconds for one bench."""
    if options.seconds is not None:
        return float(options.seconds)
    if options.rehearse:
        return _REHEARSAL_BOUND
    return bench.quick if options.quick else bench.full


def run_all(jobs: list[tuple[str, Bench, float]], plan: Plan, options: argparse.Namespace) -> list[str]:
    """Run the benches in turn; returns the names of those that failed."""
    failed = []
    ahead = [Isolated(jobs[0][1], plan)]
    try:
        for at, (name, bench, seconds) in enumerate(jobs):
            current = ahead.pop()
            if at + 1 < len(jobs):
                ahead.append(Isolated(jobs[at + 1][1], plan))
            print(f"\n== {name}: {bench.purpose} (at most {seconds:.0f} s)", flush=True)
            result = listen(current, seconds)
            print(f"{result['seconds']:.1f} s", flush=True)
            save(name, result, plan, options)
            if result["errors"]:
                failed.append(name)
    finally:
        for process in ahead:
            process.end()
    return failed


def listen(process: Isolated, seconds: float) -> dict[str, Any]:
    """Everything a bench tells, and the seconds from its go to its end."""
    result: dict[str, Any] = {"facts": {}, "rows": [], "notes": [], "errors": [], "environment": {}}
    rows = LiveTable()
    start = time.monotonic()
    for kind, value in process.run(seconds):
        if kind == "fact":
            result["facts"][value[0]] = value[1]
            print(
                f"{value[0]}: {value[1]:,.4g}" if isinstance(value[1], float) else f"{value[0]}: {value[1]}"
            )
        elif kind == "environment":
            result["environment"] = value
            start = time.monotonic()
        else:
            result[f"{kind}s"].append(value)
            if kind == "row":
                rows.print(value)
            else:
                print(f"{kind}: {value}", flush=True)
    result["seconds"] = time.monotonic() - start
    return result


def save(name: str, result: dict[str, Any], plan: Plan, options: argparse.Namespace) -> None:
    path = options.json or (None if options.rehearse else _RESULTS)
    if options.commit:
        result["environment"]["commit"] = options.commit
    size = "rehearsal" if options.rehearse else "quick" if options.quick else "full"
    line = {
        "bench": "gpu",
        "part": name,
        "size": size,
        "shape": plan.shape,
        "settings": plan.settings,
        **result,
    }
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, separators=(",", ":")) + "\n")
