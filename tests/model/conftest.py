"""Checkpoints are made once per session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.model.checkpoints import make_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    """``checkpoint(family) -> (directory, transformers model in float32)``"""
    made: dict[str, tuple[Path, Any]] = {}

    def get(name: str) -> tuple[Path, Any]:
        if name not in made:
            path = tmp_path_factory.mktemp(name)
            made[name] = (path, make_checkpoint(name, path))
        return made[name]

    torch.set_num_threads(1)
    return get
