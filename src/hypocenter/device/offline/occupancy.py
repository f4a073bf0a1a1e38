"""How many waves of a kernel a processor holds at once, and which resource ends it first.

One arithmetic for both vendors, from the table of `limits.py`; nothing is measured here.
"""

from __future__ import annotations

from dataclasses import dataclass

from hypocenter.device.limits import GpuLimits


@dataclass(frozen=True, slots=True)
class Occupancy:
    """`share` is resident waves over the most there can be; `limited_by` is empty at 1.

    `waves_by_registers` is what the registers alone would allow on each SIMD: the figure that
    LLVM prints.
    """

    num_blocks: int
    waves_per_simd: float
    share: float
    limited_by: str
    waves_by_registers: int


def occupancy(
    limits: GpuLimits, *, num_warps: int, registers: int, scalar_registers: int, shared_bytes: int
) -> Occupancy:
    """Occupancy of a kernel whose blocks have `num_warps` waves and `shared_bytes` each.

    `num_blocks` is 0 when not even one block fits.
    """
    by_vector = _waves_by_registers(limits, registers)
    by_scalar = _waves_by_scalars(limits, scalar_registers)
    waves = min(by_vector, by_scalar)
    shared = _round_up(shared_bytes, limits.shared_step_bytes) + limits.shared_reserved_bytes
    most = limits.max_waves_per_simd * limits.num_simds
    # In the order in which a tie is told: what a kernel's author can change comes first.
    blocks = {
        "registers" if by_vector <= by_scalar else "scalar registers": (
            waves * limits.num_simds // num_warps
        ),
        "shared memory": limits.shared_per_processor_bytes // shared if shared else most,
        # A block of one wave needs no barrier, so on AMD only waves bound the number of blocks.
        "blocks": most
        if limits.vendor == "amd" and num_warps == 1
        else limits.max_blocks_per_processor,
        "block size": most // num_warps,
    }
    limited_by = min(blocks, key=lambda name: blocks[name])
    resident = blocks[limited_by] * num_warps
    return Occupancy(
        num_blocks=blocks[limited_by],
        waves_per_simd=resident / limits.num_simds,
        share=resident / most,
        limited_by="" if resident == most else limited_by,
        waves_by_registers=waves,
    )


def _waves_by_registers(limits: GpuLimits, registers: int) -> int:
    rounded = _round_up(max(registers, 1), limits.register_step)
    return min(limits.registers_per_simd // rounded, limits.max_waves_per_simd)


def _waves_by_scalars(limits: GpuLimits, scalar_registers: int) -> int:
    if not limits.scalars_per_simd:
        return limits.max_waves_per_simd
    taken = _round_up(scalar_registers, limits.scalar_step) + limits.scalars_reserved
    return min(limits.scalars_per_simd // taken, limits.max_waves_per_simd)


def _round_up(number: int, step: int) -> int:
    return -(-number // step) * step
