"""Reasons for what was not tested are true of the bundle that they are given for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from recorded.bundles import Run

from hypocenter.doctor.case import Case
from hypocenter.doctor.causes import CAUSES, Cause
from hypocenter.doctor.diagnosis import Diagnosis, Hypothesis, RungRecord, Verdict
from hypocenter.doctor.doctor import diagnose
from hypocenter.doctor.examining.untested import is_traced, why_untested
from hypocenter.doctor.report import report_text
from hypocenter.doctor.report_parts import rungs_text
from hypocenter.record.bundle import Bundle
from hypocenter.record.contents import Snapshot
from hypocenter.record.events import (
    FOREIGN,
    OUTSIDE_PLANS,
    Allocated,
    AllocationRecord,
    ArgumentRecord,
    Called,
    Launched,
    LaunchRecord,
    SourceRecord,
    TensorRecord,
    UnwrittenRead,
    Values,
)
from hypocenter.record.fault_record import FaultRecord

TEXT = """@triton.jit
def add(x_ptr, z_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    tl.store(z_ptr + at, tl.load(x_ptr + at, mask=mask), mask=mask)
"""
SOURCE = SourceRecord(
    id="s", function="add", file="/work/me/add.py", first_line=7, text=TEXT, callees=(),
    constants={},
)  # fmt: skip
#: What each reason says of a bundle, by words that stand in it alone.
SAYS: dict[str, Callable[[Case], bool]] = {
    "the run was not traced": lambda case: not is_traced(case),
    "was not watched": lambda case: (
        not (case.bundle.sees_reads or "HYPO_TRACE" in case.bundle.environment)
    ),
    "nothing was kept of what launches gave": lambda case: not case.bundle.outcomes,
    "no launch of this run was recorded": lambda case: not case.launches,
    "what this program's kernels expect": lambda case: case.is_foreign,
    "limits of the device are not known": lambda case: case.bundle.limits is None,
    "no step was past its deadline": lambda case: case.bundle.fault.kind != "hang",
    "no step recorded its requests": lambda case: not any(s.requests for s in case.steps),
    "torch was seen to read nothing unwritten": lambda case: (
        case.bundle.sees_reads and not case.index.unwritten_reads
    ),
    "lets nobody see its operations": lambda case: not case.bundle.sees_reads,
    "small launches are kept with --suspect": lambda case: case.is_foreign,
    "small enough that all": lambda case: not case.bundle.outcomes,
    "with --good": lambda case: case.good is None,
}


def foreign(*, num_elements: int = 1000, dtype: str = "F32", **fields: Any) -> Bundle:
    """A program's launch of `add`, that was given x and z."""
    tensors, made = [], []
    for number, name in ((1, "x"), (2, "z")):
        size = 4 * num_elements
        tensors.append(
            TensorRecord(
                id=number, name=name, owner=FOREIGN, dtype=dtype if name == "z" else "F32",
                shape=(num_elements,), strides=(1,), offset=0, allocation=number,
                address=number << 20, extent_bytes=size,
            )
        )  # fmt: skip
        memory = AllocationRecord(
            id=number, kind="device", device="interpreter", address=number << 20, num_bytes=size,
            name=name, owner=FOREIGN, site="",
        )  # fmt: skip
        made.append(Allocated(seq=number, step=0, allocation=memory))
    launch = LaunchRecord(
        kernel="add", function="add", device="interpreter", grid=(3,), source="s",
        arguments=(
            ArgumentRecord("x_ptr", 1), ArgumentRecord("z_ptr", 2), ArgumentRecord("n", None, 1000)
        ),
        constants={"BLOCK": 256}, site="/work/me/add.py:20",
    )  # fmt: skip
    events = (*made, Launched(seq=9, step=1, launch=launch), *fields.pop("read", ()))
    fault = FaultRecord(kind="none", message="")
    return Bundle(
        kind="suspect", fault=fault, device="interpreter", tensors=tuple(tensors),
        sources=(SOURCE,), events=events, **fields,
    )  # fmt: skip


def read(*, is_decided: bool) -> UnwrittenRead:
    return UnwrittenRead(
        seq=10, step=1, tensor=2, operation="sub", site="/work/me/add.py:21", num_unwritten=232,
        num_elements=1000, first=(768,), last=(999,), is_decided=is_decided,
    )  # fmt: skip


SUSPECT: dict[str, Any] = {"environment": {"HYPO_TRACE": "1"}, "sees_reads": True}
BUNDLES = {
    "a program": foreign(),
    "a program with --suspect": foreign(**SUSPECT),
    "with an older torch": foreign(environment={"HYPO_TRACE": "1"}),
    "of which much is not watched": foreign(num_elements=1 << 20, **SUSPECT),
    "that read unwritten elements": foreign(read=(read(is_decided=False),), **SUSPECT),
    "that hung": msgspec.structs.replace(
        foreign(), kind="hang", fault=FaultRecord(kind="hang", message="no end")
    ),
    "an engine": Run().bundle(),
    "nothing": Bundle(kind="crash", fault=FaultRecord(kind="crash", message="ended")),
}


def untested(found: Diagnosis) -> list[Hypothesis]:
    return [h for h in found.hypotheses if h.verdict is Verdict.NOT_TESTED]


@pytest.mark.parametrize("name", BUNDLES)
def test_every_reason_is_true_of_its_bundle(name: str) -> None:
    bundle = BUNDLES[name]
    found = diagnose(bundle, allow_source=True)
    case = Case(bundle, None, allow_source=True)
    assert untested(found)
    for hypothesis in untested(found):
        for text in hypothesis.evidence:
            known = [holds for words, holds in SAYS.items() if words in text]
            assert all(holds(case) for holds in known), (hypothesis.cause, text)
    for cause in Cause:  # those that no symptom of these bundles puts in question as well
        text = why_untested(case, cause)
        known = [holds for words, holds in SAYS.items() if words in text]
        assert all(holds(case) for holds in known), (cause, text)


def test_each_reason_of_the_table_of_causes_is_checked_or_cannot_be_untrue() -> None:
    """These begin as sentences do that no fact could deny; of any other SAYS says what does."""
    free = (
        "what this run recorded does not show it", "arguments: index values", "replay: it was left",
        "refusals: no", "states: no layer", "tuning: no trial",
    )  # fmt: skip
    for cause, row in CAUSES.items():
        is_checked = any(words in row.untested for words in SAYS)
        assert is_checked or row.untested.startswith(free), cause


def reasons(bundle: Bundle) -> str:
    [found] = [
        h for h in untested(diagnose(bundle, allow_source=True))
        if h.cause is Cause.OUTPUT_NOT_WRITTEN
    ]  # fmt: skip
    return "; ".join(found.evidence)


def test_what_was_watched_is_told_with_what_was_not() -> None:
    assert "--suspect marks new memory" in reasons(foreign())
    assert "nothing unwritten of 2 tensors" in reasons(foreign(**SUSPECT))
    large = reasons(foreign(num_elements=1 << 20, **SUSPECT))
    assert "of 0 tensors of floats; not watched: x (F32, 4194304 bytes), z" in large
    integers = reasons(foreign(dtype="I32", **SUSPECT))
    assert "of 1 tensor of floats; not watched: z (I32, 4000 bytes), for only floats" in integers


@pytest.mark.parametrize("is_decided", [False, True])
def test_a_read_of_what_nobody_wrote_is_told_exactly(is_decided: bool) -> None:
    found = diagnose(foreign(read=(read(is_decided=is_decided),), **SUSPECT))
    [told] = [h for h in found.hypotheses if h.cause is Cause.OUTPUT_NOT_WRITTEN]
    assert told.verdict is (Verdict.CONFIRMED if is_decided else Verdict.INCONCLUSIVE)
    assert (told.kernel, told.argument) == ("add", "z_ptr")
    assert told.evidence[0] == (
        "232 of 1000 elements of z, [768] to [999], were written by nobody when sub read z at "
        "/work/me/add.py:21"
    )
    assert found.is_clean != is_decided
    assert not found.roots
    words = " ".join(report_text(found).split())
    assert ("padding is read so too" in words) != is_decided


def test_what_may_be_a_number_that_a_launch_made_is_not_told_as_unwritten() -> None:
    """NaN keeps its bits in sums: a launch that reads what nobody wrote may store them."""
    summing = TEXT.replace("tl.load(x_ptr + at, mask=mask)", "tl.load(x_ptr + at, mask=mask) + 1")
    nobody = np.full(1000, 0xFFFFFFFF, np.uint32).tobytes()
    bundle = foreign(read=(read(is_decided=True),), **SUSPECT)
    values = (Values(1, "F32", (1000,), nobody), Values(2, "F32", (1000,), nobody))
    bundle = msgspec.structs.replace(
        bundle,
        sources=(msgspec.structs.replace(SOURCE, text=summing),),
        snapshots=(Snapshot(1, OUTSIDE_PLANS, 9, values),),
    )
    found = diagnose(bundle, allow_source=True)
    assert [root.cause for root in found.roots] == [Cause.UNINITIALISED_READ]
    [told] = [h for h in found.hypotheses if h.cause is Cause.OUTPUT_NOT_WRITTEN]
    assert told.verdict is Verdict.INCONCLUSIVE
    assert "had the bits of what nobody wrote when sub read z" in told.evidence[0]
    assert told.evidence[1].startswith("add reads such elements of x_ptr: NaN that is made of them")


def test_nothing_is_said_of_launches_or_streams_where_none_was_recorded() -> None:
    """As of C++ of torch.compile's: the program's last statement is all that there is."""
    run = Run()
    run.emit(Called, call="print(model(x))", outcome="RuntimeError", is_statement=True)
    found = diagnose(run.bundle(FaultRecord(kind="error", message="RuntimeError")))
    rows = {row.cause: row for row in found.hypotheses}
    for cause in (Cause.MISSING_WAIT, Cause.REWRITTEN_IN_FLIGHT, Cause.LOST_EVENT):
        assert rows[cause].verdict is Verdict.NOT_TESTED
    text = report_text(found, show_all=True)
    assert "none of this run was recorded, so none was replayed" in text
    assert "next to nothing" not in text
    assert "replays the launches" not in text


def test_checks_that_took_no_time_are_counted() -> None:
    run = Run()
    found = diagnose(run.bundle(FaultRecord(kind="error", message="RuntimeError")))
    quick = RungRecord(name="limits", seconds=0.0004)
    slow = RungRecord(name="replay", seconds=0.31)
    left = RungRecord(name="values", seconds=0.0, left_out="no time was left")
    shown = msgspec.structs.replace(found, rungs=(quick, slow, left, quick), seconds=0.32)
    assert rungs_text(shown) == (
        "values (no time was left), replay 310 ms, 2 others under 1 ms each; 0.32 s in all"
    )
