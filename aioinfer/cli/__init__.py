"""The command line and the doctor."""

from aioinfer.cli.main import main

__all__ = ["main"]
