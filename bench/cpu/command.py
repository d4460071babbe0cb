"""``python -m bench cpu``: this engine and its peers on a CPU, side by side in one run.

    python -m bench.peers install openvino vllm     once
    python -m bench cpu                             decode at 1, 8 and 32 at a time, one long prefill
    python -m bench cpu --peers aioinfer --rounds 1 --set aioinfer.overlap_steps=0
    python -m bench cpu --precision int4            weights of 4 bits, of each engine that has them
    python -m bench cpu --accuracy                  weights of 8 and 4 bits beside bfloat16 and float32
    python -m bench cpu --latents                   attention over latents beside the roofs of this machine

Every engine computes the same random prompts (never the same twice, no prefix caches) with the same number
of threads and the same KV budget, greedily, whatever the end token is. A cell is run twice a round, for 1
and for N new tokens: with T1 and TN seconds, C sequences decode C * (N - 1) / (TN - T1) tokens/s, end to end
it is C * N / TN, and prefill C * prompt / T1. The decode rate is what a disturbed T1 moves most: look at the
end-to-end rate, too.

Engines take turns, cell by cell, so that disturbances meet all of them; who begins changes from round to
round. All are loaded and warm from the start, and those that are not measured are stopped (SIGSTOP) with
all their processes. A peer that is not installed is left out; one that fails or hangs is ended, the others
go on, and the status is 1. A sample during which others used more than --noise of a core is taken again; of
--attempts that are all disturbed the least disturbed counts. Memory is the resident set summed over an
engine's processes.
"""

from __future__ import annotations

import argparse
import subprocess
from pathlib import Path
from typing import Any, get_args

from aioinfer.checkpoint.files import open_checkpoint
from bench.command import BadOptions
from bench.cpu.accuracy import measure_accuracy, measure_perplexity
from bench.cpu.contest import Cell, Contest, Contestant, Limits, tell
from bench.cpu.latents import measure_latents
from bench.gpu.shapes import SHAPES
from bench.peers.checkpoint import find_model, prepared
from bench.peers.install import add_place, installed
from bench.peers.registry import PEERS, ROOT, Peer, Precision, python_of
from bench.report import Report

__all__ = ["add_arguments", "own_settings", "peers_of", "run"]

#: engines that are measured unless named, as far as installed; with rounded weights, our bf16 beside them
_DEFAULT = ["aioinfer", "openvino", "vllm", "llamacpp"]
_ROUNDED = ["aioinfer-{}", "aioinfer", "openvino-{}", "llamacpp-{}"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--peers", nargs="+", choices=[*PEERS], metavar="NAME",
        help=f"engines, the one that is compared first: {', '.join(PEERS)}",
    )  # fmt: skip
    parser.add_argument(
        "--precision", choices=get_args(Precision), default="bf16", help="unless peers are named"
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
    parser.add_argument("--patience", type=float, default=300.0, help="seconds that one run may take")
    parser.add_argument("--noise", type=float, default=0.25, help="cores that others may use meanwhile")
    parser.add_argument("--attempts", type=int, default=3, help="samples taken until one is that quiet")
    add_place(parser)
    parser.add_argument(
        "--accuracy", action="store_true", help="what rounded weights cost the bundled model, or --model"
    )
    parser.add_argument("--latents", action="store_true", help="attention over latents alone")
    parser.add_argument(
        "--requests", type=int, default=48, help="with --accuracy, questions per task, or windows of text"
    )


def run(options: argparse.Namespace, report: Report) -> None:
    """Measure engines, or with ``--accuracy`` rounded weights."""
    own = own_settings(options.set)
    if options.latents:
        measure_latents(options.rounds, options.threads, report)
        return
    if options.accuracy and options.model in SHAPES:
        measure_accuracy(options.requests, report)
        return
    try:
        model = find_model(options.model, options.place)
    except FileNotFoundError as error:
        raise BadOptions(str(error)) from None
    if options.accuracy:
        measure_perplexity(options.requests, model, report)
        return
    engines = _contestants(options, own, model, report)
    cells = [Cell(count, options.prompt_tokens, options.output_tokens) for count in options.concurrency]
    if options.prefill_tokens:
        cells.append(Cell(1, options.prefill_tokens, 1))
    if not engines or not cells or min(options.rounds, options.attempts, options.output_tokens - 1) < 1:
        raise BadOptions("nothing to measure")
    vocab = open_checkpoint(model).config()["vocab_size"]
    limits = Limits(run=options.patience, noise=options.noise, attempts=options.attempts)
    try:
        Contest(engines, cells, vocab, limits).run(options.rounds)
    finally:
        tell(engines, cells, report)


def own_settings(texts: list[str]) -> dict[str, dict[str, str]]:
    """Settings by peer. Raises BadOptions."""
    own: dict[str, dict[str, str]] = {}
    for text in texts:
        where, equals, value = text.partition("=")
        peer, dot, name = where.partition(".")
        if not equals or not dot or peer not in PEERS:
            raise BadOptions(f"--set {text}: PEER.NAME=VALUE is wanted")
        own.setdefault(peer, {})[name] = value
    return own


def peers_of(options: argparse.Namespace) -> list[Peer]:
    """The peers that the options name, or those of the precision."""
    default = _DEFAULT if options.precision == "bf16" else _ROUNDED
    names = options.peers or [name.format(options.precision) for name in default]
    return [PEERS[name] for name in dict.fromkeys(names)]


def _contestants(
    options: argparse.Namespace, own: dict[str, dict[str, str]], model: Path, report: Report
) -> list[Contestant]:
    """Peers that are installed and whose checkpoint could be made; notes say what is wrong with others."""
    found = []
    longest = max(options.prompt_tokens + options.output_tokens, options.prefill_tokens + 1)
    for peer in peers_of(options):
        if peer.environment is not None and installed(peer.environment, options.place) is None:
            report.note(f"{peer.name} is not installed (python -m bench.peers install {peer.environment})")
            continue
        settings: dict[str, Any] = {
            "threads": options.threads,
            "kv_gib": options.kv_gib,
            # Some round it up to their blocks, and refuse less than a prompt and the token after it.
            "max_len": -(-longest // 256) * 256,
            "max_batch": max([1, *options.concurrency]),
            "options": {**peer.options, **own.get(peer.name, {})},
        }
        try:
            settings["model"] = str(prepared(peer, model, options.place))
        except (OSError, RuntimeError, subprocess.SubprocessError) as error:
            report.note(f"{peer.name}: no checkpoint: {error}")
            continue
        command = [str(python_of(peer.environment, options.place)), "-m"]
        command.append(f"bench.peers.adapters.{peer.adapter}")
        log = options.place / "logs" / f"{peer.name}.log"
        found.append(Contestant(peer.name, command, ROOT, log, settings))
    return found
