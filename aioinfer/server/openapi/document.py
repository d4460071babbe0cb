"""The OpenAPI document of an engine's routes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import TypeAdapter

from aioinfer._version import __version__
from aioinfer.chat.bodies import Object, PlainSchema
from aioinfer.server.http.failures import Failure
from aioinfer.server.openapi.endpoints import Endpoint, ErrorBody

__all__ = ["OPENAI_ERROR", "body_schema", "document", "schema_of", "statuses"]

_AT = "#/components/schemas/"

#: statuses with an error object, and when they occur
STATUSES: Mapping[int, str] = {
    400: "The request is not valid; `param` names the field.",
    401: "The API key is missing or wrong.",
    403: "The `Host` or the `Origin` is not allowed.",
    404: "There is no such model or path.",
    405: "The path has no such method.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    415: "The content type or encoding of the body is not supported.",
    417: "The `Expect` is not supported.",
    429: "The queue is full or the key at its limit: try again after `Retry-After` seconds.",
    500: "The request failed in the server.",
    503: "The engine is not serving, or the server has too many connections.",
    504: "The request did not begin or end within its timeout.",
}
_ALWAYS = (405, 417, 500, 503)
_WITH_BODY = (400, 404, 408, 413, 415)
_GENERATING = (429, 504)

OPENAI_ERROR = ErrorBody(
    "Error",
    {
        "type": "object",
        "description": "OpenAI's error object.",
        "properties": {
            "error": {
                "type": "object",
                "properties": {
                    "message": {"type": "string"},
                    "type": {"type": "string"},
                    "param": {"type": ["string", "null"], "description": "the field of the body"},
                    "code": {"type": ["string", "null"]},
                },
                "required": ["message", "type", "param", "code"],
            }
        },
        "required": ["error"],
    },
    Failure.body,
)


def statuses(endpoint: Endpoint) -> list[int]:
    """The statuses of an endpoint with an error object."""
    found = {*_ALWAYS, *endpoint.statuses}
    if not endpoint.open:
        found |= {401, 403}
    if endpoint.body is not None:
        found.update(_WITH_BODY)
    if "{" in endpoint.path:
        found.add(404)
    if endpoint.generates:
        found.update(_GENERATING)
    return sorted(found - endpoint.answers.keys())


def document(endpoints: Iterable[tuple[str, Endpoint]], *, keyed: bool) -> dict[str, Any]:
    """The document of these endpoints, each with its whole path; ``keyed``: they need an API key. It has no
    ``servers``."""
    components: dict[str, Any] = {}
    paths: dict[str, dict[str, Any]] = {}
    for path, endpoint in endpoints:
        operations = paths.setdefault(path, {})
        operations[endpoint.method.lower()] = _operation(path, endpoint, components)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "aioinfer",
            "version": __version__,
            "description": "A language model over HTTP. No field of a body is ignored: one that could change "
            "the answer is honoured or refused.",
        },
        "security": [{"key": []}] if keyed else [{}, {"key": []}],
        "paths": paths,
        "components": {
            "schemas": dict(sorted(components.items())),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(path: str, endpoint: Endpoint, components: dict[str, Any]) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "summary": endpoint.summary,
        "operationId": f"{endpoint.method.lower()}{path.replace('{', '').replace('}', '').replace('/', '_')}",
        "tags": [endpoint.tag],
    }
    names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in names
    ] + [{"name": name, "in": "query", "schema": dict(schema)} for name, schema in endpoint.query.items()]
    if parameters:
        operation["parameters"] = parameters
    if endpoint.body is not None:
        operation["requestBody"] = _request(endpoint.body, endpoint.example, components)
    if endpoint.open:
        operation["security"] = []
    operation["responses"] = _responses(endpoint, components)
    return operation


def _request(body: type[Object], example: Mapping[str, Any], components: dict[str, Any]) -> dict[str, Any]:
    name = f"{body.__name__.removesuffix('Body')}Request"
    components[name] = {**body_schema(body, components), "examples": [dict(example)]}
    return {"required": True, "content": {"application/json": {"schema": {"$ref": f"{_AT}{name}"}}}}


def body_schema(body: type[Object], components: dict[str, Any]) -> dict[str, Any]:
    """The JSON schema of a body; the objects in it are entered into ``components``, with the names of their
    models and ``-Input``. It admits what the server honours or accepts as without effect; which of its fields
    exclude each other, and what depends on the model, it does not say."""
    schema = body.model_json_schema(ref_template=f"{_AT}{{model}}-Input", schema_generator=PlainSchema)
    components.update({f"{name}-Input": each for name, each in schema.pop("$defs", {}).items()})
    return schema


def schema_of(kind: Any, components: dict[str, Any]) -> dict[str, Any]:
    """The JSON schema of an answer: a TypedDict, which is entered into ``components`` by its name and
    referred to, with those in it; or a mapping, which is a schema already."""
    if isinstance(kind, Mapping):
        return dict(kind)
    schema = TypeAdapter(kind).json_schema(
        mode="serialization", ref_template=f"{_AT}{{model}}", schema_generator=PlainSchema
    )
    components.update(schema.pop("$defs", {}))
    components[kind.__name__] = schema
    return {"$ref": f"{_AT}{kind.__name__}"}


def _responses(endpoint: Endpoint, components: dict[str, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {endpoint.media: {}}
    if endpoint.answer is not None:
        content[endpoint.media] = {"schema": schema_of(endpoint.answer, components)}
    responses: dict[str, Any] = {"200": {"description": endpoint.summary, "content": content}}
    for status, meaning in endpoint.answers.items():
        responses[str(status)] = {"description": meaning, "content": content}
    if endpoint.events is not None:
        events = {"schema": _event(endpoint, components)}
        responses["200"]["content"] = {**content, "text/event-stream": events}
    error = endpoint.error or OPENAI_ERROR
    components[error.name] = dict(error.schema)
    failed = {"application/json": {"schema": {"$ref": f"#/components/schemas/{error.name}"}}}
    for status in statuses(endpoint):
        meaning = endpoint.statuses.get(status, STATUSES.get(status, "An error."))
        responses[str(status)] = {"description": meaning, "content": failed}
    return dict(sorted(responses.items()))


def _event(endpoint: Endpoint, components: dict[str, Any]) -> dict[str, Any]:
    """The schema of one event. OpenAPI has a place for it from 3.2 on; before, tools that know streams take
    their schema for that."""
    content = schema_of(endpoint.events, components)
    if endpoint.last is not None:
        content = {"anyOf": [content, {"$ref": f"#/components/schemas/{OPENAI_ERROR.name}"}]}
    data = {"type": "string", "contentMediaType": "application/json", "contentSchema": content}
    return {
        "type": "object",
        "description": endpoint.form,
        "properties": {
            "event": {"type": "string"},
            "data": data if endpoint.last is None else {"anyOf": [{"const": endpoint.last}, data]},
        },
        "required": ["data"],
    }
