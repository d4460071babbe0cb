"""Stored responses, through the real openai client: ``previous_response_id`` stands for the conversation."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import openai
import pytest

from aioinfer.ledger import Share
from aioinfer.scheduling.step import Step
from aioinfer.server.responses import stored
from tests.engine.conftest import Gate
from tests.server.chats import USER
from tests.server.conftest import Bundled, Serving
from tests.server.event_order import ResponseOrder
from tests.server.test_adversity import idle, until
from tests.server.test_responses import TOOL
from tests.server.test_tool_requests import ROUND_TRIP
from tests.tiers import SECONDS, rest

ASK: Any = {"model": "toy", "temperature": 0, "max_output_tokens": 12}
KEYS = "- {name: alice, key: key-of-alice}\n- {name: bob, key: key-of-bob}\n"


@pytest.fixture(autouse=True)
def own_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """What servers of other tests have stored in this process does not count."""
    monkeypatch.setattr(stored, "_STORED", Share("stored responses", bound=64 << 20))


def of(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer key-of-{name}"}


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, Any]:
    """Of a server with two keys."""
    file = tmp_path / "keys.yaml"
    file.write_text(KEYS)
    return {"api_keys": str(file)}


def message(text: str, role: str = "user") -> Any:
    return {"role": role, "content": text}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_that_continues_another_is_that_to_the_whole_conversation(
    serving: Serving, stream: bool
) -> None:
    async with serving() as served, served.client() as client:

        async def ask(**options: Any) -> dict[str, Any]:
            if not stream:
                return json.loads((await client.responses.create(**{**ASK, **options})).to_json())
            order = ResponseOrder()
            async for event in await client.responses.create(**{**ASK, **options}, stream=True):
                order.take(event.type, event.to_json())
            order.check_ended()
            return order.response

        first = await ask(input="Hello there", instructions="Be brief.")
        second = await ask(input=[message("More")], previous_response_id=first["id"])
        third = await ask(input="And more", previous_response_id=second["id"], instructions="Be long.")
        whole = await ask(
            input=[
                message("Hello there"),
                *first["output"],
                message("More"),
                *second["output"],
                message("And more"),
            ],
            # Those of earlier responses are not carried over.
            instructions="Be long.",
            store=False,
        )
    assert [first["store"], third["store"], whole["store"]] == [True, True, False]
    assert (first["previous_response_id"], third["previous_response_id"]) == (None, second["id"])
    assert texts(third) == texts(whole)
    assert third["usage"]["input_tokens"] == whole["usage"]["input_tokens"]
    assert second["usage"]["input_tokens"] > first["usage"]["input_tokens"] - len("Be brief.")


def texts(response: dict[str, Any]) -> list[str]:
    return [part["text"] for item in response["output"] for part in item["content"]]


async def test_what_continues_finds_the_conversation_in_the_prefix_cache(serving: Serving) -> None:
    async with serving() as served, served.client() as client:
        first = await client.responses.create(**ASK, input="Hello there, all of you")
        second = await client.responses.create(**ASK, input="More", previous_response_id=first.id)
    assert first.usage
    assert second.usage
    cached = second.usage.input_tokens_details.cached_tokens
    assert first.usage.input_tokens - 4 <= cached < second.usage.input_tokens


async def test_one_response_is_continued_in_many_ways(serving: Serving) -> None:
    async with serving() as served, served.client() as client:
        first = await client.responses.create(**ASK, input="Hello there")
        asked = [{**ASK, "input": each, "previous_response_id": first.id} for each in ("a", "b", "a")]
        one, other, same = await asyncio.gather(*[client.responses.create(**each) for each in asked])
        assert len({one.id, other.id, same.id}) == 3
        assert one.output_text == same.output_text != other.output_text


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stored_response_is_read_and_deleted(serving: Serving, stream: bool) -> None:
    async with serving() as served, served.client() as client:
        options = {**ASK, "input": "Hello", "metadata": {"a": "b"}}
        if stream:
            events = [each async for each in await client.responses.create(**options, stream=True)]
            made = events[-1].response
        else:
            made = await client.responses.create(**options)
        again = await client.responses.retrieve(made.id)
        assert again.to_json() == made.to_json()
        follower = await client.responses.create(**ASK, input="More", previous_response_id=made.id)
        await client.responses.delete(made.id)
        for call in (client.responses.retrieve(made.id), client.responses.delete(made.id)):
            with pytest.raises(openai.NotFoundError) as caught:
                await call
            assert caught.value.code == "response_not_found"
        with pytest.raises(openai.BadRequestError) as refused:
            await client.responses.create(**ASK, input="More", previous_response_id=made.id)
        assert (refused.value.param, refused.value.code) == (
            "previous_response_id",
            "previous_response_not_found",
        )
        # What continued it has the conversation still.
        last = await client.responses.create(**ASK, input="Last", previous_response_id=follower.id)
        items = [each async for each in client.responses.input_items.list(last.id, order="asc")]
    assert [each.role for each in items] == ["user", "assistant"] * 2 + ["user"]


async def test_input_items_come_in_pages(serving: Serving) -> None:
    async with serving() as served, served.client() as client:
        given = [message(str(number)) for number in range(7)]
        made = await client.responses.create(**ASK, input=given)
        listed = [each async for each in client.responses.input_items.list(made.id, limit=3)]
        page = await client.responses.input_items.list(made.id, order="asc", limit=2)
        path = f"/v1/responses/{made.id}/input_items"
        limits = ["0", "x", "101", "0001000", "0001" + "0" * 5000]
        refused = [
            (await served.get(f"{path}?{query}")).refusal
            for query in (*(f"limit={each}" for each in limits), "order=up", "after=msg_x")
        ]
        streamed = await served.get(f"/v1/responses/{made.id}?stream=true")
    assert [each.content[0].text for each in listed] == [str(number) for number in reversed(range(7))]
    assert len({each.id for each in listed}) == 7
    assert [each.content[0].text for each in page.data] == ["0", "1"]
    assert page.has_more
    assert refused == [(400, name) for name in [*["limit"] * len(limits), "order", "after"]]
    assert streamed.refusal == (400, "stream")


async def test_a_response_that_is_not_to_be_stored_is_not(serving: Serving) -> None:
    async with serving() as served, served.client() as client:
        made = await client.responses.create(**ASK, input="Hello", store=False)
        assert made.to_dict()["store"] is False
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(made.id)
    assert stored._STORED.promised == 0


async def test_a_server_that_stores_nothing_says_so(serving: Serving) -> None:
    async with serving(server={"max_stored_responses": 0}) as served, served.client() as client:
        for store in (True, openai.omit):
            made = await client.responses.create(**ASK, input="Hello", store=store)
            assert made.to_dict()["store"] is False
        with pytest.raises(openai.BadRequestError, match="max_stored_responses") as caught:
            await client.responses.create(**ASK, input="Hello", previous_response_id=made.id)
        assert caught.value.param == "previous_response_id"


async def test_a_key_does_not_find_responses_of_others(serving: Serving, keys: dict[str, Any]) -> None:
    body = {**ASK, "input": "Hello"}
    async with serving(server=keys) as served:
        made = (await served.post("/v1/responses", body, **of("alice"))).json()["id"]
        for path in (f"/v1/responses/{made}", f"/v1/responses/{made}/input_items"):
            foreign, unknown = [
                await served.get(path.replace(made, name), **of("bob")) for name in (made, "resp_x")
            ]
            assert (foreign.status, unknown.status) == (404, 404)
            assert foreign.text == unknown.text.replace("resp_x", made)
        assert (await served.http("DELETE", f"/v1/responses/{made}", **of("bob"))).status == 404
        follow = {**body, "previous_response_id": made}
        assert (await served.post("/v1/responses", follow, **of("bob"))).refusal == (
            400,
            "previous_response_id",
        )
        assert (await served.post("/v1/responses", follow, **of("alice"))).status == 200
        deleted = await served.http("DELETE", f"/v1/responses/{made}", **of("alice"))
    assert deleted.json() == {"id": made, "object": "response", "deleted": True}


async def test_ids_are_not_taken_from_headers(serving: Serving) -> None:
    body = {**ASK, "input": "Hello"}
    async with serving() as served:
        given = {"x-request-id": "guessed"}
        first, second = [(await served.post("/v1/responses", body, **given)).json()["id"] for _ in "ab"]
        assert first != second
        assert "guessed" not in first
        named = (await served.post("/v1/responses", {**body, "request_id": "mine"})).json()["id"]
    assert named == "resp_mine"


async def test_a_key_loses_what_it_used_longest_ago_and_others_nothing(
    serving: Serving, keys: dict[str, Any]
) -> None:
    async with serving(server={**keys, "max_stored_responses": 2}) as served:

        async def made(name: str, **fields: Any) -> str:
            reply = await served.post("/v1/responses", {**ASK, "input": "Hello", **fields}, **of(name))
            return str(reply.json()["id"])

        async def found(name: str, response: str) -> bool:
            return (await served.get(f"/v1/responses/{response}", **of(name))).status == 200

        bobs = await made("bob")
        first, second = await made("alice"), await made("alice")
        third = await made("alice", previous_response_id=first)
        assert [await found("alice", each) for each in (first, second, third)] == [True, False, True]
        assert await found("bob", bobs)


async def test_stored_responses_have_bounded_bytes(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored._STORED, "bound", 30_000)
    async with serving() as served, served.client() as client:
        made = [await client.responses.create(**ASK, input="a" * 3000) for _ in range(9)]
        assert 10_000 < stored._STORED.promised <= 30_000
        await client.responses.retrieve(made[-1].id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(made[0].id)
    assert stored._STORED.promised == 0  # the server has ended


async def test_a_conversation_has_as_many_items_as_a_chat_messages(serving: Serving) -> None:
    async with serving(server={"max_messages": 4}) as served, served.client() as client:
        first = await client.responses.create(**ASK, input="Hello")
        second = await client.responses.create(**ASK, input="More", previous_response_id=first.id)
        with pytest.raises(openai.BadRequestError, match="max_messages") as caught:
            await client.responses.create(**ASK, input="Again", previous_response_id=second.id)
    assert caught.value.param == "input"


LEFT: Any = {**ASK, "input": "Hello", "request_id": "left", "stream": True, "ignore_eos": True}


async def test_a_response_whose_client_left_is_not_stored(serving: Serving, gate: Gate) -> None:
    async with serving(fault=gate) as served:
        request = asyncio.create_task(served.post("/v1/responses", LEFT))
        gate.step(3)
        await until(lambda: served.engine.stats().running == 1)
        request.cancel()
        await asyncio.wait([request])
        gate.release()
        await until(lambda: idle(served))
        assert (await served.get("/v1/responses/resp_left")).status == 404


async def test_a_response_that_failed_is_not_stored(serving: Serving) -> None:
    def fault(step: Step) -> None:
        if step.id == 4:
            raise RuntimeError("planned")

    async with serving(fault=fault) as served:
        reply = await served.post("/v1/responses", LEFT)
        assert reply.events()[-1]["type"] == "response.failed"
        assert (await served.get("/v1/responses/resp_left")).status == 404


@rest(SECONDS)
async def test_an_agent_continues_with_the_results_of_its_tools_alone(
    bundled: Bundled, directory: Path
) -> None:
    (directory / "chat_template.jinja").write_text(ROUND_TRIP)
    ask: Any = {"model": "tiny-chat", "temperature": 0, "tools": [TOOL]}
    async with bundled(directory) as client:
        first = await client.responses.create(**ask, input=[USER], tool_choice="required")
        (call,) = [each for each in first.output if each.type == "function_call"][:1]
        results: Any = [
            {"type": "function_call_output", "call_id": each.call_id, "output": "rain"}
            for each in first.output
            if each.type == "function_call"
        ]
        last = await client.responses.create(
            **ask, input=results, previous_response_id=first.id, max_output_tokens=4
        )
        whole = await client.responses.create(
            **ask, input=[USER, *first.output, *results], max_output_tokens=4, store=False
        )
        listed = [each async for each in client.responses.input_items.list(last.id, order="asc")]
    assert last.output_text == whole.output_text
    assert last.usage
    assert whole.usage
    assert last.usage.input_tokens == whole.usage.input_tokens
    assert [each.type for each in listed[:2]] == ["message", "function_call"]
    assert listed[1].call_id == call.call_id
