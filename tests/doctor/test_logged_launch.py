"""The launch that a runtime's log ends in, and what is told of the page of a fault beside it."""

from __future__ import annotations

import pytest

from hypocenter.doctor.causes import Cause
from hypocenter.doctor.diagnosis import Diagnosis, Verdict
from hypocenter.doctor.doctor import diagnose
from hypocenter.doctor.report import report_text
from hypocenter.doctor.report_parts import Origin
from hypocenter.doctor.rungs.driver.logged_launch import NAME, NEAR_BYTES
from hypocenter.record.bundle import Bundle
from hypocenter.record.fault_record import FaultRecord
from hypocenter.record.logged_launch import LoggedArgument, LoggedLaunch

X, POSITIONS = 0x7F3E5A200000, 0x7F3E5A3FF000
LAUNCH = LoggedLaunch(
    kernel="rope",
    call="hipLaunchKernel",
    variable="AMD_SERIALIZE_KERNEL=3",
    num_launches=2,
    grid=(32, 4, 1),
    block=(64, 1, 1),
    arguments=(
        LoggedArgument(number=0, value=X, is_address=True, first=X, past=X + 0x10000),
        LoggedArgument(
            number=1,
            name="positions",
            value=POSITIONS,
            is_address=True,
            first=POSITIONS,
            past=POSITIONS + 4096,
        ),
        LoggedArgument(number=2, name="heads", value=4),
    ),
)
NULL = LoggedArgument(number=3, name="bias", value=0, is_address=True)


def found(page: int | None, launch: LoggedLaunch | None = LAUNCH) -> Diagnosis:
    fault = FaultRecord(kind="crash", message="Memory access fault", address=page)
    return diagnose(Bundle(kind="crash", fault=fault, logged_launch=launch))


def told(diagnosis: Diagnosis) -> list[tuple[Cause, str | None]]:
    assert not diagnosis.is_proven
    rows = [row for row in diagnosis.hypotheses if row.diagnostic == NAME]
    assert all(row.verdict is Verdict.INCONCLUSIVE for row in rows)
    return [(row.cause, row.argument) for row in rows]


def with_arguments(*arguments: LoggedArgument) -> LoggedLaunch:
    return LoggedLaunch(
        kernel="rope", call="hipLaunchKernel", variable="HIP_LAUNCH_BLOCKING=1", num_launches=1,
        arguments=arguments,
    )  # fmt: skip


@pytest.mark.parametrize(("page", "words"), [
    (POSITIONS + 4096, "begins right behind the memory of parameter 1 (positions), 4096 bytes"),
    (POSITIONS + 3 * 4096, "begins 8192 bytes behind the end of the memory of parameter 1"),
    (X - 4096, f"begins 4096 bytes before the memory of parameter 0, 65536 bytes from {X:#x}"),
])  # fmt: skip
def test_a_page_is_told_by_the_memory_that_it_is_nearest_to(page: int, words: str) -> None:
    diagnosis = found(page)
    assert [cause for cause, _ in told(diagnosis)] == [Cause.ACCESS_OUTSIDE]
    text = " ".join(report_text(diagnosis, Origin("b")).split())
    assert words in text
    assert "hipLaunchKernel of rope, grid (32, 4, 1), blocks of (64, 1, 1) threads" in text


def test_one_null_address_is_told_of_a_fault_at_page_zero() -> None:
    assert told(found(0, with_arguments(NULL))) == [(Cause.NULL_POINTER, "parameter 3 (bias)")]
    # Of two it is not known which one; and one that is null need not be used.
    assert told(found(0, with_arguments(NULL, LAUNCH.arguments[0], NULL))) == []
    assert told(found(X - 4096, with_arguments(NULL))) == []


@pytest.mark.parametrize("page", [
    None, X, POSITIONS, POSITIONS + 4095, POSITIONS + 4096 + NEAR_BYTES, X - NEAR_BYTES,
])  # fmt: skip
def test_a_page_inside_or_far_away_says_nothing(page: int | None) -> None:
    diagnosis = found(page)
    assert told(diagnosis) == []
    # The launch itself is told all the same.
    assert "hipLaunchKernel of rope" in diagnosis.surfaced


def test_without_a_log_nothing_is_said() -> None:
    assert told(found(POSITIONS + 4096, None)) == []
    assert "hipLaunchKernel" not in found(POSITIONS + 4096, None).surfaced
