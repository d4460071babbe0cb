"""Embeddings and scores: bodies and answers of ``/v1/embeddings``, as OpenAI has them, and of ``/v1/score``
and ``/v1/rerank``, as vLLM and Jina have them."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NotRequired, TypedDict

from aioinfer.chat.fields import Harmless, Honoured, Table, Unsupported
from aioinfer.chat.schemas import FLAG, TEXT, Schema, array, choice, either, integer, text
from aioinfer.embedding import Embedding
from aioinfer.errors import InvalidRequest
from aioinfer.loop.options import MAX_LABEL, Prompt
from aioinfer.scoring import METHODS, Scores
from aioinfer.server.http.pace import Pace
from aioinfer.server.http.pieces import Pieces
from aioinfer.server.openai.extras import parse_extras
from aioinfer.server.openai.protocol import Served, flag_of, object_of
from aioinfer.server.openapi.endpoints import Body, Endpoint

__all__ = [
    "EMBEDDING",
    "EMBEDDING_ENDPOINT",
    "MOST_INPUTS",
    "RERANK",
    "RERANK_ENDPOINT",
    "SCORE",
    "SCORE_ENDPOINT",
    "EmbeddingCall",
    "ScoreCall",
    "embeddings_answer",
    "parse_embedding",
    "parse_rerank",
    "parse_score",
    "rerank_answer",
    "score_answer",
]

#: inputs of one call, as in OpenAI's API, and documents of one
MOST_INPUTS = 2048

_IDS = array(integer(0, 2**31 - 1), 1)
_INPUT = either(text(1), _IDS, array(either(text(1), _IDS), 1, MOST_INPUTS))
_LABEL = text(0, MAX_LABEL)
_SECONDS: Schema = {"type": "number", "exclusiveMinimum": 0}
_SCHEDULING: Table = {
    "model": Honoured("name of the served model (the default), or of an adapter", schema=TEXT),
    "priority": Honoured("see scheduling", schema=integer(-(2**31), 2**31 - 1)),
    "cache_salt": Honoured("see scheduling", schema=_LABEL),
    "routing_key": Honoured("see scheduling", schema=_LABEL),
    "waiting_timeout": Honoured("seconds until the first step; at most the server's own", schema=_SECONDS),
    "running_timeout": Honoured("seconds from the first step on; at most the server's own", schema=_SECONDS),
    "user": Harmless("the client's bookkeeping"),
}
#: of ``/v1/embeddings``
EMBEDDING: Table = {
    **_SCHEDULING,
    "input": Honoured(
        f"text, token ids, or a list of up to {MOST_INPUTS} of either", schema=_INPUT, required=True
    ),
    "encoding_format": Honoured(
        "`float`: a list of numbers; `base64`: their bytes, float32, little-endian",
        schema=choice("float", "base64"),
    ),
    "dimensions": Honoured("only so many numbers, before they are normalised", schema=integer(1)),
    "pooling": Honoured(
        "`last`, `mean`, or `cls` of an encoder; by default as the model's files say",
        schema=choice("last", "cls", "mean"),
    ),
    "normalize": Honoured("every embedding has length 1; by default as the model's files say", schema=FLAG),
    "prompt_name": Honoured("which of the model's prompts is put in front of texts", schema=TEXT),
    "truncate_prompt_tokens": Honoured(
        "only so many tokens of an input's beginning are kept, at most as many as the model was made for",
        schema=integer(1),
    ),
    "messages": Unsupported((), "use input"),
}
_JUDGING: Table = {
    **_SCHEDULING,
    "method": Honoured(
        "`classifier`, `judge` or `cosine`; by default what the model is made for", schema=choice(*METHODS)
    ),
    "instruction": Honoured("what makes a document fit, for a model that is told", schema=text(1)),
    "truncate_prompt_tokens": Unsupported((), "send shorter texts"),
    "truncation_side": Unsupported(()),
    "max_tokens_per_doc": Unsupported((), "send shorter texts"),
}
_TEXTS = either(text(1), array(text(1), 1, MOST_INPUTS))
_DOCUMENT: Schema = {
    "type": "object",
    "properties": {"text": text(1)},
    "required": ["text"],
    "additionalProperties": False,
}
#: of ``/v1/score``
SCORE: Table = {
    **_JUDGING,
    "text_1": Honoured("a text, or one for each of `text_2`", schema=_TEXTS, required=True),
    "text_2": Honoured("a text, or a list", schema=_TEXTS, required=True),
}
#: of ``/v1/rerank``
RERANK: Table = {
    **_JUDGING,
    "query": Honoured("a text", schema=text(1), required=True),
    "documents": Honoured(
        f"texts, or objects with a `text`; up to {MOST_INPUTS}",
        schema=array(either(text(1), _DOCUMENT), 1, MOST_INPUTS),
        required=True,
    ),
    "top_n": Honoured("only so many results, the best ones", schema=integer(1)),
    "return_documents": Honoured("false: results are without their documents", schema=FLAG),
}


#: fields with the names of the engine's arguments
_ASKED = ("dimensions", "pooling", "normalize", "prompt_name", "truncate_prompt_tokens")


class EmbeddingUsage(TypedDict):
    prompt_tokens: int
    total_tokens: int


class EmbeddingObject(TypedDict):
    object: Literal["embedding"]
    index: int
    #: numbers, or with `encoding_format` base64 their bytes
    embedding: list[float] | str


class EmbeddingAnswer(TypedDict):
    """Embeddings in the order of the inputs."""

    object: Literal["list"]
    data: list[EmbeddingObject]
    model: str
    usage: EmbeddingUsage


class ScoreObject(TypedDict):
    object: Literal["score"]
    index: int
    score: float


class ScoreAnswer(TypedDict):
    """Scores in the order of the pairs."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[ScoreObject]
    usage: EmbeddingUsage


class RankedDocument(TypedDict):
    text: str


class Ranked(TypedDict):
    """A document by its index in the request."""

    index: int
    relevance_score: float
    document: NotRequired[RankedDocument]


class RerankAnswer(TypedDict):
    """The documents, best first."""

    id: str
    model: str
    results: list[Ranked]
    usage: EmbeddingUsage


EMBEDDING_ENDPOINT = Endpoint(
    "POST",
    "/embeddings",
    "Embeddings of texts",
    body=Body("EmbeddingRequest", EMBEDDING, examples=({"input": ["Once upon a time", "The end"]},)),
    answer=EmbeddingAnswer,
    generates=True,
)
SCORE_ENDPOINT = Endpoint(
    "POST",
    "/score",
    "How well texts answer another",
    body=Body("ScoreRequest", SCORE, examples=({"text_1": "fruit", "text_2": ["apple", "car"]},)),
    answer=ScoreAnswer,
    generates=True,
    tag="scores",
)
RERANK_ENDPOINT = Endpoint(
    "POST",
    "/rerank",
    "Documents by how well they answer a query",
    body=Body("RerankRequest", RERANK, examples=({"query": "fruit", "documents": ["apple", "car"]},)),
    answer=RerankAnswer,
    generates=True,
    tag="scores",
)


@dataclass(frozen=True, slots=True)
class EmbeddingCall:
    """A body of ``/v1/embeddings``, checked."""

    model: str
    inputs: list[Prompt]
    base64: bool
    #: arguments of :meth:`aioinfer.Engine.embed`
    options: Mapping[str, Any]
    #: argument of the engine -> field of the body
    names: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class ScoreCall:
    """A body of ``/v1/score`` or ``/v1/rerank``, checked."""

    model: str
    query: str | list[str]
    documents: list[str]
    options: Mapping[str, Any]
    names: Mapping[str, str]
    #: of a reranking: how many results, and whether with their documents
    top_n: int | None = None
    with_documents: bool = True


def parse_embedding(raw: bytes, served: Served) -> EmbeddingCall:
    """Raises InvalidRequest, and Refused for another model."""
    body = object_of(raw, served, EMBEDDING)
    given = body.get("input")
    names = {"inputs": "input", "adapter": "model"}
    inputs: list[Prompt]
    if isinstance(given, str) or (isinstance(given, list) and given and _is_id(given[0])):
        inputs, names["inputs[0]"] = [given], "input"
    elif isinstance(given, list) and 1 <= len(given) <= MOST_INPUTS:
        inputs = given
    else:
        raise InvalidRequest("input", f"must be text, token ids, or a list of 1 to {MOST_INPUTS} of either")
    for index, each in enumerate(inputs):
        if not (isinstance(each, str) or (isinstance(each, list) and each and all(map(_is_id, each)))):
            name = names.get(f"inputs[{index}]", f"input[{index}]")
            raise InvalidRequest(name, "must be text or token ids")
    form = body.get("encoding_format")
    if form not in (None, "float", "base64"):
        raise InvalidRequest("encoding_format", "must be float or base64")
    asked = {name: body[name] for name in _ASKED if _has(body, name)}
    if asked.get("pooling") not in (None, "last", "cls", "mean"):
        raise InvalidRequest("pooling", "must be last, cls or mean")
    model = served.name(body.get("model"))
    return EmbeddingCall(model, inputs, form == "base64", {**asked, **_scheduling(body, served)}, names)


def parse_score(raw: bytes, served: Served) -> ScoreCall:
    """Raises InvalidRequest, and Refused for another model."""
    body = object_of(raw, served, SCORE)
    first, second = _texts(body, "text_1"), _texts(body, "text_2")
    query: str | list[str] = first
    if len(first) == 1:
        query = first[0]
    elif len(first) != len(second):
        raise InvalidRequest("text_1", f"{len(first)} texts for {len(second)} of text_2")
    model, names = (
        served.name(body.get("model")),
        {"query": "text_1", "documents": "text_2", "adapter": "model"},
    )
    return ScoreCall(model, query, second, _judging(body, served), names)


def parse_rerank(raw: bytes, served: Served) -> ScoreCall:
    """Raises InvalidRequest, and Refused for another model."""
    body = object_of(raw, served, RERANK)
    query, given = body.get("query"), body.get("documents")
    if not isinstance(query, str):
        raise InvalidRequest("query", "must be text")
    if not isinstance(given, list) or not 1 <= len(given) <= MOST_INPUTS:
        raise InvalidRequest("documents", f"must be a list of 1 to {MOST_INPUTS} texts")
    top_n = body.get("top_n")
    if top_n is not None and (type(top_n) is not int or top_n < 1):
        raise InvalidRequest("top_n", "must be a positive number")
    return ScoreCall(
        served.name(body.get("model")),
        query,
        [_document(each, index) for index, each in enumerate(given)],
        _judging(body, served),
        {"adapter": "model"},
        top_n,
        body.get("return_documents") is None or flag_of(body, "return_documents"),
    )


def _document(given: Any, index: int) -> str:
    if isinstance(given, dict) and given.keys() == {"text"}:
        given = given["text"]
    if not isinstance(given, str):
        raise InvalidRequest(f"documents[{index}]", "must be text, or an object with a text")
    return given


def _texts(body: Mapping[str, Any], name: str) -> list[str]:
    given = body.get(name)
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, list) or not 1 <= len(texts) <= MOST_INPUTS:
        raise InvalidRequest(name, f"must be text, or a list of 1 to {MOST_INPUTS} texts")
    for index, each in enumerate(texts):
        if not isinstance(each, str):
            raise InvalidRequest(f"{name}[{index}]", "must be text")
    return texts


def _judging(body: Mapping[str, Any], served: Served) -> dict[str, Any]:
    asked = {name: body[name] for name in ("method", "instruction") if _has(body, name)}
    return {**asked, **_scheduling(body, served)}


def _scheduling(body: Mapping[str, Any], served: Served) -> dict[str, Any]:
    """Arguments of the engine for the queue and the prefix cache."""
    _, options = parse_extras(body, served.most)
    adapter = served.adapter(body.get("model"))
    return {
        **({} if adapter is None else {"adapter": adapter}),
        **{name: body[name] for name in ("priority", "cache_salt", "routing_key") if _has(body, name)},
        **options,
    }


def _has(body: Mapping[str, Any], name: str) -> bool:
    return body.get(name) is not None


def _is_id(value: Any) -> bool:
    return type(value) is int


# -- answers ----------------------------------------------------------------------------------------------


async def embeddings_answer(call: EmbeddingCall, found: Sequence[Embedding]) -> list[bytes]:
    """The JSON of the EmbeddingAnswer to a call, in pieces: other callbacks run between two embeddings."""
    pieces, pace = Pieces(), Pace()
    pieces.add('{"object": "list", "data": [')
    for index, each in enumerate(found):
        if index:
            pieces.add(", ")
        await pieces.add_json(_object(index, each, as_bytes=call.base64), pace)
    rest = {"model": call.model, "usage": _usage(each.usage for each in found)}
    pieces.add("], ")
    pieces.add(json.dumps(rest)[1:])
    return pieces.end()


def _object(index: int, embedding: Embedding, *, as_bytes: bool) -> dict[str, Any]:
    found: EmbeddingObject = {
        "object": "embedding",
        "index": index,
        "embedding": _encoded(embedding, as_bytes=as_bytes),
    }
    return dict(found)


def _encoded(embedding: Embedding, *, as_bytes: bool) -> list[float] | str:
    if as_bytes:
        return base64.b64encode(embedding.vector.astype("<f4", copy=False).tobytes()).decode()
    numbers: list[float] = embedding.vector.tolist()
    return numbers


def score_answer(call: ScoreCall, found: Scores, name: str) -> ScoreAnswer:
    """The answer to a call of ``/v1/score``, with this id."""
    return {
        "id": name,
        "object": "list",
        "created": int(time.time()),
        "model": call.model,
        "data": [
            {"object": "score", "index": index, "score": score} for index, score in enumerate(found.scores)
        ],
        "usage": _usage([found.usage]),
    }


def rerank_answer(call: ScoreCall, found: Scores, name: str) -> RerankAnswer:
    """The answer to a call of ``/v1/rerank``, with this id: equal scores in the order of the request."""
    order = sorted(range(len(found.scores)), key=lambda index: -found.scores[index])
    results: list[Ranked] = []
    for index in order[: call.top_n]:
        ranked: Ranked = {"index": index, "relevance_score": found.scores[index]}
        if call.with_documents:
            ranked["document"] = {"text": call.documents[index]}
        results.append(ranked)
    return {
        "id": name,
        "model": call.model,
        "results": results,
        "usage": _usage([found.usage]),
    }


def _usage(usages: Any) -> EmbeddingUsage:
    tokens = sum(each.prompt_tokens for each in usages)
    return {"prompt_tokens": tokens, "total_tokens": tokens}
