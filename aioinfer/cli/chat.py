"""``aioinfer chat``: a conversation on a terminal, with an engine in this process or with a server.

The event loop runs while an answer comes, and rests while a line is typed: so Ctrl-C is an ordinary
KeyboardInterrupt there, and cancels the one task of the answer here.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import sys
import time
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any, Protocol

from aioinfer._version import __version__
from aioinfer.cli.streams import note, write
from aioinfer.cli.terminal import loop_factory, own_engine
from aioinfer.errors import AioInferError, ConfigError, RequestError
from aioinfer.images.encoded import data_uri
from aioinfer.params import SamplingParams

__all__ = ["Conversation", "chat", "history_path"]

_HELP = """\
/clear            forget the conversation, not its settings
/image FILE       send an image with the next question
/set NAME VALUE   set a sampling parameter (temperature, max_tokens, seed, ...); none: to the default
/set              show what is set
/save FILE        write the conversation as JSON
/stats            what the engine has done
/help             this
Ctrl-C stops an answer, Ctrl-D ends."""
#: lines that are kept of what was typed
_MOST_LINES = 1000
#: seconds to connect to a server, and between two pieces of its answer
_CONNECT, _SILENCE = 10.0, 300.0

#: in OpenAI's form
Messages = list[dict[str, Any]]


class Backend(Protocol):
    """The source of answers."""

    def check(self, values: dict[str, Any]) -> None:
        """Raises RequestError or TypeError for parameters that it can tell are wrong."""

    def answer(self, messages: Messages, values: dict[str, Any]) -> AsyncGenerator[str, None]:
        """The text of an answer, piece by piece. Raises RequestError and others of this package."""

    @property
    def counts(self) -> tuple[int, int] | None:
        """Tokens of the prompt and of the output of the last answer, if they are known."""

    def stats(self) -> str: ...


class Local:
    """An engine in this process."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.counts: tuple[int, int] | None = None

    def check(self, values: dict[str, Any]) -> None:
        self._params(values)

    async def answer(self, messages: Messages, values: dict[str, Any]) -> AsyncGenerator[str, None]:
        if any(isinstance(message["content"], list) for message in messages):
            from aioinfer.chat.images import ImageReader, with_images  # imports pydantic

            messages = with_images(messages, ImageReader())
        async with self._engine.generate(messages, self._params(values)) as stream:
            try:
                async for chunk in stream:
                    yield chunk.text
            finally:
                usage = stream.usage
                self.counts = usage.prompt_tokens, usage.completion_tokens

    def stats(self) -> str:
        stats = self._engine.stats()
        cached = f"{stats.cached_tokens} of {stats.queried_tokens} prompt tokens from the cache"
        counts = f"{stats.finished} answers, {stats.output_tokens} tokens, {stats.steps} steps, {cached}"
        return f"{self._engine.info.description}\n{counts}"

    def _params(self, values: dict[str, Any]) -> SamplingParams:
        params: SamplingParams = dataclasses.replace(self._engine.default_params, **values)
        return params


class Remote:
    """A server that speaks OpenAI's protocol."""

    def __init__(self, url: str, key: str | None, model: str | None) -> None:
        self._url = url.rstrip("/").removesuffix("/v1")
        self._headers = {"User-Agent": f"aioinfer/{__version__}"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"
        self._model = model
        self.counts: tuple[int, int] | None = None

    def check(self, values: dict[str, Any]) -> None:
        """The server does that."""

    async def answer(self, messages: Messages, values: dict[str, Any]) -> AsyncGenerator[str, None]:
        import aiohttp

        body = {**values, "messages": messages, "stream": True, "stream_options": {"include_usage": True}}
        if self._model is not None:
            body["model"] = self._model
        self.counts = None
        limits = aiohttp.ClientTimeout(total=None, connect=_CONNECT, sock_read=_SILENCE)
        url = f"{self._url}/v1/chat/completions"
        try:
            # A session of its own for each answer: between two, this loop would not see connections close.
            async with (
                aiohttp.ClientSession(headers=self._headers, timeout=limits, read_bufsize=1 << 20) as session,
                session.post(url, json=body) as response,
            ):
                if response.status != 200:
                    raise RequestError(_reason(response.status, await response.content.read(1 << 16)))
                async for line in response.content:
                    if line.startswith(b"data:") and (event := _event(line[5:])) is not None:
                        for piece in self._pieces(event):
                            yield piece
        except (aiohttp.ClientError, OSError) as error:
            raise RequestError(f"{self._url}: {str(error) or type(error).__name__}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RequestError(f"{self._url}: an event that is not of OpenAI's protocol") from error

    def _pieces(self, event: dict[str, Any]) -> list[str]:
        if "error" in event:
            raise RequestError(str(event["error"].get("message", "the server failed"))[:1000])
        if usage := event.get("usage"):
            self.counts = usage["prompt_tokens"], usage["completion_tokens"]
        return [
            str(text)
            for choice in event.get("choices", ())
            for text in (choice["delta"].get("reasoning_content"), choice["delta"].get("content"))
            if text
        ]

    def stats(self) -> str:
        return f"a server at {self._url}: its /metrics and admin routes have figures"


def _event(data: bytes) -> dict[str, Any] | None:
    if data.strip() == b"[DONE]":
        return None
    event = json.loads(data)
    return event if isinstance(event, dict) else None


def _reason(status: int, body: bytes) -> str:
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return f"{status}: {json.loads(body)['error']['message']}"
    return f"the server answered with status {status}"


class Conversation:
    """Lines in, answers out. ``write`` shows text, ``note`` all that is no part of an answer."""

    def __init__(
        self,
        backend: Backend,
        runner: asyncio.Runner,
        *,
        values: dict[str, Any],
        system: str | None = None,
        write: Callable[[str], None],
        note: Callable[[str], None],
    ) -> None:
        self._backend = backend
        self._runner = runner
        self._values = values
        self._write = write
        self._note = note
        self._opening: Messages = [{"role": "system", "content": system}] if system else []
        self.messages: Messages = [*self._opening]
        #: parts of the next question
        self._images: list[dict[str, Any]] = []

    def line(self, line: str) -> None:
        """One typed line: a command or a question."""
        line = line.strip()
        if line.startswith("/"):
            self._command(*line[1:].split(None, 2))
        elif line:
            self._ask(line)

    def _ask(self, question: str) -> None:
        content = [*self._images, {"type": "text", "text": question}] if self._images else question
        self._images = []
        self.messages.append({"role": "user", "content": content})
        pieces: list[str] = []
        try:
            self._runner.run(self._answer(pieces))
        except KeyboardInterrupt:
            self._write("\n")
            self._note("stopped")
        except AioInferError as error:
            self._write("\n" if pieces else "")
            self._note(f"error: {error}")
        if pieces:
            self.messages.append({"role": "assistant", "content": "".join(pieces)})
        else:
            self.messages.pop()  # a question without an answer would be asked again with the next one

    async def _answer(self, pieces: list[str]) -> None:
        started = time.perf_counter()
        first: float | None = None
        # Closed at once when this is cancelled: the engine stops then.
        async with contextlib.aclosing(self._backend.answer(self.messages, self._values)) as answer:
            async for piece in answer:
                if first is None and piece:
                    first = time.perf_counter()
                pieces.append(piece)
                self._write(piece)
        self._write("\n")
        self._note(self._figures(started, first, time.perf_counter()))

    def _figures(self, started: float, first: float | None, ended: float) -> str:
        parts = [] if first is None else [f"first token {first - started:.3f} s"]
        if (counts := self._backend.counts) is not None:
            prompt, output = counts
            # The first token is the prefill's: the others took the time after it.
            if first is not None and output > 1 and ended > first:
                parts.append(f"{(output - 1) / (ended - first):.1f} tokens/s")
            parts.append(f"{output} tokens, prompt {prompt}")
        return " · ".join(parts)

    # -- commands -------------------------------------------------------------------------------

    def _command(self, name: str = "", *arguments: str) -> None:
        match name, arguments:
            case "help", ():
                self._note(_HELP)
            case "clear", ():
                self.messages, self._images = [*self._opening], []
            case "image", (path, *rest):
                self._image(" ".join([path, *rest]))
            case "stats", ():
                self._note(self._backend.stats())
            case "set", ():
                self._note(
                    ", ".join(f"{name} = {value}" for name, value in self._values.items()) or "nothing"
                )
            case "set", (parameter, text):
                self._set(parameter, text)
            case "save", (path, *rest):
                self._save(" ".join([path, *rest]))
            case _:
                self._note(f"/{' '.join((name, *arguments))[:80]} is no command: /help lists them")

    def _set(self, name: str, text: str) -> None:
        values = {other: value for other, value in self._values.items() if other != name}
        if text.lower() not in ("none", "default"):
            try:
                values[name] = json.loads(text)
            except ValueError:
                values[name] = text
        try:
            self._backend.check(values)
        except (RequestError, TypeError) as error:
            known = isinstance(error, RequestError)
            self._note(str(error) if known else f"{name[:80]} is no sampling parameter")
            return
        self._values = values

    def _image(self, path: str) -> None:
        try:
            url = data_uri(Path(path).expanduser())
        except (OSError, ValueError) as error:
            self._note(f"no image: {error}")
            return
        self._images.append({"type": "image_url", "image_url": {"url": url}})
        count = len(self._images)
        self._note(f"{count} image{'s' if count > 1 else ''} with the next question")

    def _save(self, path: str) -> None:
        try:
            with open(os.path.expanduser(path), "x", encoding="utf-8") as file:
                json.dump(self.messages, file, ensure_ascii=False, indent=2)
                file.write("\n")
        except (OSError, ValueError) as error:
            self._note(f"not saved: {error}")
        else:
            self._note(f"{len(self.messages)} messages in {path}")


# -- the command ---------------------------------------------------------------------------------------


def chat(options: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    values: dict[str, Any] = {"max_tokens": options.max_tokens}
    if options.temperature is not None:
        values["temperature"] = options.temperature
    with asyncio.Runner(loop_factory=loop_factory()) as runner, contextlib.ExitStack() as stack:
        backend: Backend
        if options.url is not None:
            backend = Remote(options.url, options.key, options.model_argument)
        else:
            backend = Local(runner.run(_started(options, runner, stack)))
        backend.check(values)
        conversation = Conversation(
            backend, runner, values=values, system=options.system, write=_write, note=_note
        )
        with _history(None if options.no_history else history_path()):
            return _converse(conversation)


async def _started(options: argparse.Namespace, runner: asyncio.Runner, stack: contextlib.ExitStack) -> Any:
    engine = await own_engine(options)
    stack.callback(lambda: runner.run(engine.aclose()))
    tokenizer = engine.tokenizer
    if tokenizer is None or not tokenizer.has_chat_template:
        raise ConfigError(
            f"{engine.config.model_name} has no chat template: 'aioinfer generate --raw' continues texts"
        )
    return engine


def _converse(conversation: Conversation) -> int:
    prompt = "> " if sys.stdin.isatty() else ""
    if prompt:
        _note("/help lists commands; Ctrl-C stops an answer, Ctrl-D ends")
    while True:
        try:
            line = input(prompt)
        except EOFError:
            if prompt:
                _write("\n")
            return 0
        except UnicodeDecodeError:
            _note("that was not UTF-8")
            continue
        except OSError as error:  # of the terminal, unless it is the output's
            _write("")
            _note(f"the input has ended: {error.strerror}")
            return 1
        except KeyboardInterrupt:  # drops what was typed
            _write("\n")
            continue
        conversation.line(line)


def _write(text: str) -> None:
    write(text, end="")


def _note(text: str) -> None:
    if text:
        dim, normal = ("\033[2m", "\033[0m") if sys.stderr.isatty() else ("", "")
        note(f"{dim}{text}{normal}")


def history_path() -> Path:
    """The file of typed lines, by the XDG Base Directory Specification."""
    state = os.environ.get("XDG_STATE_HOME", "")
    base = Path(state) if os.path.isabs(state) else Path.home() / ".local" / "state"
    return base / "aioinfer" / "chat_history"


@contextlib.contextmanager
def _history(path: Path | None) -> Any:
    """Edit lines and keep them in a file of the user's alone, where the system and a terminal allow that."""
    try:
        import readline
    except ImportError:
        yield
        return
    if path is None or not sys.stdin.isatty():
        yield
        return
    with contextlib.suppress(OSError):
        readline.read_history_file(path)
    try:
        yield
    finally:
        readline.set_history_length(_MOST_LINES)
        with contextlib.suppress(OSError):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
            readline.write_history_file(path)
