"""Device side of guarded kernels: what stands in for tl.load, tl.store and the atomics.

Ordinary Triton functions, spliced in by `guard.py`; nothing here runs on the host. Each begins with
the same nine parameters (see `_allowed_lanes`), then takes what its namesake in
triton.language takes.
"""

# Not `from __future__ import annotations`: Triton reads the annotations of its functions.

from typing import Any

from hypocenter.device.triton_lang import tl, triton

#: Triton 3.4 to 3.6 refuse a bare string as default of a constexpr parameter.
NO_OPTION = tl.constexpr("")

#: A slot is one 64-bit word, 0 as long as nothing happened at its site:
#: bit 63 set, bit 62 the parameter is null, bits 36-61 program, bits 0-35 byte offset (signed).
OFFSET_BITS = tl.constexpr(36)
OFFSET_MASK = tl.constexpr((1 << 36) - 1)
#: The furthest that a word can tell; what is further away is told as this.
FARTHEST = tl.constexpr((1 << 35) - 1)
PROGRAM_MASK = tl.constexpr((1 << 26) - 1)
#: Bytes from row to row lie above the bytes of a row.
ROW_BITS = tl.constexpr(31)
ROW_MASK = tl.constexpr((1 << 31) - 1)
FAULT_BIT = tl.constexpr(1 << 27)
NULL_BIT = tl.constexpr(1 << 26)


def num_threads(_semantic: Any = None) -> Any:
    """Threads of a program; 1 in an interpreter, which gives no compiler's hand."""
    if _semantic is None:
        return 1
    options = _semantic.builder.options
    # Triton 3.4 has a warp size for AMD only.
    return tl.constexpr(options.num_warps * getattr(options, "warp_size", 32))


# Not the decorator `tl.core.builtin`: it refuses calls out of an interpreter.
setattr(num_threads, tl.core.TRITON_BUILTIN, True)


@triton.jit
def _distance(pointer, root, root_bytes, root_rows):
    """Offset from `root` in bytes, and whether one element there leaves the `root_bytes` bytes.

    Or whether it leaves a row, where `root_rows` is known: the bytes from one row to the next, and
    in the lower bits those of a row.
    """
    size: tl.constexpr = (pointer.dtype.element_ty.primitive_bitwidth + 7) // 8
    offset = pointer.to(tl.int64) - root.to(tl.int64)
    room = tl.maximum(root_bytes - (size - 1), 0)  # none in an empty or null tensor
    bad = offset.to(tl.uint64) >= room.to(tl.uint64)  # unsigned: both ends at once
    if root_rows is not None:
        in_row = tl.where(bad, 0, offset) % (root_rows >> ROW_BITS)
        bad = bad | (in_row > (root_rows & ROW_MASK) - size)
    return offset, bad


@triton.jit
def _head(root):
    """The upper 28 bits of a fault word: program and null flag."""
    row = tl.program_id(1) + tl.num_programs(1) * tl.program_id(2)
    program = tl.program_id(0) + tl.num_programs(0) * row
    null = (root.to(tl.int64) == 0).to(tl.int64) * NULL_BIT
    return ((program.to(tl.int64) & PROGRAM_MASK) | FAULT_BIT | null) << OFFSET_BITS


@triton.jit
def _tail(offset):
    """The lower 36 bits of a fault word."""
    return tl.minimum(tl.maximum(offset, -FARTHEST - 1), FARTHEST) & OFFSET_MASK


@triton.jit
def _verdict(
    SLOT: tl.constexpr,
    slots,
    root,
    root_bytes,
    root_rows,
    root2,
    root2_bytes,
    root2_rows,
    pointer,
    mask,
):
    """True where a lane is outside every root and not masked; such a lane writes its word.

    A plain predicated 8-byte store: it never tears, and any offending lane will do. Atomics would
    cost several times as much on AMD. Two roots have two slots: the nearer one is blamed.
    """
    # The offset is bounded: a wild one spoils no program, and looks like none inside.
    if root2 is None:
        offset, bad = _distance(pointer, root, root_bytes, root_rows)
        word = _head(root) | _tail(offset)
        slot = SLOT + bad.to(tl.int32) * 0  # one slot, in the shape of `bad`
    elif root is None:
        offset, bad = _distance(pointer, root2, root2_bytes, root2_rows)
        word = _head(root2) | _tail(offset)
        slot = SLOT + 1 + bad.to(tl.int32) * 0
    else:
        first, first_bad = _distance(pointer, root, root_bytes, root_rows)
        second, second_bad = _distance(pointer, root2, root2_bytes, root2_rows)
        bad = first_bad & second_bad
        beyond = tl.where(first < 0, -first, first - root_bytes)
        beyond2 = tl.where(second < 0, -second, second - root2_bytes)
        nearer2 = beyond2 < beyond
        word = tl.where(nearer2, _head(root2), _head(root))
        word = word | _tail(tl.where(nearer2, second, first))
        slot = SLOT + nearer2.to(tl.int32)
    if mask is not None:
        bad = bad & mask
    tl.store(slots + slot, word, mask=bad)
    return bad


@triton.jit
def _hint(good, LANES: tl.constexpr):
    """`good` as booleans, which the compiler is told are equal in a group of LANES lanes.

    Without the hint every load becomes scalar: the address went through an integer. The hint is a
    promise: Triton computes one lane of a group and uses it for all.
    """
    rank: tl.constexpr = len(good.shape)
    if rank == 1:
        good = tl.max_constancy(good != 0, [LANES])
    elif rank == 2:
        good = tl.max_constancy(good != 0, [1, LANES])
    else:
        good = tl.max_constancy(good != 0, [1, 1, LANES])
    return good


@triton.jit
def _all_of_group(good, LANES: tl.constexpr):
    """AND over aligned groups of LANES lanes of the last axis."""
    rank: tl.constexpr = len(good.shape)
    n: tl.constexpr = good.shape[rank - 1] // LANES
    is_good = good.to(tl.int32)
    # The outer axes stay as they are: a flat [-1, LANES] would move data between threads.
    # Lists are written out where they are used: Triton 3.4 to 3.6 take no named ones.
    if rank == 1:
        low = tl.min(tl.reshape(is_good, [n, LANES]), axis=1)
        same = tl.broadcast_to(low[:, None], [n, LANES])
    elif rank == 2:
        a: tl.constexpr = good.shape[0]
        low = tl.min(tl.reshape(is_good, [a, n, LANES]), axis=2)
        same = tl.broadcast_to(low[:, :, None], [a, n, LANES])
    else:
        a: tl.constexpr = good.shape[0]
        b: tl.constexpr = good.shape[1]
        low = tl.min(tl.reshape(is_good, [a, b, n, LANES]), axis=3)
        same = tl.broadcast_to(low[:, :, :, None], [a, b, n, LANES])
    return _hint(tl.reshape(same, good.shape), LANES)


@triton.jit
def _pairs(values):
    """The even lanes of the last axis, and the odd ones."""
    rank: tl.constexpr = len(values.shape)
    n: tl.constexpr = values.shape[rank - 1] // 2
    if rank == 1:
        even, odd = tl.split(tl.reshape(values, [n, 2]))
    elif rank == 2:
        even, odd = tl.split(tl.reshape(values, [values.shape[0], n, 2]))
    else:
        even, odd = tl.split(tl.reshape(values, [values.shape[0], values.shape[1], n, 2]))
    return even, odd


@triton.jit
def _double(values):
    """Each lane of the last axis twice."""
    rank: tl.constexpr = len(values.shape)
    n: tl.constexpr = values.shape[rank - 1] * 2
    both = tl.join(values, values)
    if rank == 1:
        twice = tl.reshape(both, [n])
    elif rank == 2:
        twice = tl.reshape(both, [values.shape[0], n])
    else:
        twice = tl.reshape(both, [values.shape[0], values.shape[1], n])
    return twice


@triton.jit
def _group_verdict(SLOT: tl.constexpr, LANES: tl.constexpr, slots, root, root_bytes, pointer, mask):
    """True where no lane of the group is outside and not masked; any other group writes its word.

    As unsigned numbers the offsets before the root are the largest. So a group is inside if its
    largest offset is, and if it is not, that is the offset of a lane outside. A maximum costs less
    than a verdict and a word for each lane.

    The shape of this code is what the compiler makes of it. A split says that one thread owns both
    halves, and a join undoes it: so the check has the load's own layout. With a reduction in place
    of the splits, or a broadcast in place of the joins, Triton computes everything twice.
    """
    size: tl.constexpr = (pointer.dtype.element_ty.primitive_bitwidth + 7) // 8
    room = tl.maximum(root_bytes - (size - 1), 0)  # as in `_distance`
    largest = (pointer.to(tl.int64) - root.to(tl.int64)).to(tl.uint64)
    counts = tl.full(pointer.shape, 1, tl.int1)
    if mask is not None:
        counts = counts & mask
        largest = tl.where(counts, largest, 0).to(tl.uint64)  # the smallest offset of all
    for level in tl.static_range(8):
        if (LANES >> level) > 1:
            even, odd = _pairs(largest)
            largest = tl.maximum(even, odd)
            even_counts, odd_counts = _pairs(counts)
            counts = even_counts | odd_counts
    # An empty tensor has not even room for the 0 of a masked lane: some lane has to count.
    bad = counts & (largest >= room.to(tl.uint64))
    # Flat: of words in rows and columns, Triton 3.6 gives a thread others than those it checked.
    told = tl.reshape(bad, [bad.numel])
    word = _head(root) | _tail(tl.reshape(largest, [bad.numel]).to(tl.int64))
    tl.store(slots + (SLOT + told.to(tl.int32) * 0), word, mask=told)
    good = (bad == 0).to(tl.int32)
    for level in tl.static_range(8):
        if (LANES >> level) > 1:
            good = _double(good)
    return _hint(good, LANES)


@triton.jit
def _allowed_lanes(
    SLOT: tl.constexpr,
    GROUP_BYTES: tl.constexpr,
    slots,
    root,
    root_bytes,
    root_rows,
    root2,
    root2_bytes,
    root2_rows,
    pointer,
    mask,
):
    """The mask of the lanes that may go through.

    SLOT: first word of the access's site in `slots` (int64). GROUP_BYTES: bytes of an aligned group
    of lanes that shares one verdict, so that loads stay wide; 0: each lane alone. `root`, `root2`:
    where the parameters begin that the pointer may come from, each with its extent in bytes, and
    with its rows where it is a view that has such (see `_distance`).
    """
    size: tl.constexpr = (pointer.dtype.element_ty.primitive_bitwidth + 7) // 8
    rank: tl.constexpr = len(pointer.shape)
    last: tl.constexpr = pointer.shape[rank - 1] if rank > 0 else 1
    group: tl.constexpr = GROUP_BYTES // size
    lanes: tl.constexpr = last if group > last else group
    # No access of four axes is a vector here, and Triton 3.6 and 3.9 fail on some such ANDs.
    grouped: tl.constexpr = lanes > 1 and rank <= 3
    # With less than a group, a thread would work for its neighbours. And lanes of two roots may
    # alternate: an offset from the one says nothing about the other.
    one_root: tl.constexpr = root is None or root2 is None
    # The largest offset of a group says whether it is inside, and nothing of rows.
    no_rows: tl.constexpr = root_rows is None and root2_rows is None
    if grouped and one_root and no_rows and pointer.numel // lanes >= num_threads():
        if root2 is None:
            good = _group_verdict(SLOT, lanes, slots, root, root_bytes, pointer, mask)
        else:
            good = _group_verdict(SLOT + 1, lanes, slots, root2, root2_bytes, pointer, mask)
    else:
        bad = _verdict(
            SLOT, slots, root, root_bytes, root_rows, root2, root2_bytes, root2_rows, pointer, mask
        )
        # Also true for lanes that the caller masks: in a right program true everywhere.
        good = bad == 0
        if grouped:
            good = _all_of_group(good, lanes)
    if mask is not None:
        good = mask & good
    return good


@triton.jit
def load(
    SLOT: tl.constexpr,
    GROUP_BYTES: tl.constexpr,
    slots,
    root,
    root_bytes,
    root_rows,
    root2,
    root2_bytes,
    root2_rows,
    pointer,
    mask=None,
    other=None,
    cache_modifier: tl.constexpr = NO_OPTION,
    eviction_policy: tl.constexpr = NO_OPTION,
    volatile: tl.constexpr = False,
):
    """tl.load; a lane that is outside reads 0, or `other`."""
    good = _allowed_lanes(
        SLOT,
        GROUP_BYTES,
        slots,
        root,
        root_bytes,
        root_rows,
        root2,
        root2_bytes,
        root2_rows,
        pointer,
        mask,
    )
    if other is None:
        # A float zero: a cast from int to an 8-bit float does not exist on every target.
        zero: tl.constexpr = 0.0 if pointer.dtype.element_ty.is_floating() else 0
        value = tl.load(
            pointer,
            mask=good,
            other=zero,
            cache_modifier=cache_modifier,
            eviction_policy=eviction_policy,
            volatile=volatile,
        )
    else:
        value = tl.load(
            pointer,
            mask=good,
            other=other,
            cache_modifier=cache_modifier,
            eviction_policy=eviction_policy,
            volatile=volatile,
        )
    return value


@triton.jit
def store(
    SLOT: tl.constexpr,
    GROUP_BYTES: tl.constexpr,
    slots,
    root,
    root_bytes,
    root_rows,
    root2,
    root2_bytes,
    root2_rows,
    pointer,
    value,
    mask=None,
    cache_modifier: tl.constexpr = NO_OPTION,
    eviction_policy: tl.constexpr = NO_OPTION,
):
    """tl.store; a lane that is outside writes nothing."""
    good = _allowed_lanes(
        SLOT,
        GROUP_BYTES,
        slots,
        root,
        root_bytes,
        root_rows,
        root2,
        root2_bytes,
        root2_rows,
        pointer,
        mask,
    )
    tl.store(
        pointer, value, mask=good, cache_modifier=cache_modifier, eviction_policy=eviction_policy
    )


# The same parameters eleven times, kept short.
# fmt: off
@triton.jit
def atomic_add(
    SLOT: tl.constexpr, GROUP_BYTES: tl.constexpr, slots,
    root, root_bytes, root_rows, root2, root2_bytes, root2_rows,
    pointer, val, mask=None, sem: tl.constexpr = None, scope: tl.constexpr = None,
):
    """tl.atomic_add; a lane that is outside changes nothing and returns 0."""
    good = _allowed_lanes(
        SLOT, 0, slots, root, root_bytes, root_rows, root2, root2_bytes, root2_rows, pointer, mask
    )
    return tl.where(good, tl.atomic_add(pointer, val, mask=good, sem=sem, scope=scope), 0)


@triton.jit
def atomic_max(
    SLOT: tl.constexpr, GROUP_BYTES: tl.constexpr, slots,
    root, root_bytes, root_rows, root2, root2_bytes, root2_rows,
    pointer, val, mask=None, sem: tl.constexpr = None, scope: tl.constexpr = None,
):
    good = _allowed_lanes(
        SLOT, 0, slots, root, root_bytes, root_rows, root2, root2_bytes, root2_rows, pointer, mask
    )
    return tl.where(good, tl.atomic_max(pointer, val, mask=good, sem=sem, scope=scope), 0)


@triton.jit
def atomic_min(
    SLOT: tl.constexpr, GROUP_BYTES: tl.constexpr, slots,
    root, root_bytes, root_rows, root2, root2_bytes, root2_rows,
    pointer, val, mask=None, sem: tl.constexpr = None, scope: tl.constexpr = None,
):
    good = _allowed_lanes(
        SLOT, 0, slots, root, root_bytes, root_rows, root2, root2_bytes, root2_rows, pointer, mask
    )
    return tl.where(good, tl.atomic_min(pointer, val, mask=good, sem=sem, scope=scope), 0)


@triton.jit
def atomic_and(
    SLOT: tl.constexpr, GROUP_BYTES: tl.constexpr, slots,
    root, root_bytes, root_rows, root2, root2_bytes, root2_rows,
    pointer, val, mask=None, sem: tl.constexpr = None, scope: tl.constexpr = None,
):
    good = _allowed_lanes(
        SLOT, 0, slots, root, root_bytes, root_rows, root2, root2_bytes, root2_rows, pointer, mask
    )
    return tl.where(good, tl.atomic_and(pointer, val, mask=good, sem=sem, scope=scope), 0)


@triton.jit
def atomic_or(
    SLOT: tl.constexpr, GROUP_BYTES: tl.constexpr, slots,
    root, root_bytes, root_rows, root2, root2_bytes, root2_rows,
    pointer, val, mask=None, sem: tl.constexpr = None, scope: tl.constexpr = None,
):
    good = _allowed_lanes(
        SLOT, 0, slots, root, root_bytes, root_rows, root2, root2_bytes, root2_rows, pointer, mask
    )
    return tl.where(good, tl.atomic_or(pointer, val, mask=good, sem=sem, scope=scope), 0)


@triton.jit
def atomic_xor(
    SLOT: tl.constexpr, GROUP_BYTES: tl.constexpr, slots,
    root, root_bytes, root_rows, root2, root2_bytes, root2_rows,
    pointer, val, mask=None, sem: tl.constexpr = None, scope: tl.constexpr = None,
):
    good = _allowed_lanes(
        SLOT, 0, slots, root, root_bytes, root_rows, root2, root2_bytes, root2_rows, pointer, mask
    )
    return tl.where(good, tl.atomic_xor(pointer, val, mask=good, sem=sem, scope=scope), 0)


@triton.jit
def atomic_xchg(
    SLOT: tl.constexpr, GROUP_BYTES: tl.constexpr, slots,
    root, root_bytes, root_rows, root2, root2_bytes, root2_rows,
    pointer, val, mask=None, sem: tl.constexpr = None, scope: tl.constexpr = None,
):
    good = _allowed_lanes(
        SLOT, 0, slots, root, root_bytes, root_rows, root2, root2_bytes, root2_rows, pointer, mask
    )
    return tl.where(good, tl.atomic_xchg(pointer, val, mask=good, sem=sem, scope=scope), 0)


@triton.jit
def atomic_load(
    SLOT: tl.constexpr, GROUP_BYTES: tl.constexpr, slots,
    root, root_bytes, root_rows, root2, root2_bytes, root2_rows,
    pointer, mask=None, sem: tl.constexpr = None, scope: tl.constexpr = None,
):
    good = _allowed_lanes(
        SLOT, 0, slots, root, root_bytes, root_rows, root2, root2_bytes, root2_rows, pointer, mask
    )
    return tl.where(good, tl.atomic_load(pointer, mask=good, sem=sem, scope=scope), 0)


@triton.jit
def atomic_store(
    SLOT: tl.constexpr, GROUP_BYTES: tl.constexpr, slots,
    root, root_bytes, root_rows, root2, root2_bytes, root2_rows,
    pointer, val, mask=None, sem: tl.constexpr = None, scope: tl.constexpr = None,
):
    good = _allowed_lanes(
        SLOT, 0, slots, root, root_bytes, root_rows, root2, root2_bytes, root2_rows, pointer, mask
    )
    tl.atomic_store(pointer, val, mask=good, sem=sem, scope=scope)


@triton.jit
def atomic_cas(
    SLOT: tl.constexpr, GROUP_BYTES: tl.constexpr, slots,
    root, root_bytes, root_rows, root2, root2_bytes, root2_rows,
    pointer, cmp, val, sem: tl.constexpr = None, scope: tl.constexpr = None,
):
    """tl.atomic_cas, which has no mask: a lane that is outside works on word 0 of the slots.

    It pretends to have succeeded: a loop that waits for a lock would otherwise never end.
    """
    good = _allowed_lanes(
        SLOT, 0, slots, root, root_bytes, root_rows, root2, root2_bytes, root2_rows, pointer, None
    )
    # Chosen as an integer: AMD's passes of Triton 3.6 cannot choose between pointers.
    there = tl.where(good, pointer.to(tl.int64), slots.to(tl.int64)).to(pointer.dtype)
    old = tl.atomic_cas(there, cmp, val, sem=sem, scope=scope)
    return tl.where(good, old, cmp).to(old.dtype)
# fmt: on


@triton.jit
def make_tensor_descriptor(
    SLOT: tl.constexpr,
    GROUP_BYTES: tl.constexpr,
    slots,
    root,
    root_bytes,
    root_rows,
    root2,
    root2_bytes,
    root2_rows,
    base,
    shape,
    strides,
    block_shape: tl.constexpr,
    padding_option: tl.constexpr = None,
):
    """tl.make_tensor_descriptor; one that describes bytes outside its tensor describes nothing.

    The descriptor itself keeps each access inside its shape, so its two corners are all there is to
    check. An empty shape touches nothing and is never a fault.
    """
    rank: tl.constexpr = len(block_shape)
    lowest = tl.full([], 0, tl.int64)
    highest = tl.full([], 0, tl.int64)
    some = tl.full([], 1, tl.int1)
    for axis in tl.static_range(rank):
        extent = tl.full([], shape[axis], tl.int64)  # a literal or a scalar
        reach = (extent - 1) * tl.full([], strides[axis], tl.int64)
        lowest += tl.minimum(reach, 0)
        highest += tl.maximum(reach, 0)
        some = some & (extent > 0)
    low = base + lowest
    high = base + highest
    bad = _verdict(
        SLOT, slots, root, root_bytes, root_rows, root2, root2_bytes, root2_rows, low, some
    )
    bad = bad | _verdict(
        SLOT, slots, root, root_bytes, root_rows, root2, root2_bytes, root2_rows, high, some
    )
    rows = tl.where(bad, 0, tl.full([], shape[0], tl.int64)).to(tl.int32)
    if rank == 1:
        checked = [rows]
    elif rank == 2:
        checked = [rows, shape[1]]
    elif rank == 3:
        checked = [rows, shape[1], shape[2]]
    elif rank == 4:
        checked = [rows, shape[1], shape[2], shape[3]]
    else:
        checked = [rows, shape[1], shape[2], shape[3], shape[4]]
    if padding_option is None:
        made = tl.make_tensor_descriptor(base, checked, strides, block_shape)
    else:
        made = tl.make_tensor_descriptor(base, checked, strides, block_shape, padding_option)
    return made


#: Name in triton.language to its guarded form; what this Triton lacks is left out.
GUARDED = {
    name: form
    for name, form in {
        "load": load,
        "store": store,
        "atomic_add": atomic_add,
        "atomic_and": atomic_and,
        "atomic_cas": atomic_cas,
        "atomic_load": atomic_load,
        "atomic_max": atomic_max,
        "atomic_min": atomic_min,
        "atomic_or": atomic_or,
        "atomic_store": atomic_store,
        "atomic_xchg": atomic_xchg,
        "atomic_xor": atomic_xor,
        "make_tensor_descriptor": make_tensor_descriptor,
    }.items()
    if hasattr(tl, name)
}
