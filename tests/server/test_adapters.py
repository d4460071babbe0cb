"""Adapters over HTTP: selected as models, loaded and unloaded within a directory."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any, cast

import openai
import pytest

from aioinfer import SamplingParams
from aioinfer.config import ServerConfig
from aioinfer.errors import ConfigError, InvalidRequest
from aioinfer.server.confinement import Confined
from tests.server.calls import Http, http
from tests.server.conftest import Served, Serving
from tests.tiers import SECONDS, rest
from tests.toys import ToyDevice, ToyTokenizer, toy_generate
from tests.toys.adapters import ToyAdapter, write_toy_adapter

PROMPT = [3, 4, 5, 6, 7]
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


def device(**options: Any) -> ToyDevice:
    return ToyDevice(
        num_pages=4096, page_size=4, num_slots=512, max_model_len=4096, max_adapters=17, **options
    )


def wanted(path: Path | None) -> str:
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    ids = toy_generate(PROMPT, params, adapter=0 if path is None else ToyAdapter.read(path).key)
    return ToyTokenizer().decode(ids)


BODY = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True}


async def complete(served: Served, model: str) -> tuple[int, Any]:
    reply = await served.post("/v1/completions", {**BODY, "model": model})
    return reply.status, reply.json()["choices"][0]["text"] if reply.status == 200 else reply.error


async def post(client: Served | Http, path: str, **body: Any) -> tuple[int, Any]:
    reply = await client.post(path, body)
    if reply.status == 200:
        assert reply.type == "text/plain"
        return 200, reply.text
    return reply.status, reply.error


async def test_an_adapter_is_loaded_selected_replaced_and_unloaded(serving: Serving, tmp_path: Path) -> None:
    one, two = (write_toy_adapter(tmp_path / name, name) for name in ("one", "two"))
    added, replaced, removed = (
        (200, f"Success: the LoRA adapter 'sql' was {what}.") for what in ("added", "replaced", "removed")
    )
    async with serving(server={"lora_root": str(tmp_path)}, device=device()) as served:
        assert (await complete(served, "sql"))[1]["code"] == "model_not_found"
        assert await post(served, LOAD, lora_name="sql", lora_path="one", load_inplace=True) == added
        assert await complete(served, "sql") == (200, wanted(one))
        assert await complete(served, "toy") == (200, wanted(None))
        status, error = await post(served, LOAD, lora_name="sql", lora_path="two")
        assert (status, error["param"]) == (400, "lora_name")
        assert "load_inplace" in error["message"]
        assert await post(served, LOAD, lora_name="sql", lora_path=str(two), load_inplace=True) == replaced
        assert await complete(served, "sql") == (200, wanted(two))
        models = (await served.get("/v1/models")).json()
        assert [each["id"] for each in models["data"]] == ["toy", "sql"]
        assert (models["first_id"], models["last_id"]) == ("toy", "sql")
        assert (models["data"][1]["parent"], models["data"][1]["root"]) == ("toy", "two")
        assert (await served.get("/v1/models/sql")).json() == models["data"][1]
        assert await post(served, UNLOAD, lora_name="sql") == removed
        status, error = await post(served, UNLOAD, lora_name="sql")
        assert (status, error["param"], error["code"]) == (404, "lora_name", "adapter_not_found")
        assert (await complete(served, "sql"))[0] == 404


@rest(SECONDS)
async def test_every_protocol_selects_an_adapter_by_the_name_of_the_model(
    serving: Serving, tmp_path: Path
) -> None:
    write_toy_adapter(tmp_path / "one", "one")
    async with (
        serving(device=device(), adapters=f"sql={tmp_path / 'one'}") as served,
        served.client() as client,
    ):
        message: Any = [{"role": "user", "content": "a"}]
        texts: dict[str, list[str | None]] = {}
        for name in ("toy", "sql"):
            chat = await client.chat.completions.create(
                model=name, messages=message, max_tokens=8, temperature=0
            )
            response = await client.responses.create(
                model=name, input="a", max_output_tokens=8, temperature=0
            )
            body = {"model": name, "max_tokens": 8, "messages": message, "temperature": 0}
            answer = cast("dict[str, Any]", await client.post("/messages", body=body, cast_to=object))
            texts[name] = [
                chat.choices[0].message.content,
                response.output_text,
                answer["content"][0]["text"],
            ]
            assert {chat.model, response.model, answer["model"]} == {name}
        assert not {*texts["toy"]} & {*texts["sql"]}
        assert len({*texts["sql"]}) == len({*texts["toy"]}) == 1
        with pytest.raises(openai.NotFoundError) as missing:
            await client.completions.create(model="none", prompt="a")
        assert missing.value.code == "model_not_found"


async def test_without_a_root_nothing_is_loaded(serving: Serving, tmp_path: Path) -> None:
    adapters = f"a={write_toy_adapter(tmp_path / 'a', 'a')}"
    async with serving(device=device(), adapters=adapters) as served:
        for path, body in (
            (LOAD, {"lora_name": "x", "lora_path": str(tmp_path)}),
            (UNLOAD, {"lora_name": "a"}),
        ):
            status, error = await post(served, path, **body)
            assert (status, error["code"]) == (403, "lora_root_not_set")
        assert [each.name for each in served.engine.adapters()] == ["a"]


async def test_the_routes_need_a_key_where_others_do(serving: Serving, root: Path) -> None:
    config = {"lora_root": str(root), "api_key": "secret"}
    async with serving(server=config, device=device()) as served:
        assert (await post(served, LOAD, lora_name="a", lora_path="one"))[0] == 401
        assert (await post(served, UNLOAD, lora_name="a"))[0] == 401
        async with http(served.url, Authorization="Bearer secret") as client:
            assert (await post(client, LOAD, lora_name="a", lora_path="one"))[0] == 200


async def test_operators_load_on_their_own_socket(serving: Serving, root: Path) -> None:
    path = f"/tmp/aioinfer-adapters-{os.getpid()}"
    config = {"lora_root": str(root), "admin_uds": path}
    async with serving(server=config, device=device()) as served, http(f"unix:{path}") as client:
        assert (await post(client, LOAD, lora_name="a", lora_path="one"))[0] == 200
        assert [each.name for each in served.engine.adapters()] == ["a"]
        assert (await post(client, LOAD, lora_name="a", lora_path="one", more=1))[0] == 400
        assert (await post(client, UNLOAD, lora_name="a"))[0] == 200
        assert (await post(client, UNLOAD, lora_name="a"))[0] == 404


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"lora_name": "a"}, "lora_path", "is missing"),
    ({"lora_path": "one"}, "lora_name", "is missing"),
    ({"lora_name": "", "lora_path": "one"}, "lora_name", "must have at least 1"),
    ({"lora_name": " ", "lora_path": "one"}, "lora_name", "printable"),
    ({"lora_name": "x" * 300, "lora_path": "one"}, "lora_name", "256"),
    ({"lora_name": 5, "lora_path": "one"}, "lora_name", "must be text"),
    ({"lora_name": "toy", "lora_path": "one"}, "lora_name", "name of the model"),
    ({"lora_name": "a", "lora_path": 5}, "lora_path", "must be text"),
    ({"lora_name": "a", "lora_path": "one", "load_inplace": "yes"}, "load_inplace", "true or false"),
    ({"lora_name": "a", "lora_path": "one", "lora_int_id": 1}, "lora_int_id", "is not a field"),
    ({"lora_name": "a", "lora_path": "nothing"}, "lora_path", "there is nothing at"),
    ({"lora_name": "a", "lora_path": "empty"}, "lora_path", "is no adapter"),
    ({"lora_name": "a", "lora_path": "../outside"}, "lora_path", "outside of lora_root"),
    ({"lora_name": "a", "lora_path": "/etc"}, "lora_path", "outside of lora_root"),
    ({"lora_name": "a", "lora_path": "/nothing"}, "lora_path", "outside of lora_root"),
    ({"lora_name": "a", "lora_path": "leads-out"}, "lora_path", "outside of lora_root"),
    ({"lora_name": "a", "lora_path": "leads-out/deeper"}, "lora_path", "outside of lora_root"),
    ({"lora_name": "a", "lora_path": "loop"}, "lora_path", ""),
    ({"lora_name": "a", "lora_path": "a\0b"}, "lora_path", "NUL"),
    ({"lora_name": "a", "lora_path": "x" * 5000}, "lora_path", "4096"),
    ({"lora_name": "a", "lora_path": "x" * 1000}, "lora_path", ""),
]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    found, outside = tmp_path / "root", write_toy_adapter(tmp_path / "outside", "x")
    write_toy_adapter(outside / "deeper", "y")
    write_toy_adapter(found / "one", "one")
    (found / "empty").mkdir()
    (found / "leads-out").symlink_to(outside)
    (found / "stays").symlink_to(found / "one")
    (found / "loop").symlink_to(found / "loop")
    return found


async def test_every_bad_body_gets_one_clear_error_and_changes_nothing(serving: Serving, root: Path) -> None:
    async with serving(server={"lora_root": str(root)}, device=device()) as served:
        for body, param, message in BAD:
            status, error = await post(served, LOAD, **body)
            assert (status, error["param"]) == (400, param), (body, error)
            assert message in error["message"]
            assert str(root.parent / "outside") not in error["message"]
        assert served.engine.adapters() == []
        assert (await post(served, LOAD, lora_name="a", lora_path="stays"))[0] == 200


def test_paths_are_confined_to_the_root(root: Path) -> None:
    within = Confined(str(root), "lora_root", "lora_path")
    for path in ("one", "./one", "stays", str(root / "one"), "empty/../one", f"{root}/../{root.name}/one"):
        assert within.directory(path, ()) == root / "one"
    link = root.parent / "link"
    link.symlink_to(root)
    assert Confined(str(link), "lora_root", "lora_path").find(str(link / "one")) == root / "one"
    with pytest.raises(InvalidRequest, match="lora_root of this server is not there"):
        Confined(str(root / "gone"), "lora_root", "lora_path").find("one")


async def test_more_than_max_adapters_are_refused(serving: Serving, root: Path) -> None:
    async with serving(server={"lora_root": str(root)}, device=device(), max_adapters=1) as served:
        assert (await post(served, LOAD, lora_name="a", lora_path="one"))[0] == 200
        status, error = await post(served, LOAD, lora_name="b", lora_path="one")
        assert (status, "max_adapters (1)" in error["message"]) == (400, True)


def test_a_root_is_a_path() -> None:
    with pytest.raises(ConfigError, match="lora_root must be a path, not empty"):
        ServerConfig(lora_root="")
    for name in ("lora_root", "weights_root"):
        with pytest.raises(ConfigError, match=f"{name} must be a path, which has no NUL"):
            ServerConfig(**{name: "a\0b"})


async def test_links_of_files_out_of_the_root_and_pipes_are_refused_before_they_are_read(
    serving: Serving, root: Path
) -> None:
    """Links within the root are files as any, as in a hub's cache. What else there is does not matter."""
    outside, bad = root.parent / "outside", {"out": "leads outside", "pipe": "no regular", "loops": "cannot"}
    (root / "blob").write_bytes((outside / "adapter_config.json").read_bytes())
    for name in (*bad, "within", "weights", "zero"):
        (root / name).mkdir()
    (root / "out" / "adapter_config.json").symlink_to(outside / "adapter_config.json")
    os.mkfifo(root / "pipe" / "adapter_config.json")
    (root / "loops" / "adapter_config.json").symlink_to("adapter_config.json")
    (root / "within" / "adapter_config.json").symlink_to("../blob")
    (root / "within" / "adapter_old").mkdir()
    os.mkfifo(root / "within" / "adapter_pipe")
    write_toy_adapter(root / "weights", "x")
    (root / "weights" / "adapter_model.safetensors").symlink_to(outside / "adapter_config.json")
    (root / "zero" / "adapter_config.json").symlink_to("/dev/zero")
    async with serving(server={"lora_root": str(root)}, device=device()) as served:
        for name, message in (bad | {"weights": "leads outside", "zero": "leads outside"}).items():
            status, error = await post(served, LOAD, lora_name="a", lora_path=name)
            assert (status, error["param"]) == (400, "lora_path"), error
            assert message in error["message"]
            assert str(root.parent) not in error["message"]
        assert served.engine.adapters() == []
        assert (await post(served, LOAD, lora_name="a", lora_path="within"))[0] == 200


async def test_what_an_engine_says_of_an_adapter_does_not_tell_where_the_root_is(
    serving: Serving, root: Path
) -> None:
    def prepare(path: Path) -> Any:
        raise OSError(f"{path} is broken")

    toy = device()
    toy.prepare_adapter = prepare
    async with serving(server={"lora_root": str(root)}, device=toy) as served:
        status, error = await post(served, LOAD, lora_name="a", lora_path="one")
    assert status == 400
    assert "is broken" in error["message"]
    assert str(root) not in error["message"]


async def test_of_several_loads_of_a_name_at_once_one_adds_it(serving: Serving, root: Path) -> None:
    write_toy_adapter(root / "two", "two")
    async with serving(server={"lora_root": str(root)}, device=device()) as served:
        loads = [post(served, LOAD, lora_name="a", lora_path=path) for path in ("one", "two", "one")]
        answers = await asyncio.gather(*loads)
        assert sorted(status for status, _ in answers) == [200, 400, 400]
        assert {error["param"] for status, error in answers if status == 400} == {"lora_name"}
