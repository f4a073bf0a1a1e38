"""A worker that dies while a head of the model's file drafts, where layers carry states: its
answers go on as they would have."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from models.families import make_family
from models.state_heads import as_alphabet, end_with_attention
from outside.served import Served, serving, texts

pytestmark = pytest.mark.tier("whole")

LONG = {"prompt": "abcabc", "max_tokens": 600, "ignore_eos": True, "stream": True}
EACH_WAY: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 1.2, "seed": 11},
    "penalties": {"temperature": 0.8, "seed": 12, "frequency_penalty": 0.01},
}
#: Has as many tokens be tried as may be: by the clock a head of so small a model gains nothing.
EAGER = """
import math
from hypocenter.engine.drafting import drafter
from hypocenter.engine.drafting.model_drafter import DraftRecord
drafter.Drafter._left = lambda self, num_output, gains=True: math.inf
drafter.best_number = lambda odds, most, price_of: (most, True)
DraftRecord.awaits_steps = False
"""


def read_all(served: Served, got: dict[str, list[Any]]) -> list[threading.Thread]:
    """Threads that read an answer each."""

    def read(way: str) -> None:
        with served.stream("/v1/completions", {**LONG, **EACH_WAY[way]}) as stream:
            got[way] += stream

    threads = [threading.Thread(target=read, args=[way]) for way in EACH_WAY]
    for thread in threads:
        thread.start()
    return threads


def answers(folder: Path, path: Path, spec: str, *, kills: bool) -> dict[str, str]:
    words = ["--device", "cpu", "-c", "1024", "--spec", spec]
    got: dict[str, list[Any]] = {way: [] for way in EACH_WAY}
    (folder / "sitecustomize.py").write_text(EAGER)
    environ = {"PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}"}
    with serving(folder, str(path), *words, "--canary-minutes", "0", environ=environ) as served:
        threads = read_all(served, got)
        if kills:
            for least in (3, 9):
                while min(map(len, got.values())) < least:
                    time.sleep(0.005)
                assert any(thread.is_alive() for thread in threads)
                served.kill_worker(signal.SIGKILL)
        for thread in threads:
            thread.join()
        figures = served.get("/metrics").body.decode()
        name = "vllm:spec_decode_num_accepted_tokens_total"
        num_right = sum(
            float(line.split()[-1]) for line in figures.splitlines() if line.startswith(name + "{")
        )
        assert (num_right > 50) == (spec == "mtp")
        assert ("hypocenter:requests_resumed_total" in figures) or not kills
    return {way: texts(events) for way, events in got.items()}


def test_a_worker_that_dies_is_a_pause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    end_with_attention(monkeypatch, "qwen35")
    path = as_alphabet(make_family("qwen35", tmp_path), tmp_path, has_head=True)
    expected = answers(tmp_path, path, "off", kills=False)
    assert answers(tmp_path, path, "mtp", kills=True) == expected
