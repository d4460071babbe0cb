"""Answering: how rows become requests, and lists of rows lists of answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from aioinfer.client.mapping import MapProgress, OnError, Opened, ResultMap
from aioinfer.client.rows import ChatRow, ParamsOf
from aioinfer.errors import AioInferError, InvalidRequest, RequestError, renamed
from aioinfer.loop.options import PromptSource, check_chat, pooling_params
from aioinfer.params import SamplingParams, inherited

if TYPE_CHECKING:
    from aioinfer.client.requests import Requests

__all__ = ["Answering"]


class _Asked(NamedTuple):
    """A row that was checked, as far as that needs no tokenizing."""

    source: PromptSource
    params: SamplingParams
    #: makes its stream, by the number of rows that wait before it
    open: Callable[[int], Opened]
    #: argument of the engine -> the caller's name for it
    names: Mapping[str, str]


class Answering:
    """Makes requests of the rows of one call."""

    def __init__(
        self, engine: Requests, params: ParamsOf, options: Mapping[str, Any], usual: Mapping[str, Any]
    ) -> None:
        """``options``: of all requests; ``usual``: arguments of chats whose rows have none."""
        self._engine = engine
        self._params = params
        self._options = options
        self._usual = usual
        self._read = 0

    def open(self, row: Any) -> Callable[[int], Opened]:
        """As :data:`~aioinfer.client.mapping.Open`."""
        return self.asked(row).open

    def asked(self, row: Any) -> _Asked:
        """The next row. Raises InvalidRequest, with the name of the row as ``request_id``."""
        options = dict(self._options)
        if isinstance(row, ChatRow) and row.id is not None:
            options["request_id"] = row.id
        self._read += 1
        try:
            chosen = self._params.of(self._read - 1)
            return (
                self._chat(row, chosen, options)
                if isinstance(row, ChatRow)
                else self._one(row, chosen, options)
            )
        except AioInferError as error:
            error.request_id = options.get("request_id")
            raise

    def _one(self, prompt: Any, params: SamplingParams | None, options: dict[str, Any]) -> _Asked:
        engine, behind = self._engine, options.pop("queue_behind", 0)
        source = engine.prompt(prompt, chat_template_kwargs=self._usual.get("chat_template_kwargs"))
        settled = params
        if options.get("pooling") is not None:
            settled = pooling_params(inherited(params, SamplingParams()))

        def opened(waiting: int) -> Opened:
            engine.check_room(source)
            return engine.generate(source, params, queue_behind=behind + waiting, **options)

        return _Asked(source, inherited(settled, engine.default_params), opened, {})

    def _chat(self, row: ChatRow, params: SamplingParams | None, options: dict[str, Any]) -> _Asked:
        engine, behind = self._engine, options.pop("queue_behind", 0)
        chosen = params if row.params is None else row.params
        asked, source = engine.asked_chat(row.messages, chosen, **row.asked(self._usual))
        check_chat(asked.params, options.get("pooling"))

        def opened(waiting: int) -> Opened:
            engine.check_room(source)
            return engine.open_chat(asked, source, queue_behind=behind + waiting, **options)

        return _Asked(source, asked.params, opened, asked.names)

    async def into(
        self,
        found: list[Any],
        rows: Sequence[Any],
        *,
        name: str,
        progress: MapProgress | None,
        on_error: OnError,
    ) -> None:
        """Put the answers in order into ``found``, which has None before, and what is done however this ends.

        With ``on_error="raise"``, what is wrong with a row is found before any is computed. ``name``: that of
        the rows in errors.
        """
        found += [None] * len(rows)
        engine, pooling = self._engine, self._options.get("pooling")
        asked: Sequence[Any] = rows
        if on_error == "raise":
            asked = []
            for index, row in enumerate(rows):
                try:
                    asked.append(one := self.asked(row))
                    try:
                        await engine.check_whole(one.source, one.params, pooling)
                    except RequestError as error:
                        raise renamed(error, one.names) from error.__cause__
                except InvalidRequest as error:
                    raise self._named(error, row, "" if len(rows) == 1 else f"{name}[{index}]") from error
        results: ResultMap[Any] = ResultMap(
            self.open if asked is rows else lambda one: one.open,
            asked,
            concurrency=max(1, min(len(rows), engine.config.max_queued_requests)),
            room=engine.when_room,
            progress=progress,
            on_error=on_error,
        )
        count = 0
        try:
            async with results:
                async for result in results:
                    found[count] = result
                    count += 1
        finally:
            for index, result in (await results.undelivered()).items():
                found[index] = result

    def _named(self, error: InvalidRequest, row: Any, name: str) -> RequestError:
        """The error of one of several rows, with its name."""
        if not name or not (isinstance(row, ChatRow) or error.field == "prompt"):
            return error
        field = f"{name}.{error.field}" if isinstance(row, ChatRow) else name
        named = InvalidRequest(field, error.message, code=error.code)
        named.request_id = error.request_id
        return named
