"""One launch of AMD's machine code with every access checked: `hypocenter.amd.launch`.

Executed by our emulator of the machine code; not hardware. Memory is immediate there: what only a
cache or a missing wait would show is not seen.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from hypocenter.base.dtypes import Array
from hypocenter.base.errors import UsageError
from hypocenter.check.machine.accesses import AccessWatch, UnwrittenBytes
from hypocenter.check.machine.file_kinds import SOURCES
from hypocenter.check.machine.machine_findings import (
    MAX_INSTRUCTIONS,
    BlockNumber,
    MachineFindings,
)
from hypocenter.check.machine.memory import ArgumentMemory
from hypocenter.check.machine.not_a_number import explain_nan
from hypocenter.check.machine.unwritten_reads import harmless_rows
from hypocenter.check.machine.widths import Value, copy_arguments, explain_widths
from hypocenter.check.report import CheckedLaunch
from hypocenter.device.amd import instruction_rows as r
from hypocenter.device.amd.code_object import CodeObject, read_code_object
from hypocenter.device.amd.executor import Execution, MachineLaunch, MachineProgram, prepare
from hypocenter.device.amd.hip import compile_hip
from hypocenter.device.amd.kernarg import LaunchShape, PassedNumber, pack_arguments
from hypocenter.device.amd.targets import EXECUTED
from hypocenter.device.limits import GpuLimits, named_gpu
from hypocenter.replay.findings import Coverage, Finding, FindingKind, Site

#: Accesses of a block that are kept to be compared, 80 bytes each.
_MAX_ACCESSES = 1 << 20
BUDGET_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class MachineReport:
    """What a launch did: its findings, how much of it ran, and what was not looked at.

    `notes` are no findings: arrays that were written in part.
    """

    launch: CheckedLaunch
    findings: tuple[Finding, ...]
    num_instructions: int
    untested: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def is_whole(self) -> bool:
        """Whether all blocks were run, and all that they did is known."""
        return self.launch.coverage.is_complete and not self.untested

    def findings_to_compare(self) -> list[tuple[Any, ...]]:
        """The findings, reads of what nobody wrote left out, so that two launches compare."""
        return [
            (found.kind, found.line, found.argument, found.operation, found.num_programs)
            for found in self.findings
            if found.kind != FindingKind.UNINITIALISED_READ or found.operation == "register"
        ]

    def launched_at(self, site: Site | None) -> MachineReport:
        """The same, with the place that launched it."""
        findings = (msgspec.structs.replace(found, launched_at=site) for found in self.findings)
        launch = msgspec.structs.replace(self.launch, launched_at=site)
        return replace(self, launch=launch, findings=tuple(findings))


def code_of_file(path: Path, arch: str) -> CodeObject:
    """The code object of a file, or of a HIP source that clang compiles for `arch`.

    Raises UsageError, BadCodeObject, and HypoError without clang.
    """
    if arch not in EXECUTED:
        raise UsageError(f"{arch}: machine code is executed for {', '.join(EXECUTED)}")
    if not path.is_file():
        raise UsageError(f"{path}: no such file")
    data = compile_hip(path, arch) if path.suffix in SOURCES else path.read_bytes()
    return read_code_object(data, str(path), arch)


def launch(
    code: str | Path | CodeObject,
    kernel: str | None,
    shape: LaunchShape | tuple[Sequence[int], Sequence[int]],
    arguments: Mapping[str, Value],
    *,
    arch: str = "gfx942",
    budget_seconds: float = BUDGET_SECONDS,
) -> MachineReport:
    """Run a kernel of a HIP source or code object, and say what was wrong with its accesses.

    `shape` is grid and block, in blocks and threads, or a LaunchShape; `arguments` are the kernel's
    parameters in order, numpy arrays (which the kernel changes) and numbers; None is a null
    pointer. Raises UsageError where a runtime would refuse the launch.
    """
    held = code if isinstance(code, CodeObject) else code_of_file(Path(code), arch)
    return run_checked(prepare(held, kernel), shape_of(shape), arguments, budget_seconds)


def shape_of(shape: LaunchShape | tuple[Sequence[int], Sequence[int]]) -> LaunchShape:
    """Grid and block as a LaunchShape; raises UsageError."""
    if isinstance(shape, LaunchShape):
        return shape
    grid, block = shape
    return LaunchShape(three_sizes(grid), three_sizes(block))


def run_checked(
    program: MachineProgram,
    shape: LaunchShape,
    arguments: Mapping[str, Value],
    budget_seconds: float,
    on_memory: Callable[[ArgumentMemory], None] = lambda memory: None,
) -> MachineReport:
    """One launch, and for what was outside or is no number a trial of why.

    `on_memory` gets what the launch used of its arrays, before any trial.
    """
    before = copy_arguments(arguments)

    def run_once(given: Mapping[str, Value]) -> tuple[ArgumentMemory, MachineReport]:
        return _run_once(program, shape, given, budget_seconds)

    memory, report = run_once(arguments)
    on_memory(memory)
    if not report.findings and report.launch.coverage.is_complete:

        def is_clean(given: Mapping[str, Value]) -> bool:
            _, again = run_once(given)
            return again.launch.coverage.is_complete and not again.findings

        found = explain_nan(program.kernel.name, before, arguments, is_clean)
        return replace(report, findings=found)

    def run_again(given: Mapping[str, Value]) -> Sequence[Finding]:
        _, again = run_once(given)
        return again.findings if again.launch.coverage.is_complete else report.findings

    return replace(report, findings=explain_widths(report.findings, before, run_again))


def _run_once(
    program: MachineProgram,
    shape: LaunchShape,
    arguments: Mapping[str, Value],
    budget_seconds: float,
) -> tuple[ArgumentMemory, MachineReport]:
    """One launch; of reads of what nobody wrote those are told that reach what it leaves.

    What is not tried within `budget_seconds` more is told.
    """
    before = copy_arguments(arguments)
    memory, values = place_arguments(arguments)
    run = CheckedRun(program, shape, memory, values)
    report = run.run(budget_seconds)

    def begin(given: Mapping[str, Value], local: Array) -> CheckedRun:
        again_memory, again_values = place_arguments(given)
        return CheckedRun(program, shape, again_memory, again_values, local=local)

    return memory, without_harmless_reads(run, report, before, begin, budget_seconds)


def without_harmless_reads(
    run: CheckedRun,
    report: MachineReport,
    before: Mapping[str, Value],
    begin: Callable[[Mapping[str, Value], Array], CheckedRun],
    budget_seconds: float,
) -> MachineReport:
    """The report of a run, without reads of what nobody wrote that reach nothing it leaves.

    `begin` makes the launch once more, with these arguments and this begin of LDS.
    """
    if not run.unwritten or not report.is_whole:
        return report
    until = time.thread_time() + budget_seconds

    def leaves(given: Mapping[str, Value], local: Array) -> Sequence[Any] | None:
        if (left := until - time.thread_time()) <= 0:
            return None
        again = begin(given, local)
        done = again.run(left)
        return [*again.contents(), done.findings_to_compare()] if done.is_whole else None

    rows = harmless_rows(run.unwritten, before, run.local_bytes, leaves)
    return run.without_reads(report, rows)


def three_sizes(sizes: Sequence[int]) -> tuple[int, int, int]:
    if not 1 <= len(sizes) <= 3:
        raise UsageError(f"a grid or block of {len(sizes)} numbers, but 1 to 3 are launched")
    x, y, z = (*(int(size) for size in sizes), 1, 1)[:3]
    return x, y, z


def place_arguments(
    arguments: Mapping[str, Value],
) -> tuple[ArgumentMemory, dict[str, PassedNumber | bytes]]:
    """The arrays as memory, and what the kernel is passed for each argument."""
    for name, value in arguments.items():
        if isinstance(value, np.ndarray) and value.dtype.hasobject:
            raise UsageError(f"{name} holds Python objects; an array holds numbers")
        if not isinstance(value, (np.ndarray, np.generic, bool, int, float, type(None))):
            kind = type(value).__name__
            raise UsageError(f"{name} is a {kind}; arguments are numpy arrays, numbers or None")
    arrays = {name: v for name, v in arguments.items() if isinstance(v, np.ndarray) and v.ndim}
    memory = ArgumentMemory(arrays)
    values: dict[str, PassedNumber | bytes] = {}
    for name, value in arguments.items():
        if name in arrays:
            values[name] = memory.regions_by_name[name].address
        elif isinstance(value, np.ndarray):
            values[name] = value.tobytes()
        else:
            values[name] = 0 if value is None else value
    return memory, values


class CheckedRun:
    """One launch, block by block; with `only_local` the accesses to LDS alone are compared.

    Each block begins with `local` in its LDS, uint8[local_bytes], or with zeros.
    """

    def __init__(
        self,
        program: MachineProgram,
        shape: LaunchShape,
        memory: ArgumentMemory,
        values: Mapping[str, PassedNumber | bytes],
        *,
        only_local: bool = False,
        local: Array | None = None,
    ) -> None:
        self._program, self._shape, self._memory = program, shape, memory
        kernel = program.kernel
        refuse_launch(kernel.name, program.arch, kernel.max_threads, shape)
        kernarg = pack_arguments(kernel, values, shape)
        given = MachineLaunch(
            shape.grid, shape.block, kernarg, shape.shared_bytes, MAX_INSTRUCTIONS
        )
        self._execution = Execution(
            program,
            given,
            memory,
            _MAX_ACCESSES,
            watches_registers=True,
            is_alone=True,
            local=local,
        )
        self.local_bytes = kernel.descriptor.group_bytes + shape.shared_bytes
        self._watch = AccessWatch(() if only_local else memory.held, self.local_bytes)
        self._findings = MachineFindings(program, memory, self.local_bytes)
        self._findings.note_waits(-(-given.num_threads // kernel.descriptor.wavefront))

    @property
    def unwritten(self) -> UnwrittenBytes:
        """What was read that nobody had written, by rows of code."""
        return self._watch.unwritten

    def contents(self) -> Iterator[bytes]:
        """What memory holds now."""
        return self._memory.contents()

    def without_reads(self, report: MachineReport, rows: Collection[int]) -> MachineReport:
        """The report of `run`, where reads of what nobody wrote, by these rows, reach nothing."""
        self._findings.forget_reads(rows)
        names = {name or "shared memory" for name, row in self.unwritten if row in rows}
        notes = (
            f"{name} is read where nobody wrote, and no result hangs on it: tried with zeros, NaN "
            "and large numbers (no finding)"
            for name in sorted(names)
        )
        return replace(report, findings=self._findings.every(), notes=(*report.notes, *notes))

    def run(
        self, budget_seconds: float, note: Callable[[BlockNumber], None] = lambda block: None
    ) -> MachineReport:
        """Run the blocks in order until the budget is spent; a fault ends its own block alone."""
        x, y, z = self._shape.grid
        num_blocks, num_run, num_instructions = x * y * z, 0, 0
        started, untested, is_watched = time.thread_time(), [], True
        for number in range(num_blocks):
            if time.thread_time() - started > budget_seconds:
                left = num_blocks - number
                untested.append(f"{left} of {num_blocks} blocks were not run: budget spent")
                break
            block = (number % x, number // x % y, number // (x * y))
            machine, fault = self._execution.run_block(block)
            if number == 0:  # the first has the emulator itself compiled
                started = time.thread_time()
            num_run += 1
            num_instructions += int(machine.wave[:, r.COUNT].sum())
            if fault is not None:
                self._findings.note_fault(fault)
            self._findings.note_local(machine, block)
            self._findings.note_unset(machine, block)
            if is_watched and not len(machine.log):
                # What this block wrote is not known, so the next ones cannot be compared either.
                is_watched = False
                untested.append(
                    f"races and reads of what nobody wrote were not looked for from block {block} "
                    f"on, which makes more than {_MAX_ACCESSES} accesses"
                )
            log = machine.log[: machine.out[r.LOGGED] if is_watched else 0]
            for oddity in self._watch.note_block(number, log):
                self._findings.note_oddity(oddity, block, self._block_of)
            note(block)
        is_whole = is_watched and num_run == num_blocks
        notes = tuple(self._memory.written_in_part()) if is_whole else ()
        seconds = time.thread_time() - started
        coverage = Coverage(num_run, num_blocks, 0, seconds)
        checked = CheckedLaunch(
            self._program.kernel.name, self._shape.grid, coverage, None, arch=self._program.arch
        )
        found = self._findings.every()
        return MachineReport(checked, found, num_instructions, tuple(untested), notes)

    def _block_of(self, number: int) -> tuple[int, int, int]:
        x, y, _ = self._shape.grid
        return number % x, number // x % y, number // (x * y)


def refuse_launch(kernel: str, arch: str, max_threads: int, shape: LaunchShape) -> None:
    """What a runtime refuses before it launches; raises UsageError with the limit."""
    limits: GpuLimits = named_gpu(arch)
    threads = shape.block[0] * shape.block[1] * shape.block[2]
    if min(*shape.grid, *shape.block) < 1:
        raise UsageError(f"{kernel}: grid {shape.grid} and block {shape.block} must be 1 or more")
    most = limits.max_threads_per_block
    if threads > most:
        raise UsageError(f"{kernel}: a block of {threads} threads, limit {most} on {arch}")
    if max_threads and threads > max_threads:
        raise UsageError(
            f"{kernel}: a block of {threads} threads, but it was compiled for {max_threads}; "
            f"say __launch_bounds__({threads})"
        )
    for axis, (blocks, size) in enumerate(zip(shape.grid, shape.block, strict=True)):
        # AMD's packet holds threads of the whole grid in 32 bits, and blocks of y and z in 16.
        limit = (1 << 32) - 1 if axis == 0 else (1 << 16) - 1
        counted = blocks * size if axis == 0 else blocks
        if counted > limit:
            what = "threads of the grid along x" if axis == 0 else f"blocks along {'xyz'[axis]}"
            raise UsageError(f"{kernel}: {counted} {what}, limit {limit} on {arch}")
    if shape.shared_bytes > limits.shared_limit_bytes:
        raise UsageError(
            f"{kernel}: {shape.shared_bytes} bytes of shared memory a block, limit "
            f"{limits.shared_limit_bytes} on {arch}"
        )
