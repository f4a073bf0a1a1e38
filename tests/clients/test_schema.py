"""schemathesis against the document that `hypo serve` gives: no 5xx, and answers that fit it.

It makes requests that fit the document and requests that do not. What fits may still be refused,
for a prompt that is longer than the context, say. What does not fit must be.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from clients.conftest import KEY

CHECKS: list[Any] = [
    not_a_server_error, status_code_conformance, content_type_conformance,
    response_schema_conformance, negative_data_rejection, unsupported_method,
]  # fmt: skip
#: Of each route and each mode.
NUM_EXAMPLES = int(os.environ.get("COUNT", "25"))
KEYS = {"Authorization": f"Bearer {KEY}"}
ADMIN = {"Authorization": "Bearer boss"}


@pytest.fixture(scope="module")
def schema(served: Any) -> Any:
    address = f"http://127.0.0.1:{served.port}/openapi.json"
    return schemathesis.openapi.from_url(address, headers=KEYS)


OPERATIONS = [
    "GET /health", "GET /ready", "GET /metrics", "GET /version", "GET /openapi.json",
    "GET /v1/models", "GET /models", "GET /v1/models/{name}", "POST /models/load",
    "POST /models/unload", "POST /v1/completions",
    "POST /v1/chat/completions", "POST /v1/responses", "GET /v1/responses/{name}",
    "DELETE /v1/responses/{name}", "POST /v1/responses/{name}/cancel", "POST /v1/messages",
    "POST /v1/messages/count_tokens", "POST /tokenize", "POST /detokenize", "GET /tokenizer_info",
    "POST /apply-template", "GET /props", "GET /slots", "POST /slots/{number}",
    "GET /v1/requests/{name}",
    "POST /v1/requests/{name}/cancel", "GET /debug/requests", "GET /debug/faults",
]  # fmt: skip


def test_the_document_has_these_routes(served: Any) -> None:
    paths = served.get("/openapi.json", headers=KEYS).json["paths"]
    found = [f"{method.upper()} {path}" for path, methods in paths.items() for method in methods]
    assert found == OPERATIONS


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_route_keeps_to_the_document(schema: Any, operation: str, mode: GenerationMode) -> None:
    method, path = operation.split()
    if mode is GenerationMode.NEGATIVE and method == "GET" and "{" not in path:
        return  # nothing can be wrong with it
    cases = schema[path][method.lower()].as_strategy(generation_mode=mode)

    @settings(
        max_examples=NUM_EXAMPLES, deadline=None, derandomize=True, database=None,
        suppress_health_check=list(HealthCheck), phases=[Phase.generate],
    )  # fmt: skip
    @given(st.data())
    def ask(data: Any) -> None:
        case = data.draw(cases)
        for name in ("max_tokens", "max_output_tokens"):
            if isinstance(case.body, dict) and isinstance(case.body.get(name), int):
                case.body[name] = min(case.body[name], 8)
        keys = ADMIN if path.startswith(("/debug/", "/models/")) else KEYS
        case.call_and_validate(checks=CHECKS, headers=keys, timeout=120)

    ask()
