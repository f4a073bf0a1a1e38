"""A launch that reaches an instruction that is not modelled ends there: with its name, its place
and its encoding; the same launch without it is quiet."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from machine.amd_wave import assembled
from repository import ROOT

from hypocenter.base.errors import HypoError
from hypocenter.check.machine import launch as amd
from hypocenter.device.amd.bundle import code_of_bundle
from hypocenter.device.amd.code_object import CodeObject

BUNDLE = (ROOT / "tests" / "fixtures" / "amd" / "saxpy.bundle").read_bytes()
#: The target by its number in the object's flags, and whose object is taken for it.
_NUMBERS = {"gfx942": (0x4C, "gfx942"), "gfx950": (0x4F, "gfx942"), "gfx1201": (0x4E, "gfx1100")}
_LINES = [
    # Stochastic rounding.
    ("gfx942", "v_cvt_sr_fp8_f32 v1, v2, v3"),
    ("gfx950", "v_cvt_sr_bf8_f32 v1, v2, v3"),
    ("gfx1201", "v_cvt_sr_fp8_f32 v1, v2, v3"),
    ("gfx950", "v_cvt_sr_f16_f32 v1, v2, v3"),
    ("gfx950", "v_cvt_sr_bf16_f32 v1, v2, v3"),
    ("gfx950", "v_cvt_scalef32_sr_fp8_f32 v1, v2, v3, v4"),
    ("gfx950", "v_cvt_scalef32_sr_pk_fp4_f32 v1, v[2:3], v4, v5"),
    # Numbers of 6 bits, and those that become 4 bits.
    ("gfx950", "v_cvt_scalef32_pk32_f32_fp6 v[0:31], v[32:37], v38"),
    ("gfx950", "v_cvt_scalef32_2xpk16_bf6_f32 v[0:5], v[6:21], v[22:37], v38"),
    ("gfx950", "v_cvt_scalef32_pk_fp4_bf16 v1, v2, v3"),
    # Modifiers that these conversions and products have no meaning for.
    ("gfx1201", "v_dot4_i32_iu8 v1, v2, v3, v4 neg_lo:[1,1,0] clamp"),
    ("gfx1201", "v_dot4_f32_fp8_bf8 v1, v2, v3, v4"),
]


def _object(arch: str, text: str) -> CodeObject:
    """`saxpy`, of which the first instructions are these lines and the end."""
    number, family = _NUMBERS[arch]
    data = bytearray(code_of_bundle(BUNDLE, "saxpy.bundle", family))
    data[48] = number
    held = CodeObject(bytes(data), "saxpy.co")
    kernel = held.kernel("saxpy")
    lines = b"".join(each.data for each in assembled(text, arch))
    rest = b"".join(each.data for each in assembled("s_nop 0", arch)[:1])
    assert len(lines) <= kernel.code_bytes
    code = lines + rest * ((kernel.code_bytes - len(lines)) // 4)
    old = held.memory_image(0)[kernel.entry : kernel.entry + kernel.code_bytes]
    at = bytes(data).find(old)
    data[at : at + len(code)] = code
    return CodeObject(bytes(data), "saxpy.co")


def _launch(arch: str, text: str) -> int:
    given: dict[str, Any] = {name: np.ones(64, np.float32) for name in ("x", "y")}
    given |= {"a": 2.0, "n": 64}
    return len(amd.launch(_object(arch, text), "saxpy", ((1,), (64,)), given).findings)


@pytest.mark.parametrize(("arch", "line"), _LINES)
def test_it_is_named_with_its_place_and_encoding(arch: str, line: str) -> None:
    instruction = assembled(line, arch)[0]
    told = rf"{instruction.name}.*\+0x4, .*encoding {instruction.data.hex()}$"
    with pytest.raises(HypoError, match=told):
        _launch(arch, f"s_nop 0\n{line}")


@pytest.mark.parametrize("arch", _NUMBERS)
def test_the_same_launch_without_one_is_quiet(arch: str) -> None:
    signed = "v_cvt_f32_fp8 v1, v2\nv_cvt_pk_bf8_f32 v1, v2, v3"
    assert _launch(arch, f"s_nop 0\n{signed}") == 0
