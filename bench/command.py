"""The command line that all benches share: options, the report, the JSON line and the exit status."""

from __future__ import annotations

import argparse
import importlib
import json
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Protocol, cast

from bench.report import Report, environment

__all__ = ["BENCHES", "BadOptions", "Bench", "execute", "load", "main", "parse"]

#: purpose of each bench, for the list; importing them all would take seconds
BENCHES = {
    "cpu": "this engine and others on a CPU, in turns: decode, prefill, memory",
    "gpu": "decode, an offline workload, overlap and the endpoint on a GPU; --rehearse on a CPU",
    "serving": "a load on OpenAI endpoints, in turns, or on an engine in this process",
    "scheduler": "microseconds of planning and resolving a step, without a device",
    "admission": "fifo against packing where long prompts stand before short ones",
    "deadlines": "share of deadlines met by each policy on a mixed load, and the error of slack's estimate",
    "promises": "whether accepted requests meet their targets and refused ones would have, and itl_target",
    "twin": "what the twin predicts, beside what this machine then measures",
    "overlap": "what launching steps ahead hides, on a model and on a device of fixed step time",
    "prefix": "the prefix cache with shared, growing and unrelated prompts",
    "speculation": "drafts beside plain decoding in the same engine",
    "adapters": "cost of LoRA adapters: base-only, one and many in a batch, loading beside streams",
    "weights": "replacing weights beside streams: time of the call, longest gap between tokens",
    "threads": "one LLM that several threads call: sums per second beside those of one thread, wrong ones",
    "embed": "embeddings against plain prefill, and chats beside embeddings",
    "diffusion": "a diffusion model in lock-step, first done first out, and with each further optimisation",
    "images": "chats about images on a CPU, beside transformers and llama.cpp: first tokens, the cache",
    "constraints": "grammars on a diffusion model: speed at equal tokens per round, rounds, the guides",
    "fanout": "tokens to many clients: events/s against a bare aiohttp writer, the loop, the device",
    "parallel": "several engines as one: policies, cost of the dispatcher, failover",
    "sessions": "held, forked, saved and moved KV: restarts, turns, files, roles, llama.cpp's slots",
    "steering": "processors of one row, forks, best of 16, beams beside vLLM's, each beside what is asked",
    "attack": "hostile requests to a server: how much longer others wait, memory kept, replicas lost",
}
_FOLDERS = ("cpu", "gpu", "speculation", "fanout", "parallel", "sessions", "steering", "attack")
_MODULES = {name: f"bench.{name}.command" for name in _FOLDERS}
#: options that are not reported: places on this machine, and secrets
_HIDDEN = frozenset({"json", "commit", "key", "place"})


class BadOptions(ValueError):
    """Options that argparse accepts and a bench does not; reported as argparse reports its own."""


class Bench(Protocol):
    """The module of a bench. Its docstring is the description in ``--help``."""

    __doc__: str | None

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the options of this bench; ``--json`` and ``--commit`` are there already."""

    def run(self, options: argparse.Namespace, report: Report) -> None:
        """Measure, and tell the report row by row. Raises BadOptions before anything is measured."""


def load(name: str) -> Bench:
    """The bench of that name, one of :data:`BENCHES`."""
    return cast(Bench, importlib.import_module(_MODULES.get(name, f"bench.{name}")))


def parse(name: str, arguments: Sequence[str]) -> argparse.Namespace:
    """Options of a bench; argparse ends the process for ``--help`` and for arguments that are wrong."""
    return _parser(name, load(name)).parse_args(arguments)


def execute(name: str, options: argparse.Namespace) -> Report:
    """Run a bench and write its JSON line, which an interrupted or failed run has, too.

    Raises BadOptions, KeyboardInterrupt and SystemExit; other exceptions are errors of the report.
    """
    report = Report()
    try:
        with _sigterm_unwinds():
            load(name).run(options, report)
    except BadOptions:
        raise
    except Exception:
        report.error(traceback.format_exc())
    except BaseException as error:
        report.error(f"interrupted: {error!r}")
        _write(name, options, report)
        raise
    _write(name, options, report)
    return report


def main(arguments: Sequence[str]) -> int:
    """Returns 0, 1 if the report has errors, 2 if there is no bench of that name."""
    name, *rest = arguments or [""]
    if name not in BENCHES:
        print("usage: python -m bench NAME [options]\n")
        for known, purpose in BENCHES.items():
            print(f"  {known:12s} {purpose}")
        return 0 if name in ("-h", "--help") else 2
    parser = _parser(name, load(name))
    try:
        report = execute(name, parser.parse_args(rest))
    except BadOptions as error:
        parser.error(str(error))
    return 1 if report.failed else 0


def _parser(name: str, bench: Bench) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m bench {name}",
        description=bench.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    bench.add_arguments(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the JSON line to this file")
    parser.add_argument("--commit", help="recorded where there is no git to ask")
    return parser


def _write(name: str, options: argparse.Namespace, report: Report) -> None:
    """Print the JSON line, and append it to a file if one is given."""
    where = report.environment or environment()
    if options.commit:
        where = {**where, "commit": options.commit}
    result = {"bench": name, **report.as_dict(), "options": _settings(options), "environment": where}
    line = json.dumps(result, separators=(",", ":"))
    print(line)
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        with options.json.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    """The options for the report, with the names of paths only."""

    def plain(value: Any) -> Any:
        if isinstance(value, Path) or (isinstance(value, str) and Path(value).is_absolute()):
            return Path(value).name
        return value

    return {key: plain(value) for key, value in vars(options).items() if key not in _HIDDEN}


@contextmanager
def _sigterm_unwinds() -> Iterator[None]:
    """Raise SystemExit on SIGTERM, so that a bench ends its processes as after Ctrl-C."""

    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
