"""An opcode of a family's table that the target does not have is refused: LLVM's assembler says
which those are."""

from __future__ import annotations

import re
from functools import cache

import numpy as np
import pytest
from machine.amd_objects import SYNONYMS, TARGETS
from machine.amd_wave import Wave, assembled, num_lanes_of
from triton.backends.amd.compiler import assemble_amdgcn

from hypocenter.device.amd import instruction_rows as r
from hypocenter.device.amd.decode import FAMILIES, _formats, decode
from hypocenter.device.amd.lower import Lowering
from hypocenter.device.amd.target_opcodes import _LACKING, has_opcode

_LLVMS = {ours: theirs for theirs, ours in SYNONYMS.items() if "mix" in ours}
#: A pair's first half, with which any second one may stand; and those that are second ones alone.
_FIRST = "v_dual_mov_b32 v0, v1 :: "
_SECOND_ALONE = ("v_dual_add_nc_u32", "v_dual_lshlrev_b32", "v_dual_and_b32")


@cache
def _names(arch: str) -> list[str]:
    """Every opcode of the target's table."""
    found = set()
    for encoding in _formats(FAMILIES[arch]):
        fields = dict(encoding._fields)
        for op in (fields[name] for name in ("op", "opx", "opy") if name in fields):
            names = (each.name for each in op.allowed or op._enum)
            found |= {name.removesuffix("_E32").removesuffix("_E64") for name in names}
    return sorted(found)


def _written(name: str) -> str:
    name = _LLVMS.get(name.lower(), name.lower())
    return f"{_FIRST}{name} v3, v4, v5" if name in _SECOND_ALONE else name


@pytest.mark.parametrize("arch", TARGETS)
def test_a_target_has_the_opcodes_that_llvm_knows_of_it(
    arch: str, capfd: pytest.CaptureFixture[str]
) -> None:
    names = _names(arch)
    with pytest.raises(RuntimeError):
        assemble_amdgcn("\n".join(map(_written, names)) + "\n", arch, "")
    # Known names lack operands here, so that nearly all are told one way or the other.
    told = re.findall(r":(\d+):\d+: error: (.*)", capfd.readouterr().err)
    assert len({line for line, _ in told}) > 0.97 * len(names)
    unknown = re.compile("instruction not supported on this GPU|invalid instruction")
    refused = {names[int(line) - 1] for line, text in told if unknown.match(text)}
    assert {name for name in names if not has_opcode(arch, name)} == refused


@pytest.mark.parametrize("arch", TARGETS)
def test_each_pattern_of_what_a_target_lacks_has_a_name(arch: str) -> None:
    for pattern in _LACKING[arch].split():
        found = re.compile(pattern.replace("*", r"\w*"))
        assert any(map(found.fullmatch, _names(arch))), pattern


#: What one target has, and another of its family lacks; with the words of the instruction there.
_FOREIGN = [
    ("gfx942", "gfx950", "v_cvt_scalef32_pk_f32_fp8 v[2:3], v4, v5", "V_CVT_SCALEF32_PK_F32_FP8"),
    ("gfx942", "gfx950", "v_mfma_f32_16x16x32_f16 v[0:3], v[4:7], v[8:11], v[0:3]",
     "V_MFMA_F32_16X16X32_F16"),
    ("gfx942", "gfx950", "ds_read_b64_tr_b16 v[2:3], v4", "DS_READ_B64_TR_B16"),
    ("gfx942", "gfx950", "buffer_load_dwordx4 v4, s[8:11], 0 offen lds",
     "BUFFER_LOAD_DWORDX4 into LDS"),
    ("gfx950", "gfx942", "v_mfma_f32_16x16x8_xf32 v[0:3], v[4:5], v[6:7], v[0:3]",
     "V_MFMA_F32_16X16X8_XF32"),
    ("gfx1100", "gfx1150", "s_add_f32 s2, s3, s4", "S_ADD_F32"),
]  # fmt: skip


@pytest.mark.parametrize(("arch", "other", "line", "name"), _FOREIGN)
def test_what_another_target_has_stops_the_machine(
    arch: str, other: str, line: str, name: str
) -> None:
    words = _words(line, other)
    text = "v_mov_b32 v20, v20\n" + "\n".join(f".long {word:#x}" for word in words)
    lowered = Lowering(arch, num_lanes_of(arch)).lower(assembled(text, arch))
    assert list(lowered.problems.values()) == [f"{name}, which {arch} does not have"]
    (row,) = lowered.problems
    instruction = lowered.instructions[lowered.instruction_of[row]]
    assert instruction.pc == 4
    assert instruction.data == b"".join(word.to_bytes(4, "little") for word in words)
    assert lowered.code[row, r.KIND] == r.UNKNOWN
    if other in TARGETS:
        assert not Lowering(other, num_lanes_of(other)).lower(assembled(line, other)).problems


def _words(line: str, arch: str) -> list[int]:
    """The instruction's words as LLVM's assembler writes them; gfx1150's tables are not here."""
    if arch == "gfx1150":
        return [0xA0020403]  # s_add_f32 s2, s3, s4
    data = assembled(line, arch)[0].data
    return [int.from_bytes(data[i : i + 4], "little") for i in range(0, len(data), 4)]


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_numbers_of_64_bits_come_from_one_lane_of_a_row(arch: str) -> None:
    wave = Wave(arch)
    numbers = np.arange(64, dtype=np.float64) + 0.25
    wave.put(2, numbers)
    assert wave.run("v_mov_b64_dpp v[4:5], v[2:3] row_newbcast:3 row_mask:0xf bank_mask:0xf") == (
        r.ALL_ENDED
    )
    np.testing.assert_array_equal(wave.get(4, "f8", 2)[:, 0], numbers // 16 * 16 + 3.25)


def test_other_routes_of_64_bits_are_refused() -> None:
    """LLVM knows neither; the words are those of V_MOV_B64 with another control, and with SDWA."""
    for words in ((0x7E0470FA, 0xFF010102), (0x7E0470F9, 0x00060602)):
        data = b"".join(word.to_bytes(4, "little") for word in words)
        (each,) = decode(data, "gfx942")
        assert each.name == "V_MOV_B64"
        (problem,) = Lowering("gfx942", 64).lower([each]).problems.values()
        assert "V_MOV_B64" in problem
        assert "64 bits" in problem
