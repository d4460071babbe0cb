"""Preparing: what a request needs before its first token, besides the tokens of its prompt."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from aioinfer.config import EngineConfig
from aioinfer.errors import InvalidRequest
from aioinfer.execution.device import DeviceInfo
from aioinfer.images.prompt import shown
from aioinfer.loop.given_images import image_processor
from aioinfer.loop.options import Prepared, too_long
from aioinfer.loop.thinking import ready_processors
from aioinfer.params import SamplingParams
from aioinfer.steering.processors import waits
from aioinfer.steering.state import SteeringState
from aioinfer.text.least_bytes import least_bytes
from aioinfer.text.length import ASSUMED_LONGEST
from aioinfer.text.tokenizer import end_of

if TYPE_CHECKING:
    from aioinfer.text.closed_answers import ClosedAnswers
    from aioinfer.text.grammar import Compiler, GrammarBackend, GrammarState, Matcher
    from aioinfer.text.grammar_spec import Grammar
    from aioinfer.text.tokenizer import Tokenizer

__all__ = ["Preparing"]

_log = logging.getLogger("aioinfer")


class Preparing:
    """Prepares the requests of one engine, on several threads. ``drafts``: the engine has a drafter."""

    __slots__ = ("_compiler", "_compiler_lock", "_config", "_drafts", "_info", "_tokenizer")

    def __init__(
        self, config: EngineConfig, info: DeviceInfo, tokenizer: Tokenizer | None, *, drafts: bool
    ) -> None:
        self._config = config
        self._info = info
        self._tokenizer = tokenizer
        self._drafts = drafts
        self._compiler: Compiler | None = None
        self._compiler_lock = threading.Lock()

    def warm_up(self) -> None:
        """Build what every grammar needs: the first one would take a second of the interpreter's lock.

        Blocks. Does nothing where no request can have a grammar; such requests are told why.
        """
        if not self._config.prepare_grammars:
            return
        if self._tokenizer is None or not self._info.generates:
            return
        try:
            self._grammar_compiler()
        except Exception as error:  # the library raises several types for a tokenizer that it cannot read
            _log.info("there will be no grammars: %s", error)

    def complete(
        self, prompt_ids: Sequence[int], params: SamplingParams, stop_ids: frozenset[int]
    ) -> Prepared:
        """Compile the grammar that masks the output, and tokenize what it is predicted to be and what closes
        its thoughts; ``stop_ids`` end it.

        Raises InvalidRequest, also if the extra for grammars is missing.
        """
        grammar = self._grammar(params, prompt_ids, stop_ids) if params.masked else None
        ready = ready_processors(params, self._tokenizer, prompt_ids, self._config.reasoning_parser)
        processors = (*ready, *params.logits_processors)
        steering = SteeringState(processors, self._shown(prompt_ids)) if processors else None
        return Prepared(prompt_ids, grammar, self._prediction(params), steering=steering)

    def _shown(self, prompt_ids: Sequence[int]) -> Sequence[int]:
        """The ids as callers see them."""
        images = image_processor(self._tokenizer)
        return prompt_ids if images is None else shown(prompt_ids, images.token_id)

    def speculates(self, params: SamplingParams) -> bool:
        """Tokens of such a request are drafted."""
        if any(map(waits, params.logits_processors)):
            return False
        return self._drafts and params.speculate and self._info.verifies

    def _prediction(self, params: SamplingParams) -> npt.NDArray[np.int32] | None:
        """int32 [P]; what exceeds the context is cut."""
        given, most = params.prediction, self._info.max_model_len
        if given is None or not self.speculates(params):
            return None
        if isinstance(given, str):
            assert self._tokenizer is not None
            longest = self._tokenizer.longest_token or ASSUMED_LONGEST
            given = self._tokenizer.encode_part(given[: most * longest])
        return np.asarray(given[:most], np.int32)

    def _grammar(
        self, params: SamplingParams, prompt_ids: Sequence[int], stop_ids: frozenset[int]
    ) -> GrammarState:
        from aioinfer.text.grammar import GrammarState, TokenBounds

        if params.structure is not None and params.structure.reasoning is not None:
            end = "" if self._tokenizer is None else end_of(prompt_ids, self._tokenizer)
            params = replace(params, grammar=params.structure.behind(end))
        if params.structure is not None and params.structure.kind == "template":
            self._check_template(params.structure, len(prompt_ids), params.max_tokens)

        bounds = None
        if params.bad_words or params.allowed_token_ids is not None:
            bounds = TokenBounds(
                self._info.vocab_size,
                allowed=params.allowed_token_ids,
                ends=stop_ids,
                until=len(prompt_ids) + params.min_tokens,
            )
        # Forced tokens are not sampled, so they have no logprobs, and no logits processor decides them. They
        # also void the steps in flight, so there must be more of them than those steps would have sampled. A
        # recurrent state is void with these steps, too: without snapshots all would be computed again from
        # the first token on.
        sampled = params.logprobs is not None or params.logits_processors
        forwards = self._config.fast_forward and not sampled and self._info.num_snapshots != 0
        forwards = forwards and self._info.block_size is None  # (the rounds of a block write them)
        least_forced = (self._config.overlap_steps or 0) + 2 if forwards else 0
        suggests = self.speculates(params)
        if suggests and least_forced:
            # Fewer of them are drafts, which void nothing.
            least_forced = max(least_forced, self._config.max_draft_tokens + 2)
        refusal: InvalidRequest | None = None
        for _ in range(1 if params.structure is None else 2):
            backend, matcher = self._matcher(params)
            try:
                state = GrammarState(
                    *(backend, matcher, len(prompt_ids), self._info.vocab_size, least_forced, bounds),
                    suggests=suggests,
                    ends=self._info.eos_token_ids,
                ).start()
            except InvalidRequest as refused:
                refusal = refused
            else:
                if self._info.block_size is not None:
                    state.closed = self._closed(params, stop_ids)
                    self._check_room(params, state.closed, len(prompt_ids))
                return state
            if params.structure is not None:
                # Copies of a matcher share llguidance's budget, and earlier outputs may have used it up.
                self._grammar_compiler().forget(params.structure)
        assert refusal is not None
        raise _of_all(params, refusal)

    def _check_template(self, grammar: Grammar, prompt: int, most: int | None) -> None:
        """Raise InvalidRequest for a template whose text alone is too long."""
        from aioinfer.text.text_template import TextTemplate

        try:
            texts = TextTemplate.read(grammar.text).texts
        except (ValueError, RecursionError):
            return  # the compiler says what is wrong
        if self._tokenizer is None:
            return  # so does it then
        # Up to two tokens of a text may also have a part of a hole.
        least = sum(max(0, len(self._tokenizer.encode_part(each)) - 2) for each in texts if each)
        told, longest = f"has text of some {least} tokens", self._info.max_model_len
        if most is not None and least > most:
            raise InvalidRequest("grammar", f"{told}, and max_tokens is {most}")
        if prompt + least > longest:
            message = f"{told}, which behind {prompt} exceed the context of {longest}"
            raise InvalidRequest("grammar", message, code="context_length_exceeded")

    def _closed(self, params: SamplingParams, stop_ids: frozenset[int]) -> ClosedAnswers | None:
        """The automaton of a grammar of a few texts; None for others, and where more decides."""
        from aioinfer.text.closed_answers import ClosedAnswers, closed_texts
        from aioinfer.text.guidance import GuidanceBackend

        if params.structure is None or params.bad_words or (texts := closed_texts(params.structure)) is None:
            return None
        backend = self._grammar_compiler().backend
        assert isinstance(backend, GuidanceBackend)
        return ClosedAnswers.build(texts, backend.spellings(), self._info.eos_token_ids, stop_ids)

    def _check_room(self, params: SamplingParams, closed: ClosedAnswers | None, prompt_length: int) -> None:
        """Raise InvalidRequest for a grammar whose shortest output is longer than this one may be."""
        least = 0 if closed is None else closed.least
        if closed is None and params.structure is not None:
            longest = (self._tokenizer and self._tokenizer.longest_token) or ASSUMED_LONGEST
            least = -(-least_bytes(params.structure) // longest)
        if params.max_tokens is not None and least > params.max_tokens:
            raise InvalidRequest(
                "max_tokens",
                f"is {params.max_tokens}: what the grammar allows has {least} tokens or more",
            )
        if prompt_length + least > self._info.max_model_len:
            raise too_long(
                self._info,
                f"the prompt has {prompt_length} tokens, and what the grammar allows {least} or more",
            )

    def _matcher(self, params: SamplingParams) -> tuple[GrammarBackend, Matcher]:
        """A matcher of the grammar and the bad words of a new output. Raises InvalidRequest."""
        from aioinfer.text.bad_words import BadWordsBackend, BadWordsMatcher, spell  # rarely needed

        backend: GrammarBackend | None = None
        matcher: Matcher | None = None
        if params.structure is not None:
            compiler = self._grammar_compiler()
            backend, matcher = compiler.backend, compiler.matcher(params.structure)
        if params.bad_words:
            words = spell(params.bad_words, self._tokenizer)
            matcher = BadWordsMatcher(words, backend, matcher)
            backend = BadWordsBackend()
        assert backend is not None
        assert matcher is not None
        return backend, matcher

    def close(self) -> None:
        """Give the compiled grammars back: a closed engine that is kept promises none of its memory."""
        with self._compiler_lock:
            self._compiler = None

    def _grammar_compiler(self) -> Compiler:
        with self._compiler_lock:
            if self._compiler is None:
                self._compiler = _grammar_compiler(self._config, self._tokenizer, self._info)
            return self._compiler


def _grammar_compiler(config: EngineConfig, tokenizer: Tokenizer | None, info: DeviceInfo) -> Compiler:
    """The grammar compiler of a model; making it takes a second for a large vocabulary.

    Raises InvalidRequest if the extra is missing or the model has no tokenizer.
    """
    from aioinfer.text.grammar import Compiler
    from aioinfer.text.guidance import GuidanceBackend, load_library

    load_library()
    if tokenizer is None:
        raise InvalidRequest("grammar", "the engine has no tokenizer, so there is no text to constrain")
    ends, max_depth = sorted(info.eos_token_ids), config.max_grammar_depth
    backend = GuidanceBackend(tokenizer.for_grammars(), info.vocab_size, ends, max_depth=max_depth)
    return Compiler(backend)


def _of_all(params: SamplingParams, refused: InvalidRequest) -> InvalidRequest:
    """The refusal of an output whose constraints allow no first token, by the names of all of them."""
    field, *others = params.constraints
    together = f"together with {', '.join(others)}: " if others else ""
    return InvalidRequest(field, f"{together}{refused.message}", code=refused.code)
