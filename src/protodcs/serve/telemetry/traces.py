"""Traces by OpenTelemetry: spans of a request, its encoding, its routing, and the batch and commit that it shares.

Only the API is needed, and by default it does nothing. The setting `tracing` names a function that sets up an SDK in
each process. A span never contains what a caller sent.
"""

import importlib
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import INVALID_SPAN, Link, Span, SpanKind
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.datastructures import Headers
from starlette.types import Scope

from ...errors import ConfigError
from ..messages import Request

_tracer = trace.get_tracer("protodcs")
_form = TraceContextTextMapPropagator()
# In place of a span that nobody records.
_NOT_RECORDED = nullcontext(INVALID_SPAN)


def start(hook: str | None) -> None:
    """Call the function of the setting `tracing`, MODULE:FUNCTION, in this process."""
    if hook is None:
        return
    module, _, name = hook.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as problem:
        raise ConfigError(f"tracing={hook!r} must be MODULE:FUNCTION of what is installed: {problem}") from None
    function()


def request_span(scope: Scope, request_id: str) -> AbstractContextManager[Span]:
    """The span of an HTTP request, below the caller's own if its headers name one."""
    if not _is_recorded():
        return _NOT_RECORDED
    parent, about = _form.extract(Headers(scope=scope)), {"request.id": request_id}
    return _tracer.start_as_current_span("request", parent, kind=SpanKind.SERVER, attributes=about)


def _is_recorded() -> bool:
    """Whether an SDK is set up. Spans of the API alone do nothing, and still take time."""
    return not isinstance(_tracer, trace.ProxyTracer) or _is_sdk_set_up(int(time.monotonic()))


@lru_cache(maxsize=1)
def _is_sdk_set_up(_: int) -> bool:
    """Look for an SDK once a second: the look takes longer than other parts of a request."""
    return not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)


def span(name: str) -> AbstractContextManager[Span]:
    """A span below the present one."""
    if not _is_recorded():
        return _NOT_RECORDED
    return _tracer.start_as_current_span(name)


def ids() -> dict[str, str]:
    """Return the ids of the present span, as lines of the log have them; none if nobody records it."""
    return _ids(trace.get_current_span())


def ids_of_caller(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the ids of the present span; without one, the trace id that the headers of a request name."""
    found = ids()
    if not found and "traceparent" in headers:
        found = _ids(trace.get_current_span(_form.extract(headers)))
        found.pop("span_id", None)
    return found


def _ids(span: Span) -> dict[str, str]:
    context = span.get_span_context()
    if not context.is_valid:
        return {}
    return {"trace_id": trace.format_trace_id(context.trace_id), "span_id": trace.format_span_id(context.span_id)}


def carried() -> str:
    """The present span in a word that travels; empty where nobody records it."""
    if not _is_recorded() or not trace.get_current_span().get_span_context().is_valid:
        return ""
    carrier: dict[str, str] = {}
    _form.inject(carrier)
    return carrier.get("traceparent", "")


def marked(requests: list[Request]) -> list[Request]:
    """The requests with the present span, if someone records it."""
    word = carried()
    return [request._replace(trace=word) for request in requests] if word else requests


def shared_span(name: str, words: Sequence[str], **about: int) -> AbstractContextManager[Span]:
    """The span of work for several spans at once: below the first of them, linked to the others; none for none."""
    if not words:
        return _NOT_RECORDED
    first, *others = [_context(word) for word in dict.fromkeys(words)]
    links = [Link(trace.get_current_span(other).get_span_context()) for other in others]
    return _tracer.start_as_current_span(name, first, links=links, attributes=about)


def _context(word: str) -> Context:
    return _form.extract({"traceparent": word})
