"""Embeddings and scores: bodies and answers of ``/v1/embeddings``, as OpenAI has them, and of ``/v1/score``
and ``/v1/rerank``, as vLLM and Jina have them."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NotRequired

from pydantic import BeforeValidator, Field
from typing_extensions import TypedDict

from aioinfer.chat.bodies import CLIENTS, NO, Items, Object, Refused, TextOr, admit, field
from aioinfer.embeddings.embedding import Embedding
from aioinfer.embeddings.scoring import ScoreMethod, Scores
from aioinfer.errors import InvalidRequest
from aioinfer.loop.options import Prompt
from aioinfer.server.http.pace import Pace
from aioinfer.server.http.pieces import Pieces
from aioinfer.server.openai.fields import Kept, Label, Model, Priority, Seconds, as_list, prompts
from aioinfer.server.openai.protocol import Served, options_of, read
from aioinfer.server.openapi.endpoints import Endpoint

__all__ = [
    "EMBEDDING_ENDPOINT",
    "MOST_INPUTS",
    "RERANK_ENDPOINT",
    "SCORE_ENDPOINT",
    "EmbeddingBody",
    "EmbeddingCall",
    "RerankBody",
    "ScoreBody",
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

_Text = Annotated[str, Field(min_length=1)]


class _Scheduled(Object, harmless={"user": CLIENTS}):
    """The fields that all three have."""

    model: Model = field("name of the served model (the default), or of an adapter")
    priority: Priority | None = field("see scheduling")
    cache_salt: Label | None = field("see scheduling")
    routing_key: Label | None = field("see scheduling")
    waiting_timeout: Seconds | None = field("seconds until the first step; at most the server's own")
    running_timeout: Seconds | None = field("seconds from the first step on; at most the server's own")
    deadline: Seconds | None = field("seconds in which it should end; see scheduling")
    ttft_target: Seconds | None = field("seconds in which its first token should come; see scheduling")


class EmbeddingBody(_Scheduled, refused={"messages": Refused((), "use input")}):
    """A body of ``/v1/embeddings``."""

    input: Annotated[Any, prompts(MOST_INPUTS)] = field(
        f"text, token ids, or a list of up to {MOST_INPUTS} of either", ...
    )
    encoding_format: Literal["float", "base64"] = field(
        "`float`: a list of numbers; `base64`: their bytes, float32, little-endian", "float"
    )
    dimensions: Annotated[int, Field(ge=1)] | None = field(
        "number of dimensions that are kept, before they are normalised"
    )
    pooling: Literal["last", "cls", "mean"] | None = field(
        "`last`, `mean`, or `cls` of an encoder; by default as the model's files say"
    )
    normalize: bool | None = field("every embedding has length 1; by default as the model's files say")
    prompt_name: str | None = field("which of the model's prompts is put in front of texts")
    truncate_prompt_tokens: Kept | None = field(
        "number of tokens that are kept, of an input's beginning; at most as many as the model was made for, "
        "and -1 for as many"
    )


class _Judged(
    _Scheduled,
    refused={
        "truncate_prompt_tokens": Refused((), "send shorter texts"),
        "truncation_side": NO,
        "max_tokens_per_doc": Refused((), "send shorter texts"),
    },
):
    """The fields that both kinds of scores have."""

    method: ScoreMethod | None = field(
        "`classifier`, `judge` or `cosine`; by default what the model is made for"
    )
    instruction: _Text | None = field("what makes a document fit, for a model that is told")


_Several = Annotated[Items[_Text], Field(min_length=1, max_length=MOST_INPUTS)]


class ScoreBody(_Judged):
    """A body of ``/v1/score``."""

    text_1: TextOr[_Several] = field("a text, or one for each of `text_2`", ...)
    text_2: TextOr[_Several] = field("a text, or a list", ...)


class RankedText(Object):
    """A document."""

    text: _Text = field("the text", ...)


def _document(given: Any) -> Any:
    return admit(RankedText, given).text if isinstance(given, dict) else given


_Document = Annotated[_Text, BeforeValidator(_document, json_schema_input_type=str | RankedText)]


class RerankBody(_Judged):
    """A body of ``/v1/rerank``."""

    query: _Text = field("a text", ...)
    documents: Annotated[Items[_Document], Field(min_length=1, max_length=MOST_INPUTS)] = field(
        f"texts, or objects with a `text`; up to {MOST_INPUTS}", ...
    )
    top_n: Annotated[int, Field(ge=1)] | None = field("number of results, the best ones")
    return_documents: bool = field("false: results are without their documents", True)


#: fields with the names of the engine's arguments
_JUDGING = ("method", "instruction")
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
    body=EmbeddingBody,
    example={"input": ["Once upon a time", "The end"]},
    answer=EmbeddingAnswer,
    generates=True,
)
SCORE_ENDPOINT = Endpoint(
    "POST",
    "/score",
    "How well texts answer another",
    body=ScoreBody,
    example={"text_1": "fruit", "text_2": ["apple", "car"]},
    answer=ScoreAnswer,
    generates=True,
    tag="scores",
)
RERANK_ENDPOINT = Endpoint(
    "POST",
    "/rerank",
    "Documents by how well they answer a query",
    body=RerankBody,
    example={"query": "fruit", "documents": ["apple", "car"]},
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
    body = read(EmbeddingBody, raw, served)
    names = {"inputs": "input", "adapter": "model"}
    inputs = as_list(body.input)
    if inputs is not body.input:
        names["inputs[0]"] = "input"
    options = _options(body, served, *_ASKED)
    return EmbeddingCall(served.name(body.model), inputs, body.encoding_format == "base64", options, names)


def parse_score(raw: bytes, served: Served) -> ScoreCall:
    """Raises InvalidRequest, and Refused for another model."""
    body = read(ScoreBody, raw, served)
    first, second = ([each] if isinstance(each, str) else each for each in (body.text_1, body.text_2))
    query: str | list[str] = first
    if len(first) == 1:
        query = first[0]
    elif len(first) != len(second):
        raise InvalidRequest("text_1", f"{len(first)} texts for {len(second)} of text_2")
    names = {"query": "text_1", "documents": "text_2", "adapter": "model"}
    return ScoreCall(served.name(body.model), query, second, _options(body, served, *_JUDGING), names)


def parse_rerank(raw: bytes, served: Served) -> ScoreCall:
    """Raises InvalidRequest, and Refused for another model."""
    body = read(RerankBody, raw, served)
    return ScoreCall(
        served.name(body.model),
        body.query,
        body.documents,
        _options(body, served, *_JUDGING),
        {"adapter": "model"},
        body.top_n,
        body.return_documents,
    )


def _options(body: _Scheduled, served: Served, *names: str) -> dict[str, Any]:
    """Arguments of the engine: ``names``, and the options of its requests."""
    given = {name: getattr(body, name) for name in names}
    given["adapter"] = served.adapter(body.model)
    return {**{name: value for name, value in given.items() if value is not None}, **options_of(body, served)}


# -- answers ----------------------------------------------------------------------------------------------


async def embeddings_answer(call: EmbeddingCall, found: Sequence[Embedding]) -> list[bytes]:
    """The JSON of the EmbeddingAnswer to a call, in pieces: other callbacks run between two embeddings."""
    pieces, pace = Pieces(), Pace()
    pieces.add('{"object": "list", "data": [')
    for index, each in enumerate(found):
        if index:
            pieces.add(", ")
        vector = _base64(each) if call.base64 else each.vector.tolist()
        await pieces.add_json({"object": "embedding", "index": index, "embedding": vector}, pace)
    rest = {"model": call.model, "usage": _usage(each.usage for each in found)}
    pieces.add("], ")
    pieces.add(json.dumps(rest)[1:])
    return pieces.end()


def _base64(embedding: Embedding) -> str:
    return base64.b64encode(embedding.vector.astype("<f4", copy=False).tobytes()).decode()


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
    results: list[Ranked] = []
    for index in found.ranking(call.top_n):
        ranked: Ranked = {"index": index, "relevance_score": found.scores[index]}
        if call.with_documents:
            ranked["document"] = {"text": call.documents[index]}
        results.append(ranked)
    return {"id": name, "model": call.model, "results": results, "usage": _usage([found.usage])}


def _usage(usages: Any) -> EmbeddingUsage:
    tokens = sum(each.prompt_tokens for each in usages)
    return {"prompt_tokens": tokens, "total_tokens": tokens}
