"""Sessions that are saved by a name and loaded again, by the same key only."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest

from aioinfer.errors import InvalidRequest
from tests.engine.conftest import Gate
from tests.server.conftest import Connect, Served, Serving
from tests.server.raw import request
from tests.server.test_adversity import until
from tests.server.test_sessions import content, make, read, say
from tests.server.test_sessions import limited as limited  # a fixture
from tests.server.test_sessions import saving as saving  # a fixture
from tests.server.test_stored_responses import keys as keys  # a fixture
from tests.server.test_stored_responses import of

NAMED: Any = {"name": "monday"}
BAD_NAMES = [
    *("", ".", "..", "../up", "a/b", "a\\b", "/etc/passwd", "a.session", ".a", "-a", "a b", "a\0", "a\n"),
    *("ä", "a" * 65, "%2e%2e", "~", "a:b"),
]


def files_of(saving: dict[str, Any]) -> list[Path]:
    return sorted(each for each in Path(saving["sessions_dir"]).rglob("*") if each.is_file())


async def load(served: Served, name: str = "monday", **headers: str) -> Any:
    return await served.post("/v1/sessions/load", {"name": name}, **headers)


async def save(served: Served, session: str, name: str = "monday", **headers: str) -> Any:
    return await served.post(f"/v1/sessions/{session}/save", {"name": name}, **headers)


async def test_a_session_goes_on_in_another_server(serving: Serving, saving: dict[str, Any]) -> None:
    async with serving(server=saving) as served:
        session = await make(served, cache_salt="mine")
        await say(served, session, "Hello there")
        assert (await save(served, session)).json() == {"name": "monday", "object": "saved_session"}
        before = await read(served, session)
        wanted = content(await say(served, session, "More"))
        listed = (await served.get("/v1/saved_sessions")).json()
    assert [each["name"] for each in listed["data"]] == ["monday"]
    (file,) = files_of(saving)
    for path in (file.parent, file.parent.parent):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    async with serving(server=saving) as served:
        loaded = (await load(served)).json()
        assert loaded["id"] != session
        assert (loaded["num_tokens"], loaded["model"]) == (before["num_tokens"], "toy")
        assert content(await say(served, loaded["id"], "More")) == wanted
        # The salt is that of all its turns.
        assert (await say(served, loaded["id"], "More", cache_salt="other")).refusal == (400, "cache_salt")
        assert (await served.http("DELETE", "/v1/saved_sessions/monday")).json()["deleted"]
        assert (await load(served)).refusal == (404, "name")
    assert files_of(saving) == []


async def test_a_key_does_not_find_files_of_others(
    serving: Serving, saving: dict[str, Any], keys: dict[str, Any]
) -> None:
    async with serving(server={**saving, **keys}) as served:
        session = await make(served, "alice")
        await say(served, session, "Hello", key="alice")
        assert (await save(served, session, **of("alice"))).status == 200
        foreign, unknown = await load(served, **of("bob")), await load(served, "tuesday", **of("bob"))
        assert foreign.text.replace("monday", "tuesday") == unknown.text
        assert (foreign.status, foreign.error["code"]) == (404, "saved_session_not_found")
        assert (await save(served, session, **of("bob"))).status == 404
        assert (await served.get("/v1/saved_sessions", **of("bob"))).json()["data"] == []
        deleted = await served.http("DELETE", "/v1/saved_sessions/monday", **of("bob"))
        assert deleted.status == 404
        # A file of the same name is another one.
        other = await make(served, "bob")
        await say(served, other, "Hello", key="bob")
        assert (await save(served, other, **of("bob"))).status == 200
        assert (await load(served, **of("alice"))).status == 200
    assert len({each.parent for each in files_of(saving)}) == 2


async def test_only_names_are_taken(serving: Serving, saving: dict[str, Any]) -> None:
    async with serving(server=saving) as served:
        session = await make(served)
        await say(served, session, "Hello")
        for name in BAD_NAMES:
            for reply in (await save(served, session, name), await load(served, name)):
                assert reply.refusal == (400, "name"), name
        assert (await save(served, session, 5)).refusal == (400, "name")  # type: ignore[arg-type]
        assert (await served.http("DELETE", "/v1/saved_sessions/..%2Fup")).status == 400
        assert files_of(saving) == []
        assert (await save(served, session, "a" * 64)).status == 200


async def test_without_a_directory_nothing_is_saved(serving: Serving) -> None:
    async with serving() as served:
        session = await make(served)
        await say(served, session, "Hello")
        replies = [
            await save(served, session),
            await load(served),
            await served.get("/v1/saved_sessions"),
            await served.http("DELETE", "/v1/saved_sessions/monday"),
        ]
    for reply in replies:
        assert (reply.status, reply.error["code"]) == (403, "sessions_dir_not_set")
        assert "sessions_dir" in reply.error["message"]


async def test_links_and_what_else_is_no_file_are_not_followed(
    serving: Serving, saving: dict[str, Any], tmp_path: Path
) -> None:
    async with serving(server=saving) as served:
        session = await make(served)
        await say(served, session, "Hello")
        await save(served, session, "real")
        (file,) = files_of(saving)
        os.symlink(file, file.with_name("link.session"))
        os.mkfifo(file.with_name("pipe.session"))
        for name in ("link", "pipe"):
            assert (await load(served, name)).status == 404
            assert (await save(served, session, name)).status == 500
            assert (await served.http("DELETE", f"/v1/saved_sessions/{name}")).status == 404
        listed = (await served.get("/v1/saved_sessions")).json()["data"]
        assert [each["name"] for each in listed] == ["real"]
        # The directory of a key must not be a link, nor open to others.
        folder = file.parent
        folder.chmod(0o755)
        opened = await load(served, "real")
        folder.rename(tmp_path / "elsewhere")
        folder.symlink_to(tmp_path / "elsewhere")
        linked = await load(served, "real")
    for reply in (opened, linked):
        assert (reply.status, reply.error["type"]) == (500, "server_error")
        assert str(tmp_path) not in reply.text


async def test_a_file_that_is_none_or_of_another_model_is_refused(
    serving: Serving, saving: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(server=saving) as served:
        session = await make(served)
        await say(served, session, "Hello")
        for name in ("whole", "cut", "junk"):
            await save(served, session, name)
    junk, whole, cut = sorted(files_of(saving), key=lambda each: ("junk", "whole", "cut").index(each.stem))
    junk.write_bytes(b"junk" * 1000)
    cut.write_bytes(cut.read_bytes()[:100])
    async with serving(server=saving) as served:
        for name in ("cut", "junk"):
            reply = await load(served, name)
            assert reply.refusal == (400, "name"), name
            assert str(whole.parent) not in reply.text
        assert (await load(served, "whole")).status == 200
    monkeypatch.setattr("aioinfer.loop.factory.fingerprint", lambda config: "other")
    async with serving(server=saving) as served:
        reply = await load(served, "whole")
        assert served.engine.stats().sessions == 0
    assert reply.refusal == (400, "name")
    assert str(whole.parent) not in reply.text


async def test_a_key_has_so_many_files(serving: Serving, saving: dict[str, Any]) -> None:
    async with serving(server={**saving, "max_sessions_per_key": 2}) as served:
        session = await make(served)
        await say(served, session, "Hello")
        found = [(await save(served, session, name)).status for name in ("a", "b", "a", "c")]
        await served.http("DELETE", "/v1/saved_sessions/b")
        found.append((await save(served, session, "c")).status)
        # Those in memory are counted, too.
        assert (await load(served, "a")).status == 200
        assert (await load(served, "a")).error["code"] == "session_limit_exceeded"
    assert found == [200, 200, 200, 429, 200]


async def test_a_session_without_a_turn_is_not_saved(serving: Serving, saving: dict[str, Any]) -> None:
    async with serving(server=saving) as served:
        session = await make(served, messages=[{"role": "system", "content": "Be brief."}])
        assert (await save(served, session)).refusal == (400, "session")


async def test_a_session_deleted_before_its_name_has_come_is_not_found(
    serving: Serving, saving: dict[str, Any], connect: Connect
) -> None:
    async with serving(server=saving) as served:
        session = await make(served, prompt=[1, 2, 3])
        connection = await connect(served)
        whole = request("POST", f"/v1/sessions/{session}/save", NAMED, Expect="100-continue")
        head, end, body = whole.partition(b"\r\n\r\n")
        await connection.send(head + end)
        assert b" 100 " in await connection.head()
        assert (await served.http("DELETE", f"/v1/sessions/{session}")).status == 200
        await connection.send(body)
        assert await connection.status() == 404
    assert files_of(saving) == []


async def test_loads_count_in_the_limits_of_the_key(
    serving: Serving, saving: dict[str, Any], limited: dict[str, Any], still: None
) -> None:
    async with serving(server={**saving, **limited}) as served:
        session = await make(served, "carol", prompt=[*range(1, 31)])
        await save(served, session, **of("carol"))
        assert [(await load(served, **of("carol"))).status for _ in range(2)] == [200, 429]


async def test_a_running_session_is_saved_as_it_was(
    serving: Serving, saving: dict[str, Any], gate: Gate
) -> None:
    gate.open = True
    async with serving(server=saving, fault=gate) as served:
        session = await make(served, prompt=[1, 2, 3, 4, 5])
        gate.open = False
        while gate._permits.acquire(blocking=False):
            pass
        body = {"prompt": [6], "session": session, "max_tokens": 4, "ignore_eos": True}
        turn = asyncio.create_task(served.post("/v1/completions", body))
        await until(lambda: served.engine.stats().running == 1)
        assert (await save(served, session)).status == 200
        gate.release()
        await turn
        assert (await load(served)).json()["num_tokens"] == 5
        assert (await read(served, session))["num_tokens"] == 10


async def test_a_disk_that_fails_is_the_fault_of_the_server(
    serving: Serving, saving: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(server=saving) as served:
        session = await make(served)
        await say(served, session, "Hello")

        async def full(self: Any, path: Any) -> int:
            raise InvalidRequest("path", f"{path}: {os.strerror(errno.ENOSPC)}")

        with monkeypatch.context() as patch:
            patch.setattr("aioinfer.client.sessions.Session.save", full)
            failed = await save(served, session)
        assert (await save(served, session)).status == 200
        (file,) = files_of(saving)
        shutil.rmtree(file.parent)
        file.parent.write_text("a file")
        gone = await load(served)
        assert (await say(served, session, "More")).status == 200
    assert (failed.status, failed.error["code"]) == (500, "session_not_saved")
    assert "No space left" in failed.error["message"]
    assert (gone.status, gone.error["type"]) == (500, "server_error")
    for reply in (failed, gone):
        assert saving["sessions_dir"] not in reply.text
