"""Batches: calls that make many requests and wait for room in the queue."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

from aioinfer.chat.results import ChatResult
from aioinfer.client.answering import Answering
from aioinfer.client.mapping import (
    MapProgress,
    OnError,
    Prompts,
    ResultMap,
    Rows,
    check_on_error,
)
from aioinfer.client.pooled_calls import PooledCall
from aioinfer.client.requests import Requests
from aioinfer.client.rows import ChatRow, Params, ParamsOf, kept
from aioinfer.embeddings.embedding import (
    Embedding,
    EmbeddingArguments,
    EmbeddingForm,
    inputs_of,
    source_form,
    split_options,
)
from aioinfer.embeddings.scoring import ScoreJob, ScoreMethod, Scores, bad_pairs, score_job
from aioinfer.errors import AioInferError
from aioinfer.loop.options import Prompt, PromptForm, PromptSource, is_one, pooling_params
from aioinfer.outputs import Result
from aioinfer.params import SamplingParams, inherited
from aioinfer.pooling import Pooling
from aioinfer.request import JobOptions
from aioinfer.scheduling.adapters import adapter_not_loaded

if TYPE_CHECKING:
    from aioinfer.stream import Stream

__all__ = ["Batches"]


class Batches(Requests):
    """Calls that make many requests, beside those of others."""

    @overload
    def map(
        self,
        prompts: Rows[ChatRow],
        params: Params = None,
        *,
        on_error: Literal["raise"] = "raise",
        concurrency: int | None = None,
        progress: MapProgress | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[JobOptions],
    ) -> ResultMap[ChatResult]: ...

    @overload
    def map(
        self,
        prompts: Rows[ChatRow],
        params: Params = None,
        *,
        on_error: OnError,
        concurrency: int | None = None,
        progress: MapProgress | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[JobOptions],
    ) -> ResultMap[ChatResult | AioInferError]: ...

    @overload
    def map(
        self,
        prompts: Prompts,
        params: Params = None,
        *,
        on_error: Literal["raise"] = "raise",
        concurrency: int | None = None,
        progress: MapProgress | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[JobOptions],
    ) -> ResultMap[Result]: ...

    @overload
    def map(
        self,
        prompts: Prompts,
        params: Params = None,
        *,
        on_error: OnError,
        concurrency: int | None = None,
        progress: MapProgress | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[JobOptions],
    ) -> ResultMap[Result | AioInferError]: ...

    def map(
        self,
        prompts: Rows[Any],
        params: Params = None,
        *,
        on_error: OnError = "raise",
        concurrency: int | None = None,
        progress: MapProgress | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[JobOptions],
    ) -> ResultMap[Any]:
        """The results of many prompts, in their order, as an asynchronous iterator.

        ::

            async with engine.map(prompts, SamplingParams(max_tokens=64)) as results:
                async for result in results:
                    print(result.text)

        Prompts are read as there is room, whoever fills the queue, and the requests of others get their turns
        between them. What was done when an exception or a timeout ended the iteration is not lost:
        :meth:`ResultMap.undelivered` has what was not delivered.

        Args:
            prompts: any iterable or asynchronous iterable of prompts, which may be endless; or of
                :class:`~aioinfer.ChatRow`, each with parameters, tools, format and name of its own.
            params: one for all, or a list with one for each.
            concurrency: most requests that are open, and most further results that are kept in memory;
                default: twice as many as run at a time.
            progress: ``progress(done, total)`` is called by the consumer's task; total is None if ``prompts``
                has no length.
            on_error: "raise" ends the iteration with the first error; "return" yields the error in the place
                of its prompt's result.
            chat_template_kwargs, options: as of :meth:`generate`, for every prompt.

        Raises InvalidRequest for these arguments, once and before a prompt is read; EngineClosed,
        EngineFailed and WrongLoop.
        """
        each = ParamsOf(params, prompts)
        self.check_job(each.common, options)
        check_on_error(on_error)
        usual = {"chat_template_kwargs": chat_template_kwargs}
        return ResultMap(
            Answering(self, each, options, usual).open,
            prompts,
            concurrency=self._at_once() if concurrency is None else concurrency,
            room=self.when_room,
            progress=progress,
            on_error=on_error,
        )

    def check_job(self, params: SamplingParams | None, options: Any) -> None:
        """Raise InvalidRequest for what is wrong with the common arguments of many requests, and what
        :meth:`generate` raises for the engine."""
        serving = self._serving()
        request = self._request(params or SamplingParams(), options)
        if request.pooling is not None:
            params = pooling_params(request.params)
        serving.checks.check(inherited(params, self.default_params), request.pooling)
        if request.adapter is not None:
            known = [each.name for each in self.adapters()]
            if request.adapter not in known:
                raise adapter_not_loaded(request.adapter, known, reason=serving.info.adapter_reason)

    def _at_once(self) -> int:
        """Requests of one call that are open at a time."""
        return 2 * self._serving().info.settle(self.config).running_requests

    @overload
    async def embed(  # type: ignore[overload-overlap]
        self,
        inputs: Prompt,
        *,
        on_error: Literal["raise"] = "raise",
        progress: MapProgress | None = None,
        **options: Unpack[EmbeddingArguments],
    ) -> Embedding: ...

    @overload
    async def embed(  # type: ignore[overload-overlap]
        self,
        inputs: Prompt,
        *,
        on_error: OnError,
        progress: MapProgress | None = None,
        **options: Unpack[EmbeddingArguments],
    ) -> Embedding | AioInferError: ...

    @overload
    async def embed(
        self,
        inputs: Sequence[Prompt],
        *,
        on_error: Literal["raise"] = "raise",
        progress: MapProgress | None = None,
        **options: Unpack[EmbeddingArguments],
    ) -> list[Embedding]: ...

    @overload
    async def embed(
        self,
        inputs: Sequence[Prompt],
        *,
        on_error: OnError,
        progress: MapProgress | None = None,
        **options: Unpack[EmbeddingArguments],
    ) -> list[Embedding | AioInferError]: ...

    async def embed(
        self,
        inputs: Prompt | Sequence[Prompt],
        *,
        on_error: OnError = "raise",
        progress: MapProgress | None = None,
        **options: Unpack[EmbeddingArguments],
    ) -> Any:
        """The embedding of one input, or of several a list in their order.

        ::

            texts = await engine.embed(["a query", "a document"])
            similarity = texts[0].vector @ texts[1].vector

        Inputs are computed as prompts are, with those of all other requests: they share steps, the prefix
        cache and the policy. They wait for room in the queue, whoever fills it.

        Args:
            inputs: a text, token ids, a chat, or a list of any of these.
            pooling: "last", the hidden state of the last token; "cls", that of the first one, of an encoder;
                "mean", the mean of all, which does not read the prefix cache; "tokens", those of all tokens,
                [tokens, dimensions] (at most 2**26 numbers). Default: as the model's files say, else "last",
                or "mean" of an encoder.
            dimensions: how many of the numbers are kept, before they are normalised.
            normalize: every vector has length 1. Default: as the model's files say, else True.
            prompt_name: which of the model's prompts (:attr:`sentences`) is put in front of texts; default:
                the one that its files name, if any.
            truncate_prompt_tokens: how many tokens of an input's beginning are kept, those of the prompt
                and special ones included, and not more than the model's files say; -1: as many as it takes.
                By default an input that is too long is refused.
            progress: ``progress(done, total)`` is called as inputs end.
            on_error: "raise" withdraws all with the first error; "return" puts the error in the place of its
                input's embedding.
            options: those of :meth:`generate`.

        Returns:
            :class:`~aioinfer.Embedding`, or a list of them. Each input has the adapter and the weights that
            are there when it is queued and computed: ``weight_version`` tells vectors of other weights apart.

        Raises as :meth:`generate`, but not Rejected, with ``field`` "inputs[3]" for the input at index 3, if
        there are several; all else is withdrawn then, and when the call is cancelled. What was done by then
        is in the exception's ``results``: a list in the order of the inputs, with None for the others (after
        a timeout of :func:`asyncio.timeout`, ``error.__cause__.results``).
        """
        found: list[Any] = []
        with kept(found):
            await self.embed_into(found, inputs, on_error=on_error, progress=progress, **options)
        return found[0] if is_one(inputs) else found

    async def embed_into(
        self,
        found: list[Any],
        inputs: Prompt | Sequence[Prompt],
        *,
        on_error: OnError = "raise",
        progress: MapProgress | None = None,
        **options: Unpack[EmbeddingArguments],
    ) -> None:
        """:meth:`embed` into a list, which has what is done however the call ends."""
        check_on_error(on_error)
        settings, job = split_options(options)
        form = EmbeddingForm.of(self._serving().info, self.sentences, **settings)
        given, one = inputs_of(inputs)

        def name(index: int) -> str:
            return "inputs" if one else f"inputs[{index}]"

        call = self._pooled_call(form.pooling, form.form, name, **job)
        await call.results(given, form.prompt, form.finish, progress, found, on_error)

    async def score(
        self,
        query: str | Sequence[str],
        documents: Sequence[str],
        *,
        method: ScoreMethod | None = None,
        instruction: str | None = None,
        template: str | None = None,
        progress: MapProgress | None = None,
        on_error: OnError = "raise",
        **options: Unpack[JobOptions],
    ) -> Scores:
        """Scores of documents for a query; ``query`` may be a list with one for each document.

        Args:
            method: "classifier", "judge" or "cosine"; see :mod:`aioinfer.embeddings.scoring`. Default: the
                classifier's head if the model has one; "cosine" for embedding models; "judge" for models
                whose files say what they answer, and with ``instruction`` or ``template``.
            instruction: what makes a document fit, for the template's ``{instruction}``.
            template: a text with ``{query}`` and ``{document}``, which a judge or a classifier reads.
            progress, options: as of :meth:`embed`.
            on_error: "raise" withdraws all with the first error; with "return", :attr:`Scores.errors` has
                those of single documents, whose scores are NaN.

        All scores are by the same weights: where these, or the adapter, are replaced meanwhile, what was
        computed before is computed again. Raises as :meth:`generate`; ``field`` is "documents[3]" for the
        document at index 3. StepFailed if the weights are replaced again and again.
        """
        check_on_error(on_error)
        serving, name = self._serving(), options.get("adapter")
        failed = bad_pairs(query, documents) if on_error == "return" else {}
        kept = [at for at in range(len(documents)) if at not in failed] if failed else None

        def plan(kept: Sequence[int] | None) -> ScoreJob:
            """To score these documents, of which there are some."""
            return score_job(
                serving.info,
                self.tokenizer,
                self.sentences,
                query if kept is None or isinstance(query, str) else [query[at] for at in kept],
                documents if kept is None else [documents[at] for at in kept],
                method=method,
                instruction=instruction,
                template=template,
            )

        if kept == []:
            return Scores.with_errors(None, failed, len(documents))
        job = plan(kept)

        def named(index: int) -> str:
            return job.name(index, kept)

        call = self._pooled_call(job.pooling, job.form, named, **options)
        results = await call.of_one_version(
            job.prompts, progress, lambda: self._files_of(name), on_error=on_error
        )
        if on_error == "raise":
            return job.finish(results)
        by_prompt = dict(zip(job.prompts, results, strict=True))
        before, kept = kept or range(len(documents)), []
        for at, needed in zip(before, job.needs, strict=True):
            error = next(
                (found for each in needed if isinstance(found := results[each], AioInferError)), None
            )
            if error is None:
                kept.append(at)
            else:
                failed[at] = error
        if kept and failed:
            job = plan(kept)
        computed = job.finish([by_prompt[each] for each in job.prompts]) if kept else None
        return Scores.with_errors(computed, failed, len(documents))

    def _files_of(self, adapter: str | None) -> str:
        """Fingerprint of the adapter that new requests have by this name."""
        found = () if adapter is None else self.adapters()
        return next((each.fingerprint for each in found if each.name == adapter), "")

    def _pooled_call(
        self,
        pooling: Pooling,
        form: PromptForm | None,
        name: Callable[[int], str],
        **options: Unpack[JobOptions],
    ) -> PooledCall:
        """``name``: of the input with an index, in errors."""
        self.check_job(None, {**options, "pooling": pooling})
        serving = self._serving()

        def source(prompt: Prompt) -> PromptSource:
            return serving.source(prompt, None, source_form(prompt, form))

        def submit(prompt: PromptSource, waiting: int) -> Stream:
            self.check_room(prompt)
            return self.generate(prompt, pooling=pooling, queue_behind=waiting, **options)

        return PooledCall(self.config, source, submit, name, self._at_once(), self.when_room)
