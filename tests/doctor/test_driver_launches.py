"""Kernels in CUDA C, by what the driver recorded of them on a real H100 and what a dump says.

The records are those of `faults/programs/gpu/cuda_*.py`. Beside CUPTI no dump is written, so
the dumps are made by hand after those of a run without it, in which memory lies elsewhere.
"""

from __future__ import annotations

import functools
import json
import lzma
from typing import Any

import msgspec
import pytest
from recorded.core_dumps import FIXTURES

from hypocenter.doctor.causes import Cause
from hypocenter.doctor.diagnosis import Diagnosis, RootCause, Verdict
from hypocenter.doctor.doctor import diagnose
from hypocenter.doctor.report import report_text
from hypocenter.record.bundle import Bundle
from hypocenter.record.driver_run import NO_ANSWER, DriverRun
from hypocenter.record.gpu_stop import (
    GpuAccess,
    GpuFrame,
    GpuGrid,
    GpuLane,
    GpuStop,
    GpuWarp,
)

HOME = "/home/user/programs"
replace = msgspec.structs.replace


@functools.cache
def recorded(name: str) -> Bundle:
    held = json.loads(lzma.decompress((FIXTURES / "driver_runs.json.xz").read_bytes()))
    return msgspec.convert(held[name], Bundle)


def run_of(name: str) -> DriverRun:
    run = recorded(name).driver_run
    assert run is not None
    return run


def stopped(
    kernel: str,
    operation: str,
    parameters: tuple[int, ...],
    *,
    width: int = 4,
    exception: str = "illegal address",
    is_of_loaded: bool = False,
    grid: GpuGrid | None = None,
    addresses: tuple[int, ...] = (),
) -> GpuStop:
    """A dump of another run: by default one of which all warps had left."""
    access = GpuAccess(
        operation=operation,
        width_bytes=width,
        addresses=dict(enumerate(addresses)),
        known_bits=2**64 - 1 if addresses else 0,
        parameters=parameters,
        is_of_loaded=is_of_loaded,
    )
    warp = GpuWarp(
        grid=0 if grid is not None else -1,
        block=(0, 0, 0) if grid is not None else None,
        warp=0,
        kernel=kernel,
        symbol=kernel,
        pc=256,
        is_error=True,
        exception=exception,
        frames=(GpuFrame("/tmp/kernels.cu", 5, "", "the line of the kernel"),),
        access=access,
        lanes=(GpuLane(lane=0, thread=(0, 0, 0), pc=256),),
    )
    return GpuStop(
        source="NVIDIA core dump",
        exception=exception,
        is_of_run_before=True,
        grids=(grid,) if grid is not None else (),
        warps=(warp,),
        num_warps=1,
    )


def examined(name: str, stop: GpuStop | None = None, **changed: Any) -> Diagnosis:
    made = replace(recorded(name), **changed)
    return diagnose(made if stop is None else replace(made, gpu_stops=(stop,)))


def root_of(name: str, stop: GpuStop) -> RootCause:
    [root] = examined(name, stop).roots
    assert (root.file, root.line) == ("/tmp/kernels.cu", 5)
    return root


# -- what the driver refused ----------------------------------------------------------------------


def test_a_launch_of_too_many_threads_is_named_with_its_line() -> None:
    """torch reports it at its next call, which is innocent."""
    found = examined("cuda_threads")
    [root] = found.roots
    assert (root.cause, root.kernel, root.argument) == (Cause.THREAD_LIMIT, "fill", "block")
    assert "a block of (2048, 1, 1) has 2048 threads, and 1024 are allowed" in root.sentence
    assert root.fix == "Launch blocks of at most 1024 threads"
    assert root.launched_at == f"{HOME}/cuda_threads.py:29"
    assert root.culprit is not None
    assert root.culprit.place == root.launched_at
    assert "CUDA_ERROR_INVALID_VALUE (invalid argument)" in root.proof.red
    assert "after a launch that the driver had refused" in found.surfaced


def test_a_refusal_that_the_program_did_not_end_by_proves_nothing() -> None:
    """A library tries a launch, and another one if the first is refused."""
    fault = replace(
        recorded("cuda_threads").fault,
        message="RuntimeError: shapes do not fit",
        error="shapes do not fit",
    )
    found = examined("cuda_threads", fault=fault)
    assert found.roots == ()
    [told] = [h for h in found.hypotheses if h.diagnostic == "driver"]
    assert told.verdict is Verdict.INCONCLUSIVE
    assert "it may have tried another way" in told.evidence[1]


def test_of_two_refused_kernels_neither_is_proven() -> None:
    run = run_of("cuda_threads")
    [refusal] = run.refusals
    launch = next(one for one in run.launches if one.seq == refusal.seq)
    other = replace(launch, seq=99, kernel=3)
    both = replace(
        run, launches=(*run.launches, other), refusals=(refusal, replace(refusal, seq=99))
    )
    found = examined("cuda_threads", driver_run=both)
    assert found.roots == ()
    assert len([h for h in found.hypotheses if h.diagnostic == "driver"]) == 2


@pytest.mark.parametrize(
    ("changed", "cause", "text"),
    [
        ({"block": (1, 1, 65)}, Cause.THREAD_LIMIT, "65 threads along z, and 64 are allowed"),
        ({"block": (32, 1, 1), "grid": (1, 65536, 1)}, Cause.GRID_LIMIT, "65536 blocks along y"),
        ({"block": (32, 1, 1), "grid": (0, 1, 1)}, Cause.EMPTY_LAUNCH, "is empty"),
        (
            {"block": (32, 1, 1), "shared_bytes": 60000},
            Cause.SHARED_MEMORY,
            "60000 bytes of dynamic shared memory were asked for",
        ),
    ],
)
def test_each_limit_has_its_cause(changed: dict[str, Any], cause: Cause, text: str) -> None:
    run = run_of("cuda_threads")
    launches = tuple(replace(one, **changed) if one.code else one for one in run.launches)
    [refusal] = run.refusals
    limits = {**refusal.limits, "dynamic shared bytes of the kernel": 49152}
    changed_run = replace(run, launches=launches, refusals=(replace(refusal, limits=limits),))
    [root] = examined("cuda_threads", driver_run=changed_run).roots
    assert root.cause is cause
    assert text in root.sentence


# -- where the GPU stopped ------------------------------------------------------------------------


def test_memory_that_was_freed_is_named_with_both_lines() -> None:
    root = root_of("cuda_freed", stopped("copy", "load", (0,)))
    assert (root.cause, root.argument) == (Cause.USE_AFTER_FREE, "parameter 0")
    assert f"67108864 bytes of cuMemAlloc, made at {HOME}/cuda_freed.py:32" in root.sentence
    assert f"freed at {HOME}/cuda_freed.py:34" in root.sentence
    assert root.culprit is not None
    assert root.culprit.place == f"{HOME}/cuda_freed.py:34"
    assert root.launched_at == f"{HOME}/cuda_freed.py:35"


def test_freed_memory_is_named_where_each_launch_is_waited_for() -> None:
    """The launch itself has the answer then, and the program waits no further."""
    run = run_of("cuda_freed")
    *before, last = run.launches
    answered = replace(run, launches=(*before, replace(last, code=700)))
    blocking = {"CUDA_LAUNCH_BLOCKING": "1"}
    stop = stopped("copy", "load", (0,))
    found = examined("cuda_freed", stop, driver_run=answered, environment=blocking)
    [root] = found.roots
    assert (root.cause, root.argument) == (Cause.USE_AFTER_FREE, "parameter 0")
    # A process that ended in the launch has no answer, and nothing of what that was given.
    ended = replace(run, launches=(*before, replace(last, code=NO_ANSWER, data=b"")))
    found = examined("cuda_freed", stop, driver_run=ended, environment=blocking)
    assert found.roots == ()


def test_through_the_other_parameter_of_that_launch_nothing_was_freed() -> None:
    root = root_of("cuda_freed", stopped("copy", "store", (8,)))
    assert root.cause is Cause.ACCESS_OUTSIDE
    assert "out (F32 [1048576], 4194304 bytes)" in root.sentence


def test_an_address_that_is_no_multiple_is_named_with_its_tensor() -> None:
    stop = stopped("copy4", "load", (0,), width=16, exception="misaligned address")
    root = root_of("cuda_misaligned", stop)
    assert (root.cause, root.argument) == (Cause.MISALIGNMENT, "parameter 0")
    assert "part (F32 [4095], 16380 bytes)" in root.sentence
    assert "this one lies 4 bytes behind one" in root.fix


@pytest.mark.parametrize(
    ("header", "is_told"),
    [
        ("/usr/local/cuda-13.0/targets/x86_64-linux/include/sm_20_atomic_functions.h", False),
        ("/p/site-packages/nvidia/cu13/include/crt/device_functions.h", False),
        ("/home/ann/kernels/include/rows.cuh", True),
    ],
)
def test_the_line_is_the_programs_and_not_of_a_header_of_cuda(header: str, is_told: bool) -> None:
    """An atomic is inlined from a header; who wrote the kernel has another line."""
    stop = stopped("copy", "load", (0,))
    [warp] = stop.warps
    inner = GpuFrame(header, 88, "", "return __iAtomicAdd(address, val);")
    stop = replace(stop, warps=(replace(warp, frames=(inner, *warp.frames)),))
    [root] = examined("cuda_freed", stop).roots
    assert (root.file, root.line) == ((header, 88) if is_told else ("/tmp/kernels.cu", 5))


def test_an_aligned_pointer_is_not_blamed_for_a_misaligned_access() -> None:
    stop = stopped("copy4", "store", (8,), width=16, exception="misaligned address")
    assert examined("cuda_misaligned", stop).roots == ()


def test_a_null_pointer_is_named() -> None:
    root = root_of("cuda_no_bias", stopped("add_bias", "load", (8,)))
    assert (root.cause, root.argument) == (Cause.NULL_POINTER, "parameter 1")
    assert root.launched_at == f"{HOME}/cuda_no_bias.py:27"


def test_a_null_number_is_not_blamed_where_an_address_was_loaded() -> None:
    """What was loaded may be the address, and the parameter a number that is 0."""
    stop = stopped("add_bias", "load", (8,), is_of_loaded=True)
    assert examined("cuda_no_bias", stop).roots == ()


def test_an_address_outside_is_told_with_its_distance() -> None:
    """The dump is of a run in which all memory lay 2**30 bytes further."""
    run = run_of("cuda_histogram")
    launch = run.launches[-1]
    bins, counts = (int.from_bytes(launch.data[at : at + 8], "little") for at in (0, 8))
    moved = 1 << 30
    data = (
        (bins + moved).to_bytes(8, "little")
        + (counts + moved).to_bytes(8, "little")
        + launch.data[16:]
    )
    words = tuple(int.from_bytes(data[at : at + 4], "little") for at in range(0, len(data), 4))
    grid = GpuGrid(
        kernel="histogram", symbol="histogram", grid=launch.grid, block=launch.block, words=words
    )
    far = counts + moved + 4 * 65536 * 20000
    stop = stopped("histogram", "atomic", (8, 24), grid=grid, addresses=(far,))
    root = root_of("cuda_histogram", stop)
    assert (root.cause, root.argument) == (Cause.ACCESS_OUTSIDE, "parameter 1")
    assert "counts (I32 [65536], 262144 bytes)" in root.sentence
    assert f"made at {HOME}/cuda_histogram.py:29" in root.sentence
    distance = 4 * 65536 * 20000 - 262144
    assert f"is changed, {distance} bytes behind its end" in root.sentence
    # Another grid of the same kernel, with another number: nobody recorded that launch.
    other = replace(grid, words=(*words[:4], words[4] + 1, *words[5:]))
    gone = stopped("histogram", "atomic", (8, 24), grid=other, addresses=(far,))
    assert examined("cuda_histogram", gone).roots == ()


def test_of_two_pointers_in_an_address_none_is_proven() -> None:
    found = examined("cuda_histogram", stopped("histogram", "atomic", (0, 8)))
    assert found.roots == ()
    [told] = [h for h in found.hypotheses if h.diagnostic == "driver"]
    # The access is certain, and a sanitizer's run would tell no more of it.
    assert told.verdict is Verdict.CONFIRMED
    assert "which parameter they belong to" in told.evidence[2]
    stop = stopped("histogram", "atomic", (0, 8), exception="stack error")
    [told] = [h for h in examined("cuda_histogram", stop).hypotheses if h.diagnostic == "driver"]
    assert told.verdict is Verdict.INCONCLUSIVE


@pytest.mark.parametrize("is_blocking", [True, False])
def test_without_a_dump_the_launch_that_failed_is_named_and_nothing_proven(
    is_blocking: bool,
) -> None:
    """The driver's answer is that of the launch only where the program waits for each."""
    run = run_of("cuda_freed")
    *before, last = run.launches
    failed = replace(run, launches=(*before, replace(last, code=700)))
    environment = {"CUDA_LAUNCH_BLOCKING": "1"} if is_blocking else {}
    found = examined("cuda_freed", driver_run=failed, environment=environment)
    assert found.roots == ()
    told = [h for h in found.hypotheses if h.diagnostic == "driver"]
    assert len(told) == is_blocking
    for one in told:
        assert (one.cause, one.verdict) == (Cause.USE_AFTER_FREE, Verdict.INCONCLUSIVE)
        assert (one.kernel, one.argument) == ("copy", "parameter 0")
        assert f"launched at {HOME}/cuda_freed.py:35, failed with error 700" in one.evidence[0]
        assert f"freed at {HOME}/cuda_freed.py:34" in one.evidence[1]


def test_of_launches_with_other_pointers_none_is_proven() -> None:
    """All warps had left, so the dump does not tell which of them it was."""
    run = run_of("cuda_freed")
    launch = run.launches[-1]
    data = launch.data[8:16] + launch.data[8:]
    other = replace(launch, seq=50, data=data)
    both = replace(run, launches=(*run.launches, other))
    stop = stopped("copy", "load", (0,))
    assert examined("cuda_freed", stop, driver_run=both).roots == ()


def test_an_address_inside_of_what_is_there_proves_nothing() -> None:
    run = run_of("cuda_histogram")
    launch = run.launches[-1]
    words = tuple(
        int.from_bytes(launch.data[at : at + 4], "little") for at in range(0, len(launch.data), 4)
    )
    grid = GpuGrid(
        kernel="histogram", symbol="histogram", grid=launch.grid, block=launch.block, words=words
    )
    inside = int.from_bytes(launch.data[8:16], "little") + 64
    stop = stopped("histogram", "atomic", (8, 24), grid=grid, addresses=(inside,))
    assert examined("cuda_histogram", stop).roots == ()


def test_without_a_watch_the_dump_and_the_variables_are_enough() -> None:
    """Of a dump with the grid: the code tells how its parameters lie."""
    run = run_of("cuda_histogram")
    launch = run.launches[-1]
    words = tuple(
        int.from_bytes(launch.data[at : at + 4], "little") for at in range(0, len(launch.data), 4)
    )
    grid = GpuGrid(
        kernel="histogram",
        symbol="histogram",
        grid=launch.grid,
        block=launch.block,
        words=words,
        layout=((0, 8), (8, 8), (16, 4), (24, 8)),
    )
    far = int.from_bytes(launch.data[8:16], "little") + (1 << 36)
    stop = stopped("histogram", "atomic", (8, 24), grid=grid, addresses=(far,))
    names = DriverRun(tensors=run.tensors)
    found = examined("cuda_histogram", replace(stop, is_of_run_before=False), driver_run=names)
    [root] = found.roots
    assert (root.cause, root.argument) == (Cause.ACCESS_OUTSIDE, "parameter 1")
    assert root.launched_at == ""
    shown = report_text(found)
    assert "parameter 2 = 100000" in shown
    assert "counts (I32 [65536]" in shown
