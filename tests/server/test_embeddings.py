"""Embeddings and scores over HTTP: the real openai client, and the shapes of vLLM and Jina."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aioinfer.embeddings.embedding import Embedding, normalized
from aioinfer.outputs import Usage
from aioinfer.pooling import Pooling
from aioinfer.server.openai.embeddings import EmbeddingCall, embeddings_answer
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
    reply = await served.post(path, body)
    return reply.status, reply.json()


@pytest.fixture
def embedder(serving: Serving) -> Serving:
    """A server whose model is made for embeddings, so that it scores by them."""

    @asynccontextmanager
    async def run(**options: Any) -> AsyncIterator[Served]:
        async with serving(**options) as served:
            served.engine.sentences = type(served.engine.sentences)(stated=True, embeds=True)
            yield served

    return run


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


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("embeddings", {}, "input"),
    ("embeddings", {"input": ""}, "input"),
    ("embeddings", {"input": []}, "input"),
    ("embeddings", {"input": ["a", ""]}, "input[1]"),
    ("embeddings", {"input": [["a"]]}, "input[0]"),
    ("embeddings", {"input": [[1], [70]]}, "input[1]"),
    ("embeddings", {"input": [1, "a"]}, "input"),
    ("embeddings", {"input": ["a"] * 2049}, "input"),
    ("embeddings", {"input": "a", "encoding_format": "hex"}, "encoding_format"),
    ("embeddings", {"input": "a", "dimensions": 4}, "dimensions"),
    ("embeddings", {"input": "a", "dimensions": 0}, "dimensions"),
    ("embeddings", {"input": "a", "pooling": "tokens"}, "pooling"),
    ("embeddings", {"input": "a", "normalize": 1}, "normalize"),
    ("embeddings", {"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ("embeddings", {"input": "a", "prompt_name": "query"}, "prompt_name"),
    ("embeddings", {"input": "a", "prompt_name": {"a": 1}}, "prompt_name"),
    ("embeddings", {"input": "a", "stream": True}, "stream"),
    ("embeddings", {"input": ["a", "a" * 5000]}, "input[1]"),
    ("embeddings", {"input": "a", "model": "other"}, "model"),
    ("score", {"text_1": ["a", "b"], "text_2": ["a"]}, "text_1"),
    ("rerank", {"query": "a", "documents": []}, "documents"),
    ("rerank", {"query": "a", "documents": ["b", 3]}, "documents[1]"),
    ("rerank", {"query": "a", "documents": ["b", {"text": "c", "title": "d"}]}, "documents[1].title"),
    ("rerank", {"query": "", "documents": ["b"]}, "query"),
    ("rerank", {"query": "a", "documents": ["b"], "top_n": 0}, "top_n"),
    ("rerank", {"query": "a", "documents": ["b", "c" * 5000]}, "documents[1]"),
    ("rerank", {"query": "a", "documents": ["b"], "instruction": "x"}, "instruction"),
    ("rerank", {"documents": ["b"]}, "query"),
]


async def test_what_is_wrong_with_a_body_is_named(embedder: Serving) -> None:
    async with embedder() as served:
        for path, body, param in REFUSED:
            reply = await served.post(f"/v1/{path}", body)
            assert reply.refusal == (404 if param == "model" else 400, param), body
        assert served.engine.stats().running == served.engine.stats().waiting == 0


@rest(SECONDS)
async def test_inputs_are_cut_on_demand(serving: Serving) -> None:
    async with serving() as served:
        _, cut = await post(served, "/v1/embeddings", input=["hello", "he"], truncate_prompt_tokens=3)
        _, whole = await post(served, "/v1/embeddings", input=["hel", "he"])
    assert cut == whole


@rest(SECONDS)
async def test_many_inputs_that_are_as_long_as_the_context_are_one_call(serving: Serving) -> None:
    async with serving(max_running_requests=4) as served:
        text = "a" * (served.engine.info.max_model_len // 2)
        inputs = [f"{text}{index}" for index in range((11 << 17) // len(text))]
        status, answer = await post(served, "/v1/embeddings", input=inputs)
        assert (status, len(answer["data"])) == (200, len(inputs))
    async with serving(server={"max_body_mib": 1.0}) as served:
        assert (await post(served, "/v1/embeddings", input=inputs))[0] == 413


@pytest.mark.parametrize("path", ["/v1/score", "/score"])
async def test_scores_are_cosines_in_the_order_of_the_texts(embedder: Serving, path: str) -> None:
    async with embedder() as served:
        _, answer = await post(served, path, text_1="hello", text_2=["hello", "other"])
        _, pairs = await post(served, path, text_1=["a", "b"], text_2=["a", "c"])
    query, other = wanted("hello", Pooling()), wanted("other", Pooling())
    assert [each["score"] for each in answer["data"]] == pytest.approx([1.0, float(query @ other)], rel=1e-6)
    assert [each["index"] for each in answer["data"]] == [0, 1]
    assert answer["usage"]["prompt_tokens"] == 10  # each text once
    assert pairs["data"][0]["score"] == pytest.approx(1.0)


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank"])
async def test_reranking_gives_the_best_first(embedder: Serving, path: str) -> None:
    documents = ["one", "two", "three", {"text": "query"}]
    async with embedder() as served:
        _, answer = await post(served, path, query="query", documents=documents, top_n=3)
        _, bare = await post(served, path, query="query", documents=documents, return_documents=False)
    results = answer["results"]
    assert len(results) == 3
    assert (results[0]["index"], results[0]["document"]) == (3, {"text": "query"})
    scores = [each["relevance_score"] for each in bare["results"]]
    assert scores == sorted(scores, reverse=True)
    assert [each["relevance_score"] for each in results] == scores[:3]
    assert "document" not in bare["results"][0]


async def test_a_model_without_a_head_for_yes_and_no_is_refused_as_a_judge(serving: Serving) -> None:
    async with serving() as served:
        status, answer = await post(served, "/v1/rerank", query="a", documents=["b"], method="judge")
    assert status == 400
    assert "yes and no" in answer["error"]["message"]


async def test_a_completion_without_tokens_scores_its_prompt(serving: Serving) -> None:
    body = {"prompt": [3, 4, 5, 6], "max_tokens": 0, "echo": True, "logprobs": 0, "temperature": 0}
    async with serving() as served:

        async def scored(**more: Any) -> Any:
            return (await served.post("/v1/completions", {**body, **more})).json()

        answer = await scored()
        longer, late = await scored(max_tokens=1), await scored(logprob_start_len=2)
    (choice,) = answer["choices"]
    logprobs = choice["logprobs"]["token_logprobs"]
    assert (choice["finish_reason"], answer["usage"]["completion_tokens"]) == ("length", 0)
    assert choice["logprobs"]["tokens"] == ToyTokenizer()._pieces[3:7]
    assert longer["choices"][0]["logprobs"]["token_logprobs"][:4] == logprobs
    assert late["choices"][0]["logprobs"]["tokens"] == choice["logprobs"]["tokens"]
    assert late["choices"][0]["logprobs"]["token_logprobs"] == [None, None, *logprobs[2:]]


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


async def left(served: Served) -> int:
    return int((await served.get("/v1/models", **HEADERS)).headers["x-ratelimit-remaining-tokens"])


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
    embedder: Serving, tmp_path: Path, path: str, body: Any
) -> None:
    async with embedder(server=keyed(tmp_path), max_running_requests=1) as served:
        assert (await served.post(path, body, **HEADERS)).status == 400
        computed = served.engine.stats().prefill_tokens
        assert computed > 9000
        assert await left(served) <= 60_000 - computed


@pytest.mark.usefixtures("still")
async def test_a_call_that_finds_the_queue_full_is_refused_and_does_not_wait(
    embedder: Serving, gate: Gate
) -> None:
    async with embedder(fault=gate, max_running_requests=1, max_queued_requests=1) as served:
        held = served.engine.generate([1, 2])
        await asyncio.to_thread(gate.arrived.acquire)
        more = served.engine.generate([1, 2])
        await more.accepted()
        bodies: dict[str, Any] = {
            "/v1/embeddings": {"input": ["a", "b"]},
            "/v1/score": {"text_1": "a", "text_2": ["b", "c"]},
        }
        for path, body in bodies.items():
            assert (await served.post(path, body)).status == 429
        gate.release()
        held.close()
        more.close()


@pytest.mark.usefixtures("still")
async def test_a_client_that_leaves_withdraws_its_inputs_and_is_charged_for_them(
    serving: Serving, tmp_path: Path, gate: Gate
) -> None:
    async with serving(server=keyed(tmp_path), fault=gate, max_running_requests=4) as served:
        body = {"input": [[index + 1] * 4000 for index in range(16)]}
        asking = asyncio.create_task(served.post("/v1/embeddings", body, **HEADERS))
        await asyncio.to_thread(gate.arrived.acquire)
        asking.cancel()
        await asyncio.wait([asking])
        gate.release()
        while served.engine.stats().running + served.engine.stats().waiting:
            await asyncio.sleep(0)
        assert served.engine.stats().admitted < 16
        while await left(served) >= 50_000:  # it is charged after the last of them
            pass


@nightly(SIMULATION)
async def test_2048_inputs_in_one_call(serving: Serving) -> None:
    """More than the queue has places for."""
    inputs = [[index % 60 + 1, index // 60 + 1, 5] for index in range(2048)]
    async with serving(max_running_requests=64, max_queued_requests=3) as served:
        _, found = await post(served, "/v1/embeddings", input=inputs)
    assert [each["index"] for each in found["data"]] == [*range(2048)]
    for ids, each in zip(inputs, found["data"], strict=True):
        assert np.array_equal(np.asarray(each["embedding"], np.float32), wanted(ids, Pooling()))
