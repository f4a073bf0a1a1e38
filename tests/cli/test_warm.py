"""`hypo warm`: what it prepares the next start finds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from outside.terminal import hypo, hypo_in_process
from repository import DEMO


def test_it_says_what_is_kept_and_why_not() -> None:
    done = hypo("warm", str(DEMO), "-q")
    assert done.returncode == 0, done.stderr
    first, kernels, weights = done.stdout.splitlines()
    assert first.startswith("ready after ")
    assert "MiB" in kernels
    assert "not kept: less than 64 MiB" in weights


def test_json_holds_the_same() -> None:
    found = json.loads(hypo_in_process("warm", "--json", "-q").stdout)
    assert found["kernels_bytes"] > 1 << 20
    assert "64 MiB" in found["weights_not_kept"]
    assert Path(found["cache"]).is_dir()


@pytest.mark.tier("sim")  # compiles all kernels of the model anew
def test_the_next_start_compiles_nothing(tmp_path: Path) -> None:
    environ = {"HYPO_CACHE_DIR": str(tmp_path), "HYPO_LOG": "info"}
    assert "compiled in" in hypo("warm", environ=environ).stderr
    for prompt in ("x", "def add(a, b):" * 10):
        seen = hypo("run", "-p", prompt, "-n", "3", environ=environ).stderr
        assert "loaded" in seen
        assert "compiled in" not in seen
