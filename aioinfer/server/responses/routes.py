"""Routes of stored responses: read, list the input of, and delete one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from aiohttp import web
from typing_extensions import TypedDict

from aioinfer.config import ServerConfig
from aioinfer.errors import InvalidRequest, shown
from aioinfer.server.http.failures import not_found
from aioinfer.server.http.pieces import cut, json_response, whole_response
from aioinfer.server.http.records import record_of
from aioinfer.server.openapi.endpoints import Endpoint, Route
from aioinfer.server.responses.endpoints import Response
from aioinfer.server.responses.stored import StoredResponse, StoredResponses

__all__ = ["StoredRoutes"]

_MOST_ITEMS = 100


class InputItems(TypedDict):
    """A page of the items that a response answers, those of the responses before it included."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedResponse(TypedDict):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


_READ = Endpoint("GET", "/responses/{response}", "A stored response", answer=Response)
_DELETE = Endpoint("DELETE", "/responses/{response}", "Forget a stored response", answer=DeletedResponse)
_ITEMS = Endpoint(
    "GET",
    "/responses/{response}/input_items",
    "The items that a stored response answers",
    answer=InputItems,
    query={
        "limit": {"type": "integer", "minimum": 1, "maximum": _MOST_ITEMS, "default": 20},
        "order": {"enum": ["asc", "desc"], "default": "desc"},
        "after": {"type": "string"},
    },
    statuses={400: "A parameter of the query is wrong."},
)


class StoredRoutes:
    """The handlers."""

    def __init__(self, config: ServerConfig, stored: StoredResponses) -> None:
        self._config = config
        self._stored = stored

    def routes(self) -> list[Route]:
        return [_READ.route(self.read), _DELETE.route(self.delete), _ITEMS.route(self.items)]

    async def read(self, request: web.Request) -> web.StreamResponse:
        found = self._found(request)
        if request.query.get("stream") == "true":
            raise InvalidRequest("stream", "a stored response is not streamed", code="unsupported_parameter")
        pieces = [piece.encode("ascii") for piece in cut(found.body)]
        return whole_response(request, pieces, self._config.send_timeout)

    async def delete(self, request: web.Request) -> web.StreamResponse:
        name = self._found(request).id
        self._stored.remove(record_of(request).owner, name)
        return web.json_response({"id": name, "object": "response", "deleted": True})

    async def items(self, request: web.Request) -> web.StreamResponse:
        found = self._found(request)
        query = request.query
        limit, order = query.get("limit", "20"), query.get("order", "desc")
        if not (re.fullmatch("[0-9]{1,3}", limit) and 1 <= int(limit) <= _MOST_ITEMS):
            raise InvalidRequest("limit", f"must be 1 to {_MOST_ITEMS}, got {shown(limit)}")
        if order not in ("asc", "desc"):
            raise InvalidRequest("order", f"must be asc or desc, got {shown(order)}")
        items: list[Mapping[str, Any]] = [*found.items[: found.prompt]]
        if order == "desc":
            items.reverse()
        if (after := query.get("after")) is not None:
            at = next((at for at, item in enumerate(items) if item["id"] == after), None)
            if at is None:
                raise InvalidRequest("after", f"is none of the items: {shown(after)}")
            items = items[at + 1 :]
        data = [dict(item) for item in items[: int(limit)]]
        page: InputItems = {
            "object": "list",
            "data": data,
            "first_id": data[0]["id"] if data else None,
            "last_id": data[-1]["id"] if data else None,
            "has_more": len(items) > len(data),
        }
        return await json_response(request, dict(page), self._config.send_timeout)

    def _found(self, request: web.Request) -> StoredResponse:
        name = request.match_info["response"]
        found = self._stored.find(record_of(request).owner, name)
        if found is None:
            raise not_found("response", name)
        return found
