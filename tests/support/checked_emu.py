"""Simulated GPUs of AMD's whose programs run twice: interpreted, and as machine code.

As a plugin of pytest (`-p checked_emu`) it stands in for `sim:` devices of AMD's, so that whatever
a test launches there is compared; where CHECKED_EMU_ALL is set for those of NVIDIA's, too. Compared
are of each program the bytes that the interpreter stores with the same bytes after the machine
code. What the machine code stores elsewhere is not seen here. A line for each form of a kernel goes
to the file that CHECKED_EMU names. CHECKED_EMU_TARGET is a target in place of the device's own.
`odd` of a form are uses of registers and of LDS that nobody wrote, and races of waves: a kernel
that is well has none.
"""

from __future__ import annotations

import atexit
import json
import os
from typing import Any

import numpy as np

from hypocenter.base.dtypes import Array
from hypocenter.check.machine.accesses import AccessWatch
from hypocenter.device.amd import emu
from hypocenter.device.amd import instruction_rows as r
from hypocenter.device.amd.emu import EmuGpu
from hypocenter.device.amd.evidence.unset import register_name
from hypocenter.device.amd.executor import Execution
from hypocenter.device.amd.fault import MachineFault
from hypocenter.device.limits import EXECUTED, named_gpu
from hypocenter.device.sim import sim
from hypocenter.device.sim.memory import SimMemory
from hypocenter.device.sim.queue import QueuedLaunch
from hypocenter.device.sim.sim import SimGpu

#: Of a form: programs, values, values that differ, the largest difference, and that of the largest
#: value of the program, by the name of the type.
FOUND: dict[str, dict[str, Any]] = {}


#: What is odd about the program that ran last, and accesses of a block that are looked at.
_ODD: list[str] = []
_MAX_ACCESSES = 1 << 17


class _WatchedExecution(Execution):
    """One that notes registers and LDS that are used before anybody wrote them, and races."""

    def __init__(self, program: Any, given: Any, memory: Any) -> None:
        super().__init__(program, given, memory, _MAX_ACCESSES, watches_registers=True)
        local = program.kernel.descriptor.group_bytes + given.shared_bytes
        self._watch = AccessWatch((), local)

    def run_block(self, block: tuple[int, int, int]) -> tuple[r.Machine, MachineFault | None]:
        machine, fault = super().run_block(block)
        for row, _, _, register, _ in machine.uses[: machine.out[r.NUM_UNSET_USES]]:
            each = self._instruction(int(row))
            _ODD.append(f"{register_name(int(register))} in {each.name} at {each.pc:#x}")
        if len(machine.log):
            for oddity in self._watch.note_block(0, machine.log[: machine.out[r.LOGGED]]):
                each = self._instruction(oddity.row)
                _ODD.append(f"{oddity.kind}: {each.name} at {each.pc:#x}")
        return machine, fault


class _Stores:
    """What programs store: places by type, and the bytes that were there before."""

    def __init__(self, memory: SimMemory) -> None:
        self._memory = memory
        self._places: list[tuple[np.dtype[Any], Array]] = []
        self._were: list[Array] = []
        own = {name: getattr(memory, name) for name in ("store", "atomic_rmw", "atomic_cas")}

        def store(pointers: Array, values: Array, mask: Array) -> None:
            self._note(pointers, values.dtype, mask)
            own["store"](pointers, values, mask)

        def rmw(operation: Any, pointers: Array, values: Array, mask: Array, order: Any) -> Any:
            self._note(pointers, values.dtype, mask)
            return own["atomic_rmw"](operation, pointers, values, mask, order)

        def cas(pointers: Array, compare: Array, values: Array, order: Any) -> Any:
            self._note(pointers, values.dtype, np.True_)
            return own["atomic_cas"](pointers, compare, values, order)

        for name, step in (("store", store), ("atomic_rmw", rmw), ("atomic_cas", cas)):
            setattr(memory, name, step)

    def clear(self) -> None:
        """Forget them."""
        self._places, self._were = [], []

    def _note(self, pointers: Array, dtype: np.dtype[Any], mask: Any) -> None:
        offsets, _ = self._memory._reach("write", pointers, mask, dtype.itemsize)
        self._places.append((dtype, offsets.copy()))
        self._were.append(self._bytes(offsets, dtype))

    def _bytes(self, offsets: Array, dtype: np.dtype[Any]) -> Array:
        read: Array = self._memory._bytes[offsets[:, None] + np.arange(dtype.itemsize)]
        return read

    def read(self) -> list[Array]:
        """What is at all places now, of each store in its type."""
        return [
            np.ascontiguousarray(self._bytes(offsets, dtype)).view(dtype)[:, 0]
            for dtype, offsets in self._places
        ]

    def undo(self) -> None:
        """All is as it was before the first store."""
        for (dtype, offsets), was in zip(self._places[::-1], self._were[::-1], strict=True):
            self._memory._bytes[offsets[:, None] + np.arange(dtype.itemsize)] = was


class CheckedEmu(EmuGpu):
    """`emu:` under the name of a simulated GPU, with the interpreter beside it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._stores = _Stores(self._memory)

    @staticmethod
    def _base_of(name: str) -> int:
        emulated = name.replace("sim:", "emu:")
        return EmuGpu._base_of(emulated if emulated in EXECUTED else EXECUTED[0])

    def _run_program(self, launch: QueuedLaunch, program: int) -> None:
        own = launch.values
        both = own if isinstance(own, dict) and "both" in own else {"both": [None, None]}
        stores = self._stores
        stores.clear()
        launch.values = both["both"][0]
        SimGpu._run_program(self, launch, program)
        both["both"][0] = launch.values
        wanted = stores.read()
        stores.undo()
        launch.values = both["both"][1]
        _ODD.clear()
        super()._run_program(launch, program)
        both["both"][1] = launch.values
        launch.values = both
        _compare(launch, self.limits.arch, wanted, stores.read())


def _compare(launch: QueuedLaunch, arch: str, wanted: list[Array], found: list[Array]) -> None:
    constants = {
        name: value
        for name, value in launch.arguments.items()
        if isinstance(value, bool | int | str) or value is None
    }
    parameters = {p.name for p in launch.jit.params if p.is_constexpr}
    form = {name: str(value) for name, value in constants.items() if name in parameters}
    key = f"{launch.jit.__name__} {json.dumps(form, sort_keys=True)}"
    entry = FOUND.setdefault(
        key, {"kernel": launch.jit.__name__, "arch": arch, "programs": 0, "types": {}, "odd": []}
    )
    entry["programs"] += 1
    entry["odd"] = sorted({*entry["odd"], *_ODD})
    for want, have in zip(wanted, found, strict=True):
        of_type = entry["types"].setdefault(want.dtype.name, [0, 0, 0.0, 0.0])
        of_type[0] += want.size
        is_other = want.view(f"u{want.itemsize}") != have.view(f"u{want.itemsize}")
        of_type[1] += int(is_other.sum())
        if not is_other.any():
            continue
        a, b = (values.astype(np.float64) for values in (want, have))
        both_nan = np.isnan(a) & np.isnan(b)
        apart = np.where(both_nan | (a == b), 0.0, np.abs(a - b))
        apart = np.where(np.isfinite(apart), apart, np.inf)
        size = np.abs(a[np.isfinite(a)]).max(initial=0.0)
        of_type[2] = max(of_type[2], float(apart.max()))
        of_type[3] = max(of_type[3], float(apart.max() / size) if size else float(apart.max()))


def pytest_configure() -> None:
    """Have AMD's simulated GPUs be checked ones."""
    plain = sim.open_sim
    emu.Execution = _WatchedExecution  # type: ignore[attr-defined, assignment]

    def open_sim(name: str, seed: int = 0, **options: Any) -> SimGpu:
        emulated = name.replace("sim:", "emu:")
        target = os.environ.get("CHECKED_EMU_TARGET", emulated.removeprefix("emu:"))
        if emulated not in EXECUTED and "CHECKED_EMU_ALL" not in os.environ:
            return plain(name, seed, **options)
        return CheckedEmu(name, named_gpu(target), seed, **options)

    sim.open_sim = open_sim
    if file := os.environ.get("CHECKED_EMU"):
        atexit.register(_leave, file)


def _leave(file: str) -> None:
    with open(file, "a") as out:
        for key, entry in FOUND.items():
            out.write(json.dumps({"form": key, **entry}) + "\n")
