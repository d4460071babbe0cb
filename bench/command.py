"""The command line that all benches share: options, the report, the JSON line and the exit status."""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Protocol, cast

from bench.report import Report, environment, write_line

__all__ = ["BENCHES", "BadOptions", "Bench", "execute", "load", "main", "parse"]

#: what each bench measures, for the list; importing them all would take seconds
BENCHES = {
    "serving": "a load on any OpenAI endpoint or on an engine in this process",
    "scheduler": "microseconds of planning and resolving a step, without a device",
    "admission": "fifo against packing where long prompts stand before short ones",
    "overlap": "how much of the time the device works, by overlap and launch mode",
    "prefix": "the prefix cache with shared, growing and unrelated prompts",
    "embed": "embeddings against plain prefill, and chats beside embeddings",
    "diffusion": "a diffusion model in lock-step, first done first out, and with each further optimisation",
    "kernels": "linear layers on a CPU: formats of weights, shapes, numbers of rows",
    "families": "own code against transformers' code on a CPU, family by family",
    "adapters": "what LoRA adapters cost: base-only, one and many in a batch, loading beside streams",
    "speculation": "what drafts bring and cost, beside plain decoding in the same engine",
    "cpu": "this engine and others on a CPU, in turns: decode, prefill, memory; --serve for their servers",
    "parallel": "several engines that look like one: policies, what the dispatcher costs, failover",
    "fanout": "tokens to many clients: events/s against a bare aiohttp writer, the loop, the device, memory",
    "attack": "hostile requests: how long ordinary clients wait beside them, and what is left behind",
    "soak": "many clients of twelve kinds for minutes: wrong answers, memory, what is left",
    "gpu": "kernels, models, a peer and the endpoint on a GPU; --rehearse on a CPU",
}
#: options that are not reported: where things lie on this machine, and secrets
_HIDDEN = frozenset({"json", "commit", "key", "lock", "place"})


class BadOptions(ValueError):
    """Options that argparse accepts and a bench does not; reported as argparse reports its own."""


class Bench(Protocol):
    """The module ``bench.NAME.command``. Its docstring is the description in ``--help``."""

    __doc__: str | None

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Options of this bench; ``--json`` and ``--commit`` are there already."""

    def run(self, options: argparse.Namespace, report: Report) -> None:
        """Measure, and tell the report row by row. Raises BadOptions before anything is measured."""


def load(name: str) -> Bench:
    """The bench of that name, one of :data:`BENCHES`."""
    return cast(Bench, importlib.import_module(f"bench.{name}.command"))


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
    where = report.environment or environment()
    if options.commit:
        where = {**where, "commit": options.commit}
    write_line(
        {"bench": name, **report.as_dict(), "options": _settings(options), "environment": where}, options.json
    )


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    """The options for the report; of paths only the names."""

    def plain(value: Any) -> Any:
        if isinstance(value, Path) or (isinstance(value, str) and Path(value).is_absolute()):
            return Path(value).name
        return value

    return {key: plain(value) for key, value in vars(options).items() if key not in _HIDDEN}


@contextmanager
def _sigterm_unwinds() -> Iterator[None]:
    """SIGTERM raises SystemExit, so that a bench ends its processes as it does after Ctrl-C."""

    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
