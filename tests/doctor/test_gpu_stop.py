"""Faults of a real H100, from the bundles that `benchmarks/gpu_coredump.py` made there.

Each was unproven without the dump: the programs find their way by what tensors on the GPU held.
"""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from recorded.core_dumps import AGENT_TEXT, bundle_folder

from hypocenter.coredump.debug_agent import read_debug_agent
from hypocenter.doctor.causes import Cause
from hypocenter.doctor.diagnosis import Diagnosis, RootCause, Verdict
from hypocenter.doctor.doctor import diagnose
from hypocenter.doctor.markdown import report_markdown
from hypocenter.doctor.report import report_text
from hypocenter.doctor.report_parts import headline
from hypocenter.record import bundle as bundles
from hypocenter.record.bundle import Bundle
from hypocenter.record.events import Allocated, AnyEvent, TensorRecord
from hypocenter.record.gpu_stop import GpuLane

PROGRAMS = Path(__file__).parents[2] / "faults" / "programs" / "gpu"


@functools.cache
def bundle(name: str) -> Bundle:
    with tempfile.TemporaryDirectory() as folder:
        return bundles.load(bundle_folder(name, Path(folder)))


def examined(made: Bundle) -> Diagnosis:
    return diagnose(made, allow_source=True)


@functools.cache
def diagnosis(name: str) -> Diagnosis:
    return examined(bundle(name))


def root_of(name: str) -> RootCause:
    [root] = diagnosis(name).roots
    return root


def without_dump(made: Bundle) -> Bundle:
    return msgspec.structs.replace(made, gpu_stops=())


def with_stop(made: Bundle, **changed: Any) -> Bundle:
    """The bundle with another warp at fault."""
    stop = made.gpu_stops[0]
    warp = msgspec.structs.replace(stop.warps[0], **changed)
    stop = msgspec.structs.replace(stop, warps=(warp,))
    return msgspec.structs.replace(made, gpu_stops=(stop,))


@pytest.mark.parametrize(
    ("name", "cause", "argument", "text"),
    [
        ("far_index", Cause.INDEX_RANGE, "ids_ptr", "tl.load(table_ptr + i * D + d)"),
        ("vector_gather", Cause.INDEX_RANGE, "ids_ptr", "tl.load(values_ptr + at, mask=i < n)"),
        ("wild_bin", Cause.INDEX_RANGE, "bins_ptr", "tl.atomic_add(hist_ptr + b, 1, mask=i < n)"),
        ("kept_pointers", Cause.WILD_POINTER, "ptrs_ptr", "tl.load(p + d)"),
        (
            "pair_positions",
            Cause.DTYPE_WIDTH,
            "pos_ptr",
            "tl.load(pos_ptr.to(tl.pointer_type(tl.int32)) + t)",
        ),
        ("row_stride", Cause.WRONG_STRIDE, "stride", "tl.load(x_ptr + row * stride + c)"),
        ("freed_graph_input", Cause.CAPTURED_POINTER, "x_ptr", "tl.load(x_ptr + i, mask=i < n)"),
    ],
)
def test_what_led_there_is_proven_with_line_and_argument(
    name: str, cause: Cause, argument: str, text: str
) -> None:
    root = root_of(name)
    assert (root.cause, root.argument) == (cause, argument)
    assert root.file == f"/home/user/programs/{name}.py"
    assert root.line is not None
    line = (PROGRAMS / f"{name}.py").read_text().splitlines()[root.line - 1]
    assert text in line
    assert root.expression == text
    # The dump is the first half of the red one, the replay of that very program the second.
    assert f"stopped at {root.file}:" in root.proof.red
    assert root.proof.corrected
    assert root.proof.green


def test_an_index_of_anybodys_is_no_position_of_the_engine() -> None:
    """Whatever it is called: what `positions` holds is known of this package's own kernels."""
    text = msgspec.json.encode(bundle("far_index")).replace(b"ids_ptr", b"positions_ptr")
    [root] = examined(msgspec.json.decode(text, type=Bundle)).roots
    assert (root.cause, root.argument) == (Cause.INDEX_RANGE, "positions_ptr")


def test_the_values_are_those_that_were_there() -> None:
    """As far as the registers tell: the upper half of an address may be lost."""
    sentence = root_of("far_index").sentence
    assert "ids_ptr[77] is 8388608 (or a multiple of 8388608 more or less)" in sentence
    assert (1 << 40) % 8388608 == 0
    assert root_of("far_index").proof.corrected == "ids_ptr[77] = 31999"
    # Which of a thread's entries it was is not known, its value is.
    assert (
        f"one of ids_ptr[7168] to ids_ptr[8191] is {1 << 36}," in root_of("vector_gather").sentence
    )
    assert "one of bins_ptr[1024] to bins_ptr[1279] is -2000000000," in root_of("wild_bin").sentence
    pair = root_of("pair_positions")
    assert f"pos_ptr[16] and pos_ptr[17] together are {17 << 16 | 16} " in pair.sentence
    assert pair.proof.corrected == "pos_ptr[16] read by itself: 16"
    assert "ptrs_ptr[2] is the address 0x" in root_of("kept_pointers").sentence
    assert root_of("row_stride").fix == "Pass 256 for stride: a stride of x"
    assert "the replay of that program with stride = 1000003" in root_of("row_stride").proof.red


def stopped_at(made: Bundle, row: int, stride: int) -> Bundle:
    """The same, had the GPU stopped at another row, whose product with the stride wraps."""
    [stop] = made.gpu_stops
    wrong = next(warp for warp in stop.warps if warp.is_error or warp.exception)
    assert wrong.block is not None
    assert wrong.access is not None
    wrapped = (row * stride + (1 << 31)) % (1 << 32) - (1 << 31)
    moved = 4 * (wrapped - wrong.block[0] * 1_000_003)
    access = msgspec.structs.replace(
        wrong.access,
        addresses={
            lane: (at + moved) % (1 << 64) & wrong.access.known_bits
            for lane, at in wrong.access.addresses.items()
        },
    )
    warp = msgspec.structs.replace(wrong, block=(row, 0, 0), access=access)
    stop = msgspec.structs.replace(
        stop, warps=tuple(warp if one is wrong else one for one in stop.warps)
    )
    return msgspec.structs.replace(made, gpu_stops=(stop,))


def test_a_stride_that_is_far_too_large_is_wrong_where_its_product_wraps_as_well() -> None:
    [root] = examined(stopped_at(bundle("row_stride"), 3000, 1_000_003)).roots
    assert (root.cause, root.argument) == (Cause.WRONG_STRIDE, "stride")
    assert root.fix == "Pass 256 for stride: a stride of x"


def with_long_rows(made: Bundle) -> Bundle:
    """The same of a tensor x that has such rows and a shorter stride as well, and room for all."""
    [x] = [tensor for tensor in made.tensors if tensor.strides == (256, 1)]
    extent, away = 4 * 4097 * 1_000_003, 1 << 44
    change = msgspec.structs.replace

    def moved(tensor: TensorRecord) -> TensorRecord:
        if tensor is not x:
            return change(tensor, address=tensor.address + away)
        wide = {"shape": (4097, 3906, 256), "strides": (1_000_003, 256, 1)}
        return change(tensor, **wide, extent_bytes=extent)

    def given(event: AnyEvent) -> AnyEvent:
        if not isinstance(event, Allocated):
            return event
        of = event.allocation
        room = {"num_bytes": extent} if of.id == x.allocation else {"address": of.address + away}
        return change(event, allocation=change(of, **room))

    [stop] = made.gpu_stops
    grids = tuple(change(grid, words=()) for grid in stop.grids)  # it had other addresses
    return change(
        made,
        tensors=tuple(map(moved, made.tensors)),
        events=tuple(map(given, made.events)),
        gpu_stops=(change(stop, grids=grids),),
    )


def test_where_the_stride_is_the_tensors_own_the_product_is_wrong() -> None:
    found = examined(stopped_at(with_long_rows(bundle("row_stride")), 3000, 1_000_003))
    assert [root.cause for root in found.roots] == [Cause.OFFSET_OVERFLOW]


@pytest.mark.parametrize(
    "name", ["far_index", "vector_gather", "wild_bin", "kept_pointers", "pair_positions"]
)
def test_without_the_dump_none_of_them_is_proven(name: str) -> None:
    found = examined(without_dump(bundle(name)))
    assert found.roots == ()
    assert found.sights == ()


def test_of_addresses_that_a_loop_takes_each_may_be_the_one() -> None:
    """The others are zeros in the replay, and no addresses: that says nothing of the one."""
    made = bundle("kept_pointers")
    [source] = made.sources
    lines = source.text.splitlines()
    [at] = [number for number, line in enumerate(lines) if "p = tl.load(" in line]
    address = "tl.load(ptrs_ptr + number).to(tl.pointer_type(tl.float32))"
    lines[at : at + 3] = [
        "    d = tl.arange(0, D)",
        "    for number in range(4):",
        f"        tl.store(out_ptr + d, tl.load({address} + d))",
    ]
    looped = msgspec.structs.replace(source, text="\n".join(lines) + "\n")
    [root] = examined(msgspec.structs.replace(made, sources=(looped,))).roots
    assert (root.cause, root.argument) == (Cause.WILD_POINTER, "ptrs_ptr")
    assert "one of ptrs_ptr[0] to ptrs_ptr[3] is the address 0x" in root.sentence


def test_an_entry_that_explains_nothing_proves_nothing() -> None:
    """The dump says an address that no entry of the program gives."""
    made = bundle("far_index")
    access = made.gpu_stops[0].warps[0].access
    assert access is not None
    odd = {lane: address + 2 for lane, address in access.addresses.items()}
    found = examined(with_stop(made, access=msgspec.structs.replace(access, addresses=odd)))
    assert found.roots == ()
    [told] = [h for h in found.hypotheses if h.diagnostic == "core dump"]
    assert told.verdict is Verdict.INCONCLUSIVE
    assert "no entry that it loads explains the address" in told.evidence[1]


def test_a_launch_whose_tensors_lie_elsewhere_is_not_the_one() -> None:
    made = bundle("far_index")
    stop = made.gpu_stops[0]
    grid = msgspec.structs.replace(stop.grids[0], words=(1, 2, 3, 4, 5, 6))
    other = msgspec.structs.replace(stop, grids=(grid,))
    found = examined(msgspec.structs.replace(made, gpu_stops=(other,)))
    assert found.roots == ()
    assert found.sights[0].place is None
    assert found.sights[0].parameters[0] == ("word 0", f"{1 | 2 << 32:#x}")


def test_the_source_does_not_run_unless_it_may() -> None:
    found = diagnose(bundle("far_index"))
    assert found.roots == ()
    assert any("program at which the GPU stopped" in gap.what for gap in found.unseen)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("compiled", "triton_poi_fused_add_index_mul_0 stopped at /tmp/torchinductor_root/"),
        ("cuda_source", "scatter stopped at /tmp/"),
        (
            "embedding_range",
            "at::native::(anonymous namespace)::indexSelectSmallIndex<...> stopped",
        ),
    ],
)
def test_a_kernel_that_nobody_recorded_is_named_in_the_headline(name: str, told: str) -> None:
    found = diagnosis(name)
    assert headline(found).startswith(f"no root cause is proven; {told}")


def test_a_kernel_of_cuda_is_named_with_the_text_of_its_line() -> None:
    [sight] = diagnosis("cuda_source").sights
    assert (sight.kernel, sight.line, sight.text) == ("scatter", 5, "out[ids[i]] = 1.0f;")
    # All of its warps had left when the GPU stopped.
    assert (sight.block, sight.num_in_all) == (None, 0)
    [sight] = diagnosis("compiled").sights
    assert sight.text.startswith("tmp5 = tl.load(in_ptr1 + (x1 + 64*tmp4)")
    assert sight.block == (0, 9, 0)
    assert not sight.is_triton  # not recorded, so nobody knows
    [sight] = diagnosis("embedding_range").sights
    assert (sight.exception, sight.threads) == ("assert", (0, 31))


def test_a_hang_is_told_with_the_line_at_which_the_program_stands() -> None:
    found = diagnose(bundle("spin_lock"), without=("hang", "replay"))
    [sight] = found.sights
    assert (sight.exception, sight.line, sight.num_warps) == ("", 14, 4)
    assert sight.text == "v = tl.load(lock_ptr, volatile=True)"
    text = report_text(found)
    assert (
        "\nGPU        spin stands at /home/user/programs/spin_lock.py:14; program (0, 0, 0)" in text
    )
    assert "parameters: lock_ptr = lock (0x" in text


def test_a_loop_that_ends_in_its_replay_is_believed_of_the_gpu() -> None:
    """It waits for what nobody recorded: the replay has zeros there, for which it ends."""
    made = bundle("spin_lock")
    [source] = made.sources
    ends = msgspec.structs.replace(source, text=source.text.replace("v == 0", "v != 0"))
    waiting = msgspec.structs.replace(made, sources=(ends,))
    found = [h for h in examined(waiting).hypotheses if h.cause is Cause.ENDLESS_LOOP]
    assert [(h.verdict, h.kernel) for h in found] == [(Verdict.CONFIRMED, "spin")]
    assert "spin stands at /home/user/programs/spin_lock.py:14" in found[0].evidence[1]
    blind = examined(without_dump(waiting)).hypotheses
    assert [h.verdict for h in blind if h.cause is Cause.ENDLESS_LOOP] == [Verdict.REFUTED]


def test_reports_tell_what_the_gpu_did() -> None:
    found = diagnosis("kept_pointers")
    text = report_text(found)
    told, line, access = text.partition("\nGPU ")[2].splitlines()[1:4]
    assert told == "           0), threads 0 to 31; 4 warps of 4 stood there"
    assert line.strip() == "tl.store(out_ptr + tl.program_id(0) * D + d, tl.load(p + d))"
    assert access.strip().startswith("its first lane reads 4 bytes at 0x")
    assert "**The GPU.** via stopped at" in report_markdown(found)
    shown = json.loads(msgspec.json.encode(found))["sights"][0]
    assert (shown["kernel"], shown["block"], shown["known_bits"]) == ("via", [2, 0, 0], 2**64 - 1)


def test_waves_of_an_amd_gpu_are_told_in_the_same_way() -> None:
    stop = read_debug_agent(AGENT_TEXT)
    assert stop is not None
    made = msgspec.structs.replace(without_dump(bundle("compiled")), gpu_stops=(stop,))
    found = examined(made)
    assert headline(found) == (
        "no root cause is proven; scatter stopped at /home/user/scatter.hip:17: illegal address; "
        "1 warp of 2 stood there"
    )
    assert found.sights[0].source == "ROCm debug agent"


def test_a_bundle_keeps_what_the_dump_said(tmp_path: Path) -> None:
    made = bundle("pair_positions")
    bundles.save(made, tmp_path / "again")
    assert bundles.load(tmp_path / "again").gpu_stops == made.gpu_stops
    lanes = (GpuLane(lane=0, thread=(0, 0, 0), pc=0),) * 100
    large = with_stop(made, lanes=lanes)
    bundles.save(large, tmp_path / "large")
    loaded = bundles.load(tmp_path / "large")
    assert loaded.gpu_stops == ()
    assert any("100 lanes, limit 64" in gap.reason for gap in loaded.missing)


def test_an_operation_that_nobody_knows_is_told_all_the_same() -> None:
    made = bundle("far_index")
    access = made.gpu_stops[0].warps[0].access
    assert access is not None
    strange = msgspec.structs.replace(access, operation="<b>load</b>")
    found = examined(with_stop(made, access=strange))
    assert "its first lane accesses" in report_text(found)
