"""A request that workers die of hurts nobody else, and is given up by name."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from outside.served import Reply, Served, free_port, launched

from attack.arena import BOSS, PATH, Row
from attack.poisoned_worker import POISON

_NUM_OTHERS = 12
_NUM_TOKENS = 150
_HEADERS = {"Authorization": f"Bearer {BOSS}"}
#: `MAX_BLAMED` of the server: so many workers a request may cost, and no more.
_NUM_DEATHS = 3


@contextlib.contextmanager
def _poisoned(folder: Path) -> Iterator[Served]:
    """A server whose workers die of the poison."""
    port = free_port()
    program = [sys.executable, "-P", "-m", "attack.poisoned_server"]
    command = [*program, str(port), BOSS]
    with launched(folder, command, port, {"PYTHONPATH": PATH}) as served:
        served.wait_ready()
        yield served


def _bodies() -> list[dict[str, Any]]:
    """Greedy and seeded answers, some held to a form."""
    form = {"json_schema": {"type": "array", "items": {"type": "integer"}, "minItems": 30}}
    return [
        {
            "prompt": f"# {number}\nimport os\ndef f{number}(x):\n", "max_tokens": _NUM_TOKENS,
            "temperature": 0.9 * (number % 2), "seed": number,
            **(form if number % 4 == 3 else {"ignore_eos": number % 3 != 0}),
        }
        for number in range(_NUM_OTHERS)
    ]  # fmt: skip


def _ask(served: Served, body: dict[str, Any]) -> Reply:
    return served.post("/v1/completions", body, headers=_HEADERS, timeout=240)


def _said(reply: Reply) -> Any:
    if reply.status != 200:
        return reply.status, reply.body
    choice = reply.json["choices"][0]
    return choice["text"], choice["finish_reason"]


@pytest.mark.parametrize("num_poisoned", [1, 3])
def test_a_poison_request_hurts_nobody_else(
    tmp_path: Path, note: Callable[[Row], None], num_poisoned: int
) -> None:
    row = Row(f"{num_poisoned} poison requests among {_NUM_OTHERS}")
    poison = {"prompt": [1, 2, 3, *POISON, 4], "max_tokens": _NUM_TOKENS, "ignore_eos": True}
    with _poisoned(tmp_path) as served, ThreadPoolExecutor(_NUM_OTHERS + num_poisoned) as clients:
        expected = [_said(one) for one in clients.map(lambda body: _ask(served, body), _bodies())]
        assert all(isinstance(text, str) for text, _ in expected), expected
        half = _NUM_OTHERS // 2
        mixed = [*_bodies()[:half], *[poison] * num_poisoned, *_bodies()[half:]]
        replies = list(clients.map(lambda body: _ask(served, body), mixed))
        poisoned = replies[half : half + num_poisoned]
        others = replies[:half] + replies[half + num_poisoned :]
        for number, (reply, right) in enumerate(zip(others, expected, strict=True)):
            if _said(reply) != right:
                row.problems.append(f"answer {number} is {_said(reply)!r}, not {right!r}")
        for reply in poisoned:
            if reply.status < 500 or b"workers died" not in reply.body:
                row.problems.append(f"the poison was answered: {_said(reply)!r}")
            elif reply.headers.get("x-should-retry") != "false":
                row.problems.append("the poison may be tried again")
        state = served.get("/debug/requests", headers=_HEADERS).json
        row.seen = {"restarts": state["restarts"]}
        if state["restarts"] > _NUM_DEATHS * num_poisoned:
            row.problems.append(f"{state['restarts']} workers died")
        if state["open"]:
            row.problems.append(f"{len(state['open'])} requests stayed open")
        again = _ask(served, _bodies()[0])
        if _said(again) != expected[0]:
            row.problems.append(f"afterwards: {_said(again)!r}")
    note(row)
