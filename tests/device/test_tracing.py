"""A traced run: figures after each launch, contents where they went wrong, within its room."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ops import kernel_launch
from ops.kernel_launch import counts, rows_tensor, tensor, vector_tensor

from hypocenter.base.errors import UsageError
from hypocenter.base.tensor import DType, Tensor
from hypocenter.device import copies, devices, memory
from hypocenter.device.plan import Plan, PlanBuilder
from hypocenter.device.tracing import MAX_FIRST, _figures_of_packed, _read, statistics_of
from hypocenter.kernels.attention import rope
from hypocenter.kernels.attention.kv_write import kv_write
from hypocenter.kernels.linear.linear import linear_several
from hypocenter.kernels.linear.operands import Operands, Product
from hypocenter.kernels.rowwise import norm, norm_cpu
from hypocenter.kernels.weights import packing
from hypocenter.record import recorder
from hypocenter.record.bundle_index import BundleIndex
from hypocenter.record.catalogue import sources_of
from hypocenter.record.events import Place, Statistics
from hypocenter.record.ring import read_run
from hypocenter.record.trace_log import FIRST, FOLDER, STATISTICS, TraceWriter, read_trace
from hypocenter.settings.config import EngineConfig
from hypocenter.settings.environment import trace_bytes

PLACE = Place(3, 1, 2)


@pytest.fixture
def run_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A recorder of its own for one test."""
    monkeypatch.setenv("HYPO_RUN_DIR", str(tmp_path / "runs"))
    monkeypatch.setenv("HYPO_RECORD", "1")
    recorder.close_recorder()
    opened = recorder.open_recorder()
    assert isinstance(opened, recorder.Recorder)
    yield opened.folder
    recorder.close_recorder()


def _plan(device: str, x: Tensor, live: int = 3) -> Plan:
    """rms_norm of x into hidden, then rope of hidden in place; buckets of 4 rows."""
    builder, held = PlanBuilder(4, device), counts(live)
    hidden = rows_tensor("hidden", np.zeros((4, 64), np.float32))
    norm.rms_norm(builder, x, vector_tensor("weight", np.ones(64, np.float32)), 1e-5, hidden, held,
                  width=64)  # fmt: skip
    table = tuple(tensor(name, np.full((8, 32), 0.5, np.float32)) for name in ("cos", "sin"))
    rope.rotate(
        builder, hidden, tensor("positions", np.array([0, 1, 2, 0], np.int32)),
        (table[0], table[1]), held, num_heads=1, head_dim=64, style="neox",
    )  # fmt: skip
    plan = Plan(builder, hidden)
    plan.set_mode("traced")
    return plan


def _named(folder: Path) -> list[tuple[int, str, Statistics]]:
    names = {record.id: record.name for record in read_run(folder).tensors}
    return [(one.place.launch, names[one.tensor], one) for one in read_trace(folder).statistics]


@pytest.mark.parametrize("device", ["cpu", "sim:mi300x"])
def test_each_launch_leaves_the_figures_of_the_live_rows_that_it_wrote(
    device: str, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device != "cpu":
        pytest.importorskip("triton")
    monkeypatch.setattr(kernel_launch, "device", devices.open_device(device))
    values = np.random.default_rng(1).standard_normal((4, 64)).astype(np.float32)
    values[3] = np.nan  # a dead row holds anything
    plan = _plan(device, rows_tensor("x", values))
    plan.run()
    found = _named(run_folder)
    assert [(launch, name) for launch, name, _ in found] == [(0, "hidden"), (1, "hidden")]
    normed = found[0][2]
    assert normed.place.step == 1
    assert (normed.num_nan, normed.num_inf, normed.num_poisoned) == (0, 0, 0)
    assert normed.rms == pytest.approx(1.0, rel=1e-3)
    assert normed.first_nonfinite is None
    assert normed.digest != found[1][2].digest
    kept = read_trace(run_folder).snapshots
    assert [(one.step, one.launch) for one in kept] == [(1, 0), (1, 1)]
    names = {record.id: record.name for record in read_run(run_folder).tensors}
    held = {names[one.tensor] for one in kept[1].values}
    assert held == {"hidden", "positions", "counts"}  # no weight, no table


@pytest.mark.parametrize("device", ["cpu", "sim:mi300x"])
def test_what_the_model_holds_is_told_where_it_is_first_read(
    device: str, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device != "cpu":
        pytest.importorskip("triton")
    monkeypatch.setattr(kernel_launch, "device", devices.open_device(device))
    digests = []
    for last in (1.0, 1.0, 2.0):
        raw = np.ones((64, 64), np.float32)
        raw[63, 63] = last
        packed = packing.pack(raw.view(np.uint8), DType.F32, 64, device=device)
        weight = packing.place("w", "model", packed, device=device)
        builder, x = PlanBuilder(4, device), rows_tensor("x", np.ones((4, 64), np.float32))
        out = rows_tensor("out", np.zeros((4, 64), np.float32))
        operands = Operands.allocate({weight.dtype}, 4, 64, device=device)
        linear_several(builder, x, [Product(weight, out, None)], counts(3), operands)
        plan = Plan(builder, out)
        plan.set_mode("traced")
        plan.run()
        plan.run()  # it is told once
        digests.append([one.digest for _, name, one in _named(run_folder) if name == "w"][-1])
        assert len([name for _, name, _ in _named(run_folder) if name == "w"]) == len(digests)
    assert digests[0] == digests[1] != digests[2]


def test_a_traced_run_has_the_text_of_what_cpu_kernels_call(run_folder: Path) -> None:
    plan = _plan("cpu", rows_tensor("x", np.ones((4, 64), np.float32)))
    plan.run()
    sources = {record.function: record for record in read_run(run_folder).sources}
    assert sources["_factor"].id in sources["_norm_row"].callees
    assert sources["_norm_row"].id in sources["rms_norm"].callees
    plain = {record.function for record in sources_of(norm_cpu.rms_norm.serial)}
    assert plain == {"rms_norm"}


def test_where_a_number_first_goes_wrong_the_arguments_are_kept(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HYPO_TRACE_BYTES", "0")
    recorder.close_recorder()
    opened = recorder.open_recorder()
    assert isinstance(opened, recorder.Recorder)
    values = np.ones((4, 64), np.float32)
    plan = _plan("cpu", x := rows_tensor("x", values))
    plan.run()
    assert read_trace(opened.folder).snapshots == ()
    values[2, 5] = np.inf
    copies.to_device(x, values)
    for _ in range(MAX_FIRST):
        plan.run()
    trace = read_trace(opened.folder)
    first = trace.snapshots[0]
    assert (first.step, first.launch) == (2, 0)
    assert len(trace.snapshots) == MAX_FIRST
    wrong = next(one for one in trace.statistics if one.num_nan)
    assert wrong.place == Place(2, first.plan, 0)
    assert wrong.first_nonfinite is not None
    assert wrong.first_nonfinite[0] == 2
    # The figures of what was read say whether it was wrong before.
    names = {record.id: record.name for record in read_run(opened.folder).tensors}
    read = [names[one.tensor] for one in trace.statistics if one.place == wrong.place]
    assert {"x", "weight"} <= set(read)


def test_figures_count_what_is_no_number_and_what_was_never_written() -> None:
    values = np.array([[1.0, -3.0], [np.nan, np.inf]], np.float32)
    values.view(np.uint32)[1, 0] = 0xFFFFFFFF
    one, num_wrong = statistics_of(values, DType.F32, PLACE, 7)
    assert (one.low, one.high, one.mean) == (-3.0, 1.0, -1.0)
    assert one.rms == pytest.approx(5**0.5)
    assert (one.num_nan, one.num_inf, one.num_poisoned, num_wrong) == (1, 1, 1, 2)
    assert one.first_nonfinite == (1, 0)
    assert (one.place, one.tensor) == (PLACE, 7)


def test_a_mask_of_minus_infinity_is_not_wrong() -> None:
    one, num_wrong = statistics_of(np.array([-np.inf, 2.0], np.float32), DType.F32, PLACE, 1)
    assert (one.num_inf, one.num_below, num_wrong) == (1, 1, 0)
    one, num_wrong = statistics_of(np.array([np.inf, -np.inf], np.float32), DType.F32, PLACE, 1)
    assert (one.num_inf, one.num_below, num_wrong) == (2, 1, 1)


@pytest.mark.parametrize(
    ("dtype", "values"),
    [
        (DType.F16, np.array([0x3C00, 0xFFFF], np.uint16)),
        (DType.BF16, np.array([0x3F80, -1], np.int16)),
        (DType.I32, np.array([-1, 2], np.int32)),
        (DType.I64, np.array([], np.int64)),
    ],
)
def test_figures_of_other_types(dtype: DType, values: np.ndarray) -> None:
    one, _ = statistics_of(values, dtype, PLACE, 1)
    expected = {DType.I32: (2.0, 0, 0), DType.I64: (0.0, 0, 0)}
    assert (one.high, one.num_nan, one.num_poisoned) == expected.get(dtype, (1.0, 1, 1))


def test_old_steps_give_way_whole(tmp_path: Path) -> None:
    from hypocenter.record.contents import Snapshot
    from hypocenter.record.events import Values

    writer = TraceWriter(tmp_path, 1000)
    for step in range(1, 6):
        for launch in range(2):
            values = (Values(1, "U8", (150,), bytes(150)),)
            writer.recent(Snapshot(step, 1, launch, values))
    kept = read_trace(tmp_path).snapshots
    assert [(one.step, one.launch) for one in kept] == [(4, 0), (4, 1), (5, 0), (5, 1)]
    assert sum(path.stat().st_size for path in (tmp_path / FOLDER).iterdir()) <= 1000


def test_what_is_torn_costs_only_itself(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path, 1000)
    records = [statistics_of(np.ones(2, np.float32), DType.F32, PLACE, i)[0] for i in range(3)]
    for record in records:
        writer.statistics(record)
    path = tmp_path / FOLDER / STATISTICS
    path.write_bytes(path.read_bytes()[:-5])
    (tmp_path / FOLDER / FIRST).write_bytes(b"\xff" * 64)
    trace = read_trace(tmp_path)
    assert list(trace.statistics) == records[:2]
    assert len(trace.missing) == 2
    assert all(
        name in " ".join(map(str, trace.missing)) for name in ("trace/statistics", "trace/first")
    )


def test_a_run_that_is_not_recorded_cannot_be_traced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HYPO_RECORD", "0")
    recorder.close_recorder()
    x = rows_tensor("x", np.ones((4, 64), np.float32))
    try:
        with pytest.raises(UsageError, match="HYPO_RECORD"):
            _plan("cpu", x)
    finally:
        recorder.close_recorder()


def test_a_full_disk_ends_the_trace_and_not_the_run(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(writer: TraceWriter, name: str, frame: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(TraceWriter, "_write", full)
    plan = _plan("cpu", rows_tensor("x", np.ones((4, 64), np.float32)))
    plan.run()
    assert np.isfinite(copies.to_host(plan.result)).all()
    assert caplog.messages == ["this run is traced in part: No space left on device"]


def test_a_strided_tensor_is_read_as_the_tensor_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(kernel_launch, "device", devices.open_device("sim:mi300x"))
    whole = tensor("whole", np.arange(24, dtype=np.float32).reshape(4, 6))
    part = Tensor("part", "test", DType.F32, (4, 2), (6, 1), 3, whole.allocation, whole.data)
    values = _read(part, 1 << 20)
    assert values is not None
    assert values.tolist() == [[3, 4], [9, 10], [15, 16], [21, 22]]
    assert _read(part, 8) is None


def test_the_configuration_knows_the_mode_and_its_room(monkeypatch: pytest.MonkeyPatch) -> None:
    assert EngineConfig(launch_mode="traced").launch_mode == "traced"
    assert trace_bytes({}) == 64 << 20
    assert trace_bytes({"HYPO_TRACE_BYTES": "4096"}) == 4096
    with pytest.raises(UsageError, match="HYPO_TRACE_BYTES is 'much'"):
        trace_bytes({"HYPO_TRACE_BYTES": "much"})


def test_index_of_an_empty_bundle_has_no_launches() -> None:
    from hypocenter.record.bundle import Bundle
    from hypocenter.record.fault_record import FaultRecord

    index = BundleIndex(Bundle(kind="crash", fault=FaultRecord(kind="crash", message="")))
    assert index.under_way == ()
    assert index.places() == ()


def test_numbers_beside_the_arrays_of_a_weight_are_no_part_of_its_digest() -> None:
    def digest(last: int, factor: float) -> str:
        parts = (np.array([1, last], np.int32), np.float32(factor))
        tensor: Any = SimpleNamespace(allocation=None, data=SimpleNamespace(parts=parts))
        seen = _figures_of_packed(tensor, Place(1, 1, 0), 7)
        assert seen is not None
        assert seen.is_digest_alone
        return seen.digest

    assert digest(2, 1.0) == digest(2, 0.5)
    assert digest(2, 1.0) != digest(3, 1.0)


def test_a_cache_of_blocks_is_told_by_its_digest(run_folder: Path) -> None:
    caches = [
        memory.allocate_blocks("k_cache", "kv_cache", DType.Q8_0, (1, 1, 32, 16), along=2),
        memory.allocate_blocks("v_cache", "kv_cache", DType.Q8_0, (1, 1, 16, 32), along=3),
    ]
    builder = PlanBuilder(1)
    x, slots = rows_tensor("x", np.ones((1, 32), np.float32)), tensor("slots", np.zeros(1, "i4"))
    kv_write(builder, x, x, slots, caches[0], caches[1], counts(1))
    plan = Plan(builder, x)
    plan.set_mode("traced")
    plan.run()
    x.data[:] = 2
    plan.run()
    seen = [(name, one.digest) for _, name, one in _named(run_folder) if one.is_digest_alone]
    # As they were before the first launch wrote them, and after each.
    assert [name for name, _ in seen[-4:]] == 2 * ["k_cache", "v_cache"]
    assert len({digest for _, digest in seen[-4:]}) > 1
    assert seen[-4][1] != seen[-2][1]
