"""Triton kernel of the probe: every program does the same work, and says where it was done."""

from __future__ import annotations

from hypocenter.device.triton_lang import tl, triton


@triton.jit
def probe_kernel(
    start_ptr, out_ptr, where_ptr, rounds, SIDE: tl.constexpr, ON_NVIDIA: tl.constexpr
):
    """Formula: total = total + f16(x) @ f16(x) and x = 1 / (1 + e**(-total / 64)) - 1 / 2, in turn
    for `rounds` rounds from x = start; where = the number of the multiprocessor.
    Shapes: start f32 [SIDE, SIDE]; out f32 [num_programs, SIDE, SIDE]; where i32 [num_programs].
    """
    program = tl.program_id(0)
    place = tl.arange(0, SIDE)[:, None] * SIDE + tl.arange(0, SIDE)[None, :]
    x = tl.load(start_ptr + place)
    total = tl.zeros([SIDE, SIDE], tl.float32)
    for _ in range(rounds):
        halves = x.to(tl.float16)
        total += tl.dot(halves, halves)
        x = 1.0 / (1.0 + tl.exp(-total / 64.0)) - 0.5
    tl.store(out_ptr + program * SIDE * SIDE + place, total)
    if ON_NVIDIA:
        unit = tl.inline_asm_elementwise(
            "mov.u32 $0, %smid;", "=r", [], dtype=tl.int32, is_pure=True, pack=1
        )
        tl.store(where_ptr + program, unit)
