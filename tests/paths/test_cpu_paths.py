"""Each path of CPU instructions gives the same integers, and the same sums of products in bf16, and
is what HYPO_INSTRUCTIONS names."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from repository import SUPPORT

from hypocenter.config import INSTRUCTIONS
from hypocenter.device.cpu import lang
from hypocenter.device.cpu.instructions import NEEDED, fastest, limit_features
from hypocenter.device.cpu.lang import cpu_features, instruction_set

CHILD = SUPPORT / "cpu_path_child.py"


#: Bytes; nibbles and bits, with minima; six bits, crumbs, and crumbs and bits, with a scale per 16
#: columns. By a few: a kernel for each is compiled without the faster instructions, too.
TYPES = (("Q8_0", "F16", "BF16"), ("Q5_K", "Q6_K"), ("Q2_K", "Q3_K"))


def child(path: str, *types: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "HYPO_INSTRUCTIONS": path}
    return subprocess.run(
        [sys.executable, str(CHILD), *types],
        env=environ,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.parametrize("types", TYPES)
@pytest.mark.parametrize("path", INSTRUCTIONS)
def test_products_are_the_same_to_the_last_bit(path: str, types: tuple[str, ...]) -> None:
    if "HYPO_INSTRUCTIONS" in os.environ and path != os.environ["HYPO_INSTRUCTIONS"]:
        pytest.skip(f"this run is on {os.environ['HYPO_INSTRUCTIONS']} alone")
    if missing := set(NEEDED[path]) - cpu_features():
        pytest.skip(f"this CPU has no {', '.join(sorted(missing))}")
    if path == "avx512-bf16" and lang.cpu_name().startswith("znver"):  # `test_bf16.py` says why
        types = tuple(name for name in types if name not in ("F16", "BF16"))
    done = child(path, *types)
    assert done.returncode == 0, done.stderr[-2000:]
    answer = json.loads(done.stdout)
    assert answer["path"] == path
    assert answer["wrong"] == dict.fromkeys(types, 0)


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
    monkeypatch.setattr(lang, "cpu_features", lambda: frozenset(every - set(lacking.split())))
    monkeypatch.setattr(lang, "cpu_name", lambda: cpu)
    monkeypatch.setattr(lang, "_asked_for", "")
    assert lang.instruction_set() == path


def test_vdpbf16ps_is_used_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lang, "cpu_features", lambda: frozenset(NEEDED["avx512-bf16"]))
    monkeypatch.setattr(lang, "cpu_name", lambda: "emeraldrapids")
    monkeypatch.setattr(lang, "_asked_for", "avx512-bf16")
    assert lang.instruction_set() == "avx512-bf16"


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
