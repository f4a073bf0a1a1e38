"""Which addresses of an access have wrapped and should not have: 32 bits that were not enough.

A hash wraps on purpose and is reduced to the length of its table by a remainder or a shift. What
such a number leads to is a fault only where it shows. It may be outside of the tensor. Or it is
inside, and so is the element that was meant without a limit to the bits. That is so of a flat
number that is divided into row and column. The upper bits of a hash alone are left out: of a small
key the product without a limit may lead to another of several tables.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from hypocenter.base.dtypes import Array
from hypocenter.device.interpret.builder import Reduced
from hypocenter.replay.arguments import SPACE_BITS, Argument


def are_wrapped(
    addresses: Array,
    exact: Array,
    reduced: Reduced,
    arguments: Mapping[int, Argument],
    width: int,
) -> Array:
    """Of each address whether it is wrong by what has wrapped; `exact` is what it should be.

    `addresses` and `exact` are uint64 of one shape, [num_lanes]; `width` is in bytes.
    """
    wrong: Array = exact != addresses
    if reduced is Reduced.NOT or not wrong.any():
        return wrong
    exact = exact.astype(np.uint64, copy=False)
    shows = ~are_inside(addresses, arguments, width)
    if reduced is Reduced.QUOTIENT:
        shows |= are_inside(exact, arguments, width)
    return wrong & shows


def are_inside(addresses: Array, arguments: Mapping[int, Argument], width: int) -> Array:
    """Of each uint64 address whether so many bytes from it on are of a tensor."""
    inside = np.zeros(addresses.size, bool)
    spaces = addresses >> np.uint64(SPACE_BITS)
    for space in np.unique(spaces):
        argument = arguments.get(int(space))
        if argument is not None:
            offsets = (addresses - np.uint64(argument.address)).view(np.int64)
            within = (offsets >= 0) & (offsets <= argument.num_bytes - width)
            inside |= within & (spaces == space)
    return inside
