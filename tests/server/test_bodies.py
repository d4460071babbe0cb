"""The bodies of all requests together: bounded in bytes, from the first one to the end of the request."""

from __future__ import annotations

import asyncio
import gzip
import json
from typing import Any

import pytest

from aioinfer.errors import InvalidRequest, Rejected
from aioinfer.server.http import bodies
from aioinfer.server.http.bodies import BODIES, BodyBytes
from aioinfer.server.http.objects import json_object
from tests.engine.conftest import Gate
from tests.server.conftest import Connect, Served, Serving
from tests.server.raw import request
from tests.server.test_adversity import ENDLESS, until

KIB = 1 << 10


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process with room for a megabyte."""
    monkeypatch.setattr(bodies, "_LEAST", 1 << 20)
    monkeypatch.setattr(bodies, "_MOST", 1 << 20)
    monkeypatch.setattr(bodies, "_LARGEST", 0)
    monkeypatch.setattr(BODIES, "bound", 0)


def large(size: int) -> dict[str, Any]:
    """A call whose body has so many bytes, in a field that changes nothing."""
    return {**ENDLESS, "stream": False, "max_tokens": 1, "user": "x" * size}


def asked(served: Served) -> int:
    """Requests that the engine has."""
    stats = served.engine.stats()
    return stats.arriving + stats.waiting + stats.running


async def test_bodies_without_room_get_429_and_small_ones_are_served(
    serving: Serving, connect: Connect, gate: Gate
) -> None:
    async with serving(fault=gate) as served:
        waiting = [await connect(served) for _ in range(3)]
        for at, each in enumerate(waiting, 1):
            await each.send(request("POST", "/v1/completions", large(300 * KIB)))
            await until(lambda at=at: BODIES.promised > at * 200 * KIB)  # type: ignore[misc]
        await until(lambda: asked(served) == 3)  # and nothing more of their bodies comes
        held = BODIES.promised
        refused = await served.post("/v1/completions", large(600 * KIB))
        assert (refused.status, refused.headers["Retry-After"]) == (429, "1")
        assert "body: those of all requests have" in refused.text
        assert BODIES.promised == held
        small = asyncio.create_task(served.post("/v1/completions", large(KIB)))
        await until(lambda: asked(served) == 4)
        await waiting.pop().close()
        await until(lambda: BODIES.promised < held)
        gate.release()
        assert (await small).status == 200
        assert [await each.status() for each in waiting] == [200, 200]
        assert BODIES.promised == 0
        assert (await served.post("/v1/completions", large(600 * KIB))).status == 200


async def test_what_a_body_becomes_when_it_is_decompressed_counts(serving: Serving) -> None:
    async with serving() as served:
        bomb = gzip.compress(json.dumps(large(3 << 20)).encode())
        assert len(bomb) < 16 * KIB
        headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
        async with served.http.session.post("/v1/embeddings", data=bomb, headers=headers) as response:
            assert response.status == 429
        assert BODIES.promised == 0


async def test_bodies_that_arrive_slowly_count_as_far_as_they_have_come(
    serving: Serving, connect: Connect
) -> None:
    async with serving() as served:
        slow = await connect(served)
        whole = request("POST", "/v1/completions", large(500 * KIB))
        await slow.send(whole[: 400 * KIB])
        await until(lambda: BODIES.promised > 200 * KIB)
        assert (await served.post("/v1/completions", large(900 * KIB))).status == 429
        await slow.close()
        await until(lambda: BODIES.promised == 0)


async def test_many_values_count_as_what_they_become(serving: Serving) -> None:
    async with serving() as served:
        body = {**ENDLESS, "stream": False, "max_tokens": 1, "metadata": {"x": [1] * (100 * KIB)}}
        assert len(json.dumps(body)) < 400 * KIB
        assert (await served.post("/v1/completions", body)).status == 429
        assert BODIES.promised == 0


def test_a_body_counts_once_and_is_given_back_once() -> None:
    BODIES.bound = 1 << 20
    one, other = BodyBytes(), BodyBytes()
    one.count(64 * KIB)
    assert BODIES.promised == 0  # what connections have buffers for
    one.count(600 * KIB)
    one.count(100 * KIB)
    with pytest.raises(Rejected):
        other.count(700 * KIB)
    one.release()
    one.release()
    other.count(700 * KIB)
    other.release()
    assert BODIES.promised == 0


class Name(str):
    """A key that counts how often it is compared."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        Name.compared += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


@pytest.mark.parametrize("twice", [0, 1, 9_999])
def test_keys_that_are_equal_are_found_in_one_pass(twice: int) -> None:
    from aioinfer.server.http.objects import _once

    Name.compared = 0
    pairs = [(Name(at), at) for at in range(10_000)]
    with pytest.raises(InvalidRequest, match=f"body: has the key '{twice}' twice"):
        _once([*pairs, (Name(twice), 0)])
    assert Name.compared < 50_000


@pytest.mark.parametrize("where", ['{"tools": [%s]}', '{"a": {"b": %s}}', "%s"])
def test_equal_keys_are_named_wherever_they_are(where: str) -> None:
    keys = ",".join(f'"{at}":1' for at in range(30_000))
    with pytest.raises(InvalidRequest, match="body: has the key '29999' twice"):
        json_object((where % f'{{{keys},"29999":2}}').encode())
