"""Lines of an instruction, against NVIDIA's own disassembler; and its machine code's fields."""

from __future__ import annotations

import os
import re
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import triton

from hypocenter.base.errors import BadCoreDump
from hypocenter.coredump.elf import SYMTAB, Elf, string_at
from hypocenter.coredump.lines import frames_at
from hypocenter.coredump.sass import WORD, known_bits, memory_instruction
from hypocenter.record.gpu_stop import GpuFrame

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
#: Two kernels of one file; the first calls `helper`, which was inlined, and its code is at line 4.
LINED = """
.version 8.7
.target sm_90a
.address_size 64
.visible .entry {name}(.param .u64 p)
{{
 .reg .b64 %a<4>; .reg .b32 %r<4>;
 .loc 1 {at}2 0
 ld.param.u64 %a0, [p];
 .loc 1 {at}3 5
 mov.u32 %r0, %tid.x;
 mul.wide.u32 %a1, %r0, 4;
 .loc 1 {at}4 5
 add.s64 %a2, %a0, %a1;
 .loc 1 4 9, function_name $L__name, inlined_at 1 {at}4 5
 ld.global.u32 %r1, [%a2+64];
 .loc 1 {at}5 5
 add.u32 %r2, %r1, 1;
 .loc 1 {at}6 5
 st.global.u32 [%a2], %r2;
 .loc 1 {at}7 1
 ret;
}}
"""
TABLES = """
.file 1 "/home/user/kernels.cu"
.section .debug_str
{
$L__name:
.b8 104,101,108,112,101,114,0
}
"""
ACCESSES = """
.version 8.0
.target {arch}
.address_size 64
.visible .entry k(.param .u64 p, .param .u64 q, .param .u32 n)
{{
 .reg .b64 %a<9>; .reg .b32 %r<20>; .reg .f32 %f<9>; .reg .pred %p<4>; .reg .b16 %h<4>;
 .shared .align 16 .b8 sm[1024];
 ld.param.u64 %a0,[p]; ld.param.u64 %a1,[q]; ld.param.u32 %r0,[n];
 mov.u32 %r1,%tid.x; mul.wide.u32 %a2,%r1,%r0; add.s64 %a3,%a0,%a2; add.s64 %a4,%a1,%a2;
 ld.global.v4.f32 {{%f0,%f1,%f2,%f3}},[%a3+16];
 ld.global.u8 %h0,[%a3+100];
 ld.global.f32 %f4,[%a4+-8];
 ld.f32 %f5,[%a3+4];
 st.f32 [%a4+8],%f5;
 atom.global.add.u32 %r2,[%a3],%r1;
 red.global.add.f32 [%a3+12],%f4;
 setp.gt.u32 %p0,%r2,%r0;
 @%p0 st.global.v2.f32 [%a4+32],{{%f0,%f5}};
 mov.u32 %r6,sm; add.u32 %r7,%r6,%r1;
 cp.async.cg.shared.global [%r7],[%a3],16;
 st.global.u8 [%a3+3],%h0; st.global.v4.f32 [%a3],{{%f0,%f1,%f2,%f3}};
 ret;
}}
"""
#: What `nvdisasm` writes of an access: predicate, opcode, address register and offset.
_SHOWN = re.compile(
    r"(@!?U?P\d )?((?:LD|ST|ATOM|RED)\w*)\S* .*?\[(R\d+)(?:\.64)?(?:\+(-?0x[0-9a-f]+))?\]"
)
_OPERATIONS = {"LD": "load", "ST": "store", "AT": "atomic", "RE": "atomic"}


def assemble(folder: Path, text: str, arch: str, *options: str) -> Path:
    (folder / "k.ptx").write_text(text)
    out = folder / "k.cubin"
    command = ["--gpu-name", arch, *options, "-o", str(out), str(folder / "k.ptx")]
    subprocess.run([str(TOOLS / "ptxas"), *command], check=True, capture_output=True, timeout=60)
    return out


def disassembled(cubin: Path, *options: str) -> str:
    command = [str(TOOLS / "nvdisasm"), *options, "-c", str(cubin)]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


@contextmanager
def opened(path: Path) -> Iterator[Elf]:
    file = os.open(path, os.O_RDONLY)
    try:
        yield Elf(file, 0, os.fstat(file).st_size, path.name)
    finally:
        os.close(file)


def shown_lines(cubin: Path) -> dict[tuple[str, int], list[tuple[str, int]]]:
    """By kernel and offset the lines that the disassembler shows, the innermost first."""
    shown: dict[tuple[str, int], list[tuple[str, int]]] = {}
    frames: list[tuple[str, int]] = []
    kernel, is_over = "", True
    for row in disassembled(cubin, "-gi").splitlines():
        if match := re.match(r"\.text\.(\w+):", row):
            kernel = match[1]
        elif match := re.search(r'//## File "([^"]+)", line (\d+)', row):
            frames = [] if is_over else frames
            frames.append((match[1], int(match[2])))
            is_over = False
        elif match := re.search(r"/\*([0-9a-f]{4})\*/", row):
            shown[kernel, int(match[1], 16)] = frames
            is_over = True
    return shown


def loaded(cubin: Path, symbol: str, address: int) -> None:
    """Has a kernel of a cubin stand at an address, as the driver does."""
    data = bytearray(cubin.read_bytes())
    with opened(cubin) as image:
        table = next(image.of_type(SYMTAB))
        names = image.data(image.section(table.link))
    for at in range(table.start, table.start + table.num_bytes, 24):
        if string_at(names, struct.unpack_from("<I", data, at)[0]) == symbol:
            struct.pack_into("<Q", data, at + 8, address)
    cubin.write_bytes(data)


def test_lines_of_inlined_code_are_those_of_the_disassembler(tmp_path: Path) -> None:
    second = LINED.format(name="second", at=2).partition(".address_size 64")[2]
    text = LINED.format(name="first", at=1) + second + TABLES
    cubin = assemble(tmp_path, text, "sm_90a", "-lineinfo")
    shown = shown_lines(cubin)
    assert {kernel for kernel, _ in shown} == {"first", "second"}
    places = {"first": 0x10000, "second": 0x20000}
    for name, address in places.items():
        loaded(cubin, name, address)
    with opened(cubin) as image:
        for (name, offset), told in shown.items():
            function = image.function_at(places[name] + offset)
            assert function is not None
            assert (function.symbol, function.first) == (name, places[name])
            found = frames_at(image, function, places[name] + offset)
            assert [(frame.file, frame.line) for frame in found] == told, (name, hex(offset))
            if len(told) == 2:
                assert found == (
                    GpuFrame("/home/user/kernels.cu", 4, "helper"),
                    GpuFrame("/home/user/kernels.cu", {"first": 14, "second": 24}[name], ""),
                )
        assert image.function_at(0x30000) is None
        assert image.function_at(0xFFFF) is None
    assert {name for (name, _), told in shown.items() if len(told) == 2} == {"first", "second"}


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_accesses_are_those_of_the_disassembler(tmp_path: Path, arch: str) -> None:
    cubin = assemble(tmp_path, ACCESSES.format(arch=arch), arch)
    text = disassembled(cubin, "-hex")
    rows = re.findall(
        r"/\*[0-9a-f]{4}\*/ +(.*?) *; +/\* 0x([0-9a-f]+) \*/\s+/\* 0x([0-9a-f]+)", text
    )
    assert len(rows) > 20
    kinds = set()
    for shown, low, high in rows:
        code = int(low, 16).to_bytes(8, "little") + int(high, 16).to_bytes(8, "little")
        found = memory_instruction(code)
        match = _SHOWN.search(shown)
        is_global = match is not None and match[2] not in ("LDS", "LDC", "STS", "LDGDEPBAR")
        assert (found is not None) is is_global, shown
        if match is None or found is None:
            continue
        assert found.operation == _OPERATIONS[match[2][:2]], shown
        if match[2] != "LDGSTS":  # the first of its addresses is that of shared memory
            assert f"R{found.register}" == match[3], shown
            assert found.offset == int(match[4] or "0", 16), shown
        assert (found.predicate != 7) is bool(match[1]), shown
        if found.operation != "atomic" and match[2] != "LDGSTS":
            bits = re.search(r"\.(U8|64|128)\b(?!\])", shown.partition("[")[0])
            width = {"U8": 1, "64": 8, "128": 16}[bits[1]] if bits else 4
            assert found.width_bytes == width, shown
        kinds.add(found.operation)
    assert kinds == {"load", "store", "atomic"}


def word(low: int, high: int) -> bytes:
    return low.to_bytes(8, "little") + high.to_bytes(8, "little")


LOAD_OVER_ITS_ADDRESS = word(0x0000000804057981, 0x000EA2000C1E1900)  # LDG.E R5, [R4.64]
LOAD_ELSEWHERE = word(0x0000000804087981, 0x000EA8000C1E1900)  # LDG.E R8, [R4.64]
LOAD_OF_FOUR = word(0x0000000808027981, 0x000EA2000C1E1D00)  # LDG.E.128 R2, [R8.64]
WIDE_ADD = word(0x0000000402047825, 0x000FCC00078E0004)  # IMAD.WIDE R4, R2, ...
STORE = word(0x0000000502007986, 0x004FE2000C101908)  # STG.E [R2.64], R5
UNIFORM = word(0x0000000705047899, 0x000FE4000800063F)  # USHF.L.U32 UR4


@pytest.mark.parametrize(
    ("code", "known"),
    [
        (LOAD_ELSEWHERE, WORD << 32 | WORD),
        (LOAD_ELSEWHERE + STORE + UNIFORM, WORD << 32 | WORD),
        (LOAD_OVER_ITS_ADDRESS, WORD),
        (LOAD_ELSEWHERE + LOAD_OVER_ITS_ADDRESS, WORD),
        (LOAD_ELSEWHERE + WIDE_ADD, 0),
        (LOAD_ELSEWHERE + LOAD_OF_FOUR, 0),
    ],
    ids=["kept", "store", "upper half", "upper half later", "both", "four registers"],
)
def test_what_lanes_overwrite_behind_the_fault_is_not_taken_for_the_address(
    code: bytes, known: int
) -> None:
    instruction = memory_instruction(code)
    assert instruction is not None
    assert known_bits(instruction, code) == known


def test_a_lane_that_the_predicate_leaves_out_asks_for_nothing() -> None:
    guarded = memory_instruction(word(0x0000000504000986, 0x000FE8000C101908))  # @P0 STG.E
    assert guarded is not None
    assert guarded.runs((1,))
    assert not guarded.runs((0,))
    assert guarded.runs(())
    assert guarded.address((0,) * 6, WORD) == 0
    assert guarded.address((0,) * 4, WORD) == 0


def test_a_line_table_that_makes_no_sense_is_refused(tmp_path: Path) -> None:
    cubin = assemble(tmp_path, LINED.format(name="first", at=1) + TABLES, "sm_90a", "-lineinfo")
    data = cubin.read_bytes()
    with opened(cubin) as image:
        section = image.section_of_name(".debug_line")
        assert section is not None
        start, num_bytes = section.start, section.num_bytes
    spoilt = tmp_path / "spoilt.cubin"
    refused = 0
    for at in range(start, start + num_bytes):
        spoilt.write_bytes(data[:at] + b"\xff" + data[at + 1 :])
        with opened(spoilt) as image:
            function = image.function_at(0)
            assert function is not None
            try:
                frames_at(image, function, 16)
            except BadCoreDump:
                refused += 1
    assert refused > 4
