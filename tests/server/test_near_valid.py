"""Requests that are almost right, in any combination of constraints: an answer or a refusal by name, never a
fault of the server, and never a field that is ignored."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import re
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match

from aioinfer.config import EngineConfig, ServerConfig
from aioinfer.engine import Engine
from aioinfer.server.anthropic.endpoints import COUNT_ENDPOINT, MESSAGES_ENDPOINT
from aioinfer.server.openai.embeddings import EMBEDDING_ENDPOINT, RERANK_ENDPOINT, SCORE_ENDPOINT
from aioinfer.server.openai.wires import CHAT_ENDPOINT, COMPLETION_ENDPOINT
from aioinfer.server.responses.endpoints import RESPONSES_ENDPOINT
from tests.server.calls import http
from tests.server.conftest import run_server
from tests.server.event_order import MessageOrder, ResponseOrder
from tests.server.near_valid import SCHEMAS, chat_request, wire_request
from tests.server.test_openapi import violations
from tests.server.test_responses import read_events
from tests.tiers import SECONDS, points, rest

_AT_ONCE = 8


Request = Callable[[random.Random], tuple[str, dict[str, Any]]]
#: requests, their number, model, parser of reasoning
QUICK: list[tuple[Request, int, str, str | None]] = [
    (chat_request, 300, "tiny-chat", None),
    (wire_request, 300, "tiny-chat", None),
]
MANY = [
    (chat_request, 5_000, "tiny-chat", None),
    (chat_request, 1_500, "tiny-chat", "qwen3"),
    (chat_request, 1_500, "tiny-diffusion", None),
    (wire_request, 5_000, "tiny-chat", None),
    (wire_request, 1_500, "tiny-chat", "qwen3"),
]


@rest(SECONDS)
@pytest.mark.parametrize(
    ("request_", "count", "model", "reasoning"),
    points(QUICK, MANY, "thousands of requests take half a minute"),
)
async def test_requests_that_are_almost_right_are_answered_or_refused_by_name(
    request_: Request, count: int, model: str, reasoning: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    seed = int(os.environ.get("AIOINFER_TEST_SEED", random.randrange(2**32)))
    sys.stdout.write(f"seed {seed}: AIOINFER_TEST_SEED repeats it\n")
    rng = random.Random(seed)
    statuses: Counter[int] = Counter()
    work = iter([request_(rng) for _ in range(count)])
    caplog.set_level(logging.WARNING)
    formats = {"tool_call_parser": "hermes", "reasoning_parser": reasoning}
    engine = Engine(EngineConfig(model=model, threads=1, num_pages=2048, **formats))
    config = ServerConfig(port=0, served_model_name="tiny-chat")
    async with engine, run_server(engine, config) as running, http(running.url) as client:

        async def ask() -> None:
            for path, body in work:
                reply = await client.post(f"/v1/{path}", body)
                statuses[reply.status] += 1
                check(reply.status, reply.text, path, body)

        async with asyncio.TaskGroup() as group:
            for _ in range(_AT_ONCE):
                group.create_task(ask())
        assert engine.stats().running == 0
    sys.stdout.write(f"{dict(statuses)}\n")
    assert [record.getMessage() for record in caplog.records] == []
    assert min(statuses[200], statuses[400]) > count // 10


VALIDATORS = {path: Draft202012Validator(schema) for path, schema in SCHEMAS.items()}
ENDPOINTS = {
    each.path[1:]: each
    for each in (
        *(CHAT_ENDPOINT, COMPLETION_ENDPOINT, RESPONSES_ENDPOINT, MESSAGES_ENDPOINT, COUNT_ENDPOINT),
        *(EMBEDDING_ENDPOINT, SCORE_ENDPOINT, RERANK_ENDPOINT),
    )
}
#: what a body needs, or the model decides; "method": the one that the model is made for
NEEDED = {"input", "messages", "prompt", "max_tokens", "body", "text_1", "text_2", "query", "documents"}
NEEDED |= {"n", "tools", "tool_choice", "model", "method"}


def check(status: int, text: str, path: str, body: dict[str, Any]) -> None:
    """Never a fault of the server, and always a field that the request has or misses."""
    told = (status, text[:500], path, json.dumps(body)[:2000])
    assert status in (200, 400, 404), told
    error = json.loads(text)["error"] if status != 200 else None
    if status == 200:
        # Nothing in the body is ignored, because its schema admits nothing else.
        fault = best_match(VALIDATORS[path].iter_errors(body))
        assert fault is None, (fault, told)
        if text.startswith((":", "event:")):
            error = check_events(text, path, told)
        else:
            assert not violations(ENDPOINTS[path].answer, json.loads(text)), told
    if error is None:
        return
    kinds = {404: "not_found_error"} if path.startswith("messages") else {}
    assert error.get("type") in (kinds.get(status, "invalid_request_error"), "error"), told
    named = "model" if status == 404 else error.get("param") or error["message"]
    top = re.split(r"[.\[:,]", named)[0]
    assert top in body or top in NEEDED, told


def check_events(text: str, path: str, told: Any) -> Any:
    """The error at the end of a stream, if it has one: constraints that turn out to allow nothing."""
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    failed = None
    if path not in ("responses", "messages"):
        failed = events.pop()["error"] if "error" in events[-1] else None
    for event in events:
        assert not violations(ENDPOINTS[path].events, event), (event, told)
    if path not in ("responses", "messages"):
        return failed
    order = ResponseOrder() if path == "responses" else MessageOrder()
    read_events(order.take, text)
    order.check_ended()
    return order.error
