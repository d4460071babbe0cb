"""``aioinfer batch``: a file of requests to a file of answers, in the form of OpenAI's Batch API."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from typing import IO, TYPE_CHECKING

from aioinfer.cli.flags import read_settings
from aioinfer.cli.terminal import Progress
from aioinfer.config import EngineConfig, ServerConfig
from aioinfer.errors import ConfigError, EngineError

if TYPE_CHECKING:
    from aioinfer.server.batch import Output

__all__ = ["batch"]


async def batch(options: argparse.Namespace) -> int:
    """Exit status 0: every row has an answer; 1: some have errors, or it could not go on."""
    from aioinfer.server.batch import Output

    source, target = options.input, options.output
    config = read_settings(EngineConfig, options)
    try:
        if source.exists() and target.exists() and target.samefile(source):
            raise ConfigError(f"{target}: is the input")
        with source.open("rb") as file, Output(target) as output:
            return await _answered(file, output, config, options)
    except (OSError, EngineError) as error:
        print(f"aioinfer: {error}", file=sys.stderr)
        return 1


async def _answered(
    file: IO[bytes], output: Output, config: EngineConfig, options: argparse.Namespace
) -> int:
    from tqdm import tqdm

    from aioinfer.engine import Engine
    from aioinfer.server.batch import Batch, count_rows, read_rows

    served = ServerConfig(metrics=False, served_model_name=options.served_model_name)
    counts = output.counts
    total = await asyncio.to_thread(count_rows, options.input) if options.input.is_file() else None
    engine = Engine(config)
    try:
        await engine.start(Progress())
        async with contextlib.aclosing(engine):
            running = engine.info.settle(engine.config).running_requests
            concurrency = min(2 * running, engine.config.max_queued_requests)
            hidden = not sys.stderr.isatty()
            with tqdm(total=total, initial=counts.done, unit="row", disable=hidden) as bar:
                await Batch(engine, served, concurrency).run(read_rows(file), output, bar.update)
    finally:
        earlier = f", of which {counts.earlier} were there" if counts.earlier else ""
        answered, failed = counts.answered, counts.failed
        print(f"{options.output}: {answered} rows answered, {failed} with errors{earlier}", file=sys.stderr)
    return int(counts.failed > 0)
