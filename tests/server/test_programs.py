"""Libraries on top of the clients, and clients of other languages, unpatched and with their defaults, against
the bundled model.

They are many and heavy: see :mod:`tests.server.programs.environments`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.server.conftest import Bundled
from tests.server.programs.environments import NONE, node_module, python_with
from tests.tiers import PROGRAM, nightly

PROGRAMS = Path(__file__).parent / "programs"
SUM = "20 + 22 = 42"
#: names under which the model is served: libraries may take only those that they know
NAMES = "tiny-chat,gpt-5.5"
#: program -> its library, and what it prints
PYTHON: dict[str, tuple[str, list[str]]] = {
    "openai_agents": (
        "agents",
        [f"run {SUM}", f"stream {SUM} True", "tools 1", "typed Sign"] * 2 + [f"run {SUM}"],
    ),
    "pydantic_agents": ("pydantic_ai", [f"run {SUM}", f"stream {SUM}", "typed Sign", "tools Sign"] * 3),
    "langchain_chat": (
        "langchain_openai",
        [f"run {SUM}", f"stream {SUM}", "typed Sign", "typed Sign", "tools weather True"] * 3
        + ["stream True"],
    ),
    "instructor_models": ("instructor", ["typed Sign", *["typed Sign", "stream True"] * 3, "typed Sign"]),
    "litellm_calls": (
        "litellm",
        [
            *(f"run {SUM}", "stream response.created response.completed", f"run {SUM}", f"stream {SUM}"),
            *[f"run {SUM}", f"stream {SUM} True", "typed Sign", "tools weather"] * 2,
            "run True",
        ],
    ),
    "llama_index_chat": (
        "llama_index",
        [
            *(f"run {SUM}", f"stream {SUM}", "typed Sign", "tools weather", "run True"),
            *(f"run {SUM}", f"stream {SUM}", "typed Sign", "tools weather"),
            "stream True",
        ],
    ),
    "lm_eval_tasks": ("lm_eval", ["run 1.0", "run True", "run 1.0"]),
    "guidellm_load": ("guidellm", ["run 8 0 0 16.0"] * 3),
}
#: the same for Node
NODE: dict[str, tuple[str, list[str]]] = {
    "openai_node": (
        "openai",
        [
            f"models {NAMES}",
            *(f"run {SUM}", f"stream {SUM} true", "typed sign", "tools 1"),
            "stream true 4",
            *(f"run {SUM}", f"stream {SUM} completed", "typed sign", "tools weather completed"),
        ],
    ),
    "ai_sdk": (
        "ai",
        [f"run {SUM}", f"stream {SUM} stop true", "typed sign", "tools true 2", "tools true 2"] * 4
        + ["run 2"],
    ),
    "anthropic_node": (
        "@anthropic-ai/sdk",
        [
            *(f"run {SUM}", f"stream {SUM} end_turn true", "run true", "tools true message"),
            "models tiny-chat,model,tiny-chat,gpt-5.5,model,gpt-5.5",
        ],
    ),
}
#: status of requests by which a client finds out what a server has not: threads
FOUND_OUT = {"anthropic_node": [400]}


async def printed(
    command: Sequence[str | Path], *arguments: str, environment: Mapping[str, str]
) -> list[str]:
    """The lines of a program's output that a test compares."""
    program = await asyncio.create_subprocess_exec(
        *command, *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env=environment
    )
    try:
        out, err = await program.communicate()
    finally:
        if program.returncode is None:
            program.kill()
    assert program.returncode == 0, (out.decode() + err.decode())[-3000:]
    kinds = ("run", "stream", "tools", "typed", "models")
    return [line for line in out.decode().splitlines() if line.split(" ")[0] in kinds]


def failures(caplog: pytest.LogCaptureFixture) -> list[int]:
    """The status of requests in the access log that were not answered."""
    found = [vars(record)["status"] for record in caplog.records if record.name == "aioinfer.access"]
    return [status for status in found if status >= 400]


async def runs(
    name: str,
    command: list[str | Path],
    wanted: list[str],
    served: tuple[Bundled, Path, Path],
    caplog: pytest.LogCaptureFixture,
) -> None:
    bundled, model, home = served
    # Offline, and without the modules of the tests.
    settings = {
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "OPENAI_AGENTS_DISABLE_TRACING": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HOME": str(home / "hub"),
    }
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | settings
    caplog.set_level(logging.INFO, "aioinfer.access")
    server = {"served_model_name": NAMES, "access_log": True, "access_log_format": "json"}
    async with bundled(server=server) as client:
        url = str(client.base_url).removesuffix("/v1/")
        assert await printed(command, url, str(model), environment=environment) == wanted
    assert failures(caplog) == FOUND_OUT.get(name, [])


@nightly(PROGRAM)
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", PYTHON)
async def test_a_library_works_with_the_server(
    bundled: Bundled, model_with_tools: Path, tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    library, wanted = PYTHON[name]
    python = await asyncio.to_thread(python_with, library)
    if python is None:
        pytest.skip(NONE.format(library))
    command: list[str | Path] = [python, "-W", "ignore", PROGRAMS / f"{name}.py"]
    await runs(name, command, wanted, (bundled, model_with_tools, tmp_path), caplog)


@nightly(PROGRAM)
@pytest.mark.parametrize("name", NODE)
async def test_a_package_of_npm_works_with_the_server(
    bundled: Bundled, model_with_tools: Path, tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    package, wanted = NODE[name]
    node, modules = node_module(".bin/node"), node_module("")
    if node is None or modules is None or node_module(package) is None:
        pytest.skip(NONE.format(package))
    # Node looks for modules beside the program.
    shutil.copy(PROGRAMS / f"{name}.mjs", tmp_path)
    (tmp_path / "node_modules").symlink_to(modules)
    command: list[str | Path] = [node, "--no-warnings", tmp_path / f"{name}.mjs"]
    await runs(name, command, wanted, (bundled, model_with_tools, tmp_path), caplog)
