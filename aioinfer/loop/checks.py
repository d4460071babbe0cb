"""Checks: which parameters of a request a model can serve."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from aioinfer.config import EngineConfig
from aioinfer.errors import InvalidRequest
from aioinfer.inputs import check_range
from aioinfer.loop.generation import generation
from aioinfer.loop.options import too_long
from aioinfer.params import Grammar, SamplingParams
from aioinfer.pooling import Pooling
from aioinfer.text.reader import AnswerReader

if TYPE_CHECKING:
    from aioinfer.execution.device import DeviceInfo
    from aioinfer.text.tokenizer import Tokenizer

__all__ = ["Checks"]

#: of the hidden states of all tokens of a prompt: 256 MiB
_MOST_FLOATS = 1 << 26


class Checks:
    """Checks parameters against one model and config."""

    __slots__ = ("_config", "_generation", "_has_text", "_info")

    def __init__(self, config: EngineConfig, info: DeviceInfo, tokenizer: Tokenizer | None) -> None:
        self._config = config
        self._info = info
        self._has_text = tokenizer is not None
        self._generation = generation(
            info.block_size, edits=info.edit_token_ids is not None, canvas=info.canvas
        )

    def stop_ids(self, params: SamplingParams) -> frozenset[int]:
        """Tokens that end an output."""
        ends = frozenset() if params.ignore_eos else self._info.eos_token_ids
        return ends.union(params.stop_token_ids) if params.stop_token_ids else ends

    def check(self, params: SamplingParams, pooling: Pooling | None = None, least_tokens: int = 0) -> None:
        """Raise InvalidRequest for parameters that this model cannot serve, for constraints that allow no
        token, as far as that needs no mask, and for a prompt that has ``least_tokens`` or more and leaves no
        room for one."""
        if least_tokens + (params.max_tokens != 0) > self._info.max_model_len:
            raise too_long(self._info, f"the prompt has at least {least_tokens} tokens")
        if pooling is not None:
            self._check_pooling(pooling)
        elif not self._info.generates:
            raise InvalidRequest("model", "has no head for tokens: it gives embeddings or scores only")
        if params.logprob_start_len and params.prompt_logprobs is None:
            raise InvalidRequest("logprob_start_len", "has no effect without prompt_logprobs")
        self._check_stops(params)
        if params.stop_format is not None:
            AnswerReader.named(params.stop_format)
        vocab_size = self._info.vocab_size
        check_range("stop_token_ids", params.stop_token_ids, vocab_size)
        check_range("allowed_token_ids", params.allowed_token_ids or (), vocab_size)
        check_range("logit_bias", tuple(params.logit_bias or ()), vocab_size)
        if isinstance(params.prediction, str):
            if not self._has_text:
                raise InvalidRequest("prediction", "the model has no tokenizer: give token ids")
        elif params.prediction is not None:
            check_range("prediction", params.prediction[: self._info.max_model_len], vocab_size)
        for word in params.bad_words:
            if not isinstance(word, str):
                check_range("bad_words", word, vocab_size)
        if not self._has_text and (params.stop or params.stop_regex):
            field = "stop" if params.stop else "stop_regex"
            raise InvalidRequest(field, "the engine has no tokenizer, so there is no text to match")
        for field in ("min_tokens", "ignore_eos"):
            if params.grammar is not None and getattr(params, field):
                raise InvalidRequest(field, "cannot be combined with a grammar, which says when to end")
        self._generation.check(params)
        if params.template is not None:
            self._check_template(params, params.template, least_tokens)
        if params.structure is not None:
            self._check_size(params.structure)
        mask, allowed = self._info.mask_token_id, params.allowed_token_ids
        if allowed is not None and mask is not None and set(allowed) == {mask}:
            raise InvalidRequest("allowed_token_ids", "allows the mask only, which is never written")
        if not params.min_tokens:
            return
        ends = self.stop_ids(params)
        never = ends if mask is None else ends | {mask}
        if allowed is not None and never.issuperset(allowed):
            raise InvalidRequest(
                "allowed_token_ids",
                f"are end tokens or stop_token_ids, which min_tokens {params.min_tokens} excludes at first",
            )
        if len(never) >= self._info.vocab_size:
            raise InvalidRequest(
                "min_tokens", "excludes every token: stop_token_ids has the whole vocabulary"
            )

    def check_length(
        self, params: SamplingParams, prompt_tokens: int, pooling: Pooling | None = None
    ) -> None:
        """Raise InvalidRequest if there is no room for a token, or for ``min_tokens``, after the prompt, or
        if the hidden states of all its tokens are too many. Where nothing is generated, none is needed."""
        longest = self._info.max_model_len
        floats = prompt_tokens * (self._info.hidden_size or 0)
        if pooling is not None and pooling.kind == "tokens" and floats > _MOST_FLOATS:
            raise InvalidRequest(
                "pooling",
                f"the hidden states of {prompt_tokens} tokens are {floats} numbers: {_MOST_FLOATS} at most",
            )
        room = self._info.longest(prompt_tokens) - prompt_tokens
        if prompt_tokens > longest or (room < 1 and params.max_tokens != 0):
            raise too_long(self._info, f"the prompt has {prompt_tokens} tokens")
        if params.template is not None:
            self._check_template_length(params.template, prompt_tokens)
        if prompt_tokens + params.min_tokens > longest:
            raise InvalidRequest(
                "min_tokens",
                f"{params.min_tokens} behind {prompt_tokens} tokens exceed this model's maximum context "
                f"length of {longest} tokens",
                code="context_length_exceeded",
            )

    def _check_template(self, params: SamplingParams, template: Sequence[int | None], prompt: int) -> None:
        """Raise InvalidRequest for a template of token ids that cannot be filled behind so many tokens."""
        ids = [token for token in template if token is not None]
        check_range("template", ids, self._info.vocab_size)
        if self._info.mask_token_id in ids:
            message = f"has the mask's token {self._info.mask_token_id}: None stands for a hole"
            raise InvalidRequest("template", message)
        if ends := self.stop_ids(params).intersection(ids):
            raise InvalidRequest("template", f"has token {min(ends)}, which ends the output")
        for field in ("grammar", "bad_words", "stop", "stop_regex"):
            if getattr(params, field):
                raise InvalidRequest(field, "cannot be combined with a template of token ids")
        self._check_template_length(template, prompt)

    def _check_template_length(self, template: Sequence[int | None], prompt: int) -> None:
        longest = self._info.max_model_len
        if prompt + len(template) > longest:
            raise InvalidRequest(
                "template",
                f"{len(template)} tokens behind {prompt} exceed this model's context of {longest} tokens",
                code="context_length_exceeded",
            )

    def _check_pooling(self, pooling: Pooling) -> None:
        """Raise InvalidRequest for what the model has not."""
        info = self._info
        if info.hidden_size is None:
            why = "writes blocks" if info.block_size is not None else "is computed by code that shows none"
            raise InvalidRequest("model", f"gives no hidden states to embed or score with: it {why}")
        if pooling.kind == "classes" and not info.num_labels:
            raise InvalidRequest("pooling", "the model has no head that classifies")
        if pooling.kind == "cls" and not info.whole_prompts:
            raise InvalidRequest("pooling", "the first token sees no other one in this model")
        if pooling.kind == "choices" and not info.generates:
            raise InvalidRequest("pooling", "the model has no head for tokens")
        check_range("pooling", pooling.token_ids, info.vocab_size)

    def _check_stops(self, params: SamplingParams) -> None:
        """Raise InvalidRequest for more stops than the config allows."""
        config, length = self._config, sum(map(len, params.stop))
        for field, given, setting in (
            ("stop", len(params.stop), "max_stop_strings"),
            ("stop", length, "max_stop_characters"),
            ("stop_regex", len(params.stop_regex), "max_stop_patterns"),
        ):
            most: int = getattr(config, setting)
            if given > most:
                raise InvalidRequest(field, f"{given} exceeds the limit of {most} ({setting})")

    def _check_size(self, grammar: Grammar) -> None:
        text, most = grammar.text, self._config.max_grammar_bytes
        if 4 * len(text) > most and (size := len(text.encode(errors="replace"))) > most:
            raise InvalidRequest("grammar", f"has {size} bytes, and max_grammar_bytes is {most}")
