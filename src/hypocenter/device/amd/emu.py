"""`emu:` devices: a simulated GPU whose launches run as AMD's machine code.

Everything but the kernels is `sim/`'s: memory, streams, the order of programs, the way to report a
fault. A kernel is compiled by Triton for the GPU and executed by our emulator of the machine code;
not hardware.
"""

from __future__ import annotations

import dataclasses
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from hypocenter.base.dtypes import Array
from hypocenter.base.errors import HypoError, LaunchRejected
from hypocenter.base.refusals import NotCompiled, Refused
from hypocenter.coredump.amd_dump import PATTERNS
from hypocenter.device.amd.code_object import read_code_object
from hypocenter.device.amd.evidence.core_dump import dump_path, write_core_dump
from hypocenter.device.amd.executor import Execution, MachineLaunch, MachineProgram, prepare
from hypocenter.device.amd.fault import FaultKind, MachineFault
from hypocenter.device.amd.kernarg import LaunchShape, PassedNumber, pack_arguments
from hypocenter.device.interpret.interpret import Pointer
from hypocenter.device.limits import EXECUTED, named_gpu, simulated_name
from hypocenter.device.offline.compile import compile_source, triton_source
from hypocenter.device.offline.specimen import HUGE_BYTES, Specimen
from hypocenter.device.sim.memory import BadAccess, SimMemory
from hypocenter.device.sim.queue import QueuedLaunch
from hypocenter.device.sim.sim import SimGpu, Unfinished

#: AMD's buffer descriptors hold addresses of 48 bits, and processes of today have theirs near 2^47.
_FIRST_BASE, _BASE_STEP = 1 << 44, 1 << 41
_FORMS = {
    "i1": "<B",
    "i8": "<b",
    "i16": "<h",
    "i32": "<i",
    "i64": "<q",
    "u1": "<B",
    "u8": "<B",
    "u16": "<H",
    "u32": "<I",
    "u64": "<Q",
    "fp16": "<e",
    "fp32": "<f",
    "fp64": "<d",
}


def open_emu(name: str, seed: int = 0, **options: Any) -> EmuGpu:
    """A fresh device by its name, as in EXECUTED; `options` are SimGpu's.

    Raises UsageError for an unknown name and MissingPackage where the decoder is not installed.
    """
    key = simulated_name(name)
    return EmuGpu(key, named_gpu(key.removeprefix("emu:")), seed, **options)


@dataclass(frozen=True, slots=True)
class _Code:
    """What a launch executes: the kernel, its arguments' bytes, threads of a block, LDS."""

    program: MachineProgram
    kernarg: bytes
    num_threads: int
    shared_bytes: int
    block: tuple[int, int, int] | None = None


class _Named:
    """What a queue asks of a kernel that is none of Triton's."""

    def __init__(self, name: str) -> None:
        self.__name__ = name


@dataclass(frozen=True, slots=True)
class _Compiled:
    program: MachineProgram
    signature: Mapping[str, str]
    num_threads: int
    shared_bytes: int


class _DeviceMemory:
    """The memory of a simulated GPU, as the executor asks for it."""

    def __init__(self, memory: SimMemory) -> None:
        self._memory = memory

    def regions(self) -> Array:
        return np.array([self._memory.region()], np.int64)

    def make_ready(self, address: int) -> None:
        self._memory.make_ready(address)


class EmuGpu(SimGpu):
    """A simulated GPU of AMD's that executes machine code. `last_fault` is what stopped it."""

    last_fault: MachineFault | None = None
    _is_run = "executed"

    @staticmethod
    def _base_of(name: str) -> int:
        return _FIRST_BASE + EXECUTED.index(name) * _BASE_STEP

    def launch_code(
        self, program: MachineProgram, shape: LaunchShape, values: Mapping[str, PassedNumber]
    ) -> None:
        """Queue a kernel of a code object, as hipModuleLaunchKernel does: it runs later.

        `values` are its parameters in their order, addresses of this device's among them.
        """
        kernel, name = program.kernel, program.kernel.name
        self._refuse_if_lost(f"launch of {name}", name)
        x, y, z = shape.block
        code = _Code(program, pack_arguments(kernel, values, shape), x * y * z, shape.shared_bytes)
        code = dataclasses.replace(code, block=shape.block)
        item = QueuedLaunch(_Named(name), shape.grid, {}, iter(()), code=code)
        item.order = self._order(shape.grid)
        self._streams.add(item)
        self._wait_if_full(f"launch of {name}", name)

    def specimen_of(
        self, jit: Any, arguments: Mapping[str, Any], options: Mapping[str, Any]
    ) -> Specimen:
        """What Triton would compile for this launch.

        Of tensors in less memory than 2 GiB it tells AMD's compiler that 32 bits hold each offset.
        """
        specimen = super().specimen_of(jit, arguments, options)
        large = self.allocator.used_blocks_of(HUGE_BYTES)
        if not large:
            return specimen
        base = self._memory.base
        huge = tuple(
            name
            for name, value in arguments.items()
            if isinstance(value, Pointer)
            and any(at <= value.address - base < at + size for at, size in large)
        )
        return dataclasses.replace(specimen, huge=huge)

    def _code_of(self, jit: Any, arguments: Mapping[str, Any], options: Mapping[str, Any]) -> _Code:
        """Compile a launch, or find it compiled. Raises LaunchRejected for what does not."""
        specimen = self.specimen_of(jit, arguments, options)
        known = self._programs()
        key = specimen.key()
        if key not in known:
            known[key] = self._compile(specimen)
        compiled = known[key]
        return _Code(
            compiled.program,
            _kernarg(compiled, arguments),
            compiled.num_threads,
            compiled.shared_bytes,
        )

    def _programs(self) -> dict[Any, _Compiled]:
        known: dict[Any, _Compiled] = self.__dict__.setdefault("_compiled_programs", {})
        return known

    def _compile(self, specimen: Specimen) -> _Compiled:
        try:
            source = triton_source(specimen, self.limits)
            compiled = compile_source(source, self.limits, specimen.options)
        # Triton and its passes raise whatever they like, and each of them means the same here.
        except Exception as error:
            why = Refused(what=f"does not compile: {type(error).__name__}: {error}"[:500])
            raise LaunchRejected(specimen.name, NotCompiled(reasons=(why,))) from error
        code = read_code_object(compiled.asm["hsaco"], specimen.name)
        program = prepare(code)
        own = program.kernel.descriptor.group_bytes
        return _Compiled(
            program,
            dict(specimen.signature),
            int(compiled.metadata.num_warps) * self.limits.wavefront,
            max(int(compiled.metadata.shared) - own, 0),
        )

    def _run_program(self, launch: QueuedLaunch, program: int) -> None:
        self._running = launch, 0
        if launch.values is None:
            code: _Code = launch.code
            block = code.block or (code.num_threads, 1, 1)
            given = MachineLaunch(launch.grid, block, code.kernarg, code.shared_bytes)
            launch.values = {"": Execution(code.program, given, _DeviceMemory(self._memory))}
        x, y, _ = launch.grid
        execution: Execution = launch.values[""]
        outcome = execution.run([(program % x, program // x % y, program // (x * y))])
        launch.num_steps += outcome.num_instructions
        if (fault := outcome.fault) is not None:
            self.last_fault = fault
            pattern = next(filter(None, map(os.environ.get, PATTERNS)), None)
            if pattern is not None and fault.kind is FaultKind.MEMORY:
                write_core_dump(
                    dump_path(pattern), execution.launch_to_dump(), fault, execution.all_regions()
                )
            self._stop(launch, fault)
        self._running = None

    def _stop(self, launch: QueuedLaunch, fault: MachineFault) -> None:
        if fault.kind is FaultKind.MEMORY:
            raise BadAccess("write" if fault.is_write else "read", fault.address)
        if fault.kind is FaultKind.ENDLESS:
            raise Unfinished
        encoding = fault.instruction.data.hex(" ", 4)
        raise HypoError(
            f"{launch.jit.__name__}: {fault.kind} at +{fault.pc:#x}: "
            f"{fault.what or fault.instruction.name} ({encoding})"
        )


def _kernarg(compiled: _Compiled, arguments: Mapping[str, Any]) -> bytes:
    """The arguments as the kernel reads them; what Triton adds behind them is null."""
    kernel = compiled.program.kernel
    data = bytearray(kernel.descriptor.kernarg_bytes)
    for place, (name, kind) in zip(kernel.shown, compiled.signature.items(), strict=False):
        value = arguments[name]
        if kind.startswith("*"):
            struct.pack_into(
                "<Q", data, place.offset, value.address if isinstance(value, Pointer) else value
            )
        else:
            struct.pack_into(_FORMS[kind], data, place.offset, value)
    return bytes(data)
