"""Calls of an engine that make sessions and warmed prefixes: see :mod:`aioinfer.client.sessions`."""

from __future__ import annotations

import os
from array import array
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Unpack, cast

from aioinfer.chat.functions import Tool
from aioinfer.client.search import Searches
from aioinfer.client.session_files import load
from aioinfer.client.sessions import HeldPrefix, Session, State
from aioinfer.errors import InvalidRequest
from aioinfer.images.source import images_in
from aioinfer.inputs import freeze
from aioinfer.loop.options import Prompt, PromptSource
from aioinfer.params import SamplingParams
from aioinfer.request import JobOptions, RequestOptions, check_timeout

if TYPE_CHECKING:
    from aioinfer.loop.holding import Kept
    from aioinfer.loop.service import Service

__all__ = ["Sessions"]


class Sessions(Searches):
    """Calls whose KV outlives their requests."""

    def session(
        self,
        *,
        ttl: float | None = None,
        tools: Sequence[Tool] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[JobOptions],
    ) -> Session:
        """A :class:`~aioinfer.Session`: a conversation whose KV is held between its turns.

        Args:
            ttl: seconds without use until its KV is held no longer; the session goes on, and computes it
                again. Default: ``config.session_timeout``.
            tools: of all its chats; see :meth:`chat`.
            chat_template_kwargs: the same of variables of the template.
            options: those of :meth:`generate`, for all its turns.

        Raises InvalidRequest; Rejected: ``config.max_sessions`` are open; EngineClosed, EngineFailed,
        WrongLoop.
        """
        self._serving()
        return self._session(ttl, tools, chat_template_kwargs, options, State())

    def _session(
        self,
        ttl: float | None,
        tools: Sequence[Tool] | None,
        template_kwargs: Mapping[str, Any] | None,
        options: JobOptions,
        state: State,
    ) -> Session:
        check_timeout("ttl", ttl)
        if "request_id" in options:
            raise InvalidRequest("request_id", "names one request: give it to the turn")
        self._request(SamplingParams(), cast("RequestOptions", options))
        usual: dict[str, Any] = {}
        if tools is not None:
            usual["tools"] = list(tools)
        if template_kwargs is not None:
            usual["chat_template_kwargs"] = freeze("chat_template_kwargs", template_kwargs)
        serving = self._serving()
        seconds = self.config.session_timeout if ttl is None else ttl
        return Session(self, serving, serving.seats.take(), options, usual, seconds, state)

    async def load_session(
        self,
        path: str | os.PathLike[str],
        *,
        ttl: float | None = None,
        tools: Sequence[Tool] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[JobOptions],
    ) -> Session:
        """A session that :meth:`Session.save` has written, in this or another process, with its KV as far as
        the file has it and it is of the same arithmetic; the rest is computed by the next turn, or here.

        Options that are not given are those that it was saved with, its adapter's name and its salt among
        them. The KV in a file is believed, as the weights of a model are: load files that you trust.

        Raises as :meth:`session`; InvalidRequest with the field ``path``: there is no whole session file, or
        its session is of another model, or of an adapter that is not loaded by its name from the same files.
        """
        serving = self._serving()
        archive, saved = await load(serving, path, {each.name: each.fingerprint for each in self.adapters()})
        attached = False
        session: Session | None = None
        try:
            merged = cast("JobOptions", {**saved.options, **options})
            state = State(array("i", saved.token_ids), tuple(saved.messages))
            session = self._session(ttl, tools, chat_template_kwargs, merged, state)
            attached = saved.numerics == serving.info.numerics and serving.attach(archive)
            if attached and saved.token_ids:
                # Whole pages are there; a request computes at least one token more.
                size = serving.info.page_size or 1
                whole = (len(saved.token_ids) - 1) // size * size
                images = images_in(saved.messages)
                ids = saved.token_ids if images else saved.token_ids[: whole + 1]
                source = serving.source(ids, images=images)
                kept, _ = await self._computed(serving, source, session.ttl, merged)
                session.restored(kept)
            return session
        except BaseException:
            if session is not None:
                session.close()
            raise
        finally:
            if attached:
                serving.detach(archive)
            archive.close()

    async def warm(
        self,
        prompt: Prompt,
        *,
        ttl: float | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[JobOptions],
    ) -> HeldPrefix:
        """Compute the KV of a prefix that requests will begin with, as far as it is not cached, and hold it.

        Of a chat, ``chat_template_kwargs={"add_generation_prompt": False}`` leaves out the begin of an
        answer, which would follow in other places.

        Args:
            prompt: as for :meth:`generate`.
            ttl: seconds without use until it is held no longer; None: until it is released.
            options: those of :meth:`generate`; salt and adapter say whose requests find it.

        Raises as :meth:`generate`, and what its request raises.
        """
        serving = self._serving()
        check_timeout("ttl", ttl)
        source = self.prompt(prompt, chat_template_kwargs=chat_template_kwargs)
        kept, tokens = await self._computed(serving, source, ttl, options)
        return HeldPrefix(serving, kept, tokens)

    async def _computed(
        self, serving: Service[Any], source: PromptSource, ttl: float | None, options: JobOptions
    ) -> tuple[Kept | None, int]:
        """Compute the KV of a prompt and hold it; returns its number of tokens, too."""
        # A diffusion model generates blocks: the shortest output is not none.
        params = SamplingParams(max_tokens=0 if serving.info.block_size is None else 1)
        stream = self.generate(source, params, **options)
        cell = stream.cell
        kept: list[Kept | None] = []
        cell.ending = lambda: kept.append(serving.keep(cell, ttl))
        try:
            result = await stream
        except BaseException:
            for each in kept:
                if each is not None:
                    each.release()
            raise
        return kept[0], len(result.prompt_token_ids)
