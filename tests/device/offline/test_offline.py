"""Kernels compiled for GPUs that are not there: figures against the vendors' own compilers."""

from __future__ import annotations

import importlib
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from repository import ROOT
from specimens import gpu_specimens as specimens

from hypocenter.base.errors import HypoError, UsageError
from hypocenter.device.amd.bundle import code_of_bundle
from hypocenter.device.limits import TABLE
from hypocenter.device.offline.code_object import CodeFacts, read_cubin, read_hsaco
from hypocenter.device.offline.compile import (
    compile_for,
    compile_source,
    compile_specimen,
    specimen_of_launch,
    triton_source,
)
from hypocenter.device.offline.occupancy import occupancy
from hypocenter.device.offline.specimen import Specimen, told_apart
from hypocenter.device.triton_lang import triton
from hypocenter.model.offline.specimens import vendor_specimens

AMD = [arch for arch, gpu in TABLE.items() if gpu.vendor == "amd"]
NVIDIA = [arch for arch, gpu in TABLE.items() if gpu.vendor == "nvidia"]


def _compiled(specimen: Specimen, arch: str) -> Any:
    limits = TABLE[arch]
    return compile_source(triton_source(specimen, limits), limits, specimen.options)


# From few registers to all, into the accumulators, into spills; and many scalar registers.
REGISTER_HOLDERS = {
    "copy": specimens.copy(),
    "product": specimens.product(128, 128, 32, num_warps=8),
    "hoard 4096": specimens.hoard(4096),
    "hoard 8192": specimens.hoard(8192),
    "hoard 16384": specimens.hoard(16384),
    "pointers": specimens.pointers(),
}


@pytest.mark.parametrize("arch", AMD)
@pytest.mark.parametrize("name", REGISTER_HOLDERS)
@pytest.mark.tier(
    "targets", fast=lambda case: case.arch in ("gfx942", "gfx1100") and case.name != "hoard 16384"
)
def test_waves_by_registers_are_what_llvm_says(name: str, arch: str) -> None:
    specimen = REGISTER_HOLDERS[name]
    compiled = _compiled(specimen, arch)
    assembly = compiled.asm["amdgcn"]
    facts = read_hsaco(compiled.asm["hsaco"], assembly)
    found = occupancy(
        TABLE[arch],
        num_warps=compiled.metadata.num_warps,
        registers=facts.registers,
        scalar_registers=facts.scalar_registers or 0,
        shared_bytes=0,
    )
    assert found.waves_by_registers == _llvm(assembly, "Occupancy")
    assert facts.registers == _llvm(assembly, "TotalNumVgprs", "NumVgprs")
    assert facts.scalar_registers == _llvm(assembly, "TotalNumSgprs")
    assert facts.scratch_bytes == _llvm(assembly, "ScratchSize")
    spills = re.findall(r"^ +\.[sv]gpr_spill_count: (?: *)(\d+)", assembly, re.M)
    assert len(spills) == 2
    assert facts.spills == sum(map(int, spills))
    assert facts.num_instructions > 10


def _llvm(assembly: str, *names: str) -> int:
    """What LLVM's comment behind a kernel says under the first of `names` that it has."""
    for name in names:
        if found := re.search(rf"^; {name}: (\d+)", assembly, re.M):
            return int(found[1])
    raise AssertionError(f"LLVM says nothing of {names}")


def test_the_registers_of_the_specimens_cover_the_range() -> None:
    counts = {
        read_hsaco(one.asm["hsaco"], one.asm["amdgcn"]).registers
        for one in (_compiled(specimen, "gfx942") for specimen in REGISTER_HOLDERS.values())
    }
    assert min(counts) < 16
    assert max(counts) > 256
    spilled = compile_specimen(specimens.hoard(16384), "gfx1100")
    assert (spilled.spills or 0) > 100
    facts = _compiled(specimens.pointers(), "gfx942").asm
    assert (read_hsaco(facts["hsaco"], facts["amdgcn"]).scalar_registers or 0) > 96


@pytest.mark.parametrize("arch", NVIDIA)
@pytest.mark.parametrize("name", ["copy", "product", "hoard 8192"])
@pytest.mark.tier("targets", fast=lambda case: case.arch == "sm_90")
def test_registers_and_spills_are_what_ptxas_says(name: str, arch: str, tmp_path: Path) -> None:
    record = compile_specimen(REGISTER_HOLDERS[name], arch)
    compiled = _compiled(REGISTER_HOLDERS[name], arch)
    ptx = tmp_path / "kernel.ptx"
    ptx.write_text(compiled.asm["ptx"])
    target = re.search(r"^\.target (\w+)", compiled.asm["ptx"], re.M)
    assert target is not None
    nvidia = importlib.import_module(triton.backends.backends["nvidia"].compiler.__module__)
    said = subprocess.run(
        [nvidia.get_ptxas(int(arch[3:])).path, "-v", "--regAllocOptLevel=2",
         f"--gpu-name={target[1]}", str(ptx), "-o", str(tmp_path / "out")],
        capture_output=True, text=True, check=True,
    ).stderr  # fmt: skip
    stack = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores", said)
    registers = re.search(r"Used (\d+) registers", said)
    assert stack is not None
    assert registers is not None
    assert (record.registers, record.scratch_bytes) == (int(registers[1]), int(stack[1]))
    assert record.spills == int(stack[1]) // 4
    assert bool(record.spills) == (int(stack[2]) > 0) == (name == "hoard 8192")


# (bits of one element, parameter type) of a copy in which a thread moves eight elements at once.
@pytest.mark.parametrize("arch", ["gfx942", "gfx1201", "sm_80", "sm_100"])
@pytest.mark.parametrize(("dtype", "bits"), [("i8", 8), ("fp16", 16), ("fp32", 32), ("i64", 64)])
@pytest.mark.tier("targets", fast=lambda case: case.arch in ("gfx942", "sm_80"))
def test_widths_are_those_of_the_copy(dtype: str, bits: int, arch: str) -> None:
    num_threads = 4 * TABLE[arch].wavefront
    bits_per_thread = 1024 * bits // num_threads
    record = compile_specimen(specimens.copy(dtype), arch)
    wide = {min(bits_per_thread, 128): max(bits_per_thread // 128, 1)}
    assert (record.loads, record.stores) == (wide, wide)
    # With nothing known of the pointers there are only loads of single elements.
    blind = Specimen(
        specimens.copy_kernel, {"x_ptr": f"*{dtype}", "y_ptr": f"*{dtype}", "count": "i32"},
        {"BLOCK": 1024},
    )  # fmt: skip
    assert list(compile_specimen(blind, arch).loads) == [bits]


@pytest.mark.parametrize(("instructions", "loads", "stores"), [
    ("global_load_dwordx4 buffer_load_dwordx2 global_load_dword", {128: 1, 64: 1, 32: 1}, {}),
    ("global_load_dwordx3 global_load_b96 global_load_ubyte_d16_hi", {96: 2, 8: 1}, {}),
    ("buffer_load_ushort global_load_sshort buffer_load_short_d16_hi", {16: 3}, {}),
    ("global_load_lds_dwordx4 buffer_load_sbyte flat_load_dword", {128: 1, 32: 1, 8: 1}, {}),
    ("global_load_d16_hi_b16 global_load_d16_u8 global_load_u16 global_load_i8", {16: 2, 8: 2}, {}),
    ("global_load_tr_b128 global_store_d16_hi_b8 buffer_store_b64", {128: 1}, {64: 1, 8: 1}),
    ("global_store_short_d16_hi global_store_byte global_store_dwordx2", {}, {64: 1, 16: 1, 8: 1}),
    ("s_load_dwordx4 ds_load_b128 scratch_load_b32 ds_read_b64 global_atomic_add", {}, {}),
])  # fmt: skip
def test_amd_instructions_have_their_width(
    instructions: str, loads: dict[int, int], stores: dict[int, int]
) -> None:
    hsaco = _compiled(specimens.copy(), "gfx942").asm["hsaco"]
    assembly = "".join(f"\t{name} v0, v1\n" for name in instructions.split())
    facts = read_hsaco(hsaco, f"kernel:\n{assembly}\t.end_amdhsa_kernel\n; v_mov in a comment\n")
    assert (facts.loads, facts.stores) == (loads, stores)
    assert facts.num_instructions == len(instructions.split())


def test_an_unknown_width_is_an_error() -> None:
    hsaco = _compiled(specimens.copy(), "gfx942").asm["hsaco"]
    with pytest.raises(HypoError, match="width of memory access 'octoword' is not known"):
        read_hsaco(hsaco, "\tglobal_load_octoword v0, v1\n")


def _tools(tmp_path: Path, usage: str, listing: str) -> CodeFacts:
    paths = []
    for name, text in (("cuobjdump", usage), ("nvdisasm", listing)):
        (tmp_path / f"{name}.txt").write_text(text)
        tool = tmp_path / name
        tool.write_text(f"#!/bin/sh\ncat {tmp_path / name}.txt\n")
        tool.chmod(0o755)
        paths.append(str(tool))
    return read_cubin(b"", *paths)


USAGE = " Function k:\n  REG:40 STACK:16 SHARED:1024 LOCAL:0 CONSTANT[0]:560\n"


def test_nvidia_instructions_have_their_width(tmp_path: Path) -> None:
    names = [
        "LDG.E.128", "@P0 LDG.E.U16", "@!UP3 LDG.E.S8.CONSTANT", "LDG.E", "LDG.E.LTC128B.64",
        "LDGSTS.E.BYPASS.LTC128B.128", "LDG.E.ENL2.256", "LDS.128", "LDGDEPBAR", "LDL.64",
        "STG.E.64", "@P1 STG.E.U8", "ST.E", "STS.128", "LDC.64", "IMAD.MOV.U32",
    ]  # fmt: skip
    lines = [
        f"        /*{index * 16:04x}*/   {name} R2, [R4] ;" for index, name in enumerate(names)
    ]
    facts = _tools(tmp_path, USAGE, "\n".join(["\t.section .text", *lines]))
    assert facts.loads == {256: 1, 128: 2, 64: 1, 32: 1, 16: 1, 8: 1}
    assert facts.stores == {64: 1, 32: 1, 8: 1}
    assert (facts.registers, facts.spills, facts.scratch_bytes) == (40, 4, 16)
    assert facts.num_instructions == len(names)


@pytest.mark.parametrize(("usage", "listing", "message"), [
    ("", "/*0000*/ LDG.E ;", "0 kernels in a cubin"),
    (USAGE * 2, "/*0000*/ LDG.E ;", "2 kernels in a cubin"),
    (USAGE, "nothing", "no instruction"),
])  # fmt: skip
def test_tools_that_say_something_else_are_not_believed(
    tmp_path: Path, usage: str, listing: str, message: str
) -> None:
    with pytest.raises(HypoError, match=message):
        _tools(tmp_path, usage, listing)


def test_a_tool_that_fails_is_named() -> None:
    with pytest.raises(HypoError, match="false failed with exit code 1"):
        read_cubin(b"", "false", "false")


def test_an_object_of_several_kernels_is_not_one_launch() -> None:
    bundle = (ROOT / "tests" / "fixtures" / "amd" / "saxpy.bundle").read_bytes()
    with pytest.raises(HypoError, match="2 kernels, but one was compiled"):
        read_hsaco(code_of_bundle(bundle, "saxpy.bundle", "gfx942"), "")


# Counted by hand: registers per lane and SIMD, waves per block, LDS.
@pytest.mark.parametrize(("arch", "num_warps", "registers", "scalars", "shared", "waves", "by"), [
    ("gfx942", 4, 64, 0, 0, 8.0, ""),
    ("gfx942", 4, 65, 0, 0, 7.0, "registers"),  # 72 of 512
    ("gfx942", 4, 512, 0, 0, 1.0, "registers"),
    ("gfx942", 8, 128, 0, 0, 4.0, "registers"),
    ("gfx942", 4, 32, 97, 0, 6.0, "scalar registers"),  # 112 + 16 of 800
    ("gfx942", 4, 32, 0, 16384, 4.0, "shared memory"),
    ("gfx942", 4, 32, 0, 16385, 3.0, "shared memory"),
    # Sizes that would fit once more without the step: 512, 1280, 1024 and 128 bytes.
    ("gfx942", 4, 32, 0, 21760, 2.0, "shared memory"),
    ("gfx950", 4, 32, 0, 32700, 4.0, "shared memory"),
    ("gfx1100", 4, 32, 0, 13107, 9.0, "shared memory"),
    ("sm_90", 4, 32, 0, 22300, 9.0, "shared memory"),
    ("gfx942", 2, 32, 0, 0, 8.0, ""),
    ("gfx942", 16, 32, 0, 0, 8.0, ""),
    ("gfx950", 4, 32, 0, 81921, 1.0, "shared memory"),
    ("gfx1100", 4, 96, 0, 0, 16.0, ""),
    ("gfx1100", 4, 97, 0, 0, 12.0, "registers"),  # 120 of 1536
    ("gfx1100", 4, 256, 0, 0, 5.0, "registers"),  # 264
    ("gfx1100", 4, 32, 0, 65536, 2.0, "shared memory"),
    ("gfx1100", 1, 32, 0, 0, 16.0, ""),
    ("sm_90", 4, 32, 0, 0, 16.0, ""),
    ("sm_90", 4, 33, 0, 0, 12.0, "registers"),  # 40 of 512
    ("sm_90", 4, 255, 0, 0, 2.0, "registers"),
    ("sm_90", 1, 32, 0, 0, 8.0, "blocks"),  # 32 blocks of one warp
    ("sm_90", 8, 32, 0, 227 * 1024, 2.0, "shared memory"),
    ("sm_90", 4, 32, 0, 56 * 1024, 4.0, "shared memory"),  # 1 KiB of each block is the system's
    ("sm_90", 4, 32, 0, 56 * 1024 + 1, 3.0, "shared memory"),
    ("sm_89", 4, 40, 0, 0, 12.0, ""),
    ("sm_120", 4, 41, 0, 0, 10.0, "registers"),
    ("sm_89", 1, 32, 0, 0, 6.0, "blocks"),
    ("sm_80", 24, 32, 0, 0, 12.0, "registers"),  # 16 waves, but blocks of 24 warps
])  # fmt: skip
def test_occupancy_by_hand(
    arch: str, num_warps: int, registers: int, scalars: int, shared: int, waves: float, by: str
) -> None:
    found = occupancy(
        TABLE[arch], num_warps=num_warps, registers=registers, scalar_registers=scalars,
        shared_bytes=shared,
    )  # fmt: skip
    assert (found.waves_per_simd, found.limited_by) == (waves, by)
    assert found.share == waves / TABLE[arch].max_waves_per_simd
    assert found.num_blocks * num_warps == waves * 4


def test_a_block_that_does_not_fit_has_no_occupancy() -> None:
    found = occupancy(
        TABLE["gfx942"], num_warps=4, registers=32, scalar_registers=0, shared_bytes=65537
    )
    assert (found.num_blocks, found.share) == (0, 0.0)


# 128 x 64 and 64 x 256 halves, four stages: what is asked for differs by architecture.
@pytest.mark.parametrize(("arch", "ok"), [("gfx942", False), ("sm_89", False), ("sm_90", True)])
def test_too_much_shared_memory_is_flagged(arch: str, ok: bool) -> None:
    record = compile_specimen(specimens.product(128, 256, 64, num_stages=4, num_warps=8), arch)
    limit = TABLE[arch].shared_limit_bytes
    assert record.shared_bytes is not None
    assert (record.ok, record.shared_limit) == (ok, limit)
    assert (record.shared_bytes <= limit) == ok
    assert tuple(map(str, record.problems)) == (() if ok else (
        f"a block needs {record.shared_bytes} bytes of shared memory, but {arch} has {limit}; "
        "use smaller tiles or fewer stages",
    ))  # fmt: skip


def test_too_many_threads_are_flagged() -> None:
    specimen = specimens.copy(num_warps=32)
    wide, narrow = (compile_specimen(specimen, arch) for arch in ("gfx942", "gfx1100"))
    too_many = "a block has 2048 threads, but gfx942 takes 1024; use fewer warps"
    assert tuple(map(str, wide.problems)) == (too_many,)
    assert (wide.ok, wide.threads) == (False, 2048)
    assert (narrow.ok, narrow.threads) == (True, 1024)


def test_a_kernel_that_does_not_compile_is_a_record() -> None:
    record = compile_specimen(specimens.refused(), "gfx1100")
    assert tuple(map(str, record.problems)) == (
        "does not compile: CompileTimeAssertionFailure: BLOCK is not below 0",
    )
    assert (record.ok, record.registers, record.occupancy) == (False, None, None)
    assert (record.kernel, record.arch, record.threads) == ("refused_kernel", "gfx1100", 128)


def test_a_record_of_a_good_kernel_is_complete() -> None:
    good = specimens.product()
    record = compile_for(
        good.kernel, good.signature, good.constants, "mi300x",
        divisible=good.divisible, options=good.options,
    )  # fmt: skip
    assert (record.kernel, record.arch, record.ok) == ("product_kernel", "gfx942", True)
    assert (record.threads, record.spills, record.guarded) == (256, 0, False)
    assert record.scalar_registers
    assert record.accumulators is not None
    assert record.num_instructions
    assert record.shared_bytes
    assert record.waves_per_simd == (record.occupancy or 0) * 8
    again = msgspec.json.decode(msgspec.json.encode(record), type=type(record))
    assert again == record


def test_a_specimen_must_match_its_kernel() -> None:
    specimen = Specimen(specimens.copy_kernel, {"x_ptr": "*fp32"}, {"BLOCK": 16})
    with pytest.raises(UsageError, match="specimen of copy_kernel gives x_ptr, BLOCK, but the par"):
        compile_specimen(specimen, "sm_80")


def test_specimens_of_a_kernel_are_told_apart() -> None:
    one, wide, bytes_, again = (
        specimens.copy(), specimens.copy(block=64), specimens.copy("i8"), specimens.copy()
    )  # fmt: skip
    unaligned = replace(one, divisible=("x_ptr",))
    given = [one, specimens.product(), wide, bytes_, again, unaligned]
    labels = [specimen.label for specimen in told_apart(given)]
    types = "x_ptr=*fp32 y_ptr=*fp32 BLOCK=1024"
    assert labels == [
        f"{types} count%16=0", "",
        "x_ptr=*fp32 y_ptr=*fp32 BLOCK=64 count%16=0", "x_ptr=*i8 y_ptr=*i8 BLOCK=1024 count%16=0",
        f"{types} count%16=0 #2", types,
    ]  # fmt: skip
    assert [specimen.label for specimen in told_apart([one, specimens.product()])] == ["", ""]


def test_a_tensor_above_2_gib_has_no_buffer_instructions() -> None:
    # What Triton does at a launch by the tensor's size; both must compile.
    small = specimens.copy()
    assembly = _compiled(small, "gfx942").asm["amdgcn"]
    assert "buffer_load" in assembly
    large = Specimen(
        small.kernel, small.signature, small.constants, small.divisible, small.options,
        huge=("x_ptr", "y_ptr"),
    )  # fmt: skip
    assert "buffer_load" not in _compiled(large, "gfx942").asm["amdgcn"]


LAUNCHES: list[dict[str, Any]] = [
    {"n": 16, "one": 1, "wide": 1 << 31, "huge": 1 << 63, "eps": 1e-6, "flag": True, "sized": 32},
    {"n": 17, "one": 2, "wide": -1, "huge": 0, "eps": 0.0, "flag": False, "sized": 1, "K": 48},
    {"n": -16, "one": 0, "wide": -(1 << 40), "huge": 3, "eps": 2.0, "flag": True, "sized": 1 << 40},
]


@pytest.mark.parametrize("arch", ["gfx942", "sm_80"])
def test_the_guarded_variant_is_compiled(arch: str) -> None:
    plain = compile_specimen(specimens.copy(), arch)
    record = compile_specimen(specimens.copy(), arch, guarded=True)
    assert (record.ok, record.guarded, record.kernel) == (True, True, "copy_kernel")
    assert record.loads == plain.loads
    # The records of faults are 8-byte stores.
    assert (64 in record.stores, 64 in plain.stores) == (True, False)
    assert (record.num_instructions or 0) > 2 * (plain.num_instructions or 0)


def test_a_kernel_that_cannot_be_guarded_is_a_record() -> None:
    record = compile_specimen(specimens.pointers(), "gfx942", guarded=True)
    assert (record.ok, record.registers) == (False, None)
    problem = str(record.problems[0])
    assert problem.startswith("cannot be guarded: ")
    assert "gpu_specimens.py" in problem
    assert len(problem) <= 300


@pytest.mark.parametrize("numbers", LAUNCHES)
def test_a_launch_becomes_what_triton_would_compile(numbers: dict[str, Any]) -> None:
    import torch

    memory = torch.zeros(64, dtype=torch.bfloat16)
    # One aligned pointer and one that is not, in both orders.
    for x, y in ((memory, memory[1:]), (memory[3:].view(torch.int16), memory)):
        arguments = {"x_ptr": x, "y_ptr": y, "none": None, "FLAG": 7, **numbers}
        specimen = specimen_of_launch(specimens.many_types_kernel, arguments, {"num_warps": 2})
        jit = specimens.many_types_kernel
        bind = triton.runtime.jit.create_function_from_signature(
            jit.signature, jit.params, triton.backends.compiler.BaseBackend
        )
        bound, facts, _ = bind(**arguments)
        kinds = dict(zip(bound, facts, strict=True))
        assert specimen.signature == {
            name: kind for name, (kind, _) in kinds.items() if kind != "constexpr"
        }
        assert specimen.constants == {
            name: bound[name] for name, (kind, _) in kinds.items() if kind == "constexpr"
        }
        aligned = {n for n, (kind, fact) in kinds.items() if kind != "constexpr" and fact == "D"}
        assert set(specimen.divisible) == aligned
        assert (specimen.options, specimen.huge) == ({"num_warps": 2}, ())


def test_a_tensor_of_2_gib_is_told_apart() -> None:
    import torch

    arguments = {"count": 3, "BLOCK": 16, "y_ptr": torch.empty(1 << 31, dtype=torch.uint8)}
    small = torch.empty((1 << 31) - 1, dtype=torch.uint8)
    specimen = specimen_of_launch(specimens.copy_kernel, {"x_ptr": small, **arguments}, {})
    assert specimen.huge == ("y_ptr",)


def test_an_argument_without_a_type_of_its_own_is_refused() -> None:
    arguments = {"x_ptr": (1, 2), "y_ptr": None, **LAUNCHES[0], "none": None, "FLAG": 0}
    with pytest.raises(UsageError, match="many_types_kernel: x_ptr is a tuple, which is not comp"):
        specimen_of_launch(specimens.many_types_kernel, arguments, {})


def test_a_kernel_of_four_axes_compiles_guarded() -> None:
    few = next(
        specimen
        for specimen in vendor_specimens("nvidia")
        if specimen.name == "linear_codes_few_kernel"
        and (specimen.constants["HAS_BIAS"], specimen.constants["ROWS"]) == (True, 16)
        and specimen.constants["IS_FRAGMENTS"]
    )
    assert compile_specimen(few, "sm_90", guarded=True).problems == ()
