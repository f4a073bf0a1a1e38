"""What a compiler made of a kernel for a GPU that is not here."""

from __future__ import annotations

import msgspec

from hypocenter.base.refusals import AnyRefusal


class CompiledKernel(msgspec.Struct, frozen=True):
    """A kernel compiled for one architecture with no GPU, held against that GPU's limits.

    `ok` says that it would launch; else `problems` says why not, and where it did not compile the
    figures from `registers` on are None. Registers, `spills` (32-bit registers) and `scratch_bytes`
    are per thread, shared memory is per block; `loads` and `stores` map bits per thread to the
    number of such instructions on global memory.
    """

    kernel: str
    label: str
    arch: str
    guarded: bool
    ok: bool
    problems: tuple[AnyRefusal, ...]
    threads: int
    shared_limit: int
    registers: int | None = None
    scalar_registers: int | None = None
    accumulators: int | None = None
    spills: int | None = None
    scratch_bytes: int | None = None
    shared_bytes: int | None = None
    #: Resident waves over the most there can be, 0 to 1, and what keeps it below 1.
    occupancy: float | None = None
    waves_per_simd: float | None = None
    max_waves_per_simd: int | None = None
    limited_by: str | None = None
    loads: dict[int, int] = {}
    stores: dict[int, int] = {}
    num_instructions: int | None = None
