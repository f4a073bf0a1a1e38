"""What the fields of a weight of codes are called; `packed_codes.py` reads them by these names."""

from __future__ import annotations

from collections.abc import Sequence

#: What the field of a record's codes is called, before the bits of its planes and what was added to
#: a code to make it unsigned: codes_4, codes_6_less_32.
CODES_FIELD, LESS = "codes", "less"
#: What stands there before sizes, where a code is the number of one of them and has a sign as its
#: highest bit. The largest is added to what it stands for: codes_2_1_sizes_8_25_43.
SIZES = "sizes"
#: The fields of scales that are powers of two, as bf16, and of those that are e4m3 without a sign.
POWERS_FIELD, MINIS_FIELD = "powers", "minis"
#: What such a scale is more than the f16 of which its bits are the highest but for the sign.
MINI_FACTOR = 2.0**8


def codes_field(planes: Sequence[int], zero: int, sizes: Sequence[int] = ()) -> str:
    """The name of the field of codes; `sizes`, at most eight from 0 to 63, the smallest first."""
    facts = (SIZES, *map(str, sizes)) if sizes else (LESS, str(zero)) if zero else ()
    return "_".join((CODES_FIELD, *map(str, planes), *facts))
