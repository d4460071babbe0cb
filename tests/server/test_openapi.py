"""The OpenAPI document: it has every route, and says what the server accepts and answers."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest
from aiohttp import web
from jsonschema import Draft202012Validator

import aioinfer
from aioinfer.bounds import BOUNDS
from aioinfer.chat.bodies import Object
from aioinfer.errors import InvalidRequest
from aioinfer.request import Request
from aioinfer.server import create_app, setup
from aioinfer.server.openai.fields import ALIASES, PARAMS, ChatBody
from aioinfer.server.openai.objects import ChatAnswer, ChatChunk, CompletionAnswer, CompletionChunk, Models
from aioinfer.server.openapi.document import body_schema, schema_of
from tests.server.calls import Http, http
from tests.server.conftest import Bundled, Serving, site
from tests.server.test_fields import chat, completion
from tests.server.test_mounting import application, make_engine
from tests.tiers import SECONDS, rest

USER = [{"role": "user", "content": "abc"}]


def routes_of(app: web.Application) -> set[tuple[str, str]]:
    return {
        (route.method, route.resource.canonical)
        for route in app.router.routes()
        if route.resource is not None and route.method != "HEAD"
    }


def operations(document: Mapping[str, Any]) -> set[tuple[str, str]]:
    return {(method.upper(), path) for path, found in document["paths"].items() for method in found}


async def fetched(client: Http, path: str = "/openapi.json") -> Any:
    reply = await client.get(path)
    assert (reply.status, reply.type) == (200, "application/json")
    return reply.json()


async def test_every_route_of_a_server_is_in_its_document() -> None:
    app = create_app(make_engine())
    async with application(app) as client:
        document = await fetched(client)
    assert operations(document) == routes_of(app)
    paths = document["paths"]
    assert {"/v1/chat/completions", "/v1/models/{model}", "/health", "/docs"} <= paths.keys()
    assert {"403", "429"} <= paths["/v1/load_lora_adapter"]["post"]["responses"].keys()
    schemas = document["components"]["schemas"]
    for schema in schemas.values():
        Draft202012Validator.check_schema(schema)
    references = set(re.findall(r'"\$ref": "([^"]+)"', json.dumps(document)))
    assert references <= {f"#/components/schemas/{name}" for name in schemas}
    assert len(references) > 10
    names = [found["operationId"] for path in paths.values() for found in path.values()]
    assert len(set(names)) == len(names)


async def test_mounted_engines_have_documents_of_their_own() -> None:
    app = web.Application()
    setup(app, make_engine(), "/a/v1")
    setup(app, make_engine(), "/b/v1", health=None)
    outer = web.Application()
    outer.add_subapp("/llm/", app)
    async with application(outer) as client:
        first = await fetched(client, "/llm/a/v1/openapi.json")
        second = await fetched(client, "/llm/b/v1/openapi.json")
        base = first["servers"][0]["url"]
        assert base == "/llm"
        assert (await client.get(f"{base}/a/health")).status == 200
    assert operations(first) | operations(second) == {
        (method, path.removeprefix("/llm")) for method, path in routes_of(app)
    }
    assert not operations(first) & operations(second)


@pytest.mark.parametrize("keyed", [False, True])
async def test_the_document_and_the_page_need_no_key(serving: Serving, keyed: bool) -> None:
    async with serving(server={"api_key": "secret"} if keyed else {}) as served:
        document, page = await fetched(served.http), await served.get("/docs")
    assert (page.status, page.type) == (200, "text/html")
    assert "default-src 'none'" in page.headers["Content-Security-Policy"]
    assert document["security"] == ([{"key": []}] if keyed else [{}, {"key": []}])
    # Nothing from outside.
    assert not re.findall(r"""(?:src|href)=["']?(?:https?:)?//|@import|url\(""", page.text)


# -- requests ------------------------------------------------------------------------------------------


def refuses(body: dict[str, Any]) -> bool:
    return not CHECK.is_valid(body)


def validator(kind: type[Object]) -> Draft202012Validator:
    """Of the schema of a body."""
    components: dict[str, Any] = {}
    return Draft202012Validator({**body_schema(kind, components), "components": {"schemas": components}})


CHECK = validator(ChatBody)
NUMBERS = [name for name in sorted(ChatBody.honoured) if ALIASES.get(name, name) in BOUNDS.keys() & PARAMS]


@pytest.mark.parametrize("name", NUMBERS)
def test_the_bounds_of_numbers_are_those_of_the_server(name: str) -> None:
    param = ALIASES.get(name, name)
    low, high, whole, low_open = BOUNDS[param]
    if param == "max_tokens":
        low = 1  # of completions only it may be 0
    step = 1 if whole else 0.001
    inside, outside = [high], [low - step, high + step, "1", True]
    (outside if low_open else inside).append(low)
    if whole:
        outside.append(1.5)
    for value in inside:
        assert not refuses({"messages": USER, name: value})
        chat(**{name: value, **({"max_tokens": value} if param == "min_tokens" and value else {})})
    for value in outside:
        assert refuses({"messages": USER, name: value}), value
        with pytest.raises(InvalidRequest):
            chat(**{name: value})


@pytest.mark.parametrize(
    "body",
    [
        {"stop": ["a"] * 17},
        {"stop": ""},
        {"stop": ["a" * 1025]},
        {"stop_regex": ["a"] * 9},
        {"logit_bias": {"01": 1}},
        {"logit_bias": {"1": 101}},
        {"bad_words": [[]]},
        {"allowed_token_ids": []},
        {"n": 0},
        {"n": 129},
        {"stream": 1},
        {"request_id": "a b"},
        {"cache_salt": "a" * 257},
        {"priority": 2**31},
        {"tool_choice": "any"},
        {"tools": [{"type": "function", "function": {"name": "a b"}}]},
        {"response_format": {"type": "xml"}},
        {"response_format": {}},
        {"diffusion": {"threshold": 2}},
        {"diffusion": {"algorithm": "none"}},
        {"use_beam_search": 1},
        {"early_stopping": "always"},
        {"temprature": 1},
        {"messages": []},
        {"messages": None},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": 5}]}]},
        {"messages": [{"content": "a"}]},
    ],
    ids=lambda body: json.dumps(body)[:60],
)
def test_what_the_schema_refuses_the_server_refuses(body: dict[str, Any]) -> None:
    assert refuses({"messages": USER, **body})
    if next(iter(body)) == "messages" and body["messages"]:
        return  # the tokenizer refuses these
    with pytest.raises(InvalidRequest):
        Request(**chat(**{"messages": USER, **body}).scheduling)


# -- answers -------------------------------------------------------------------------------------------


@cache
def closed(kind: Any) -> Draft202012Validator:
    """Of a type whose objects have no further keys."""
    components: dict[str, Any] = {}
    schema = {**schema_of(kind, components), "components": {"schemas": components}}
    for each in components.values():
        each["additionalProperties"] = False
    return Draft202012Validator(schema)


def violations(kind: Any, instance: Any) -> list[str]:
    return [error.message for error in closed(kind).iter_errors(instance)]


def test_an_answer_with_a_key_too_many_or_too_few_violates_its_type() -> None:
    good = {"id": "a", "object": "text_completion", "created": 1, "model": "m", "system_fingerprint": "f",
            "choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2,
                                     "prompt_tokens_details": {"cached_tokens": 0}}}  # fmt: skip
    assert not violations(CompletionAnswer, good)
    assert violations(CompletionAnswer, {**good, "more": 1})
    assert violations(CompletionAnswer, {key: good[key] for key in good if key != "usage"})


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {
    "a": {"enum": [1]}}, "required": ["a"], "additionalProperties": False}}}  # fmt: skip
CHATS: list[dict[str, Any]] = [
    {},
    {"n": 2, "logprobs": True, "top_logprobs": 2},
    {"tools": [TOOL], "tool_choice": "required", "max_tokens": 64},
    {"stop": ["e", "a"]},
]
COMPLETIONS: list[dict[str, Any]] = [
    {"prompt": ["a", "b"], "n": 2},
    {"prompt": "abc", "logprobs": 3},
    {"prompt": [1, 2, 3], "echo": True},
]


@rest(SECONDS)
@pytest.mark.parametrize("stream", [False, True])
async def test_answers_have_the_declared_types(bundled: Bundled, stream: bool) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    async with bundled() as model, http(site(model)) as client:
        for path, bodies, whole, event in (
            ("chat/completions", CHATS, ChatAnswer, ChatChunk),
            ("completions", COMPLETIONS, CompletionAnswer, CompletionChunk),
        ):
            for body in bodies:
                given = {"messages": USER} if whole is ChatAnswer else {}
                reply = await client.post(f"/v1/{path}", {"max_tokens": 8, **given, **body, **options})
                assert reply.status == 200, reply.text
                for answer in reply.events() if stream else [reply.json()]:
                    assert not violations(event if stream else whole, answer), answer


def test_completions_are_parsed_as_their_schema_says() -> None:
    assert completion(prompt=[[1, 2], "a"]).prompts == [[1, 2], "a"]


# -- status --------------------------------------------------------------------------------------------

MONITORED = ("/health", "/readyz", "/ping", "/livez")


async def test_monitors_ask_without_a_key_and_by_any_name(serving: Serving) -> None:
    async with serving(server={"api_key": "secret"}) as served:
        for path in MONITORED:
            reply = await served.get(path, Host="pod-7.internal")
            assert (reply.status, reply.json()) == (200, {"status": "ok"})
        for path in ("/version", "/tokenizer_info", "/v1/models"):
            assert (await served.get(path)).status == 401


async def test_a_process_without_a_serving_engine_is_alive_and_not_ready() -> None:
    engine = make_engine()
    async with application(create_app(engine)) as client:
        await engine.aclose()
        found = {path: (await client.get(path)).status for path in (*MONITORED, "/tokenizer_info")}
        for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
            assert (await client.post(path, body)).status == 503
        assert not violations(Models, (await client.get("/v1/models")).json())
    assert found == {**dict.fromkeys((*MONITORED, "/tokenizer_info"), 503), "/livez": 200}


async def test_the_model_is_described_in_full(serving: Serving) -> None:
    before = int(time.time())
    async with serving() as served:
        models = (await served.get("/v1/models")).json()
        assert (await served.get("/v1/models/toy")).json() == models["data"][0]
        assert (await served.get("/version")).json() == {"version": aioinfer.__version__}
    assert not violations(Models, models)
    model = models["data"][0]
    assert before <= model["created"] <= time.time()
    assert (model["root"], model["parent"], model["max_model_len"]) == ("toy", None, 4096)
