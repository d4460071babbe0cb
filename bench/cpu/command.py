"""``python -m bench cpu``: this engine and its peers on a CPU, side by side in one run.

    python -m bench.peers install openvino vllm     once
    python -m bench cpu                             decode at 1, 8 and 32 at a time, one long prefill
    python -m bench cpu --peers aioinfer --rounds 1 --set aioinfer.overlap_steps=0
    python -m bench cpu --precision int4            weights of 4 bits, of each engine that has them
    python -m bench cpu --serve                     through the servers: staggered arrivals, TTFT and ITL
    python -m bench cpu --busy                      this engine's forward beside a loop that has other work
    python -m bench cpu --accuracy                  weights of 8 and 4 bits beside bfloat16 and float32
    python -m bench cpu --roof                      this engine's forwards beside what the processor could do

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

from __future__ import annotations

import argparse
import subprocess
from pathlib import Path
from typing import Any, get_args

from aioinfer.checkpoint.files import open_checkpoint
from bench.command import BadOptions
from bench.cpu.accuracy import measure_accuracy, measure_perplexity
from bench.cpu.busy import measure_busy
from bench.cpu.cells import Cell
from bench.cpu.contest import Contest, Contestant, Limits, needed_gib
from bench.cpu.roofs import measure_roofs
from bench.cpu.serving import measure_servers
from bench.cpu.tables import tell
from bench.gpu.shapes import SHAPES
from bench.peers.checkpoint import find_model, prepared
from bench.peers.command import add_place
from bench.peers.install import installed
from bench.peers.registry import PEERS, ROOT, Peer, Precision, python_of
from bench.report import Report

__all__ = ["add_arguments", "run"]

#: who is measured unless told otherwise, as far as installed; with rounded weights, our bf16 beside them
_DEFAULT = ["aioinfer", "openvino", "vllm", "llamacpp"]
_ROUNDED = ["aioinfer-{}", "aioinfer", "openvino-{}", "llamacpp-{}"]
_SERVERS = ["aioinfer", "vllm"]
_ROUNDED_SERVERS = ["aioinfer-{}", "aioinfer", "vllm"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--peers", nargs="+", choices=[*PEERS], metavar="NAME",
        help=f"who is measured, the one that is compared first: {', '.join(PEERS)}",
    )  # fmt: skip
    parser.add_argument(
        "--precision",
        choices=get_args(Precision),
        default="bf16",
        help="of the weights, unless peers are named",
    )
    parser.add_argument(
        "--model", default="0.6b", help="a shape (0.6b, tiny, ...), a model directory, or a GGUF file"
    )
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
    add_place(parser)
    parser.add_argument("--busy", action="store_true", help="this engine alone, beside a loop that is busy")
    parser.add_argument(
        "--accuracy", action="store_true", help="what rounded weights cost the bundled model, or --model"
    )
    parser.add_argument("--roof", action="store_true", help="what forwards reach of the processor's roofs")
    parser.add_argument(
        "--contexts", type=int, nargs="*", default=[4096, 16384], help="with --roof, positions before a row"
    )
    served = parser.add_argument_group("with --serve")
    served.add_argument("--serve", action="store_true", help="measure the servers, not the engines")
    served.add_argument("--rates", type=float, nargs="+", default=[0.5, 1.0, 2.0], help="arrivals per second")
    served.add_argument(
        "--requests",
        type=int,
        default=48,
        help="requests per rate and round; with --accuracy, questions per task, or windows of text",
    )


def complete(options: argparse.Namespace) -> None:
    """Check options and derive others from them. Raises BadOptions."""
    options.max_batch = max([1, *options.concurrency])
    plain, rounded = (_SERVERS, _ROUNDED_SERVERS) if options.serve else (_DEFAULT, _ROUNDED)
    default = plain if options.precision == "bf16" else rounded
    options.peers = options.peers or [name.format(options.precision) for name in default]
    if options.busy and options.roof:
        raise BadOptions("--busy and --roof are benches of their own")
    if options.rounds < 1 or options.attempts < 1 or options.threads < 1 or options.output_tokens < 2:
        raise BadOptions("--rounds, --attempts and --threads must be at least 1, --output-tokens at least 2")
    try:
        options.own = own_settings(options.set)
    except ValueError as error:
        raise BadOptions(str(error)) from None


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


def available(names: list[str], place: Path, report: Report) -> list[Peer]:
    """The peers that can be run; notes say which are left out."""
    found = []
    for name in dict.fromkeys(names):
        peer = PEERS[name]
        if peer.environment is not None and installed(peer.environment, place) is None:
            report.note(f"{name} is not installed (python -m bench.peers install {peer.environment})")
        else:
            found.append(peer)
    return found


def cells_of(options: argparse.Namespace) -> list[Cell]:
    cells = [Cell(count, options.prompt_tokens, options.output_tokens) for count in options.concurrency]
    return cells + ([Cell(1, options.prefill_tokens, 1)] if options.prefill_tokens else [])


def contestants(
    options: argparse.Namespace, peers: list[Peer], model: Path, report: Report
) -> list[Contestant]:
    """Those whose checkpoint could be made; notes say what was wrong with others."""
    found = []
    files = [model] if model.suffix == ".gguf" else model.glob("*.safetensors")
    size = sum(file.stat().st_size for file in files) / 2**30
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
            report.note(f"{peer.name}: no checkpoint: {error}")
            continue
        found.append(one)
    return found


def run(options: argparse.Namespace, report: Report) -> None:
    """Measure what the options choose: engines, servers, a busy loop, or rounded weights."""
    complete(options)
    if options.accuracy and options.model in SHAPES:
        measure_accuracy(options, report)
        return
    try:
        model = find_model(options.model, options.place)
    except FileNotFoundError as error:
        raise BadOptions(str(error)) from None
    if options.accuracy:
        measure_perplexity(options, model, report)
        return
    if options.busy or options.roof:
        (measure_busy if options.busy else measure_roofs)(options, model, report)
        return
    peers = available(options.peers, options.place, report)
    if options.serve:
        measure_servers(options, peers, model, report)
        return
    engines, cells = contestants(options, peers, model, report), cells_of(options)
    if not engines or not cells:
        report.error("nothing to measure")
        return
    vocab = open_checkpoint(model).config()["vocab_size"]
    limits = Limits(run=options.patience, noise=options.noise, attempts=options.attempts)
    contest = Contest(engines, cells, vocab, limits, seed=options.seed, lock=options.lock)
    try:
        together = contest.run(options.rounds, False if options.one_at_a_time else None)
        report.add(together=together)
    finally:
        tell(engines, cells, report)
