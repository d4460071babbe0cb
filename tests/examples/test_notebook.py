"""The notebook runs in a kernel, and is kept with what it shows there.

``python -m tests.examples.test_notebook`` executes it and keeps the outputs; with ``-`` it prints them.
"""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.tiers import PROGRAM, rest

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook.ipynb"
#: a page on which GitHub shows it, and a clone
MOST_BYTES = 100_000


def kept() -> dict[str, Any]:
    notebook: dict[str, Any] = json.loads(NOTEBOOK.read_text("utf-8"))
    return notebook


def written(notebook: dict[str, Any]) -> str:
    return json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def execute() -> dict[str, Any]:
    """The notebook with what its cells show in a new kernel; raises CellExecutionError."""
    import nbformat
    from nbclient import NotebookClient
    from traitlets.config import Config

    notebook = nbformat.reads(NOTEBOOK.read_text("utf-8"), as_version=4)
    options = Config({"KernelManager": {"transport": "ipc"}})
    NotebookClient(notebook, config=options, record_timing=False, coalesce_streams=True).execute()
    executed: dict[str, Any] = json.loads(nbformat.writes(notebook))
    return executed | {"metadata": kept()["metadata"]}


def shown(notebook: dict[str, Any]) -> dict[str, dict[str, str]]:
    """By cell and by kind of output, what is shown. Texts are joined."""
    found: dict[str, dict[str, str]] = {}
    for cell in notebook["cells"]:
        kinds = found.setdefault(cell["id"], {})
        for output in cell.get("outputs", []):
            parts = output["data"] if "data" in output else {output["name"]: output["text"]}
            for kind, text in parts.items():
                kinds[kind] = kinds.get(kind, "") + (text if isinstance(text, str) else "".join(text))
    return found


def check_outputs(notebook: dict[str, Any]) -> None:
    cells = shown(notebook)
    assert "weights: 100%" in cells["start"]["stderr"]
    assert cells["question"] == {"text/plain": "'17 + 25 = 42'"}
    assert "Mira" in cells["story"]["stdout"]
    assert "100%" in cells["map"]["stderr"]
    assert "32/32" in cells["map"]["stderr"]
    assert "Mira" in cells["map"]["text/plain"]
    assert base64.b64decode(cells["plot"]["image/png"]).startswith(b"\x89PNG")
    assert cells["close"] == {}


@rest(PROGRAM)
def test_the_cells_of_the_notebook_run_in_a_kernel() -> None:
    # In a process of its own: the client of a kernel leaves sockets behind.
    module = [sys.executable, "-m", "tests.examples.test_notebook", "-"]
    done = subprocess.run(module, capture_output=True, text=True, cwd=NOTEBOOK.parents[1])
    assert done.returncode == 0, done.stderr
    executed = json.loads(done.stdout)
    check_outputs(executed)
    for deterministic in ("question", "story"):
        assert shown(executed)[deterministic] == shown(kept())[deterministic]


def test_the_notebook_is_kept_with_its_outputs_in_the_form_of_jupyter() -> None:
    notebook = kept()
    text = NOTEBOOK.read_text("utf-8")
    assert text == written(notebook)
    assert len(text) < MOST_BYTES
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == [*range(1, len(code) + 1)]
    check_outputs(notebook)


if __name__ == "__main__":
    text = written(execute())
    sys.stdout.write(text) if sys.argv[1:] == ["-"] else NOTEBOOK.write_text(text, "utf-8")
