"""Waits that machine code lacks, on every way through it; code that has them is quiet."""

from __future__ import annotations

import pytest
from machine.amd_planted import without_each_wait
from machine.amd_wave import assembled, num_lanes_of
from repository import ROOT

from hypocenter.device.amd.code_object import read_code_object
from hypocenter.device.amd.evidence.waits import Lack, MissingWait, missing_waits
from hypocenter.device.amd.executor import prepare
from hypocenter.device.amd.lower import Lowering

#: Code with its wait, by target: the wait is what stands between braces. What is too early without
#: it: why, the instruction, the register, the counter.
LACKING = {
    "a load's register is used": (
        "gfx942",
        "global_load_dword v1, v0, s[2:3]\n{s_waitcnt vmcnt(0)}\nv_add_f32 v2, v1, v1",
        (Lack.READ, "V_ADD_F32", "v1", "vmcnt"),
    ),
    "the older of two loads": (
        "gfx942",
        "global_load_dwordx2 v[2:3], v0, s[2:3]\nglobal_load_dword v1, v0, s[2:3]\n"
        "{s_waitcnt vmcnt(1)}\nv_mov_b32 v4, v3\ns_waitcnt vmcnt(0)",
        (Lack.READ, "V_MOV_B32", "v3", "vmcnt"),
    ),
    "a scalar load": (
        "gfx950",
        "s_load_dwordx2 s[4:5], s[0:1], 0x0\n{s_waitcnt lgkmcnt(0)}\ns_add_u32 s6, s5, 1",
        (Lack.READ, "S_ADD_U32", "s5", "lgkmcnt"),
    ),
    "an address that a scalar load brings": (
        "gfx1201",
        "s_load_b64 s[4:5], s[0:1], 0x0\n{s_wait_kmcnt 0x0}\nglobal_load_b32 v1, v0, s[4:5]",
        (Lack.READ, "GLOBAL_LOAD_B32", "s4", "kmcnt"),
    ),
    "LDS": (
        "gfx1100",
        "ds_load_b32 v1, v0\n{s_waitcnt lgkmcnt(0)}\nv_mov_b32_e32 v2, v1",
        (Lack.READ, "V_MOV_B32", "v1", "lgkmcnt"),
    ),
    "the second half of a load from two places": (
        "gfx1201",
        "ds_load_2addr_b32 v[2:3], v0 offset1:4\n{s_wait_dscnt 0x0}\nv_mov_b32_e32 v4, v3",
        (Lack.READ, "V_MOV_B32", "v3", "dscnt"),
    ),
    "lanes by way of LDS": (
        "gfx942",
        "ds_bpermute_b32 v1, v0, v2\n{s_waitcnt lgkmcnt(0)}\nv_mov_b32 v2, v1",
        (Lack.READ, "V_MOV_B32", "v1", "lgkmcnt"),
    ),
    "memory on RDNA4": (
        "gfx1201",
        "global_load_b32 v1, v0, s[4:5]\n{s_wait_loadcnt 0x0}\nv_mov_b32_e32 v2, v1",
        (Lack.READ, "V_MOV_B32", "v1", "loadcnt"),
    ),
    "both counters in one wait": (
        "gfx1201",
        "global_load_b32 v1, v0, s[4:5]\nds_load_b32 v3, v0\n{s_wait_loadcnt_dscnt 0x0}\n"
        "v_mov_b32_e32 v2, v3\ns_wait_loadcnt 0x0",
        (Lack.READ, "V_MOV_B32", "v3", "dscnt"),
    ),
    "the old value of an atomic": (
        "gfx1100",
        "global_atomic_add_u32 v1, v0, v2, s[4:5] glc\n{s_waitcnt vmcnt(0)}\nv_mov_b32_e32 v2, v1",
        (Lack.READ, "V_MOV_B32", "v1", "vmcnt"),
    ),
    "a flat load": (
        "gfx942",
        "flat_load_dword v2, v[0:1]\n{s_waitcnt vmcnt(0) lgkmcnt(0)}\nv_mov_b32 v3, v2",
        (Lack.READ, "V_MOV_B32", "v2", "vmcnt"),
    ),
    "an operand of a matrix product": (
        "gfx942",
        "ds_read_b64 v[2:3], v0\n{s_waitcnt lgkmcnt(0)}\n"
        "v_mfma_f32_16x16x16_f16 v[8:11], v[4:5], v[2:3], v[8:11]",
        (Lack.READ, "V_MFMA_F32_16X16X16_F16", "v2", "lgkmcnt"),
    ),
    "a word of a buffer's descriptor": (
        "gfx942",
        "s_load_dwordx4 s[4:7], s[0:1], 0x0\n{s_waitcnt lgkmcnt(0)}\n"
        "buffer_load_dword v1, v0, s[4:7], 0 offen",
        (Lack.READ, "BUFFER_LOAD_DWORD", "s4", "lgkmcnt"),
    ),
    "what is stored": (
        "gfx942",
        "ds_read_b32 v1, v0\n{s_waitcnt lgkmcnt(0)}\nglobal_store_dword v0, v1, s[2:3]",
        (Lack.READ, "GLOBAL_STORE_DWORD", "v1", "lgkmcnt"),
    ),
    "a mask that is loaded": (
        "gfx942",
        "s_load_dwordx2 vcc, s[0:1], 0x0\n{s_waitcnt lgkmcnt(0)}\nv_cndmask_b32 v1, v2, v3, vcc",
        (Lack.READ, "V_CNDMASK_B32", "vcc", "lgkmcnt"),
    ),
    "a register that is written meanwhile": (
        "gfx942",
        "global_load_dword v1, v0, s[2:3]\n{s_waitcnt vmcnt(0)}\nv_mov_b32 v1, 0",
        (Lack.WRITE, "V_MOV_B32", "v1", "vmcnt"),
    ),
    "another counter's load into the same register": (
        "gfx942",
        "global_load_dword v1, v0, s[2:3]\n{s_waitcnt vmcnt(0)}\nds_read_b32 v1, v0\n"
        "s_waitcnt lgkmcnt(0)",
        (Lack.WRITE, "DS_READ_B32", "v1", "vmcnt"),
    ),
    "a write to LDS before a barrier": (
        "gfx942",
        "ds_write_b32 v0, v1\n{s_waitcnt lgkmcnt(0)}\ns_barrier\nds_read_b32 v2, v3\n"
        "s_waitcnt lgkmcnt(0)",
        (Lack.BARRIER, "S_BARRIER", "", "lgkmcnt"),
    ),
    "a write to LDS before RDNA4's barrier": (
        "gfx1201",
        "ds_store_b32 v0, v1\n{s_wait_dscnt 0x0}\ns_barrier_signal -1\ns_barrier_wait -1\n"
        "ds_load_b32 v2, v3\ns_wait_dscnt 0x0",
        (Lack.BARRIER, "S_BARRIER_SIGNAL", "", "dscnt"),
    ),
    "words that go straight to LDS": (
        "gfx942",
        "global_load_lds_dword v[2:3], off\n{s_waitcnt vmcnt(0)}\ns_barrier\nds_read_b32 v1, v0\n"
        "s_waitcnt lgkmcnt(0)",
        (Lack.LOCAL, "DS_READ_B32", "", "vmcnt"),
    ),
    "words that go straight to LDS, round by round": (
        "gfx950",
        "1:\nbuffer_load_dwordx4 v2, s[4:7], 0 offen lds\n{s_waitcnt vmcnt(0)}\ns_barrier\n"
        "ds_read_b32 v1, v0\ns_waitcnt lgkmcnt(0)\ns_cbranch_scc0 1b",
        (Lack.LOCAL, "DS_READ_B32", "", "vmcnt"),
    ),
    "one of two ways has no wait": (
        "gfx942",
        "global_load_dword v1, v0, s[2:3]\ns_cbranch_scc0 1f\n{s_waitcnt vmcnt(0)}\n"
        "s_branch 2f\n1:\ns_waitcnt vmcnt(0)\n2:\nv_mov_b32 v2, v1",
        (Lack.READ, "V_MOV_B32", "v1", "vmcnt"),
    ),
    "a younger load on one of two ways": (
        "gfx942",
        "global_load_dword v1, v0, s[2:3]\ns_cbranch_scc0 1f\nglobal_load_dword v2, v0, s[2:3]\n"
        "1:\n{s_waitcnt vmcnt(0)}\ns_waitcnt vmcnt(1)\nv_mov_b32 v3, v1\ns_waitcnt vmcnt(0)",
        (Lack.READ, "V_MOV_B32", "v1", "vmcnt"),
    ),
    "a load of the round before": (
        "gfx942",
        "1:\nv_add_f32 v2, v1, v2\nglobal_load_dword v1, v0, s[2:3]\n{s_waitcnt vmcnt(0)}\n"
        "s_cbranch_scc0 1b",
        (Lack.READ, "V_ADD_F32", "v1", "vmcnt"),
    ),
}
#: Code that lacks nothing, though it has fewer waits than loads.
QUIET = {
    "stores are counted with loads": (
        "gfx942",
        "global_load_dword v1, v0, s[2:3]\nglobal_store_dword v0, v4, s[2:3]\n"
        "s_waitcnt vmcnt(1)\nv_mov_b32 v2, v1",
    ),
    "loads into one register arrive in order": (
        "gfx942",
        "global_load_dword v1, v0, s[2:3]\nglobal_load_dword v1, v0, s[2:3]\n"
        "s_waitcnt vmcnt(0)\nv_mov_b32 v2, v1",
    ),
    "what is stored may be written at once": (
        "gfx942", "global_store_dword v0, v1, s[2:3]\nv_mov_b32 v1, 0",
    ),
    "LDS of one wave is in order": ("gfx942", "ds_write_b32 v0, v1\nds_read_b32 v2, v0"),
    "nobody reads behind the barrier": ("gfx942", "ds_write_b32 v0, v1\ns_barrier"),
    "more are not under way than the counter counts": (
        "gfx942",
        "ds_read_b32 v1, v0\n" + "ds_read_b32 v2, v0\n" * 15 + "v_mov_b32 v3, v1",
    ),
    "LDS of the round before is read meanwhile": (
        "gfx942",
        "global_load_lds_dword v[2:3], off\n1:\ns_waitcnt vmcnt(0)\ns_barrier\n"
        "global_load_lds_dword v[2:3], off\nds_read_b32 v1, v0\ns_waitcnt lgkmcnt(0)\n"
        "s_cbranch_scc0 1b",
    ),
    "two rounds of words for LDS are under way": (
        "gfx942",
        "global_load_lds_dword v[2:3], off\n1:\nglobal_load_lds_dword v[2:3], off\n"
        "s_waitcnt vmcnt(1)\ns_barrier\nds_read_b32 v1, v0\ns_waitcnt lgkmcnt(0)\n"
        "s_cbranch_scc0 1b",
    ),
    "nobody reads what goes to LDS": ("gfx942", "global_load_lds_dword v[2:3], off"),
    "behind the end nothing is used": (
        "gfx942", "global_load_dword v1, v0, s[2:3]\ns_endpgm\nv_mov_b32 v2, v1",
    ),
}  # fmt: skip


def _found(text: str, arch: str) -> list[MissingWait]:
    lowered = Lowering(arch, num_lanes_of(arch)).lower(assembled(text, arch))
    assert lowered.problems == {}
    return missing_waits(lowered, arch, num_lanes_of(arch))


@pytest.mark.parametrize("name", LACKING)
def test_a_wait_that_is_taken_away_is_missed(name: str) -> None:
    arch, text, wanted = LACKING[name]
    first, _, rest = text.partition("{")
    taken, _, last = rest.partition("}")
    assert _found(first + taken + last, arch) == []
    (found,) = _found(f"{first}s_nop 0{last}", arch)
    shown = found.lack, found.at.name.removesuffix("_E32"), found.register, found.counters[0]
    assert shown == wanted


@pytest.mark.parametrize("name", QUIET)
def test_what_arrives_in_time_is_no_lack(name: str) -> None:
    arch, text = QUIET[name]
    assert _found(text, arch) == []


def test_scalar_loads_arrive_in_any_order() -> None:
    text = "s_load_dword s4, s[0:1], 0x0\ns_load_dword s5, s[0:1], 0x4\n{}\ns_add_u32 s6, s4, 1"
    assert _found(text.format("s_waitcnt lgkmcnt(0)"), "gfx942") == []
    (found,) = _found(text.format("s_waitcnt lgkmcnt(1)"), "gfx942")
    assert (found.register, found.issued.pc) == ("s4", 0)


def test_each_wait_of_a_compiled_kernel_is_missed_where_it_is_taken_away() -> None:
    data = (ROOT / "tests/fixtures/amd/rope.gfx942.co").read_bytes()
    assert prepare(read_code_object(data, "rope")).missing_waits == []
    planted = without_each_wait(data)
    assert len(planted) == 5
    for wait, changed in planted:
        (found,) = prepare(read_code_object(changed, "rope")).missing_waits
        assert found.issued.pc < wait.pc < found.at.pc
