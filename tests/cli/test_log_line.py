"""The log line of ``aioinfer serve``: on unless it is switched off, and shown at the usual level."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from aioinfer.cli.serving import _reporting
from aioinfer.config import EngineConfig

STATS = logging.getLogger("aioinfer.stats")


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    """The root logger, whose level and that of the line are put back."""
    root = logging.getLogger()
    before = root.level, STATS.level
    yield root
    root.setLevel(before[0])
    STATS.setLevel(before[1])


@pytest.mark.parametrize(
    ("level", "interval", "expected", "shown"),
    [
        ("WARNING", None, 10.0, True),
        ("INFO", None, 10.0, True),
        ("ERROR", None, 10.0, False),
        ("WARNING", 2.5, 2.5, True),
        ("WARNING", 0.0, 0.0, False),
        ("INFO", 0.0, 0.0, True),  # but nothing logs one
    ],
)
def test_the_line_is_logged_unless_it_is_switched_off(
    root: logging.Logger, level: str, interval: float | None, expected: float, shown: bool
) -> None:
    root.setLevel(level)
    STATS.setLevel(logging.NOTSET)
    config = _reporting(EngineConfig(stats_interval=interval))
    assert config.stats_interval == expected
    assert STATS.isEnabledFor(logging.INFO) is shown
