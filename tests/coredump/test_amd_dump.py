"""ROCm's core dump of a GPU, written by our emulator of the machine code; not hardware.

No dump of hardware was seen. Its layout is that of the sources which `coredump/amd_dump.py` names.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

import numpy as np
import pytest
from repository import ROOT

pytest.importorskip("tinygrad")

from hypocenter.base.errors import BadCoreDump, DeviceFault
from hypocenter.coredump.amd_code import instruction_bytes
from hypocenter.coredump.amd_dump import PATTERNS, read_amd_dump
from hypocenter.device.amd.code_object import read_code_object
from hypocenter.device.amd.decode import decode
from hypocenter.device.amd.emu import open_emu
from hypocenter.device.amd.executor import CODE_BASE, prepare
from hypocenter.device.amd.kernarg import LaunchShape
from hypocenter.watch.gpu_dumps import gpu_dumps

OBJECTS = ROOT / "tests" / "fixtures" / "amd"
TOKENS, HEADS, DIM = 32, 4, 128


@pytest.fixture
def dump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, int, int]:
    """The dump of a rope whose positions have two bytes each; addresses of x and positions."""
    monkeypatch.setenv(PATTERNS[0], str(tmp_path / "gpucore.%p"))
    gpu = open_emu("emu:mi300x", on_abort=lambda: None)
    x = np.ones((TOKENS, HEADS, DIM), np.float32)
    at = gpu.allocate(x.nbytes)
    gpu.copy_in(at, x.reshape(-1).view(np.uint8))
    mapped_bytes = 10 << 20
    positions = gpu.allocate(mapped_bytes) + mapped_bytes - 2 * TOKENS
    gpu.copy_in(positions, np.arange(TOKENS, dtype=np.int16).view(np.uint8))
    program = prepare(read_code_object((OBJECTS / "rope.gfx942.co").read_bytes(), "rope"), "rope")
    values = {"x": at, "positions": positions, "heads": HEADS, "dim": DIM, "base": 10000.0}
    gpu.launch_code(program, LaunchShape((TOKENS, HEADS, 1), (DIM // 2, 1, 1)), values)
    with pytest.raises(DeviceFault):
        gpu.copy_out(at, x.nbytes)
    assert gpu.last_fault is not None
    [path] = tmp_path.glob("gpucore.*")
    os.utime(path, (0, 0))
    return path, at, positions


def test_a_dump_tells_kernel_launch_and_the_address_that_was_asked_for(
    dump: tuple[Path, int, int],
) -> None:
    path, x, positions = dump
    stop = read_amd_dump(path)
    assert (stop.source, stop.device, stop.exception) == (
        "ROCm core dump", "gfx942", "illegal address",
    )  # fmt: skip
    assert not stop.is_on_request
    [grid] = stop.grids
    assert (grid.kernel, grid.grid, grid.block) == ("rope", (TOKENS, HEADS, 1), (DIM // 2, 1, 1))
    assert (grid.words[0] | grid.words[1] << 32, grid.words[2] | grid.words[3] << 32) == (
        x, positions,
    )  # fmt: skip
    assert grid.words[4:6] == (HEADS, DIM)
    assert grid.layout == ((0, 8), (8, 8), (16, 4), (20, 4), (24, 4))
    warp = stop.faulting
    assert warp is not None
    assert (warp.kernel, warp.grid, warp.exception) == ("rope", 0, "illegal address")
    assert warp.block is not None
    assert warp.access is not None
    assert (warp.access.operation, warp.access.width_bytes) == ("load", 4)
    assert warp.access.addresses == {0: positions + 4 * warp.block[0]}
    assert (len(warp.lanes), warp.lanes[63].thread) == (64, (63, 0, 0))


def test_lines_come_of_a_file_with_the_same_code(dump: tuple[Path, int, int]) -> None:
    path, _, _ = dump
    (path.parent / "none.co").write_bytes(b"no ELF file")
    other = path.parent / "other.co"
    data = bytearray((OBJECTS / "rope.gfx942.co").read_bytes())
    entry = read_code_object(bytes(data), "rope").kernels["rope"].entry
    at = bytes(data).index(
        read_code_object(bytes(data), "rope").memory_image(0)[entry : entry + 64]
    )
    data[at] ^= 1
    other.write_bytes(data)
    objects = [path.parent / "none.co", other, OBJECTS / "rope.gfx942.co"]
    for known, line in ((objects, 12), (objects[:2], None)):
        warp = read_amd_dump(path, lambda kernel, known=known: known).faulting  # type: ignore[misc]
        assert warp is not None
        assert [frame.line for frame in warp.frames[:1]] == ([line] if line else [])
        assert warp.is_error


def test_a_dump_of_the_users_own_is_found_where_rocm_writes_it(
    dump: tuple[Path, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _, _ = dump
    monkeypatch.chdir(path.parent)
    (path.parent / "dev").mkdir()
    (path.parent / "dev" / "kfd").touch()
    for name in (*PATTERNS, ""):
        environment = {name: f"{path.parent}/gpucore.%p"} if name else {}
        with gpu_dumps(environment, root=path.parent) as dumps:
            assert dumps.stops("") == ((), ())  # it is older
            os.utime(path)
            [stop], gaps = dumps.stops("")
            assert (stop.source, gaps) == ("ROCm core dump", ())
            os.utime(path, (0, 0))


def test_an_access_is_told_at_the_page_alone_that_the_runtime_named(
    dump: tuple[Path, int, int],
) -> None:
    path, _, positions = dump
    at = read_amd_dump(path).faulting
    assert at is not None
    assert at.block is not None
    page = positions + 4 * at.block[0] & ~0xFFF
    for named, is_told in ((page, True), (page + 0x1000, False), (page - 0x1000, False)):
        warp = read_amd_dump(path, page=named).faulting
        assert warp is not None
        assert (warp.access is not None, warp.is_error) == (is_told, is_told)
        assert (warp.kernel, warp.exception) == ("rope", "illegal address")


def test_a_light_dump_tells_the_kernel_and_no_access(dump: tuple[Path, int, int]) -> None:
    # Of memory it has code and saved waves alone, so that every access is one to what is missing.
    path, _, _ = dump
    data = bytearray(path.read_bytes())
    code = read_amd_dump(path).faulting
    assert code is not None
    num_headers = int.from_bytes(data[56:58], "little")
    for at in range(64, 64 + 56 * num_headers, 56):
        (kind,) = struct.unpack_from("<I", data, at)
        first, size = (struct.unpack_from("<Q", data, at + field)[0] for field in (16, 40))
        is_kept = first <= code.pc < first + size or first == 0x7F40_0000_0000
        if kind == 1 and not is_kept:
            data[at : at + 4] = bytes(4)
    light = path.with_name("gpucore.2")
    light.write_bytes(data)
    stop = read_amd_dump(light)
    warp = stop.faulting
    assert warp is not None
    assert (warp.kernel, warp.exception) == ("rope", "illegal address")
    assert (warp.access, warp.is_error, stop.grids) == (None, False, ())


def test_a_dump_that_is_cut_or_changed_is_one_line(dump: tuple[Path, int, int]) -> None:
    path, _, _ = dump
    whole = path.read_bytes()[: 1 << 20]
    bad = path.with_name("gpucore.1")
    note = whole.index(b"AMDGPU\0\0") + 8
    for data in (
        b"", whole[:100], whole[:300], b"\x7fELF" + bytes(200),
        whole[:note] + b"\x07" + whole[note + 1 :],
        whole[: note + 32] + b"\xff\xff\xff\xff" + whole[note + 36 :],
        whole[: note + 48 + 16 + 88] + b"\x4c\xad\x01\x00" + whole[note + 48 + 16 + 92 :],
    ):  # fmt: skip
        bad.write_bytes(data)
        with pytest.raises(BadCoreDump) as told:
            read_amd_dump(bad)
        assert "\n" not in str(told.value)


@pytest.mark.parametrize("name", ["rope.gfx942.co", "saxpy.bundle"])
def test_instructions_have_the_length_that_amds_tables_give(name: str) -> None:
    code = read_code_object((OBJECTS / name).read_bytes(), name, "gfx942")
    for kernel in code.kernels.values():
        image = code.memory_image(CODE_BASE)[kernel.entry : kernel.entry + kernel.code_bytes]
        for each in decode(bytes(image), "gfx942", kernel.entry):
            word = int.from_bytes(each.data[:4], "little")
            assert instruction_bytes(word) == each.num_bytes, each.name
