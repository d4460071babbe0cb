"""Embeddings and scores over HTTP: the real openai client, and the shapes of vLLM and Jina."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
from io import BytesIO
from pathlib import Path
from typing import Any

import aiohttp
import jsonschema
import numpy as np
import openai
import pytest

from aioinfer.embeddings.embedding import Embedding, normalized
from aioinfer.outputs import Usage
from aioinfer.pooling import Pooling
from aioinfer.server.openai.embeddings import EmbeddingCall, RerankBody, embeddings_answer
from aioinfer.server.openapi.document import body_schema
from tests.engine.conftest import Gate
from tests.server.conftest import Served, Serving
from tests.tiers import SECONDS, SIMULATION, nightly, rest
from tests.toys import ToyTokenizer
from tests.toys.pooling import toy_pooled

MEAN = Pooling("mean")


def wanted(text: str | list[int], pooling: Pooling = MEAN) -> np.ndarray[Any, Any]:
    ids = ToyTokenizer().encode(text) if isinstance(text, str) else text
    return normalized(toy_pooled(ids, pooling))


# Where the client asks for base64 by itself, and where OpenAI's own logprobs begin with null, its types have
# no place for what it gets: ``strict=False``.


async def post(served: Served, path: str, **body: Any) -> tuple[int, Any]:
    async with aiohttp.ClientSession(served.url) as session, session.post(path, json=body) as response:
        return response.status, await response.json()


async def test_the_openai_client_gets_the_embeddings_of_texts_and_ids_in_order(serving: Serving) -> None:
    inputs: Any = ["hello", "a", "hello there"]
    async with serving() as served, served.client(strict=False) as client:
        texts = await client.embeddings.create(model="toy", input=inputs, extra_body={"pooling": "mean"})
        (one,) = (await client.embeddings.create(model="toy", input="hello")).data
        ids = await client.embeddings.create(model="toy", input=[[1, 2, 3], [4]])
        (alone,) = (await client.embeddings.create(model="toy", input=[1, 2, 3])).data
    assert [each.index for each in texts.data] == [0, 1, 2]
    for text, each in zip(inputs, texts.data, strict=True):
        assert np.array_equal(np.asarray(each.embedding, np.float32), wanted(text))
    assert texts.usage.prompt_tokens == texts.usage.total_tokens == sum(map(len, inputs))
    assert np.array_equal(np.asarray(one.embedding, np.float32), wanted("hello", Pooling()))
    assert alone.embedding == ids.data[0].embedding
    assert np.array_equal(np.asarray(ids.data[1].embedding, np.float32), wanted([4], Pooling()))


async def test_base64_has_the_bits_of_the_numbers_and_dimensions_are_cut_first(serving: Serving) -> None:
    async with serving() as served:
        asked = {"input": "hello", "dimensions": 2}
        _, floats = await post(served, "/v1/embeddings", **asked, encoding_format="float")
        _, coded = await post(served, "/v1/embeddings", **asked, encoding_format="base64")
        _, raw = await post(served, "/v1/embeddings", input="hello", normalize=False)
    numbers = np.asarray(floats["data"][0]["embedding"], np.float32)
    assert np.array_equal(np.frombuffer(base64.b64decode(coded["data"][0]["embedding"]), "<f4"), numbers)
    ids = ToyTokenizer().encode("hello")
    assert np.array_equal(numbers, normalized(toy_pooled(ids, Pooling())[:2]))
    assert np.array_equal(raw["data"][0]["embedding"], toy_pooled(ids, Pooling()))


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": [["a"]]}, "input[0]"),
        ({"input": [[1], [70]]}, "input[1]"),
        ({"input": [1, "a"]}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "a", "dimensions": 4}, "dimensions"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "pooling": "tokens"}, "pooling"),
        ({"input": "a", "normalize": 1}, "normalize"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"input": "a", "prompt_name": "query"}, "prompt_name"),
        ({"input": "a", "prompt_name": []}, "prompt_name"),
        ({"input": "a", "prompt_name": {"a": 1}}, "prompt_name"),
        ({"input": "a", "stream": True}, "stream"),
        ({"input": "a" * 5000}, "input"),
        ({"input": ["a", "a" * 5000]}, "input[1]"),
    ],
)
async def test_what_is_wrong_with_a_body_is_named(serving: Serving, body: Any, param: str) -> None:
    async with serving() as served:
        status, answer = await post(served, "/v1/embeddings", **body)
        assert (status, answer["error"]["param"]) == (400, param), answer
        assert served.engine.stats().running == served.engine.stats().waiting == 0


@rest(SECONDS)
async def test_inputs_are_cut_on_demand(serving: Serving) -> None:
    async with serving() as served:
        _, cut = await post(served, "/v1/embeddings", input=["hello", "he"], truncate_prompt_tokens=3)
        _, whole = await post(served, "/v1/embeddings", input=["hel", "he"])
    assert cut == whole


async def test_another_model_is_not_found(serving: Serving) -> None:
    async with serving() as served, served.client(strict=False) as client:
        with pytest.raises(openai.NotFoundError):
            await client.embeddings.create(model="other", input="a")


@rest(SECONDS)
async def test_a_batch_needs_no_more_of_the_queue_than_there_is(serving: Serving) -> None:
    async with (
        serving(max_running_requests=4, max_queued_requests=3) as served,
        served.client(strict=False) as client,
    ):
        inputs = [[index % 60 + 1, 3] for index in range(200)]
        found = await client.embeddings.create(model="toy", input=inputs)
        assert served.engine.stats().admitted == 200
    for ids, each in zip(inputs, found.data, strict=True):
        assert np.array_equal(np.asarray(each.embedding, np.float32), wanted(ids, Pooling()))


@rest(SECONDS)
async def test_many_inputs_that_are_as_long_as_the_context_are_one_call(serving: Serving) -> None:
    def body() -> BytesIO:
        return BytesIO(json.dumps({"input": inputs}).encode())

    headers = {"Content-Type": "application/json"}
    async with serving(max_running_requests=4) as served, aiohttp.ClientSession(served.url) as session:
        text = "a" * (served.engine.info.max_model_len // 2)
        inputs = [f"{text}{index}" for index in range((11 << 17) // len(text))]
        async with session.post("/v1/embeddings", data=body(), headers=headers) as response:
            answer = await response.json()
            assert response.status == 200, answer
        assert len(answer["data"]) == len(inputs)
    async with (
        serving(server={"max_body_mib": 1.0}) as served,
        aiohttp.ClientSession(served.url) as session,
        session.post("/v1/embeddings", data=body(), headers=headers) as response,
    ):
        assert response.status == 413


async def test_a_client_that_leaves_withdraws_its_inputs(serving: Serving) -> None:
    gate = Gate()
    async with serving(fault=gate, max_running_requests=4) as served:
        async with aiohttp.ClientSession(served.url) as session:
            body = {"input": [[index % 60 + 1] for index in range(64)]}
            asking = asyncio.create_task(session.post("/v1/embeddings", json=body))
            await asyncio.to_thread(gate.arrived.acquire)
            asking.cancel()
            await asyncio.wait([asking])
        gate.release()
        while served.engine.stats().running + served.engine.stats().waiting:
            await asyncio.sleep(0)
        assert served.engine.stats().admitted < 64
        status, _ = await post(served, "/v1/embeddings", input="a")
    assert status == 200


@pytest.mark.parametrize("path", ["/v1/score", "/score"])
async def test_scores_are_cosines_in_the_order_of_the_texts(serving: Serving, path: str) -> None:
    async with serving() as served:
        served.engine.sentences = type(served.engine.sentences)(stated=True, embeds=True)
        _, answer = await post(served, path, text_1="hello", text_2=["hello", "other"])
        _, pairs = await post(served, path, text_1=["a", "b"], text_2=["a", "c"])
        status, refused = await post(served, path, text_1=["a", "b"], text_2=["a"])
    query, other = wanted("hello", Pooling()), wanted("other", Pooling())
    assert [each["score"] for each in answer["data"]] == pytest.approx([1.0, float(query @ other)], rel=1e-6)
    assert [each["index"] for each in answer["data"]] == [0, 1]
    assert answer["usage"]["prompt_tokens"] == 10  # each text once
    assert pairs["data"][0]["score"] == pytest.approx(1.0)
    assert (status, refused["error"]["param"]) == (400, "text_1")


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank"])
async def test_reranking_gives_the_best_first(serving: Serving, path: str) -> None:
    documents = ["one", "two", "three", {"text": "query"}]
    async with serving() as served:
        served.engine.sentences = type(served.engine.sentences)(stated=True, embeds=True)
        _, answer = await post(served, path, query="query", documents=documents, top_n=3)
        _, bare = await post(served, path, query="query", documents=documents, return_documents=False)
    results = answer["results"]
    assert len(results) == 3
    assert results[0]["index"] == 3
    assert results[0]["document"] == {"text": "query"}
    scores = [each["relevance_score"] for each in bare["results"]]
    assert scores == sorted(scores, reverse=True)
    assert [each["relevance_score"] for each in results] == scores[:3]
    assert "document" not in bare["results"][0]


async def test_a_model_without_a_head_for_yes_and_no_is_refused_as_a_judge(serving: Serving) -> None:
    async with serving() as served:
        status, answer = await post(served, "/v1/rerank", query="a", documents=["b"])
    assert status == 400
    assert "yes and no" in answer["error"]["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"query": "a", "documents": []}, "documents"),
        ({"query": "a", "documents": ["b", 3]}, "documents[1]"),
        ({"query": "a", "documents": ["b", {"text": "c", "title": "d"}]}, "documents[1].title"),
        ({"query": "", "documents": ["b"]}, "query"),
        ({"query": "a", "documents": ["b"], "top_n": 0}, "top_n"),
        ({"query": "a", "documents": ["b", "c" * 5000]}, "documents[1]"),
        ({"query": "a", "documents": ["b"], "instruction": "x"}, "instruction"),
        ({"documents": ["b"]}, "query"),
    ],
)
async def test_what_is_wrong_with_a_reranking_is_named(serving: Serving, body: Any, param: str) -> None:
    async with serving() as served:
        served.engine.sentences = type(served.engine.sentences)(stated=True, embeds=True)
        status, answer = await post(served, "/v1/rerank", **body)
    assert (status, answer["error"]["param"]) == (400, param), answer


async def test_a_completion_without_tokens_scores_its_prompt(serving: Serving) -> None:
    async with serving() as served, served.client(strict=False) as client:
        scored = await client.completions.create(
            model="toy", prompt=[3, 4, 5, 6], max_tokens=0, echo=True, logprobs=0
        )
        longer = await client.completions.create(
            model="toy", prompt=[3, 4, 5, 6], max_tokens=1, echo=True, logprobs=0, temperature=0
        )
        late = await client.completions.create(
            model="toy",
            prompt=[3, 4, 5, 6],
            max_tokens=0,
            echo=True,
            logprobs=0,
            extra_body={"logprob_start_len": 2},
        )
    (choice,), (other,) = scored.choices, longer.choices
    assert choice.finish_reason == "length"
    assert scored.usage is not None
    assert scored.usage.completion_tokens == 0
    assert choice.logprobs is not None
    assert other.logprobs is not None
    assert other.logprobs.token_logprobs is not None
    assert choice.logprobs.token_logprobs == other.logprobs.token_logprobs[:4]
    assert choice.logprobs.tokens == ToyTokenizer()._pieces[3:7]
    assert late.choices[0].logprobs is not None
    assert late.choices[0].logprobs.tokens == choice.logprobs.tokens
    assert late.choices[0].logprobs.token_logprobs == [None, None, *choice.logprobs.token_logprobs[2:]]


@pytest.mark.parametrize("form", ["float", "base64"])
async def test_an_answer_is_written_with_turns_of_the_loop_between_embeddings(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aioinfer.server.http.pace._SLICE", 0.0)
    rng = np.random.default_rng(1)
    found = [Embedding(rng.standard_normal(8).astype(np.float32), Usage(5, 0, 0)) for _ in range(20)]
    call = EmbeddingCall('a "model"', [], form == "base64", {}, {})
    turns, loop = 0, asyncio.get_running_loop()

    def turn() -> None:
        nonlocal turns
        turns += 1
        loop.call_soon(turn)

    loop.call_soon(turn)
    pieces = await embeddings_answer(call, found)
    assert turns >= len(found)
    answer = json.loads(b"".join(pieces))
    assert b"".join(pieces) == json.dumps(answer).encode()
    assert (answer["model"], answer["usage"]["prompt_tokens"]) == ('a "model"', 100)
    for index, each in enumerate(answer["data"]):
        given: Any = each["embedding"]
        if form == "base64":
            given = np.frombuffer(base64.b64decode(given), "<f4")
        assert each["index"] == index
        assert np.array_equal(np.asarray(given, np.float32), found[index].vector)


def keyed(directory: Path) -> dict[str, Any]:
    """A server with one key, of 60,000 tokens a minute."""
    entry = {"name": "a", "sha256": hashlib.sha256(b"k").hexdigest(), "tokens_per_minute": 60_000}
    file = directory / "keys.yaml"
    file.write_text(json.dumps([entry]))
    return {"api_keys": str(file)}


HEADERS = {"Authorization": "Bearer k"}


async def left(session: aiohttp.ClientSession) -> int:
    async with session.get("/v1/models") as response:
        return int(response.headers["x-ratelimit-remaining-tokens"])


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": [*([index + 1] * 3000 for index in range(8)), "a" * 5000]}),
        ("/v1/score", {"text_1": "a", "text_2": [*(each * 3000 for each in "bcdefghi"), "a" * 5000]}),
        ("/v1/rerank", {"query": "a", "documents": [*(each * 3000 for each in "bcdefghi"), "a" * 5000]}),
    ],
)
@pytest.mark.usefixtures("still")
async def test_what_a_call_that_fails_has_computed_is_charged(
    serving: Serving, tmp_path: Path, path: str, body: Any
) -> None:
    async with (
        serving(server=keyed(tmp_path), max_running_requests=1) as served,
        aiohttp.ClientSession(served.url, headers=HEADERS) as session,
    ):
        served.engine.sentences = type(served.engine.sentences)(stated=True, embeds=True)
        async with session.post(path, json=body) as response:
            assert response.status == 400
        computed = served.engine.stats().prefill_tokens
        assert computed > 9000
        assert await left(session) <= 60_000 - computed


@pytest.mark.usefixtures("still")
async def test_a_client_that_leaves_is_charged_for_its_inputs(serving: Serving, tmp_path: Path) -> None:
    gate = Gate()
    async with (
        serving(server=keyed(tmp_path), fault=gate, max_running_requests=4) as served,
        aiohttp.ClientSession(served.url, headers=HEADERS) as session,
    ):
        async with aiohttp.ClientSession(served.url, headers=HEADERS) as leaving:
            body = {"input": [[index + 1] * 4000 for index in range(16)]}
            asking = asyncio.create_task(leaving.post("/v1/embeddings", json=body))
            await asyncio.to_thread(gate.arrived.acquire)
            asking.cancel()
            await asyncio.wait([asking])
        gate.release()
        while served.engine.stats().running + served.engine.stats().waiting:
            await asyncio.sleep(0)
        while await left(session) >= 50_000:  # it is charged behind the last of them
            pass


def test_documents_of_a_reranking_have_a_text_and_nothing_else_in_the_schema() -> None:
    components: dict[str, Any] = {}
    schema = {**body_schema(RerankBody, components), "components": {"schemas": components}}
    check = jsonschema.Draft202012Validator(schema).is_valid
    assert check({"query": "a", "documents": ["a", {"text": "a"}]})
    assert not check({"query": "a", "documents": [{"text": "a", "title": "b"}]})
    assert not check({"query": "a", "documents": [{"title": "b"}]})


@nightly(SIMULATION)
async def test_2048_inputs_in_one_call(serving: Serving) -> None:
    inputs = [[index % 60 + 1, index // 60 + 1, 5] for index in range(2048)]
    async with serving(max_running_requests=64) as served, served.client(strict=False) as client:
        found = await client.embeddings.create(model="toy", input=inputs)
    assert [each.index for each in found.data] == [*range(2048)]
    for ids, each in zip(inputs, found.data, strict=True):
        assert np.array_equal(np.asarray(each.embedding, np.float32), wanted(ids, Pooling()))
