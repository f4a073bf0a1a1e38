"""A recorded launch, rebuilt from a bundle, is red as it was recorded and green when put right."""

from __future__ import annotations

import hashlib
import importlib
import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

pytest.importorskip("triton")

from ops import kernel_launch
from ops.kernel_launch import counts, rows_tensor, tensor
from recorded.bundle_of import Recording, bundle_of_run, inputs_of

from hypocenter.base.errors import DeviceFault, NotReplayed, SourceNotAllowed, UsageError
from hypocenter.base.tensor import DType
from hypocenter.cli.verbs import replay
from hypocenter.device import copies, devices, memory
from hypocenter.device.plan import Plan, PlanBuilder
from hypocenter.device.sim.sim import SimGpu, open_sim
from hypocenter.kernels import mark_gpu
from hypocenter.kernels.attention import rope
from hypocenter.kernels.experts.choice import ExpertChoice
from hypocenter.kernels.experts.experts_table import ExpertsShape, ExpertsTable
from hypocenter.kernels.experts.routing import route
from hypocenter.record import bundle as bundles
from hypocenter.record import recorder
from hypocenter.record.bundle import Bundle
from hypocenter.record.bundle_index import BundleIndex
from hypocenter.record.catalogue import sources_of
from hypocenter.record.contents import Snapshot
from hypocenter.record.events import (
    Allocated,
    AllocationRecord,
    ArgumentRecord,
    Freed,
    Launched,
    LaunchRecord,
    Place,
    Reached,
    SourceRecord,
    TensorRecord,
    Values,
)
from hypocenter.record.fault_record import FaultRecord
from hypocenter.replay.corrections import TensorCorrection, bytes_of_number, elements_of, write_rows
from hypocenter.replay.recorded import index_threshold, index_thresholds, replay_place
from hypocenter.replay.terms import KernelText, Schedule

PLACE = Place(1, 1, 0)
GUILTY = "tl.load(positions_ptr + token)"


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(kernel_launch, "device", devices.open_device("sim:mi300x"))
    return "sim:mi300x"


def rope_bundle(positions: list[int], **more: Any) -> Bundle:
    """A step of one rope launch over three tokens of two heads; the table has 8 positions."""
    recording, builder = Recording(), PlanBuilder(3, kernel_launch.device)
    x = rows_tensor("x", np.ones((3, 128), np.float32))
    cos, sin = (tensor(name, np.full((8, 32), 0.5, np.float32)) for name in ("cos", "sin"))
    held, live = tensor("positions", np.array(positions, np.int32)), counts(3)
    rope.rotate(
        builder, x, held, (cos, sin), live, num_heads=2, head_dim=64, style="neox",
    )  # fmt: skip
    plan = recording.plan(builder.launches)
    recording.step(1, plan, inputs_of(held, live))
    return recording.bundle(PLACE, **more)


def with_tensor(bundle: Bundle, name: str, **changes: Any) -> Bundle:
    """The bundle with one tensor's record changed."""
    tensors = [
        msgspec.structs.replace(one, **changes) if one.name == name else one
        for one in bundle.tensors
    ]
    return msgspec.structs.replace(bundle, tensors=tuple(tensors))


def with_text(bundle: Bundle, old: str, new: str) -> Bundle:
    """The bundle of a launch whose kernel, and what that calls, has another text."""
    changed = {}
    for source in bundle.sources:
        text = source.text.replace(old, new)
        key = hashlib.sha256(text.encode()).hexdigest()
        changed[source.id] = msgspec.structs.replace(source, text=text, id=key)
    sources = tuple(
        msgspec.structs.replace(one, callees=tuple(changed[key].id for key in one.callees))
        for one in changed.values()
    )
    plans = tuple(
        msgspec.structs.replace(
            plan,
            launches=tuple(
                msgspec.structs.replace(one, source=changed[one.source].id) for one in plan.launches
            ),
        )
        for plan in bundle.plans
    )
    return msgspec.structs.replace(bundle, plans=plans, sources=sources)


def test_a_right_launch_has_no_finding() -> None:
    report = replay_place(rope_bundle([0, 1, 7]), PLACE)
    assert report.findings == ()
    assert report.coverage.is_complete


def test_a_bundle_of_an_nvidia_gpu_is_replayed_without_its_instructions() -> None:
    bundle = rope_bundle([0, 1, 7])
    (plan,) = bundle.plans
    (launch,) = plan.launches
    constants = {**launch.constants, "OVERLAPS": True}
    launch = msgspec.structs.replace(launch, constants=constants)
    plan = msgspec.structs.replace(plan, launches=(launch,))
    assert replay_place(msgspec.structs.replace(bundle, plans=(plan,)), PLACE).findings == ()


def test_a_buffer_of_two_byte_elements_is_red_and_with_four_bytes_green() -> None:
    bundle = with_tensor(rope_bundle([0, 1, 7]), "positions", dtype="I16", extent_bytes=6)
    values = Values(
        next(t.id for t in bundle.tensors if t.name == "positions"), "I16", (3,),
        np.array([0, 1, 7], np.int16).tobytes(),
    )  # fmt: skip
    bundle = msgspec.structs.replace(bundle, snapshots=(Snapshot(1, 1, 0, (values,)),))
    # The pointer was compiled as one of 4-byte integers.
    launch = bundle.plans[0].launches[0]
    arguments = tuple(
        msgspec.structs.replace(a, value="int32") if a.name == "positions_ptr" else a
        for a in launch.arguments
    )
    plan = msgspec.structs.replace(
        bundle.plans[0], launches=(msgspec.structs.replace(launch, arguments=arguments),)
    )
    bundle = msgspec.structs.replace(bundle, plans=(plan,))
    red = replay_place(bundle, PLACE)
    found = {(f.kind, f.argument, f.sites[0].expression) for f in red.findings}
    assert ("out of bounds", "positions_ptr", GUILTY) in found
    assert ("element width", "positions_ptr", GUILTY) in found
    assert Path(red.findings[0].sites[0].file).name == "rope_gpu.py"
    green = replay_place(bundle, PLACE, corrections={"positions": TensorCorrection(dtype="I32")})
    assert green.findings == ()
    assert green.coverage.is_complete


def test_an_allocation_of_half_the_bytes_is_what_bounds_the_tensor() -> None:
    bundle = rope_bundle([0, 1, 7])
    number = next(t.allocation for t in bundle.tensors if t.name == "positions")
    events = tuple(
        msgspec.structs.replace(e, allocation=msgspec.structs.replace(e.allocation, num_bytes=6))
        if e.allocation.id == number
        else e
        for e in bundle.events
        if isinstance(e, Allocated)
    )
    bundle = msgspec.structs.replace(bundle, events=(*events, bundle.events[-1]))
    red = replay_place(bundle, PLACE)
    assert {(f.kind, f.argument, f.number) for f in red.findings} == {
        ("out of bounds", "positions_ptr", 1)
    }
    green = replay_place(bundle, PLACE, corrections={"positions": TensorCorrection(num_bytes=12)})
    assert green.findings == ()


def test_a_position_beyond_the_table_is_red_with_its_value_and_green_without() -> None:
    bundle = rope_bundle([0, 1, 9])
    red = replay_place(bundle, PLACE)
    first = red.findings[0]
    assert (first.kind, first.argument, first.values["position"]) == ("out of bounds", "cos_ptr", 9)
    assert "; address 0x" in first.detail or "; that is " in first.detail
    fixed = {"positions": TensorCorrection(elements={(2,): 7})}
    assert replay_place(bundle, PLACE, corrections=fixed).findings == ()


def test_an_access_into_the_neighbour_names_the_neighbour() -> None:
    bundle = rope_bundle([0, 1, 8])
    records = {t.name: t for t in bundle.tensors}
    # They are neighbours where memory is fresh; make them so whatever lies between.
    behind = records["cos"].address + 8 * 32 * 4
    events = tuple(
        msgspec.structs.replace(
            event, allocation=msgspec.structs.replace(event.allocation, address=behind)
        )
        if isinstance(event, Allocated) and event.allocation.id == records["sin"].allocation
        else event
        for event in bundle.events
    )
    bundle = with_tensor(msgspec.structs.replace(bundle, events=events), "sin", address=behind)
    report = replay_place(bundle, PLACE)
    first = next(f for f in report.findings if f.argument == "cos_ptr")
    assert first.detail.endswith("; that is sin (test), byte 0")


def test_memory_that_was_freed_is_red_and_green_when_it_had_lived() -> None:
    bundle = rope_bundle([0, 1, 7])
    number = next(t.allocation for t in bundle.tensors if t.name == "cos")
    stepped = msgspec.structs.replace(bundle.events[-1], seq=1000)
    gone = Freed(seq=999, step=0, allocation=number, site="engine.py:12")
    bundle = msgspec.structs.replace(bundle, events=(*bundle.events[:-1], gone, stepped))
    report = replay_place(bundle, PLACE)
    assert [(f.kind, f.argument) for f in report.findings] == [("freed memory", "cos_ptr")]
    assert "freed in step 0 at engine.py:12" in report.findings[0].detail
    fixed = {"cos": TensorCorrection(is_alive=True)}
    assert replay_place(bundle, PLACE, corrections=fixed).findings == ()


def test_a_scalar_can_be_put_right() -> None:
    bundle = rope_bundle([0, 1, 7])
    report = replay_place(bundle, PLACE, corrections={"x_stride": 1 << 30})
    assert {f.kind for f in report.findings} >= {"int32 overflow"}
    overflow = next(f for f in report.findings if f.kind == "int32 overflow")
    assert (overflow.axis, overflow.threshold) == (0, 2)
    with pytest.raises(UsageError, match="rope has no x_pitch that could be corrected"):
        replay_place(bundle, PLACE, corrections={"x_pitch": 1})


def test_the_index_value_from_which_it_goes_wrong_is_exact() -> None:
    bundle = rope_bundle([0, 1, 4000])
    finding = next(f for f in replay_place(bundle, PLACE).findings if f.argument == "cos_ptr")
    assert index_threshold(bundle, PLACE, finding, "positions", (2,), 4000) == 8
    assert index_threshold(bundle, PLACE, finding, "positions", (1,), 1) is None
    wide = replay_place(rope_bundle([0, 1, 1 << 29]), PLACE)
    overflow = next(f for f in wide.findings if f.kind == "int32 overflow")
    assert overflow.argument == "cos_ptr"
    found = index_threshold(
        rope_bundle([0, 1, 1 << 29]), PLACE, overflow, "positions", (2,), 1 << 29
    )
    assert found == (1 << 31) // 32
    index = BundleIndex(rope_bundle([0, 1, 1 << 29]))
    assert index_thresholds(index, PLACE, overflow) == (
        "positions[2] is 536870912; it goes wrong from 67108864 on",
    )


def test_programs_of_extreme_index_values_run_first() -> None:
    bundle = rope_bundle([0, 99, 0])
    report = replay_place(bundle, PLACE, schedule=Schedule(budget_seconds=1e-9))
    assert not report.coverage.is_complete or report.coverage.num_run <= 6
    assert any(f.argument == "cos_ptr" for f in report.findings)


def test_gigabytes_are_extents_only() -> None:
    bundle = rope_bundle([0, 1, 7])
    number = next(t.allocation for t in bundle.tensors if t.name == "x")
    events = tuple(
        msgspec.structs.replace(
            e, allocation=msgspec.structs.replace(e.allocation, num_bytes=3 << 33)
        )
        if isinstance(e, Allocated) and e.allocation.id == number
        else e
        for e in bundle.events
    )
    bundle = msgspec.structs.replace(bundle, events=events)
    bundle = with_tensor(bundle, "x", extent_bytes=3 << 33)
    fixed: dict[str, Any] = {
        "x": TensorCorrection(num_bytes=3 << 33, strides=(1 << 31, 1)),
        "x_stride": 1 << 31,
    }
    report = replay_place(bundle, PLACE, corrections={**fixed, "WIDE": True})
    assert report.findings == ()
    narrow = replay_place(bundle, PLACE, corrections={**fixed, "x_stride": 1 << 30})
    assert {f.kind for f in narrow.findings} == {"int32 overflow", "between rows"}


def test_poison_in_a_snapshot_is_an_uninitialised_read() -> None:
    bundle = rope_bundle([0, 1, 7])
    x = next(t for t in bundle.tensors if t.name == "x")
    held = np.ones(x.shape, np.float32)
    held.view(np.uint32)[1, 5] = 0xFFFFFFFF
    values = Values(x.id, "F32", x.shape, held.tobytes())
    bundle = msgspec.structs.replace(bundle, snapshots=(Snapshot(1, 1, 0, (values,)),))
    report = replay_place(bundle, PLACE)
    assert [(f.kind, f.argument, f.element) for f in report.findings] == [
        ("uninitialised read", "x_ptr", (1, 5))
    ]


def test_values_lie_where_the_strides_of_their_tensor_have_them() -> None:
    """A transposed view holds its elements column by column."""
    tensor = TensorRecord(
        id=1, name="b", owner="", dtype="I32", shape=(3, 2), strides=(1, 3), offset=0,
        allocation=1, address=0, extent_bytes=24,
    )  # fmt: skip
    given = np.arange(6, dtype=np.int32).reshape(3, 2)
    data = np.zeros(24, np.uint8)
    values = Values(1, "I32", (3, 2), given.tobytes())
    write_rows(data, given.reshape(-1).view(np.uint8), values, tensor)
    assert data.view(np.int32).tolist() == given.T.reshape(-1).tolist()


@pytest.mark.parametrize(
    ("shape", "strides", "fits"),
    [((3, 2), (1, 3), True), ((6,), (1,), True), ((4,), (0,), True), ((7,), (1,), False),
     ((3,), (-1,), False), ((2, 2), (5, -5), False), ((1 << 31,), (0,), False), ((0,), (1,), False),
     ((3, 2), (1,), False)],
)  # fmt: skip
def test_elements_are_looked_at_only_inside_their_bytes(
    shape: tuple[int, ...], strides: tuple[int, ...], fits: bool
) -> None:
    tensor = TensorRecord(
        id=1, name="b", owner="", dtype="I32", shape=shape, strides=strides, offset=0,
        allocation=1, address=0, extent_bytes=24,
    )  # fmt: skip
    assert (elements_of(np.zeros(24, np.uint8), tensor, 4) is not None) == fits


def test_undefined_values_that_reach_no_result_are_what_a_mask_is_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = THEIRS.replace(
        "tl.store(y_ptr + at, x,", "tl.store(y_ptr + at, tl.where(at < 4, x, 0.0),"
    )
    bundle = their_bundle(tmp_path, monkeypatch, text.replace("_doubled(at)", "at"))
    held = np.ones(8, np.float32)
    for undefined, num_found in ((6, 0), (2, 1)):
        values = held.copy()
        values.view(np.uint32)[undefined] = 0xFFFFFFFF
        kept = Snapshot(0, -1, 5, (Values(1, "F32", (8,), values.tobytes()),))
        one = msgspec.structs.replace(bundle, snapshots=(kept,))
        found = replay_place(one, Place(0, -1, 5), text=KernelText(may_run=True)).findings
        assert [f.kind for f in found] == ["uninitialised read"] * num_found


def test_undefined_values_that_a_maximum_leaves_out_where_they_are_nan_still_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = "tl.max(tl.where(at < 4, x, 0.0), 0)"
    # Zeros there would change nothing either: all others are above zero, or below it. Nor would
    # any number that is not above those of the program.
    for result, number, num_found in (
        ("tl.max(x, 0)", 1, 1), ("tl.min(x, 0)", -1, 1), (live, 1, 0), ("tl.max(x, 0)", 1e30, 1)
    ):  # fmt: skip
        held = np.full(8, number, np.float32)
        held.view(np.uint32)[6] = 0xFFFFFFFF
        kept = Snapshot(0, -1, 5, (Values(1, "F32", (8,), held.tobytes()),))
        text = THEIRS.replace("tl.store(y_ptr + at, x,", f"tl.store(y_ptr + at, at * 0 + {result},")
        bundle = their_bundle(tmp_path, monkeypatch, text.replace("_doubled(at)", "at"))
        one = msgspec.structs.replace(bundle, snapshots=(kept,))
        found = replay_place(one, Place(0, -1, 5), text=KernelText(may_run=True)).findings
        assert [f.kind for f in found] == ["uninitialised read"] * num_found


@pytest.mark.parametrize(
    ("dtype", "most", "least"),
    [("float16", 65504, -65504), ("float32", 3.4028235e38, -3.4028235e38), ("bool", 1, 0),
     ("int8", 127, -128), ("int64", 2**63 - 1, -(2**63)), ("uint16", 65535, 0),
     ("float8_e5m2", 255, 0)],
)  # fmt: skip
def test_a_large_number_is_the_largest_of_its_type(dtype: str, most: float, least: float) -> None:
    kind = np.dtype(dtype if hasattr(np, dtype) else np.uint8)
    for number, wanted in ((math.inf, most), (-math.inf, least), (0.0, 0)):
        assert bytes_of_number(number, dtype).view(kind)[0] == kind.type(wanted)


def test_a_large_number_of_bfloat16_has_its_eight_bits() -> None:
    assert bytes_of_number(math.inf, "bfloat16").tolist() == [0x7F, 0x7F]
    assert bytes_of_number(-math.inf, "bfloat16").tolist() == [0x7F, 0xFF]
    assert bytes_of_number(1.0, "bfloat16").tolist() == [0x80, 0x3F]


def test_of_two_undefined_tensors_the_one_that_reaches_a_result_is_told() -> None:
    bundle = rope_bundle([0, 1, 7])
    tensors = {t.name: t for t in bundle.tensors}
    cos, x = np.full((8, 32), 0.5, np.float32), np.ones(tensors["x"].shape, np.float32)
    cos.view(np.uint32)[1, 5] = 0xFFFFFFFF
    x.view(np.uint32)[0, 3] = 0xFFFFFFFF
    kept = tuple(
        Values(tensors[name].id, "F32", held.shape, held.tobytes())
        for name, held in (("cos", cos), ("x", x))
    )
    both = msgspec.structs.replace(bundle, snapshots=(Snapshot(1, 1, 0, kept),))
    found = replay_place(both, PLACE).findings
    assert {f.argument for f in found} == {"cos_ptr", "x_ptr"}
    defined = {"cos_ptr": TensorCorrection(defined_as=0.0)}
    found = replay_place(both, PLACE, corrections=defined).findings
    assert [(f.kind, f.argument) for f in found] == [("uninitialised read", "x_ptr")]


@pytest.mark.parametrize(
    ("store", "unwritten"),
    [("mask=inside", set()), ("mask=inside & (expert != 3)", {(0, 3)})],
)
def test_columns_behind_the_experts_need_no_score(
    store: str, unwritten: set[tuple[int, ...]]
) -> None:
    """Rows are padded to 64 columns, of which route writes those of experts.

    Without a bias and factors their pointers are those of the scores, through which nothing is
    read.
    """
    recording, builder = Recording(), PlanBuilder(2, kernel_launch.device)
    table = ExpertsTable.allocate(ExpertsShape(2, 7, 3, kernel_launch.device)).first(2)
    scores, live = rows_tensor("scores", np.ones((2, 7), np.float32)), counts(2)
    route(builder, scores, ExpertChoice(7, 3), table, live)
    recording.step(1, recording.plan(builder.launches), inputs_of(live))
    line = "tl.store(own + expert, scores, mask=inside"
    bundle = with_text(recording.bundle(PLACE), f"{line})", f"{line[:-11]}{store})")
    found = replay_place(bundle, PLACE, text=KernelText(may_run=True)).findings
    kinds = {(one.kind.value, one.element) for one in found}
    assert kinds == {("never written", element) for element in unwritten}


@pytest.mark.parametrize(
    ("function", "argument", "load"),
    [("rope_kernel", "counts_ptr", "tl.load(counts_ptr"),
     ("angles", "positions_ptr", "tl.load(positions_ptr + token")],
)  # fmt: skip
def test_a_source_that_is_not_installed_is_run_only_when_allowed(
    function: str, argument: str, load: str
) -> None:
    """The text of the kernel itself, or of what it calls."""
    bundle = with_text(rope_bundle([0, 1, 7]), f"{load})", f"{load} + 2)")
    with pytest.raises(SourceNotAllowed, match=f"{function}.* is installed with another text"):
        replay_place(bundle, PLACE)
    report = replay_place(bundle, PLACE, text=KernelText(may_run=True))
    first = report.findings[0]
    assert (first.kind, first.argument) == ("out of bounds", argument)
    assert first.sites[0].expression == f"{load} + 2)"
    assert replay_place(bundle, PLACE, text=KernelText(is_installed=True)).findings == ()
    with pytest.raises(UsageError, match="no other rope_kernel is installed"):
        replay_place(rope_bundle([0, 1, 7]), PLACE, text=KernelText(is_installed=True))
    file = Path(first.sites[0].file)
    assert first.line is not None
    assert f"{load})" in file.read_text().splitlines()[first.line - 1]


def without_callees(bundle: Bundle, key: Callable[[SourceRecord], str]) -> Bundle:
    """The bundle with the text of the kernel alone, and other hashes of what it calls."""
    kernel = {launch.source for plan in bundle.plans for launch in plan.launches}
    keys = {one.id: key(one) for one in bundle.sources}
    sources = tuple(
        msgspec.structs.replace(one, callees=tuple(keys[callee] for callee in one.callees))
        for one in bundle.sources
        if one.id in kernel
    )
    return msgspec.structs.replace(bundle, sources=sources)


def test_of_what_a_kernel_calls_the_hash_is_compared_where_the_text_is_missing() -> None:
    bundle = rope_bundle([0, 1, 7])
    assert any(one.callees for one in bundle.sources)
    same = without_callees(bundle, lambda one: one.id)
    assert replay_place(same, PLACE).findings == ()
    other = without_callees(bundle, lambda one: hashlib.sha256(one.id.encode()).hexdigest())
    with pytest.raises(
        SourceNotAllowed, match="rope_kernel calls a function, which is installed with another"
    ):
        replay_place(other, PLACE)


def test_a_kernel_that_calls_another_function_now_is_not_the_recorded_one() -> None:
    """Though that function is still installed as it was recorded."""
    bundle = rope_bundle([0, 1, 7])
    mark = sources_of(mark_gpu.mark_kernel)[0]
    launched = {launch.source for plan in bundle.plans for launch in plan.launches}
    sources = (mark, *(
        msgspec.structs.replace(one, callees=(mark.id, *one.callees)) if one.id in launched else one
        for one in bundle.sources
    ))  # fmt: skip
    bundle = msgspec.structs.replace(bundle, sources=sources)
    with pytest.raises(
        SourceNotAllowed, match="calls mark_kernel, which is installed with another text"
    ):
        replay_place(bundle, PLACE)


def test_cpu_launches_and_places_outside_the_bundle_are_refused() -> None:
    bundle = rope_bundle([0, 1, 7])
    for place, match in (
        (Place(1, 7, 0), "no plan 7; its plans are 1"),
        (Place(1, 1, 4), "launch 4 of plan step, but it has 1"),
        (Place(1, -1, 4), "no launch outside plans of number 4"),
    ):
        with pytest.raises(UsageError, match=match):
            replay_place(bundle, place)
    plan = bundle.plans[0]
    cpu = msgspec.structs.replace(plan.launches[0], device="cpu")
    plan = msgspec.structs.replace(plan, launches=(cpu,))
    bundle = msgspec.structs.replace(bundle, plans=(plan,))
    with pytest.raises(UsageError, match="rope runs on the CPU"):
        replay_place(bundle, PLACE)


# -- end to end: a recorder's own bundle of a run on a simulated GPU ------------------------------


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The run folder of a recorder for one test."""
    monkeypatch.setenv("HYPO_RUN_DIR", str(tmp_path / "runs"))
    monkeypatch.setenv("HYPO_RECORD", "1")
    recorder.close_recorder()
    opened = recorder.open_recorder()
    assert isinstance(opened, recorder.Recorder)
    yield opened.folder
    recorder.close_recorder()


@pytest.fixture
def doomed() -> Iterator[SimGpu]:
    """A GPU that a test may lose; who comes after it gets another one."""
    gpu = open_sim("sim:h200")
    devices.use_backend(gpu)
    yield gpu
    devices.use_backend(open_sim("sim:h200"))


def test_a_recorded_run_with_positions_of_two_bytes_is_red_and_put_right_green(
    recorded: Path, doomed: SimGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The case of the background documents: rope reads 4-byte integers from 2-byte elements."""
    gpu = doomed
    monkeypatch.setattr(kernel_launch, "device", "sim:h200")
    monkeypatch.setattr(rope.CONTRACT, "check", lambda **_: {})
    builder, x = PlanBuilder(4, "sim:h200"), rows_tensor("x", np.ones((4, 128), np.float32))
    cos, sin = (tensor(name, np.full((8, 32), 0.5, np.float32)) for name in ("cos", "sin"))
    held = memory.allocate("positions", "step", DType.I16, (4,), device="sim:h200")
    wide = replace(held, data=gpu.argument(held.address, DType.I32, 4))
    rope.rotate(
        builder, x, wide, (cos, sin), counts(4), num_heads=2, head_dim=64, style="neox",
    )  # fmt: skip
    plan, values = Plan(builder, x), np.array([0, 1, 2, 3], np.int16)
    copies.to_device(held, values)
    live = recorder.current()
    assert isinstance(live, recorder.Recorder)
    live.record_step(plan, [(held, values)])
    plan.run()
    with pytest.raises(DeviceFault):
        copies.to_host(x)  # the copy is innocent
    bundle = bundle_of_run(recorded)
    index = BundleIndex(bundle)
    (place,) = (one.place for one in index.under_way)
    assert place is not None
    assert (index.launch(place).kernel, place.launch) == ("rope", 0)
    red = replay_place(bundle, place)
    found = {(str(f.kind), f.argument): f for f in red.findings}
    assert found["out of bounds", "positions_ptr"].sites[0].expression == GUILTY
    assert found["element width", "positions_ptr"].detail.startswith("4 bytes at a time, but its")
    green = replay_place(bundle, place, corrections={"positions": TensorCorrection(dtype="I32")})
    assert green.findings == ()
    assert green.coverage.is_complete


# -- the command ----------------------------------------------------------------------------------


def run_hypo(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hypocenter", *arguments], capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip


def test_the_command_lists_the_launches_and_prints_the_findings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundles.save(rope_bundle([0, 1, 9]), tmp_path / "bad")
    bad = str(tmp_path / "bad")
    with pytest.raises(SystemExit) as left:
        replay.replay(bad, None, None, 60.0, allow_source=False, as_json=False)
    assert left.value.code == 4
    shown = capsys.readouterr().out
    assert "step 1, launch 0: rope (3, 2): 2 findings" in shown
    assert "rope_gpu.py" in shown
    assert "out of bounds: load of cos_ptr in rope_kernel" in shown
    assert "position=9" in shown
    told = run_hypo("replay", str(tmp_path / "bad"), "--step", "1", "--launch", "0", "--json")
    one = json.loads(told.stdout)[0]
    assert (told.returncode, one["kernel"], one["grid"]) == (4, "rope", [3, 2])
    assert one["report"]["findings"][0]["argument"] == "cos_ptr"


def test_the_command_is_clean_where_nothing_is_wrong_and_names_what_is_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(tmp_path / "good")
    bundles.save(rope_bundle([0, 1, 7]), folder)
    replay.replay(folder, None, None, 60.0, allow_source=False, as_json=False)
    assert capsys.readouterr().out.endswith("0 findings in 1 launch\n")
    for step, launch, budget, sentence in (
        (7, None, 60.0, "--step is 7, but the bundle has the launches of steps 1 to 1"),
        (None, 3, 60.0, "--launch is 3, but the launches are 0 to 0"),
        (None, None, 0.0, "--budget is 0.0, but must be above 0"),
    ):
        with pytest.raises(UsageError, match=sentence):
            replay.replay(folder, step, launch, budget, allow_source=False, as_json=False)
    with pytest.raises(UsageError, match="nowhere: no such folder"):
        replay.replay("nowhere", None, None, 60.0, allow_source=False, as_json=False)


def _with_second_launch(bundle: Bundle, **changes: Any) -> Bundle:
    """The step's launch, changed, and then the launch as it was."""
    [plan] = bundle.plans
    changed = msgspec.structs.replace(plan.launches[0], **changes)
    plans = (msgspec.structs.replace(plan, launches=(changed, *plan.launches)),)
    return msgspec.structs.replace(bundle, plans=plans, progress=Reached(Place(1, 1, 1)))


@pytest.mark.parametrize("text", ["def f(:", "\0", "def f():\n  x\n y"])
def test_a_launch_whose_record_makes_no_sense_costs_no_other(
    text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = rope_bundle([0, 1, 9])
    [launch] = whole.plans[0].launches
    source = next(source for source in whole.sources if source.id == launch.source)
    damaged = msgspec.structs.replace(source, id="0" * 64, text=text, file="")
    bundle = msgspec.structs.replace(
        _with_second_launch(whole, source=damaged.id), sources=(*whole.sources, damaged)
    )
    with pytest.raises(NotReplayed, match="has a record that makes no sense"):
        replay_place(bundle, PLACE, text=KernelText(may_run=True))
    monkeypatch.setattr(replay, "bundle_at", lambda folder: bundle)
    with pytest.raises(SystemExit):
        replay.replay("b", 1, None, 60.0, allow_source=True, as_json=False)
    shown = capsys.readouterr().out
    assert "step 1, launch 0: rope (3, 2): not replayed: rope has a record that makes no" in shown
    assert "step 1, launch 1: rope (3, 2): 2 findings" in shown
    assert shown.endswith("2 findings in 1 of 2 launches replayed\n")


def test_a_replay_needs_no_torch(tmp_path: Path) -> None:
    bundles.save(rope_bundle([0, 1, 9]), tmp_path / "bad")
    code = (
        "import sys\nsys.modules['torch'] = None\n"
        f"from hypocenter.cli.app import main\nmain(['replay', {str(tmp_path / 'bad')!r}])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 4, done.stderr
    assert "out of bounds: load of cos_ptr" in done.stdout


THEIRS = """
import triton
import triton.language as tl

GAP: tl.constexpr = tl.constexpr(2)


@triton.jit
def _doubled(x):
    return x * GAP


@triton.jit
def theirs(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + _doubled(at), mask=at < n)
    tl.store(y_ptr + at, x, mask=at < n)
"""


def their_bundle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str = THEIRS, **constants: bool
) -> Bundle:
    """A launch outside of plans of a kernel whose file is gone."""
    (tmp_path / "their_module.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    sources = sources_of(importlib.import_module("their_module").theirs)
    del sys.modules["their_module"]
    (tmp_path / "their_module.py").unlink()
    records = [
        TensorRecord(
            id=i, name=name, owner="torch", dtype="F32", shape=(8,), strides=(1,), offset=0,
            allocation=i, address=512 * i, extent_bytes=32,
        )
        for i, name in ((1, "x"), (2, "y"))
    ]  # fmt: skip
    made = [
        Allocated(seq=t.id, step=0, allocation=AllocationRecord(
            id=t.id, kind="device", device="cuda", address=t.address, num_bytes=32, name=t.name,
            owner="torch", site="theirs.py:1"))
        for t in records
    ]  # fmt: skip
    launch = LaunchRecord(
        kernel="theirs", function="theirs", device="cuda", grid=(2,), source=sources[0].id,
        arguments=(
            ArgumentRecord("x_ptr", 1), ArgumentRecord("y_ptr", 2), ArgumentRecord("n", value=8),
        ),
        constants={"BLOCK": 4, **constants},
    )  # fmt: skip
    return Bundle(
        kind="crash", fault=FaultRecord(kind="crash", message=""), tensors=tuple(records),
        sources=sources, events=(*made, Launched(seq=5, step=0, launch=launch)),
    )  # fmt: skip


def test_somebody_elses_kernel_runs_from_its_text_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what it calls, the constants of its module, and no contract."""
    bundle = their_bundle(tmp_path, monkeypatch)
    (place,) = (one.place for one in BundleIndex(bundle).under_way)
    assert place is not None
    with pytest.raises(SourceNotAllowed, match="theirs is the program's own kernel"):
        replay_place(bundle, place)
    (finding,) = replay_place(bundle, place, text=KernelText(may_run=True)).findings
    assert (finding.kind, finding.argument, finding.number) == ("out of bounds", "x_ptr", 8)
    assert finding.sites[0].file == str(tmp_path / "their_module.py")
    assert finding.sites[0].expression == "tl.load(x_ptr + _doubled(at), mask=at < n)"
    wide = {"x_ptr": TensorCorrection(num_bytes=64)}
    assert (
        replay_place(bundle, place, corrections=wide, text=KernelText(may_run=True)).findings == ()
    )


@pytest.mark.parametrize("is_wrong", [False, True])
def test_constants_of_somebody_elses_kernel_stay_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_wrong: bool
) -> None:
    text = THEIRS.replace("BLOCK: tl.constexpr", "BLOCK: tl.constexpr, OVERLAPS: tl.constexpr")
    text = text.replace("_doubled(at)", "(_doubled(at) if OVERLAPS else at)")
    bundle = their_bundle(tmp_path, monkeypatch, text, OVERLAPS=is_wrong)
    (place,) = (one.place for one in BundleIndex(bundle).under_way)
    assert place is not None
    assert bool(replay_place(bundle, place, text=KernelText(may_run=True)).findings) == is_wrong
