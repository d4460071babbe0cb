"""The command line of ``python -m bench.peers``."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from bench.peers.checkpoint import find_model, prepared
from bench.peers.install import install, installed
from bench.peers.registry import ENVIRONMENTS, PEERS, ROOT

__all__ = ["add_place", "main"]


def add_place(parser: argparse.ArgumentParser) -> None:
    """``--place``, for every command that looks for peers."""
    default = Path(os.environ.get("AIOINFER_PEERS") or ROOT / ".peers")
    parser.add_argument(
        "--place", type=lambda text: Path(text).resolve(), default=default.resolve(), metavar="DIR",
        help="where environments and models are; default: $AIOINFER_PEERS, or .peers in the repository",
    )  # fmt: skip


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    from bench import peers

    parser = argparse.ArgumentParser(
        prog="python -m bench.peers",
        description=peers.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    listing = commands.add_parser("list", help="what there is, and what is installed")
    making = commands.add_parser("install", help="make virtual environments")
    making.add_argument(
        "names", nargs="+", choices=[*ENVIRONMENTS], metavar="NAME", help=", ".join(ENVIRONMENTS)
    )
    making.add_argument("--pip", default="", help="more arguments for pip install, in one string")
    converting = commands.add_parser("prepare", help="make the checkpoint and convert it")
    converting.add_argument("names", nargs="+", choices=[*PEERS], metavar="NAME", help=", ".join(PEERS))
    converting.add_argument("--model", default="0.6b", help="a model directory, or a shape of bench.gpu")
    for each in (listing, making, converting):
        add_place(each)
    return parser.parse_args(arguments)


def main() -> int:
    options = parse()
    try:
        if options.command == "install":
            for name in options.names:
                install(ENVIRONMENTS[name], options.place, options.pip.split())
                print(f"{name}: {installed(name, options.place)}")
        elif options.command == "prepare":
            model = find_model(options.model, options.place)
            for name in options.names:
                print(f"{name}: {prepared(PEERS[name], model, options.place)}")
        else:
            for name, environment in ENVIRONMENTS.items():
                state = installed(name, options.place) or "not installed"
                print(f"{name:10s} {' '.join(environment.packages)}\n{'':10s} {state}")
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        print(f"{options.command}: {error}", file=sys.stderr)
        return 1
    return 0
