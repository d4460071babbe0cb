"""The command line of ``python -m bench cpu``."""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from bench.cpu.cells import Cell
from bench.cpu.contest import Contest, Contestant, Limits, needed_gib
from bench.cpu.tables import print_results, settings_of, summary
from bench.peers.checkpoint import find_model, prepared
from bench.peers.command import add_place
from bench.peers.install import installed
from bench.peers.registry import PEERS, ROOT, Peer, python_of
from bench.report import environment, write_line

__all__ = ["main"]

#: who is measured unless told otherwise, as far as installed
_DEFAULT = ["aioinfer", "openvino", "vllm", "llamacpp"]
_SERVERS = ["aioinfer", "vllm"]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    from bench import cpu

    parser = argparse.ArgumentParser(
        description=cpu.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--peers", nargs="+", choices=[*PEERS], metavar="NAME",
        help=f"who is measured, the one that is compared first: {', '.join(PEERS)}",
    )  # fmt: skip
    parser.add_argument("--model", default="0.6b", help="a shape (0.6b, tiny, ...), or a model directory")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--concurrency", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--prefill-tokens", type=int, default=1024, help="0 leaves the long prefill out")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kv-gib", type=float, default=2.0, help="KV budget of every engine; whole GiB")
    parser.add_argument(
        "--set", action="append", default=[], metavar="PEER.NAME=VALUE", help="a setting of its own"
    )
    parser.add_argument(
        "--one-at-a-time", action="store_true", help="load each engine for its turn, even if all would fit"
    )
    parser.add_argument("--patience", type=float, default=300.0, help="seconds that one run may take")
    parser.add_argument("--noise", type=float, default=0.25, help="cores that others may use meanwhile")
    parser.add_argument("--attempts", type=int, default=3, help="samples taken until one is that quiet")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts and arrivals")
    parser.add_argument("--lock", type=Path, help="hold this file's lock (flock) during every turn")
    parser.add_argument("--json", type=Path, help="append the JSON line to this file")
    add_place(parser)
    parser.add_argument("--busy", action="store_true", help="this engine alone, beside a loop that is busy")
    parser.add_argument("--accuracy", action="store_true", help="what 8-bit weights cost the bundled model")
    served = parser.add_argument_group("with --serve")
    served.add_argument("--serve", action="store_true", help="measure the servers, not the engines")
    served.add_argument("--rates", type=float, nargs="+", default=[0.5, 1.0, 2.0], help="arrivals per second")
    served.add_argument(
        "--requests",
        type=int,
        default=48,
        help="requests per rate and round; with --accuracy, questions per task",
    )
    options = parser.parse_args(arguments)
    options.max_batch = max([1, *options.concurrency])
    options.peers = options.peers or (_SERVERS if options.serve else _DEFAULT)
    if options.rounds < 1 or options.attempts < 1 or options.threads < 1 or options.output_tokens < 2:
        parser.error("--rounds, --attempts and --threads must be at least 1, --output-tokens at least 2")
    try:
        options.own = own_settings(options.set)
    except ValueError as error:
        parser.error(str(error))
    return options


def own_settings(texts: list[str]) -> dict[str, dict[str, str]]:
    """Settings by peer. Raises ValueError."""
    own: dict[str, dict[str, str]] = {}
    for text in texts:
        where, equals, value = text.partition("=")
        peer, dot, name = where.partition(".")
        if not equals or not dot or peer not in PEERS:
            raise ValueError(f"--set {text}: PEER.NAME=VALUE is wanted")
        own.setdefault(peer, {})[name] = value
    return own


def available(names: list[str], place: Path) -> list[Peer]:
    """The peers that can be run; a line says which are left out."""
    found = []
    for name in dict.fromkeys(names):
        peer = PEERS[name]
        if peer.environment is not None and installed(peer.environment, place) is None:
            print(f"{name}: left out, not installed (python -m bench peers install {peer.environment})")
        else:
            found.append(peer)
    return found


def cells_of(options: argparse.Namespace) -> list[Cell]:
    cells = [Cell(count, options.prompt_tokens, options.output_tokens) for count in options.concurrency]
    return cells + ([Cell(1, options.prefill_tokens, 1)] if options.prefill_tokens else [])


def contestants(options: argparse.Namespace, peers: list[Peer], model: Path) -> list[Contestant]:
    """Those whose checkpoint could be made; a line says what was wrong with others."""
    found = []
    size = sum(file.stat().st_size for file in model.glob("*.safetensors")) / 2**30
    longest = max(options.prompt_tokens + options.output_tokens, options.prefill_tokens + 1)
    for peer in peers:
        python = python_of(peer.environment, options.place)
        log = options.place / "logs" / f"{peer.name}.log"
        settings: dict[str, Any] = {
            "threads": options.threads,
            "kv_gib": options.kv_gib,
            # Some round it up to their blocks, and refuse less than a prompt and the token behind it.
            "max_len": -(-longest // 256) * 256,
            "max_batch": options.max_batch,
            "options": {**peer.options, **options.own.get(peer.name, {})},
        }
        one = Contestant(
            peer.name, [str(python), "-m", f"bench.peers.adapters.{peer.adapter}"], ROOT, log, settings,
            need=needed_gib(peer.copies, size, options.kv_gib),
        )  # fmt: skip
        try:
            one.settings["model"] = str(prepared(peer, model, options.place))
        except (OSError, RuntimeError, subprocess.SubprocessError) as error:
            print(f"{peer.name}: left out, no checkpoint: {error}")
            continue
        found.append(one)
    return found


@contextmanager
def ended_in_order() -> Iterator[None]:
    """SIGTERM unwinds, as Ctrl-C does, so that no process is left behind."""

    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def main() -> int:
    with ended_in_order():
        return run(parse())


def run(options: argparse.Namespace) -> int:
    """Measure and report; returns the exit status."""
    if options.accuracy:
        from bench.cpu.accuracy import main as accuracy

        return accuracy(options)
    try:
        model = find_model(options.model, options.place)
    except FileNotFoundError as error:
        print(error, file=sys.stderr)
        return 1
    if options.busy:
        from bench.cpu.busy import main as beside

        return beside(options, model)
    peers = available(options.peers, options.place)
    if options.serve:
        from bench.cpu.serving import main as serve

        return serve(options, peers, model)
    engines, cells = contestants(options, peers, model), cells_of(options)
    if not engines or not cells:
        print("nothing to measure", file=sys.stderr)
        return 1
    vocab = json.loads((model / "config.json").read_text())["vocab_size"]
    limits = Limits(run=options.patience, noise=options.noise, attempts=options.attempts)
    contest = Contest(engines, cells, vocab, limits, seed=options.seed, lock=options.lock)
    together = contest.run(options.rounds, False if options.one_at_a_time else None)
    found = summary(engines, cells)
    print_results(engines, cells, found)
    result = {
        "bench": "cpu",
        **found,
        "together": together,
        "engines": {engine.name: engine.result() for engine in engines},
        "options": settings_of(options),
        "environment": environment(),
    }
    write_line(result, options.json)
    return int(any(engine.failed or engine.errors for engine in engines))
