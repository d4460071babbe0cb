"""Keys: who may use a server, how much, and what a file of keys may say."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import openai
import pytest

from aioinfer.cli.main import main
from aioinfer.config import ServerConfig
from aioinfer.errors import ConfigError
from aioinfer.server.http.failures import Refused
from aioinfer.server.http.keys import Key, Keys, digest_of, new_key
from tests.engine.conftest import Gate
from tests.server.calls import Reply
from tests.server.conftest import Served, Serving
from tests.server.test_adversity import ENDLESS, until

BODY = {**ENDLESS, "stream": False, "max_tokens": 5}
ALICE, BOB = "alice-secret", "bob-secret"


def key_file(directory: Path, *entries: dict[str, Any]) -> str:
    path = directory / "keys.yaml"
    path.write_text(json.dumps(entries))  # JSON is YAML
    return str(path)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def opened(served: Served) -> int:
    stats = served.engine.stats()
    return stats.running + stats.waiting + stats.arriving


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


# -- limits, on a clock of their own -------------------------------------------------------------------


def test_a_bucket_of_tokens_fills_evenly_and_no_further() -> None:
    clock = Clock()
    key = Key("a", tokens_per_minute=600, clock=clock)
    key.enter()
    key.leave(900)  # more than there was: the rest is owed
    assert key.headers()["x-ratelimit-remaining-tokens"] == "0"
    with pytest.raises(Refused) as refused:
        key.enter()
    failure = refused.value.failure
    assert (failure.status, failure.code) == (429, "rate_limit_exceeded")
    assert failure.headers == {"Retry-After": "31"}  # 301 tokens at 10 a second
    for clock.now in (130.0, 100.0, 0.0):  # a clock that goes back gives no tokens
        with pytest.raises(Refused):
            key.enter()
    clock.now += 31.0
    key.enter()
    key.leave(0)
    assert key.headers()["x-ratelimit-limit-tokens"] == "600"
    clock.now += 1e6
    assert key.headers()["x-ratelimit-remaining-tokens"] == "600"
    assert key.headers()["x-ratelimit-reset-tokens"] == "0s"


def test_what_retry_after_says_is_enough() -> None:
    for rate in (1, 7, 60, 10**9):
        clock = Clock()
        key = Key("a", tokens_per_minute=rate, clock=clock)
        key.enter()
        key.leave(rate + 13)
        with pytest.raises(Refused) as refused:
            key.enter()
        clock.now += int(refused.value.failure.headers["Retry-After"])
        key.enter()


def test_a_key_without_limits_has_no_headers() -> None:
    key = Key("a")
    for _ in range(1000):
        key.enter()
    assert key.headers() == {}


# -- the file ------------------------------------------------------------------------------------------

GOOD = {"name": "a", "key": "long enough"}


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([], "list of 1 to"),
        ({"name": "a"}, "list of 1 to"),
        ("text", "list of 1 to"),
        ([7], "key 1 must be a mapping"),
        ([{"key": "long enough"}], "key 1: name must be"),
        ([{"name": "a b", "key": "long enough"}], "name must be"),
        ([{"name": "x" * 65, "key": "long enough"}], "name must be"),
        ([{"name": "a"}], "needs either key or sha256"),
        ([{**GOOD, "sha256": "0" * 64}], "needs either key or sha256"),
        ([{"name": "a", "key": "short"}], "at least 8"),
        ([{"name": "a", "key": 123456789}], "at least 8"),
        ([{"name": "a", "key": " spaces around "}], "without spaces"),
        ([{"name": "a", "sha256": "0" * 63}], "64 hexadecimal digits"),
        ([{"name": "a", "sha256": int("1" * 64)}], "in quotes"),
        ([{**GOOD, "concurrency": 0}], "concurrency must be an integer from 1"),
        ([{**GOOD, "concurrency": True}], "concurrency must be"),
        ([{**GOOD, "tokens_per_minute": 1.5}], "tokens_per_minute must be"),
        ([{**GOOD, "tokens_per_minute": "9"}], "tokens_per_minute must be"),
        ([{**GOOD, "admin": True}], "unknown field 'admin'"),
        ([GOOD, {"name": "a", "key": "another one"}], "key 2: the name a occurs twice"),
        ([GOOD, {"name": "b", "key": "long enough"}], "key 2: the same key as that of a"),
        ([GOOD, {"name": "b", "sha256": digest_of("long enough").upper()}], "the same key as that of a"),
    ],
)
def test_a_file_of_keys_with_an_error_is_refused_in_one_line(
    tmp_path: Path, entries: Any, message: str
) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(json.dumps(entries))
    with pytest.raises(ConfigError) as refused:
        Keys.of(ServerConfig(api_keys=str(path)))
    text = str(refused.value)
    assert message in text
    assert text.startswith(str(path))
    assert "\n" not in text
    assert "long enough" not in text, "keys are shown to nobody"


def test_the_key_of_the_setting_shares_its_name_with_no_other(tmp_path: Path) -> None:
    file = key_file(tmp_path, {**GOOD, "name": "api_key"})
    with pytest.raises(ConfigError, match="the name api_key"):
        Keys.of(ServerConfig(api_keys=file, api_key="another one"))
    assert Keys.of(ServerConfig(api_keys=file, api_key=GOOD["key"])).given  # the same one


def test_a_file_of_keys_is_read_before_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = str(tmp_path / "none.yaml")
    assert main(["serve", "/no/such/model", "--port", "0", "--api-keys", missing]) == 2
    assert capsys.readouterr().err == f"aioinfer: {missing}: No such file or directory\n"


def test_a_new_key_fits_into_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["key", "alice"]) == 0
    shown = capsys.readouterr()
    key = shown.err.split()[-1]
    path = tmp_path / "keys.yaml"
    path.write_text(shown.out)
    assert key not in shown.out
    assert Keys.of(ServerConfig(api_keys=str(path))).given
    assert digest_of(key) in shown.out
    assert len({new_key() for _ in range(100)}) == 100
    assert main(["key", "not a name"]) == 2


def test_a_file_of_keys_lets_a_server_listen_elsewhere(tmp_path: Path) -> None:
    ServerConfig(host="0.0.0.0", api_keys=key_file(tmp_path, GOOD))
    with pytest.raises(ConfigError, match="loopback"):
        ServerConfig(host="0.0.0.0")


# -- over HTTP -----------------------------------------------------------------------------------------

PATH = "/v1/completions"
LIMITED = {"name": "alice", "key": ALICE}


@pytest.mark.parametrize(
    ("headers", "word"),
    [
        (bearer(ALICE), ""),
        (bearer(BOB), ""),
        (bearer("single-key"), ""),
        (bearer("schlüssel"), ""),
        ({"Authorization": f"bearer {ALICE}"}, ""),
        ({"Authorization": f"BEARER   {ALICE} "}, ""),
        ({"X-Api-Key": f" {BOB} "}, ""),
        ({**bearer("wrong"), "x-api-key": ALICE}, ""),
        ({"Authorization": "Basic abc", "x-api-key": ALICE}, ""),
        ({}, "missing"),
        ({"Authorization": ""}, "missing"),
        ({"Authorization": "Bearer"}, "missing"),
        ({"Authorization": f"Basic {ALICE}"}, "missing"),
        ({"x-api-key": ""}, "missing"),
        ({"x-api-key": "wrong"}, "wrong"),
        ({"x-api-key": digest_of(ALICE)}, "wrong"),
        (bearer(ALICE + "x"), "wrong"),
        (bearer(ALICE[:-1]), "wrong"),
        (bearer("schlüsse"), "wrong"),
    ],
)
async def test_the_keys_guard_every_route_but_health(
    serving: Serving, tmp_path: Path, headers: dict[str, str], word: str
) -> None:
    path = key_file(
        tmp_path, LIMITED, {"name": "bob", "sha256": digest_of(BOB)}, {"name": "eve", "key": "schlüssel"}
    )
    async with serving(server={"api_keys": path, "api_key": "single-key"}) as served:
        assert (await served.get("/health", **headers)).status == 200
        for method, path, body in (("GET", "/v1/models", None), ("POST", PATH, BODY)):
            reply = await served.http(method, path, body, **headers)
            assert reply.status == (401 if word else 200)
            if word:
                assert word in reply.error["message"]
                assert reply.error["code"] == ("invalid_api_key" if word == "wrong" else None)
                assert reply.headers["WWW-Authenticate"].startswith("Bearer")


async def test_a_key_has_so_many_calls_at_once(serving: Serving, tmp_path: Path, gate: Gate) -> None:
    path = key_file(tmp_path, {**LIMITED, "concurrency": 2}, {"name": "bob", "key": BOB})
    async with serving(server={"api_keys": path}, fault=gate) as served:

        async def call(key: str) -> Reply:
            return await served.post(PATH, BODY, **bearer(key))

        first = [asyncio.create_task(call(ALICE)) for _ in range(2)]
        await until(lambda: opened(served) == 2)
        refused = await call(ALICE)
        assert (refused.status, refused.error["code"]) == (429, "concurrency_limit_exceeded")
        assert refused.error["type"] == "rate_limit_error"
        assert "alice" in refused.error["message"]
        assert int(refused.headers["Retry-After"]) >= 1
        assert opened(served) == 2
        # Neither other routes nor other keys.
        assert (await served.get("/v1/models", **bearer(ALICE))).status == 200
        other = asyncio.create_task(call(BOB))
        await until(lambda: opened(served) == 3)
        gate.release()
        assert [each.status for each in await asyncio.gather(*first, other)] == [200] * 3
        assert (await call(ALICE)).status == 200


async def test_a_call_that_ends_in_any_way_makes_room(serving: Serving, tmp_path: Path, gate: Gate) -> None:
    """Refused, disconnected while it waits or amid its stream: none of them keeps its place."""
    path = key_file(tmp_path, {**LIMITED, "concurrency": 1})
    async with serving(server={"api_keys": path}, fault=gate) as served:
        headers = bearer(ALICE)
        for bad in ({**BODY, "max_tokens": -1}, {**BODY, "model": "other"}, {**BODY, "nonsense": 1}, b"{"):
            assert (await served.post(PATH, bad, **headers)).status in (400, 404)
        for stream in (True, False):
            asked = {**ENDLESS, "stream": stream}
            leaving = asyncio.create_task(served.http.session.post(PATH, json=asked, headers=headers))
            await until(lambda: opened(served) == 1)
            if stream:
                (await leaving).close()
            leaving.cancel()
            gate.step(3)
            await until(lambda: opened(served) == 0)
        gate.release()
        assert (await served.post(PATH, BODY, **headers)).status == 200


@pytest.mark.usefixtures("still")
async def test_tokens_of_prompts_and_outputs_are_counted(serving: Serving, tmp_path: Path) -> None:
    path = key_file(tmp_path, {**LIMITED, "tokens_per_minute": 20})
    async with serving(server={"api_keys": path}) as served:
        headers = bearer(ALICE)
        reply = await served.post(PATH, BODY, **headers)
        assert (reply.status, reply.headers["x-ratelimit-limit-tokens"]) == (200, "20")
        # 3 of the prompt and 5 of the output
        reply = await served.get("/v1/models", **headers)
        assert reply.headers["x-ratelimit-remaining-tokens"] == "12"
        assert reply.headers["x-ratelimit-reset-tokens"].endswith("s")
        reply = await served.post(PATH, {**BODY, "stream": True, "max_tokens": 40, "n": 2}, **headers)
        assert reply.text.endswith("data: [DONE]\n\n")
        reply = await served.post(PATH, BODY, **headers)
        assert (reply.status, reply.error["code"]) == (429, "rate_limit_exceeded")
        # 70 tokens are owed, and one must be there, at one in three seconds
        assert 200 < int(reply.headers["Retry-After"]) <= 216
        assert reply.headers["x-ratelimit-remaining-tokens"] == "0"
        assert served.engine.stats().finished == 3


@pytest.mark.usefixtures("still")
async def test_what_a_client_used_before_it_left_is_counted(
    serving: Serving, tmp_path: Path, gate: Gate
) -> None:
    path = key_file(tmp_path, {**LIMITED, "tokens_per_minute": 6})
    async with serving(server={"api_keys": path}, fault=gate) as served:
        async with served.http.session.post(PATH, json=ENDLESS, headers=bearer(ALICE)) as response:
            gate.step(8)
            await until(lambda: served.engine.stats().output_tokens >= 4)
            response.close()
        gate.release()
        await until(lambda: opened(served) == 0)
        assert (await served.post(PATH, BODY, **bearer(ALICE))).status == 429


@pytest.mark.usefixtures("still")
async def test_what_beams_used_before_their_client_left_is_counted(
    serving: Serving, tmp_path: Path, gate: Gate
) -> None:
    path = key_file(tmp_path, {**LIMITED, "tokens_per_minute": 6})
    async with serving(server={"api_keys": path}, fault=gate) as served:
        asked = {**ENDLESS, "stream": False, "use_beam_search": True, "n": 3}
        leaving = asyncio.create_task(served.http.session.post(PATH, json=asked, headers=bearer(ALICE)))
        gate.step(8)
        await until(lambda: served.engine.stats().output_tokens >= 4)
        leaving.cancel()
        gate.release()
        await until(lambda: opened(served) == 0)
        assert (await served.post(PATH, BODY, **bearer(ALICE))).status == 429


@pytest.mark.usefixtures("still")
async def test_the_client_knows_the_limits(serving: Serving, tmp_path: Path) -> None:
    path = key_file(tmp_path, {**LIMITED, "tokens_per_minute": 1})
    async with serving(server={"api_keys": path}) as served, served.client(api_key=ALICE) as client:
        await client.completions.create(model="toy", prompt="a", max_tokens=5)
        with pytest.raises(openai.RateLimitError) as limited:
            await client.completions.create(model="toy", prompt="a", max_tokens=5)
        assert limited.value.code == "rate_limit_exceeded"
        assert limited.value.request_id
