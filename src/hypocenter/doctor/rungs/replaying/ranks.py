"""In which order corrections of an access outside are tried: the first rank that has one is told.

A rank holds what one kind of evidence speaks for, the strongest first. Corrections of one rank are
tried together, so that equal ones are told as alternatives.
"""

from __future__ import annotations

#: An entry of a tensor that leads to the very lane, and is no entry of the axis that it indexes.
INDEX = -1
#: `<=` where `<` is meant.
STRICT = 0
#: Two bounds of a mask that were exchanged.
CROSSED = 1
#: The number of a lane within its tile, where the address goes on from the tile's start.
TILE = 2
#: An index below 0 without a condition.
LOWER = 3
#: Two strides that were exchanged, by which index each of them multiplies.
EXCHANGED = 4
#: A mask that is made and not used.
UNUSED = 5
#: That of another access to the same elements.
BESIDE = 6
#: A number of elements that the mask compares with.
SCALAR = 7
#: A stride that is not the tensor's own, passed otherwise.
STRIDE = 8
#: Another factor in the kernel's text.
STRIDE_TEXT = 9
#: A view that is taken for a packed tensor.
PACKED = 10
#: Fewer programs, and one condition that names the size of its axis: which is meant, nobody knows.
BOUND = 11
#: Conditions for two axes.
PAIR = 12
#: A condition whose number has another meaning or none that is known.
ANY_BOUND = 13
#: The size of the axis as a number, for one axis.
NUMBER = 14
#: And for two.
NUMBERS = 15
#: An atomic in place of a load, a sum and a store.
ATOMIC = 16
#: The access itself, where no correction is right.
LAST = 17
