"""Requests that schemathesis makes of the OpenAPI document, valid and invalid ones, to a served model.

No answer is a fault of the server, every answer and every event of a stream is as the document says, and what
the document does not allow is refused. With ``--log-cli-level info`` it says how many were answered how.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from aioinfer.config import EngineConfig, ServerConfig
from aioinfer.engine import Engine
from aioinfer.server import serve
from tests.tiers import nightly, scaled

#: valid and invalid bodies of each endpoint, and streams: 2,100 cases nightly
CASES = 110
#: Fields with which a request asks for an error, and what the model and its chat template decide.
TAME = {
    "model": {"enum": ["tiny-chat", None]},
    "waiting_timeout": {"type": "number", "minimum": 60},
    "running_timeout": {"type": "number", "minimum": 60},
    "role": {"enum": ["user", "assistant"]},
}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Of a server in a thread of its own: schemathesis waits for answers."""
    address: list[str] = []
    begun = threading.Event()
    stops: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    async def main() -> None:
        config = EngineConfig(
            threads=1, max_model_len=256, tool_call_parser="hermes", reasoning_parser="qwen3"
        )
        stop = asyncio.Event()
        stops.append((asyncio.get_running_loop(), stop))

        def ready(found: str) -> None:
            address.append(found)
            begun.set()

        try:
            await serve_with(config, stop, ready)
        finally:
            begun.set()

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    begun.wait(120)
    yield address[0]
    loop, stop = stops[0]
    loop.call_soon_threadsafe(stop.set)
    thread.join(60)


async def serve_with(config: EngineConfig, stop: asyncio.Event, ready: Any) -> None:
    async with Engine(config) as engine:
        await serve(engine, ServerConfig(port=0), stop=stop, ready=ready)


def tamed(document: Any) -> Any:
    """The document with the fields of TAME, wherever they are."""
    if isinstance(document, list):
        return [tamed(each) for each in document]
    if not isinstance(document, dict):
        return document
    found = {key: tamed(value) for key, value in document.items()}
    if isinstance(properties := found.get("properties"), dict):
        found["properties"] = {key: TAME.get(key, value) for key, value in properties.items()}
    return found


@nightly("two thousand requests")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["valid", "streamed", "invalid"])
def test_answers_are_as_the_document_says(url: str, kind: str) -> None:
    # Imported here: it takes a second, and most runs leave this test out.
    schemathesis = pytest.importorskip("schemathesis")
    requests = pytest.importorskip("requests")  # which schemathesis uses
    from schemathesis.checks import positive_data_acceptance
    from schemathesis.generation import GenerationMode

    valid = kind != "invalid"
    document = requests.get(f"{url}/openapi.json", timeout=60).json()
    for path, methods in list(document["paths"].items()):
        # Such a stream has no end.
        if "text/event-stream" in methods.get("get", {}).get("responses", {}).get("200", {}).get(
            "content", {}
        ):
            del document["paths"][path]
    streams = [path for path, methods in document["paths"].items() if "text/event-stream" in str(methods)]
    schema = schemathesis.openapi.from_dict(tamed(document) if valid else document)
    statuses: Counter[int] = Counter()
    mode = GenerationMode.POSITIVE if valid else GenerationMode.NEGATIVE
    # What depends on the model or on several fields is refused, too.
    excluded = [positive_data_acceptance]
    with requests.Session() as session:
        for found in schema.get_all_operations():
            operation = found.ok()
            if not valid and operation.method != "post":
                continue  # there is nothing to send
            if kind == "streamed" and operation.path not in streams:
                continue

            @seed(0)
            @settings(
                max_examples=scaled(CASES),
                deadline=None,
                database=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            @given(case=operation.as_strategy(generation_mode=mode))
            def answered(case: Any) -> None:
                if kind == "streamed":
                    case.body["stream"] = True
                response = case.call(base_url=url, session=session, timeout=120)
                statuses[response.status_code] += 1
                case.validate_response(response, excluded_checks=excluded)

            answered()
    logging.getLogger(__name__).info("%d requests by status: %s", statuses.total(), sorted(statuses.items()))
    assert not [status for status in statuses if status >= 500], statuses
    assert statuses[400] > 0, statuses
    assert (statuses[200] > 0) == valid, statuses
