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
from aioinfer.server.responses.endpoints import RESPONSES_ENDPOINT
from tests.server.calls import http
from tests.server.conftest import run_server
from tests.server.event_order import MessageOrder, ResponseOrder
from tests.server.near_valid import SCHEMAS, chat_request, wire_request
from tests.server.test_openapi import violations
from tests.server.test_responses import read_events
from tests.tiers import SECONDS, points, rest

_AT_ONCE = 8


#: number of requests, model, parser of reasoning
QUICK: list[tuple[int, str, str | None]] = [(300, "tiny-chat", None)]
MANY = [(5_000, "tiny-chat", None), (1_500, "tiny-chat", "qwen3"), (1_500, "tiny-diffusion", None)]


@rest(SECONDS)
@pytest.mark.parametrize(
    ("count", "model", "reasoning"), points(QUICK, MANY, "thousands of requests take half a minute")
)
async def test_requests_that_are_almost_right_are_answered_or_refused_by_name(
    count: int, model: str, reasoning: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    await answer(chat_request, check, count, model, reasoning, caplog)


WIRES: list[tuple[int, str, str | None]] = [(300, "tiny-chat", None)]
MANY_WIRES = [(5_000, "tiny-chat", None), (1_500, "tiny-chat", "qwen3")]


@rest(SECONDS)
@pytest.mark.parametrize(
    ("count", "model", "reasoning"), points(WIRES, MANY_WIRES, "thousands of requests take half a minute")
)
async def test_so_are_those_of_other_protocols(
    count: int, model: str, reasoning: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    await answer(wire_request, check_wires, count, model, reasoning, caplog)


Request = Callable[[random.Random], tuple[str, dict[str, Any]]]
Check = Callable[[int, str, str, dict[str, Any]], None]


async def answer(
    request: Request,
    check: Check,
    count: int,
    model: str,
    reasoning: str | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Send this number of requests to a server; check what it answers, and that it logs nothing."""
    seed = int(os.environ.get("AIOINFER_TEST_SEED", random.randrange(2**32)))
    sys.stdout.write(f"seed {seed}: AIOINFER_TEST_SEED repeats it\n")
    rng = random.Random(seed)
    statuses: Counter[int] = Counter()
    work = iter([request(rng) for _ in range(count)])
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


def check_body(body: dict[str, Any], path: str, told: Any) -> None:
    """Of a body that was accepted: nothing in it is ignored, because its schema admits nothing else."""
    fault = best_match(VALIDATORS[path].iter_errors(body))
    assert fault is None, (fault, told)


def check(status: int, text: str, path: str, body: dict[str, Any]) -> None:
    told = (status, text[:500], path, json.dumps(body)[:2000])
    assert status in (200, 400, 404), told
    if status == 200:
        check_body(body, path, told)
        events = [line[6:] for line in text.splitlines() if line.startswith("data: {")]
        failed = [event for event in events if '"error"' in event]
        assert not failed or failed == events[-1:], told
        text = events[-1] if failed else ""
    if text:
        error = json.loads(text)["error"]
        # Never a fault of the server, and always a field that the request has or misses.
        assert error["type"] == "invalid_request_error", told
        top = error["param"].split(".")[0].split("[")[0]
        assert top in body or top in ("messages", "prompt", "n", "tools", "tool_choice"), told


POOLED = (EMBEDDING_ENDPOINT, SCORE_ENDPOINT, RERANK_ENDPOINT)
ENDPOINTS = {each.path[1:]: each for each in (RESPONSES_ENDPOINT, MESSAGES_ENDPOINT, COUNT_ENDPOINT, *POOLED)}


def check_wires(status: int, text: str, path: str, body: dict[str, Any]) -> None:
    told = (status, text[:500], path, json.dumps(body)[:2000])
    assert status in (200, 400, 404), told
    if status == 200:
        endpoint = ENDPOINTS[path]
        check_body(body, path, told)
        if not text.startswith((":", "event:")):
            assert not violations(endpoint.answer, json.loads(text)), told
            return
        for line in text.splitlines():
            if line.startswith("data: "):
                assert not violations(endpoint.events, json.loads(line[6:])), (line, told)
        order = ResponseOrder() if path == "responses" else MessageOrder()
        read_events(order.take, text)
        order.check_ended()
        if order.error is None:
            return
        # Constraints that turn out to allow nothing.
        named = order.error.get("param") or order.error["message"]
    elif not path.startswith("messages"):
        error = json.loads(text)["error"]
        assert error["type"] == "invalid_request_error", told
        named = error["param"]
    else:
        given = json.loads(text)
        assert (given["type"], "request_id" in given) == ("error", True), told
        kind = given["error"]["type"]
        assert kind == ("not_found_error" if status == 404 else "invalid_request_error"), told
        named = given["error"]["message"]
    top = "model" if status == 404 else re.split(r"[.\[:,]", named)[0]
    wanted = {"input", "messages", "max_tokens", "body", "text_1", "text_2", "query", "documents"}
    wanted |= {"method"}  # the one that the model is made for
    assert top in body or top in wanted, told
