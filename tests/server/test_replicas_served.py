"""Several workers behind one server that is a process; and a model that four ranks hold."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from outside.served import Served, serving, texts

KEY = {"Authorization": "Bearer key-of-the-admin"}
NUM_STREAMS = 8


def asked(number: int) -> dict[str, Any]:
    prompt = f"def f{number}(x):\n    return "
    return {"prompt": prompt, "max_tokens": 60, "seed": number, "temperature": 1.0}


def answers(served: Served, number_of_signal: int = 0) -> list[str]:
    """Each stream's text; with a signal all have a piece before the second worker gets it."""
    at_piece = threading.Barrier(NUM_STREAMS + 1) if number_of_signal else None
    got = [""] * NUM_STREAMS

    def ask(number: int) -> None:
        with served.stream("/v1/completions", asked(number)) as events:
            first = next(events)
            if at_piece is not None:
                at_piece.wait(60)
                at_piece.wait(60)  # the worker gets its signal in between
            got[number] = texts([first, *events])

    threads = [threading.Thread(target=ask, args=[number]) for number in range(NUM_STREAMS)]
    for thread in threads:
        thread.start()
    if at_piece is not None:
        at_piece.wait(60)
        replicas = served.get("/debug/requests", headers=KEY).json["replicas"]
        os.kill(replicas[1]["worker_pid"], number_of_signal)
        at_piece.wait(60)
    for thread in threads:
        thread.join()
    return got


@pytest.mark.tier("sim")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=lambda one: one.name)
def test_streams_go_on_elsewhere_when_a_replica_is_gone(tmp_path: Path, number: int) -> None:
    words = ("--device", "cpu", "-c", "256", "-np", "8", "--admin-key", "key-of-the-admin")
    with serving(tmp_path, *words, "--replicas", "2", "--deadline", "3") as served:
        while [one["state"] for one in served.get("/health").json["replicas"]] != ["ready"] * 2:
            pass
        expected = answers(served)
        assert all(expected)
        assert answers(served, number) == expected
        moved = [line for line in served.stderr if " on elsewhere" in line]
        assert len(moved) == 1, served.stderr
        what = "was ended by SIGKILL" if number == signal.SIGKILL else "is past its deadline after"
        assert what in moved[0]
        assert "replica 1 (cpu)" in moved[0]
        while "took over" not in "".join(served.stderr):
            pass
        figures = served.get("/metrics").body.decode()
        counts = [
            float(line.split()[-1])
            for line in figures.splitlines()
            if line.startswith("vllm:generation_tokens_total{")
        ]
        assert min(counts) > 60, "both worked"
        assert 'hypocenter:worker_restarts_total{engine="1",model_name="demo-q8_0"} 1.0' in figures
        assert 'hypocenter:worker_restarts_total{engine="0",model_name="demo-q8_0"} 0.0' in figures


@pytest.mark.tier("sim")
def test_four_ranks_give_the_answer_of_one(tmp_path: Path) -> None:
    """The bundled model has four heads and two of keys: two ranks have a copy each of these."""
    body = {"prompt": "import os", "max_tokens": 4, "temperature": 0}
    found = []
    for ranks in ("1", "4"):
        folder = tmp_path / ranks
        folder.mkdir()
        with serving(folder, "--device", "sim:h200", "-tp", ranks, "-c", "64") as served:
            found.append(served.post("/v1/completions", body).json["choices"][0]["text"])
    assert found[0] == found[1] != ""
