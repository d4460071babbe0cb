"""Tracing: a span of OpenTelemetry per request, made at its end from the times that it has anyway.

Attributes are those of the semantic conventions for generative AI, which are in development; prompts and
outputs are never among them. A span is a child of what was current where the request was made.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from aioinfer.errors import ConfigError
from aioinfer.observe.observers import Observer

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Tracer as OtelTracer

    from aioinfer.request import Output

__all__ = ["Tracer", "require_api", "within"]

#: the key of a call's id in a context, and the attribute that has it
_REQUEST_ID = "aioinfer.request.id"
_ATTRIBUTE = str | bool | int | float | list[str]


def require_api() -> None:
    """Raises ConfigError unless ``opentelemetry-api`` is installed."""
    try:
        import opentelemetry.trace  # noqa: F401
    except ImportError as error:
        raise ConfigError("tracing needs the extra: pip install 'aioinfer[tracing]'") from error


@contextmanager
def within(headers: Mapping[str, str], request_id: str) -> Iterator[None]:
    """Have requests made in the block belong to the trace that the headers of a call name (``traceparent``),
    or to the span that is current already, if there is one. Their spans have the id of the call."""
    from opentelemetry import context, propagate, trace

    inside = trace.get_current_span().get_span_context().is_valid
    found = context.get_current() if inside else propagate.extract(headers)
    token = context.attach(context.set_value(_REQUEST_ID, request_id, found))
    try:
        yield
    finally:
        context.detach(token)


class Tracer(Observer):
    """Makes the spans of one engine with the provider that the application has set, if any."""

    def __init__(self, model: str, version: str, clock: Callable[[], float]) -> None:
        """``clock`` is that of the requests' times."""
        from opentelemetry import trace

        self._model = model
        self._clock = clock
        self._tracer: OtelTracer = trace.get_tracer("aioinfer", version)
        #: of the open requests: what was current where they were made, and whether they are chats
        self._opened: dict[Output, tuple[Context, bool]] = {}

    def opened(self, output: Output, *, chat: bool) -> None:
        from opentelemetry.context import get_current

        self._opened[output] = get_current(), chat

    def ended(self, output: Output) -> None:
        from opentelemetry.context import get_value
        from opentelemetry.trace import SpanKind, StatusCode, get_current_span

        context, chat = self._opened.pop(output, (None, False))
        if context is None:
            return
        # The engine's clock has another origin than that of spans.
        now, epoch = self._clock(), time.time_ns()

        def stamp(at: float) -> int:
            return epoch - round(1e9 * (now - at))

        operation = "chat" if chat else "text_completion"
        remote = get_current_span(context).get_span_context().is_remote
        span = self._tracer.start_span(
            f"{operation} {self._model}",
            context=context,
            kind=SpanKind.SERVER if remote else SpanKind.INTERNAL,
            attributes={**self._asked(output), "gen_ai.operation.name": operation},
            start_time=stamp(output.arrival),
        )
        if span.is_recording():
            span.set_attributes(_answered(output))
            called = get_value(_REQUEST_ID, context)
            name = called if isinstance(called, str) else output.request_id
            span.set_attribute(_REQUEST_ID, name)
            if output.admitted_at is not None:
                span.add_event("admitted", timestamp=stamp(output.admitted_at))
            if times := output.computed_times:
                span.add_event("first token", timestamp=stamp(times[0]))
            if output.error is not None:
                # The message may quote what the request said.
                span.set_status(StatusCode.ERROR)
                span.set_attribute("error.type", type(output.error).__name__)
        span.end(end_time=stamp(now if output.finished_at is None else output.finished_at))

    def closed(self) -> None:
        self._opened.clear()

    def _asked(self, output: Output) -> dict[str, _ATTRIBUTE]:
        """Attributes known before the first token: samplers may look at them."""
        params = output.request.params
        found: dict[str, _ATTRIBUTE] = {
            "gen_ai.provider.name": "aioinfer",
            "gen_ai.request.model": self._model,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
        }
        if params.top_k:
            found["gen_ai.request.top_k"] = params.top_k
        if params.max_tokens is not None:
            found["gen_ai.request.max_tokens"] = params.max_tokens
        if params.seed is not None:
            found["gen_ai.request.seed"] = params.seed
        for name in ("frequency_penalty", "presence_penalty"):
            if value := getattr(params, name):
                found[f"gen_ai.request.{name}"] = value
        return found


def _answered(output: Output) -> dict[str, _ATTRIBUTE]:
    usage = output.usage
    found: dict[str, _ATTRIBUTE] = {
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
    }
    if output.finish_reason is not None:
        found["gen_ai.response.finish_reasons"] = [output.finish_reason]
    if times := output.computed_times:
        found["gen_ai.response.time_to_first_chunk"] = times[0] - output.arrival
    return found
