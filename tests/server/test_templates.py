"""Templates and suffixes over HTTP."""

from __future__ import annotations

from typing import Any

import pytest

from aioinfer.errors import InvalidRequest
from aioinfer.params import SamplingParams
from tests.server.conftest import Serving
from tests.toys import ToyTokenizer
from tests.toys.blocks import ScriptedDevice

PATH = "/v1/completions"
#: the toy's vocabulary has letters only
TEXT = "das{name}lebt{city}xyz"


def device() -> ScriptedDevice:
    return ScriptedDevice(num_slots=512, num_pages=512)


class Infilling(ToyTokenizer):
    """With StarCoder's tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.added_tokens = {"<fim_prefix>": 60, "<fim_suffix>": 61, "<fim_middle>": 62}


@pytest.mark.parametrize("blocks", [True, False])
async def test_a_template_is_filled_in(serving: Serving, blocks: bool) -> None:
    body = {"prompt": "hallo", "max_tokens": 200, "temperature": 1, "seed": 4}
    usual = {"text": TEXT, "holes": {"name": ["ab", "bc"], "city": 4}}
    async with serving(device=device() if blocks else None) as served:
        for template in (TEXT, usual):
            reply = await served.post(PATH, {**body, "structured_outputs": {"template": template}})
            assert reply.status == 200, reply.json()
            (choice,) = reply.json()["choices"]
            assert choice["finish_reason"] == "stop"
            text = choice["text"]
            assert text.startswith("das")
            assert text.endswith("xyz")
            assert "lebt" in text
        assert text[3:5] in ("ab", "bc")
        assert text[5:9] == "lebt"
        assert len(text) <= len(TEXT.format(name="ab", city="abcd"))


async def test_a_bad_template_is_refused_by_its_path(serving: Serving) -> None:
    async with serving() as served:
        for template, param in (
            ("no hole", "structured_outputs.template"),
            ({"text": "{a}", "holes": {"b": 3}}, "structured_outputs.template.holes"),
            ({"text": "{a}", "holes": {"a": 0}}, "structured_outputs.template.holes.a"),
            ({"text": "{a}", "holes": {"a": None}}, "structured_outputs.template.holes.a"),
            ({"text": "{a}", "holes": {"a": [1]}}, "structured_outputs.template.holes.a"),
            ({"text": "{a}", "holes": []}, "structured_outputs.template.holes"),
            ("é" * 200_000 + "{a}", "structured_outputs.template"),
            (["a"], "structured_outputs.template"),
            ({"holes": {}}, "structured_outputs.template.text"),
        ):
            reply = await served.post(PATH, {"prompt": "a", "structured_outputs": {"template": template}})
            assert reply.status == 400
            assert reply.json()["error"]["param"] == param
        both = {"template": "{a}", "regex": "a"}
        assert (await served.post(PATH, {"prompt": "a", "structured_outputs": both})).status == 400


async def test_a_diffusion_model_sees_the_suffix_in_the_last_block(serving: Serving) -> None:
    body: dict[str, Any] = {"prompt": [1, 2, 3], "max_tokens": 4, "temperature": 0, "return_token_ids": True}
    template = [*[None] * 4, *ToyTokenizer().encode("xyz")]
    async with serving(device=device()) as served:
        params = SamplingParams(temperature=0, template=template, max_tokens=4)
        wanted = await served.engine.generate([1, 2, 3], params)
        reply = await served.post(PATH, {**body, "suffix": "xyz", "n": 2})
        other = await served.post(PATH, {**body, "suffix": "zzz"})
        without = await served.post(PATH, body)
    for choice in reply.json()["choices"]:
        assert choice["text"] == wanted.text
        assert choice["token_ids"] == wanted.token_ids
        assert choice["finish_reason"] == wanted.finish_reason
    assert reply.json()["usage"]["completion_tokens"] == 2 * len(wanted.token_ids)
    texts = {each.json()["choices"][0]["text"] for each in (reply, other, without)}
    assert len(texts) == 3


async def test_a_suffix_is_cut_to_the_context(serving: Serving) -> None:
    short = ScriptedDevice(num_slots=512, num_pages=512, max_model_len=16)
    async with serving(device=short) as served:
        body = {"prompt": [1] * 9, "suffix": "abcdefghijkl", "max_tokens": 6, "ignore_eos": True}
        reply = await served.post(PATH, body)
        assert reply.json()["usage"]["completion_tokens"] == 6
        reply = await served.post(PATH, {**body, "max_tokens": 100})
        assert reply.json()["usage"]["completion_tokens"] == 7


async def test_an_autoregressive_model_gets_its_own_tokens(serving: Serving) -> None:
    body: dict[str, Any] = {"prompt": "ab", "suffix": "cd", "max_tokens": 6, "temperature": 0}
    text = ToyTokenizer()
    ids = [60, *text.encode("ab"), 61, *text.encode("cd"), 62]
    async with serving(tokenizer=Infilling()) as served:
        wanted = await served.engine.generate(ids, SamplingParams(temperature=0, max_tokens=6))
        reply = await served.post(PATH, body)
        assert reply.json()["choices"][0]["text"] == wanted.text
        assert reply.json()["usage"]["prompt_tokens"] == len(ids)
        events = await served.post(PATH, {**body, "stream": True})
        assert events.status == 200


async def test_a_suffix_is_refused_where_it_makes_no_sense(serving: Serving) -> None:
    body: dict[str, Any] = {"prompt": "ab", "suffix": "cd"}
    async with serving() as served:
        reply = await served.post(PATH, body)
        assert (reply.status, reply.json()["error"]["param"]) == (400, "suffix")
        for field, value in (
            ("echo", True),
            ("use_beam_search", True),
            ("guided_regex", "a"),
        ):
            reply = await served.post(PATH, {**body, field: value})
            assert (reply.status, reply.json()["error"]["param"]) == (400, field)
        chat = {"messages": [{"role": "user", "content": "a"}], "suffix": "b"}
        reply = await served.post("/v1/chat/completions", chat)
        assert (reply.status, reply.json()["error"]["param"]) == (400, "suffix")
    async with serving(device=device()) as served:
        for field, value, param in (
            ("stop", "x", "stop"),
            ("max_tokens", 0, "max_tokens"),
            ("suffix", 3, "suffix"),
            ("diffusion", {"algorithm": "joint_threshold_indel"}, "diffusion.algorithm"),
        ):
            reply = await served.post(PATH, {**body, field: value})
            assert (reply.status, reply.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("blocks", [True, False])
async def test_a_suffix_that_has_no_tokens_is_named(serving: Serving, blocks: bool) -> None:
    class Refusing(Infilling):
        def encode_part(self, text: str) -> list[int]:
            raise InvalidRequest("text", "is not text")

    async with serving(tokenizer=Refusing(), device=device() if blocks else None) as served:
        reply = await served.post(PATH, {"prompt": [7], "suffix": "a"})
    assert (reply.status, reply.json()["error"]["param"]) == (400, "suffix")
