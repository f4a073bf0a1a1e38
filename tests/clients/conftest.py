"""A server from the project's own environment, for clients in this one, which lacks hypocenter."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from outside.served import Served, serving

KEY = "sesame"
OURS = Path(__file__).parent / "ours.py"

# Clients tell their makers of use, and look for prices, unless they are told not to.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
os.environ["LITELLM_TELEMETRY"] = "False"
os.environ["LANGSMITH_TRACING"] = "false"
os.environ["HF_DATASETS_OFFLINE"] = "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What clients warn of is theirs."""
    for item in items:
        item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(scope="session")
def python() -> str:
    """The Python that has hypocenter, which scripts/test-clients names."""
    return os.environ["HYPOCENTER_PYTHON"]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory, python: str) -> Path:
    path = tmp_path_factory.mktemp("model") / "chat.gguf"
    subprocess.run([python, OURS, "model", path], check=True)
    return path


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory, python: str, model: Path) -> Iterator[Served]:
    words = (str(model), "-np", "8", "--api-key", KEY, "--admin-key", "boss")
    with serving(tmp_path_factory.mktemp("served"), *words, python=python) as one:
        yield one


@pytest.fixture(scope="session")
def url(served: Served) -> str:
    return f"http://127.0.0.1:{served.port}/v1"
