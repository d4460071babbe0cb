"""Pooling: the routes that compute prompts and nothing behind them: embeddings and scores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from aiohttp import web

from aioinfer.config import ServerConfig
from aioinfer.engine_like import EngineLike
from aioinfer.errors import RequestError, renamed
from aioinfer.scoring import Scores
from aioinfer.server.generation import Generation
from aioinfer.server.http.pace import Pace
from aioinfer.server.http.pieces import Pieces, whole_response
from aioinfer.server.http.records import record_of
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
            call, _ = await self._generation.parsed(request, parse_embedding)
            record.model = call.model
            try:
                async with self._generation.watched(request):
                    found = await self._engine.embed(call.inputs, **call.options)
            except RequestError as error:
                raise renamed(error, call.names) from None
            record.prompt_tokens = sum(each.usage.prompt_tokens for each in found)
            return await self._json(request, embeddings_answer(call, found))

    async def score(self, request: web.Request) -> web.StreamResponse:
        record = record_of(request)
        with record.admitted():
            call, _ = await self._generation.parsed(request, parse_score)
            return await self._json(request, score_answer(call, await self._scores(request, call)))

    async def rerank(self, request: web.Request) -> web.StreamResponse:
        record = record_of(request)
        with record.admitted():
            call, _ = await self._generation.parsed(request, parse_rerank)
            return await self._json(request, rerank_answer(call, await self._scores(request, call)))

    async def _scores(self, request: web.Request, call: ScoreCall) -> Scores:
        record = record_of(request)
        record.model = call.model
        try:
            async with self._generation.watched(request):
                found = await self._engine.score(call.query, call.documents, **call.options)
        except RequestError as error:
            raise renamed(error, call.names) from None
        record.prompt_tokens = found.usage.prompt_tokens
        return found

    async def _json(self, request: web.Request, found: Mapping[str, Any]) -> web.Response:
        pieces = Pieces()
        await pieces.add_json(dict(found), Pace())
        return whole_response(request, pieces.end(), self._config.send_timeout)
