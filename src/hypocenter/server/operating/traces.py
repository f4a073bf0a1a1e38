"""Traces of requests, as OpenTelemetry has them: from a request to the steps that answered it.

A span is made when its request has ended, of what was noted anyway, so a server without traces does
nothing for them. Attributes are those of OpenTelemetry's conventions for generative AI where it has
one (https://opentelemetry.io/docs/specs/semconv/gen-ai/), and `hypocenter.` for what only we have.
The client's trace is read from its headers (https://www.w3.org/TR/trace-context/).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from hypocenter.base.errors import UsageError
from hypocenter.base.package import version
from hypocenter.server.generation import Generation
from hypocenter.server.inquiry import Inquiry

_HEADERS = ("traceparent", "tracestate")
_MAX_CHARS = 512


def trace_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Those of a request that name its client's trace."""
    found = {name: headers[name] for name in _HEADERS if name in headers}
    return {name: text for name, text in found.items() if len(text) <= _MAX_CHARS}


def otlp_traces(endpoint: str) -> Traces:
    """Traces that go to a collector. Raises UsageError without the extra, or for a bad URL."""
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(
            f"--otlp-traces-endpoint is {endpoint!r}, but must be like "
            "http://localhost:4318/v1/traces"
        )
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError as missing:
        raise UsageError(
            f"--otlp-traces-endpoint needs {missing.name}, which is not installed: "
            "pip install 'hypocenter[server,otel]'"
        ) from missing
    return Traces(BatchSpanProcessor(OTLPSpanExporter(endpoint)))


class Traces:
    """Makes the spans of each request that has ended; `processor` takes them, OpenTelemetry's."""

    def __init__(self, processor: Any) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.trace import Status, StatusCode, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        resource = Resource.create({"service.name": "hypocenter", "service.version": version()})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("hypocenter")
        self._client_context = TraceContextTextMapPropagator().extract
        self._within = set_span_in_context
        self._error = Status(StatusCode.ERROR)

    def note(self, inquiry: Inquiry, status: str) -> None:
        """A request has ended so: completed, cancelled or failed."""
        generations = [choice.generation for choice in inquiry.choices]
        usage = inquiry.usage()
        span = self._tracer.start_span(
            "answer",
            self._client_context(inquiry.trace_headers),
            start_time=_wall_ns(min(g.submitted for g in generations)),
            attributes={
                "gen_ai.system": "hypocenter",
                "gen_ai.response.id": inquiry.name,
                "gen_ai.usage.input_tokens": usage.prompt_tokens,
                "gen_ai.usage.output_tokens": usage.completion_tokens,
                "hypo.outcome": status,
            },
        )
        if status == "failed":
            span.set_status(self._error)
        within = self._within(span)
        for choice, generation in zip(inquiry.choices, generations, strict=True):
            self._note_generation(generation, choice.index, within)
        span.end()

    def close(self) -> None:
        """Send what was not sent yet."""
        self._provider.shutdown()

    def _note_generation(self, generation: Generation, index: int, within: Any) -> None:
        """Spans of what it waited, of its prompt, and of its tokens up to the last."""
        moments = (
            ("wait", generation.submitted, generation.handed_over),
            ("prompt", generation.handed_over, generation.first_token),
            ("tokens", generation.first_token, generation.last_token),
        )
        attributes: dict[str, int] = {
            "hypo.choice": index,
            "hypo.resumed": generation.num_resumed,
        }
        if generation.replica is not None:
            attributes["hypo.replica"] = generation.replica
        if generation.steps is not None:
            attributes["hypo.first_step"], attributes["hypo.last_step"] = generation.steps
        for name, begin, end in moments:
            if begin is not None and end is not None:
                span = self._tracer.start_span(
                    name, within, start_time=_wall_ns(begin), attributes=attributes
                )
                span.end(_wall_ns(end))


def _wall_ns(moment: float) -> int:
    """Nanoseconds since 1970 of a moment of the monotonic clock."""
    return time.time_ns() - round(1e9 * (time.monotonic() - moment))
