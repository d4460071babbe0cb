"""``aioinfer serve``: the engine, its sockets and the signals that end it."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import logging
import shlex
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from aioinfer._version import __version__
from aioinfer.cli.flags import read_settings
from aioinfer.cli.streams import OutputLost, write
from aioinfer.cli.terminal import Progress, ending_signals, interrupted, started
from aioinfer.config import EngineConfig, ServerConfig

if TYPE_CHECKING:
    from aioinfer.client.engine_like import EngineLike
    from aioinfer.server.http.listening import Bound

__all__ = ["serve_model"]

#: seconds between log lines of throughput and load
_STATS_INTERVAL = 10.0


async def serve_model(options: argparse.Namespace) -> int:
    from aioinfer.server.http.keys import Keys
    from aioinfer.server.http.listening import bind_all, connection_limit

    engine_config = read_settings(EngineConfig, options)
    config = read_settings(ServerConfig, options)
    Keys.of(config)
    # A port in use is known before the model loads, and before torch does. So are too few open files, and
    # files of keys and TLS that cannot be used.
    bound = await bind_all(config)
    try:
        connection_limit(None)
        return await _serve_on(bound, engine_config, config)
    finally:
        bound.close()


def _as_server(config: EngineConfig) -> EngineConfig:
    """The config of a server's engine, where it says nothing else: its process is its own, so the switch
    interval is short on every device, and it logs its throughput and load. That line is shown at the command
    line's usual level, where no other line of its own level is."""
    from aioinfer.loop.tuning import SHORT_INTERVAL

    if config.stats_interval is None:
        config = dataclasses.replace(config, stats_interval=_STATS_INTERVAL)
    if config.switch_interval is None:
        config = dataclasses.replace(config, switch_interval=SHORT_INTERVAL)
    if config.stats_interval and logging.getLogger().level <= logging.WARNING:
        logging.getLogger("aioinfer.stats").setLevel(logging.INFO)
    return config


async def _serve_on(bound: Bound, engine_config: EngineConfig, config: ServerConfig) -> int:
    from aioinfer.loop.tuning import FROZEN
    from aioinfer.server import serve

    if config.access_log:
        _log_accesses(config.access_log_format)
    engine_config = _as_server(engine_config)
    engine = _engine(engine_config, config)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    aborting: list[asyncio.Task[None]] = []
    received: list[int] = []

    def signalled(number: int) -> None:
        """The first signal drains the server; the second one aborts running requests."""
        received.append(number)
        if stop.is_set() and not starting_up:
            aborting.append(loop.create_task(engine.aclose()))
        stop.set()

    starting_up = True
    for number in ending_signals():
        loop.add_signal_handler(number, signalled, number)
    began = time.monotonic()
    stopped = asyncio.ensure_future(stop.wait())
    frozen: object | None = None
    try:
        if not await started(engine.start(Progress()), stopped):
            return interrupted(received[0])
        starting_up = False
        # Full collections would look at all that was imported and hold up the loop for 100 ms and more.
        frozen = FROZEN.hold(True)

        def ready(url: str) -> None:
            several = f"{config.replicas} engines: " if config.replicas > 1 else ""
            description, seconds = several + engine.info.description, time.monotonic() - began
            with suppress(OutputLost):  # a full disk, or a pipe that nobody reads
                _banner(description, seconds, url, config, engine.config)
                for admin in bound.admin:
                    write(f"Admin routes on {_shown(admin.getsockname())}")

        await serve(engine, config, stop=stop, ready=ready, sockets=bound)
    finally:
        FROZEN.release(frozen)
        stopped.cancel()
        await asyncio.gather(engine.aclose(), *aborting)
    return 0


def _engine(engine_config: EngineConfig, config: ServerConfig) -> EngineLike:
    """One engine, or several in other processes."""
    if config.replicas > 1 or config.ray is not None:
        from aioinfer.parallel import Dispatcher

        return Dispatcher(
            processes=config.replicas,
            ray=config.ray,
            config=engine_config,
            policy=config.routing,
            on_loss=config.on_loss,
            roles=config.roles,
            prefill_tokens=config.prefill_tokens,
            exchange_gib=config.exchange_gib,
        )
    from aioinfer.engine import Engine

    return Engine(engine_config)


def _log_accesses(form: str) -> None:
    """Lines of the access log go where other messages go; JSON without their prefix."""
    from aioinfer.server.http.logs import JsonLines

    log = logging.getLogger("aioinfer.access")
    log.setLevel(logging.INFO)
    if form == "json":
        handler = logging.StreamHandler()
        handler.setFormatter(JsonLines())
        log.handlers = [handler]
        log.propagate = False


def _shown(address: Any) -> str:
    return f"unix:{address}" if isinstance(address, str) else f"http://{address[0]}:{address[1]}"


def _banner(
    description: str, seconds: float, url: str, config: ServerConfig, engine_config: EngineConfig
) -> None:
    """Print model, URL and an example request. Raises OutputLost."""
    name = (*config.model_names, engine_config.model_name)[0]
    body = json.dumps({"model": name, "stream": True, "messages": [{"role": "user", "content": "Hello!"}]})
    key = ' -H "Authorization: Bearer $AIOINFER_API_KEY"' if config.needs_key else ""
    where, options = url, ""
    if url.startswith("unix:"):
        where = f"{'https' if config.tls_certificate else 'http'}://localhost"
        options = f" --unix-socket {shlex.quote(url.removeprefix('unix:'))}"
    write(f"aioinfer {__version__}: {name} ({description}), loaded in {seconds:.1f} s")
    write(f"Serving on {url}  (OpenAI API: {where}/v1)")
    write("Try it:")
    command = f"curl -N{options} {where}/v1/chat/completions"
    write(f"  {command} -H 'Content-Type: application/json'{key} -d '{body}'")
