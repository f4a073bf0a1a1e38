"""Records a program that knows nothing of this package: its Triton launches, the memory they got.

Metadata of tensors only, and the values of small integer tensors of the host. What calls it is in
`hooks.py`. Knows torch's and Triton's objects by what they answer, and imports neither.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import shutil
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from hypocenter.foreign.argument_facts import (
    INTERPRETER,
    device_of,
    dtype_of,
    is_pinned,
    scalar_of,
    undefined_in,
    values_of,
)
from hypocenter.foreign.call_text import launch_in
from hypocenter.record import ring
from hypocenter.record.bundle import Snapshot
from hypocenter.record.catalogue import sources_of
from hypocenter.record.events import (
    FOREIGN,
    OUTSIDE_PLANS,
    Allocated,
    AllocationRecord,
    AnyEvent,
    ArgumentRecord,
    Called,
    DeviceRecord,
    Freed,
    Launched,
    LaunchRecord,
    MaskedOff,
    RanUnguarded,
    Rejected,
    SourceRecord,
    StreamEvent,
    TensorRecord,
    Values,
)
from hypocenter.record.guard_faults import AccessFault
from hypocenter.record.ring_writer import RingWriter
from hypocenter.record.run_folder import claim_folder, process_record
from hypocenter.record.runtime_text import kind_of_text
from hypocenter.record.trace_log import TraceWriter
from hypocenter.refusals import AnyRefusal
from hypocenter.tensor import span_of

#: What is written of one program; past it the recording begins anew, and the oldest is gone.
STATIC_BYTES = 16 << 20
MAX_VALUE_BYTES, RECENT_BYTES = 4096, 4 << 20
MAX_KERNELS, MAX_BLOCKS = 1024, 4096
#: The most that is kept of a tensor in part of which nobody has written.
MAX_UNDEFINED_BYTES = 1 << 16
#: What is kept of a tensor of integers of a launch that left one of its tensors, and how many
#: findings of a guarded run are.
GUARD_BYTES, MAX_OF_GUARD = 1 << 20, 512

_INTEGERS = frozenset({"I8", "I16", "I32", "I64", "U8"})
_FLOATS = frozenset({"F16", "BF16", "F32", "F64"})


@dataclass(frozen=True, slots=True)
class _Kernel:
    """What is the same in every launch of a kernel; `jit` is kept so that its id stays its own."""

    jit: Any
    name: str
    names: tuple[str, ...]
    defaults: Mapping[str, Any]
    constants: frozenset[str]
    source: str


@dataclass(frozen=True, slots=True)
class _Storage:
    """Memory that a launch was given. `reference` dies with it; None where that is not seen."""

    allocation: int
    num_bytes: int
    reference: Any


class ForeignRecorder:
    """Records one process; raises what goes wrong, which `hooks.py` keeps to itself.

    `sees_frees`: torch's object for a storage lives as long as the storage, and can be watched.
    """

    def __init__(
        self, base: Path, static_bytes: int = STATIC_BYTES, *, sees_frees: bool = True
    ) -> None:
        self._base, self._static_bytes, self._sees_frees = base, static_bytes, sees_frees
        self._lock = threading.RLock()
        self._seq, self._ids = itertools.count(1), itertools.count(1)
        self._gone: deque[int] = deque()  # ids of storages that died since the last launch
        self.num_launches = 0
        self._has_failed = False
        #: What a guarded run found and could not guard, which outlives a log that begins anew.
        self._of_guard: list[MaskedOff | RanUnguarded] = []
        #: Of the launch that is being made, what its tensors held before: number, and values.
        self._held: tuple[int, list[Values]] = (0, [])
        self._begin()

    def _begin(self) -> None:
        self._writer = RingWriter(claim_folder(self._base), static_bytes=self._static_bytes)
        self.folder = self._writer.folder
        self._trace: TraceWriter | None = None
        self._kernels: dict[int, _Kernel] = {}
        self._storages: dict[tuple[str, int], _Storage] = {}
        self._tensors: dict[tuple[Any, ...], int] = {}
        self._written: set[str] = set()
        self._devices: set[str] = set()
        self._is_full = False
        self._static(process_record())
        for event in self._of_guard:
            self._keep_event(event)

    # -- what the program does --------------------------------------------------------------------

    def record_launch(
        self,
        jit: Any,
        args: tuple[Any, ...],
        options: Mapping[str, Any],
        grid: Any,
        device: str,
        limits: Any = None,
        stream: str = "",
        caller: FrameType | None = None,
        site: str = "",
    ) -> Launched:
        """A launch is about to be made: `options` are its keywords, `caller` the frame it is in."""
        with self._lock:
            if self._is_full:
                self._begin_anew()
            self._drain()
            self.num_launches += 1
            self._writer.header[ring.CELL_STEP] = self.num_launches
            if device not in self._devices:
                self._devices.add(device)
                self._static(DeviceRecord(name=device, limits=limits))
            kernel = self._kernels.get(id(jit)) or self._new_kernel(jit)
            given = {**kernel.defaults, **dict(zip(kernel.names, args, strict=False))}
            given |= {name: value for name, value in options.items() if name in kernel.names}
            held: list[Values] = []
            arguments, constants = [], {}
            for name in kernel.names:
                value = given.get(name)
                if name in kernel.constants:
                    constants[name] = scalar_of(value)
                else:
                    arguments.append(self._argument(kernel, name, value, device, caller, held))
            record = LaunchRecord(
                kernel=kernel.name,
                function=kernel.name,
                device=device,
                grid=tuple(int(size) for size in ((grid,) if isinstance(grid, int) else grid)),
                num_warps=int(options.get("num_warps") or (0 if device == INTERPRETER else 4)),
                arguments=tuple(arguments),
                constants=constants,
                options={
                    name: scalar_of(value)
                    for name, value in options.items()
                    if name not in kernel.names and name != "num_warps"
                },
                source=kernel.source,
                site=site,
                stream=stream,
            )
            event = Launched(**self._now(), launch=record)
            if held:
                self._keep(event.seq, tuple(held))
            self._held = event.seq, held
            self._event(event)
            return event

    def record_guarded(
        self, made: Launched, faults: Sequence[AccessFault], given: Mapping[str, Any]
    ) -> None:
        """Accesses of a launch were masked off; `given` are its tensors, whose integers are kept.

        Of a tensor that the launch itself has changed the later values are all there is, but where
        Triton's interpreter ran it.
        """
        with self._lock:
            before = self._held[1] if self._held[0] == made.seq else []
            held = {values.tensor: values for values in before}
            for argument in made.launch.arguments:
                tensor = given.get(argument.name)
                if argument.tensor is None or tensor is None or argument.tensor in held:
                    continue
                kind = dtype_of(tensor.dtype)
                if kind in _INTEGERS and 0 < tensor.numel() * tensor.element_size() <= GUARD_BYTES:
                    held[argument.tensor] = values_of(tensor, argument.tensor, kind)
            if held:
                self._trace_writer().first(
                    Snapshot(made.step, OUTSIDE_PLANS, made.seq, tuple(held.values()))
                )
            for fault in faults:
                self._keep_of_guard(
                    MaskedOff(**self._now(), fault=fault, launched=made.seq, launch=made.launch)
                )

    def record_unguarded(
        self, kernel: str, reason: str, file: str = "", line: int = 0, expression: str = ""
    ) -> None:
        """Launches of a kernel run as they are."""
        with self._lock:
            self._keep_of_guard(
                RanUnguarded(
                    **self._now(),
                    kernel=kernel,
                    reason=reason,
                    file=file,
                    line=line,
                    expression=expression,
                )
            )

    def count_guarded(self) -> None:
        """Another launch was made in its guarded form."""
        number = ring.CHECKS.index("guard")
        self._writer.header[ring.CELL_ARMED] |= 1 << number
        self._writer.header[ring.CELL_CHECK_RUNS + number] += 1

    def _keep_of_guard(self, event: MaskedOff | RanUnguarded) -> None:
        if len(self._of_guard) < MAX_OF_GUARD:
            self._of_guard.append(event)
            self._keep_event(event)

    def begin(self) -> None:
        """What may take longer than anyone waits for begins: a launch, a wait for the GPU."""
        self._writer.header[ring.CELL_STEP_STARTED] = time.monotonic_ns()

    def end(self) -> None:
        """What `begin` began is over."""
        self._writer.header[ring.CELL_STEP_STARTED] = 0

    def record_synchronisation(self, site: str) -> None:
        """The host has waited for everything."""
        with self._lock:
            self._event(
                StreamEvent(**self._now(), action="synchronise", event=0, stream="", site=site)
            )

    def record_failure(self, call: str, outcome: str, site: str, *, is_statement: bool) -> None:
        """An exception ends the program; see Called."""
        with self._lock:
            self._has_failed = True
            self._drain()
            self._keep_event(
                Called(
                    seq=next(self._seq),
                    step=self.num_launches,
                    call=call,
                    outcome=outcome,
                    site=site,
                    kind=kind_of_text(outcome),
                    is_statement=is_statement,
                )
            )

    def record_refusal(self, refusal: AnyRefusal, kernel: str, site: str) -> None:
        """A launch was refused, and that ends the program; `site` is the program's own line."""
        with self._lock:
            self._keep_event(
                Rejected(
                    seq=next(self._seq),
                    step=self.num_launches,
                    refusal=refusal,
                    kernel=kernel,
                    site=site,
                )
            )

    def blocks(self, device: str, blocks: list[tuple[int, int, bool]]) -> None:
        """Memory of torch's allocator, as (address, bytes, whether it is in use)."""
        with self._lock:
            known = {address for on, address in self._storages if on == device}
            for address, num_bytes, is_used in blocks[:MAX_BLOCKS]:
                if address not in known:
                    state = "in use" if is_used else "held free by the allocator"
                    number = next(self._ids)
                    self._record_allocation(
                        number, device, address, num_bytes, f"memory of torch, {state}"
                    )
                    if not is_used:
                        self._keep_event(
                            Freed(**self._now(), allocation=number, site="before the end")
                        )

    def close(self) -> None:
        """The program ends by itself."""
        with self._lock:
            self._drain()
            self._writer.close(ring.FAILED if self._has_failed else ring.ENDED)

    def abandon(self) -> None:
        """In the child of a fork: the folder is the parent's."""
        self._writer.release()

    # -- tensors ----------------------------------------------------------------------------------

    def _argument(
        self,
        kernel: _Kernel,
        name: str,
        value: Any,
        device: str,
        caller: FrameType | None,
        held: list[Values],
    ) -> ArgumentRecord:
        tensor = value
        cast = None
        if hasattr(value, "base") and hasattr(value, "dtype") and hasattr(value, "data_ptr"):
            tensor, cast = value.base, str(value.dtype)  # triton.reinterpret
        if not hasattr(tensor, "untyped_storage") or not hasattr(tensor, "data_ptr"):
            return ArgumentRecord(name, None, scalar_of(value))
        storage = tensor.untyped_storage()
        where = device_of(tensor, device)
        address = int(storage.data_ptr())
        known = self._storages.get((where, address))
        if known is None or not self._is_same(known, storage):
            shown = _name(kernel, name, caller)
            known = self._new_storage(where, address, storage, tensor, shown)
        key = (known.allocation, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        number = self._tensors.get(key)
        if number is None:
            number = self._new_tensor(key, tensor, _name(kernel, name, caller))
        if where == INTERPRETER and (kind := dtype_of(tensor.dtype)) in _INTEGERS:
            self._hold(tensor, number, kind, held)
        elif where == INTERPRETER and kind in _FLOATS:
            self._hold_undefined(tensor, number, kind, held)
        return ArgumentRecord(name, number, cast)

    def _new_storage(
        self, where: str, address: int, storage: Any, tensor: Any, name: str
    ) -> _Storage:
        number, gone = next(self._ids), self._gone
        reference: Any = None
        if self._sees_frees:
            reference = weakref.ref(storage, lambda _: gone.append(number))
        known = _Storage(number, int(storage.nbytes()), reference)
        self._storages[where, address] = known
        kind = "device"
        if where == "cpu":
            kind = "pinned" if is_pinned(tensor) else "host"
        self._record_allocation(number, where, address, known.num_bytes, name, kind)
        return known

    def _is_same(self, known: _Storage, storage: Any) -> bool:
        if known.reference is not None:
            return known.reference() is storage
        return known.num_bytes == int(storage.nbytes())

    def _new_tensor(self, key: tuple[Any, ...], tensor: Any, name: str) -> int:
        allocation, address, shape, strides, dtype = key
        number = self._tensors[key] = next(self._ids)
        width = int(tensor.element_size())
        num_elements = span_of(shape, strides)
        self._static(
            TensorRecord(
                id=number,
                name=name,
                owner=FOREIGN,
                dtype=dtype_of(dtype),
                shape=tuple(shape),
                strides=tuple(strides),
                offset=int(tensor.storage_offset()),
                allocation=allocation,
                address=address,
                extent_bytes=0 if 0 in shape else num_elements * width,
            )
        )
        return number

    def _record_allocation(
        self,
        number: int,
        device: str,
        address: int,
        num_bytes: int,
        name: str,
        kind: str = "device",
    ) -> None:
        record = AllocationRecord(
            id=number,
            kind=kind,
            device=device,
            address=address,
            num_bytes=num_bytes,
            name=name,
            owner=FOREIGN,
            site="",
        )
        self._keep_event(Allocated(**self._now(), allocation=record))

    def _hold(self, tensor: Any, number: int, dtype: str, held: list[Values]) -> None:
        """What a small integer tensor of the host holds: kernels find their way by such."""
        num_bytes = tensor.numel() * tensor.element_size()
        if 0 < num_bytes <= MAX_VALUE_BYTES and all(value.tensor != number for value in held):
            held.append(values_of(tensor, number, dtype))

    def _hold_undefined(self, tensor: Any, number: int, dtype: str, held: list[Values]) -> None:
        """A tensor of floats in part of which still stands what nobody has written."""
        num_bytes = tensor.numel() * tensor.element_size()
        is_held = any(value.tensor == number for value in held)
        if is_held or not 0 < num_bytes <= MAX_UNDEFINED_BYTES or not tensor.is_contiguous():
            return
        held += undefined_in(tensor, number, dtype)

    def _keep(self, seq: int, held: tuple[Values, ...]) -> None:
        self._trace_writer().recent(Snapshot(self.num_launches, OUTSIDE_PLANS, seq, held))

    def _trace_writer(self) -> TraceWriter:
        if self._trace is None:
            self._trace = TraceWriter(self.folder, RECENT_BYTES)
        return self._trace

    # -- kernels ----------------------------------------------------------------------------------

    def _new_kernel(self, jit: Any) -> _Kernel:
        parameters = inspect.signature(jit.fn).parameters
        records: tuple[SourceRecord, ...] = sources_of.__wrapped__(jit)
        for record in records:
            if record.id not in self._written:
                self._written.add(record.id)
                self._static(record)
        kernel = _Kernel(
            jit,
            jit.fn.__name__,
            tuple(parameters),
            {n: p.default for n, p in parameters.items() if p.default is not p.empty},
            frozenset(n for n, p in parameters.items() if "constexpr" in str(p.annotation)),
            records[0].id if records else "",
        )
        if len(self._kernels) >= MAX_KERNELS:
            self._kernels.clear()
        self._kernels[id(jit)] = kernel
        return kernel

    # -- writing ----------------------------------------------------------------------------------

    def _drain(self) -> None:
        """Tell of the memory that died: its finaliser may run anywhere, even in here."""
        while self._gone:
            number = self._gone.popleft()
            self._keep_event(
                Freed(**self._now(), allocation=number, site="its last tensor went away")
            )

    def _begin_anew(self) -> None:
        """The log is full: what matters is what was done last."""
        old = self._writer
        self._gone.clear()
        self._begin()
        self._writer.header[ring.CELL_NUM_LOST] = self.num_launches
        old.release()
        with contextlib.suppress(OSError):
            shutil.rmtree(old.folder)

    def _now(self) -> dict[str, int]:
        return {"seq": next(self._seq), "step": self.num_launches}

    def _event(self, event: AnyEvent) -> None:
        if not self._writer.event(event):
            self._writer.header[ring.CELL_NUM_LOST] += 1

    def _keep_event(self, event: AnyEvent) -> None:
        if not self._writer.static(event):
            self._is_full = True
            self._event(event)

    def _static(self, record: Any) -> None:
        if not self._writer.static(record):
            self._is_full = True
            self._writer.header[ring.CELL_NUM_LOST] += 1


def _name(kernel: _Kernel, parameter: str, caller: FrameType | None) -> str:
    """How the program spells the argument; else whose parameter it is."""
    spelled = launch_in(caller).of(parameter, kernel.names) if caller is not None else None
    return spelled or f"tensor of {parameter}"
