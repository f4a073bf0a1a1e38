"""Every launch of a Triton file a second time, as AMD's machine code; its results are compared.

The interpreter's replay comes first and says what it has to say. The machine code runs on copies of
the same tensors, so that the file goes on with the interpreter's results.
"""

from __future__ import annotations

import ctypes
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from hypocenter.base.dtypes import Array
from hypocenter.base.errors import HypoError
from hypocenter.check.launches import CheckOutput, Launches
from hypocenter.check.machine.launch import CheckedRun, without_harmless_reads
from hypocenter.check.machine.machine_findings import BlockNumber
from hypocenter.check.machine.memory import ArgumentMemory
from hypocenter.check.machine.results import ResultDifference, first_difference
from hypocenter.check.report import CheckedLaunch
from hypocenter.check.tuning import storage_bytes
from hypocenter.device.amd.code_object import read_code_object
from hypocenter.device.amd.executor import MachineProgram, prepare
from hypocenter.device.amd.kernarg import LaunchShape, PassedNumber
from hypocenter.device.limits import named_gpu
from hypocenter.device.offline.compile import compile_source, specimen_of_launch, triton_source
from hypocenter.replay.findings import Finding, FindingKind, Site

#: Findings that make a result no thing to be compared.
_UNSURE = frozenset(FindingKind) - {FindingKind.TUNED_IN_PLACE, FindingKind.NEVER_WRITTEN}
_LAUNCH_SECONDS = 120.0
#: Elements that may be addresses, and how many of a tensor are looked at.
_ADDRESSES, _MAX_LISTED = (torch.int64,), 1 << 16


@dataclass(frozen=True, slots=True)
class _Made:
    """A kernel compiled for a launch: `names` are its run-time parameters, in order."""

    program: MachineProgram
    names: tuple[str, ...]
    num_threads: int
    shared_bytes: int


class MachineLaunches(Launches):
    """Replays launches like `hypo check`, and executes each as machine code of `arch`."""

    def __init__(
        self, budget_seconds: float, write: Callable[[CheckOutput], None], arch: str
    ) -> None:
        super().__init__(budget_seconds, write)
        self._limits = named_gpu(arch)
        self._made: dict[Any, _Made] = {}

    def launch(self, jit: Any, args: tuple[Any, ...], grid: Any, kwargs: dict[str, Any]) -> None:
        known = {name: value for name, value in kwargs.items() if name in jit.arg_names}
        options = {name: value for name, value in kwargs.items() if name not in jit.arg_names}
        bound = inspect.signature(jit.fn).bind_partial(*args, **known)
        bound.apply_defaults()
        arguments = dict(bound.arguments)
        tensors = {n: v for n, v in arguments.items() if isinstance(v, torch.Tensor)}
        before = {name: storage_bytes(tensor).copy() for name, tensor in tensors.items()}
        listed = self._listed_in(tensors.values())
        records: list[CheckOutput] = []
        outer, self._write = self._write, records.append
        try:
            super().launch(jit, args, grid, kwargs)
        finally:
            self._write = outer
            launched = next((each for each in records if isinstance(each, CheckedLaunch)), None)
            if launched is None or launched.skipped or launched.stopped:
                for record in records:
                    outer(record)
        if launched is None or launched.skipped or launched.stopped:
            return
        run = _MachineRun(jit, launched, tensors, before, listed)
        try:
            run.execute(self._compile(jit, arguments, options), arguments, records)
            why = run.why_not_whole
        # Triton and its passes raise whatever they like; what is not executed is told.
        except Exception as error:
            text = (str(error).strip().splitlines() or [""])[0]
            why = text if isinstance(error, HypoError) else f"{type(error).__name__}: {text}"
        for record in records:
            if isinstance(record, CheckedLaunch):
                record = msgspec.structs.replace(record, unexecuted=why[:300])
            outer(run.join(record) if isinstance(record, Finding) else record)
        for finding in run.left():
            self.write_finding(
                msgspec.structs.replace(
                    finding, configuration=self._configuration, launched_at=launched.launched_at
                )
            )

    def _listed_in(self, tensors: Iterable[torch.Tensor]) -> dict[int, Array]:
        """Memory whose address stands in a tensor, as it is before the launch, by its start.

        What an argument holds itself is among it: a kernel may find it on both ways.
        """
        found: dict[int, Array] = {}
        for tensor in tensors:
            if tensor.dtype not in _ADDRESSES or tensor.numel() > _MAX_LISTED:
                continue
            for address in np.unique(tensor.reshape(-1).numpy()).tolist():
                storage = self.watch.find(address) if address > 0 else None
                if storage is not None and storage[0] not in found:
                    start, num_bytes = storage
                    found[start] = np.frombuffer(
                        ctypes.string_at(start, num_bytes), np.uint8
                    ).copy()
        return found

    def _compile(self, jit: Any, arguments: Mapping[str, Any], options: Mapping[str, Any]) -> _Made:
        given = {name: value for name, value in options.items() if value is not None}
        specimen = specimen_of_launch(jit, arguments, given)
        key = specimen.key()
        if key not in self._made:
            made = compile_source(triton_source(specimen, self._limits), self._limits, given)
            program = prepare(read_code_object(made.asm["hsaco"], specimen.name))
            shared = int(made.metadata.shared) - program.kernel.descriptor.group_bytes
            threads = int(made.metadata.num_warps) * self._limits.wavefront
            self._made[key] = _Made(program, tuple(specimen.signature), threads, max(shared, 0))
        return self._made[key]


class _MachineRun:
    """One launch as machine code, and what it did differently."""

    def __init__(
        self,
        jit: Any,
        launched: CheckedLaunch,
        tensors: Mapping[str, torch.Tensor],
        before: Mapping[str, Array],
        listed: Mapping[int, Array],
    ) -> None:
        self._jit, self._launched, self._tensors, self._before = jit, launched, tensors, before
        self._listed = listed
        self._found: list[Finding] = []
        self.why_not_whole = ""

    def execute(
        self, made: _Made, arguments: Mapping[str, Any], records: list[CheckOutput]
    ) -> None:
        if 0 in self._launched.grid:
            return
        arrays = self._copies()
        run = self._prepare(made, arguments, arrays)
        report = without_harmless_reads(
            run,
            run.run(_LAUNCH_SECONDS),
            {},
            lambda _, local: self._prepare(made, arguments, self._copies(), local),
            _LAUNCH_SECONDS,
        )
        self.why_not_whole = "; ".join(report.untested)
        self._found = [self._at_home(finding) for finding in report.findings]
        said = [record for record in records if isinstance(record, Finding)]
        is_sure = not any(finding.kind in _UNSURE for finding in (*said, *self._found))
        if is_sure and not report.untested and self._launched.coverage.is_complete:
            difference = first_difference(self._tensors, arrays)
            if difference is not None:
                program = self._program_of(made, arguments, difference)
                self._found.append(self._different(difference, program))

    def _copies(self) -> dict[str, Array]:
        """Storages by the name of an argument; arguments that share one share the copy."""
        copies: dict[int, Array] = {}
        return {
            name: copies.setdefault(tensor.untyped_storage().data_ptr(), self._before[name].copy())
            for name, tensor in self._tensors.items()
        }

    def _prepare(
        self,
        made: _Made,
        arguments: Mapping[str, Any],
        arrays: Mapping[str, Array],
        local: Array | None = None,
    ) -> CheckedRun:
        shown = {name: _as_elements(array, self._tensors[name]) for name, array in arrays.items()}
        memory = ArgumentMemory(shown)
        own = {self._tensors[n].untyped_storage().data_ptr(): (n, shown[n]) for n in shown}
        for start, held in self._listed.items():
            name, array = own.get(start) or (f"memory at 0x{start:x}", held.copy())
            memory.list_at(start, name, array)
        values: dict[str, PassedNumber | bytes] = {}
        for name in made.names:
            value = arguments[name]
            if isinstance(value, torch.Tensor):
                offset = int(value.storage_offset()) * value.element_size()
                values[name] = memory.regions_by_name[name].address + offset
            else:
                values[name] = value
        shape = LaunchShape(self._launched.grid, (made.num_threads, 1, 1), made.shared_bytes)
        return CheckedRun(made.program, shape, memory, values, only_local=True, local=local)

    def _program_of(
        self, made: _Made, arguments: Mapping[str, Any], difference: ResultDifference
    ) -> BlockNumber | None:
        """The last program that changes the element: a launch of it alone shows the difference."""
        arrays = self._copies()
        held = arrays[difference.argument][difference.first : difference.end]
        last, found = held.copy(), None

        def note(block: BlockNumber) -> None:
            nonlocal last, found
            if not np.array_equal(held, last):
                last, found = held.copy(), block

        self._prepare(made, arguments, arrays).run(_LAUNCH_SECONDS, note)
        return found

    def _different(self, difference: ResultDifference, program: BlockNumber | None) -> Finding:
        alone = f"; a launch of program {program} alone shows it" if program is not None else ""
        return Finding(
            kind=FindingKind.OTHER_RESULT,
            kernel=self._launched.kernel,
            operation="launch",
            argument=difference.argument,
            number=difference.number,
            program=program,
            detail=(
                f"element {difference.number} is {difference.machine} as {self._arch()} code and "
                f"{difference.interpreted} in the interpreter, beyond rounding; {difference.count} "
                f"of {difference.size} elements differ{alone}. The compiler's doing, unless our "
                "emulator is wrong"
            ),
        )

    def _arch(self) -> str:
        return self._launched.arch or "machine"

    def _at_home(self, finding: Finding) -> Finding:
        """Triton keeps what it compiled by the kernel's text: the file may have moved since."""
        own = self._jit.fn.__code__.co_filename
        sites = tuple(
            Site(own, site.line, site.function, site.expression or _line(own, site.line))
            if Path(site.file).name == Path(own).name
            else site
            for site in finding.sites
        )
        return msgspec.structs.replace(finding, sites=sites)

    def join(self, finding: Finding) -> Finding:
        """A finding of the interpreter's, with what the machine code shows at the same place."""
        for mine in self._found:
            if (mine.kind, mine.argument, mine.line) == (
                finding.kind,
                finding.argument,
                finding.line,
            ):
                self._found.remove(mine)
                block = ", ".join(map(str, mine.program or ()))
                told = f"{finding.detail}; in the machine code block ({block}): {mine.detail}"
                return msgspec.structs.replace(finding, detail=told)
        return finding

    def left(self) -> list[Finding]:
        return self._found


def _as_elements(array: Array, tensor: torch.Tensor) -> Array:
    """The bytes of a storage as elements, where numpy knows the type and they fill it."""
    size = tensor.element_size()
    kinds = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
    try:
        dtype = np.dtype(str(tensor.dtype).removeprefix("torch."))
    except TypeError:
        dtype = np.dtype(kinds.get(size, np.uint8))
    return array.view(dtype) if array.size % dtype.itemsize == 0 else array


def _line(file: str, line: int) -> str:
    import linecache

    return linecache.getline(file, line).strip()
