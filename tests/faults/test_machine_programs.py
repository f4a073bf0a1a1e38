"""Programs as AMD's machine code: whose findings are right, and which of them there are.

`python -m faults --platform emu:mi300x machine` runs them; here their reports are made up.
"""

from __future__ import annotations

from typing import Any

import pytest

from faults.catalogue import chosen
from faults.machine import HIP, PLANTED, MachineCase, hip_truths, hip_verdict, machine_cases, row_of
from faults.row import Platform, Role
from hypocenter.base.errors import UsageError

ALL = {case.name: case for case in machine_cases()}


def _finding(case: MachineCase, **changed: Any) -> dict[str, Any]:
    """What is right of a case."""
    program, (kinds, arguments) = case.program, PLANTED[case.name]
    name = program.file.name
    lines = [line for _, line in program.truth.places(name, program.text)] or [1]
    return {
        "kind": kinds[0],
        "kernel": program.truth.kernels[0],
        "argument": arguments[0],
        "sites": [{"file": name, "line": lines[0]}],
        "launched_at": {"file": name, "line": 1},
        "detail": "",
        **changed,
    }


def _row(
    case: MachineCase, *findings: dict[str, Any], why: str = "", role: Role = Role.FAULT
) -> Any:
    launch = {"kernel": "k", "unexecuted": why}
    report = {"findings": list(findings), "launches": [launch], "error": None}
    return row_of(case, role, 4 if findings else 0, report, 1.0)


def test_twenty_have_a_fault_and_each_has_a_twin_and_the_others_are_healthy() -> None:
    assert len(PLANTED) == 20
    assert PLANTED.keys() <= ALL.keys()
    healthy = [case for name, case in ALL.items() if name not in PLANTED]
    assert len(healthy) >= 20
    assert all(case.program.is_healthy for case in healthy)
    assert all(ALL[name].program.has_twin for name in PLANTED)


@pytest.mark.parametrize("name", sorted(PLANTED))
def test_what_is_right_is_right(name: str) -> None:
    case = ALL[name]
    row = _row(case, _finding(case))
    assert (row.says, row.is_as_wanted) == ("right", True)


@pytest.mark.parametrize("wrong", [
    {"kind": "assertion"}, {"kernel": "another"}, {"argument": "n"},
    {"sites": [{"file": "norm_tail.py", "line": 2}]},
])  # fmt: skip
def test_what_is_wrong_in_one_claim_is_false(wrong: dict[str, Any]) -> None:
    case = ALL["norm_tail"]
    assert _row(case, _finding(case, **wrong)).says == "false"
    # Beside what is right, too.
    assert _row(case, _finding(case), _finding(case, **wrong)).says == "false"


def test_silence_a_launch_that_was_not_executed_and_an_alarm_are_not_as_wanted() -> None:
    case = ALL["norm_tail"]
    assert _row(case).says == "silent"
    assert not _row(case, _finding(case), why="not modelled").is_as_wanted
    assert _row(case, _finding(case), role=Role.TWIN).is_alarm
    assert not _row(case, role=Role.TWIN).is_alarm


def test_it_runs_on_the_emulator_alone_and_only_when_asked() -> None:
    assert chosen(["machine"], Platform.EMULATED, has_card=False)
    with pytest.raises(UsageError, match="machine runs on emu:mi300x only"):
        chosen(["machine"], None, has_card=True)


def _hip_finding(name: str) -> dict[str, Any]:
    """What is right of a HIP kernel: its guilty line is the first of two that read alike."""
    (kind,), (argument,), (line,) = (
        getattr(hip_truths()[name], claim) for claim in ("causes", "arguments", "lines")
    )
    file = HIP / f"{name}.hip"
    at = next(n for n, text in enumerate(file.read_text().splitlines(), 1) if line in text)
    return {
        "kind": kind,
        "kernel": name,
        "argument": argument or None,
        "sites": [{"file": str(file), "line": at}],
        "launched_at": None,
        "detail": "",
    }


@pytest.mark.parametrize("name", sorted(hip_truths()))
def test_a_hip_kernel_is_judged_by_the_same_claims(name: str) -> None:
    right = _hip_finding(name)
    assert hip_verdict(name, [right]).says == "right"
    assert hip_verdict(name, []).says == "silent"
    site = right["sites"][0]
    for wrong in (
        {"kind": "assertion"},
        {"kernel": f"{name}_healthy"},
        {"argument": "another"},
        {"sites": [site | {"line": 1}]},
    ):
        assert hip_verdict(name, [right | wrong]).says == "false", wrong


def test_the_line_of_the_healthy_twin_is_not_guilty() -> None:
    right = _hip_finding("missing_barrier")
    twin = [{**right["sites"][0], "line": 13}]
    assert hip_verdict("missing_barrier", [right | {"sites": twin}]).says == "false"
