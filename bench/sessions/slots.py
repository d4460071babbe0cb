"""``llamacpp``: a slot of llama.cpp that is saved and restored, and a session on the same file of weights."""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.peers.checkpoint import find_model, prepared
from bench.peers.install import installed
from bench.peers.registry import PEERS, python_of
from bench.report import Report
from bench.sessions.setting import answer, child, settings, tokens

__all__ = ["llamacpp"]

_NEW, _OUTPUT = 16, 64
_PEER = PEERS["llamacpp-int4"]
_Way = Callable[[bool, str], dict[str, Any]]


def llamacpp(options: argparse.Namespace, report: Report) -> None:
    """A row for each engine: times, and rounds in which what follows the restore, in a new process, is what
    followed without it: the ids, and the bits of their logprobs (of llama.cpp, logits)."""
    model = _model(options, report)
    prompt, more = tokens(options.prefix, 0), tokens(_NEW, 1)
    ways: dict[str, _Way] = {"aioinfer": _ours(options, model, prompt, more)}
    if model.endswith(".gguf"):
        ways["llama.cpp"] = _theirs(options, model, prompt, more)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in ways}
    for number in range(options.rounds):
        for name in [*ways][:: -1 if number % 2 else 1]:
            with tempfile.TemporaryDirectory(dir=options.folder) as folder:
                path = str(Path(folder) / "slot")
                saved, loaded = ways[name](False, path), ways[name](True, path)
            found[name].append(
                {
                    "mib": saved["bytes"] / 2**20,
                    "prefill_ms": 1e3 * saved["ttft"],
                    "save_ms": 1e3 * saved["seconds"],
                    "restore_ms": 1e3 * loaded["seconds"],
                    "next_ms": 1e3 * loaded["ttft"],
                    "same_ids": saved["ids"] == loaded["ids"],
                    "same_bits": saved["logprobs"] == loaded["logprobs"],
                }
            )
    for name, rows in found.items():
        times = {key: statistics.median(row[key] for row in rows) for key in list(rows[0])[:5]}
        same = {key: sum(row[key] for row in rows) for key in ("same_ids", "same_bits")}
        report.row(engine=name, tokens=options.prefix, rounds=len(rows), **times, **same)


def _model(options: argparse.Namespace, report: Report) -> str:
    """The file of weights for both, or the model of the other parts where llama.cpp is not there."""
    if options.gguf is not None:
        return str(options.gguf.resolve())
    if options.quick or installed("llamacpp", options.place) is None:
        report.note("llama.cpp is left out" if options.quick else "llama.cpp is not installed")
        return str(options.model)
    return str(prepared(_PEER, find_model("0.6b", options.place), options.place))


def _ours(options: argparse.Namespace, model: str, prompt: list[int], more: list[int]) -> _Way:
    given = settings(options, 2 * options.prefix + 512) | {"model": model}
    if model.endswith(".gguf"):
        given.pop("quantization", None)

    def ask(restore: bool, path: str) -> dict[str, Any]:
        arguments: dict[str, Any] = {"settings": given, "output": _OUTPUT, "path": path, "more": more}
        return child("load", **arguments) if restore else child("save", prompt=prompt, **arguments)

    return ask


def _theirs(options: argparse.Namespace, model: str, prompt: list[int], more: list[int]) -> _Way:
    python = str(python_of(_PEER.environment, options.place))

    def ask(restore: bool, path: str) -> dict[str, Any]:
        command = [python, "-m", "bench.peers.adapters.llamacpp_slots"]
        return answer(
            command,
            {
                "model": model,
                "threads": options.threads,
                "prompt": prompt,
                "more": more,
                "output": _OUTPUT,
                "path": path,
                "restore": restore,
            },
        )

    return ask
