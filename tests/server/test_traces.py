"""What a collector of traces is told of a request, and that a bad address is refused at once."""

from __future__ import annotations

import asyncio
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from outside.served import serving
from test_supervisor import PretendedLife, life, make, run

from hypocenter import SamplingParams
from hypocenter.base.errors import UsageError
from hypocenter.server.generation import AnswerOrder
from hypocenter.server.inquiry import Inquiry
from hypocenter.server.operating.traces import Traces, otlp_traces, trace_headers
from hypocenter.wire.messages import Accepted, Ending, EngineState, News, Piece

__all__ = ["life"]  # the fixture
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CLIENTS = {"traceparent": f"00-{TRACE}-{PARENT}-01"}


def test_an_answer_has_a_span_in_its_clients_trace_with_its_parts_in_it(
    life: type[PretendedLife],
) -> None:
    async def work() -> None:
        supervisor = make()
        await supervisor.start()
        [worker] = life.starts
        inquiry = Inquiry(supervisor, "cmpl-1", AnswerOrder([(97, 98)], SamplingParams()))
        inquiry.trace_headers = trace_headers({**CLIENTS, "cookie": "secret"})
        accepting = asyncio.ensure_future(inquiry.accept())
        await asyncio.sleep(0)
        [message] = worker.sent
        worker.say(Accepted(message.id))
        await accepting
        for step, ending in ((40, None), (42, None), (47, Ending("stop"))):
            state = EngineState(num_steps=step)
            worker.say(News((Piece(message.id, "x", (step,), ending=ending),), state))
        assert len([piece async for piece in inquiry.pieces()]) == 1, "they were joined"
        traces = Traces(SimpleSpanProcessor(exporter := InMemorySpanExporter()))
        traces.note(inquiry, "completed")
        spans: dict[str, Any] = {span.name: span for span in exporter.get_finished_spans()}
        assert list(spans) == ["wait", "prompt", "tokens", "answer"]
        answer = spans["answer"]
        assert f"{answer.context.trace_id:032x}" == TRACE
        assert f"{answer.parent.span_id:016x}" == PARENT
        assert answer.attributes["gen_ai.usage.output_tokens"] == 3
        assert answer.attributes["gen_ai.response.id"] == "cmpl-1"
        for name in ("wait", "prompt", "tokens"):
            assert spans[name].parent.span_id == answer.context.span_id
            assert spans[name].attributes["hypo.first_step"] == 40
            assert spans[name].attributes["hypo.last_step"] == 47
            assert spans[name].attributes["hypo.replica"] == 0
        assert abs(spans["wait"].end_time - spans["prompt"].start_time) < 5e6
        assert answer.start_time <= spans["tokens"].end_time <= answer.end_time
        assert not any("secret" in str(span.attributes) for span in spans.values())
        traces.note(inquiry, "failed")
        assert not exporter.get_finished_spans()[-1].status.is_ok
        await supervisor.stop(1)

    run(work())


def test_headers_that_are_no_trace_are_passed_over(life: type[PretendedLife]) -> None:
    assert trace_headers({"traceparent": "x" * 1000, "host": "a"}) == {}


@pytest.mark.parametrize("endpoint", ["localhost:4318", "file:///etc", "http://"])
def test_an_address_that_is_none_is_refused(endpoint: str) -> None:
    with pytest.raises(UsageError, match="--otlp-traces-endpoint is"):
        otlp_traces(endpoint)


@pytest.mark.tier("sim")
def test_a_server_sends_its_traces_to_a_collector(tmp_path: Path) -> None:
    received: list[Any] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") is None:
                received.append(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Collector) as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        endpoint = f"http://127.0.0.1:{collector.server_port}/v1/traces"
        with serving(tmp_path, "--otlp-traces-endpoint", endpoint) as served:
            body = {"prompt": "import os", "max_tokens": 4}
            assert served.post("/v1/completions", body, headers=CLIENTS).status == 200
        collector.shutdown()
    spans = [
        span
        for request in received
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]
    assert {span.name for span in spans} == {"answer", "wait", "prompt", "tokens"}
    assert {span.trace_id.hex() for span in spans} == {TRACE}
