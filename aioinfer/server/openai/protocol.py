"""Protocol: the bytes of a body become one checked :class:`Call`.

A body is read once, by :func:`read`, as one of the models of :mod:`aioinfer.server.openai.fields` and of
other protocols. An error names the field of the body, and not the parameter that it stands for.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

from aioinfer.chat.answers import AnswerFormat, ChatFormat
from aioinfer.chat.bodies import Object, admit
from aioinfer.chat.door import ask
from aioinfer.chat.images import ImageReader, with_images
from aioinfer.chat.structured import format_grammar, parse_grammar
from aioinfer.chat.variables import Variables
from aioinfer.engine import Prompt
from aioinfer.errors import EngineClosed, InvalidRequest, renamed, renamed_field, shown
from aioinfer.params import SamplingParams
from aioinfer.request import SentOptions
from aioinfer.server.http.failures import Failure, Refused
from aioinfer.server.http.objects import json_object
from aioinfer.server.openai.diffusion import parse_diffusion
from aioinfer.server.openai.fields import (
    MAX_CHOICES,
    MAX_TOKENS,
    PARAMS,
    ChatBody,
    ChatTemplateFields,
    CompletionBody,
    Extensions,
    as_list,
)
from aioinfer.server.sessions.turns import Turn

if TYPE_CHECKING:
    from aioinfer.chat.results import ChatRequest
    from aioinfer.server.responses.stored import Draft, StoredResponses
    from aioinfer.server.sessions.table import Sessions

__all__ = [
    "OPTIONS",
    "Call",
    "Served",
    "chat_call",
    "chat_messages",
    "check_count",
    "format_beside",
    "model_not_found",
    "options_of",
    "parse_chat",
    "parse_completion",
    "read",
    "variables_of",
]

#: options of a request that are fields of a body under their own names
OPTIONS = tuple(SentOptions.__annotations__.keys() - {"adapter", "pooling", "queue_behind", "request_id"})
_ObjectT = TypeVar("_ObjectT", bound=Object)


@dataclass(frozen=True, slots=True)
class Served:
    """A server's offer: the model's name, its default parameters and the format of its chat answers; how
    many messages a chat may have; and what computes the answers. Of one request: its id; empty: a new one."""

    model: str
    defaults: SamplingParams
    chat: ChatFormat = field(default_factory=ChatFormat)
    max_messages: int = 4096
    fingerprint: str = ""
    #: options of :meth:`aioinfer.Engine.generate` that a request may lower; None: it may set any
    most: Mapping[str, float | None] = field(default_factory=dict)
    #: further names of the model
    aliases: frozenset[str] = frozenset()
    #: names of the adapters that are loaded
    adapters: frozenset[str] = frozenset()
    #: the engine serves, so that these are all names that there are
    ready: bool = True
    request_id: str = ""
    #: what is kept between requests, and the name of the key that the request was sent with
    stored: StoredResponses | None = None
    sessions: Sessions | None = None
    owner: str = ""
    #: those of the request
    images: ImageReader = field(default_factory=ImageReader)

    def adapter(self, wanted: Any) -> str | None:
        """The adapter of a call that asks for the model ``wanted``; None: the model alone."""
        adapters = self.adapters - self.aliases - {self.model}
        return wanted if isinstance(wanted, str) and wanted in adapters else None

    def name(self, wanted: Any) -> str:
        """The name in the answer to a call that asks for the model ``wanted``; None: any. Raises Refused;
        EngineClosed: it may be a name later."""
        if wanted is None or wanted == self.model:
            return self.model
        if isinstance(wanted, str) and (wanted in self.aliases or wanted in self.adapters):
            return wanted
        if not self.ready:
            raise EngineClosed("the engine does not serve, and its adapters are not known")
        raise model_not_found(self.model, wanted)


@dataclass(frozen=True, slots=True)
class Call:
    """One API call, checked. It has ``n`` choices per prompt."""

    id: str
    created: int
    model: str
    prompts: list[Prompt]
    params: SamplingParams
    n: int
    stream: bool
    include_usage: bool
    #: the events of a stream have the token counts of their choice so far
    continuous_usage: bool
    echo: bool
    chat_template_kwargs: Mapping[str, Any] | None
    #: arguments of :meth:`aioinfer.Engine.generate` for the queue and the prefix cache
    scheduling: Mapping[str, Any]
    #: parsers of the answers; None: answers are plain content
    answer: AnswerFormat | None = None
    #: choices include the denoising round in which each token was written
    step_map: bool = False
    fingerprint: str = ""
    #: choices have their token ids, and the answer those of the prompt
    token_ids: bool = False
    #: the answer has the logprobs of the prompt
    prompt_logprobs: bool = False
    #: logprobs name tokens by their ids
    tokens_by_id: bool = False
    #: arguments of :meth:`aioinfer.Engine.prompt`
    form: Mapping[str, Any] = field(default_factory=dict)
    #: argument of the engine -> field of the body that it comes from, where the names differ
    names: Mapping[str, str] = field(default_factory=dict)
    #: what the answers of other protocols take from the body
    repeated: Mapping[str, Any] = field(default_factory=dict)
    #: of a response that is to be stored
    draft: Draft | None = None
    #: of a chat: what it asks for
    asked: ChatRequest | None = None
    #: of a call that goes on with a session
    turn: Turn | None = None
    #: what follows the answer, if that is to be written between
    suffix: str = ""
    #: its choices are those of a beam search: arguments of :meth:`aioinfer.Engine.beam`
    beams: Mapping[str, Any] | None = None

    def named(self, error: BaseException) -> BaseException:
        """The error of this call with the names of the body's fields."""
        return renamed(error, self.names)

    def choices(self) -> list[tuple[Prompt, SamplingParams]]:
        """Prompt and parameters of every choice, by index."""
        return [
            (prompt, self.params.for_choice(number)) for prompt in self.prompts for number in range(self.n)
        ]


def parse_chat(raw: bytes, served: Served) -> Call:
    """A body of ``/v1/chat/completions``. Raises InvalidRequest, and Refused for another model."""
    body = read(ChatBody, raw, served)
    variables = variables_of(body, served.chat)
    for name in ("enable_thinking", "think", "thinking"):
        variables.think(getattr(body, name), name)
    top = body.top_logprobs
    if top is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs", "needs logprobs")
    names = {"logprobs": "logprobs" if top is None else "top_logprobs"}
    messages, turn = body.messages, None
    if body.session is None:
        messages = chat_messages(messages, served)
    else:
        turn = _turn(body, body.session, served, messages)
        before = len(turn.earlier)
        messages = turn.begin(chat_messages(messages, served, before))
        check_count("messages", messages, served)
        names |= {f"messages[{at}]": "session" for at in range(before)}
        names |= {f"messages[{at}]": f"messages[{at - before}]" for at in range(before, len(messages))}
    call = chat_call(
        body,
        served,
        "chatcmpl-",
        messages,
        variables,
        logprobs=(top or 0) if body.logprobs else None,
        response_format=body.response_format,
        names=names,
        tools=body.tools,
        tool_choice=body.tool_choice,
        parallel_tool_calls=body.parallel_tool_calls,
        separate=body.separate_reasoning,
        shown=body.include_reasoning,
    )
    return call if turn is None else replace(call, model=turn.served.model, turn=turn)


def _turn(body: ChatBody | CompletionBody, session: str, served: Served, messages: Any = None) -> Turn:
    """The turn that a body takes in a session. Raises InvalidRequest, and Refused: there is no such
    session."""
    if messages is not None and not (isinstance(messages, list) and messages):
        raise InvalidRequest("messages", "must be a list of messages, the new ones")
    assert served.sessions is not None
    turn = Turn(served.sessions.find(served.owner, session, "session"))
    turn.check(body, served.adapter(body.model))
    return turn


def variables_of(body: ChatTemplateFields, chat: ChatFormat) -> Variables:
    """The variables of the chat template that a body has. Raises InvalidRequest."""
    variables = Variables(chat, body.chat_template_kwargs)
    variables.put("documents", body.documents, "documents")
    variables.effort(body.reasoning_effort, "reasoning_effort")
    for name in ("add_generation_prompt", "continue_final_message"):
        variables.put(name, getattr(body, name), name)
    return variables


def chat_call(
    body: Extensions,
    served: Served,
    prefix: str,
    messages: Any,
    variables: Variables,
    *,
    logprobs: int | None = None,
    response_format: Any = None,
    names: Mapping[str, str] | None = None,
    **chat: Any,
) -> Call:
    """The call of a chat, from a body of any protocol.

    ``prefix`` begins the id of the answer. ``names``: path in OpenAI's form -> path in the body. ``chat``:
    further arguments of :func:`aioinfer.chat.door.ask`. Raises InvalidRequest of a field of the body.
    """
    names = {**(names or {}), **served.images.names}
    try:
        call = _call(prefix, body, served, [messages], logprobs, response_format, names)
        asked = ask(served.chat, messages, call.params, variables, call.names, **chat)
    except InvalidRequest as refused:
        raise renamed(refused, names) from None
    # Those that the chat had from here are fields of the body already.
    found = {name: source for name, source in asked.names.items() if names.get(name) != source}
    return replace(
        call,
        prompts=[asked.messages],
        params=asked.params,
        answer=asked.answer,
        asked=asked,
        chat_template_kwargs=asked.template_kwargs,
        names={**names, **{name: renamed_field(source, names) for name, source in found.items()}},
    )


def format_beside(tool_choice: Any, response_format: Any) -> Any:
    """The format of an answer in protocols where one that is a call may have a format, too, and has no text
    that it would be of. Raises InvalidRequest for one that is wrong."""
    if tool_choice in (None, "auto", "none"):
        return response_format
    format_grammar(response_format)
    return None


def parse_completion(raw: bytes, served: Served) -> Call:
    """A body of ``/v1/completions``; ``max_tokens`` is 16 by default.

    Raises InvalidRequest, and Refused for another model.
    """
    body = read(CompletionBody, raw, served)
    if body.best_of is not None and body.best_of != body.n:
        raise InvalidRequest("best_of", "must equal n", code="unsupported_parameter")
    if not MAX_TOKENS & body.model_fields_set:
        body.max_tokens = 16
    if body.logprobs is not None and body.echo and body.stream:
        raise InvalidRequest("logprobs", "of an echoed prompt cannot be streamed")
    prompts = as_list(body.prompt)
    call = _call("cmpl-", body, served, prompts, body.logprobs, body.response_format, {})
    if body.suffix:
        grammar = call.names.get("grammar", "grammar"), call.params.grammar
        for name, given in (("echo", body.echo), ("use_beam_search", body.use_beam_search), grammar):
            if given:
                raise InvalidRequest(name, "cannot be combined with suffix")
        call = replace(call, suffix=body.suffix, names={**call.names, "template": "suffix"})
    if body.session is None:
        return call
    if len(prompts) > 1:
        raise InvalidRequest("prompt", "must be one prompt, the new one, with a session")
    turn = _turn(body, body.session, served)
    return replace(call, model=turn.served.model, turn=turn)


def model_not_found(served: str, wanted: Any) -> Refused:
    """The failure of a request for another model than the served one."""
    message = f"the model {shown(wanted)} does not exist; this server has {served!r}"
    return Refused(Failure(404, "invalid_request_error", message, param="model", code="model_not_found"))


def check_count(name: str, items: Any, served: Served, *, before: int = 0) -> None:
    """Raise InvalidRequest of ``name`` for too many messages; ``before``: those that they follow."""
    count = before + (len(items) if isinstance(items, list) else 1)
    if count > served.max_messages:
        raise InvalidRequest(name, f"at most {served.max_messages} (max_messages), got {count}")


def chat_messages(given: Any, served: Served, before: int = 0) -> Any:
    """The field ``messages`` with its images read; what else it has is not checked. ``before``: messages that
    come before them. Raises InvalidRequest."""
    check_count("messages", given, served)
    return with_images(given, served.images, before)


def read(kind: type[_ObjectT], raw: bytes, served: Served) -> _ObjectT:
    """A body for the served model. Raises InvalidRequest for what ``json_object`` or ``kind`` refuses, and
    Refused for another model."""
    body = json_object(raw)
    served.name(body.get("model"))
    return admit(kind, body)


def _call(
    prefix: str,
    body: Extensions,
    served: Served,
    prompts: list[Prompt],
    logprobs: int | None,
    response_format: Any,
    names: Mapping[str, str],
) -> Call:
    """The fields that the bodies of all protocols have; those that only OpenAI's have are absent in
    others."""

    def given(name: str, default: Any = None) -> Any:
        return getattr(body, name, default)

    n, echo = given("n", 1), given("echo", False)
    if n * len(prompts) > MAX_CHOICES:
        raise InvalidRequest("n", f"prompts times n must be 1 to {MAX_CHOICES}")
    diffusion, step_map = parse_diffusion(given("diffusion"), served.defaults.diffusion)
    names = dict(names)
    beams = _beams(body)
    # Nothing that the model recommends for sampling.
    defaults = replace(served.defaults if beams is None else SamplingParams(), diffusion=diffusion)
    params = _sampling(body, defaults, logprobs, response_format, names)
    asked = {name: given(name) for name in ("add_special_tokens", "truncate_prompt_tokens")}
    form = {name: value for name, value in asked.items() if value is not None}
    if form.get("truncate_prompt_tokens") == -1:
        form["truncate_prompt_tokens"] = -max(1, params.max_tokens or 1)
    if "truncate_prompt_tokens" in form and echo:
        raise InvalidRequest("truncate_prompt_tokens", "cannot be combined with echo")
    names |= {"adapter": "model", "width": "n", "logits_processors": "use_beam_search"}
    names["algorithm"] = "diffusion.algorithm"
    if body.routing_key is None:
        names["routing_key"] = "prompt_cache_key"
    options = given("stream_options")
    return Call(
        id=f"{prefix}{body.request_id or served.request_id or uuid.uuid4().hex}",
        created=int(time.time()),
        model=served.name(body.model),
        prompts=prompts,
        params=params,
        n=n,
        stream=body.stream,
        include_usage=getattr(options, "include_usage", False),
        continuous_usage=getattr(options, "continuous_usage_stats", False),
        echo=echo,
        chat_template_kwargs=None,
        scheduling={
            "routing_key": given("prompt_cache_key"),
            "adapter": served.adapter(body.model),
            **options_of(body, served),
        },
        step_map=step_map,
        fingerprint=served.fingerprint,
        token_ids=given("return_token_ids", False),
        prompt_logprobs=given("prompt_logprobs") is not None,
        tokens_by_id=given("return_tokens_as_token_ids", False),
        form=form,
        names=names,
        beams=beams,
    )


def _beams(body: Extensions) -> dict[str, Any] | None:
    """How a body has beams searched, if it has. Raises InvalidRequest."""
    given = {name: getattr(body, name, None) for name in ("length_penalty", "early_stopping")}
    if not getattr(body, "use_beam_search", False):
        for name in given.keys() & body.model_fields_set:
            if given[name] != type(body).model_fields[name].default:
                raise InvalidRequest(name, "needs use_beam_search", code="unsupported_parameter")
        return None
    return given


def options_of(body: Object, served: Served) -> dict[str, Any]:
    """The options of a body. Raises InvalidRequest for more than the server's own, where these bound them."""
    found: dict[str, Any] = {}
    for name in OPTIONS:
        value, bound = getattr(body, name, None), served.most.get(name)
        if value is None:
            continue
        if bound is not None and value > bound:
            raise InvalidRequest(name, f"may be {bound:g} at most, as the server is configured")
        found[name] = value
    return found


@lru_cache
def _params_of(kind: Any) -> list[tuple[str, str]]:
    """The fields of a body that are parameters, and these. Their own names come first."""
    params = [(name, kind.aliases.get(name, name)) for name in kind.model_fields]
    return sorted([each for each in params if each[1] in PARAMS], key=lambda each: each[0] != each[1])


def _sampling(
    body: Extensions,
    defaults: SamplingParams,
    logprobs: int | None,
    response_format: Any,
    names: dict[str, str],
) -> SamplingParams:
    """The model's defaults, overridden by the fields of the body. Enters the fields into ``names``, by
    parameter."""
    values = {name: getattr(defaults, name) for name in SamplingParams.__dataclass_fields__}
    entered: dict[str, str] = {}
    for name, param in _params_of(type(body)):
        if name not in body.model_fields_set:
            continue
        value = getattr(body, name)
        if param in entered and values[param] != value:
            raise InvalidRequest(name, f"differs from {entered[param]}")
        values[param], entered[param] = value, name
    if body.prediction is not None:
        values["prediction"] = body.prediction.text
    if not isinstance(values["stop_token_ids"], (list, tuple)):
        raise InvalidRequest("stop_token_ids", "must be a list of token ids")
    grammar = parse_grammar(body, response_format)
    if grammar is not None:
        entered["grammar"], values["grammar"] = grammar
    values["logprobs"] = logprobs
    if values["prompt_logprobs"] is not None and body.stream:
        raise InvalidRequest("prompt_logprobs", "cannot be streamed")
    if logprobs is not None and getattr(body, "echo", False):
        if values["prompt_logprobs"] not in (None, logprobs):
            raise InvalidRequest("prompt_logprobs", "differs from the logprobs of the echoed prompt")
        values["prompt_logprobs"], entered["prompt_logprobs"] = logprobs, "echo"
    names |= entered
    try:
        return SamplingParams(**values)
    except InvalidRequest as refused:
        raise renamed(refused, names) from None
