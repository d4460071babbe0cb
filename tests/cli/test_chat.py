"""``aioinfer chat``: what is typed, what is shown, and what an interrupt ends."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop

from aioinfer.cli.chat import Conversation, history_path
from aioinfer.cli.main import main
from aioinfer.config import EngineConfig
from aioinfer.errors import InvalidRequest, RequestError
from aioinfer.native.build import cache_directory
from aioinfer.params import SamplingParams
from tests.tiers import PROGRAM, nightly

COMMAND = [sys.executable, "-m", "aioinfer", "chat", "tiny-chat", "--threads", "1", "--temperature", "0"]


class Script:
    """A backend that plays answers: texts, or what to call amid one."""

    def __init__(self, *answers: list[Any]) -> None:
        self._answers = list(answers)
        self.asked: list[list[dict[str, str]]] = []
        self.values: dict[str, Any] = {}
        self.closed = 0
        self.counts: tuple[int, int] | None = (5, 3)

    def check(self, values: dict[str, Any]) -> None:
        SamplingParams(**values)

    async def answer(
        self, messages: list[dict[str, str]], values: dict[str, Any]
    ) -> AsyncGenerator[str, None]:
        self.asked.append([*messages])
        self.values = values
        try:
            for each in self._answers.pop(0):
                if callable(each):
                    each()
                    await asyncio.sleep(0)
                    await asyncio.get_running_loop().create_future()  # to the end of time
                elif isinstance(each, Exception):
                    raise each
                else:
                    yield each
        finally:
            self.closed += 1

    def stats(self) -> str:
        return "the stats"


class Terminal:
    def __init__(self) -> None:
        self.text = ""
        self.notes: list[str] = []

    def write(self, text: str) -> None:
        self.text += text


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def talk(request: pytest.FixtureRequest) -> Iterator[Callable[..., tuple[Conversation, Terminal]]]:
    with asyncio.Runner(loop_factory=request.param) as runner:

        def make(backend: Any, **options: Any) -> tuple[Conversation, Terminal]:
            terminal = Terminal()
            values = {"max_tokens": 9}
            options = {"write": terminal.write, "note": terminal.notes.append, **options}
            return Conversation(backend, runner, values=values, **options), terminal

        yield make


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_a_conversation_is_remembered(talk: Any) -> None:
    script = Script(["Hel", "lo"], ["again"])
    conversation, terminal = talk(script, system="Be brief.")
    conversation.line("  hi \n")
    conversation.line("")
    conversation.line("more")
    assert terminal.text == "Hello\nagain\n"
    assert script.asked[1] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "more"},
    ]
    assert len(terminal.notes) == 2
    for note in terminal.notes:
        assert "first token" in note
        assert "tokens/s" in note
        assert "3 tokens, prompt 5" in note
    conversation.line("/clear")
    assert conversation.messages == [{"role": "system", "content": "Be brief."}]


def test_an_interrupt_stops_the_answer_only(talk: Any) -> None:
    before = signal.getsignal(signal.SIGINT)
    script = Script(["par", interrupt], [interrupt], ["fine"])
    conversation, terminal = talk(script)
    conversation.line("one")
    assert terminal.notes == ["stopped"]
    # What was said is part of the conversation; a question without an answer is not.
    assert conversation.messages[-1] == {"role": "assistant", "content": "par"}
    conversation.line("two")
    assert len(conversation.messages) == 2
    conversation.line("three")
    assert terminal.text.endswith("fine\n")
    assert script.closed == 3
    assert signal.getsignal(signal.SIGINT) is before


def test_an_error_is_a_note_and_the_conversation_goes_on(talk: Any) -> None:
    script = Script([InvalidRequest("prompt", "is too long")], ["a", RequestError("gone")], ["fine"])
    conversation, terminal = talk(script)
    for line in ("one", "two", "three"):
        conversation.line(line)
    assert terminal.notes[:2] == ["error: prompt: is too long", "error: gone"]
    assert [each["content"] for each in conversation.messages] == ["two", "a", "three", "fine"]


def test_images_go_with_the_next_question(talk: Any, tmp_path: Path) -> None:
    image, other = tmp_path / "a b.gif", tmp_path / "x.txt"
    image.write_bytes(b"GIF89a" + bytes(40))
    other.write_text("no image")
    script = Script(["Red."], ["Why not?"])
    conversation, terminal = talk(script)
    for line in (
        f"/image {image}",
        f"/image {image}",
        f"/image {other}",
        f"/image {tmp_path}",
        "Which colour?",
    ):
        conversation.line(line)
    conversation.line("Why?")
    notes = terminal.notes
    assert notes[:2] == ["1 image with the next question", "2 images with the next question"]
    assert all(note.startswith("no image: ") for note in notes[2:4])
    url = f"data:image/gif;base64,{base64.b64encode(image.read_bytes()).decode()}"
    part = {"type": "image_url", "image_url": {"url": url}}
    question = {"role": "user", "content": [part, part, {"type": "text", "text": "Which colour?"}]}
    assert script.asked[0] == [question]
    assert script.asked[1] == [
        question,
        {"role": "assistant", "content": "Red."},
        {"role": "user", "content": "Why?"},
    ]


def test_parameters_are_set_checked_and_shown(talk: Any) -> None:
    script = Script(["x"], ["y"])
    conversation, terminal = talk(script)
    for line in ("/set temperature 0.5", "/set seed 3", "/set"):
        conversation.line(line)
    assert terminal.notes == ["max_tokens = 9, temperature = 0.5, seed = 3"]
    conversation.line("hi")
    assert script.values == {"max_tokens": 9, "temperature": 0.5, "seed": 3}
    terminal.notes.clear()
    for line in ("/set temperature -1", "/set nonsense 1", "/set temperature hot", "/set seed none"):
        conversation.line(line)
    assert "temperature" in terminal.notes[0]
    assert terminal.notes[1] == "nonsense is no sampling parameter"
    assert "temperature" in terminal.notes[2]
    conversation.line("hi")
    assert script.values == {"max_tokens": 9, "temperature": 0.5}


def test_a_conversation_is_saved_and_no_file_is_overwritten(talk: Any, tmp_path: Path) -> None:
    conversation, terminal = talk(Script(["é"]))
    conversation.line("hi")
    terminal.notes.clear()
    file = tmp_path / "with space.json"
    conversation.line(f"/save {file}")
    assert json.loads(file.read_text()) == conversation.messages
    conversation.line(f"/save {file}")
    conversation.line("/save /no/such/directory/x")
    assert [note.partition(":")[0] for note in terminal.notes[1:]] == ["not saved", "not saved"]


@pytest.mark.parametrize(
    "line", ["/", "/nonsense", "/clear now", "/save", "/set temperature", "/" + "x" * 500]
)
def test_an_unknown_command_is_a_short_note_and_no_question(talk: Any, line: str) -> None:
    script = Script()
    conversation, terminal = talk(script)
    conversation.line(line)
    (note,) = terminal.notes
    assert "/help" in note
    assert len(note) < 150
    assert not script.asked


def test_the_other_commands(talk: Any) -> None:
    conversation, terminal = talk(Script())
    conversation.line("/help")
    conversation.line("/stats")
    assert all(name in terminal.notes[0] for name in ("/clear", "/set", "/save", "/stats", "Ctrl-D"))
    assert terminal.notes[1] == "the stats"


# -- the program ---------------------------------------------------------------------------------------


@nightly(PROGRAM)
def test_lines_of_a_pipe_are_answered(tmp_path: Path) -> None:
    # Whatever the home directory, kernels have been compiled.
    places = {"HOME": str(tmp_path / "none"), "AIOINFER_CACHE": str(cache_directory())}
    done = subprocess.run(
        COMMAND,
        input="What is 20 + 22?\n/stats\n",
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, **places},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "20 + 22 = 42\n"
    assert "tokens/s" in done.stderr
    assert "1 answers" in done.stderr


@nightly(PROGRAM)
def test_typed_lines_are_kept_unless_told_otherwise(tmp_path: Path) -> None:
    for option, kept in (("--no-history", False), ("--system=x", True)):
        state = tmp_path / option.strip("-")
        assert "20 + 22 = 42" in type_into([*COMMAND, option], "What is 20 + 22?\n", state)
        file = state / "aioinfer" / "chat_history"
        assert file.exists() == kept
        if kept:
            assert "What is 20 + 22?" in file.read_text()
            assert file.stat().st_mode & 0o777 == 0o600
            assert file.parent.stat().st_mode & 0o777 == 0o700


def type_into(command: list[str], text: str, state: Path) -> str:
    """What a terminal shows of a program into which somebody types, and Ctrl-D behind it."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "XDG_STATE_HOME": str(state), "TERM": "dumb"}
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as process:
        os.close(theirs)
        shown = b""
        timer = threading.Timer(240, process.kill)
        timer.start()
        try:
            while b"> " not in shown:
                shown += os.read(ours, 4096)
            os.write(ours, text.encode())
            while b"42" not in shown or not shown.endswith(b"> "):  # the answer, and the next prompt
                shown += os.read(ours, 4096)
            os.write(ours, b"\x04")
            assert process.wait(120) == 0
        finally:
            timer.cancel()
            process.kill()
            os.close(ours)
    return shown.decode()


def test_the_file_of_typed_lines_is_where_xdg_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/x")
    for given, base in (("", "/home/x/.local/state"), ("relative", "/home/x/.local/state"), ("/s", "/s")):
        monkeypatch.setenv("XDG_STATE_HOME", given)
        assert history_path() == Path(base, "aioinfer", "chat_history")


def test_a_model_that_cannot_chat_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "/no/such/model"]) == 2
    assert "/no/such/model" in capsys.readouterr().err
    model = tmp_path / "model"
    shutil.copytree(EngineConfig().model_path, model)
    (model / "chat_template.jinja").unlink()
    assert main(["chat", str(model), "--threads", "1"]) == 2
    assert "has no chat template" in capsys.readouterr().err
