"""Replays a prepared GPU launch on copies of its arguments: which lane, which index, which values.

A guarded launch says that an access left its tensor, and in which program; the replay of that one
program says why. The device's own memory is only read.
"""

from __future__ import annotations

from typing import Any

import torch

from hypocenter.device import memory
from hypocenter.device.interpret import Pointer
from hypocenter.device.launch import Launch
from hypocenter.errors import UsageError
from hypocenter.forensics.replay import replay
from hypocenter.records import AccessFault, ReplayReport


def replay_launch(launch: Launch, program: tuple[int, int, int] | None = None) -> ReplayReport:
    """Run a launch, or one program of it, on the CPU with every access checked.

    Waits for everything launched before, then copies the arguments as they are now: a kernel that
    works in place should be replayed before it has run. Raises UsageError for a CPU kernel.
    """
    if launch.jit is None:
        raise UsageError(f"{launch.kernel} runs on the CPU; replay is for GPU kernels")
    grid = launch.options["grid"]
    names = [name for name in launch.jit.arg_names if name not in launch.options]
    arguments = {
        name: _copied(launch, name, value) if name in launch.extents else value
        for name, value in zip(names, launch.args, strict=True)
    }
    constants = {name: launch.options[name] for name in launch.jit.arg_names if name not in names}
    programs = None if program is None else [_linear(program, grid)]
    return replay(launch.jit, grid, {**arguments, **constants}, programs=programs)


def explain(fault: AccessFault, launch: Launch) -> ReplayReport:
    """The replay of the program that a guarded launch reported; of all programs if it has none."""
    return replay_launch(launch, fault.program)


def replay_mode(launch: Launch) -> list[ReplayReport]:
    """Rebind `launch.run` so that it replays instead of launching.

    Each run appends its report to the list that is returned; what the kernel would have written
    is lost. `launch.set_mode` ends it.
    """
    reports: list[ReplayReport] = []
    launch.run = lambda: reports.append(replay_launch(launch))
    return reports


def _copied(launch: Launch, name: str, value: Any) -> torch.Tensor:
    """The bytes that a pointer argument may reach, as a CPU tensor of its element type."""
    extent = launch.extents[name]
    if isinstance(value, Pointer):
        address, dtype = value.address, getattr(torch, value.dtype)
    else:
        address, dtype = value.data_ptr(), value.dtype
    data = memory.backend_of(launch.device).copy_out(address, extent)
    return torch.frombuffer(bytearray(data.tobytes()), dtype=dtype)


def _linear(program: tuple[int, int, int], grid: tuple[int, ...]) -> int:
    x, y, _ = (*grid, 1, 1)[:3]
    return program[0] + x * (program[1] + y * program[2])
