"""A served model that two processes hold: one of them dies, and clients notice a pause."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
from outside.served import Served, serving

ASKED = {"prompt": "import os", "max_tokens": 4, "temperature": 0}


def other_rank(served: Served) -> int:
    """The process that holds the second part."""
    found = subprocess.run(
        ["pgrep", "-f", "ranks.program", "-P", str(served.worker_pid)],
        capture_output=True,
        text=True,
        check=True,
    )
    return int(found.stdout.split()[0])


@pytest.mark.tier("sim")
def test_an_answer_goes_on_when_a_rank_has_died(tmp_path: Path) -> None:
    words = ("--device", "sim:h200", "-tp", "2", "-c", "64")
    with serving(tmp_path, *words) as served:
        expected = served.post("/v1/completions", ASKED).json["choices"][0]["text"]
        with served.stream("/v1/completions", ASKED) as stream:
            got = [next(stream)]
            lost = other_rank(served)
            os.kill(lost, signal.SIGKILL)
            got += stream
        text = "".join(event["choices"][0]["text"] for event in got if event != "[DONE]")
        assert text == expected
        assert other_rank(served) != lost
        named = f"rank 1 of 2, process {lost}, ended by SIGKILL"
        assert any(named in line for line in served.stderr)
