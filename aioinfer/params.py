"""Parameters of one generation."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from typing import Any

from aioinfer import plugins
from aioinfer.bounds import BOUNDS, LONGEST_END, MOST, MOST_PROCESSORS, SEED_LIMIT
from aioinfer.errors import InvalidRequest, shown
from aioinfer.inputs import entries, keep_plain, plain
from aioinfer.steering.processors import LogitsProcessor
from aioinfer.text.grammar_spec import Grammar, Schema

__all__ = ["DiffusionParams", "Grammar", "SamplingParams", "Schema", "inherited"]

_SURROGATE = re.compile("[\ud800-\udfff]")
#: characters or ids of a prediction that are kept
_LONGEST_PREDICTION = 1 << 22


class _OpenFloat(float):
    """The default of a field for which a model may recommend another value.

    A value of this type was not set. It equals the plain float; copies, ``dataclasses.replace`` and pickling
    keep its type.
    """

    __slots__ = ()


class _OpenInt(int):
    """The default of an integer field for which a model may recommend another value."""

    __slots__ = ()


class _OpenText(str):
    """The default of a field of text for which the engine has another value."""

    __slots__ = ()


class _FrozenBias(dict[int, float]):
    """A dict that cannot be changed."""

    __slots__ = ()

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise TypeError("logit_bias of SamplingParams cannot be changed: make a new mapping")

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def __reduce__(self) -> Any:
        return _FrozenBias, (dict(self),)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling, length and stopping of one request; names as in OpenAI's API and vLLM.

    Every field is checked on construction; :class:`~aioinfer.errors.InvalidRequest` names an invalid one.
    Lists and mappings are copied; an instance never changes. Temperature, top_p, top_k, min_p and
    repetition_penalty, where they are not set, become those that the model's ``generation_config.json``
    recommends when a request is made; instances that differ only in having a default set compare equal.

    Attributes:
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_p: keep the smallest set of tokens whose probability reaches this mass, in (0, 1].
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        min_p: keep tokens with at least this fraction of the maximum probability, in [0, 1].
        top_n_sigma: keep tokens whose logit is at most this many standard deviations of the logits below the
            maximum, in [0, 100]; 0 keeps all (Tang et al., arXiv 2411.07641).
        seed: seed of the sampling noise; the same prompt, parameters and seed give the same tokens in any
            batch. ``None`` draws a seed from the engine's seed.
        max_tokens: at most this many new tokens; ``None``: up to the model's context length; 0: nothing is
            sampled, the prompt is computed only, with ``prompt_logprobs`` to be scored.
        min_tokens: end-of-sequence and stop tokens cannot be sampled before this many new tokens, and stop
            strings and patterns that these complete are text like any other.
        stop: strings that end the output; its text ends before the first match.
        stop_regex: regular expressions (of the ``regex`` package) that end the output like ``stop``; the
            text so far is searched after every token, a match has at most 512 characters, and a request
            fails if its patterns need more than 5 ms of CPU time per token.
        stop_token_ids: token ids that end the output, in addition to the model's end tokens.
        ignore_eos: the model's end tokens do not end the output. Not with a grammar, which says when to end.
        repetition_penalty: in [0.01, 100]; above 1 discourages tokens seen in prompt or output (CTRL, 2019).
        presence_penalty: subtracted once from tokens seen in the output, in [-2, 2].
        frequency_penalty: subtracted per occurrence in the output, in [-2, 2].
        skip_special_tokens: omit special tokens from the text.
        logit_bias: token id -> value in [-100, 100] added to its logit, before all other processing.
        allowed_token_ids: only these tokens can be sampled, end tokens included; ``None`` allows all.
        logprobs: report the logprob of each token and of this many most likely ones (0 to 20), as they were
            when it was sampled, or written to a block.
        prompt_logprobs: the same for the tokens of the prompt. What is scored is not read from the prefix
            cache.
        logprob_start_len: index of the first token of the prompt that ``prompt_logprobs`` are wanted of;
            has no effect without them, and is refused. What lies before it can come from the prefix cache.
        grammar: constraint on the output; needs the extra ``aioinfer[structured]``. A mapping is a JSON
            schema, and a class with ``model_json_schema`` (pydantic's) stands for its schema.
        bad_words: excluded from the output: texts, each as tokenized at the start of an output and after a
            space, or sequences of token ids. Other tokenizations of a text pass.
        diffusion: how blocks are denoised; for diffusion models, which refuse ``logits_processors``,
            ``thinking_budget`` and ``prompt_logprobs``, and count for penalties what is known of a block at
            the start of a round.
        logits_processors: functions that decide at each position how the output goes on, in this order:
            :mod:`aioinfer.steering.processors`. They are called in this process only.
        thinking_budget: at this many tokens of thought, of all thoughts of the output together, the thought
            is closed with the tag of the model's format of reasoning (``EngineConfig.reasoning_parser``); 0:
            at once. ``None``: no limit.
        thinking_grace: up to this many further tokens of thought, until one that ends a line or a sentence.
        thinking_end: text that is written before the tag; with the tag in it, in its place.
        speculate: False: nothing is drafted for this request. The output is the same either way.
        prediction: text or token ids that the output is expected to be much like. It changes nothing but the
            speed: what agrees with it is generated several tokens at a time. What exceeds the context is cut.
        include_stop: keep the stop string, the match of a stop pattern or the text of the stop token in the
            output text.
        template: of a diffusion model, the token ids that the output has at its first positions, None where
            the model writes: a hole. They are known from the first forward on. With as many ``max_tokens``
            nothing is written behind them; with fewer, those behind the end are in view and no output.
        stop_format: names of the formats of calls and of reasoning, in which ``stop`` and ``stop_regex`` are
            not looked for, and what stands for the end of the prompt, also for ``thinking_budget``, each may
            be None; then the names of the functions. Chats set it.
    """

    temperature: float = _OpenFloat(1.0)
    top_p: float = _OpenFloat(1.0)
    top_k: int = _OpenInt(0)
    min_p: float = _OpenFloat(0.0)
    top_n_sigma: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: Sequence[str] | str = ()
    stop_regex: Sequence[str] | str = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    repetition_penalty: float = _OpenFloat(1.0)
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    skip_special_tokens: bool = True
    include_stop: bool = False
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_start_len: int = 0
    grammar: Grammar | Schema | None = None
    bad_words: Sequence[str | Sequence[int]] = ()
    diffusion: DiffusionParams | None = None
    logits_processors: Sequence[LogitsProcessor] = ()
    thinking_budget: int | None = None
    thinking_grace: int = 0
    thinking_end: str = ""
    speculate: bool = True
    prediction: str | Sequence[int] | None = None
    template: Sequence[int | None] | None = None
    stop_format: Sequence[str | None] | None = None

    def __post_init__(self) -> None:
        keep_plain(self, but=_OPEN)
        for name in _NUMBERS:
            value = getattr(self, name)
            if value is not None or name not in _OPTIONAL:
                _in_bounds(name, value)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest("min_tokens", f"{self.min_tokens} exceeds max_tokens {self.max_tokens}")
        for name in ("ignore_eos", "skip_special_tokens", "include_stop", "speculate"):
            _truth(name, getattr(self, name))
        if self.logit_bias is not None:
            # An empty mapping is no bias, also for models that do not support biases.
            object.__setattr__(self, "logit_bias", _logit_bias(self.logit_bias) or None)
        if self.allowed_token_ids is not None:
            allowed = _token_ids("allowed_token_ids", self.allowed_token_ids)
            if not allowed:
                raise InvalidRequest("allowed_token_ids", "allows no token")
            object.__setattr__(self, "allowed_token_ids", allowed)
        object.__setattr__(self, "bad_words", _bad_words(self.bad_words))
        object.__setattr__(self, "logits_processors", _processors(self.logits_processors))
        if self.thinking_end != "":
            _text("thinking_end", self.thinking_end, LONGEST_END)
        if self.grammar is not None and not isinstance(self.grammar, Grammar):
            if isinstance(self.grammar, str):
                raise InvalidRequest("grammar", "must be a Grammar or a JSON schema, not text")
            object.__setattr__(self, "grammar", Grammar("json_schema", self.grammar))
        if not isinstance(self.diffusion, (DiffusionParams, type(None))):
            raise InvalidRequest("diffusion", f"must be DiffusionParams, got {type(self.diffusion).__name__}")
        if self.prediction is not None:
            object.__setattr__(self, "prediction", _prediction(self.prediction))
        if self.template is not None:
            object.__setattr__(self, "template", _template(self.template))
        for name in ("stop", "stop_regex"):
            object.__setattr__(self, name, _texts(name, getattr(self, name)))
        _check_patterns(self.stop_regex)
        if self.stop_format is not None:
            object.__setattr__(self, "stop_format", _format(self.stop_format))
        object.__setattr__(self, "stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))

    def inherit(self, defaults: SamplingParams) -> SamplingParams:
        """These parameters, with the values that ``defaults`` sets for fields that are not set here."""
        values = {
            name: getattr(defaults, name)
            for name in _INHERITED
            if type(getattr(self, name)) in _OPEN and type(getattr(defaults, name)) not in _OPEN
        }
        if defaults.diffusion is not None:
            values["diffusion"] = (self.diffusion or DiffusionParams()).inherit(defaults.diffusion)
        return self.changed(**values) if values else self

    def changed(self, **values: Any) -> SamplingParams:
        """A copy with other values, which must be valid: they are not checked."""
        # Forks make many: copy.copy takes four times as long.
        other = object.__new__(type(self))
        for assign, value in zip(_ASSIGN, _VALUES(self), strict=True):
            assign(other, value)
        for name, value in values.items():
            object.__setattr__(other, name, value)
        return other

    def for_choice(self, number: int) -> SamplingParams:
        """The parameters of choice ``number`` of several for one prompt: with a seed of its own, if there is
        one. Choice 0 is that of a request for one."""
        if number == 0 or self.seed is None:
            return self
        return self.changed(seed=(self.seed + number) % SEED_LIMIT)

    @property
    def greedy(self) -> bool:
        """The most likely token is always sampled."""
        return self.temperature == 0.0

    @property
    def further_filters(self) -> dict[str, float]:
        """Filters of :mod:`aioinfer.sampling.further_filters` that are not neutral, by name."""
        defaults = type(self).__dataclass_fields__
        return {
            name: float(getattr(self, name))
            for name in plugins.names(plugins.FILTERS)
            if getattr(self, name) != defaults[name].default
        }

    @property
    def masked(self) -> bool:
        """The tokens that may come next depend on the tokens before them."""
        return self.grammar is not None or bool(self.bad_words)

    @property
    def worked_out(self) -> bool:
        """A grammar, a prediction in text, or what closes a thought has to be worked out on a thread before
        the first token."""
        predicted = self.speculate and type(self.prediction) is str
        return self.masked or predicted or self.thinking_budget is not None

    @property
    def structure(self) -> Grammar | None:
        """``grammar``, which is stored as a Grammar."""
        assert self.grammar is None or isinstance(self.grammar, Grammar)
        return self.grammar

    @property
    def constraints(self) -> tuple[str, ...]:
        """The names of the fields that exclude tokens."""
        found = [name for name in ("grammar", "bad_words", "min_tokens") if getattr(self, name)]
        return (*found, *(["allowed_token_ids"] * (self.allowed_token_ids is not None)))

    @property
    def penalised(self) -> bool:
        """At least one of the three penalties changes the logits."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


def _processors(given: Any) -> tuple[LogitsProcessor, ...]:
    if callable(given) or not isinstance(given, Sequence) or not all(map(callable, given)):
        raise InvalidRequest("logits_processors", f"must be a list of functions, got {shown(given)}")
    if len(given) > MOST_PROCESSORS:
        raise InvalidRequest("logits_processors", f"are {len(given)}: {MOST_PROCESSORS} at most")
    return tuple(given)


def _format(given: Any) -> tuple[str | None, ...]:
    names = tuple(map(plain, given)) if isinstance(given, (list, tuple)) else ()
    known = [type(name) is str or (name is None and at < 3) for at, name in enumerate(names)]
    if len(names) < 3 or not all(known):
        raise InvalidRequest("stop_format", "must be three names or None, and names of functions")
    return names


#: of all fields: what sets one, and what reads all
_ASSIGN = [vars(SamplingParams)[each.name].__set__ for each in fields(SamplingParams)]
_VALUES = attrgetter(*(each.name for each in fields(SamplingParams)))
_OPEN = (_OpenFloat, _OpenInt)
_NUMBERS = tuple(name for name in BOUNDS if name in SamplingParams.__dataclass_fields__)
_OPTIONAL = frozenset(name for name in _NUMBERS if SamplingParams.__dataclass_fields__[name].default is None)
_INHERITED = tuple(each.name for each in fields(SamplingParams) if type(each.default) in _OPEN)


def inherited(params: SamplingParams | None, defaults: SamplingParams) -> SamplingParams:
    """The parameters of a request to a model with these defaults. Raises InvalidRequest."""
    if params is None:
        return defaults
    if not isinstance(params, SamplingParams):
        raise InvalidRequest("params", f"must be SamplingParams, got {type(params).__name__}")
    return params.inherit(defaults)


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffusionParams:
    """Denoising of the blocks of one request, for diffusion language models.

    ``None`` is the algorithm's default; its class in :mod:`aioinfer.diffusion.algorithms` documents its
    parameters and their defaults. Temperature, filters and seed are those of SamplingParams. Every field is
    checked on construction; :class:`~aioinfer.errors.InvalidRequest` names an invalid one.

    Attributes:
        algorithm: ``low_confidence``, ``joint_threshold``, ``joint_threshold_indel``, ``static_steps``,
            ``factor`` or ``entropy_bound``, and for canvases ``renoise``; not set: the engine's
            ``diffusion_algorithm``, or what the model has.
        threshold: tokens proposed with more confidence than this are written in the same round, in [0, 1].
            At 1, each round writes one token. This one, ``steps`` and ``edit_threshold``, not set: the
            engine's ``diffusion_threshold`` and so on.
        steps: maximum forwards to fill a block: if necessary, a round writes more tokens than the algorithm
            selects. ``None``: no limit.
        edit_threshold: a written token is replaced by one proposed with more confidence than this, in
            [0, 1].
        max_post_edits: maximum forwards that edit a full block.
        penalty: subtracted at each position from the logit of the previous position's token, in [0, 100].
        factor: Fast-dLLM's bound on the tokens written in one round, in (0, 1000]; a larger factor allows
            more of them, and 1 is the bound of the paper.
        entropy_bound: maximum sum of the entropies of the tokens written in one round, its last token
            excluded, in nats, in [0, 1000].
        t_min: temperature of the last of ``steps`` rounds of ``renoise``, in (0, 100].
        t_max: what the temperature falls from by equal steps, in (0, 100].
        stability_threshold: rounds in a row after which the likeliest tokens have to be the same, for a
            canvas to end.
        confidence_threshold: mean entropy of the positions below which a canvas ends, in nats, in [0, 1000].
        draft: chunks of the stream include the known tokens of the unfinished block.
    """

    algorithm: str = _OpenText("low_confidence")
    threshold: float | None = None
    steps: int | None = None
    edit_threshold: float | None = None
    max_post_edits: int | None = None
    penalty: float | None = None
    factor: float | None = None
    entropy_bound: float | None = None
    t_min: float | None = None
    t_max: float | None = None
    stability_threshold: int | None = None
    confidence_threshold: float | None = None
    draft: bool = False

    def __post_init__(self) -> None:
        keep_plain(self, but=(_OpenText,))
        if type(self.algorithm) not in (str, _OpenText) or self.algorithm not in plugins.names(
            plugins.ALGORITHMS
        ):
            known = ", ".join(plugins.names(plugins.ALGORITHMS))
            raise InvalidRequest("algorithm", f"must be one of {known}, got {shown(self.algorithm)}")
        given = self.given()
        for name in BOUNDS:
            if name in given:
                _in_bounds(name, getattr(self, name))
        _truth("draft", self.draft)

    def inherit(self, defaults: DiffusionParams) -> DiffusionParams:
        """These parameters with the algorithm of ``defaults`` if none is set here, and, for the same
        algorithm, with its parameters where none are set here."""
        algorithm = defaults.algorithm if type(self.algorithm) is _OpenText else self.algorithm
        if algorithm != defaults.algorithm:
            return self
        values = {name: getattr(defaults, name) for name in defaults.given() - self.given()}
        return replace(self, algorithm=algorithm, **values)

    def given(self) -> set[str]:
        """The names of the parameters that are not None, except ``algorithm`` and ``draft``."""
        return {each.name for each in fields(self) if getattr(self, each.name) is not None} - {
            "algorithm",
            "draft",
        }


# The checks below take plain values.


def _in_bounds(name: str, value: Any, field: str = "") -> None:
    low, high, whole, low_open = BOUNDS[name]
    if type(value) not in ((int, _OpenInt) if whole else (int, float, *_OPEN)):
        kind = "an integer" if whole else "a number"
        raise InvalidRequest(field or name, f"must be {kind}, got {shown(value)}")
    # This form also refuses NaN, and accepts integers that no float can hold.
    if not low <= value <= high or (low_open and value == low):
        span = f"[{low}, {high}]" if whole else f"{'(' if low_open else '['}{low:g}, {high:g}]"
        raise InvalidRequest(field or name, f"must be in {span}, got {shown(value)}")


def _truth(field: str, value: Any) -> None:
    if type(value) is not bool:
        raise InvalidRequest(field, f"must be true or false, got {shown(value)}")


def _texts(field: str, given: Any) -> tuple[str, ...]:
    """One non-empty string or several, as a tuple."""
    most, longest = MOST[field]
    strings = (given,) if type(given) is str else entries(field, given, most, "strings")
    for string in strings:
        _text(field, string, longest)
    return strings


def _text(field: str, string: Any, longest: int) -> None:
    if type(string) is not str or not string:
        raise InvalidRequest(field, f"must be non-empty strings, got {shown(string)}")
    if len(string) > longest:
        raise InvalidRequest(field, f"strings may have at most {longest} characters, got {len(string)}")
    if not string.isascii() and _SURROGATE.search(string):
        raise InvalidRequest(field, "has an unpaired surrogate, which no text has")


def _check_patterns(patterns: Sequence[str]) -> None:
    if not patterns:
        return
    from aioinfer.text.costs import MOST_NODES, written_out
    from aioinfer.text.stop_regex import check_pattern  # loads the regex library

    if len(patterns) > 1 and sum(map(written_out, patterns)) > MOST_NODES:
        raise InvalidRequest("stop_regex", f"have more than {MOST_NODES} nodes with their repeats unrolled")
    for pattern in patterns:
        try:
            check_pattern(pattern)
        except ValueError as error:
            raise InvalidRequest("stop_regex", f"{shown(pattern)} {error}") from None


def _token_ids(field: str, ids: Any, most: int | None = None) -> tuple[int, ...]:
    tokens = entries(field, ids, MOST[field][0] if most is None else most, "token ids")
    low, high, *_ = BOUNDS["token_id"]
    if set(map(type, tokens)) - {int} or (tokens and not low <= min(tokens) <= max(tokens) <= high):
        for token in tokens:
            _in_bounds("token_id", token, field)
    return tokens


def _prediction(given: Any) -> str | tuple[int, ...] | None:
    """The part of a prediction that a context can hold; None for an empty one."""
    if type(given) is str:
        text: str = given[:_LONGEST_PREDICTION]
        if not text.isascii() and _SURROGATE.search(text):
            raise InvalidRequest("prediction", "has an unpaired surrogate, which no text has")
        return text or None
    refused = isinstance(given, (str, bytes, bytearray, memoryview, Mapping)) or not hasattr(given, "__len__")
    try:
        ids = () if refused else given[:_LONGEST_PREDICTION]
    except TypeError:  # a set, for example
        refused = True
    if refused:
        raise InvalidRequest("prediction", f"must be text or a list of token ids, got {shown(given)}")
    return _token_ids("prediction", ids, _LONGEST_PREDICTION) or None


def _template(given: Any) -> tuple[int | None, ...]:
    found = entries("template", given, _LONGEST_PREDICTION, "token ids and None")
    _token_ids("template", [token for token in found if token is not None], _LONGEST_PREDICTION)
    if None not in found:
        raise InvalidRequest("template", "has no hole: None stands for a token that the model writes")
    return found


def _bad_words(words: Any) -> tuple[str | tuple[int, ...], ...]:
    found: list[str | tuple[int, ...]] = []
    most, longest = MOST["bad_words"]
    for word in entries("bad_words", words, most, "texts or lists of token ids"):
        if type(word) is str:
            _text("bad_words", word, longest)
            found.append(word)
            continue
        ids = () if word is None else _token_ids("bad_words", word, longest)
        if not ids:
            raise InvalidRequest("bad_words", f"must be texts or lists of token ids, got {shown(word)}")
        found.append(ids)
    return tuple(found)


def _logit_bias(given: Any) -> dict[int, float]:
    if not isinstance(given, Mapping):
        raise InvalidRequest("logit_bias", f"must map token ids to numbers, got {type(given).__name__}")
    most, _ = MOST["logit_bias"]
    if len(given) > most:
        raise InvalidRequest("logit_bias", f"at most {most} ids, got {len(given)}")
    bias = [(plain(token), plain(value)) for token, value in dict(given).items()]
    for token, value in bias:
        _in_bounds("token_id", token, "logit_bias")
        _in_bounds("bias", value, "logit_bias")
    return _FrozenBias((token, float(value)) for token, value in bias)
