"""Libraries on top of the clients, unpatched and with their defaults, against the bundled model.

They are many and heavy, and pin each other's dependencies: ``AIOINFER_CLIENTS_PYTHON`` is the Python of an
environment that has them.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.server.conftest import Bundled
from tests.tiers import PROGRAM, battery

PROGRAMS = Path(__file__).parent / "programs"
PYTHON = os.environ.get("AIOINFER_CLIENTS_PYTHON", sys.executable)
SUM = "20 + 22 = 42"
#: program -> its library, and what it prints
EXPECTED = {
    "openai_agents": ("agents", [f"run {SUM}", f"stream {SUM} True", "tools 1", "typed Sign"]),
    "pydantic_agents": ("pydantic_ai", [f"run {SUM}", f"stream {SUM}", "typed Sign"] * 2),
    "langchain_chat": (
        "langchain_openai",
        [f"run {SUM}", f"stream {SUM}", "typed Sign", "typed Sign", "tools True"],
    ),
    "instructor_models": ("instructor", ["typed Sign"] * 2),
    "litellm_calls": (
        "litellm",
        [f"run {SUM}", "stream response.created response.completed", f"run {SUM}", f"stream {SUM}"],
    ),
}


@cache
def installed(library: str) -> bool:
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({library!r}) is None)"
    return subprocess.run([PYTHON, "-c", code], check=False).returncode == 0


@battery(PROGRAM)
@pytest.mark.parametrize("name", EXPECTED)
async def test_a_library_works_with_responses_and_messages(bundled: Bundled, name: str) -> None:
    library, wanted = EXPECTED[name]
    if not await asyncio.to_thread(installed, library):
        pytest.skip(f"{PYTHON} has no {library}: see AIOINFER_CLIENTS_PYTHON")
    # Offline, and without the modules of the tests.
    settings = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "OPENAI_AGENTS_DISABLE_TRACING": "1"}
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | settings
    async with bundled() as client:
        url = str(client.base_url).removesuffix("/v1/")
        program = await asyncio.create_subprocess_exec(
            *(PYTHON, "-W", "ignore", str(PROGRAMS / f"{name}.py"), url),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=environment,
        )
        out, err = await program.communicate()
    assert program.returncode == 0, err.decode()[-3000:]
    lines = out.decode().splitlines()
    assert [line for line in lines if line.split(" ")[0] in ("run", "stream", "tools", "typed")] == wanted
