"""A replica over a null device, in place of ``aioinfer replica`` in a child process of a dispatcher.

python -m bench.parallel.child --streams 64 --step-ms 20 replica --with-parent --config FILE
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

import yaml

from aioinfer.loop.tuning import FROZEN
from aioinfer.parallel.agent import Agent
from bench.fanout.target import make_engine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, required=True)
    parser.add_argument("--step-ms", type=float, required=True)
    parser.add_argument("command")
    parser.add_argument("--with-parent", action="store_true")
    parser.add_argument("--config", type=Path, required=True)
    options = parser.parse_args()
    options.packing_ms = options.launching_ms = 0.0
    options.tokenizer = None
    asyncio.run(_serve(options, yaml.safe_load(options.config.read_text("utf-8"))["socket"]))


async def _serve(options: argparse.Namespace, path: str) -> None:
    loop = asyncio.get_running_loop()
    parent = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(parent), sys.stdin)
    async with make_engine(options) as engine:
        agent = Agent(engine)
        server = await loop.create_unix_server(agent.connect, path)
        FROZEN.hold(True)  # as the command line does
        await parent.read()
        server.close()
        await agent.aclose()


if __name__ == "__main__":
    main()
