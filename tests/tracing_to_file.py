"""What the setting `tracing` names in a test: spans go to a file for each process, one JSON object on a line."""

import os
from pathlib import Path

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor


def start():
    file = (Path(os.environ["PROTODCS_TRACES"]) / f"{os.getpid()}.jsonl").open("w")
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(ConsoleSpanExporter(out=file, formatter=_line)))
    trace.set_tracer_provider(provider)


def _line(span):
    return span.to_json(indent=None) + "\n"
