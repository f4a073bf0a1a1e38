"""schemathesis against the document that `hypo serve` gives: no 5xx, and answers that fit it.

It makes requests that fit the document and requests that do not. What fits may still be refused,
for a prompt that is longer than the context, say. What does not fit must be. Every route of the
application's table is asked, on a server that has a model of each kind and an adapter.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from outside.served import Served, serving
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from clients.conftest import KEY, OURS

CHECKS: list[Any] = [
    not_a_server_error, status_code_conformance, content_type_conformance,
    response_schema_conformance, negative_data_rejection, unsupported_method,
]  # fmt: skip
#: Of each route and each mode.
NUM_EXAMPLES = int(os.environ.get("COUNT", "25"))
KEYS = {"Authorization": f"Bearer {KEY}"}
ADMIN = {"Authorization": "Bearer boss"}
#: What only the admin's key opens, or opens in full.
ADMINS = "/debug/", "/models/", "/lora-adapters"
#: Routes of models that write nothing, by their ends: which of the models answers there.
MODEL_OF = {"embeddings": "vectors", "embed": "vectors", "rerank": "scores", "reranking": "scores"}
#: Where a body says how much is to be written. A chat of few tokens shows as much as a long one.
LENGTHS = "max_tokens", "max_completion_tokens", "max_output_tokens"
MAX_TOKENS = 8


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`operation` is each route of the application, as its own table has them."""
    if "operation" in metafunc.fixturenames:
        metafunc.parametrize("operation", operations())


def operations() -> list[str]:
    """Method and path of each."""
    command = [os.environ["HYPOCENTER_PYTHON"], str(OURS), "operations", ""]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, python: str, model: Path) -> Iterator[Served]:
    """One with a model that writes, one that embeds, one that scores, and an adapter."""
    folder = tmp_path_factory.mktemp("models")
    subprocess.run([python, OURS, "vectors", folder], check=True)
    subprocess.run([python, OURS, "adapter", folder / "terse.gguf"], check=True)
    (folder / "serve.toml").write_text(
        f'models.chat = {{path = "{model}", lora = ["terse.gguf:0"]}}\n'
        'models.vectors = {path = "vectors.gguf"}\n'
        'models.scores = {path = "scores.gguf"}\n'
    )
    words = (
        "--config", str(folder / "serve.toml"), "-np", "8", "--api-key", KEY, "--admin-key", "boss",
        "--slot-save-path", str(folder / "slots"),
    )  # fmt: skip
    with serving(folder, *words, python=python) as one:
        yield one


@pytest.fixture(scope="module")
def schema(server: Served) -> Any:
    address = f"http://127.0.0.1:{server.port}/openapi.json"
    return schemathesis.openapi.from_url(address, headers=KEYS)


def test_the_document_has_all_routes(server: Served) -> None:
    paths = server.get("/openapi.json", headers=KEYS).json["paths"]
    found = [f"{method.upper()} {path}" for path, methods in paths.items() for method in methods]
    assert sorted(found) == sorted(operations())


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_a_route_keeps_to_the_document(
    server: Served, schema: Any, operation: str, mode: GenerationMode
) -> None:
    method, path = operation.split()
    # Some routes tell of a model that is loaded alone, and load none.
    assert server.post("/models/load", {"model": model_of(path)}, headers=ADMIN).status == 200
    one = schema[path][method.lower()]
    if mode is GenerationMode.NEGATIVE and not one.body and not list(one.iter_parameters()):
        pytest.skip("nothing can be wrong with it")
    cases = one.as_strategy(generation_mode=mode)

    @settings(
        max_examples=NUM_EXAMPLES, deadline=None, derandomize=True, database=None,
        suppress_health_check=list(HealthCheck), phases=[Phase.generate],
    )  # fmt: skip
    @given(st.data())
    def ask(data: Any) -> None:
        case = data.draw(cases)
        if mode is GenerationMode.POSITIVE:
            aim(case, path)
        shorten(case, path)
        keys = ADMIN if path.startswith(ADMINS) else KEYS
        case.call_and_validate(checks=CHECKS, headers=keys, timeout=120)

    ask()


def model_of(path: str) -> str:
    return MODEL_OF.get(path.rpartition("/")[2], "chat")


def aim(case: Any, path: str) -> None:
    """Have a right request name a model that is there, so that it is worked on."""
    if isinstance(case.body, dict) and "model" in case.body:
        case.body["model"] = model_of(path)
    if "model" in (case.query or {}):
        case.query["model"] = model_of(path)


def shorten(case: Any, path: str) -> None:
    """Have an answer be short where its length is given rightly."""
    body = case.body
    if not isinstance(body, dict):
        return
    for name in LENGTHS:
        if isinstance(body.get(name), int):
            body[name] = min(body[name], MAX_TOKENS)
    if path.startswith("/api/") and isinstance(body.get("options"), dict):
        body["options"]["num_predict"] = MAX_TOKENS
