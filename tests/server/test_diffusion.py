"""A diffusion model behind the server: body fields, drafts and step maps through a real client."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from aioinfer.config import EngineConfig, ServerConfig
from aioinfer.engine import Engine
from aioinfer.errors import ConfigError
from aioinfer.loop import factory
from aioinfer.params import DiffusionParams, SamplingParams
from aioinfer.server.openai.protocol import Call, Served, parse_completion
from aioinfer.text.output import UNKNOWN
from tests.server.calls import Reply, http
from tests.server.conftest import Serving, run_server
from tests.tiers import SECONDS, rest
from tests.toys import ToyTokenizer
from tests.toys.blocks import ScriptedDevice, scripted_generate

CHAT: Any = [{"role": "user", "content": "Hello there"}]
ASK: dict[str, Any] = {"model": "toy", "temperature": 0, "max_tokens": 30}
EXTRA: dict[str, Any] = {"ignore_eos": True}


def device() -> ScriptedDevice:
    return ScriptedDevice(num_slots=512, num_pages=512, edits=2)


def expected(prompt: list[int]) -> list[int]:
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    return scripted_generate(device().script, prompt, params)


@pytest.mark.parametrize("parser", [None, "qwen3"])
@pytest.mark.parametrize("algorithm", ["low_confidence", "joint_threshold"])
async def test_a_strict_client_reads_drafts_between_the_deltas(
    serving: Serving, algorithm: str, parser: str | None
) -> None:
    body = {**EXTRA, "diffusion": {"algorithm": algorithm, "draft": True, "step_map": True}}
    formats = {"reasoning_parser": parser}
    async with serving(device=device(), **formats) as served, served.client() as client:
        whole = await client.chat.completions.create(**ASK, messages=CHAT, extra_body=body)
        stream = await client.chat.completions.create(
            **ASK, messages=CHAT, stream=True, stream_options={"include_usage": True}, extra_body=body
        )
        chunks = [chunk async for chunk in stream]
    choices = [choice for chunk in chunks for choice in chunk.choices]
    content = whole.choices[0].message.content
    assert "".join(choice.delta.content or "" for choice in choices) == content
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["length"]
    assert choices[-1].finish_reason
    steps = [step for choice in choices for step in (choice.model_extra or {}).get("step_map", [])]
    assert steps == (whole.choices[0].model_extra or {})["step_map"]
    assert len(steps) == chunks[-1].usage.completion_tokens == 30
    drafts = [choice for choice in choices if "draft" in (choice.model_extra or {})]
    only = [choice for choice in drafts if choice.delta.content is None]
    assert only
    if algorithm == "low_confidence":
        assert content == ToyTokenizer().decode(expected(ToyTokenizer().encode_chat(CHAT)))
        assert len(only) < len(drafts), "a token and the draft behind it come in one event"
    for choice in drafts:
        draft: Any = (choice.model_extra or {})["draft"]
        assert draft.keys() == {"start", "token_ids", "text"}
        assert draft["text"].count(UNKNOWN) == draft["token_ids"].count(None)
        assert 0 <= draft["start"] <= 30 - len(draft["token_ids"])


async def test_completions_have_drafts_on_request_only(serving: Serving) -> None:
    ask = {**ASK, "prompt": "abc", "extra_body": {**EXTRA, "diffusion": {"draft": True, "step_map": True}}}
    async with serving(device=device()) as served, served.client(strict=False) as client:
        whole = await client.completions.create(**ask)
        chunks = [chunk async for chunk in await client.completions.create(**ask, stream=True, n=2)]
        plain = {**ask, "extra_body": EXTRA}
        silent = [chunk async for chunk in await client.completions.create(**plain, stream=True)]
        said = await client.completions.create(**plain)
    text = ToyTokenizer().decode(expected(ToyTokenizer().encode("abc")))
    assert whole.choices[0].text == said.choices[0].text == text
    assert len((whole.choices[0].model_extra or {})["step_map"]) == 30
    for index in range(2):
        mine = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        assert "".join(choice.text for choice in mine) == text
        assert sum("draft" in (choice.model_extra or {}) for choice in mine) > 3
    assert "".join(chunk.choices[0].text for chunk in silent) == text
    for choice in [*said.choices, *(choice for chunk in silent for choice in chunk.choices)]:
        assert not {"draft", "step_map"} & (choice.model_extra or {}).keys()


async def test_the_config_names_the_algorithm_of_requests_that_name_none(serving: Serving) -> None:
    """Over HTTP and in process."""

    async def steps_of(asked: dict[str, Any], **configured: Any) -> Any:
        prompt = ToyTokenizer().encode("abc")
        async with serving(device=device(), **configured) as served:
            body = {**ASK, **EXTRA, "prompt": "abc", "diffusion": {**asked, "step_map": True}}
            said = (await served.post("/v1/completions", body)).json()["choices"][0]["step_map"]
            params = SamplingParams(
                temperature=0, max_tokens=30, ignore_eos=True, diffusion=DiffusionParams(**asked)
            )
            assert said == list((await served.engine.generate(prompt, params)).step_map or ())
        return said

    static = {"algorithm": "static_steps"}
    for asked, same in (({}, static), ({"draft": True}, static), ({"algorithm": "factor"}, None)):
        assert await steps_of(asked, diffusion_algorithm="static_steps") == await steps_of(same or asked)
    # At 1 each round writes one token.
    plain = await steps_of({})
    assert await steps_of({}, diffusion_threshold=1.0) == await steps_of({"threshold": 1.0}) != plain
    assert await steps_of({"threshold": 0.95}, diffusion_threshold=1.0) == plain
    two = {"diffusion_algorithm": "static_steps", "diffusion_steps": 2}
    assert await steps_of({}, **two) == await steps_of({**static, "steps": 2})
    assert await steps_of({"steps": 3}, **two) == await steps_of({**static, "steps": 3})
    editing: dict[str, Any] = {"algorithm": "joint_threshold", "threshold": 0.7, "edit_threshold": 1.0}
    configured = {f"diffusion_{name}": value for name, value in editing.items()}
    assert (
        await steps_of({}, **configured)
        == await steps_of(editing)
        != await steps_of({**editing, "edit_threshold": 0.5})
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"diffusion_algorithm": "best"}, "diffusion_algorithm must be one of entropy_bound, factor"),
        ({"diffusion_algorithm": "factor", "diffusion_threshold": 0.5}, "diffusion_threshold: is not"),
        ({"diffusion_threshold": 1.5}, "diffusion_threshold must be in"),
        ({"diffusion_edit_threshold": 0.5}, "diffusion_edit_threshold: is not a parameter of low_confidence"),
        ({"diffusion_steps": 1 << 30}, "diffusion_steps: must be in"),
    ],
)
async def test_a_default_algorithm_that_cannot_be_is_refused_at_the_start(
    serving: Serving, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        async with serving(device=device(), **settings):
            pass


async def test_other_models_have_no_default_algorithm(serving: Serving) -> None:
    with pytest.raises(ConfigError, match="diffusion_algorithm: the model is not a diffusion model"):
        async with serving(diffusion_algorithm="factor"):
            pass


BAD: list[tuple[Any, str]] = [
    (3, "object"),
    ([], "object"),
    ({"treshold": 0.9}, "treshold"),
    ({"threshold": "0.9"}, "threshold"),
    ({"threshold": 2}, "threshold"),
    ({"steps": 1.5}, "steps"),
    ({"draft": 1}, "draft"),
    ({"step_map": 0}, "step_map"),
    ({"step_map": "yes"}, "step_map"),
    ({"algorithm": ["factor"]}, "algorithm"),
    ({"algorithm": "best"}, "low_confidence"),
    ({"edit_threshold": 0.5}, "edit_threshold"),
]
REFUSED: list[tuple[str, Any, str]] = [
    ("thinking_budget", 3, "thinking_budget"),
    ("prompt_logprobs", 1, "prompt_logprobs"),
]


@rest(SECONDS)
async def test_unsupported_diffusion_fields_are_a_400(serving: Serving) -> None:
    chat = {**ASK, "messages": CHAT}
    async with serving(device=device()) as served:

        async def ask(**fields: Any) -> Reply:
            return await served.post("/v1/chat/completions", {**chat, **fields})

        for value, named in BAD:
            reply = await ask(diffusion=value)
            assert (reply.status, reply.error["param"].split(".")[0]) == (400, "diffusion")
            assert named in reply.error["message"]
        for field, value, param in REFUSED:
            reply = await ask(**{field: value})
            assert reply.refusal == (400, param)
            assert "diffusion model" in reply.error["message"]
        reply = await served.post("/v1/completions", {**ASK, "prompt": "abc", "echo": True, "logprobs": 0})
        assert reply.refusal == (400, "echo")
        assert served.engine.stats().admitted == 0
        for nothing in (None, {}, {"threshold": None, "step_map": None}):
            neutral = {"frequency_penalty": 0, "logit_bias": {}, "logprobs": True}
            answer = (await ask(**EXTRA, **neutral, diffusion=nothing)).json()
            assert answer["usage"]["completion_tokens"] == 30
            assert len(answer["choices"][0]["logprobs"]["content"]) == 30


async def test_fields_that_change_logits_reach_blocks(serving: Serving) -> None:
    """Each of them says something here."""
    fields: list[dict[str, Any]] = [
        {"frequency_penalty": 2.0, "logit_bias": {"5": 11, "6": 10, "7": 9}},
        {"repetition_penalty": 8.0},
        {"logit_bias": {"5": 100}},
        {"allowed_token_ids": [5, 6, 7]},
        {"min_tokens": 30, "logit_bias": {"0": 100}, "ignore_eos": False},
        {"bad_words": [[5]], "logit_bias": {"5": 100}},
        {"top_n_sigma": 0.5, "temperature": 2.0, "seed": 1},
    ]
    async with serving(device=device()) as served:
        texts = []
        for each in ({}, *fields):
            body = {**ASK, **EXTRA, "prompt": "abc", "logprobs": 0, **each}
            reply = await served.post("/v1/completions", body)
            assert reply.status == 200, reply.text
            texts.append(tuple(reply.json()["choices"][0]["logprobs"]["tokens"]))
            params = {name: value for name, value in body.items() if name not in ("prompt", "model")}
            if isinstance(params.get("logit_bias"), dict):
                params["logit_bias"] = {int(token): value for token, value in params["logit_bias"].items()}
            same = await served.engine.generate(ToyTokenizer().encode("abc"), SamplingParams(**params))
            assert reply.json()["choices"][0]["text"] == same.text
    assert len(set(texts)) == len(texts)
    assert set(texts[3]) == {ToyTokenizer().decode([5])}
    assert ToyTokenizer().decode([5]) not in texts[6]


@rest(SECONDS)
async def test_alternatives_are_those_of_the_round_that_wrote_the_token() -> None:
    """In chats and completions of the bundled model, whole and streamed; the same as in process."""
    ask: dict[str, Any] = {"model": "tiny-diffusion", "temperature": 0, "max_tokens": 24}
    chat = {**ask, "messages": [{"role": "user", "content": "What is 17 + 25?"}]}
    engine = Engine(EngineConfig(model="tiny-diffusion", threads=1))
    async with run_server(engine, ServerConfig(port=0)) as running, http(running.url) as calls:
        body = {**chat, "logprobs": True, "top_logprobs": 3}
        entries = (await calls.post("/v1/chat/completions", body)).json()["choices"][0]["logprobs"]
        alone = {**chat, "logprobs": True}
        plain = (await calls.post("/v1/chat/completions", alone)).json()["choices"][0]["logprobs"]
        said = await engine.generate(
            chat["messages"], SamplingParams(temperature=0, max_tokens=24, logprobs=3)
        )
        prompt = {**ask, "prompt": "copy: banana", "logprobs": 2}
        completed = (await calls.post("/v1/completions", prompt)).json()["choices"][0]["logprobs"]
        streamed = await calls.post("/v1/completions", {**prompt, "stream": True})
    assert said.logprobs is not None
    for entry, own, there in zip(entries["content"], plain["content"], said.logprobs, strict=True):
        assert entry["logprob"] == own["logprob"] == there.logprob, "alternatives change nothing"
        top = entry["top_logprobs"]
        assert [each["logprob"] for each in top] == [value for _, value in there.top]
        assert len(top) == 3
        # Greedy: the likeliest is the one that was written.
        assert (top[0]["token"], top[0]["logprob"]) == (entry["token"], entry["logprob"])
        assert sum(math.exp(each["logprob"]) for each in top) <= 1 + 1e-5
    assert all(len(top) in (1, 2) for top in completed["top_logprobs"])
    choices = [event["choices"][0] for event in streamed.events()]
    parts = [choice["logprobs"] for choice in choices if choice.get("logprobs")]
    assert [top for part in parts for top in part["top_logprobs"]] == completed["top_logprobs"]


async def test_an_autoregressive_model_refuses_diffusion_fields(serving: Serving) -> None:
    async with serving() as served:
        reply = await served.post("/v1/chat/completions", {**ASK, "messages": CHAT, "diffusion": {}})
    assert reply.refusal == (400, "diffusion")
    assert "not a diffusion model" in reply.error["message"]


def test_fields_of_a_body_override_the_models_defaults() -> None:
    def parsed(diffusion: dict[str, Any] | None, defaults: SamplingParams) -> Call:
        body = {"prompt": "a", "diffusion": diffusion}
        return parse_completion(json.dumps(body).encode(), Served("toy", defaults))

    own = parsed({"algorithm": "factor", "factor": 2}, SamplingParams()).params
    call = parsed({"steps": 3, "step_map": True}, own)
    assert (call.params.diffusion.algorithm, call.params.diffusion.factor) == ("factor", 2)
    assert (call.params.diffusion.steps, call.step_map) == (3, True)
    assert parsed(None, own).params.diffusion == own.diffusion


def test_recommendations_of_a_model_are_defaults_of_blocks_too(tmp_path: Path) -> None:
    stated = {"repetition_penalty": 1.2, "temperature": 0.5}
    (tmp_path / "generation_config.json").write_text(json.dumps(stated))
    config = EngineConfig(model=str(tmp_path))
    info = device().open()
    params = factory.default_params(config, info)
    assert (params.repetition_penalty, params.temperature) == (1.2, 0.5)
