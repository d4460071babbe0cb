"""The import graph of the package: rooms in layers, imports only downwards, no circles between modules.

The graph is read from the source, so imports in functions and under ``TYPE_CHECKING`` count, too. A room is a
folder of the package or one of its public modules.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.tiers import SECONDS, rest

PACKAGE = Path(__file__).parent.parent / "aioinfer"

#: From the top down. A room may import rooms of the layers below its own, and nothing of its own layer.
LAYERS: list[set[str]] = [
    # ``python -m aioinfer``
    {"__main__"},
    # the command line and the doctor
    {"cli"},
    # the engine in virtual time: simulations and their loads
    {"twin"},
    # the HTTP API over an engine; adapters for frameworks
    # scripted engines, the toy device, simulated launchers and clocks
    {"server", "integrations", "testing"},
    # several engines that look like one
    {"parallel"},
    # an engine that is called, not awaited
    {"llm"},
    # its thread, and its loop in its parts
    {"stepping"},
    # what an application holds: the engine in its event loop
    {"engine"},
    # what an application calls of an engine or a dispatcher, on any thread
    {"client"},
    # scores and embeddings: what many requests pool
    {"embeddings"},
    # messages, tools and response formats of chats, and the parts of answers
    {"chat"},
    # the loop: admission of requests, driver of steps
    {"loop"},
    # everything that touches a device: launch thread, packing, graphs, runner
    {"execution"},
    # what a caller reads: streams; statistics and traces
    {"stream", "observe"},
    # which rows a step computes; pure Python. How far a stream has come, as a record
    {"scheduling", "resuming", "cells"},
    # the prompt of a request, what was asked for, and what came of it
    {"prompt_ids"},
    {"request"},
    # how the blocks of diffusion models are denoised; what is drafted for others
    {"diffusion", "speculation"},
    # from logits to tokens
    {"sampling"},
    # layers, weights and attention backends
    {"model"},
    # what a caller gives: parameters and configuration
    {"params", "config", "pooling", "budget"},
    # what a program decides at each position
    {"steering"},
    # tokenizers and grammars; pages and the prefix tree; compiled kernels
    # config values from text, variables and files
    {"text", "cache", "native"},
    # images in prompts
    {"images"},
    # where a model comes from, and how its files are read; copies and checks of a caller's data
    # pages of KV outside the device
    {"checkpoint", "inputs", "tiers"},
    # what was promised of the memory
    {"ledger"},
    # what differs between operating systems
    {"system"},
    # exceptions, results and how they are awaited, parts found by file name
    {"errors", "awaited", "bounds", "forks", "outputs", "plugins"},
    # the version of the package
    {"_version"},
]

#: rooms in pure Python: neither they nor what they import load these at module level
PURE = ("scheduling", "cache", "tiers")
HEAVY = {"torch", "asyncio"}


class Import(NamedTuple):
    """An import statement: its module, and what it imports."""

    module: str
    line: int
    target: str

    def __str__(self) -> str:
        return f"{self.module}:{self.line} imports {self.target}"


def room(module: str) -> str:
    """The room of a module of the package; of the package itself: "aioinfer"."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else module


@cache
def modules() -> dict[str, Path]:
    """Source files by module name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def imports() -> tuple[Import, ...]:
    """Every import statement of the package, by one entry per imported module."""
    return tuple(
        each for name, path in modules().items() for each in _imports(name, ast.parse(path.read_text()))
    )


def _imports(module: str, tree: ast.AST) -> Iterator[Import]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(module, node.lineno, alias.name)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno} is a relative import"
            assert node.module is not None
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                named = whole in modules() or node.module == "aioinfer"
                yield Import(module, node.lineno, whole if named else node.module)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            assert not node.orelse


def inside() -> list[Import]:
    """The imports from room to room, without those of the package itself: it exports names lazily."""
    return [
        each
        for each in imports()
        if each.module != "aioinfer"
        and each.target.split(".")[0] == "aioinfer"
        and room(each.module) != room(each.target)
    ]


@rest(SECONDS)
def test_no_room_imports_the_exports_of_the_package() -> None:
    wrong = [str(each) for each in inside() if each.target not in modules()]
    assert "aioinfer" not in {each.target for each in inside()}
    assert not wrong, "\n".join(wrong)


def test_every_room_has_one_layer() -> None:
    named = sorted(name for layer in LAYERS for name in layer)
    assert named == sorted({room(module) for module in modules()} - {"aioinfer"})


def test_modules_import_no_circle() -> None:
    """Imports in functions and under ``TYPE_CHECKING`` count: a circle of types is one for its readers."""
    graph: dict[str, set[str]] = {}
    for each in imports():
        graph.setdefault(each.module, set()).add(each.target)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(reversed(error.args[1])))


def test_imports_point_downwards() -> None:
    layer = {name: number for number, layer in enumerate(LAYERS) for name in layer}
    wrong = [str(each) for each in inside() if layer[room(each.module)] >= layer.get(room(each.target), -1)]
    assert not wrong, "\n".join(wrong)


def test_transformers_is_imported_by_one_thread_at_a_time() -> None:
    """Of several that begin with it at once some find halves of its modules."""
    alone = {
        (name, each.lineno)
        for name, path in modules().items()
        for block in ast.walk(ast.parse(path.read_text()))
        if isinstance(block, ast.With) and "importing_transformers()" in map(ast.unparse, block.items)
        for each in block.body
    }
    # The module with the lock, and one whose own imports are of it.
    parts = ("aioinfer.checkpoint.libraries", "aioinfer.model.configs")
    wrong = [
        str(each)
        for each in imports()
        if (each.target.split(".")[0] == "transformers" or each.target in parts[1:])
        and each.module not in parts
        and (each.module, each.line) not in alone
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("pure", PURE)
def test_pure_rooms_load_no_torch_and_no_asyncio(pure: str) -> None:
    """Neither they, nor what they import, third-party libraries included."""
    names = [module for module in modules() if room(module) == pure]
    code = f"import sys, {', '.join(names)}; print({HEAVY} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
