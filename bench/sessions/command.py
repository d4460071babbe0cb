"""``python -m bench sessions``: KV that outlives requests and processes: what it brings and costs.

``restart``         a prefix after a restart, from the disk tier, beside computing it
``turn``            the second turn of a held session, beside a decode step and its new tokens
``fork``            a fork: microseconds, pages, bytes
``save``            a session's file, written and read, beside plain writing and reading of as many bytes
``off``             without any of it: the scheduler and a load, beside a checkout without it (``--base``)
``rag``             conversations over documents that do not fit into the pool, with and without the tier
``disaggregation``  a process that prefills and one that decodes, against two mixed ones, a core each
``commit``          full pages of running requests become nodes of the tree
``llamacpp``        slots of llama.cpp saved and restored, and sessions on the same file of weights

Where two ways are compared, they take turns within the run.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Callable, Coroutine
from pathlib import Path

from bench.command import BadOptions
from bench.peers.checkpoint import find_model
from bench.peers.install import add_place
from bench.report import Report
from bench.sessions.commits import commit
from bench.sessions.documents import rag
from bench.sessions.off import off
from bench.sessions.restarts import restart
from bench.sessions.roles import disaggregation
from bench.sessions.slots import llamacpp
from bench.sessions.turns import fork, save, turn

__all__ = ["add_arguments", "run"]

_Part = Callable[[argparse.Namespace, Report], Coroutine[None, None, None] | None]
_PARTS: dict[str, tuple[str, _Part]] = {
    "restart": ("a prefix after a restart", restart),
    "turn": ("the second turn of a held session", turn),
    "fork": ("forks of a session", fork),
    "save": ("a session's file", save),
    "off": ("without sessions and tiers", off),
    "rag": ("conversations over documents beyond the pool", rag),
    "disaggregation": ("prefill here, decode there", disaggregation),
    "commit": ("commit on demand at every page boundary", commit),
    "llamacpp": ("saved and restored, beside llama.cpp", llamacpp),
}
_DEMO = "tiny-chat"
_QUICK = {
    "model": _DEMO, "threads": 1, "rounds": 1, "prefix": 256, "context": 256, "forks": 3, "requests": 8,
    "documents": 6, "document_tokens": 512, "questions": 2, "chats": 1, "long_prompts": 2, "long_tokens": 320,
    "every": 0.1,
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--part", choices=[*_PARTS], nargs="+", default=[*_PARTS])
    parser.add_argument(
        "--model", default="0.6b", help=f"a shape (0.6b, ...), a model directory, a GGUF file, {_DEMO}"
    )
    parser.add_argument("--quantization", default="auto", choices=["auto", "int8", "int4"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cache-weights", action="store_true", help="packed weights from earlier starts")
    parser.add_argument("--deterministic", action="store_true", help="other ids are an error then")
    parser.add_argument(
        "--folder", type=Path, help="on the disk to be measured; default: for temporary files"
    )
    parser.add_argument("--quick", action="store_true", help=f"{_DEMO} and small sizes: that it runs")
    parser.add_argument("--prefix", type=int, default=4096, help="tokens, of restart and llamacpp")
    parser.add_argument("--context", type=int, default=8192, help="tokens, of turn, fork and save")
    parser.add_argument("--forks", type=int, default=1000)
    parser.add_argument("--base", type=Path, metavar="DIR", help="of off: a checkout from before")
    parser.add_argument("--requests", type=int, default=64, help="of off")
    parser.add_argument("--documents", type=int, default=12, help="of rag")
    parser.add_argument("--document-tokens", type=int, default=2048, help="of rag")
    parser.add_argument("--questions", type=int, default=6, help="of rag, about each document")
    parser.add_argument("--chats", type=int, default=4, help="of disaggregation, at a time")
    parser.add_argument("--long-prompts", type=int, default=8, help="of disaggregation")
    parser.add_argument("--long-tokens", type=int, default=2048, help="of disaggregation")
    parser.add_argument("--every", type=float, default=8.0, help="seconds between long prompts")
    parser.add_argument("--gguf", type=Path, metavar="FILE", help="of llamacpp")
    add_place(parser)


def run(options: argparse.Namespace, report: Report) -> None:
    """A section per part."""
    import uvloop

    if options.quick:
        vars(options).update(_QUICK)
    if options.folder is None:
        options.folder = Path(tempfile.gettempdir())
    try:
        if options.model != _DEMO:
            options.model = str(find_model(options.model, options.place))
    except FileNotFoundError as error:
        raise BadOptions(str(error)) from None
    for name in options.part:
        title, part = _PARTS[name]
        section = report.section(name, title)
        with section.case(name):
            work = part(options, section)
            if work is not None:
                with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                    runner.run(work)
