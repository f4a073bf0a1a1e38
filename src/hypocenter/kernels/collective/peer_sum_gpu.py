"""Triton kernels by which two GPUs add up: each writes into memory of the other, and waits.

Both launch the same, so a program has one of its number on the other GPU. It counts its turns; the
two sides of the memory are taken in turn. Who sends turn n + 2 has had turn n + 1 of the other,
which was sent after turn n was read there, so no side is written while it is read.
"""

from __future__ import annotations

from hypocenter.device.triton_lang import tl, triton
from hypocenter.kernels.shared_gpu import follow, lead


@triton.jit
def sum_by_packets_kernel(
    x_ptr, here_ptr, there_ptr, turns_ptr, stop_ptr, num_values, side_size,
    OVERLAPS: tl.constexpr, BLOCK: tl.constexpr, LOOKS: tl.constexpr,
):  # fmt: skip
    """Formula: x = x + the other GPU's x.
    Shapes: x f32 [num_values]; here and there i64 [2 * side_size], packets that come and that
    go; turns i32 [num_programs]; stop i32 [1].
    Source: NCCL's protocol LL.

    A packet of 64 bits has a value and its turn, so it comes whole or not at all, and nothing
    has to be ordered.
    """
    lead(OVERLAPS)
    follow(OVERLAPS)
    program = tl.program_id(0)
    turn = tl.load(turns_ptr + program) + 1
    at = program * BLOCK + tl.arange(0, BLOCK)
    live = at < num_values
    own = tl.load(x_ptr + at, mask=live, other=0.0)
    packets = (turn.to(tl.int64) << 32) | (own.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF)
    start = (turn & 1) * side_size
    tl.store(there_ptr + start + at, packets, mask=live, cache_modifier=".wt")
    got = tl.load(here_ptr + start + at, mask=live, other=0, volatile=True)
    num_missing = tl.sum((live & ((got >> 32).to(tl.int32) != turn)).to(tl.int32))
    num_looks = 0
    while num_missing > 0:
        got = tl.load(here_ptr + start + at, mask=live, other=0, volatile=True)
        num_missing = tl.sum((live & ((got >> 32).to(tl.int32) != turn)).to(tl.int32))
        num_looks += 1
        if num_looks % LOOKS == 0:
            if tl.load(stop_ptr, volatile=True) != 0:
                num_missing = 0
    tl.store(x_ptr + at, own + got.to(tl.int32).to(tl.float32, bitcast=True), mask=live)
    tl.store(turns_ptr + program, turn)


@triton.jit
def sum_by_chunks_kernel(
    x_ptr, here_ptr, there_ptr, turns_ptr, stop_ptr, flags_here_ptr, flags_there_ptr, num_values,
    side_size, num_flags, OVERLAPS: tl.constexpr, BLOCK: tl.constexpr, LOOKS: tl.constexpr,
):  # fmt: skip
    """Formula: x = x + the other GPU's x.
    Shapes: x f32 [num_values]; here and there f32 [2 * side_size], what comes and what goes;
    flags_here and flags_there i32 [2 * num_flags]; turns i32 [num_programs]; stop i32 [1].

    Half as many bytes travel as in packets; a flag behind each chunk has its turn.
    """
    follow(OVERLAPS)
    program = tl.program_id(0)
    turn = tl.load(turns_ptr + program) + 1
    at = program * BLOCK + tl.arange(0, BLOCK)
    live = at < num_values
    own = tl.load(x_ptr + at, mask=live, other=0.0)
    start, flag = (turn & 1) * side_size, (turn & 1) * num_flags + program
    tl.store(there_ptr + start + at, own, mask=live, cache_modifier=".wt")
    tl.debug_barrier()
    tl.atomic_xchg(flags_there_ptr + flag, turn, sem="release", scope="sys")
    seen = tl.atomic_add(flags_here_ptr + flag, 0, sem="acquire", scope="sys")
    num_looks = 0
    while seen != turn:
        seen = tl.atomic_add(flags_here_ptr + flag, 0, sem="acquire", scope="sys")
        num_looks += 1
        if num_looks % LOOKS == 0:
            if tl.load(stop_ptr, volatile=True) != 0:
                seen = turn
    tl.debug_barrier()
    other = tl.load(here_ptr + start + at, mask=live, other=0.0, volatile=True)
    tl.store(x_ptr + at, own + other, mask=live)
    tl.store(turns_ptr + program, turn)
