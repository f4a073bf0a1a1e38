"""Instructions are whole or refused, and each target's own formats are known."""

from __future__ import annotations

import sys

import pytest

from hypocenter.base.errors import MissingPackage
from hypocenter.device.amd.decode import Undecodable, _formats, decode
from hypocenter.device.amd.routes import dpp_table, swizzle_table

#: Words as LLVM's assembler writes them, to the names in its text.
WRITTEN = {
    "gfx942": ("0000007e 000081bf", ["v_nop", "s_endpgm"]),
    "gfx1100": ("0000007e 0000b0bf", ["v_nop", "s_endpgm"]),
    "gfx1201": ("0000007e 0000b0bf", ["v_nop", "s_endpgm"]),
}


@pytest.mark.parametrize("arch", WRITTEN)
def test_the_end_of_a_program_is_another_word_on_each_family(arch: str) -> None:
    words, names = WRITTEN[arch]
    found = decode(bytes.fromhex(words), arch, 0x100)
    assert [each.name.lower() for each in found] == names
    assert [each.pc for each in found] == [0x100, 0x104]


def test_what_is_no_instruction_is_named_with_its_place() -> None:
    with pytest.raises(Undecodable, match=r"\+0x44 is no instruction of gfx942: ffffffff"):
        decode(bytes.fromhex("0000007e ffffffff"), "gfx942", 0x40)


def test_lanes_of_a_row_shift_to_the_right_and_leave_the_first_without_a_source() -> None:
    table = dpp_table(0x111, 64, is_rdna=False)
    assert table is not None
    assert table[:3] == [-1, 0, 1]
    assert table[16] == -1
    broadcast = dpp_table(0x142, 64, is_rdna=False)
    assert broadcast is not None
    assert broadcast[15:17] == [-1, 15]
    assert dpp_table(0x142, 32, is_rdna=True) is None


def test_a_swizzle_flips_the_bits_of_its_mask() -> None:
    table = swizzle_table(0x041F)
    assert table is not None
    assert table[:4] == [1, 0, 3, 2]


def test_without_the_decoder_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tinygrad.renderer.amd", None)
    with pytest.raises(
        MissingPackage, match=r"needs tinygrad, .*: pip install 'hypocenter\[amd\]'"
    ):
        _formats.__wrapped__("cdna")
