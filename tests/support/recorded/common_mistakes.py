"""Launches with common mistakes of kernels, and healthy ones that look like them.

Each with what may be said of it; of those in `UNDECIDED` nothing, for what was seen has several
explanations.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from hypocenter.doctor.causes import Cause
from hypocenter.doctor.diagnosis import RootCause
from recorded.applied_fix import applied
from recorded.program_launch import Launch


def floats(**shapes: tuple[int, ...]) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {name: ("F32", shape) for name, shape in shapes.items()}


TILE = """@triton.jit
def tile_kernel(x, o, M, N, BM: tl.constexpr, BN: tl.constexpr):
    r = tl.program_id(0) * BM + tl.arange(0, BM)
    c = tl.program_id(1) * BN + tl.arange(0, BN)
    m = (r[:, None] < M) & (c[None, :] < N)
    v = tl.load(x + r[:, None] * N + c[None, :], mask=m, other=0.0)
    tl.store(o + r[:, None] * N + c[None, :], v, mask=m)
"""
TURN = """@triton.jit
def turn_kernel(x, o, M, N, BM: tl.constexpr, BN: tl.constexpr):
    r = tl.program_id(0) * BM + tl.arange(0, BM)
    c = tl.program_id(1) * BN + tl.arange(0, BN)
    load = (r[:, None] < M) & (c[None, :] < N)
    v = tl.load(x + r[:, None] * N + c[None, :], mask=load, other=0.0)
    store = (c[:, None] < M) & (r[None, :] < N)
    tl.store(o + c[:, None] * M + r[None, :], tl.trans(v), mask=store)
"""
DEPTH = """@triton.jit
def depth_kernel(a, b, o, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    r = tl.program_id(0) * BM + tl.arange(0, BM)
    c = tl.program_id(1) * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), tl.float32)
    for k0 in range(0, tl.cdiv(K, BK)):
        k = k0 * BK + tl.arange(0, BK)
        x = tl.load(a + r[:, None] * K + k[None, :], mask=r[:, None] < M, other=0.0)
        y = tl.load(b + k[:, None] * N + c[None, :], mask=c[None, :] < N, other=0.0)
        acc += tl.dot(x, y)
    tl.store(o + r[:, None] * N + c[None, :], acc, mask=(r[:, None] < M) & (c[None, :] < N))
"""
COPY = """@triton.jit
def copy_kernel(x, o, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(o + i, tl.load(x + i, mask=i < n), mask=i < n)
"""
ROWS = """@triton.jit
def rows_kernel(x, o, sx, so, n, BLOCK: tl.constexpr):
    r = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    v = tl.load(x + c, mask=c < n, other=0.0)
    at = o + r * sx + c
    tl.store(at, v + r, mask=c < n)
"""
ADDED = ROWS.replace("tl.store(at, v + r,", "tl.store(at, tl.load(at, mask=c < n) + r,")
TABLE = """@triton.jit
def table_kernel(table, cache, o, per_row, stride, D: tl.constexpr):
    b = tl.program_id(0)
    p = tl.program_id(1)
    d = tl.arange(0, D)
    page = tl.load(table + b * stride + p)
    tl.store(o + (b * per_row + p) * D + d, tl.load(cache + page * D + d))
"""
GATHER = """@triton.jit
def gather_kernel(x, ids, o, stride, n, D: tl.constexpr):
    i = tl.program_id(0)
    d = tl.arange(0, D)
    row = tl.load(ids + i)
    v = tl.load(x + row * stride + d, mask=d < n, other=0.0)
    tl.store(o + i * n + d, v, mask=d < n)
"""
TILE_ROWS = """@triton.jit
def tile_rows_kernel(x, o, by, n, BLOCK: tl.constexpr, D: tl.constexpr):
    p = tl.program_id(0)
    h = tl.arange(0, BLOCK)[:, None]
    start = p * BLOCK * by
    at = start + h * by + tl.arange(0, D)[None, :]
    tl.store(o + at, tl.load(x + at, mask=h < n) * 2.0, mask=h < n)
"""
PAGES = """@triton.jit
def pages_kernel(cache, slots, o, D: tl.constexpr):
    i = tl.program_id(0)
    d = tl.arange(0, D)
    slot = tl.load(slots + i)
    tl.store(o + i * D + d, tl.load(cache + (i // 2) * (3 * 16) + slot * 16 + d))
"""
ENDS = """@triton.jit
def ends_kernel(x, o, p, q, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(o + i, tl.load(x + i, mask=i < 100) * 2.0)
"""
SUMS = """@triton.jit
def sums_kernel(x, o, p, q, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(o + tl.program_id(0), tl.sum(tl.load(x + i)))
"""
BLOCKS = {"BM": 16, "BN": 16}
IDS = np.array([1, 5, 2, 0], np.int32)
PAGE_TABLE = np.array([[3, 1, 0], [2, 4, 5]], np.int32)

WIDE = Launch(TILE, floats(x=(44, 20), o=(44, 20)), {"M": 44, "N": 20}, (3, 2), BLOCKS)
TURNED = Launch(TURN, floats(x=(20, 45), o=(45, 20)), {"M": 20, "N": 45}, (2, 3), BLOCKS)
DEEP = Launch(
    DEPTH, floats(a=(32, 40), b=(40, 32), o=(32, 32)), {"M": 32, "N": 32, "K": 40}, (2, 2),
    {**BLOCKS, "BK": 16},
)  # fmt: skip
COPIED = Launch(COPY, floats(x=(100,), o=(100,)), {"n": 100}, (2,), {"BLOCK": 64})
PACKED = Launch(
    ROWS, floats(x=(50,), o=(8, 64)), {"sx": 32, "so": 64, "n": 50}, (8,), {"BLOCK": 64}
)
TABLED = Launch(
    TABLE, {"table": ("I32", (2, 3)), **floats(cache=(6, 16), o=(2, 3, 16))},
    {"per_row": 3, "stride": 4}, (2, 3), {"D": 16}, {"table": PAGE_TABLE},
)  # fmt: skip
GATHERED = Launch(
    GATHER, {**floats(x=(8, 50)), "ids": ("I32", (4,)), **floats(o=(4, 50))},
    {"stride": 100, "n": 50}, (4,), {"D": 64}, {"ids": IDS},
)  # fmt: skip
SLOTS = np.array([7, 1, 2, 0], np.int32)
PAGED = Launch(
    PAGES, {**floats(cache=(2, 3, 16)), "slots": ("I32", (4,)), **floats(o=(4, 16))}, {}, (4,),
    {"D": 16}, {"slots": SLOTS},
)  # fmt: skip
TILED_ROWS = Launch(
    TILE_ROWS, floats(x=(8, 16), o=(8, 16)), {"by": 16, "n": 4}, (3,), {"BLOCK": 4, "D": 16}
)
ENDED = Launch(ENDS, floats(x=(100,), o=(100,)), {"p": 70, "q": 80}, (2,), {"BLOCK": 64})
SUMMED = replace(ENDED, text=SUMS)


@dataclass(frozen=True)
class Expected:
    """What must be said of a launch; `fix` is how it begins.

    With `is_applied` the fix is data that leaves nothing to find. `num_alternatives` fit equally.
    With `has_more` the launch has another fault, which stands beside.
    """

    launch: Launch
    cause: Cause
    argument: str
    line: int
    fix: str
    is_applied: bool = True
    num_alternatives: int = 0
    has_more: bool = False


def is_false(root: RootCause, expected: Expected | None) -> bool:
    """Whether a cause says anything that is not so; with None all that is said is."""
    if expected is None:
        return True
    if root.argument != expected.argument:
        return True
    if root.cause is Cause.ACCESS_OUTSIDE:  # true, and little
        return False
    if (root.cause, root.line) != (expected.cause, expected.line):
        return True
    if root.alternatives:
        return not any(one.fix.startswith(expected.fix) for one in root.alternatives)
    if expected.num_alternatives or not root.fix.startswith(expected.fix):
        return True
    if not root.edits:
        return False
    left = applied(expected.launch, root.edits).diagnosis().roots
    # Of a launch with another fault only the access counts that the fix says it mends.
    return any(not expected.has_more or other.argument == expected.argument for other in left)


CASES = {
    "the bounds of two axes exchanged": Expected(
        TURNED, Cause.MISSING_MASK, "o", 7,
        "Compare `(c[:, None] < N) & (r[None, :] < M)` instead of "
        "`(c[:, None] < M) & (r[None, :] < N)`",
    ),
    "a bound of the other axis": Expected(
        replace(WIDE, text=TILE.replace("c[None, :] < N)", "c[None, :] < M)")),
        Cause.MISSING_MASK, "x", 6,
        "Mask the access with `c[None, :] < N` as well, in line 6 and in line 7",
    ),
    "the tail of the depth": Expected(
        DEEP, Cause.MISSING_MASK, "a", 8,
        "Mask the access with `k[None, :] < K` as well, in line 8; "
        "mask the access with `k[:, None] < K` as well, in line 9",
    ),
    "a load and a store of one line": Expected(
        replace(COPIED, text=COPY.replace(", mask=i < n", "")), Cause.MISSING_MASK, "x", 4,
        "Mask the access with `i < n`, at each access of line 4",
    ),
    "the stride of another tensor, by which rows run into each other": Expected(
        PACKED, Cause.WRONG_STRIDE, "sx", 7, "Pass sx = 64 instead of sx = 32",
    ),
    "the same where each element is added to": Expected(
        replace(PACKED, text=ADDED), Cause.WRONG_STRIDE, "sx", 7, "Pass sx = 64 instead of sx = 32",
    ),
    "a table read by another stride": Expected(
        TABLED, Cause.WRONG_STRIDE, "stride", 6, "Pass stride = 3 instead of stride = 4",
    ),
    "rows taken by another stride, with entries that are right": Expected(
        GATHERED, Cause.WRONG_STRIDE, "stride", 6, "Pass stride = 50 instead of stride = 100",
    ),
}  # fmt: skip


# -- programs that meet ----------------------------------------------------------------------------

SCATTER = """@triton.jit
def scatter_kernel(x, slots, o, n, D: tl.constexpr):
    i = tl.program_id(0)
    d = tl.arange(0, D)
    slot = tl.load(slots + i)
    tl.store(o + slot * n + d, tl.load(x + i * n + d, mask=d < n), mask=d < n)
"""
PACK = """@triton.jit
def pack_kernel(x, starts, o, T, D: tl.constexpr):
    b = tl.program_id(0)
    t = tl.program_id(1)
    d = tl.arange(0, D)
    row = tl.load(starts + b) + t
    tl.store(o + row * D + d, tl.load(x + (b * T + t) * D + d))
"""
SHARED = """@triton.jit
def shared_kernel(x, o, group, D: tl.constexpr):
    h = tl.program_id(0)
    d = tl.arange(0, D)
    at = h // group
    tl.store(o + at * D + d, tl.load(x + h * D + d))
"""
SLOTTED = Launch(
    SCATTER, {**floats(x=(4, 50)), "slots": ("I32", (4,)), **floats(o=(6, 50))}, {"n": 50}, (4,),
    {"D": 64}, {"slots": np.array([3, 1, 3, 0], np.int32)},
)  # fmt: skip
PACKING = Launch(
    PACK, {**floats(x=(3, 2, 16)), "starts": ("I32", (3,)), **floats(o=(5, 16))}, {"T": 2},
    (3, 2), {"D": 16}, {"starts": np.array([0, 1, 3], np.int32)},
)  # fmt: skip
GROUPED = Launch(SHARED, floats(x=(8, 16), o=(2, 16)), {"group": 4}, (8,), {"D": 16})

BY_ONE_STRIDE = Launch(
    """@triton.jit
def both_kernel(x, o, sx, so, n, BLOCK: tl.constexpr):
    r = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    v = tl.load(x + r * sx + c, mask=c < n, other=0.0)
    tl.store(o + r * sx + c, v, mask=c < n)
""",
    floats(x=(8, 64), o=(8, 50)), {"sx": 64, "so": 50, "n": 50}, (8,), {"BLOCK": 64},
)  # fmt: skip
HALVED = replace(
    GATHERED, text=GATHER.replace("tl.load(ids + i)", "tl.load(ids + i) // 2"),
    scalars={"stride": 50, "n": 50}, held={"ids": np.array([1, 20, 2, 0], np.int32)},
)  # fmt: skip
CASES |= {
    "a store that ends at none of the numbers that are passed": Expected(
        replace(ENDED, text=ENDS.replace("tl.load(x + i, mask=i < 100) * 2.0", "1.0")),
        Cause.MISSING_MASK, "o", 4, "Mask the access with `i < 100`",
    ),
    "a sum that ends at none of them": Expected(
        SUMMED, Cause.MISSING_MASK, "x", 4, "Mask the access with `i < 100`"
    ),
    "a stride of two tensors": Expected(
        BY_ONE_STRIDE, Cause.WRONG_STRIDE, "sx", 6, "Multiply by `so` instead of `sx`"
    ),
    "two numbers that are equal": Expected(
        replace(ENDED, text=ENDS.replace(", mask=i < 100", ""), scalars={"p": 100, "q": 100}),
        Cause.MISSING_MASK, "x", 4, "Mask the access with `i < p`", num_alternatives=2,
    ),
    "a slot behind the page that it is in": Expected(
        PAGED, Cause.INDEX_RANGE, "slots", 6, "Keep slots inside 0 to 2:", is_applied=False
    ),
    "a slot of all pages": Expected(
        replace(PAGED, text=PAGES.replace("(i // 2) * (3 * 16) + ", "")), Cause.INDEX_RANGE,
        "slots", 6, "Keep slots inside 0 to 5:", is_applied=False,
    ),
    "an entry that is divided": Expected(
        HALVED, Cause.INDEX_RANGE, "ids", 6,
        "Keep what ids holds inside the axis of x that it indexes", is_applied=False,
    ),
    "two entries that are equal": Expected(
        SLOTTED, Cause.PROGRAM_RACE, "o", 6,
        "Let no two entries of slots lead to one element of o", is_applied=False,
    ),
    "a row for several programs": Expected(
        GROUPED, Cause.PROGRAM_RACE, "o", 6, "Let one program write each element",
        is_applied=False,
    ),
}  # fmt: skip
GROUPS = """@triton.jit
def groups_kernel(x, s, o, width, GROUP: tl.constexpr):
    row, group = tl.program_id(0), tl.program_id(1)
    at = row * width + group * GROUP + tl.arange(0, GROUP)
    scale = tl.load(s + row * tl.num_programs(1) + group)
    tl.store(o + at, tl.load(x + at) * scale)
"""
HEADS = """@triton.jit
def heads_kernel(k, o, by_batch, by_token, by_head, T, H, D: tl.constexpr):
    b = tl.program_id(0) // T
    t = tl.program_id(0) % T
    d = tl.arange(0, D)
    for h in range(H):
        at = b * by_batch + t * by_token + h * by_head + d
        tl.store(o + at, tl.load(k + at))
"""
SCALE = """@triton.jit
def scale_kernel(x, grad, o, n, D: tl.constexpr):
    row = tl.program_id(0)
    d = tl.arange(0, D)
    g = tl.load(grad + row)
    tl.store(o + row * n + d, tl.load(x + row * n + d, mask=d < n) * g, mask=d < n)
"""
HEADED = Launch(
    HEADS, floats(k=(2, 5, 2, 16), o=(2, 5, 2, 16)),
    {"by_batch": 320, "by_token": 64, "by_head": 16, "T": 5, "H": 2}, (10,), {"D": 16},
)  # fmt: skip
SCALED = Launch(
    SCALE, floats(x=(8, 50), grad=(8,), o=(8, 50)), {"n": 50}, (8,), {"D": 64},
    strides={"grad": (0,)},
)  # fmt: skip
CASES |= {
    "a group that is longer than what is left of a row": Expected(
        Launch(GROUPS, floats(x=(5, 88), s=(5, 3), o=(5, 88)), {"width": 88}, (5, 3),
               {"GROUP": 32}),
        Cause.MISSING_MASK, "x", 6,
        "Mask the access with `group * GROUP + tl.arange(0, GROUP) < width`, at each access",
    ),
    "a fix of one of two accesses": Expected(
        Launch(ENDS + "    tl.store(x + 2 * i, 0.0)\n", floats(x=(100,), o=(100,)),
               {"p": 70, "q": 80}, (2,), {"BLOCK": 64}),
        Cause.MISSING_MASK, "o", 4,
        "Mask the access with `i < 100`, which mends this access alone", is_applied=False,
        has_more=True,
    ),
    "a lane that is counted from the start of its tile": Expected(
        replace(TILED_ROWS, tensors=floats(x=(6, 16), o=(6, 16)), scalars={"by": 16, "n": 6},
                grid=(2,)),
        Cause.MISSING_MASK, "x", 7,
        "Compare `p * BLOCK + h < n` instead of `h < n`: the address begins at the tile's start, "
        "at each access of line 7",
    ),
    "a number of lanes in each tile, and a tile too many": Expected(
        TILED_ROWS, Cause.MISSING_MASK, "x", 7, "Launch 2 programs along x",
    ),
    "two strides of a tensor with more heads": Expected(
        HEADED, Cause.WRONG_STRIDE, "by_batch", 8,
        "Pass by_batch = 160 and by_token = 32 instead of by_batch = 320 and by_token = 64",
    ),
    "one number for all rows, read row by row": Expected(
        SCALED, Cause.WRONG_STRIDE, "grad", 5, "Give the kernel the strides (0,) of grad",
        is_applied=False,
    ),
    # Six of eight rows: what is read is not all of what a packed tensor would hold.
    "an expanded tensor that is read past its end": Expected(
        replace(SCALED, grid=(6,)), Cause.ACCESS_OUTSIDE, "grad", 5, "Keep what this reaches",
        is_applied=False,
    ),
}  # fmt: skip
#: Where several things may be meant.
UNDECIDED = {
    "ranges of a table that overlap": PACKING,
    "programs that meet, and elements that nobody writes": replace(
        GROUPED, tensors=floats(x=(8, 16), o=(8, 16))
    ),
    "a stride that the text makes": replace(PACKED, text=ROWS.replace("r * sx", "r * (sx + 1)")),
    "a stride of the text, where elements are added to": replace(
        PACKED, text=ADDED.replace("r * sx", "r * (sx + 1)")
    ),
}
TWINS = {
    "lanes of tiles": replace(TILED_ROWS, grid=(2,)),
    "tiles": WIDE,
    "turned tiles": replace(
        TURNED,
        text=TURN.replace(
            "(c[:, None] < M) & (r[None, :] < N)", "(c[:, None] < N) & (r[None, :] < M)"
        ),
    ),
    "a copy": COPIED,
    "rows": replace(PACKED, scalars={"sx": 64, "so": 64, "n": 50}),
    "a table": replace(TABLED, scalars={"per_row": 3, "stride": 3}),
    "gathered rows": replace(GATHERED, scalars={"stride": 50, "n": 50}),
    "heads": replace(HEADED, scalars={**HEADED.scalars, "by_batch": 160, "by_token": 32}),
    "one number for all rows": replace(SCALED, text=SCALE.replace("grad + row", "grad")),
    "pages": replace(PAGED, held={"slots": np.array([2, 1, 2, 0], np.int32)}),
    "slots of their own": replace(SLOTTED, held={"slots": np.array([3, 1, 2, 0], np.int32)}),
}
