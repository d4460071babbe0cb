"""FakeEngine: an engine whose answers are written down beforehand, for the tests of an application.

It is the real engine, scheduler and streams included, over a device that types its answers: what holds for
streams, cancellation, deadlines, grammars, pausing and errors holds here, without torch, threads or a model.
"""

from __future__ import annotations

import asyncio
import copy
import json
import math
import re
from collections import abc, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Never, TypeAlias

from aioinfer.cells import StreamCell
from aioinfer.config import EngineConfig, given
from aioinfer.embeddings.scoring import Scores
from aioinfer.engine import Engine
from aioinfer.errors import (
    ConfigError,
    EngineError,
    EngineFailed,
    InvalidRequest,
    Rejected,
    RequestError,
    StepFailed,
    shown,
)
from aioinfer.execution.device import DeviceLost
from aioinfer.images.support import ImageSupport
from aioinfer.loop.options import PromptSource
from aioinfer.loop.runtime import Runtime
from aioinfer.loop.service import Service
from aioinfer.params import SamplingParams
from aioinfer.request import Request
from aioinfer.resuming.record import StreamCheckpoint
from aioinfer.stream import Stream
from aioinfer.testing.fake_device import FakeDevice, FakeTokenizer, Script
from aioinfer.testing.fake_images import SEEN, FakeImages
from aioinfer.testing.timed_launcher import TimedLauncher

__all__ = ["Answer", "Answers", "FakeEngine", "FakeRequest"]

#: requests that are remembered
_MOST_REQUESTS = 10_000


@dataclass(frozen=True, slots=True)
class Answer:
    """One scripted answer. A text alone, or an exception alone, can be given in its place.

    Attributes:
        content: the text that the model writes.
        reasoning: its reasoning before that.
        tool_calls: (name, arguments) of the functions that it calls after that.
        delay: seconds from the request to the first token; None: the engine's ``delay``.
        pace: seconds from token to token, of one byte each; None: the engine's ``pace``.
        error: the error of the request after the content.
    """

    content: str = ""
    reasoning: str | None = None
    tool_calls: abc.Sequence[tuple[str, Mapping[str, Any]]] = ()
    delay: float | None = None
    pace: float | None = None
    error: Exception | None = None

    @property
    def text(self) -> str:
        """The answer as the model writes it."""
        parts = [] if self.reasoning is None else [f"<think>\n{self.reasoning}\n</think>\n\n"]
        parts.append(self.content)
        for name, arguments in self.tool_calls:
            call = json.dumps({"name": name, "arguments": arguments})
            parts.append(f"<tool_call>\n{call}\n</tool_call>")
        return "".join(parts)


Scripted: TypeAlias = str | Exception | Answer
#: one for all requests; one after the other; by a part of the prompt; or computed from the prompt's text
Answers: TypeAlias = Scripted | Iterable[Scripted] | Mapping[str, Scripted] | Callable[[str], Scripted | None]

#: by a part of the document, or computed from query and document
Scored: TypeAlias = Mapping[str, float] | Callable[[str, str], float]


@dataclass(frozen=True, slots=True)
class FakeRequest:
    """A request that was made, as the model saw it."""

    #: of a chat: ``role: content`` line by line, and the calls that a message has
    prompt: str
    params: SamplingParams
    options: Request = field(repr=False)
    #: of a chat, in OpenAI's form, with the calls of earlier turns; else None
    messages: abc.Sequence[Mapping[str, Any]] | None = field(default=None, repr=False)
    #: the functions that the model was offered, in OpenAI's form; None without any
    tools: abc.Sequence[Mapping[str, Any]] | None = field(default=None, repr=False)


class FakeEngine(Engine):
    """An :class:`~aioinfer.Engine` with scripted answers.

    ::

        engine = FakeEngine({"weather": Answer(tool_calls=[("weather", {"city": "Rome"})]), "": "Hello!"})
        async with engine:
            assert (await engine.generate("Hi")).text == "Hello!"

    ``answers`` is a text, an exception or an :class:`Answer` for every request; a sequence of them, one per
    request in the order of the calls; a mapping, of which the first key that the prompt's text contains
    counts; or a function of the prompt's text. It can be replaced at any time. A request without an answer
    (a sequence is used up, no key fits) is refused as InvalidRequest of "prompt"; with None it gets the
    shortest text that its grammar allows, which without a grammar is empty.

    Embeddings are hashes of the prompt, of ``embedding_size`` numbers, so that equal texts have equal ones;
    they need no answer. Scores are cosines of these, or what ``scores`` says: a function of query and
    document, or a mapping, of which the first key that the document contains counts (none: 0).

    A grammar is obeyed: an answer that breaks it goes on as a shortest text from there. A token is a byte,
    but ``max_tokens`` counts the words of a scripted answer, so that a service's own bound does not cut it:
    with ``max_tokens=2`` it ends behind its second word, with ``finish_reason`` "length".
    An answer with the error EngineFailed ends the engine.
    With ``images`` it takes images, which are ``<image>`` in the prompt's text.
    ``seed``, ``temperature`` and the other parameters of sampling change nothing. Tools are called in the
    format ``hermes`` and reasoning is split off in the format ``qwen3``, unless ``config`` says otherwise.
    """

    def __init__(
        self,
        answers: Answers | None = None,
        *,
        delay: float = 0.0,
        pace: float = 0.0,
        config: EngineConfig | None = None,
        embedding_size: int = 3,
        scores: Scored | None = None,
        images: bool = False,
        **unknown: Never,
    ) -> None:
        """``delay`` and ``pace``: seconds to the first token and from token to token; they pass on the clock
        of the loop, so that they take no time on a :class:`VirtualLoop`."""
        config = config or EngineConfig(
            model="fake", num_pages=4096, overlap_steps=0, tool_call_parser="hermes", reasoning_parser="qwen3"
        )
        # A step brings one token of an answer, at its own pace.
        config = replace(given(config), speculation="off")
        super().__init__(
            config, launcher=self._new_launcher, tokenizer=lambda _: FakeTokenizer(images=images), **unknown
        )
        self.answers = answers
        self.delay = delay
        self.pace = pace
        #: the requests so far, up to 10,000 of them
        self.requests: deque[FakeRequest] = deque(maxlen=_MOST_REQUESTS)
        self.scores = scores
        self._embedding_size = embedding_size
        self._images = ImageSupport(token_id=FakeImages.token_id) if images else None
        self._device: FakeDevice | None = None
        #: the newest chat's source, which has no messages any more, and these
        self._asked: tuple[PromptSource | None, Any] = None, None

    @property
    def answers(self) -> Answers | None:
        """The answers to come."""
        return self._answers

    @answers.setter
    def answers(self, given: Answers | None) -> None:
        single = given is None or isinstance(given, (str, Exception, Answer, Mapping)) or callable(given)
        if not (single or isinstance(given, Iterable)):
            raise ConfigError(f"answers must be a text, or texts, got {shown(given)}")
        self._answers = given
        self._next = None if single else iter(given)  # type: ignore[arg-type]

    def lose_device(self, cause: Exception | None = None) -> None:
        """Lose the device: every stream ends with EngineFailed, and the engine with it."""
        self._started().lost(cause or DeviceLost("the device was lost"))

    async def score(
        self, query: str | abc.Sequence[str], documents: abc.Sequence[str], **options: Any
    ) -> Scores:
        """As :meth:`aioinfer.Engine.score`; what makes prompts of texts is not looked at."""
        plain = {"method": "cosine", "instruction": None, "template": None}
        found = await super().score(query, documents, **options | plain)
        if self.scores is None:
            return found
        queries = [query] * len(documents) if isinstance(query, str) else query
        pairs = enumerate(zip(queries, documents, strict=True))
        scores = [math.nan if at in found.errors else self._score(*pair) for at, pair in pairs]
        return replace(found, scores=scores)

    def _score(self, query: str, document: str) -> float:
        given = self.scores
        if isinstance(given, Mapping):
            return float(next((given[part] for part in given if part in document), 0.0))
        assert given is not None
        return float(given(query, document))

    def _new_launcher(self, config: EngineConfig) -> TimedLauncher:
        device = FakeDevice(config, asyncio.get_running_loop().time, self._embedding_size, self._images)
        self._device = device
        return TimedLauncher(device, device.seconds)

    def _queue(
        self,
        serving: Service[Any],
        prompt: PromptSource,
        request: Request,
        checkpoint: StreamCheckpoint | None = None,
    ) -> Stream:
        if prompt.messages is not None or prompt is not self._asked[0]:
            self._asked = prompt, prompt.messages
        messages: Any = None
        variables: Mapping[str, Any] = {}
        if self._asked[1] is not None:
            messages, variables = self._asked[1]
        text = None if request.pooling is not None else _text(prompt)
        if text is None:
            return super()._queue(serving, prompt, request, checkpoint)  # whose stream says why
        tools = variables.get(self.chat_format.tools_variable)
        self.requests.append(FakeRequest(text, request.params, request, messages, tools))
        answer = self._answer(text)
        if answer.text:
            request = replace(request, params=_of_words(request.params, answer.text))
        error = answer.error
        if isinstance(error, (InvalidRequest, Rejected)) and not answer.text:
            raise copy.copy(error)
        stream = super()._queue(serving, prompt, request, checkpoint)
        cell, runtime = stream.cell, self._serving()
        assert self._device is not None
        unscripted = self._answers is None
        self._device.play(
            cell.output,
            Script(
                None if unscripted else answer.text.encode(),
                self.delay if answer.delay is None else answer.delay,
                self.pace if answer.pace is None else answer.pace,
                None if error is None else lambda: _fail(runtime, cell, error),
            ),
            0 if checkpoint is None else len(checkpoint.token_ids),
        )
        return stream

    def _answer(self, prompt: str) -> Answer:
        given: Any = self._answers
        if self._next is not None:
            given = next(self._next, None)
        elif isinstance(given, Mapping):
            given = next((given[key] for key in given if key in prompt), None)
        elif callable(given):
            given = given(prompt)
        elif given is None:
            return Answer()
        if given is None:
            raise InvalidRequest("prompt", f"the FakeEngine has no answer for {prompt[-200:]!r}")
        if isinstance(given, Exception):
            return Answer(error=given)
        return given if isinstance(given, Answer) else Answer(given)


def _of_words(params: SamplingParams, text: str) -> SamplingParams:
    """Parameters whose ``max_tokens``, of words of the text, is one of bytes."""
    if not params.max_tokens:
        return params
    words = [*re.finditer(r"\s*\S+", text)]
    if params.max_tokens < len(words):
        return params.changed(max_tokens=len(text[: words[params.max_tokens - 1].end()].encode()))
    # The text, and its end; further bytes are of a grammar or of ``ignore_eos``.
    return params.changed(max_tokens=max(params.max_tokens, len(text.encode()) + 1))


def _text(prompt: PromptSource) -> str | None:
    """The text of a prompt, None if it has none that the engine takes."""
    try:
        return FakeTokenizer().decode(prompt.shown()).replace(SEEN, "<image>")
    except InvalidRequest:
        return None


def _fail(runtime: Runtime, cell: StreamCell, error: Exception) -> None:
    failed: RequestError | EngineError
    if isinstance(error, EngineFailed):
        runtime.lost(error)
        return
    if isinstance(error, (RequestError, EngineError)):
        failed = copy.copy(error)
        failed.__cause__ = error.__cause__
    else:
        failed = StepFailed(f"the step failed: {error}")
        failed.__cause__ = error
    if cell in runtime.open:
        runtime.end(runtime.open[cell], failed)
