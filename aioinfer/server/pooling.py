"""Pooling: the routes that compute prompts and no tokens: embeddings and scores."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from aiohttp import web

from aioinfer.client.engine_like import EngineLike
from aioinfer.client.pooled_calls import listing
from aioinfer.config import ServerConfig
from aioinfer.embeddings.scoring import Scores
from aioinfer.errors import RequestError, renamed
from aioinfer.server.generation import Generation
from aioinfer.server.http.pieces import json_response, whole_response
from aioinfer.server.http.records import Record, record_of
from aioinfer.server.openai.embeddings import (
    EMBEDDING_ENDPOINT,
    RERANK_ENDPOINT,
    SCORE_ENDPOINT,
    ScoreCall,
    embeddings_answer,
    parse_embedding,
    parse_rerank,
    parse_score,
    rerank_answer,
    score_answer,
)
from aioinfer.server.openapi.endpoints import Route
from aioinfer.stream import Stream

__all__ = ["PoolingRoutes"]


class PoolingRoutes:
    """The handlers, of one engine."""

    def __init__(self, engine: EngineLike, config: ServerConfig, generation: Generation) -> None:
        self._engine = engine
        self._config = config
        self._generation = generation

    def routes(self) -> list[Route]:
        """Scores are at the root, too, as clients of vLLM and Jina expect them."""
        return [
            EMBEDDING_ENDPOINT.route(self.embed),
            SCORE_ENDPOINT.route(self.score),
            RERANK_ENDPOINT.route(self.rerank),
            replace(SCORE_ENDPOINT, place="root").route(self.score),
            replace(RERANK_ENDPOINT, place="root").route(self.rerank),
        ]

    async def embed(self, request: web.Request) -> web.StreamResponse:
        record = record_of(request)
        with record.admitted():
            call, _ = await self._generation.parsed(request, parse_embedding, batch=True)
            record.model = call.model
            with self._counting(record):
                try:
                    async with self._generation.watched(request):
                        found = await self._engine.embed(call.inputs, request_id=record.id, **call.options)
                except RequestError as error:
                    raise renamed(error, call.names) from None
            pieces = await embeddings_answer(call, found)
            return whole_response(request, pieces, self._config.send_timeout)

    async def score(self, request: web.Request) -> web.StreamResponse:
        record = record_of(request)
        with record.admitted():
            call, _ = await self._generation.parsed(request, parse_score, batch=True)
            name = record.call = f"score-{record.id}"
            answer = score_answer(call, await self._scores(request, call), name)
            return await json_response(request, answer, self._config.send_timeout)

    async def rerank(self, request: web.Request) -> web.StreamResponse:
        record = record_of(request)
        with record.admitted():
            call, _ = await self._generation.parsed(request, parse_rerank, batch=True)
            name = record.call = f"rerank-{record.id}"
            answer = rerank_answer(call, await self._scores(request, call), name)
            return await json_response(request, answer, self._config.send_timeout)

    async def _scores(self, request: web.Request, call: ScoreCall) -> Scores:
        record = record_of(request)
        record.model = call.model
        with self._counting(record):
            try:
                async with self._generation.watched(request):
                    return await self._engine.score(
                        call.query, call.documents, request_id=record.id, **call.options
                    )
            except RequestError as error:
                raise renamed(error, call.names) from None

    @contextmanager
    def _counting(self, record: Record) -> Iterator[None]:
        """Counts the prompts of a call of the engine, also of one that fails or is left."""
        streams: list[Stream] = []
        self._generation.called(1)
        try:
            with record.counting(streams, 1), listing(streams):
                yield
        finally:
            self._engine.timeline.request(record.id, record.started, record.output_tokens)
