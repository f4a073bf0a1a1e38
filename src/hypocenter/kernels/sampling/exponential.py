"""The numbers of which exp is made where tokens are chosen, the same on each device."""

from __future__ import annotations

import math

import numpy as np

#: Below this, exp is taken as 0: smaller results would be subnormal, which some threads flush.
EXP_LOWEST = -708.0
LOG2_E = 1 / math.log(2)
#: ln 2 in two parts: the high one ends in 21 zero bits, so that k * LN2_HIGH is exact.
LN2_HIGH = float.fromhex("0x1.62e42fee00000p-1")
LN2_LOW = float.fromhex("0x1.a39ef35793c76p-33")
#: 1/13!, 1/12! ... 1/0!: Horner's scheme begins with the first.
EXP_COEFFICIENTS = tuple(1 / math.factorial(n) for n in range(13, -1, -1))
#: 2**-1022 ... 2**0.
POWERS_OF_TWO = np.ldexp(1.0, np.arange(-1022, 1))
