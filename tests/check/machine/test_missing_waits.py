"""`check --on` of code objects in which a wait is missing; one that is whole has no finding."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from machine.amd_planted import instructions_of, without, without_each_wait
from repository import ROOT

from hypocenter.base.errors import HypoError
from hypocenter.check.machine.check_file import check_machine
from hypocenter.check.machine.launch import launch
from hypocenter.check.report import report_text
from hypocenter.device.amd.code_object import read_code_object
from hypocenter.device.amd.hip import compile_hip
from hypocenter.replay.findings import Finding, FindingKind

ROPE = (ROOT / "tests/fixtures/amd/rope.gfx942.co").read_bytes()
LAUNCH = """
code = "rope.co"
[[launch]]
kernel = "rope"
grid = [2, 2]
block = 64
[launch.arguments]
x = { shape = [2, 2, 8], fill = "normal" }
positions = { dtype = "int32", shape = [2], fill = "arange" }
num_heads = 2
head_dim = 8
base = 10000.0
"""


def _check(folder: Path, code: bytes) -> tuple[str, int]:
    (folder / "rope.co").write_bytes(code)
    (folder / "rope.toml").write_text(LAUNCH)
    report = check_machine(folder / "rope.toml", ("gfx942",), 60.0)
    return report_text(report), len(report.findings)


def test_a_wait_that_is_taken_away_is_named_with_place_and_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where the object says that its source lies
    shutil.copy(ROOT / "examples" / "rope.hip", tmp_path)
    assert _check(tmp_path, ROPE)[1] == 0
    (wait, changed), *_ = (pair for pair in without_each_wait(ROPE) if pair[0].pc == 0x1738)
    text, num_found = _check(tmp_path, changed)
    assert num_found == 1
    assert wait.name == "S_WAITCNT"
    assert "rope.hip:12: missing wait: register in rope" in text
    assert "float angle = positions[token] * powf(base, -2.0f * pair / head_dim);" in text
    assert (
        "s0 is used before it has arrived: s_load_dword at pc +0x110, and no wait of lgkmcnt "
        "before v_cvt_f32_i32 at pc +0x13c" in text
    )


@pytest.mark.parametrize("number", range(5))
def test_no_wait_of_the_kernel_can_be_left_out(number: int, tmp_path: Path) -> None:
    _, changed = without_each_wait(ROPE)[number]
    (tmp_path / "rope.co").write_bytes(changed)
    (tmp_path / "rope.toml").write_text(LAUNCH)
    (found,) = check_machine(tmp_path / "rope.toml", ("gfx942",), 60.0).findings
    assert (found.kind, found.program, found.num_programs) == (FindingKind.MISSING_WAIT, None, 0)
    assert found.line is not None


def _exchanged(data: bytes, num_threads: int) -> tuple[Finding, ...]:
    """What a kernel has whose threads read what others wrote to LDS, with a barrier between."""
    arrays = {name: np.zeros(256, np.float32) for name in ("out", "x")}
    code = read_code_object(data, "exchange")
    shape = (1,), (num_threads,)
    return launch(code, EXCHANGE, shape, arrays, arch="gfx942").findings


EXCHANGE = "missing_barrier_healthy"


@pytest.fixture(scope="module")
def exchange() -> bytes:
    try:
        return compile_hip(ROOT / "faults" / "hip" / "missing_barrier.hip", "gfx942")
    except HypoError as error:
        pytest.skip(str(error))


def test_a_write_that_is_not_waited_for_before_a_barrier_is_told_of_several_waves(
    exchange: bytes,
) -> None:
    assert _exchanged(exchange, 256) == ()
    names = [each.name for each in instructions_of(exchange, EXCHANGE)]
    before = names.index("S_BARRIER") - 1
    wait = instructions_of(exchange, EXCHANGE)[before]
    (found,) = _exchanged(without(exchange, wait, EXCHANGE), 256)
    assert (found.kind, found.operation) == (FindingKind.MISSING_WAIT, "barrier")
    assert "a write to shared memory is still under way at the barrier" in found.detail
    # Of one wave nobody else reads; it reads elements then that nobody wrote.
    kinds = [each.kind for each in _exchanged(without(exchange, wait, EXCHANGE), 64)]
    assert kinds == [FindingKind.UNINITIALISED_READ]


def test_a_barrier_that_is_taken_away_is_a_race(exchange: bytes) -> None:
    (barrier,) = (e for e in instructions_of(exchange, EXCHANGE) if e.name == "S_BARRIER")
    (found,) = _exchanged(without(exchange, barrier, EXCHANGE), 256)
    assert found.kind is FindingKind.RACE
    assert "with no barrier between" in found.detail
