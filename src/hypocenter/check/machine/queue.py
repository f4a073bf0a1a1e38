"""Launches of one program of the host's, in order: what the host rewrites while they still run.

Arrays are memory of the host's that kernels use directly (hipHostMalloc, unified memory): no copy
stands between. Each launch runs at once here; on a GPU it may run until somebody waits for it. So
what the host changes in an array before `wait` may reach the kernel or not.
"""

from __future__ import annotations

import linecache
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from hypocenter.base.dtypes import Array
from hypocenter.check.machine.launch import (
    BUDGET_SECONDS,
    MachineReport,
    code_of_file,
    run_checked,
    shape_of,
)
from hypocenter.check.machine.memory import ArgumentMemory, ArrayRegion
from hypocenter.check.machine.widths import Value
from hypocenter.device.amd.code_object import CodeObject
from hypocenter.device.amd.executor import prepare
from hypocenter.device.amd.kernarg import LaunchShape
from hypocenter.foreign.caller import caller_of_now
from hypocenter.replay.findings import Finding, FindingKind, Site


@dataclass(slots=True)
class _Running:
    """A launch that nobody has waited for: the arrays that it used, and where it was made."""

    kernel: str
    regions: tuple[ArrayRegion, ...]
    site: Site | None
    is_told: bool = False


class Queue:
    """A queue of one GPU for kernels of a HIP source or a code object, in their order.

    As a context it waits at its end. `findings` are those of the launches, and what the host
    rewrote too early. A host that writes what was there already is not seen, nor one that reads.
    """

    def __init__(self, code: str | Path | CodeObject, *, arch: str = "gfx942") -> None:
        self._code = code if isinstance(code, CodeObject) else code_of_file(Path(code), arch)
        self._running: list[_Running] = []
        self._shadows: dict[tuple[int, int], tuple[Array, Array]] = {}
        self._findings: list[Finding] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.wait()

    @property
    def findings(self) -> tuple[Finding, ...]:
        return tuple(self._findings)

    def launch(
        self,
        kernel: str | None,
        shape: LaunchShape | tuple[Sequence[int], Sequence[int]],
        arguments: Mapping[str, Value],
        *,
        budget_seconds: float = BUDGET_SECONDS,
    ) -> MachineReport:
        """As `hypocenter.amd.launch`; the host goes on at once, and must `wait` before it writes
        what the kernel uses."""
        site = _site_now()
        self._look(site)
        memories: list[ArgumentMemory] = []
        program = prepare(self._code, kernel)
        report = run_checked(program, shape_of(shape), arguments, budget_seconds, memories.append)
        report, regions = report.launched_at(site), memories[0].held
        self._findings += report.findings
        self._running.append(_Running(report.launch.kernel, regions, site))
        for region in regions:
            key = (region.data.ctypes.data, region.data.size)
            self._shadows[key] = region.data, region.data.copy()
        return report

    def wait(self) -> None:
        """Wait for all launches, as hipStreamSynchronize does."""
        self._look(_site_now())
        self._running.clear()
        self._shadows.clear()

    def _look(self, now: Site | None) -> None:
        """What the host has changed since the last call, of what a launch may still use."""
        for key, (data, shadow) in self._shadows.items():
            changed = data != shadow
            if not changed.any():
                continue
            for launch in self._running:
                self._hold_against(launch, key, changed, now)
            shadow[:] = data

    def _hold_against(
        self, launch: _Running, key: tuple[int, int], changed: Array, now: Site | None
    ) -> None:
        for region in launch.regions:
            if (region.data.ctypes.data, region.data.size) != key or launch.is_told:
                continue
            is_read, is_written = region.first_reader >= 0, region.writer >= 0
            both = np.flatnonzero(changed & (is_read | is_written))
            if both.size:
                launch.is_told = True
                verb = "reads" if is_read[both[0]] else "writes"
                self._findings.append(_finding(launch, region, both, verb, now))


def _site_now() -> Site | None:
    """The line of the program that calls."""
    frame, _ = caller_of_now()
    if frame is None:
        return None
    file, line, function = frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
    return Site(file, line, function, linecache.getline(file, line).strip())


def _finding(
    launch: _Running, region: ArrayRegion, both: Array, verb: str, now: Site | None
) -> Finding:
    first = int(both[0]) // region.array.itemsize
    number = len(np.unique(both // region.array.itemsize))
    before = f"{now.file}:{now.line}" if now is not None else "its next call"
    return Finding(
        kind=FindingKind.REWRITTEN_IN_FLIGHT,
        kernel=launch.kernel,
        operation="launch",
        argument=region.name,
        number=first,
        detail=(
            f"the host rewrites {number} elements of {region.name} that the kernel {verb}, the "
            f"first is element {first}, after the launch and before {before}; no wait stands "
            "between, so the kernel may see the old values or the new ones"
        ),
        launched_at=launch.site,
    )
