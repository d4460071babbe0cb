"""Sessions over HTTP: conversations of a key that go on with what is new."""

from __future__ import annotations

import asyncio
import re
import threading
from pathlib import Path
from typing import Any

import pytest

from aioinfer.scheduling.step import Step
from aioinfer.server.owned import Owned
from tests.engine.conftest import Gate
from tests.server.calls import Reply
from tests.server.chats import USER, WEATHER
from tests.server.conftest import Bundled, Served, Serving
from tests.server.test_adapters import device
from tests.server.test_adversity import idle, until
from tests.server.test_stored_responses import keys as keys  # a fixture
from tests.server.test_stored_responses import message, of
from tests.server.test_tool_requests import ROUND_TRIP
from tests.tiers import SECONDS, rest
from tests.toys import ToyTokenizer
from tests.toys.adapters import write_toy_adapter

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ASK: Any = {"model": "toy", "temperature": 0, "max_tokens": 12}


@pytest.fixture
def saving(tmp_path: Path) -> dict[str, Any]:
    """Of a server that saves sessions."""
    return {"sessions_dir": str(tmp_path / "saved")}


async def make(served: Served, key: str | None = None, **fields: Any) -> str:
    """The id of a new session."""
    reply = await served.post("/v1/sessions", fields, **({} if key is None else of(key)))
    assert reply.status == 200, reply.text
    return str(reply.json()["id"])


async def read(served: Served, session: str, **headers: str) -> Any:
    return (await served.get(f"/v1/sessions/{session}", **headers)).json()


async def say(served: Served, session: str, text: str, key: str | None = None, **fields: Any) -> Reply:
    body = {**ASK, "messages": [message(text)], "session": session, **fields}
    return await served.post(CHAT, body, **({} if key is None else of(key)))


def content(reply: Reply) -> str:
    """What was answered, streamed or not."""
    assert reply.status == 200, reply.text
    if reply.type == "application/json":
        return str(reply.json()["choices"][0]["message"]["content"])
    choices = [choice for event in reply.events() for choice in event["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_chat_goes_on_with_its_new_messages_alone(serving: Serving, stream: bool) -> None:
    conversation = [message("Be brief.", "system"), message("Hello there, all of you")]
    async with serving() as served:
        session = await make(served)
        options = {"stream": stream, **({"stream_options": {"include_usage": True}} if stream else {})}
        answers: list[str] = []
        before = total = 0
        for text in ("Hello there, all of you", "More of that", "And more"):
            new = conversation if not answers else [message(text)]
            reply = await say(served, session, text, messages=new, **options)
            answers.append(content(reply))
            usage = (reply.events()[-1] if stream else reply.json())["usage"]
            whole = conversation if not answers[:-1] else [*conversation, message(text)]
            same = await served.post(CHAT, {**ASK, "messages": whole, "cache_salt": "other"})
            # It is the answer to the whole conversation.
            assert content(same) == answers[-1]
            assert same.json()["usage"]["prompt_tokens"] == usage["prompt_tokens"]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            assert before - 4 <= cached <= usage["prompt_tokens"]
            before, total = usage["prompt_tokens"], usage["total_tokens"]
            conversation = [*whole, message(answers[-1], "assistant")]
        found = await read(served, session)
    assert found["num_tokens"] == total
    assert total - 5 <= found["held_tokens"] < total
    assert (found["object"], found["busy"], found["model"]) == ("session", False, "toy")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_text_goes_on_where_its_tokens_end(serving: Serving, stream: bool) -> None:
    async with serving() as served, served.client(strict=not stream) as client:
        session = await make(served, prompt=[5, 6, 7])
        ids = [5, 6, 7]
        for prompt in ([8, 9], "more", [3]):
            new = ToyTokenizer().encode_part(prompt) if isinstance(prompt, str) else prompt
            whole = await client.completions.create(
                model="toy",
                prompt=[*ids, *new],
                temperature=0,
                max_tokens=9,
                extra_body={"return_token_ids": True},
            )
            body = {"model": "toy", "prompt": prompt, "temperature": 0, "max_tokens": 9}
            asked: Any = {**body, "extra_body": {"session": session, "return_token_ids": True}}
            if stream:
                chunks = [each async for each in await client.completions.create(**asked, stream=True)]
                text = "".join(choice.text for each in chunks for choice in each.choices)
            else:
                text = (await client.completions.create(**asked)).choices[0].text
            assert text == whole.choices[0].text
            ids = [*ids, *new, *whole.choices[0].to_dict()["token_ids"]]  # type: ignore[misc]
        assert (await read(served, session))["num_tokens"] == len(ids)


async def test_what_a_session_begins_with_is_computed_at_once(serving: Serving) -> None:
    first = [message("Be brief, and answer in one word.", "system")]
    async with serving() as served:
        session = await make(served, messages=first)
        reply = await say(served, session, "Hello")
        usage = reply.json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] > len(first[0]["content"]) // 2
        whole = await served.post(CHAT, {**ASK, "messages": [*first, message("Hello")]})
        assert content(whole) == content(reply)
        # Once: the second turn does not begin with them again.
        second = await say(served, session, "More")
        conversation = [*first, message("Hello"), message(content(reply), "assistant"), message("More")]
        assert content(second) == content(await served.post(CHAT, {**ASK, "messages": conversation}))
        changes = [{"messages": first, "prompt": "a"}, {"prompt": ["a", "b"]}, {"tools": []}, {"n": 2}]
        refused = [(await served.post("/v1/sessions", each)).refusal for each in changes]
    assert refused == [(400, "prompt"), (400, "prompt"), (400, "tools"), (400, "n")]


async def test_a_fork_goes_on_from_the_same_past(serving: Serving) -> None:
    async with serving() as served:
        session = await make(served)
        await say(served, session, "Hello there")
        fork = (await served.http("POST", f"/v1/sessions/{session}/fork")).json()
        assert fork["id"] != session
        assert fork["num_tokens"] == (await read(served, session))["num_tokens"]
        assert fork["held_tokens"] > 0
        one, other = [content(await say(served, each, "More")) for each in (session, fork["id"])]
        assert one == other
        third = content(await say(served, fork["id"], "Else"))
        assert third != content(await say(served, session, "Something else"))
        assert (await served.http("DELETE", f"/v1/sessions/{session}")).status == 200
        assert (await say(served, fork["id"], "Again")).status == 200


async def test_sessions_are_listed_and_deleted(serving: Serving) -> None:
    async with serving() as served:
        made = [await make(served) for _ in range(3)]
        assert all(re.fullmatch("sess_[0-9a-f]{32}", each) for each in made)
        await say(served, made[0], "Hello")
        listed = (await served.get("/v1/sessions")).json()
        assert [each["id"] for each in listed["data"]] == [*made[1:], made[0]]
        assert served.engine.stats().held_tokens > 0
        deleted = await served.http("DELETE", f"/v1/sessions/{made[0]}")
        assert deleted.json() == {"id": made[0], "object": "session", "deleted": True}
        assert served.engine.stats().held_tokens == 0
        assert (await served.http("DELETE", f"/v1/sessions/{made[0]}")).status == 404
        gone = await say(served, made[0], "Hello")
    assert (gone.refusal, gone.error["code"]) == ((404, "session"), "session_not_found")


async def test_a_key_does_not_find_sessions_of_others(serving: Serving, keys: dict[str, Any]) -> None:
    async with serving(server=keys) as served:
        session = await make(served, "alice")
        for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/fork")):
            foreign, unknown = [
                await served.http(method, f"/v1/sessions/{name}{path}", **of("bob"))
                for name in (session, "sess_x")
            ]
            assert foreign.status == unknown.status == 404
            assert foreign.text.replace(session, "sess_x") == unknown.text
        body = {**ASK, "messages": [USER]}
        foreign, unknown = [
            await served.post(CHAT, {**body, "session": name}, **of("bob")) for name in (session, "sess_x")
        ]
        assert (foreign.refusal, unknown.refusal) == ((404, "session"), (404, "session"))
        assert foreign.text.replace(session, "sess_x") == unknown.text
        assert (await served.get("/v1/sessions", **of("bob"))).json()["data"] == []
        assert (await served.get(f"/v1/sessions/{session}")).status == 401
        assert (await served.post(CHAT, {**body, "session": session}, **of("alice"))).status == 200


async def test_a_session_has_one_turn_at_a_time(serving: Serving, gate: Gate) -> None:
    async with serving(fault=gate) as served:
        session = await make(served)
        first = asyncio.create_task(say(served, session, "Hello"))
        await until(lambda: served.engine.stats().running == 1)
        assert (await read(served, session))["busy"]
        second = await say(served, session, "More")
        fork = (await served.http("POST", f"/v1/sessions/{session}/fork")).json()
        gate.release()
        assert (await first).status == 200
        third = await say(served, session, "More")
    assert (second.refusal, second.error["code"]) == ((409, "session"), "session_busy")
    # The fork is of the state before.
    assert (fork["num_tokens"], fork["busy"]) == (0, False)
    assert third.status == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_a_turn_whose_client_left_leaves_the_session_as_it_was(
    serving: Serving, gate: Gate, stream: bool
) -> None:
    held = threading.Event()

    def fault(step: Step) -> None:
        if held.is_set():
            gate(step)

    async with serving(fault=fault) as served:
        session = await make(served)
        await say(served, session, "Hello")
        before = await read(served, session)
        held.set()
        left = asyncio.create_task(
            say(served, session, "More", stream=stream, max_tokens=500, ignore_eos=True, logprobs=True)
        )
        await until(lambda: served.engine.stats().running == 1)
        left.cancel()
        await asyncio.wait([left])
        await until(lambda: served.engine.stats().running == 0)
        gate.release()
        await until(lambda: idle(served))
        found = await read(served, session)
        assert found["num_tokens"] == before["num_tokens"]
        assert (await say(served, session, "More")).status == 200


async def test_a_turn_that_failed_leaves_the_session_as_it_was(serving: Serving) -> None:
    broken = []

    def fault(step: Step) -> None:
        if broken:
            raise RuntimeError("planned")

    async with serving(fault=fault) as served:
        session = await make(served)
        await say(served, session, "Hello")
        before = await read(served, session)
        broken.append(True)
        for stream in (True, False):
            assert "planned" not in (await say(served, session, "More", stream=stream)).text
        broken.clear()
        found = await read(served, session)
        assert (found["num_tokens"], found["busy"]) == (before["num_tokens"], False)
        assert (await say(served, session, "More")).status == 200


async def test_a_session_deleted_amid_a_turn_answers_it_to_its_end(serving: Serving, gate: Gate) -> None:
    async with serving(fault=gate) as served:
        session = await make(served)
        turn = asyncio.create_task(say(served, session, "Hello", stream=True))
        await until(lambda: served.engine.stats().running == 1)
        assert (await served.http("DELETE", f"/v1/sessions/{session}")).status == 200
        assert (await served.get(f"/v1/sessions/{session}")).status == 404
        gate.release()
        reply = await turn
        assert reply.text.endswith("data: [DONE]\n\n")
        await until(lambda: served.engine.stats().held_tokens == 0)
        assert (await say(served, session, "More")).status == 404


async def test_a_server_that_ends_amid_a_turn_ends_its_sessions(serving: Serving, gate: Gate) -> None:
    async with serving(fault=gate, server={"drain_timeout": 0.01}) as served:
        session = await make(served)
        turn = asyncio.create_task(say(served, session, "Hello", stream=True))
        await until(lambda: served.engine.stats().running == 1)
        served.running.stop.set()
        gate.release()
        await asyncio.wait([turn])
        await served.running.task
        assert served.engine.closed


async def test_a_key_has_so_many_sessions(serving: Serving, keys: dict[str, Any]) -> None:
    async with serving(server={**keys, "max_sessions_per_key": 2}) as served:
        made = [await make(served, "alice") for _ in range(2)]
        for path in ("/v1/sessions", f"/v1/sessions/{made[0]}/fork"):
            refused = await served.post(path, {}, **of("alice"))
            assert (refused.status, refused.error["code"]) == (429, "session_limit_exceeded")
            assert "max_sessions_per_key" in refused.error["message"]
        await make(served, "bob")
        await served.http("DELETE", f"/v1/sessions/{made[0]}", **of("alice"))
        await make(served, "alice")
        assert served.engine.stats().sessions == 3


@pytest.fixture
def limited(tmp_path: Path) -> dict[str, Any]:
    """Of a server with a key that has a limit on tokens."""
    file = tmp_path / "limited.yaml"
    file.write_text("- {name: carol, key: key-of-carol, tokens_per_minute: 40}\n")
    return {"api_keys": str(file)}


async def test_turns_count_in_the_limits_of_the_key(
    serving: Serving, limited: dict[str, Any], still: None
) -> None:
    async with serving(server=limited) as served:
        session = await make(served, "carol", prompt=[*range(1, 31)])
        body = {"model": "toy", "prompt": [1], "session": session, "max_tokens": 9, "ignore_eos": True}
        first, second = [await served.post(TEXT, body, **of("carol")) for _ in range(2)]
        more = await served.post("/v1/sessions", {}, **of("carol"))
        # What computes nothing is not counted.
        assert (await served.get("/v1/sessions", **of("carol"))).status == 200
    assert [first.status, second.status, more.status] == [200, 429, 429]


async def test_a_session_expires(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    defaults: Any = Owned.__init__.__kwdefaults__
    monkeypatch.setitem(defaults, "clock", lambda: now[0])
    async with serving(server={"session_ttl": 100.0}) as served:
        refused = await served.post("/v1/sessions", {"ttl": 101})
        long, short = await make(served), await make(served, ttl=10)
        found = await read(served, short)
        now[0] = 9
        await say(served, short, "Hello")
        now[0] = 18
        assert (await read(served, short))["held_tokens"] > 0
        now[0] = 20
        assert (await served.get(f"/v1/sessions/{short}")).status == 404
        listed = (await served.get("/v1/sessions")).json()["data"]
        assert served.engine.stats().sessions == 1
    assert refused.refusal == (400, "ttl")
    assert [each["id"] for each in listed] == [long]
    assert 8 <= found["expires_at"] - found["created_at"] <= 11


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"n": 2}, "n"),
    (CHAT, {"use_beam_search": True}, "use_beam_search"),
    (CHAT, {"continue_final_message": True, "add_generation_prompt": False}, "add_generation_prompt"),
    (CHAT, {"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
    (CHAT, {"prompt_logprobs": 1}, "prompt_logprobs"),
    (CHAT, {"cache_salt": "other"}, "cache_salt"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": "x"}, "messages"),
    (CHAT, {"messages": [USER, {"role": "user", "content": 5}]}, "messages[1].content"),
    (CHAT, {"session": 5}, "session"),
    (TEXT, {"echo": True}, "echo"),
    (TEXT, {"prompt": ["a", "b"]}, "prompt"),
    (TEXT, {"add_special_tokens": True}, "add_special_tokens"),
]


async def test_what_a_session_cannot_have_is_refused(serving: Serving) -> None:
    async with serving() as served:
        session = await make(served, cache_salt="mine")
        await say(served, session, "Hello", cache_salt="mine")
        for path, change, param in REFUSED:
            given = {"messages": [USER]} if path == CHAT else {"prompt": "a"}
            for stream in (False, True):
                reply = await served.post(path, {**given, "session": session, "stream": stream, **change})
                assert reply.refusal == (400, param), change
        # A chat is none that goes on as a text.
        assert (await served.post(TEXT, {"prompt": "a", "session": session})).refusal == (400, "session")
        assert (await say(served, session, "More")).status == 200
        assert (await served.post("/v1/sessions", {"model": "other"})).status == 404


async def test_a_session_is_a_chat_or_a_text_from_its_begin(serving: Serving) -> None:
    async with serving() as served:
        text = await make(served, prompt=[5, 6, 7])
        chat = await make(served, messages=[message("Be brief.", "system")])
        assert (await say(served, text, "Hello")).refusal == (400, "session")
        assert (await served.post(TEXT, {"prompt": "a", "session": chat})).refusal == (400, "session")
        assert (await served.post(TEXT, {"prompt": "a", "session": text})).status == 200
        assert (await say(served, chat, "Hello")).status == 200


async def test_all_turns_have_the_adapter_of_the_session(
    serving: Serving, saving: dict[str, Any], tmp_path: Path
) -> None:
    path = write_toy_adapter(tmp_path / "sql", "sql")
    async with serving(server=saving, device=device()) as served:
        await served.engine.load_adapter("sql", path)
        session = await make(served, model="sql", prompt=[1, 2, 3])
        body = {"prompt": [4], "max_tokens": 6, "temperature": 0, "ignore_eos": True}
        assert (await served.post(TEXT, {**body, "session": session, "model": "toy"})).refusal == (
            400,
            "model",
        )
        answered = (await served.post(TEXT, {**body, "session": session})).json()
        whole = (await served.post(TEXT, {**body, "prompt": [1, 2, 3, 4], "model": "sql"})).json()
        assert (answered["model"], whole["model"]) == ("sql", "sql")
        assert answered["choices"][0]["text"] == whole["choices"][0]["text"]
        await served.post(f"/v1/sessions/{session}/save", {"name": "a"})
        loaded = (await served.post("/v1/sessions/load", {"name": "a"})).json()
        assert loaded["model"] == "sql"
        body["session"] = loaded["id"]
        assert (await served.post(TEXT, {**body, "model": "sql"})).status == 200
        await served.engine.unload_adapter("sql")
        assert (await served.post(TEXT, body)).status == 400
        assert (await served.post("/v1/sessions/load", {"name": "a"})).refusal == (400, "name")


async def test_a_session_has_so_many_messages(serving: Serving) -> None:
    async with serving(server={"max_messages": 2}) as served:
        session = await make(served)
        await say(served, session, "Hello")
        reply = await say(served, session, "More")
    assert reply.refusal == (400, "messages")
    assert "max_messages" in reply.error["message"]


@rest(SECONDS)
@pytest.mark.parametrize("stream", [False, True])
async def test_calls_of_tools_keep_the_ids_that_the_client_saw(
    bundled: Bundled, directory: Any, stream: bool
) -> None:
    (directory / "chat_template.jinja").write_text(ROUND_TRIP)  # it prints ids
    tool = {"type": "function", "function": {"name": "weather", "parameters": WEATHER}}
    ask: Any = {"model": "tiny-chat", "temperature": 0, "tools": [tool]}
    called: Any = {**ask, "tool_choice": "required", "parallel_tool_calls": False}
    async with bundled(directory) as client:
        made: Any = await client.post("/sessions", body={}, cast_to=object)
        extra = {"session": made["id"], "return_token_ids": True}
        asked = {**called, "messages": [USER], "extra_body": extra}
        if stream:
            chunks = [each async for each in await client.chat.completions.create(**asked, stream=True)]
            found = [call for each in chunks for c in each.choices for call in c.delta.tool_calls or ()]
            name, arguments = found[0].id, "".join(each.function.arguments or "" for each in found)
        else:
            (call,) = (await client.chat.completions.create(**asked)).choices[0].message.tool_calls
            name, arguments = call.id, call.function.arguments
        result: Any = {"role": "tool", "tool_call_id": name, "content": "rain"}
        function = {"name": "weather", "arguments": arguments}
        calls = [{"id": name, "type": "function", "function": function}]
        answered = {"role": "assistant", "content": None, "tool_calls": calls}
        ids = []
        for messages, body in (([result], extra), ([USER, answered, result], {"return_token_ids": True})):
            again = await client.chat.completions.create(
                **ask, messages=messages, max_tokens=4, extra_body=body
            )
            ids.append(again.to_dict()["prompt_token_ids"])
    assert ids[0] == ids[1]


async def test_an_engine_without_sessions_says_so(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving() as served:
        monkeypatch.setattr(type(served.engine), "session", None)
        reply = await served.post("/v1/sessions", {})
    assert (reply.status, reply.error["code"]) == (501, "sessions_not_supported")
