"""Replays a prepared GPU launch on copies of its arguments: which lane, which index, which values.

A guarded launch says that an access left its tensor, and in which program; the replay of that one
program says why. The device's own memory is only read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from hypocenter.base.errors import AccessRefused, HypoError, UsageError
from hypocenter.base.tensor import Tensor
from hypocenter.device import devices
from hypocenter.device.interpret.interpret import Pointer
from hypocenter.device.offline.specimen import of_device
from hypocenter.record.guard_faults import AccessFault
from hypocenter.replay.findings import ReplayReport
from hypocenter.replay.replay import replay
from hypocenter.replay.terms import Schedule
from hypocenter.replay.text import finding_text

if TYPE_CHECKING:  # it brings the compiler of CPU kernels along
    from hypocenter.device.launch import Launch

#: Of one step so many places are told; the first is the one that matters most.
_MAX_TOLD, _MAX_LISTED = 3, 8
_MAX_SECONDS = 20.0


def replay_launch(launch: Launch, program: tuple[int, int, int] | None = None) -> ReplayReport:
    """Run a launch, or one program of it, on the CPU with every access checked.

    Of a launch that would take longer than 20 s a sample of the programs runs.
    Waits for everything launched before, then copies the arguments as they are now: a kernel that
    works in place should be replayed before it has run. Raises UsageError for a CPU kernel.
    """
    if launch.jit is None:
        raise UsageError(f"{launch.kernel} runs on the CPU; replay is for GPU kernels")
    grid = launch.options["grid"]
    names = [name for name in launch.jit.arg_names if name not in launch.options]
    arguments = {
        name: _copy_bytes(launch, name, value) if name in launch.extents else value
        for name, value in zip(names, launch.args, strict=True)
    }
    constants = {name: launch.options[name] for name in launch.jit.arg_names if name not in names}
    constants |= of_device(constants, is_nvidia=False, overlaps=False)
    programs = None if program is None else [_linear(program, grid)]
    return replay(
        launch.jit,
        grid,
        {**arguments, **constants},
        schedule=Schedule(
            programs,
            budget_seconds=_MAX_SECONDS if programs is None else None,
            num_warps=launch.options.get("num_warps"),
        ),
    )


def explain(fault: AccessFault, launch: Launch) -> ReplayReport:
    """The replay of the program that a guarded launch reported; of all programs if it has none."""
    return replay_launch(launch, fault.program)


def explain_refused(refused: AccessRefused) -> str:
    """What guarded launches reported, as text, each fault with the replay of its program.

    To be called before anything else runs: the replay reads the arguments as they are now.
    """
    places: dict[tuple[str, str, int], list[tuple[AccessFault, str]]] = {}
    for fault, text in zip(refused.faults, refused.texts, strict=True):
        assert isinstance(fault, AccessFault)
        place = fault.kernel, fault.parameter, fault.site.slot
        places.setdefault(place, []).append((fault, text))
    parts = []
    for same in list(places.values())[:_MAX_TOLD]:
        parts.append(_explain(*same[0], refused.launches))
        if len(same) > 1:
            others = ", ".join(str(fault.launch + 1) for fault, _ in same[1 : 1 + _MAX_LISTED])
            more = ", ..." if len(same) > 1 + _MAX_LISTED else ""
            parts.append(f"  the same in {len(same) - 1} more: launch {others}{more}")
    if len(places) > _MAX_TOLD:
        parts.append(f"and accesses at {len(places) - _MAX_TOLD} more places")
    return "\n".join(parts)


def _explain(fault: AccessFault, text: str, launches: tuple[object, ...]) -> str:
    launch = launches[fault.launch] if 0 <= fault.launch < len(launches) else None
    from hypocenter.device.launch import Launch

    if not isinstance(launch, Launch):
        return f"{text}\n  not replayed: the step that made this launch was interrupted"
    lines = [text, f"  launch {fault.launch + 1} of the step's {len(launches)}"]
    if tensor := _tensor_behind(launch, fault.parameter):
        lines.append(f"  {fault.parameter} is {tensor.name} of {tensor.owner}: {tensor}")
    try:
        report = explain(fault, launch)
    except HypoError as error:
        return "\n".join([*lines, f"  not replayed: {error}"])
    which = f"program {fault.program}" if fault.program else f"{report.coverage.num_run} programs"
    same = [finding for finding in report.findings if finding.argument == fault.parameter]
    if not same:
        lines.append(
            f"  replay of {which}: no access leaves {fault.parameter}; what decides it has changed "
            "since the launch ran"
        )
        return "\n".join(lines)
    lines.append(f"  replay of {which}:")
    lines += [f"    {line}" for line in finding_text(same[0]).splitlines()]
    return "\n".join(lines)


def _tensor_behind(launch: Launch, parameter: str) -> Tensor | None:
    """The tensor of the launch that a pointer parameter points into, when it is one alone."""
    names = [name for name in launch.jit.arg_names if name not in launch.options]
    address = _address(launch.args[names.index(parameter)])
    inside = [
        tensor
        for tensor in launch.tensors.values()
        if tensor.allocation.address
        <= address
        < tensor.allocation.address + max(tensor.allocation.num_bytes, 1)
    ]
    first = [tensor for tensor in inside if tensor.address == address] or inside
    return first[0] if len({tensor.name for tensor in first}) == 1 else None


def _address(value: Any) -> int:
    return value.address if isinstance(value, Pointer) else int(value.data_ptr())


def _copy_bytes(launch: Launch, name: str, value: Any) -> torch.Tensor:
    """The bytes that a pointer argument may reach, as a CPU tensor of its element type."""
    extent = launch.extents[name]
    dtype = getattr(torch, value.dtype) if isinstance(value, Pointer) else value.dtype
    data = devices.backend_of(launch.device).copy_out(_address(value), extent)
    flat = (
        torch.frombuffer(bytearray(data.tobytes()), dtype=dtype)
        if extent
        else torch.empty(0, dtype=dtype)
    )
    tensor = _tensor_behind(launch, name)
    if tensor is None or tensor.address != _address(value) or tensor.extent_bytes != extent:
        return flat  # a part of a packed weight
    return flat.as_strided(tensor.shape, tensor.strides)


def _linear(program: tuple[int, int, int], grid: tuple[int, ...]) -> int:
    x, y, _ = (*grid, 1, 1)[:3]
    return program[0] + x * (program[1] + y * program[2])
