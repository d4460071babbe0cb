"""The frameworks, if they are installed, without what they would do beside the tests."""

from __future__ import annotations

import importlib
import os
import tempfile
from types import ModuleType

import pytest

__all__ = ["LENIENT", "LIBRARIES", "require"]

#: what frameworks deprecate, also of one another, is no failure of ours
LENIENT = pytest.mark.filterwarnings("default::DeprecationWarning")

#: adapter -> what it needs
LIBRARIES = {
    "langchain": "langchain_core",
    "llama_index": "llama_index.core",
    "haystack": "haystack",
    "dspy": "dspy",
    "pydantic_ai": "pydantic_ai",
}
#: read when they are imported: no events to their makers, no files in the home of who runs the tests
_SETTINGS = {
    "HAYSTACK_TELEMETRY_ENABLED": "False",
    "LANGSMITH_TRACING": "false",
    "DSPY_CACHEDIR": os.path.join(tempfile.gettempdir(), f"aioinfer-dspy-{os.getpid()}"),
}


def require(adapter: str) -> ModuleType:
    """The module of an adapter. Skips the test if its framework is not installed."""
    os.environ.update(_SETTINGS)
    library = LIBRARIES[adapter]
    pytest.importorskip(library, reason=f"{library} is not installed: pip install -e '.[dev]'")
    return importlib.import_module(f"aioinfer.integrations.{adapter}")
