"""Claude Code and Codex, unpatched and without a terminal, against scripted answers that call their tools.

Their prompts, of tens of thousands of characters, are too long for the bundled model. See
:mod:`tests.server.programs.environments`.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from aioinfer.config import ServerConfig
from aioinfer.testing import Answer, FakeEngine
from tests.server.conftest import run_server
from tests.server.programs.environments import NONE, node_module
from tests.server.test_programs import failures
from tests.tiers import PROGRAM, nightly

#: names of models: one that the agents do not know, and those with which they send more
NAMES = "fake,claude-sonnet-5-5,gpt-5.5"
DONE = "The command has run."
CODEX = """
model_provider = "local"
[model_providers.local]
name = "local"
base_url = "{url}/v1"
wire_api = "responses"
[analytics]
enabled = false
"""


@asynccontextmanager
async def served(*calls: tuple[str, Mapping[str, Any]]) -> AsyncIterator[tuple[str, FakeEngine]]:
    """The address of an engine that calls these tools, one after the other, and then answers."""

    def answer(prompt: str) -> Answer:
        done = prompt.count("\ntool: ")
        called = [calls[done]] if done < len(calls) else []
        return Answer("" if called else DONE, reasoning="Hm.", tool_calls=called)

    config = ServerConfig(
        port=0, served_model_name=NAMES, access_log=True, access_log_format="json", drain_timeout=60.0
    )
    async with FakeEngine(answer) as engine, run_server(engine, config) as running:
        yield running.url, engine


async def run(command: list[str | Path], home: Path, **settings: str) -> list[Any]:
    """What an agent prints: JSON, line by line. It knows nothing of its user."""
    work = home / "work"
    work.mkdir()
    program = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=work,
        env={"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": str(home), **settings},
    )
    try:
        out, err = await program.communicate()
    finally:
        if program.returncode is None:
            program.kill()
    assert program.returncode == 0, (out.decode() + err.decode())[-3000:]
    return [json.loads(line) for line in out.decode().splitlines() if line.startswith("{")]


def installed(*paths: str) -> list[Path]:
    found = [node_module(path) for path in paths]
    if None in found:
        pytest.skip(NONE.format(paths[-1]))
    return [path for path in found if path is not None]


BASH = ("Bash", {"command": "echo 6 x 7 is $((6 * 7))", "description": "Compute"})
SEARCH = ("ToolSearch", {"query": "select:CronList", "max_results": 5})


@nightly(PROGRAM)
@pytest.mark.parametrize(
    ("model", "calls"),
    [("fake", [BASH]), ("claude-sonnet-5-5", [BASH]), ("fake", [SEARCH, ("CronList", {}), BASH])],
    ids=["unknown", "known", "deferred-tool"],
)
async def test_claude_code_runs_its_tools(
    tmp_path: Path, model: str, calls: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    (claude,) = installed(".bin/claude")
    caplog.set_level(logging.INFO, "aioinfer.access")
    options = ["--output-format", "stream-json", "--verbose", "--model", model]
    allowed = ["--allowedTools", *{name for name, _ in calls}]
    async with served(*calls) as (url, engine):
        lines = await run(
            [claude, "-p", "Compute.", *options, *allowed],
            tmp_path,
            ANTHROPIC_BASE_URL=url,
            ANTHROPIC_API_KEY="none",
            CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
            DISABLE_AUTOUPDATER="1",
        )
    result = lines[-1]
    assert (result["result"], result["is_error"]) == (DONE, False)
    assert result["num_turns"] == len(calls) + 1
    assert "6 x 7 is 42" in engine.requests[-1].prompt
    # Every request was answered at once.
    assert not failures(caplog)
    assert len(engine.requests) == len(calls) + 1


@nightly(PROGRAM)
@pytest.mark.parametrize("model", ["fake", "gpt-5.5"], ids=["unknown", "known"])
async def test_codex_runs_its_tools(tmp_path: Path, model: str, caplog: pytest.LogCaptureFixture) -> None:
    node, codex = installed(".bin/node", ".bin/codex")
    caplog.set_level(logging.INFO, "aioinfer.access")
    settings = tmp_path / ".codex"
    settings.mkdir()
    async with served(("exec_command", {"cmd": "echo 6 x 7 is $((6 * 7))"})) as (url, engine):
        (settings / "config.toml").write_text(CODEX.format(url=url))
        command = ["exec", "--skip-git-repo-check", "--json", "-m", model, "Compute."]
        lines = await run([node, codex, *command], tmp_path, CODEX_HOME=str(settings))
    items = [line["item"] for line in lines if line["type"] == "item.completed"]
    (ran,) = (item for item in items if item["type"] == "command_execution")
    assert (ran["exit_code"], ran["aggregated_output"]) == (0, "6 x 7 is 42\n")
    assert items[-1]["text"] == DONE
    assert lines[-1]["type"] == "turn.completed"
    assert "6 x 7 is 42" in engine.requests[-1].prompt
    assert not failures(caplog)
    assert len(engine.requests) == 2
