"""What the doctor says of uses that nothing orders in a program that is not hypocenter's."""

from __future__ import annotations

from typing import Any

import pytest
from recorded.bundles import Run

from hypocenter.doctor.causes import Cause
from hypocenter.doctor.diagnosis import Diagnosis, Verdict
from hypocenter.doctor.doctor import diagnose
from hypocenter.doctor.report import report_text
from hypocenter.order.clocks import HOST
from hypocenter.record.events import FOREIGN, Launched
from hypocenter.record.order_events import (
    Disorder,
    Disordered,
    OrderStep,
    OrderWatched,
    UseRecord,
)

FILL = """@triton.jit
def fill_part_kernel(x, start, n, B: tl.constexpr):
    i = start + tl.program_id(0) * B + tl.arange(0, B)
    tl.store(x + i, 1.0, mask=i < n)
"""
SIDE = "0x55"


def use(line: int, stream: str, *, write: bool, **other: Any) -> UseRecord:
    name = {SIDE: "side", HOST: HOST}.get(stream, "torch.cuda.default_stream()")
    fields = {"address": 4096, "end": 8192, "what": "torch.mul", "argument": "self", **other}
    return UseRecord(
        site=f"/t/train.py:{line}", stream=stream, stream_name=name, is_write=write, **fields
    )


def found(kind: Disorder, first: UseRecord, second: UseRecord, **other: Any) -> Disordered:
    return Disordered(seq=9, step=0, kind=kind, first=first, second=second, tensor="x", **other)


def diagnosis_of(*events: Any, run: Run | None = None) -> Diagnosis:
    run = run or Run()
    watched = OrderWatched(
        seq=99, step=0, num_operations=12, num_launches=0, streams=("default", SIDE), num_waits=1
    )
    bundle = run.bundle()
    return diagnose(
        type(bundle)(**{name: getattr(bundle, name) for name in bundle.__struct_fields__}
                     | {"events": (*bundle.events, *events, watched)}),
        allow_source=True,
    )  # fmt: skip


def verdict_of(diagnosis: Diagnosis, cause: Cause) -> Verdict:
    [verdict] = [row.verdict for row in diagnosis.hypotheses if row.cause is cause]
    return verdict


WAIT = found(Disorder.WAIT, use(3, "default", write=True), use(5, SIDE, write=False))


def test_a_missing_wait_is_named_with_both_lines_and_the_call() -> None:
    diagnosis = diagnosis_of(WAIT)
    [root] = diagnosis.roots
    assert root.cause is Cause.MISSING_WAIT
    assert (root.file, root.line) == ("/t/train.py", 5)
    assert root.fix == "side.wait_stream(torch.cuda.default_stream()) before /t/train.py:5"
    assert "/t/train.py:3" in root.sentence
    assert root.tensor == "x"
    text = report_text(diagnosis)
    assert "missing wait between streams" in text
    assert verdict_of(diagnosis, Cause.READ_IN_FLIGHT) is Verdict.REFUTED


def test_what_the_record_itself_orders_is_no_finding() -> None:
    steps = (OrderStep("record", "default", 1), OrderStep("wait", SIDE, 1))
    ordered = found(WAIT.kind, WAIT.first, WAIT.second, between=steps)
    diagnosis = diagnosis_of(ordered)
    assert diagnosis.roots == ()
    assert verdict_of(diagnosis, Cause.MISSING_WAIT) is Verdict.REFUTED
    other_way = (OrderStep("record", SIDE, 1), OrderStep("wait", "default", 1))
    assert diagnosis_of(found(WAIT.kind, WAIT.first, WAIT.second, between=other_way)).roots


def test_of_what_is_cut_nothing_is_proven() -> None:
    diagnosis = diagnosis_of(found(WAIT.kind, WAIT.first, WAIT.second, is_cut=True))
    assert diagnosis.roots == ()
    assert verdict_of(diagnosis, Cause.MISSING_WAIT) is Verdict.INCONCLUSIVE


@pytest.mark.parametrize(
    ("kind", "first", "second", "cause", "fix"),
    [
        (
            Disorder.HOST_READ, use(3, "default", write=True), use(5, HOST, write=False),
            Cause.READ_IN_FLIGHT, "torch.cuda.default_stream().synchronize() before /t/train.py:5",
        ),
        (
            Disorder.HOST_WRITE, use(3, SIDE, write=False), use(5, HOST, write=True),
            Cause.REWRITTEN_IN_FLIGHT, "side.synchronize() before /t/train.py:5",
        ),
    ],
)  # fmt: skip
def test_the_host(
    kind: Disorder, first: UseRecord, second: UseRecord, cause: Cause, fix: str
) -> None:
    [root] = diagnosis_of(found(kind, first, second)).roots
    assert (root.cause, root.fix) == (cause, fix)


def test_memory_that_is_freed_too_early_is_blamed_on_the_line_that_frees_it() -> None:
    reused = found(
        Disorder.REUSED, use(4, SIDE, write=False), use(7, "default", write=True),
        made="/t/train.py:2", freed="/t/train.py:6",
    )  # fmt: skip
    [root] = diagnosis_of(reused).roots
    assert root.cause is Cause.REUSED_IN_FLIGHT
    assert root.culprit is not None
    assert root.culprit.place == "/t/train.py:6"
    assert root.fix == (
        "record_stream(side) of the tensor made at /t/train.py:2 before it is freed at "
        "/t/train.py:6"
    )


@pytest.mark.parametrize(("start", "is_proven"), [(0, True), (128, False)])
def test_launches_that_fill_parts_of_one_tensor(start: int, is_proven: bool) -> None:
    """The two replays say whether they touch the same bytes."""
    run = Run()
    x = run.tensor("x", "F32", 256, owner=FOREIGN)
    numbers = []
    for at in (0, start):
        run.step += 1
        given = {"x": "x", "start": at, "n": 256}
        launch = run.launch(
            "fill_part",
            {},
            given,
            source=FILL,
            grid=(2,),
            constants={"B": 64},
            site="/t/train.py:8",
        )
        numbers.append(run.emit(Launched, launch=launch).seq)
    span = {"address": x.address, "end": x.address + 1024, "what": "fill_part", "argument": "x"}
    first = use(8, "default", write=True, launch=numbers[0], **span)
    second = use(9, SIDE, write=True, launch=numbers[1], **span)
    diagnosis = diagnosis_of(found(Disorder.WAIT, first, second, is_whole=False), run=run)
    causes = [root.cause for root in diagnosis.roots]
    assert (Cause.MISSING_WAIT in causes) == is_proven
    expected = Verdict.CONFIRMED if is_proven else Verdict.REFUTED
    assert verdict_of(diagnosis, Cause.MISSING_WAIT) is expected
