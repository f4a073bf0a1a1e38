"""What stops the machine is what docs/amd.md names: no instruction more, and none less."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase

import pytest
from machine.amd_objects import TARGETS
from machine.amd_wave import assembled, num_lanes_of
from repository import ROOT

from hypocenter.device.amd.lower import Lowering
from tools.amd_opcodes import PAGE, replaced, stopping


def _named() -> list[str]:
    """The patterns in the table of docs/amd.md."""
    text = (ROOT / "docs" / "amd.md").read_text()
    table = text.split("| stops the machine |")[1].split("\n\n")[0]
    return re.findall(r"`([A-Z0-9_*\[\]]+)`", table)


@pytest.mark.parametrize("arch", TARGETS)
def test_each_instruction_that_is_not_modelled_is_named(arch: str) -> None:
    stops, every = stopping(arch)
    assert len(every) > 700
    patterns = _named()
    unnamed = {n for n in stops if not any(fnmatchcase(n, each) for each in patterns)}
    assert unnamed == set()


def test_the_count_of_what_is_modelled_is_that_of_the_machine() -> None:
    page = PAGE.read_text()
    assert page == replaced(page), "stale: python -m tools.amd_opcodes"


def test_each_name_of_the_table_stops_the_machine_somewhere() -> None:
    stops = {name for arch in TARGETS for name in stopping(arch)[0]}
    every = {name for arch in TARGETS for name in stopping(arch)[1]}
    for pattern in _named():
        matched = {name for name in every if fnmatchcase(name, pattern)}
        assert matched, pattern
        assert matched <= stops, (pattern, matched - stops)


_WMMA = "v_wmma_f32_16x16x16_f16 v[0:7], v[8:15], v[16:23], v[0:7]"
_BYTES = "v_wmma_i32_16x16x16_iu8 v[0:7], v[8:11], v[12:15], v[0:7]"
_SPARSE = "v_smfmac_f32_16x16x32_f16 v[10:13], v[2:3], v[4:7], v1"
_SDWA = "v_mov_b32_sdwa v1, v2 dst_sel:BYTE_0 dst_unused:UNUSED_{} src0_sel:DWORD"
_SCALED = "v_mfma_scale_f32_16x16x128_f8f6f4 v[0:3], {0}, {1}, v[0:3], v20, v21"
_SMALL = "v_mfma_f32_16x16x128_f8f6f4 v[0:3], v[4:9], {}, v[0:3] cbsz:2 blgp:{}"
#: Forms by a word of their line in docs/amd.md: the target, a line that stops the machine, and one
#: of the same instruction that does not, where there is one.
FORMS: dict[str, list[tuple[str, str, str | None]]] = {
    "broadcast a block": [
        ("gfx942", "v_mfma_f32_32x32x1_2b_f32 a[0:31], v0, v1, a[0:31] cbsz:1",
         "v_mfma_f32_32x32x1_2b_f32 a[0:31], v0, v1, a[0:31]"),
        ("gfx942", "v_mfma_f32_32x32x1_2b_f32 a[0:31], v0, v1, a[0:31] blgp:2", None),
        ("gfx942", f"{_SPARSE} cbsz:1 abid:1", _SPARSE),
    ],
    "numbers of 6 bits": [
        ("gfx950", _SCALED.format("v[4:9]", "v[10:15]") + " op_sel_hi:[0,0,0] cbsz:2 blgp:2",
         _SCALED.format("v[4:7]", "v[10:13]") + " op_sel_hi:[0,0,0] cbsz:4 blgp:4"),
        ("gfx950", _SMALL.format("v[10:13]", 4), _SMALL.format("v[10:15]", 2)),
    ],
    "WMMA": [
        ("gfx1100", f"{_WMMA} neg_lo:[1,0,0]", _WMMA),
        ("gfx1100", f"{_BYTES} clamp", _BYTES),
    ],
    "exports": [
        ("gfx1100", "exp mrt0 v0, v1, v2, v3 done", None),
        ("gfx1100", "lds_direct_load v1 wait_vdst:15", None),
    ],
    "CLAMP on integers": [
        ("gfx942", "v_mad_u32_u24 v1, v2, v3, v4 clamp", "v_mad_u32_u24 v1, v2, v3, v4"),
        ("gfx1201", "v_dot4_i32_iu8 v1, v2, v3, v4 clamp", "v_dot4_i32_iu8 v1, v2, v3, v4"),
    ],
    "pairs of halves": [
        ("gfx942", "v_dot2_f32_f16 v1, v2, v3, v4 neg_lo:[1,0,0]", "v_dot2_f32_f16 v1, v2, v3, v4"),
        ("gfx942", "v_dot2_f32_f16 v1, v2, v3, v4 neg_hi:[1,0,0]",
         "v_pk_add_f16 v1, v2, v3 neg_lo:[1,0] neg_hi:[1,0]"),
    ],
    "SDWA": [("gfx942", _SDWA.format("SEXT"), _SDWA.format("PAD"))],
    "Fourier transforms": [
        ("gfx942", "ds_swizzle_b32 v1, v2 offset:0xe000", "ds_swizzle_b32 v1, v2 offset:0x8000"),
    ],
    "TFE": [
        ("gfx1100", "buffer_load_b32 v[2:3], off, s[4:7], 0 tfe",
         "buffer_load_b32 v2, off, s[4:7], 0"),
    ],
}  # fmt: skip


def _stops(arch: str, line: str, num_lanes: int) -> bool:
    return bool(Lowering(arch, num_lanes).lower(assembled(line, arch)).problems)


@pytest.mark.parametrize("form", FORMS)
def test_each_form_that_is_named_stops_the_machine_and_the_plain_one_does_not(form: str) -> None:
    for arch, line, plain in FORMS[form]:
        assert _stops(arch, line, num_lanes_of(arch)), line
        assert plain is None or not _stops(arch, plain, num_lanes_of(arch)), plain


def test_each_line_of_forms_has_its_case() -> None:
    text = (ROOT / "docs" / "amd.md").read_text()
    told = text.split("Some forms of other instructions stop it")[1].split("\n\n")[1]
    lines = [" ".join(line.split()) for line in told.removeprefix("- ").split("\n- ")]
    for line in lines:
        assert sum(form in line for form in FORMS) == 1, line
    assert len(lines) == len(FORMS)


def test_wmma_in_a_wave_of_64_stops_the_machine() -> None:
    assert _stops("gfx1100", _WMMA, 64)
