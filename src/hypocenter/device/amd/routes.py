"""Which lane a lane's value comes from: the controls of DPP and of DS_SWIZZLE."""

from __future__ import annotations

from collections.abc import Sequence

LANES = 64


def dpp8_table(selected: Sequence[int]) -> list[int]:
    """DPP8: each lane takes one of its group of eight."""
    return [lane // 8 * 8 + selected[lane % 8] for lane in range(LANES)]


def dpp_table(control: int, num_lanes: int, *, is_rdna: bool) -> list[int] | None:
    """The source lane of each lane, -1 where there is none; None for a control of another kind.

    Source: "DPP_CTRL Enumeration" of the CDNA3 and RDNA3 manuals.
    """
    if control < 0x100:
        return [lane // 4 * 4 + (control >> 2 * (lane % 4) & 3) for lane in range(LANES)]
    by, kind = control & 15, control >> 4
    if kind in (0x10, 0x11, 0x12):
        if by == 0:
            return None
        return [_in_row(lane, by, kind) for lane in range(LANES)]
    if control in (0x140, 0x141):
        size = 16 if control == 0x140 else 8
        return [lane // size * size + size - 1 - lane % size for lane in range(LANES)]
    if kind == 0x15:
        return [lane // 16 * 16 + by for lane in range(LANES)]
    if kind == 0x16 and is_rdna:
        return [lane ^ by for lane in range(LANES)]
    return None if is_rdna else _whole_wave(control, num_lanes)


def _in_row(lane: int, by: int, kind: int) -> int:
    """ROW_SHL, ROW_SHR and ROW_ROR within sixteen lanes."""
    place = lane % 16
    if kind == 0x12:
        return lane - place + (place - by) % 16
    moved = place + by if kind == 0x10 else place - by
    return lane - place + moved if 0 <= moved < 16 else -1


def _whole_wave(control: int, num_lanes: int) -> list[int] | None:
    """WAVE_SHL, WAVE_ROL, WAVE_SHR, WAVE_ROR, ROW_BCAST15 and ROW_BCAST31 of GFX9."""
    last = num_lanes - 1
    if control in (0x130, 0x138):
        step = 1 if control == 0x130 else -1
        moved = [lane + step for lane in range(LANES)]
        return [lane if 0 <= lane <= last else -1 for lane in moved]
    if control in (0x134, 0x13C):
        step = 1 if control == 0x134 else -1
        return [(lane + step) % num_lanes for lane in range(LANES)]
    if control == 0x142:
        return [lane // 16 * 16 - 1 if lane >= 16 else -1 for lane in range(LANES)]
    if control == 0x143:
        return [31 if lane >= 32 else -1 for lane in range(LANES)]
    return None


def swizzle_table(offset: int) -> list[int] | None:
    """DS_SWIZZLE_B32's source lanes; None for its modes of Fourier transforms.

    Source: "DS_SWIZZLE_B32" of the CDNA3 manual.
    """
    if offset >= 0xE000:
        return None
    if offset >= 0xC000:
        by, mask = offset >> 5 & 31, offset & 31
        back = offset >> 10 & 1
        by = -by if back else by
        return [
            lane & ~31 | (lane & mask & 31) | ((lane + by) & ~mask & 31) for lane in range(LANES)
        ]
    if offset & 0x8000:
        return [lane // 4 * 4 + (offset >> 2 * (lane % 4) & 3) for lane in range(LANES)]
    keep, put, flip = offset & 31, offset >> 5 & 31, offset >> 10 & 31
    return [lane & ~31 | ((lane & keep | put) ^ flip) & 31 for lane in range(LANES)]
