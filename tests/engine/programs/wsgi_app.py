"""A WSGI application over an engine in a thread, started on import or with the first request of a process."""

from __future__ import annotations

import functools
import json
import os
import threading
from collections.abc import Callable, Iterable
from typing import Any

from aioinfer import Engine, EngineConfig, SamplingParams

CONFIG = EngineConfig(threads=1)
#: with ``gunicorn --preload``: in the parent
EARLY = Engine.in_thread(CONFIG) if os.environ.get("ENGINE") == "early" else None


_starting = threading.Lock()


@functools.cache
def started() -> Any:
    return EARLY or Engine.in_thread(CONFIG)


def engine() -> Any:
    """The engine of this worker, which its first request starts."""
    with _starting:
        return started()


def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
    left, _, right = environ["PATH_INFO"].strip("/").partition("+")
    chat = [{"role": "user", "content": f"What is {left} + {right}?"}]
    try:
        params = SamplingParams(temperature=0, max_tokens=16)
        text = engine().generate(chat, params).result(timeout=60).text
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    body = json.dumps({"text": text, "pid": os.getpid(), "parent": os.getppid()}).encode()
    start_response("200 OK", [("Content-Type", "application/json"), ("Content-Length", str(len(body)))])
    return [body]
