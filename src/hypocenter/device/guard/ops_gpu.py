"""Device side of guarded kernels: what stands in for tl.load, tl.store and the atomics.

Ordinary Triton functions, spliced in by `guard.py`; nothing here runs on the host. Each begins with
the same seven parameters (see `_allowed_lanes`), then takes what its namesake in
triton.language takes.
"""

# Not `from __future__ import annotations`: Triton reads the annotations of its functions.

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
FAULT_BIT = tl.constexpr(1 << 27)
NULL_BIT = tl.constexpr(1 << 26)


@triton.jit
def _distance(pointer, root, root_bytes):
    """Offset from `root` in bytes, and whether one element there leaves the `root_bytes` bytes."""
    size: tl.constexpr = (pointer.dtype.element_ty.primitive_bitwidth + 7) // 8
    offset = pointer.to(tl.int64) - root.to(tl.int64)
    room = tl.maximum(root_bytes - (size - 1), 0)  # none in an empty or null tensor
    return offset, offset.to(tl.uint64) >= room.to(tl.uint64)  # unsigned: both ends at once


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
def _verdict(SLOT: tl.constexpr, slots, root, root_bytes, root2, root2_bytes, pointer, mask):
    """True where a lane is outside every root and not masked; such a lane writes its word.

    A plain predicated 8-byte store: it never tears, and any offending lane will do. Atomics would
    cost several times as much on AMD. Two roots have two slots: the nearer one is blamed.
    """
    # The offset is bounded: a wild one spoils no program, and looks like none inside.
    if root2 is None:
        offset, bad = _distance(pointer, root, root_bytes)
        word = _head(root) | _tail(offset)
        slot = SLOT + bad.to(tl.int32) * 0  # one slot, in the shape of `bad`
    elif root is None:
        offset, bad = _distance(pointer, root2, root2_bytes)
        word = _head(root2) | _tail(offset)
        slot = SLOT + 1 + bad.to(tl.int32) * 0
    else:
        first, first_bad = _distance(pointer, root, root_bytes)
        second, second_bad = _distance(pointer, root2, root2_bytes)
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
def _all_of_group(good, LANES: tl.constexpr):
    """AND over aligned groups of LANES lanes of the last axis, and the compiler is told so.

    Without the hint every load becomes scalar: the address went through an integer. The AND comes
    first because the hint is a promise: Triton computes one lane of a group and uses it for all.
    """
    rank: tl.constexpr = len(good.shape)
    last: tl.constexpr = good.shape[rank - 1]
    lanes: tl.constexpr = LANES if last > LANES else last
    if lanes > 1 and rank <= 3:
        # No access of four axes is a vector here, and Triton 3.6 and 3.9 fail on some such ANDs.
        # The outer axes stay as they are: a flat [-1, lanes] would move data between threads.
        # Lists are written out where they are used: Triton 3.4 to 3.6 take no named ones.
        n: tl.constexpr = last // lanes
        is_good = good.to(tl.int32)
        if rank == 1:
            low = tl.min(tl.reshape(is_good, [n, lanes]), axis=1)
            same = tl.broadcast_to(low[:, None], [n, lanes])
            good = tl.max_constancy(tl.reshape(same, good.shape) != 0, [lanes])
        elif rank == 2:
            a: tl.constexpr = good.shape[0]
            low = tl.min(tl.reshape(is_good, [a, n, lanes]), axis=2)
            same = tl.broadcast_to(low[:, :, None], [a, n, lanes])
            good = tl.max_constancy(tl.reshape(same, good.shape) != 0, [1, lanes])
        else:
            a: tl.constexpr = good.shape[0]
            b: tl.constexpr = good.shape[1]
            low = tl.min(tl.reshape(is_good, [a, b, n, lanes]), axis=3)
            same = tl.broadcast_to(low[:, :, :, None], [a, b, n, lanes])
            good = tl.max_constancy(tl.reshape(same, good.shape) != 0, [1, 1, lanes])
    return good


@triton.jit
def _allowed_lanes(
    SLOT: tl.constexpr,
    GROUP_BYTES: tl.constexpr,
    slots,
    root,
    root_bytes,
    root2,
    root2_bytes,
    pointer,
    mask,
):
    """The mask of the lanes that may go through.

    SLOT: first word of the access's site in `slots` (int64). GROUP_BYTES: bytes of an aligned group
    of lanes that shares one verdict, so that loads stay wide; 0: each lane alone. `root`, `root2`:
    where the parameters begin that the pointer may come from, each with its extent in bytes.
    """
    bad = _verdict(SLOT, slots, root, root_bytes, root2, root2_bytes, pointer, mask)
    good = bad == 0  # also true for lanes that the caller masks: in a right program true everywhere
    if GROUP_BYTES > 0 and len(good.shape) > 0:
        size: tl.constexpr = (pointer.dtype.element_ty.primitive_bitwidth + 7) // 8
        good = _all_of_group(good, GROUP_BYTES // size)
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
    root2,
    root2_bytes,
    pointer,
    mask=None,
    other=None,
    cache_modifier: tl.constexpr = NO_OPTION,
    eviction_policy: tl.constexpr = NO_OPTION,
    volatile: tl.constexpr = False,
):
    """tl.load; a lane that is outside reads 0, or `other`."""
    good = _allowed_lanes(
        SLOT, GROUP_BYTES, slots, root, root_bytes, root2, root2_bytes, pointer, mask
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
    root2,
    root2_bytes,
    pointer,
    value,
    mask=None,
    cache_modifier: tl.constexpr = NO_OPTION,
    eviction_policy: tl.constexpr = NO_OPTION,
):
    """tl.store; a lane that is outside writes nothing."""
    good = _allowed_lanes(
        SLOT, GROUP_BYTES, slots, root, root_bytes, root2, root2_bytes, pointer, mask
    )
    tl.store(
        pointer, value, mask=good, cache_modifier=cache_modifier, eviction_policy=eviction_policy
    )


# The same parameters eleven times, kept short.
# fmt: off
@triton.jit
def atomic_add(
    SLOT: tl.constexpr, GROUP_BYTES: tl.constexpr, slots, root, root_bytes, root2, root2_bytes,
    pointer, val, mask=None, sem: tl.constexpr = None, scope: tl.constexpr = None,
):
    """tl.atomic_add; a lane that is outside changes nothing and returns 0."""
    good = _allowed_lanes(SLOT, 0, slots, root, root_bytes, root2, root2_bytes, pointer, mask)
    return tl.where(good, tl.atomic_add(pointer, val, mask=good, sem=sem, scope=scope), 0)


@triton.jit
def atomic_max(
    SLOT: tl.constexpr, GROUP_BYTES: tl.constexpr, slots, root, root_bytes, root2, root2_bytes,
    pointer, val, mask=None, sem: tl.constexpr = None, scope: tl.constexpr = None,
):
    good = _allowed_lanes(SLOT, 0, slots, root, root_bytes, root2, root2_bytes, pointer, mask)
    return tl.where(good, tl.atomic_max(pointer, val, mask=good, sem=sem, scope=scope), 0)


@triton.jit
def atomic_min(
    SLOT: tl.constexpr, GROUP_BYTES: tl.constexpr, slots, root, root_bytes, root2, root2_bytes,
    pointer, val, mask=None, sem: tl.constexpr = None, scope: tl.constexpr = None,
):
    good = _allowed_lanes(SLOT, 0, slots, root, root_bytes, root2, root2_bytes, pointer, mask)
    return tl.where(good, tl.atomic_min(pointer, val, mask=good, sem=sem, scope=scope), 0)


@triton.jit
def atomic_and(
    SLOT: tl.constexpr, GROUP_BYTES: tl.constexpr, slots, root, root_bytes, root2, root2_bytes,
    pointer, val, mask=None, sem: tl.constexpr = None, scope: tl.constexpr = None,
):
    good = _allowed_lanes(SLOT, 0, slots, root, root_bytes, root2, root2_bytes, pointer, mask)
    return tl.where(good, tl.atomic_and(pointer, val, mask=good, sem=sem, scope=scope), 0)


@triton.jit
def atomic_or(
    SLOT: tl.constexpr, GROUP_BYTES: tl.constexpr, slots, root, root_bytes, root2, root2_bytes,
    pointer, val, mask=None, sem: tl.constexpr = None, scope: tl.constexpr = None,
):
    good = _allowed_lanes(SLOT, 0, slots, root, root_bytes, root2, root2_bytes, pointer, mask)
    return tl.where(good, tl.atomic_or(pointer, val, mask=good, sem=sem, scope=scope), 0)


@triton.jit
def atomic_xor(
    SLOT: tl.constexpr, GROUP_BYTES: tl.constexpr, slots, root, root_bytes, root2, root2_bytes,
    pointer, val, mask=None, sem: tl.constexpr = None, scope: tl.constexpr = None,
):
    good = _allowed_lanes(SLOT, 0, slots, root, root_bytes, root2, root2_bytes, pointer, mask)
    return tl.where(good, tl.atomic_xor(pointer, val, mask=good, sem=sem, scope=scope), 0)


@triton.jit
def atomic_xchg(
    SLOT: tl.constexpr, GROUP_BYTES: tl.constexpr, slots, root, root_bytes, root2, root2_bytes,
    pointer, val, mask=None, sem: tl.constexpr = None, scope: tl.constexpr = None,
):
    good = _allowed_lanes(SLOT, 0, slots, root, root_bytes, root2, root2_bytes, pointer, mask)
    return tl.where(good, tl.atomic_xchg(pointer, val, mask=good, sem=sem, scope=scope), 0)


@triton.jit
def atomic_load(
    SLOT: tl.constexpr, GROUP_BYTES: tl.constexpr, slots, root, root_bytes, root2, root2_bytes,
    pointer, mask=None, sem: tl.constexpr = None, scope: tl.constexpr = None,
):
    good = _allowed_lanes(SLOT, 0, slots, root, root_bytes, root2, root2_bytes, pointer, mask)
    return tl.where(good, tl.atomic_load(pointer, mask=good, sem=sem, scope=scope), 0)


@triton.jit
def atomic_store(
    SLOT: tl.constexpr, GROUP_BYTES: tl.constexpr, slots, root, root_bytes, root2, root2_bytes,
    pointer, val, mask=None, sem: tl.constexpr = None, scope: tl.constexpr = None,
):
    good = _allowed_lanes(SLOT, 0, slots, root, root_bytes, root2, root2_bytes, pointer, mask)
    tl.atomic_store(pointer, val, mask=good, sem=sem, scope=scope)


@triton.jit
def atomic_cas(
    SLOT: tl.constexpr, GROUP_BYTES: tl.constexpr, slots, root, root_bytes, root2, root2_bytes,
    pointer, cmp, val, sem: tl.constexpr = None, scope: tl.constexpr = None,
):
    """tl.atomic_cas, which has no mask: a lane that is outside works on word 0 of the slots.

    It pretends to have succeeded: a loop that waits for a lock would otherwise never end.
    """
    good = _allowed_lanes(SLOT, 0, slots, root, root_bytes, root2, root2_bytes, pointer, None)
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
    root2,
    root2_bytes,
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
    bad = _verdict(SLOT, slots, root, root_bytes, root2, root2_bytes, low, some)
    bad = bad | _verdict(SLOT, slots, root, root_bytes, root2, root2_bytes, high, some)
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
