"""What the parts have in common: the engine's settings, and rows of what is asked and measured."""

from __future__ import annotations

import argparse
from typing import Any

from aioinfer.config import EngineConfig
from bench.gpu.shapes import SHAPES
from bench.peers.checkpoint import find_model
from bench.report import Report

__all__ = ["DEMO", "config", "path_of", "tell"]

DEMO = "tiny-chat"


def path_of(model: str, options: argparse.Namespace) -> str:
    """The directory of a shape, which is made if need be; other names as they are."""
    return str(find_model(model, options.place)) if model in SHAPES else model


def config(model: str, options: argparse.Namespace, **more: Any) -> EngineConfig:
    """Settings of an engine. The demo model has one thread: the other core is for the loop, whose share of
    a step is large there."""
    given = {
        "model": path_of(model, options),
        "device": "cpu",
        "threads": threads(model, options),
        "speculation": "off",
    }
    return EngineConfig(**{**given, **more})


def threads(model: str, options: argparse.Namespace) -> int:
    return 1 if model == DEMO else int(options.threads)


def tell(
    report: Report, figure: str, measured: float, *, most: float | None = None, least: float = 0
) -> None:
    """A row of a figure and its bound."""
    if most is not None:
        asked, met = f"<= {most:g}", measured <= most
    else:
        asked, met = f">= {least:g}", measured >= least
    report.row(figure=figure, asked=asked, measured=measured, met="yes" if met else "NO")
