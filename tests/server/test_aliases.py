"""Names of the served model."""

from __future__ import annotations

from typing import Any, cast

import openai
import pytest

from aioinfer.config import ServerConfig
from tests.server.conftest import Serving

NAMES = {"served_model_name": "big, small ,org/third"}


def test_names_are_separated_by_commas() -> None:
    assert ServerConfig(served_model_name="a, b ,c/d").model_names == ("a", "b", "c/d")
    assert ServerConfig(served_model_name="a").model_names == ("a",)
    for nothing in (None, "", " , "):
        assert ServerConfig(served_model_name=nothing).model_names == ()


async def test_an_answer_has_the_name_that_was_asked_for(serving: Serving) -> None:
    async with serving(server=NAMES) as served, served.client() as client:
        listed = [each.id async for each in client.models.list()]
        assert listed == ["big", "small", "org/third"]
        prints = set()
        for name in listed:
            answer = await client.chat.completions.create(
                model=name, messages=[{"role": "user", "content": "a"}], max_tokens=2
            )
            assert answer.model == name
            prints.add(answer.system_fingerprint)
            stream = await client.chat.completions.create(
                model=name, messages=[{"role": "user", "content": "a"}], max_tokens=2, stream=True
            )
            assert {each.model async for each in stream} == {name}
            response = await client.responses.create(model=name, input="a", max_output_tokens=2)
            assert response.model == name
            body = {"model": name, "max_tokens": 2, "messages": [{"role": "user", "content": "a"}]}
            message = cast("dict[str, Any]", await client.post("/messages", body=body, cast_to=object))
            assert message["model"] == name
        assert len(prints) == 1, "the same model computes them"
        for other in ("toy", "BIG", "big,small", ""):
            with pytest.raises(openai.NotFoundError) as missing:
                await client.completions.create(model=other, prompt="a")
            assert missing.value.code == "model_not_found"


async def test_without_a_name_the_first_one_answers(serving: Serving) -> None:
    async with serving(server=NAMES) as served:
        reply = await served.post("/v1/completions", {"prompt": "a", "max_tokens": 1})
        assert reply.json()["model"] == "big"
        assert (await served.get("/v1/models/small")).json()["id"] == "small"
        assert (await served.get("/v1/models/toy")).status == 404
