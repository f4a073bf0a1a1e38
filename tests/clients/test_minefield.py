"""Traps of serving that model-serving-minefield looks for: none but those that are told here."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from outside.served import Served, serving

from clients.conftest import KEY
from clients.test_tools import ASKED, TEMPLATE

#: Problems that it finds, by its numbers of traps, and why they are none of ours.
TOLD = {
    "77": "a field that nobody documents is passed over, and named in x-ignored-fields",
    "80": "the model writes a token in less than a millisecond: several go in one piece",
    "26": "a model that knows no calls never ends one",
}
#: Traps of which it has to say that they are not here.
CLEAN = {"02", "07", "15", "23", "112"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, python: str, model: Path) -> Iterator[Served]:
    words = (str(model), "--api-key", KEY, "--chat-template", TEMPLATE)
    with serving(tmp_path_factory.mktemp("minefield"), *words, python=python) as one:
        yield one


def test_its_traps_are_not_here(server: Served, tmp_path: Path) -> None:
    url, found = f"http://127.0.0.1:{server.port}/v1", tmp_path / "found.json"
    words = ("quick", "--base-url", url, "--api-key", KEY, "--model", "chat", "--json", str(found))
    subprocess.run([sys.executable, "-m", "minefield.cli", *words], check=True, timeout=300)
    told = json.loads(found.read_text())
    problems = {trap: text for traps, text, *_ in told["problems"] for trap in traps}
    assert problems.keys() <= TOLD.keys(), problems
    clean = {trap for traps, *_ in told["clean"] for trap in traps}
    assert clean >= CLEAN, clean


def test_what_is_told_of_a_field_is_so(server: Served) -> None:
    body = {"model": "chat", "messages": ASKED, "max_tokens": 1, "minefield": 1}
    headers = {"Authorization": f"Bearer {KEY}"}
    reply = server.post("/v1/chat/completions", body, headers=headers)
    assert (reply.status, reply.headers["x-ignored-fields"]) == (200, "minefield")
