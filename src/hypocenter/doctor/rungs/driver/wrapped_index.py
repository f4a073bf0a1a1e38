"""An index that is inside of its table, and whose product with a row's length left 32 bits.

By its address alone such an index cannot be told from another one that is outside of the table:
the address is the same. The registers of the GPU decide, which hold what was loaded; else both are
told.
"""

from __future__ import annotations

from typing import Any

from hypocenter.doctor.case import Case
from hypocenter.doctor.causes import Cause
from hypocenter.doctor.diagnosis import Claim, Proof, RootCause, SolvedEntry, Verdict, proven, row
from hypocenter.record.bundle_index import LaunchMade
from hypocenter.record.gpu_stop import GpuWarp

NAME = "core dump"
_WORD = (1 << 32) - 1


def claims_of_wrapped(
    case: Case, use: LaunchMade, warp: GpuWarp, told: str, solution: Any, shown: str
) -> list[Claim] | None:
    """What follows where a wrapped product explains the address as well as the entry of `solution`.

    `shown` is the entry's name, and `told` what the dump says. None where the registers say that it
    is the entry of `solution` itself.
    """
    held = {register & _WORD for lane in warp.lanes for register in lane.registers}
    held |= {register & _WORD for register in warp.uniform}
    in_registers = [entry for entry in solution.wrapped if entry.value & _WORD in held]
    is_other_held = solution.value & _WORD in held
    if is_other_held and not in_registers:
        return None
    kernel, argument = use.launch.kernel, case.fact_of(use.launch, solution.entry.argument)
    if len(in_registers) != 1 or is_other_held or not in_registers[0].is_clean_wide:
        inside = " or ".join(str(entry.value) for entry in solution.wrapped)
        return [
            row(
                Cause.OFFSET_OVERFLOW,
                Verdict.INCONCLUSIVE,
                NAME,
                f"{told}; that is the address for {shown} = {inside}, which is inside of "
                f"{solution.target}, and of which the product leaves 32 bits",
                f"it is the address for {shown} = {solution.value} as well, which is outside; the "
                "registers of the warp hold neither, so that this one is not told from that; "
                "`hypo guard -- COMMAND` sees the index itself",
                would_refute=f"{shown} = {solution.value}",
                kernel=kernel,
                argument=argument,
            )
        ]
    wrapped = in_registers[0]
    return [_proven(case, use, told, solution, shown, wrapped)]


def _proven(
    case: Case, use: LaunchMade, told: str, solution: Any, shown: str, wrapped: Any
) -> Claim:
    entry, finding = solution.entry, wrapped.finding
    tensor = case.tensor_of(use.launch, solution.target)
    product = finding.origin.expression if finding.origin is not None else "the offset"
    at = finding.origin or finding.sites[0]
    values = ", ".join(f"{name} = {value}" for name, value in finding.values.items())
    root = RootCause(
        cause=Cause.OFFSET_OVERFLOW,
        sentence=f"{use.launch.kernel}: {shown} is {wrapped.value}, inside of {solution.target}, "
        f"and `{product}` leaves 32 bits for it",
        fix=f"Compute `{product}` in 64 bits: cast the index to int64 before it is multiplied",
        proof=Proof(
            f"{told}; registers of the warp hold {wrapped.value}, and the replay of that program "
            f"with {shown} = {wrapped.value} asks for the same address: {finding.detail}",
            f"{shown} as a number of 64 bits",
            "the same replay with it: nothing wrong at that line",
        ),
        kernel=use.launch.kernel,
        argument=case.fact_of(use.launch, solution.target),
        tensor=tensor.name if tensor is not None else None,
        file=at.file,
        line=at.line,
        expression=at.expression,
        place=use.place,
        finding=finding,
        entries=tuple(
            SolvedEntry(argument=entry.argument, index=index, value=value)
            for index, value in entry.elements(wrapped.value).items()
        ),
    )
    evidence = (f"at that lane {values}",) if values else ()
    tensors = (tensor.id,) if tensor is not None else ()
    return proven(root, NAME, evidence, "another entry that gives the address", use.seq, tensors)
