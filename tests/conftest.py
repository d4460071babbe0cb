"""Shared by all tests: every asyncio test runs on asyncio's own loop and on uvloop."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import uvloop

# One thread per torch process, subprocesses included: on a busy machine a second one makes each step
# wait for the slower of the two, many times over. Set before anything imports torch.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Without a GPU, Triton kernels run in its interpreter. Triton makes its own functions for one or the other
# when it is imported, which transformers does too, so a process must know before that.
if not any(Path("/dev").glob("nvidia[0-9]*")):
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


def pytest_runtest_setup(item: pytest.Item) -> None:
    """The one place where something that is not there skips tests: a GPU."""
    if item.get_closest_marker("native") is not None:
        from tests.compiled import require_native

        require_native()
    if item.get_closest_marker("gpu") is not None:
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device; its twin on the CPU has run, where it can have one")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    """``checkpoint(family) -> (directory, transformers model in float32)``, made once."""
    import torch

    from tests.model.checkpoints import make_checkpoint

    made: dict[str, tuple[Path, Any]] = {}

    def get(name: str) -> tuple[Path, Any]:
        if name not in made:
            path = tmp_path_factory.mktemp(name)
            made[name] = (path, make_checkpoint(name, path))
        return made[name]

    torch.set_num_threads(1)
    return get
