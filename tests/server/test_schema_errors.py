"""A schema that no grammar can enforce: the error names the field that was sent, and the keyword."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.calls import http
from tests.server.conftest import Bundled, site
from tests.tiers import SECONDS, rest

SET = {"type": "object", "properties": {"a": {"type": "array", "items": {}, "uniqueItems": True}}}
SENT: dict[str, Any] = {
    "response_format": {"type": "json_schema", "json_schema": {"schema": SET, "name": "x"}},
    "guided_json": SET,
    "json_schema": SET,
    "structured_outputs": {"json": SET},
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
STRICT = {"type": "function", "function": {"name": "g", "strict": True, "parameters": SET}}
MORE: list[dict[str, Any]] = [{}, {"tools": [TOOL]}]


@rest(SECONDS)
@pytest.mark.parametrize("reasoning", [None, "qwen3"])
async def test_the_field_and_the_keyword_are_named(bundled: Bundled, reasoning: str | None) -> None:
    bodies: list[dict[str, Any]] = [{field: value, **more} for field, value in SENT.items() for more in MORE]
    bodies += [{"tools": tools} for tools in ([STRICT], [TOOL, STRICT])]
    async with bundled(reasoning_parser=reasoning) as model, http(site(model)) as client:
        for body in bodies:
            asked = {"messages": [{"role": "user", "content": "a"}], **body}
            error = (await client.post("/v1/chat/completions", asked)).error
            field = next(iter(body))
            assert error["param"].partition(".")[0] == field
            fault = "the keyword 'uniqueItems' at /properties/a"
            if field == "tools":
                fault = "of the function 'g': the keyword 'uniqueItems'"
            assert fault in error["message"]
        reply = await client.post("/v1/completions", {"prompt": "a", "guided_json": SET})
        assert reply.refusal == (400, "guided_json")
