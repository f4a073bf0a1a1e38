"""The digest of a tensor's values, defined once for all devices: its mix of places, and constants.

The place of an element is row * width + column, modulo 2**32. Its mix is 32 bits of that:

    m = place;  m ^= m >> 16;  m *= FIRST;  m ^= m >> 15;  m *= SECOND;  m ^= m >> 16

A digest is the sum, modulo 2**64, of the bits of each element as f32 times (mix | 1). So it is the
same in whatever order it is summed, and one element that changes always changes it. The top bit of
a mix is the sign with which an element counts in a sketch. Words for the CPU are in
`cpu/vector_digest.py`; GPUs have theirs in `kernels/rowwise/figures_gpu.py`.

Source of the mix: Wellons, "Prospecting for Hash Functions" (2018), lowbias32.
"""

from __future__ import annotations

FIRST, SECOND = 0x7FEB352D, 0x846CA68B
#: How far the steps shift.
SHIFTS = (16, 15, 16)

#: Numbers of a sketch: column c counts in number c mod NUM_SKETCHES.
NUM_SKETCHES = 8
#: Words of 64 bits that hold the figures of a tensor: the least and the greatest finite element,
#: the sums of these and of their squares (f64), how many are NaN and infinite, the digest (i64), a
#: word of zeros, and the sums of the sketch (f64).
LOW, HIGH, TOTAL, SQUARES, NUM_NAN, NUM_INF, DIGEST, _, SKETCH = range(9)
NUM_WORDS = SKETCH + NUM_SKETCHES
#: Columns of a row that are measured together.
BLOCK = 1024
