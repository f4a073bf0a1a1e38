"""Which path of CPU instructions a machine takes, what that leaves unused, what is refused."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from hypocenter.device.cpu import target
from hypocenter.device.cpu.instructions import NEEDED, fastest, limit_features
from hypocenter.device.cpu.target import instruction_set
from hypocenter.settings.environment import INSTRUCTIONS


@pytest.mark.parametrize(
    ("cpu", "lacking", "path"),
    [
        ("znver4", "", "avx512-bf16"),
        ("znver5", "", "avx512-bf16"),
        ("emeraldrapids", "", "avx512-vnni"),
        ("znver4", "avx512bf16", "avx512-vnni"),
        ("skylake-avx512", "avx512bf16 avx512vnni", "avx512"),
        ("arrowlake", "avx512bf16 avx512vnni avx512f", "avx-vnni"),
        ("haswell", "avx512bf16 avx512vnni avx512f avxvnni", "avx2"),
        ("bdver2", "avx512bf16 avx512vnni avx512f avxvnni avx2", "plain"),
    ],
)
def test_a_processor_takes_the_fastest_path_that_it_has(
    cpu: str, lacking: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = {feature for needed in NEEDED.values() for feature in needed}
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr(target, "cpu_features", lambda: frozenset(every - set(lacking.split())))
    monkeypatch.setattr(target, "cpu_name", lambda: cpu)
    monkeypatch.setattr(target, "asked_for", lambda: "")
    assert target.instruction_set() == path


def test_vdpbf16ps_is_used_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "cpu_features", lambda: frozenset(NEEDED["avx512-bf16"]))
    monkeypatch.setattr(target, "cpu_name", lambda: "emeraldrapids")
    monkeypatch.setattr(target, "asked_for", lambda: "avx512-bf16")
    assert target.instruction_set() == "avx512-bf16"


@pytest.mark.parametrize("path", INSTRUCTIONS)
def test_a_path_leaves_unused_what_is_beyond_it(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    every = {feature: True for needed in NEEDED.values() for feature in needed}
    left = {feature for feature, has in limit_features(path, every).items() if has}
    assert fastest(left, with_bf16=True) == path


def test_an_arm_takes_neon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert fastest({"neon"}, with_bf16=False) == "neon"


def test_an_unknown_path_is_refused_in_one_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hypocenter", "env"],
        env={**os.environ, "HYPO_INSTRUCTIONS": "mmx"}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2
    assert "HYPO_INSTRUCTIONS is 'mmx', but must be one of avx512-bf16" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_path_of_this_process_is_what_was_asked_for() -> None:
    asked = os.environ.get("HYPO_INSTRUCTIONS")
    assert asked is None or instruction_set() == asked


def test_the_emulator_of_amds_code_leaves_the_path_as_it_was_asked_for() -> None:
    """numba reads what it compiles for once, and the emulator may be what has it compile first."""
    program = """
from hypocenter.device.amd.values import handlers
from numba.core.registry import cpu_target
cpu_target.target_context.codegen()
from hypocenter.device.cpu.target import instruction_set
print(instruction_set())
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "HYPO_INSTRUCTIONS": "plain"},
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout == "plain\n"
