"""AMD code objects read: what clang and Triton wrote, and files that make no sense."""

from __future__ import annotations

import dataclasses
import struct
from pathlib import Path

import pytest
from machine.amd_wave import section_of
from repository import ROOT
from specimens import gpu_specimens as specimens

from hypocenter.base.errors import BadCodeObject, HypoError
from hypocenter.device.amd.bundle import code_of_bundle
from hypocenter.device.amd.code_object import CodeObject, _source_names, read_code_object
from hypocenter.device.amd.descriptor import read_descriptor
from hypocenter.device.amd.executor import MachineProgram
from hypocenter.device.amd.targets import AmdTarget, target_of_flags
from hypocenter.device.limits import named_gpu
from hypocenter.device.offline.compile import compile_source, triton_source

BUNDLE = (ROOT / "tests" / "fixtures" / "amd" / "saxpy.bundle").read_bytes()
GOOD = code_of_bundle(BUNDLE, "saxpy.bundle", "gfx942")
E_FLAGS, ABI, OS_ABI = 48, 8, 7


def _changed(at: int, data: bytes) -> bytes:
    return GOOD[:at] + data + GOOD[at + len(data) :]


# What llvm-readelf 19 says of the same files.
@pytest.mark.parametrize(("arch", "wavefront", "entry", "code_bytes"), [
    ("gfx942", 64, 0x1B00, 124), ("gfx1100", 32, 0x1B00, 156),
])  # fmt: skip
def test_what_clang_wrote_is_read(arch: str, wavefront: int, entry: int, code_bytes: int) -> None:
    held = read_code_object(BUNDLE, "saxpy.bundle", arch)
    assert (held.target.arch, held.version, list(held.kernels)) == (arch, 5, ["saxpy", "count"])
    kernel = held.kernel("saxpy")
    assert (kernel.entry, kernel.code_bytes) == (entry, code_bytes)
    assert kernel.descriptor.wavefront == wavefront
    assert kernel.descriptor.user_sgprs == ("kernarg_segment_ptr",)
    assert [(part.kind, part.offset, part.num_bytes) for part in kernel.shown] == [
        ("global_buffer", 0, 8), ("global_buffer", 8, 8), ("by_value", 16, 4), ("by_value", 20, 4),
    ]  # fmt: skip
    assert kernel.arguments[4].kind == "hidden_block_count_x"
    assert kernel.entry in held.text()[0]


@pytest.mark.parametrize(("flushed", "mode"), [(0x30, "0xc0"), (0xC0, "0x30"), (0xF0, "0x0")])
def test_code_that_flushes_denormals_is_refused_with_its_mode(flushed: int, mode: str) -> None:
    held = read_code_object(BUNDLE, "saxpy.bundle", "gfx942")
    kernel = held.kernel("saxpy")
    rsrc1 = kernel.descriptor.rsrc1 & ~(flushed << 12)
    changed = dataclasses.replace(kernel.descriptor, rsrc1=rsrc1)
    with pytest.raises(HypoError, match=f"saxpy: float mode {mode} is not executed .*denormals$"):
        MachineProgram(held, dataclasses.replace(kernel, descriptor=changed))


@pytest.mark.parametrize("clamps", [0, 1])
@pytest.mark.parametrize("arch", ["gfx942", "gfx950", "gfx1100", "gfx1201"])
def test_the_assembler_has_the_bit_of_overflow_where_it_is_read(arch: str, clamps: int) -> None:
    lines = [
        ".amdhsa_kernel k", ".amdhsa_next_free_vgpr 1", ".amdhsa_next_free_sgpr 1",
        f".amdhsa_fp16_overflow {clamps}",
        ".amdhsa_accum_offset 4" if arch.startswith("gfx9") else "", ".end_amdhsa_kernel",
    ]  # fmt: skip
    text = "\n".join([".text", "k:", "s_endpgm", ".rodata", *lines])
    target = read_code_object(BUNDLE, "saxpy.bundle", "gfx942").target
    data = section_of(text, arch, ".rodata")
    assert read_descriptor(data, target).clamps_overflow == bool(clamps)


def test_the_line_of_an_instruction_is_that_of_the_source() -> None:
    held = CodeObject(GOOD, "saxpy.co")
    source = (ROOT / "tests" / "fixtures" / "amd" / "saxpy.hip").read_text().splitlines()
    kernel = held.kernel("saxpy")
    lines = {held.frame_at(pc) for pc in range(kernel.entry, kernel.entry + kernel.code_bytes, 4)}
    texts = {source[frame.line - 1].strip() for frame in lines if frame is not None}
    assert {"y[i] = a * x[i] + y[i];", "if (i < n)"} <= texts
    assert {frame.file for frame in lines if frame is not None} == {"./saxpy.hip"}
    assert held.frame_at(held.text()[0].stop + 4096) is None


def test_a_pointer_between_variables_is_filled_in_when_the_object_is_loaded() -> None:
    held = CodeObject(GOOD, "saxpy.co")
    where, counter = held.symbol_address("where"), held.symbol_address("counter")
    assert where is not None
    assert counter is not None
    memory = held.memory_image(1 << 40)
    assert struct.unpack_from("<Q", memory, where) == ((1 << 40) + counter,)
    assert struct.unpack_from("<i", memory, counter) == (3,)


@pytest.mark.parametrize("arch", ["gfx942", "gfx950", "gfx1100", "gfx1201"])
def test_what_triton_wrote_is_read(arch: str) -> None:
    limits = named_gpu(arch)
    specimen = specimens.copy()
    made = compile_source(triton_source(specimen, limits), limits, specimen.options)
    held = read_code_object(made.asm["hsaco"], "copy.hsaco", arch)
    kernel = held.kernel()
    assert (kernel.name, kernel.descriptor.wavefront) == (specimen.name, limits.wavefront)
    # The arguments lie in the kernarg, and on CDNA in registers as well: how LLVM prints it.
    text = " ".join(made.asm["amdgcn"].split())
    assert f".amdhsa_kernarg_size {kernel.descriptor.kernarg_bytes}" in text
    assert f".amdhsa_user_sgpr_count {kernel.descriptor.num_user_sgprs}" in text
    preloaded = kernel.descriptor.preload_words
    if limits.arch.startswith("gfx9"):
        assert preloaded > 0
        assert f".amdhsa_user_sgpr_kernarg_preload_length {preloaded}" in text
        assert f".amdhsa_accum_offset {kernel.descriptor.accum_offset}" in text
    else:
        assert not preloaded
    frame = held.frame_at(kernel.entry + kernel.code_bytes - 8)
    assert frame is not None
    # Triton keeps what it compiled by the text of the kernel, wherever that lay.
    assert Path(frame.file).name == Path(specimens.__file__).name


def test_the_fields_of_a_descriptor_stand_where_the_manual_puts_them() -> None:
    words = [0] * 16
    words[0], words[1], words[2] = 1024, 96, 48
    words[4] = 0x1540
    words[11] = 5  # accumulators from register 24
    words[12] = 3 | 0xF0 << 12 | 1 << 21 | 1 << 23
    words[13] = 1 | 9 << 1 | 1 << 7 | 1 << 9 | 2 << 11
    words[14] = 1 << 3 | 1 << 6 | 1 << 11 | (6 | 2 << 7) << 16
    found = read_descriptor(struct.pack("<16I", *words), AmdTarget("gfx942"))
    assert (found.group_bytes, found.private_bytes, found.kernarg_bytes) == (1024, 96, 48)
    assert (found.entry, found.num_vgprs, found.accum_offset) == (0x1540, 32, 24)
    assert (found.float_mode, found.has_dx10_clamp, found.has_ieee) == (0xF0, True, True)
    assert (found.num_user_sgprs, found.has_scratch) == (9, True)
    assert (found.workgroup_ids, found.workitem_ids) == ((True, False, True), 3)
    assert found.user_sgprs == ("kernarg_segment_ptr", "private_segment_size")
    assert (found.preload_words, found.preload_first) == (6, 2)
    assert (found.uses_dynamic_stack, found.wavefront) == (True, 64)
    words[14] |= 1 << 10
    narrow = read_descriptor(struct.pack("<16I", *words), AmdTarget("gfx1100"))
    assert (narrow.wavefront, narrow.num_vgprs) == (32, 32)
    words[14] &= ~(1 << 10)
    wide = read_descriptor(struct.pack("<16I", *words), AmdTarget("gfx1100"))
    assert (wide.wavefront, wide.num_vgprs) == (64, 16)


def test_features_are_part_of_a_target() -> None:
    assert str(target_of_flags(0x54C)) == "gfx942"
    assert str(target_of_flags(0xE4C)) == "gfx942:sramecc+:xnack-"
    assert target_of_flags(0xFE) is None


_NOTE_AT = GOOD.index(b"AMDGPU\0") + 8


@pytest.mark.parametrize(("data", "reason"), [
    (b"", "is cut off or damaged: it refers to bytes 0 to 64 of 0"),
    (b"\x7fELF" + bytes(60), "is no ELF file of 64 bits, little-endian"),
    (GOOD[:-40], "is cut off or damaged"),
    (GOOD[:2000], "is cut off or damaged"),
    (_changed(18, b"\x3e\0"), "is an ELF file, but no code for an AMD GPU"),
    (_changed(OS_ABI, b"\0"), "is an ELF file, but no code for an AMD GPU"),
    (_changed(E_FLAGS, b"\xfe\x05"), "is for a target not known here (e_flags 0x5fe)"),
    (_changed(ABI, b"\x02"), "is a code object V4; V5 and V6 are read: compile it anew"),
    (_changed(ABI, b"\x63"), "is a code object of ABI 99; V5 and V6 are read"),
    (_changed(_NOTE_AT - 16, b"\xff\xff\xff\x7f"), "has a note of 2147483647 bytes"),
    (GOOD.replace(b"AMDGPU\0", b"AMDGPV\0"), "has no metadata note"),
    (_changed(_NOTE_AT, b"\xc1"), "has metadata that is no msgpack"),
    (GOOD.replace(b".kernarg_segment_size", b".kernarg_segment_sizf"),
     "missing required field `.kernarg_segment_size`"),
    (GOOD.replace(b"saxpy.kd\0", b"saxpy.ke\0"), "has no descriptor saxpy.kd of 64 bytes"),
])  # fmt: skip
def test_an_object_that_makes_no_sense_is_refused_by_one_line(data: bytes, reason: str) -> None:
    with pytest.raises(BadCodeObject) as found:
        CodeObject(data, "x.co")
    assert reason in str(found.value)
    assert str(found.value).startswith("x.co ")
    assert "\n" not in str(found.value)


def test_each_byte_of_an_object_may_be_wrong() -> None:
    """A changed byte is read as something or refused: no other error, and no endless reading."""
    refused = 0
    for at in range(0, len(GOOD), 7):
        try:
            held = CodeObject(_changed(at, bytes([GOOD[at] ^ 0xFF])), "x.co")
            held.memory_image(4096)
            held.frame_at(0x1B00)
        except BadCodeObject:
            refused += 1
    assert refused > 20


@pytest.mark.parametrize(("data", "arch", "reason"), [
    (BUNDLE, None, "is a bundle of code for gfx1100, gfx942; say which with --on"),
    (BUNDLE, "gfx1201", "gfx1100, gfx942; gfx1201 is not among them"),
    (BUNDLE[:60], "gfx942", "is a bundle that is cut off"),
    (BUNDLE[:9000], "gfx942", "is a bundle that is cut off or damaged"),
    (BUNDLE[:24] + b"\xff" * 8 + BUNDLE[32:], "gfx942", "entries, limit 256"),
    (b"CCOB" + bytes(40), "gfx942", "compile with --no-offload-compress"),
    (GOOD, "gfx1100", "was made for gfx942, not for gfx1100"),
])  # fmt: skip
def test_what_a_file_has_no_code_for_is_said(data: bytes, arch: str | None, reason: str) -> None:
    with pytest.raises(BadCodeObject) as found:
        read_code_object(data, "x.co", arch)
    assert reason in str(found.value)


def test_a_kernel_that_is_not_there_is_told_with_those_that_are() -> None:
    held = CodeObject(GOOD, "saxpy.co")
    with pytest.raises(BadCodeObject, match="has no kernel sexpy; it holds saxpy, count"):
        held.kernel("sexpy")
    with pytest.raises(BadCodeObject, match="says no kernel to launch; it holds saxpy, count"):
        held.kernel()


@pytest.mark.parametrize(("symbol", "names"), [
    ("_Z3addPfi", ("add", "add")),
    ("_ZL3addPf", ("add", "add")),
    ("_Z3addIfEvPT_", ("add", "add")),
    ("_ZN4math3addEPf", ("add", "math::add")),
    ("_ZN12_GLOBAL__N_13addEPf", ("add", "_GLOBAL__N_1::add")),
    ("add", ()),
    ("_Z", ()),
])  # fmt: skip
def test_a_symbol_of_cpp_has_the_name_of_its_source(symbol: str, names: tuple[str, ...]) -> None:
    assert _source_names(symbol) == names


def test_a_kernel_is_found_by_its_name_in_cpp_where_one_kernel_has_it() -> None:
    held = CodeObject(GOOD, "saxpy.co")
    saxpy = dataclasses.replace(held.kernel("saxpy"), name="_Z5saxpyPfS_fi")
    held.kernels = {saxpy.name: saxpy}
    assert held.kernel("saxpy") is saxpy
    held.kernels["_Z5saxpyPdS_di"] = dataclasses.replace(saxpy, name="_Z5saxpyPdS_di")
    with pytest.raises(BadCodeObject, match="it holds _Z5saxpyPfS_fi, _Z5saxpyPdS_di"):
        held.kernel("saxpy")
