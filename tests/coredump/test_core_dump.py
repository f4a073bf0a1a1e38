"""Real dumps of an H100, read on any machine; and broken ones, which give one line."""

from __future__ import annotations

import os
import random
import struct
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from recorded.core_dumps import FIXTURES, fixture, put_together, take_apart

from hypocenter.base.errors import BadCoreDump
from hypocenter.coredump.nvidia import MAX_DUMP_BYTES, read_core_dump
from hypocenter.record.gpu_stop import MAX_DEEP_WARPS, GpuFrame, GpuStop

sys.path.insert(0, str(Path(__file__).parents[1] / "fuzz"))

from hostile_core_dumps import prepare

FOLDER = "/home/user/gpu/experiment"
WARPS, LANES, SMS, BLOCKS, GRIDS = (0x80000000 + kind for kind in (14, 15, 11, 13, 12))


def read(tmp_path: Path, data: bytes, name: str = "4711.nvcudmp") -> GpuStop:
    (tmp_path / name).write_bytes(data)
    return read_core_dump(tmp_path / name)


def test_a_gather_with_a_wild_index(tmp_path: Path) -> None:
    stop = read(tmp_path, fixture("gather"))
    assert (stop.source, stop.pid, stop.exception) == ("NVIDIA core dump", 4711, "illegal address")
    assert stop.device == "NVIDIA H100 80GB HBM3 (sm_90)"
    assert stop.driver == "580.159, CUDA 13.0"
    assert (stop.num_warps, len(stop.warps), stop.is_on_request) == (4, 4, False)
    [grid] = stop.grids
    assert (grid.kernel, grid.symbol) == ("embed", "embed")
    assert (grid.grid, grid.block) == ((256, 1, 1), (128, 1, 1))
    # The addresses of ids, table and out, and two pointers that Triton adds.
    assert grid.words[:6] == (0x87E00000, 0x7FBC, 0x8CA00000, 0x7FBC, 0x87E00800, 0x7FBC)
    warp = stop.faulting
    assert warp is not None
    assert (warp.block, warp.kernel, warp.offset) == ((77, 0, 0), "embed", 0x100)
    assert warp.is_error
    assert warp.frames == (GpuFrame(f"{FOLDER}/c02_async_blame.py", 9),)
    # The load has overwritten the upper half of its own address.
    assert warp.access is not None
    assert (warp.access.operation, warp.access.width_bytes) == ("load", 4)
    assert warp.access.known_bits == 0xFFFFFFFF
    assert warp.access.addresses == {lane: 0x8CA00000 + 4 * lane for lane in range(32)}
    assert [lane.thread for lane in warp.lanes] == [(lane, 0, 0) for lane in range(32)]
    assert len(warp.lanes[0].registers) == 14
    assert warp.lanes[0].registers[4] == 0x8CA00000
    assert stop.standing[0].line == 9
    assert stop.standing[0].num_warps == 4
    assert stop.problem() == ""


def test_a_pointer_from_a_tensor_whose_memory_is_gone(tmp_path: Path) -> None:
    warp = read(tmp_path, fixture("pointers")).faulting
    assert warp is not None
    assert warp.access is not None
    assert (warp.block, warp.frames[0].line) == ((2, 0, 0), 8)
    # A thread has four neighbours, and the first of them was read.
    assert warp.access.addresses[3] == 0x7F9902000030
    assert warp.access.known_bits == (1 << 64) - 1


def test_a_dump_that_somebody_asked_for_says_where_the_warps_stand(tmp_path: Path) -> None:
    stop = read(tmp_path, fixture("spin"))
    assert stop.is_on_request
    assert stop.exception == ""
    assert stop.faulting is not None
    assert not stop.faulting.is_error
    [standing] = stop.standing
    assert (standing.kernel, standing.line, standing.num_warps) == ("spin", 7, 4)


def test_of_warps_that_have_left_their_multiprocessor_tells(tmp_path: Path) -> None:
    header, parts = take_apart(fixture("gather"))
    gone = (WARPS, BLOCKS, GRIDS)
    parts = [replace(part, data=b"") if part.type in gone else part for part in parts]
    stop = read(tmp_path, put_together(header, parts))
    assert (stop.num_warps, stop.grids) == (0, ())
    warp = stop.faulting
    assert warp is not None
    assert (warp.block, warp.grid, warp.kernel) == (None, -1, "embed")
    assert (warp.frames[0].line, stop.exception) == (9, "illegal address")


def test_rows_of_a_later_driver_are_longer(tmp_path: Path) -> None:
    header, parts = take_apart(fixture("gather"))
    longer = [
        replace(
            part,
            entry_bytes=part.entry_bytes + 16,
            data=b"".join(
                part.data[at : at + part.entry_bytes] + bytes(16)
                for at in range(0, len(part.data), part.entry_bytes)
            ),
        )
        if part.type in (WARPS, LANES, SMS, BLOCKS, GRIDS)
        else part
        for part in parts
    ]
    first = read(tmp_path, fixture("gather"))
    assert read(tmp_path, put_together(header, longer)) == first


def test_a_gpu_full_of_warps_is_counted_and_read_in_part(tmp_path: Path) -> None:
    """More sections than the header has room to count."""
    header, parts = take_apart(fixture("spin"))
    table = next(at for at, part in enumerate(parts) if part.type == WARPS)
    lanes = [part for part in parts if part.type == LANES]
    rows, num_rows = parts[table], 20_000
    row = rows.data[: rows.entry_bytes]
    parts[table] = replace(rows, data=row * num_rows)
    parts = [part for part in parts if part.type != LANES] + [
        replace(lanes[0], link=table, info=number) for number in range(num_rows)
    ]
    parts += [replace(lanes[0], link=1, info=0)] * 50_000
    stop = read(tmp_path, put_together(header, parts))
    assert stop.num_warps == num_rows
    assert len(stop.warps) == 64
    assert sum(len(warp.lanes) > 1 for warp in stop.warps) == MAX_DEEP_WARPS
    assert stop.problem() == ""


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"", "is cut off or damaged"),
        (b"\x7fELF" + bytes(100), "is no ELF file of 64 bits"),
        (fixture("gather")[:20_000], "is cut off or damaged"),
        (fixture("gather")[:16] + b"\x02\x00" + fixture("gather")[18:], "is no core dump"),
        (b"#!/bin/sh\n" * 100, "is no ELF file"),
    ],
)
def test_what_is_no_dump_is_refused_in_one_line(tmp_path: Path, data: bytes, told: str) -> None:
    with pytest.raises(BadCoreDump, match=told) as refused:
        read(tmp_path, data)
    assert "\n" not in str(refused.value)
    assert str(refused.value).startswith("4711.nvcudmp ")


def test_an_unfinished_dump_and_one_that_is_too_large(tmp_path: Path) -> None:
    unfinished = bytearray(fixture("gather"))
    struct.pack_into("<Q", unfinished, 40, 0)
    with pytest.raises(BadCoreDump, match="never finished"):
        read(tmp_path, bytes(unfinished))
    path = tmp_path / "large.nvcudmp"
    with path.open("wb") as file:
        file.truncate(MAX_DUMP_BYTES + 1)
    with pytest.raises(BadCoreDump, match=f"has {MAX_DUMP_BYTES + 1} bytes, limit"):
        read_core_dump(path)
    os.symlink(FIXTURES / "gather.nvcudmp.xz", tmp_path / "link.nvcudmp")
    with pytest.raises(BadCoreDump, match="cannot be read"):
        read_core_dump(tmp_path / "link.nvcudmp")
    with pytest.raises(BadCoreDump, match="cannot be read"):
        read_core_dump(tmp_path / "none.nvcudmp")


def test_a_file_that_lies_about_its_sections_is_bounded(tmp_path: Path) -> None:
    header, parts = take_apart(fixture("gather"))
    lying = bytearray(put_together(header, parts))
    table = struct.unpack_from("<Q", lying, 40)[0]
    struct.pack_into("<H", lying, 60, 0)  # the number stands in the first section then
    struct.pack_into("<Q", lying, table + 32, 1 << 40)
    with pytest.raises(BadCoreDump, match=r"has 1099511627776 sections, limit"):
        read(tmp_path, bytes(lying))


@pytest.mark.parametrize("seed", [*range(3)])
def test_hostile_dumps_crash_nothing(tmp_path: Path, seed: int) -> None:
    trial = prepare(tmp_path)
    folder = tmp_path / "hostile"
    folder.mkdir()
    for number in range(150):
        assert trial(random.Random(1_000_000 + 150 * seed + number), folder) == ""


def test_the_fixtures_are_real_and_small() -> None:
    for name in ("gather", "pointers", "spin"):
        assert (FIXTURES / f"{name}.nvcudmp.xz").stat().st_size < 16_000
        assert fixture(name)[:4] == b"\x7fELF"
