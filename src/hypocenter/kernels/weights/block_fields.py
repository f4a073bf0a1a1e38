"""Words for the fields of GGUF blocks, as arrays of NumPy or of torch; knows no type."""

from __future__ import annotations

from collections.abc import Sequence

from hypocenter.device.arrays import AnyArray, bits_as, cast, constants, in_order, join, look_up

#: Codes, then scale, small scales, minimum and small minima as in Blocks.
Fields = tuple[AnyArray, AnyArray, AnyArray | None, AnyArray | None, AnyArray | None]


def f16_at(blocks: AnyArray, offset: int) -> AnyArray:
    """The f16 field at byte `offset` of each block, as f32 [num_rows, num_blocks, 1]."""
    return cast(bits_as(blocks[..., offset : offset + 2], "float16"), "float32")


def nibbles(quants: AnyArray) -> AnyArray:
    """Bytes [..., n] to codes [..., 2n]: all low nibbles, then all high ones."""
    quants = in_order(quants)  # NumPy is slow where it may go a few bytes at a time
    return join([quants & 15, quants >> 4], -1)


def bit_planes(packed: AnyArray, shifts: Sequence[int], mask: int) -> AnyArray:
    """Bytes [..., n] to [..., number of shifts, n]."""
    return (packed[..., None, :] >> constants(shifts, "uint8", packed)[:, None]) & mask


def in_turn(packed: AnyArray, shifts: Sequence[int], mask: int, kind: str = "uint8") -> AnyArray:
    """Numbers [..., n] to [..., n * number of shifts]: the parts of each, the first shift first."""
    parts = (in_order(packed)[..., None] >> constants(shifts, kind, packed)) & mask
    return parts.reshape(*packed.shape[:-1], packed.shape[-1] * len(shifts))


def words(packed: AnyArray, num_bytes: int) -> AnyArray:
    """Bytes [..., n * num_bytes] as i32 [..., n], the lowest byte first."""
    parts = cast(in_order(packed).reshape(*packed.shape[:-1], -1, num_bytes), "int32")
    found = parts[..., 0]
    for i in range(1, num_bytes):
        found = found | (parts[..., i] << (8 * i))
    return found


def as_signed(codes: AnyArray, zero: int) -> AnyArray:
    """u8 less `zero`, as i8."""
    return bits_as(codes, "int8") - zero


def of_table(values: Sequence[int], codes: AnyArray) -> AnyArray:
    """What codes stand for, i8."""
    return look_up(constants(values, "int8", codes), codes)
