"""``python -m bench.peers``; see :mod:`bench.peers`."""

from __future__ import annotations

import argparse
import subprocess
import sys

from bench import peers
from bench.peers.install import add_place, install, installed
from bench.peers.registry import ENVIRONMENTS


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.peers",
        description=peers.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    listing = commands.add_parser("list", help="engines, and versions of those that are installed")
    making = commands.add_parser("install", help="make virtual environments")
    making.add_argument(
        "names", nargs="+", choices=[*ENVIRONMENTS], metavar="NAME", help=", ".join(ENVIRONMENTS)
    )
    making.add_argument("--pip", default="", help="more arguments for pip install, in one string")
    for each in (listing, making):
        add_place(each)
    options = parser.parse_args()
    try:
        if options.command == "install":
            for name in options.names:
                install(ENVIRONMENTS[name], options.place, options.pip.split())
        for name in ENVIRONMENTS if options.command == "list" else options.names:
            print(f"{name:10s} {installed(name, options.place) or 'not installed'}")
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        print(f"{options.command}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
