"""Each path of CPU instructions gives the same integers, and is what HYPO_INSTRUCTIONS names."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hypocenter.config import INSTRUCTIONS
from hypocenter.device.lang import cpu_features, instruction_set

CHILD = Path(__file__).with_name("cpu_path_child.py")
_NEEDED = {"avx512-vnni": "avx512vnni", "avx-vnni": "avxvnni", "avx2": "avx2"}


def child(path: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "HYPO_INSTRUCTIONS": path}
    return subprocess.run(
        [sys.executable, str(CHILD)], env=environ, capture_output=True, text=True, timeout=300
    )


@pytest.mark.parametrize("path", INSTRUCTIONS)
def test_products_of_codes_are_exact_sums_of_integers(path: str) -> None:
    if "HYPO_INSTRUCTIONS" in os.environ and path != os.environ["HYPO_INSTRUCTIONS"]:
        pytest.skip(f"this run is on {os.environ['HYPO_INSTRUCTIONS']} alone")
    if _NEEDED.get(path, "plain") not in {*cpu_features(), "plain"}:
        pytest.skip(f"this CPU has no {_NEEDED[path]}")
    done = child(path)
    assert done.returncode == 0, done.stderr[-2000:]
    answer = json.loads(done.stdout)
    assert answer["path"] == path
    assert answer["wrong"] == dict.fromkeys(("Q8_0", "Q5_K", "Q6_K", "Q2_K", "Q3_K"), 0)


def test_an_unknown_path_is_refused_in_one_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hypocenter", "env"],
        env={**os.environ, "HYPO_INSTRUCTIONS": "mmx"}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2
    assert "HYPO_INSTRUCTIONS is 'mmx', but must be one of avx512-vnni" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_path_of_this_process_is_what_was_asked_for() -> None:
    asked = os.environ.get("HYPO_INSTRUCTIONS")
    assert asked is None or instruction_set() == asked
