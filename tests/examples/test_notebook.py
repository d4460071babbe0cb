"""The notebook is one, and its cells run in their order on one event loop, as a kernel runs them."""

from __future__ import annotations

import ast
import inspect
import json
from pathlib import Path
from typing import Any

import pytest

from aioinfer import EngineState
from tests.tiers import SECONDS, rest

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook.ipynb"


async def run_cell(source: str, namespace: dict[str, Any]) -> Any:
    """Run a cell, which may await; the value of its last line if that is an expression."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    parts: list[tuple[Any, str]] = [(tree, "exec")]
    if isinstance(last, ast.Expr):
        parts.append((ast.Expression(last.value), "eval"))
    for part, mode in parts:
        value = eval(compile(part, "cell", mode, ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), namespace)
        if inspect.iscoroutine(value):
            value = await value
    return value


@rest(SECONDS)
async def test_the_cells_of_the_notebook_run(capsys: pytest.CaptureFixture[str]) -> None:
    notebook = json.loads(NOTEBOOK.read_text("utf-8"))
    namespace: dict[str, Any] = {}
    shown = [
        await run_cell("".join(cell["source"]), namespace)
        for cell in notebook["cells"]
        if cell["cell_type"] == "code"
    ]
    assert [value for value in shown if value is not None] == [
        "17 + 25 = 42",
        [f"{n} + {n} = {2 * n}" for n in range(40, 45)],
    ]
    assert "Mira" in capsys.readouterr().out
    assert namespace["engine"].state is EngineState.CLOSED


def test_the_notebook_is_kept_without_outputs_in_the_form_of_jupyter() -> None:
    text = NOTEBOOK.read_text("utf-8")
    notebook = json.loads(text)
    assert text == json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    for cell in notebook["cells"]:
        assert cell["cell_type"] in ("code", "markdown")
        assert cell["cell_type"] == "markdown" or (cell["outputs"], cell["execution_count"]) == ([], None)
