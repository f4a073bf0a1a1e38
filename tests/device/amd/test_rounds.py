"""A wave that goes round is told from one that takes long, and what it reads meanwhile is known."""

from __future__ import annotations

import numpy as np
from machine.amd_wave import Wave, assembled

from hypocenter.device.amd import instruction_rows as r
from hypocenter.device.amd.evidence.rounds import Round, round_of
from hypocenter.device.amd.machine import run_workgroup


def _looked_at(text: str, setup: str = "") -> tuple[Round | None, r.Machine, int]:
    """What is seen of a wave after 100 instructions; its machine, and memory that it may read."""
    wave, flags = Wave("gfx942"), np.zeros(4, np.int32)
    address = wave.memory.add(flags)
    wave.sgpr[2], wave.sgpr[3] = address & 0xFFFFFFFF, address >> 32
    machine = wave.machine(f"{setup}\n{text}")
    machine.facts[r.BUDGET] = 100
    assert run_workgroup(machine) == r.OVER_BUDGET
    return round_of(machine, 0, run_workgroup), machine, address


def test_a_loop_that_changes_nothing_goes_round() -> None:
    found, _, _ = _looked_at("1:\ns_nop 0\ns_nop 0\ns_branch 1b")
    assert found is not None
    assert (found.num_instructions, found.addresses, found.reads_local) == (3, (), False)


def test_a_loop_that_counts_does_not() -> None:
    assert _looked_at("1:\ns_add_u32 s4, s4, 1\ns_branch 1b")[0] is None


def test_a_vector_register_that_changes_counts_too() -> None:
    assert _looked_at("1:\nv_add_u32 v4, 1, v4\ns_branch 1b")[0] is None


def test_a_loop_that_waits_for_a_word_says_which() -> None:
    text = "1:\nglobal_load_dword v1, v0, s[2:3] offset:8\ns_branch 1b"
    found, machine, address = _looked_at(text, "s_mov_b64 exec, 1\nv_mov_b32 v0, 0")
    assert found is not None
    assert (found.num_instructions, found.addresses) == (2, (address + 8,))
    assert machine.facts[r.BUDGET] == 100


def test_a_loop_over_words_of_lds_says_so() -> None:
    found, _, _ = _looked_at("1:\nds_read_b32 v1, v0\ns_branch 1b", "v_mov_b32 v0, 0")
    assert found is not None
    assert found.reads_local
    assert _looked_at("1:\nds_add_u32 v0, v2\ns_branch 1b", "v_mov_b32 v2, 1")[0] is None


def test_a_loop_that_changes_memory_is_not_told() -> None:
    text = "1:\nglobal_atomic_add v0, v2, s[2:3]\ns_branch 1b"
    assert _looked_at(text, "v_mov_b32 v0, 0\nv_mov_b32 v2, 1")[0] is None


def test_a_wave_that_ends_after_all_has_no_round() -> None:
    text = "1:\ns_add_u32 s4, s4, 1\ns_cmp_lt_u32 s4, 60\ns_cbranch_scc1 1b"
    found, machine, _ = _looked_at(text)
    assert found is None
    assert machine.wave[0, r.STATE] == r.ENDED
    assert len(assembled(text, "gfx942")) == 4
