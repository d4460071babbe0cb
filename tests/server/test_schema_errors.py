"""A schema that no grammar can enforce: the error names the field that was sent, and the keyword."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.server.conftest import Bundled
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


@rest(SECONDS)
@pytest.mark.parametrize("reasoning", [None, "qwen3"])
async def test_the_field_and_the_keyword_are_named(bundled: Bundled, reasoning: str | None) -> None:
    messages = [{"role": "user", "content": "a"}]
    async with bundled(reasoning_parser=reasoning) as client:
        for field, value in SENT.items():
            for more in ({}, {"tools": [TOOL]}):
                with pytest.raises(openai.BadRequestError) as caught:
                    await client.post(
                        "/chat/completions", body={"messages": messages, field: value, **more}, cast_to=object
                    )
                assert str(caught.value.param).partition(".")[0] == field
                assert "the keyword 'uniqueItems' at /properties/a" in caught.value.message
        for tools in ([STRICT], [TOOL, STRICT]):
            with pytest.raises(openai.BadRequestError) as caught:
                await client.post(
                    "/chat/completions", body={"messages": messages, "tools": tools}, cast_to=object
                )
            assert caught.value.param == "tools"
            assert "of the function 'g': the keyword 'uniqueItems'" in caught.value.message
        with pytest.raises(openai.BadRequestError) as caught:
            await client.post("/completions", body={"prompt": "a", "guided_json": SET}, cast_to=object)
        assert caught.value.param == "guided_json"
