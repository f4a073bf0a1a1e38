"""The doctor's rungs that need no Triton, on bundles made by hand: red, green, and left out."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pytest
from recorded.bundles import (
    BLOCK,
    BLOCKS,
    DIM,
    HEADS,
    POSITIONS,
    ROWS,
    VOCAB,
    Run,
    background,
    crash,
    decoder,
    inputs,
    step,
    tensors_of_decoder,
)

from hypocenter.base.errors import ErrorKind
from hypocenter.base.refusals import (
    AnyRefusal,
    EntryOutOfRange,
    EntryRepeated,
    FieldOutOfRange,
    FreedTensor,
    GridAxisTooLong,
    RuntimeRefused,
    SharedMemory,
    StateElsewhere,
    StateInUse,
    StateOfAnother,
    StateOfOtherTokens,
    TableTooShort,
)
from hypocenter.doctor.case import Case
from hypocenter.doctor.causes import Cause
from hypocenter.doctor.diagnosis import Diagnosis, Verdict
from hypocenter.doctor.doctor import LADDER, diagnose
from hypocenter.doctor.report import report_text
from hypocenter.doctor.report_parts import headline
from hypocenter.doctor.rungs.limits import limits
from hypocenter.record.bundle import Bundle
from hypocenter.record.engine_events import Answered
from hypocenter.record.events import (
    Allocated,
    ArgumentDeclaration,
    Called,
    Captured,
    Copied,
    Declaration,
    HostWrote,
    Place,
    Rejected,
    RequestRecord,
    Statistics,
    StreamEvent,
    Waited,
)
from hypocenter.record.fault_record import FaultRecord

WIDTH = HEADS * DIM


def test_a_launch_has_the_names_of_its_contract_first() -> None:
    """Its kernel's name for one tensor may be the contract's for another."""
    run = Run()
    read, made, _ = (run.tensor(name, "F32", 4) for name in ("x", "made", "extra"))
    facts, arguments = {"x": "x", "out": "made"}, {"y": "x", "x": "made", "out": "extra"}
    launch = run.launch("anything", facts, arguments)
    tensors = Case(run.bundle()).tensors_of(launch)
    assert {name: one.id for name, one in tensors.items()} == {"x": read.id, "out": made.id}


def healthy(**other: Any) -> Bundle:
    """A run of the decoder in which nothing is wrong; `other` replaces inputs."""
    run = Run()
    tensors_of_decoder(run)
    plan = decoder(run)
    for _ in range(2):
        step(run, plan, **other)
    run.copy_out("out")
    return run.bundle()


def with_inputs(**other: Any) -> Bundle:
    run = Run()
    tensors_of_decoder(run)
    step(run, decoder(run), **other)
    return run.bundle(crash())


def with_tensors(**other: dict[str, object]) -> Bundle:
    run = Run()
    tensors_of_decoder(run, **other)
    step(run, decoder(run))
    return run.bundle(crash())


def with_tables(value: int, row: int = 0) -> Bundle:
    tables = np.full((2, BLOCKS), -1, np.int32)
    tables[row, 0] = value
    return with_inputs(block_tables=tables)


def freed_weight() -> Bundle:
    run = Run()
    tensors_of_decoder(run)
    plan = decoder(run)
    step(run, plan)
    run.free("sin")
    step(run, plan)
    return run.bundle(crash())


def captured(free_first: bool = False) -> Bundle:
    run = Run()
    tensors_of_decoder(run)
    plan = decoder(run)
    everything = tuple(range(1, run.num_allocations + 1))
    step(run, plan)
    if not free_first:
        run.emit(Captured, graph=1, plan=plan, allocations=everything)
        run.free("k")
    step(run, plan, graph=0 if free_first else 1)
    return run.bundle(crash(run.tensors["k"].address))


def two_requests(
    blocks: tuple[int, ...], slots: list[int], table: int, position: int = 0
) -> Bundle:
    """Requests 7 and 8; the arguments are those of the second one."""
    run = Run()
    tensors_of_decoder(run)
    plan = decoder(run)
    tables = np.full((2, BLOCKS), -1, np.int32)
    tables[0, 0], tables[1, 0] = 2, table
    given = inputs(
        token_ids=[5, 6, 7], positions=[0, 1, position], slots=[32, 33, *slots],
        sequence_rows=[0, 0, 1], block_tables=tables,
    )  # fmt: skip
    requests = (
        RequestRecord(id=7, row=0, first_position=0, num_tokens=2, blocks=(2,)),
        RequestRecord(id=8, row=1, first_position=position, num_tokens=1, blocks=blocks),
    )
    run.run(plan, given, requests)
    return run.bundle(FaultRecord(kind="differs", message="the text is not that of the good run"))


def streams(*, waits: bool) -> Bundle:
    """A copy in stream `copies`, then the plan in the default stream."""
    run = Run()
    tensors_of_decoder(run)
    plan = decoder(run)
    q = run.tensors["q"]
    run.emit(Copied, direction="in", tensor=q.id, address=q.address, num_bytes=q.extent_bytes,
             stream="copies", site="loader.py:7")  # fmt: skip
    if waits:
        run.emit(StreamEvent, action="record", event=1, stream="copies")
        run.emit(StreamEvent, action="wait", event=1, stream="")
    step(run, plan)
    return run.bundle(FaultRecord(kind="differs", message=""))


def inputs_in_a_stream(*, waits: bool, is_awaited: bool | None = None) -> Bundle:
    """The step is told first; its inputs are copied in a stream of their own, then it waits.

    Of a result that is asked for before the host `is_awaited` the next inputs may come too early.
    """
    run = Run()
    tensors_of_decoder(run)
    plan = decoder(run)
    for number in (1, 2):
        step(run, plan)
        for name in inputs():
            tensor = run.tensors[name]
            run.emit(Copied, direction="in", tensor=tensor.id, address=tensor.address,
                     num_bytes=16, stream="copies")  # fmt: skip
        run.emit(StreamEvent, action="record", event=number, stream="copies")
        if waits:
            run.emit(StreamEvent, action="wait", event=number, stream="")
        if is_awaited is None:
            run.copy_out("out")
            continue
        out = run.tensors["out"]
        run.emit(Copied, direction="out", tensor=out.id, address=out.address,
                 num_bytes=out.extent_bytes, is_pinned=True)  # fmt: skip
        if is_awaited:
            run.emit(Waited, copied_in=run.step, tensor=out.id)
    return run.bundle(FaultRecord(kind="differs", message=""))


def pinned(*, waits: bool) -> Bundle:
    run = Run()
    tensors_of_decoder(run)
    plan = decoder(run)
    slots = run.tensors["slots"]
    run.emit(Copied, direction="in", tensor=slots.id, address=slots.address, num_bytes=16,
             host_address=0x7F0000, is_pinned=True, site="runner.py:5")  # fmt: skip
    if waits:
        run.emit(StreamEvent, action="synchronise", event=0, stream="")
    run.emit(HostWrote, host_address=0x7F0008, num_bytes=4, site="scheduler.py:9")
    step(run, plan)
    return run.bundle(FaultRecord(kind="differs", message=""))


def lost_event(*, recorded: bool) -> Bundle:
    run = Run()
    tensors_of_decoder(run)
    plan = decoder(run)
    if recorded:
        run.emit(StreamEvent, action="record", event=5, stream="")
    run.emit(StreamEvent, action="wait", event=5, stream="", site="runner.py:31")
    step(run, plan)
    return run.bundle(FaultRecord(kind="hang", message="a step had been running for 60 seconds"))


def launched(grid: tuple[int, ...] = (4, 2), num_warps: int = 4) -> Bundle:
    run = Run()
    tensors_of_decoder(run)
    run.tensor("weight", "F32", 16)
    launch = run.launch(
        "rms_norm",
        {"x": "x", "out": "out", "weight": "weight", "counts": "counts", "count": 0, "num_heads": 1,
         "width": 16, "eps": 1e-5},
        grid=grid, num_warps=num_warps,
    )  # fmt: skip
    step(run, run.plan(launch))
    return run.bundle(FaultRecord(kind="error", message="invalid configuration argument"))


def with_stride(stride: int) -> Bundle:
    """rope is told rows of q are `stride` elements apart."""
    run = Run()
    tensors_of_decoder(run)
    step(run, decoder(run, x_stride=stride))
    return run.bundle(FaultRecord(kind="differs", message=""))


def narrow(*, wide: bool) -> Bundle:
    run = Run()
    blocks = (1 << 31) // (HEADS * DIM * BLOCK) + 8
    tensors_of_decoder(
        run,
        k_cache={"shape": (blocks, HEADS, DIM, BLOCK)},
        v_cache={"shape": (blocks, HEADS, BLOCK, DIM)},
    )
    step(run, decoder(run, wide=wide))
    return run.bundle(crash())


def rejected(refusal: AnyRefusal, kernel: str = "", tensor: str = "") -> Bundle:
    run = Run()
    tensors_of_decoder(run)
    decoder(run)
    run.emit(Rejected, kernel=kernel, tensor=tensor, refusal=refusal)
    return run.bundle(FaultRecord(kind="error", message=f"{kernel}: {refusal}", call=kernel))


def of_unknown(name: str, *, freed: bool = False) -> Bundle:
    """A kernel without a contract, and a fault at `name`, which may be freed meanwhile."""
    run = Run()
    tensors_of_decoder(run, sin={"kind": "pinned", "address": 0x7F1200000000},
                       cos={"address": 0, "num_bytes": 0})  # fmt: skip
    step(run, run.plan(run.launch("theirs", {}, {f"{name}_ptr": name, "out_ptr": "out"})))
    if freed:
        run.free(name)
    return run.bundle(crash(run.tensors[name].address))


def pending(*, polled: bool) -> Bundle:
    run = Run()
    tensors_of_decoder(run)
    step(run, decoder(run))
    if not polled:
        run.emit(
            Called, call="launch of scale_kernel (grid=(0,1,1))", kernel="scale_kernel",
            outcome="hipErrorInvalidConfiguration (9)", site="ops.py:3",
        )  # fmt: skip
    run.emit(Called, call="copy_out", outcome="hipErrorInvalidConfiguration (9)")
    return run.bundle(
        FaultRecord(
            kind="error",
            call="copy_out",
            message="hipErrorInvalidConfiguration (9)",
            error="hipErrorInvalidConfiguration (9)",
        )
    )


def late_memory() -> Bundle:
    run = Run()
    tensors_of_decoder(run)
    run.emit(
        Called, call="allocate", outcome="hipErrorOutOfMemory (2): out of memory",
        kind=ErrorKind.OUT_OF_MEMORY,
    )  # fmt: skip
    step(run, decoder(run))
    return run.bundle(crash(0))


def traced(spoilt: dict[str, int], *, kernel: int = 1) -> Bundle:
    """Statistics after each launch; `spoilt` maps tensors to NaN after launch `kernel`."""
    run = Run()
    tensors_of_decoder(run)
    plan = decoder(run)
    step(run, plan)
    written = ("x", "q", "k_cache", "out")
    read = ("table", "cos", "sin", "k", "v", "v_cache")
    figures = []
    for number, name in enumerate(written):
        names = [name, *read, *spoilt] if number == kernel else [name]
        for one in dict.fromkeys(names):
            num_nan = spoilt.get(one, 0) if number >= kernel else 0
            figures.append(
                Statistics(
                    place=Place(1, plan, number), tensor=run.tensors[one].id, digest="", low=0.0,
                    high=1.0, mean=0.5, rms=0.5, num_nan=num_nan, num_inf=0,
                    first_nonfinite=(0, 1) if num_nan else None,
                )
            )  # fmt: skip
    fault = FaultRecord(kind="nonfinite", message="logits row 0: 512 of 512 values are NaN")
    return run.bundle(fault, statistics=tuple(figures))


@dataclass(frozen=True)
class Expected:
    """A defect: the bundle with it, the one without, and what the report must say."""

    red: Callable[[], Bundle]
    green: Callable[[], Bundle]
    cause: Cause
    kernel: str | None
    argument: str | None
    rung: str
    text: str = ""


CASES: dict[str, Expected] = {
    "dtype width": Expected(
        background, healthy, Cause.DTYPE_WIDTH, "rope", "positions", "arguments",
        "tl.load(positions_ptr + token)",
    ),
    "half the bytes": Expected(
        lambda: with_tensors(positions={"num_bytes": 2 * ROWS}), healthy, Cause.DTYPE_WIDTH,
        "rope", "positions", "arguments", "tl.load(positions_ptr + token)",
    ),
    "half the rows": Expected(
        lambda: with_tensors(q={"num_bytes": 2 * WIDTH * 4}), healthy, Cause.BUFFER_TOO_SMALL,
        "rope", "x", "arguments",
    ),
    "too few positions": Expected(
        lambda: with_tensors(sin={"shape": (POSITIONS - 1, DIM // 2)}), healthy,
        Cause.BUFFER_TOO_SMALL, "rope", "sin", "arguments", "sin_ptr",
    ),
    "null": Expected(
        lambda: with_tensors(cos={"address": 0, "num_bytes": 0}), healthy, Cause.NULL_POINTER,
        "rope", "cos", "arguments", "cos_ptr",
    ),
    "host pointer": Expected(
        lambda: with_tensors(cos={"kind": "pinned", "address": 0x7F1200000000}), healthy,
        Cause.HOST_POINTER, "rope", "cos", "arguments", "cos_ptr",
    ),
    "another device": Expected(
        lambda: with_tensors(cos={"device": "sim:h200"}), healthy, Cause.WRONG_DEVICE, "rope",
        "cos", "arguments",
    ),
    "misaligned": Expected(
        lambda: with_tensors(cos={"address": (1 << 61) + 2}), healthy, Cause.MISALIGNMENT, "rope",
        "cos", "arguments",
    ),
    "strided": Expected(
        lambda: with_tensors(cos={"strides": (1, POSITIONS)}), healthy, Cause.WRONG_STRIDE,
        "rope", "cos", "arguments",
    ),
    "token beyond": Expected(
        lambda: with_inputs(token_ids=[5, VOCAB, 7]), healthy, Cause.TOKEN_RANGE, "lookup",
        "token_ids", "arguments",
    ),
    "position beyond": Expected(
        lambda: with_inputs(positions=[0, 1, POSITIONS]), healthy, Cause.POSITION_RANGE, "rope",
        "positions", "arguments", "tl.load(positions_ptr + token)",
    ),
    "block beyond": Expected(
        lambda: with_tables(40_000), healthy, Cause.BLOCK_TABLE_RANGE, "attention", "block_tables",
        "arguments",
    ),
    "sentinel": Expected(
        lambda: with_tables(-1), healthy, Cause.SENTINEL_CONSUMED, "attention", "block_tables",
        "arguments",
    ),
    "slot beyond": Expected(
        lambda: with_inputs(slots=[10**6, 10**6 + 1, 10**6 + 2]), healthy, Cause.INDEX_RANGE,
        "kv_write", "slots", "arguments", "tl.load(slots_ptr + token)",
    ),
    "freed": Expected(
        freed_weight, healthy, Cause.USE_AFTER_FREE, "rope", "sin", "arguments", "sin_ptr",
    ),
    "captured": Expected(
        captured, healthy, Cause.CAPTURED_POINTER, "kv_write", "k", "captured pointers", "k_ptr",
    ),
    "stale slot": Expected(
        lambda: two_requests((5,), [40], 5), lambda: two_requests((5,), [80], 5),
        Cause.STALE_SLOT, "kv_write", "slots", "ownership",
    ),
    "foreign block": Expected(
        lambda: two_requests((5,), [80], 2), lambda: two_requests((5,), [80], 5),
        Cause.FOREIGN_BLOCK, "attention", "block_tables", "ownership",
    ),
    "one block, two owners": Expected(
        lambda: two_requests((2,), [37], 2, 5), lambda: two_requests((5,), [80], 5),
        Cause.FOREIGN_BLOCK, "attention", "block_tables", "ownership",
    ),
    "missing wait": Expected(
        lambda: streams(waits=False), lambda: streams(waits=True), Cause.MISSING_WAIT, "rope", "x",
        "order",
    ),
    "inputs without a wait": Expected(
        lambda: inputs_in_a_stream(waits=False), lambda: inputs_in_a_stream(waits=True),
        Cause.MISSING_WAIT, "lookup", "token_ids", "order",
    ),
    "a result that nobody has waited for": Expected(
        lambda: inputs_in_a_stream(waits=True, is_awaited=False),
        lambda: inputs_in_a_stream(waits=True, is_awaited=True),
        Cause.MISSING_WAIT, "lookup", "token_ids", "order",
    ),
    "rewritten": Expected(
        lambda: pinned(waits=False), lambda: pinned(waits=True), Cause.REWRITTEN_IN_FLIGHT,
        "kv_write", "slots", "order",
    ),
    "lost event": Expected(
        lambda: lost_event(recorded=False), lambda: lost_event(recorded=True), Cause.LOST_EVENT,
        None, "event 5", "order",
    ),
    "empty grid": Expected(
        lambda: launched((0, 2)), launched, Cause.EMPTY_LAUNCH, "rms_norm", "grid", "limits",
    ),
    "grid": Expected(
        lambda: launched((1, 65_536)), launched, Cause.GRID_LIMIT, "rms_norm", "grid", "limits",
    ),
    "grid product": Expected(
        lambda: launched((1 << 17, 1 << 15, 1)), launched, Cause.GRID_PRODUCT, "rms_norm", "grid",
        "limits",
    ),
    "threads": Expected(
        lambda: launched(num_warps=32), launched, Cause.THREAD_LIMIT, "rms_norm", "num_warps",
        "limits",
    ),
    "stride": Expected(
        lambda: with_stride(4 * WIDTH), lambda: with_stride(WIDTH), Cause.WRONG_STRIDE, "rope",
        "x", "numbers",
    ),
    "narrow": Expected(
        lambda: narrow(wide=False), lambda: narrow(wide=True), Cause.OFFSET_OVERFLOW, "kv_write",
        "k_cache", "numbers",
    ),
    "refused index": Expected(
        lambda: rejected(
            EntryOutOfRange(
                argument="positions", entry=(3,), value=5000, of="the context", bound=4096
            ),
            "step",
        ),
        healthy, Cause.POSITION_RANGE, "step", "positions", "refusals",
    ),
    "refused memory": Expected(
        lambda: rejected(
            SharedMemory(num_bytes=98304, limit=65536, gpu="MI300X (gfx942)"), "rms_norm"
        ),
        healthy, Cause.SHARED_MEMORY, "rms_norm", None, "refusals",
    ),
    "no code": Expected(
        lambda: rejected(
            RuntimeRefused(
                code=209, name="hipErrorNoBinaryForGpu", sentence="no kernel image",
                is_no_code=True,
            ),
            "lookup",
        ),
        healthy, Cause.NO_CODE_OBJECT, "lookup", None, "refusals",
    ),
    "model file": Expected(
        lambda: rejected(
            FieldOutOfRange(
                file="m.gguf", field="llama.rope.freq_base", value=0.0, low=1.2e-38, high=3.4e38
            )
        ),
        healthy, Cause.BAD_SCALAR, "rope", "llama.rope.freq_base", "refusals",
    ),
    "long grid": Expected(
        lambda: rejected(
            GridAxisTooLong(axis=1, size=65536, limit=65535, gpu="H200 (sm_90)"), "rms_norm"
        ),
        healthy, Cause.GRID_LIMIT, "rms_norm", "grid", "refusals",
    ),
    "copy of freed memory": Expected(
        lambda: rejected(FreedTensor(site="cache.py:9"), tensor="k_cache.1"), healthy,
        Cause.USE_AFTER_FREE, "copy", "k_cache.1", "refusals",
    ),
    "freed under way": Expected(
        lambda: of_unknown("x", freed=True), lambda: of_unknown("x"), Cause.USE_AFTER_FREE,
        "theirs", "x_ptr", "address",
    ),
    "host pointer of an unknown kernel": Expected(
        lambda: of_unknown("sin"), lambda: of_unknown("x"), Cause.HOST_POINTER, "theirs",
        "sin_ptr", "address",
    ),
    "null pointer of an unknown kernel": Expected(
        lambda: of_unknown("cos"), lambda: of_unknown("x"), Cause.NULL_POINTER, "theirs",
        "cos_ptr", "address",
    ),
    "pending": Expected(
        lambda: pending(polled=False), lambda: pending(polled=True), Cause.PENDING_ERROR, "scale",
        None, "refusals",
    ),
    "late memory": Expected(
        late_memory, healthy, Cause.LATE_OUT_OF_MEMORY, None, None, "refusals",
    ),
    "rope base": Expected(
        lambda: traced({"q": 5, "cos": POSITIONS * (DIM // 2 - 1)}), lambda: traced({}),
        Cause.BAD_SCALAR, "rope", "cos", "values",
    ),
    "padding": Expected(
        lambda: traced({"out": 5, "v_cache": 100}, kernel=3), lambda: traced({}),
        Cause.NONFINITE_PADDING, "attention", "v_cache", "values",
    ),
    "made inside": Expected(
        lambda: traced({"q": 5}), lambda: traced({}), Cause.NONFINITE_VALUE, "rope", "x",
        "values",
    ),
}  # fmt: skip

HOST_RUNGS = tuple(name for name in LADDER if name not in ("replay", "hang"))
NO_REPLAY = ("replay", "hang")


def first(found: Diagnosis) -> tuple[Cause, str | None, str | None] | None:
    root = next(iter(found.roots), None)
    return (root.cause, root.kernel, root.argument) if root else None


@pytest.mark.parametrize("name", CASES)
def test_the_cause_is_named_and_proven(name: str) -> None:
    expected = CASES[name]
    found = diagnose(expected.red(), without=NO_REPLAY)
    assert first(found) == (expected.cause, expected.kernel, expected.argument), found.roots
    assert all(not one.left_out or one.name in NO_REPLAY for one in found.rungs), found.rungs
    root = found.roots[0]
    assert root.proof.red
    assert root.proof.green
    assert root.proof.red != root.proof.green
    assert root.fix
    assert expected.text in (root.expression or "")
    row = next(one for one in found.hypotheses if one.cause is expected.cause)
    assert row.verdict is Verdict.CONFIRMED
    assert expected.rung in row.diagnostic
    assert row.would_refute


@pytest.mark.parametrize("name", CASES)
def test_its_healthy_twin_has_no_finding(name: str) -> None:
    found = diagnose(CASES[name].green(), without=NO_REPLAY)
    assert not found.roots, found.roots
    assert found.is_clean


@pytest.mark.parametrize("name", CASES)
def test_without_its_rung_the_cause_is_not_found(name: str) -> None:
    expected = CASES[name]
    found = diagnose(expected.red(), without=(*NO_REPLAY, expected.rung))
    assert first(found) != (expected.cause, expected.kernel, expected.argument)


@pytest.mark.parametrize(
    ("grid", "is_skipped"),
    [((1 << 17, 1 << 15), True), ((1 << 16, 1 << 15), True), (((1 << 17) + 1, 1 << 15), False)],
)
def test_a_grid_that_wraps_to_a_number_above_0_is_launched(
    grid: tuple[int, ...], is_skipped: bool
) -> None:
    found = limits(Case(launched(grid)))
    causes = {claim.root.cause for claim in found if claim.root is not None}
    assert causes == ({Cause.GRID_PRODUCT} if is_skipped else set())


def test_every_host_side_rung_is_needed() -> None:
    # Those that are missing here have tests of their own.
    assert {one.rung for one in CASES.values()} | {
        "card hardware",
        "core dump",
        "driver",
        "first of the numbers",
        "halved elements",
        "unwritten reads",
        "failed comparison",
        "short operands",
        "guarded run",
        "launch log",
        "kept blocks",
        "own checks",
        "lost rank",
        "other ranks",
        "waiting",
        "adopted blocks",
        "draws",
        "sanitizer",
        "states",
        "step inputs",
        "hints",
        "compiled code",
        "good arguments",
        "good results",
        "compiled index",
        "tuned in place",
        "stale addresses",
    } == {*HOST_RUNGS}


# -- the address of the fault ---------------------------------------------------------------------


def located(address: int) -> Diagnosis:
    run = Run()
    tensors_of_decoder(run, sin={"kind": "pinned", "address": 0x7F1200000000})
    step(run, run.plan(run.launch("theirs", {}, {"out_ptr": "out"})))
    run.free("v")
    return diagnose(run.bundle(crash(address)), without=(*NO_REPLAY, "arguments"))


def test_what_would_refute_a_cause_is_about_that_cause() -> None:
    for bundle, words in (
        (lost_event(recorded=False), "a record of that event before the wait"),
        (inputs_in_a_stream(waits=False), "a wait between the two"),
        (pinned(waits=False), "a wait for the copy before the write"),
    ):
        found = diagnose(bundle, without=NO_REPLAY)
        proven = next(one for one in found.hypotheses if one.verdict is Verdict.CONFIRMED)
        assert proven.would_refute == words


def verdicts(found: Diagnosis) -> dict[Cause, Verdict]:
    return {one.cause: one.verdict for one in found.hypotheses if one.kernel != "copy"}


def address_of(name: str) -> int:
    run = Run()
    tensors_of_decoder(run, sin={"kind": "pinned", "address": 0x7F1200000000})
    return run.tensors[name].address


@pytest.mark.parametrize(
    ("address", "text", "cause"),
    [
        (0, "is the null page", Cause.NULL_POINTER),
        (address_of("v"), "is in v (step), freed at step 1", Cause.USE_AFTER_FREE),
        (0x7F1200000000, "is in pinned memory of the host: sin (step)", Cause.HOST_POINTER),
        (address_of("k") + 8192, "8192 bytes past k (step)", Cause.BUFFER_TOO_SMALL),
        (address_of("k") - (1 << 50), "is far from everything", Cause.OFFSET_OVERFLOW),
    ],
)
def test_an_address_is_joined_to_the_allocations(address: int, text: str, cause: Cause) -> None:
    if "bytes past" in text:  # what lies between the two is the rest of the page
        text = f"{8192 - ROWS * WIDTH * 4} bytes past k (step)"
    found = located(address)
    row = next(one for one in found.hypotheses if one.cause is cause and one.kernel is None)
    assert row.verdict is Verdict.INCONCLUSIVE  # an address alone is no proof
    assert text in " ".join(row.evidence)
    assert not found.roots
    others = {Cause.NULL_POINTER, Cause.USE_AFTER_FREE, Cause.HOST_POINTER} - {cause}
    assert all(verdicts(found)[other] is Verdict.REFUTED for other in others)


def test_a_wrapped_offset_is_told_with_the_byte_that_was_meant() -> None:
    run = Run()
    tensors_of_decoder(run)
    step(run, decoder(run))
    k_cache = run.tensors["k_cache"]
    found = diagnose(run.bundle(crash(k_cache.address + 8192 - (1 << 34))), without=NO_REPLAY)
    row = next(one for one in found.hypotheses if one.cause is Cause.OFFSET_OVERFLOW)
    assert "k_cache (k_cache) of kv_write with a 32-bit offset that wrapped" in row.evidence[0]
    assert "byte 8192 lies inside" in row.evidence[0]


def test_the_copy_that_reported_the_fault_is_refuted() -> None:
    found = diagnose(background(), without=NO_REPLAY)
    row = next(one for one in found.hypotheses if one.kernel == "copy")
    assert row.verdict is Verdict.REFUTED
    assert "innocent: its 1024 bytes" in row.evidence[0]
    without = diagnose(background(), without=(*NO_REPLAY, "address"))
    assert not [one for one in without.hypotheses if one.kernel == "copy"]


def test_predicted_and_reported_address_are_the_same() -> None:
    evidence = diagnose(background(), without=NO_REPLAY).hypotheses[0].evidence
    assert any("[0, 1, 2] as I16; the kernel" in text for text in evidence), evidence
    assert any("it is that access" in text for text in evidence), evidence


# -- promises, and the good run -------------------------------------------------------------------

PROMISE = """def copy_kernel(x_ptr, out_ptr, out_stride):
    row = tl.program_id(0)
    row = as_offset(row, False)
    value = tl.load(x_ptr + row)
    tl.store(out_ptr + tl.multiple_of(row * out_stride, 128), value)
"""


def promised(factor: int) -> Bundle:
    run = Run()
    tensors_of_decoder(run)
    launch = run.launch(
        "copy", {}, {"x_ptr": "x", "out_ptr": "out", "out_stride": WIDTH},
        source=PROMISE.replace("128", str(factor)),
    )  # fmt: skip
    step(run, run.plan(launch))
    return run.bundle()


def test_a_false_promise_of_a_multiple() -> None:
    found = diagnose(promised(128), without=NO_REPLAY)
    assert first(found) == (Cause.MISALIGNMENT, "copy", "out_ptr")
    assert found.roots[0].line == 5
    assert f"in program (1, 0, 0) it is {WIDTH}" in found.roots[0].proof.red
    assert diagnose(promised(64), without=NO_REPLAY).is_clean
    assert not diagnose(promised(128), without=(*NO_REPLAY, "hints")).roots


def compared(scale: float, digest: str = "a", text: str = PROMISE) -> Bundle:
    run = Run()
    tensors_of_decoder(run)
    launch = run.launch(
        "rms_norm", {"x": "x", "out": "out", "eps": scale}, source=text,
    )  # fmt: skip
    plan = run.plan(launch)
    step(run, plan)
    figures = Statistics(
        place=Place(1, plan, 0), tensor=run.tensors["out"].id, digest=digest, low=0.0, high=1.0,
        mean=0.5, rms=0.5, num_nan=0, num_inf=0,
    )  # fmt: skip
    written = ArgumentDeclaration(name="out", dtypes=("F32",), shape="num_rows", access="write")
    run.contracts["rms_norm"] = Declaration(kernel="rms_norm", arguments=(written,))
    return run.bundle(FaultRecord(kind="differs", message=""), statistics=(figures,))


def test_a_traced_run_says_that_it_takes_no_graphs() -> None:
    found = diagnose(compared(1.0), without=NO_REPLAY)
    assert verdicts(found)[Cause.CAPTURED_POINTER] is Verdict.NOT_TESTED
    assert any("graphs: a traced run takes no graphs" in str(gap) for gap in found.unseen)


def test_an_error_by_which_no_request_ended_is_told() -> None:
    run = Run()
    tensors_of_decoder(run)
    step(run, decoder(run))
    run.emit(Called, call="settle", outcome="HypoError: the disk is full")
    found = diagnose(run.bundle(FaultRecord(kind="none", message="")), without=NO_REPLAY)
    [row] = [one for one in found.hypotheses if one.cause is Cause.PENDING_ERROR]
    assert row.verdict is Verdict.INCONCLUSIVE
    assert (
        "step 1: settle reported HypoError: the disk is full, and the run went on"
        in (row.evidence[0])
    )


def test_an_argument_that_is_not_the_good_runs() -> None:
    found = diagnose(compared(1.0, "b"), compared(1e-5, "a"), without=NO_REPLAY)
    assert first(found) == (Cause.WRONG_ANSWER, "rms_norm", "eps")
    assert "the good run is a run with it" in found.roots[0].proof.green
    assert diagnose(compared(1.0), compared(1.0), without=NO_REPLAY).is_clean
    left = diagnose(compared(1.0, "b"), compared(1e-5, "a"), without=(*NO_REPLAY, "good arguments"))
    assert not left.roots


def test_a_fact_that_differs_and_changes_no_result_is_no_cause() -> None:
    found = diagnose(compared(1.0), compared(1e-5), without=NO_REPLAY)
    assert not found.roots
    assert verdicts(found)[Cause.WRONG_ANSWER] is Verdict.INCONCLUSIVE


def test_two_facts_that_differ_at_one_launch_are_told_and_none_is_blamed() -> None:
    changed = PROMISE.replace("tl.load(x_ptr + row)", "tl.load(x_ptr + row) / 2")
    found = diagnose(compared(1.0, "b", changed), compared(1e-5, "a"), without=NO_REPLAY)
    assert not found.roots
    [told] = [one for one in found.hypotheses if one.cause is Cause.WRONG_ANSWER]
    assert told.verdict is Verdict.INCONCLUSIVE
    assert any("2 facts differ there" in text for text in told.evidence)


def test_runs_of_one_answer_say_so_first_and_no_difference_is_blamed() -> None:
    def answered(run: Bundle, digest: str) -> Bundle:
        event = Answered(seq=99, step=1, request=1, num_tokens=4, digest=digest)
        events = (*run.events, event)
        fault = FaultRecord(kind="none", message="")
        return msgspec.structs.replace(run, events=events, fault=fault)

    bad, good = compared(1.0, "b"), compared(1e-5, "a")
    same = diagnose(answered(bad, "k:1"), answered(good, "k:1"), without=NO_REPLAY)
    assert same.is_clean
    assert verdicts(same)[Cause.WRONG_ANSWER] is Verdict.REFUTED
    assert headline(same).startswith("both runs give the same answer")
    assert "both runs give the same answer" in report_text(same).splitlines()[0]
    other = diagnose(answered(bad, "k:2"), answered(good, "k:1"), without=NO_REPLAY)
    assert first(other) == (Cause.WRONG_ANSWER, "rms_norm", "eps")


def test_a_wrong_answer_explains_no_crash() -> None:
    bad = msgspec.structs.replace(
        compared(1.0, "b"), fault=FaultRecord(kind="crash", message="", signal=11)
    )
    found = diagnose(bad, compared(1e-5, "a"), without=NO_REPLAY)
    assert not found.roots
    assert Cause.WRONG_ANSWER in verdicts(found)


def test_a_line_that_is_not_the_good_runs() -> None:
    changed = PROMISE.replace("tl.load(x_ptr + row)", "tl.load(x_ptr + row) / 2")
    bad, good = compared(1.0, "b", changed), compared(1.0, "a")
    found = diagnose(bad, good, without=NO_REPLAY)
    assert first(found) == (Cause.WRONG_ANSWER, "rms_norm", "out")
    assert (found.roots[0].line, found.roots[0].expression) == (
        4, "value = tl.load(x_ptr + row) / 2",
    )  # fmt: skip
    assert not diagnose(bad, good, without=(*NO_REPLAY, "good results")).roots


def with_tables_of(bundle: Bundle, *digests: str) -> Bundle:
    """The same run, which has seen what cos and sin hold when rms_norm first read them."""
    run = Run()
    tensors_of_decoder(run, cos={"owner": "model"}, sin={"owner": "model"})
    launch = run.launch("rms_norm", {"x": "x", "out": "out", "cos": "cos", "sin": "sin"})
    step(run, run.plan(launch))
    [wrote] = bundle.statistics
    seen = [
        msgspec.structs.replace(wrote, tensor=run.tensors[name].id, digest=digest)
        for name, digest in zip(("cos", "sin"), digests, strict=True)
    ]
    run.contracts |= bundle.contracts
    return run.bundle(bundle.fault, statistics=(*seen, wrote))


def with_a_second_step(sin: str, second: str, text: str = PROMISE) -> Bundle:
    """What sin holds is told in the first step, whose result is always the same."""
    run = Run()
    tensors_of_decoder(run, sin={"owner": "model"})
    launch = run.launch("rms_norm", {"x": "x", "out": "out", "sin": "sin"}, source=text)
    plan = run.plan(launch)
    step(run, plan)
    step(run, plan)
    written = ArgumentDeclaration(name="out", dtypes=("F32",), shape="num_rows", access="write")
    run.contracts["rms_norm"] = Declaration(kernel="rms_norm", arguments=(written,))

    def seen(name: str, number: int, digest: str) -> Statistics:
        return Statistics(
            place=Place(number, plan, 0), tensor=run.tensors[name].id, digest=digest, low=0.0,
            high=1.0, mean=0.5, rms=0.5, num_nan=0, num_inf=0,
        )  # fmt: skip

    figures = (seen("sin", 1, sin), seen("out", 1, "k:x"), seen("out", 2, second))
    return run.bundle(FaultRecord(kind="differs", message=""), statistics=figures)


def test_a_table_may_be_wrong_where_a_later_step_reads_it() -> None:
    good = with_a_second_step("k:2", "k:a")
    found = diagnose(with_a_second_step("k:3", "k:b"), good, without=NO_REPLAY)
    assert first(found) == (Cause.WRONG_ANSWER, "rms_norm", "sin")
    assert not any("without effect" in text for row in found.hypotheses for text in row.evidence)
    # A line that differs too is not blamed for it.
    halved = PROMISE.replace("tl.load(x_ptr + row)", "tl.load(x_ptr + row) / 2")
    assert halved != PROMISE
    found = diagnose(with_a_second_step("k:3", "k:b", halved), good, without=NO_REPLAY)
    assert not found.roots


def test_a_table_that_holds_other_numbers_than_in_the_good_run() -> None:
    good = with_tables_of(compared(1.0, "k:a"), "k:1", "k:2")
    found = diagnose(with_tables_of(compared(1.0, "k:b"), "k:1", "k:3"), good, without=NO_REPLAY)
    assert first(found) == (Cause.WRONG_ANSWER, "rms_norm", "sin")
    assert found.roots[0].tensor == "sin"
    assert found.roots[0].culprit is not None
    assert found.roots[0].culprit.place.startswith("decoder.py:")
    # Without an effect it is no cause.
    same = with_tables_of(compared(1.0, "k:a"), "k:1", "k:3")
    assert not diagnose(same, good, without=NO_REPLAY).roots
    # Digests of other keys tell nothing of a weight that has no figures: that is said.
    bundles = [with_tables_of(compared(1.0, "k:a"), "k:1", "k:2"),
               with_tables_of(compared(1.0, "k:b"), "j:1", "j:3")]  # fmt: skip
    bare, other = (
        msgspec.structs.replace(
            bundle,
            statistics=(
                *(msgspec.structs.replace(s, is_digest_alone=True) for s in bundle.statistics[:2]),
                *bundle.statistics[2:],
            ),
        )
        for bundle in bundles
    )
    told = diagnose(other, bare, without=NO_REPLAY)
    assert any("what sin holds" in str(gap) for gap in told.unseen)
    # Two that differ, of two makers: neither is blamed.
    both = with_tables_of(compared(1.0, "k:b"), "k:4", "k:3")
    assert not diagnose(both, good, without=NO_REPLAY).roots


def test_tables_of_one_line_are_one_fact() -> None:
    def of_one_line(bundle: Bundle) -> Bundle:
        events = [
            msgspec.structs.replace(
                event, allocation=msgspec.structs.replace(event.allocation, site="tables.py:7")
            )
            if isinstance(event, Allocated) and event.allocation.name in ("cos", "sin")
            else event
            for event in bundle.events
        ]
        return msgspec.structs.replace(bundle, events=tuple(events))

    good = of_one_line(with_tables_of(compared(1.0, "k:a"), "k:1", "k:2"))
    bad = of_one_line(with_tables_of(compared(1.0, "k:b"), "k:4", "k:3"))
    found = diagnose(bad, good, without=NO_REPLAY)
    assert first(found) == (Cause.WRONG_ANSWER, "rms_norm", "cos")


@pytest.mark.parametrize(
    ("refusal", "cause"),
    [
        (StateOfAnother(argument="state_slots", row=0, slot=1, owner=0, wanted=1),
         Cause.STALE_SLOT),
        (StateElsewhere(argument="state_slots", row=0, slot=1, num_tokens=3, position=4),
         Cause.STALE_SLOT),
        (EntryRepeated(argument="state_slots", entry=(1,), value=0), Cause.STALE_SLOT),
        (EntryRepeated(argument="checkpoint_slots", entry=(1,), value=0), Cause.STALE_SLOT),
        (StateOfAnother(argument="state_sources", row=0, slot=4, owner=None, wanted=1),
         Cause.STALE_SLOT),
        (StateOfOtherTokens(argument="state_sources", row=0, slot=4, owner=0, digest="ab",
                            wanted=2, wanted_digest="cd"), Cause.FOREIGN_STATE),
        (StateInUse(argument="checkpoint_slots", row=0, slot=1, what="which is read"),
         Cause.STALE_SLOT),
        (TableTooShort(argument="block_tables", row=0, num_entries=1, num_needed=2),
         Cause.BUFFER_TOO_SMALL),
    ],
)  # fmt: skip
def test_a_refused_step_names_its_argument(refusal: AnyRefusal, cause: Cause) -> None:
    found = diagnose(rejected(refusal, "step"), without=NO_REPLAY)
    assert first(found) == (cause, "step", refusal.argument)
    assert not diagnose(rejected(refusal, "step"), without=(*NO_REPLAY, "refusals")).roots


def test_another_result_of_the_same_text_is_no_proof() -> None:
    found = diagnose(compared(1.0, "b"), compared(1.0, "a"), without=NO_REPLAY)
    assert not found.roots
    assert verdicts(found)[Cause.WRONG_ANSWER] is Verdict.INCONCLUSIVE


@pytest.mark.parametrize("kernel", ["mask", "softmax"])
def test_minus_infinity_is_right_where_it_hides_a_score_only(kernel: str) -> None:
    run = Run()
    tensors_of_decoder(run)
    run.tensor("lengths", "I32", 1)
    run.tensor("scores", "F32", ROWS, HEADS, 4)
    facts = {name: name for name in ("scores", "lengths", "sequence_rows", "counts")}
    more = {"positions": "positions", "window": 0} if kernel == "mask" else {"sinks": None}
    plan = run.plan(run.launch(kernel, facts | more))
    step(run, plan)
    figures = Statistics(
        place=Place(1, plan, 0), tensor=run.tensors["scores"].id, digest="", low=0.0, high=1.0,
        mean=0.5, rms=0.5, num_nan=0, num_inf=3, num_below=3, first_nonfinite=(0, 0, 2),
    )  # fmt: skip
    for below, is_right in ((3, kernel == "mask"), (2, False)):
        seen = msgspec.structs.replace(figures, num_below=below)
        found = diagnose(run.bundle(statistics=(seen,)), without=NO_REPLAY)
        assert found.is_clean == is_right
        assert is_right or first(found) == (Cause.NONFINITE_VALUE, kernel, "scores")


def test_the_first_number_that_is_none_is_told_by_request_token_and_layer() -> None:
    run = Run()
    tensors_of_decoder(run)
    run.tensor("blk.3.attn_norm.weight", "F32", WIDTH)
    facts: dict[str, Any] = {"x": "x", "out": "out", "counts": "counts"}
    facts |= {"weight": "blk.3.attn_norm.weight"}
    facts |= {"count": 0, "eps": 1e-5, "width": WIDTH, "num_heads": 1}
    plan = run.plan(run.launch("rms_norm", facts))
    requests = tuple(
        RequestRecord(id=number, row=0, first_position=at, num_tokens=num, blocks=(number,))
        for number, at, num in ((4, 10, 1), (7, 0, 2))
    )
    run.run(plan, inputs(), requests)
    figures = Statistics(
        place=Place(1, plan, 0), tensor=run.tensors["out"].id, digest="", low=0.0, high=1.0,
        mean=0.5, rms=0.5, num_nan=1, num_inf=0, first_nonfinite=(2, 5),
    )  # fmt: skip
    clean = msgspec.structs.replace(figures, num_nan=0, first_nonfinite=None)
    x, weight = (
        msgspec.structs.replace(clean, tensor=run.tensors[name].id)
        for name in ("x", "blk.3.attn_norm.weight")
    )
    digest = msgspec.structs.replace(weight, is_digest_alone=True)
    for seen, blamed in ((digest, "weight"), (weight, "out")):  # packed, or looked at and finite
        bundle = run.bundle(statistics=(figures, x, seen))
        [row] = [
            one
            for one in diagnose(bundle, without=(*NO_REPLAY, "ownership")).hypotheses
            if one.cause is Cause.NONFINITE_VALUE
        ]
        assert row.argument == blamed
    found = diagnose(run.bundle(statistics=(figures,)), without=(*NO_REPLAY, "ownership"))
    told = [text for one in found.hypotheses for text in one.evidence]
    assert (
        "the first NaN or infinity belongs to request 7, its token at position 1 in layer 3"
    ) in told


# -- all of it ------------------------------------------------------------------------------------


def test_a_damaged_bundle_costs_one_rung_and_not_the_report() -> None:
    run = Run()
    tensors_of_decoder(run, positions={"dtype": "I16"})
    plan = decoder(run)
    step(run, plan, positions=np.array([0, 1, 2], np.int16))
    run.tensors["k_cache"] = run.tensors["k_cache"].__class__(
        id=run.tensors["k_cache"].id, name="k_cache", owner="", dtype="F32", shape=(), strides=(),
        offset=0, allocation=99, address=0, extent_bytes=0,
    )  # fmt: skip
    found = diagnose(run.bundle(crash()), without=NO_REPLAY)
    assert found.roots[0].cause is Cause.DTYPE_WIDTH
    assert any("tensor" in str(text) for text in found.unseen)


def test_unknown_kernels_are_told_and_not_judged() -> None:
    run = Run()
    tensors_of_decoder(run)
    step(run, run.plan(run.launch("theirs", {}, {"x_ptr": "x"})))
    found = diagnose(run.bundle(crash()), without=NO_REPLAY)
    assert not found.roots
    assert any("arguments of theirs" in str(text) for text in found.unseen)


def test_every_plausible_cause_has_a_verdict_and_a_reason() -> None:
    found = diagnose(healthy_crash(), without=NO_REPLAY)
    told = {one.cause for one in found.hypotheses}
    assert {Cause.MISSING_MASK, Cause.OFFSET_OVERFLOW, Cause.USE_AFTER_FREE} <= told
    assert all(one.evidence for one in found.hypotheses)
    assert not found.roots


def healthy_crash() -> Bundle:
    run = Run()
    tensors_of_decoder(run)
    step(run, decoder(run))
    return run.bundle(crash(1 << 50))


def test_500_steps_take_less_than_a_second() -> None:
    run = Run()
    tensors_of_decoder(run)
    plan = decoder(run)
    many = run.plans[0].__class__(
        id=plan, name="long", device=run.device, launches=run.plans[0].launches * 8
    )
    run.plans[0] = many
    for _ in range(500):
        step(run, plan)
        run.copy_out("out")
    bundle = run.bundle(crash())
    diagnose(healthy(), without=NO_REPLAY)  # imports the kernels' contracts
    seconds = []
    for _ in range(3):  # whoever shares the core may slow one of them down
        started = time.process_time()
        found = diagnose(bundle, without=NO_REPLAY)
        seconds.append(time.process_time() - started)
    assert min(seconds) < 1.0, found.rungs
