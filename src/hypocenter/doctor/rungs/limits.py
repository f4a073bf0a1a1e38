"""Rung: every launch against the limits of the GPU that it was for, as the bundle has them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from hypocenter.base.errors import LaunchRejected
from hypocenter.base.refusals import AnyRefusal
from hypocenter.device.limits import GpuLimits, check_launch
from hypocenter.doctor.case import Case
from hypocenter.doctor.causes import Cause, TestedBy, refutable
from hypocenter.doctor.diagnosis import Claim, Proof, RootCause, Verdict, proven, row
from hypocenter.record.bundle_index import LaunchMade

NAME = "limits"


def limits(case: Case) -> list[Claim]:
    """Launches that the GPU, or Triton without a word, would not have made as they were asked."""
    gpu = limits_of(case)
    if gpu is None:
        return []
    claims: list[Claim] = []
    seen: set[Any] = set()
    for use in (*case.launches, *case.index.refused):
        launch = use.launch
        key = (launch.kernel, launch.grid, launch.num_warps)
        if key in seen or not launch.grid:
            continue
        seen.add(key)
        if claim := _judge(gpu, use):
            claims.append(claim)
    confirmed = {claim.hypothesis.cause for claim in claims}
    if seen:
        claims += [
            row(
                cause,
                Verdict.REFUTED,
                NAME,
                f"grid and warps of {len(seen)} different launches are within the limits of "
                f"{gpu.product}",
                would_refute="a launch over a limit",
            )
            for cause in refutable(TestedBy.LIMITS)
            if cause not in confirmed
        ]
    return claims


def limits_of(case: Case) -> GpuLimits | None:
    """The bundle's limits; None for a CPU, and for fields of another version of them."""
    given = case.bundle.limits
    names = {field.name for field in dataclasses.fields(GpuLimits)}
    if given is None or set(given) != names:
        return None
    made: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in given.items()}
    return GpuLimits(**made)


def refusal(
    gpu: GpuLimits, kernel: str, grid: Any, num_warps: int, shared: int
) -> AnyRefusal | None:
    """Why the GPU would not make a launch; None when it would."""
    try:
        check_launch(gpu, kernel, grid, num_warps, shared)
    except LaunchRejected as error:
        return error.refusal
    return None


def _judge(gpu: GpuLimits, use: LaunchMade) -> Claim | None:
    launch = use.launch
    # Shared memory is known to the compiler alone, which refuses too much of it by itself.
    shared = launch.options.get("shared", 0)
    num_bytes = shared if isinstance(shared, int) else 0
    warps = launch.num_warps or 1
    red = refusal(gpu, launch.kernel, launch.grid, warps, num_bytes)
    if red is None:
        return None
    cause, argument, mended, fix = _mend(gpu, launch.grid, warps, num_bytes)
    if cause is Cause.GRID_PRODUCT and use.place is not None and _counts_some(launch.grid):
        return None
    green = refusal(gpu, launch.kernel, *mended)
    if green is not None:
        return None
    grid, new_warps, new_bytes = mended
    corrected = {
        "grid": f"grid {grid}",
        "num_warps": f"num_warps = {new_warps}",
        "shared memory": f"{new_bytes} bytes of shared memory",
    }[argument]
    root = RootCause(
        cause=cause,
        sentence=f"{launch.kernel}: {red}",
        fix=fix,
        kernel=launch.kernel,
        argument=argument,
        place=use.place,
        proof=Proof(
            f"the limits of {gpu.product} refuse the launch: {red}",
            corrected,
            f"the limits of {gpu.product} accept the same launch with {corrected}",
        ),
    )
    evidence = f"{use.where}: {launch.kernel}, grid {launch.grid}, {warps} warps"
    return proven(root, NAME, (evidence,), "a GPU whose limits accept the launch", use.seq)


def _counts_some(grid: tuple[int, ...]) -> bool:
    """Whether Triton makes a launch of too many programs: it leaves out those whose number, in a
    signed integer of 32 bits, is not above 0 (`launch` in its `driver.c`)."""
    return 0 < math.prod(grid) % (1 << 32) < 1 << 31


def _mend(
    gpu: GpuLimits, grid: tuple[int, ...], warps: int, shared: int
) -> tuple[Cause, str, tuple[tuple[int, ...], int, int], str]:
    """What is wrong, whose fault it is, the launch put right, and the fix."""
    most = gpu.max_grid_dims
    for axis, size in enumerate(grid):
        if size < 1:
            better = (*grid[:axis], 1, *grid[axis + 1 :])
            return (
                Cause.EMPTY_LAUNCH,
                "grid",
                (better, warps, shared),
                "Do not launch for an empty batch: return before the launch when there is nothing "
                "to do",
            )
        if size > most[axis]:
            better = (*grid[:axis], most[axis], *grid[axis + 1 :])
            way = "put the long axis first" if axis else "give each program more work"
            return (
                Cause.GRID_LIMIT,
                "grid",
                (_fit_grid(gpu, better), warps, shared),
                f"Keep grid[{axis}] at or below {most[axis]} (it was {size}): {way}",
            )
    if math.prod(grid) > gpu.max_programs:
        return (
            Cause.GRID_PRODUCT,
            "grid",
            (_fit_grid(gpu, grid), warps, shared),
            f"Split the launch: its {math.prod(grid)} programs do not fit the "
            f"{gpu.max_programs} that are counted in 32 bits",
        )
    most_warps = gpu.max_threads_per_block // gpu.wavefront
    fewest = min(warps, most_warps)
    if grid[0] * fewest * gpu.wavefront > gpu.max_threads_per_dim:
        fewest = max(gpu.max_threads_per_dim // (grid[0] * gpu.wavefront), 1)
    if fewest != warps:
        return (
            Cause.THREAD_LIMIT,
            "num_warps",
            (grid, fewest, shared),
            f"Launch with num_warps = {fewest} at most: {warps} warps of {gpu.wavefront} threads "
            f"are {warps * gpu.wavefront}, and {gpu.product} takes {gpu.max_threads_per_block}",
        )
    return (
        Cause.SHARED_MEMORY,
        "shared memory",
        (grid, warps, gpu.shared_limit_bytes),
        f"Use smaller tiles or fewer stages: {gpu.product} has {gpu.shared_limit_bytes} bytes of "
        f"shared memory, {shared} are asked for",
    )


def _fit_grid(gpu: GpuLimits, grid: tuple[int, ...]) -> tuple[int, ...]:
    """The grid with its largest axis cut until the product fits."""
    product = math.prod(grid)
    if product <= gpu.max_programs:
        return grid
    axis = max(range(len(grid)), key=lambda at: grid[at])
    rest = product // grid[axis]
    return (*grid[:axis], max(gpu.max_programs // rest, 1), *grid[axis + 1 :])
