"""Memory that a program's launches were given: storages, tensors in them, and their end.

Metadata of tensors only, and the values of small integer tensors of the host. Knows torch's
tensors by what they answer.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import weakref
from collections import deque
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

from hypocenter.base.tensor import span_of
from hypocenter.foreign.argument_facts import (
    INTERPRETER,
    MAX_LOOKED_AT_BYTES,
    device_of,
    dtype_of,
    is_pinned,
    scalar_of,
    undefined_in,
    values_of,
)
from hypocenter.foreign.call_text import launch_in
from hypocenter.foreign.caller import caller_of_now, made_at
from hypocenter.foreign.run_log import RunLog
from hypocenter.foreign.seen_reads import SeenReads
from hypocenter.record.events import (
    FOREIGN,
    Allocated,
    AllocationRecord,
    ArgumentRecord,
    Freed,
    TensorRecord,
    Values,
)

MAX_BLOCKS = 4096
#: How many arguments of launches are kept with how they are spelled.
MAX_SPELLED = 4096
#: The most that is kept of a tensor of integers of the host, where a run is not looked at closely.
MAX_VALUE_BYTES = 4096

INTEGERS = frozenset({"I8", "I16", "I32", "I64", "U8"})
FLOATS = frozenset({"F16", "BF16", "F32", "F64"})

#: Names, lines that make them, and the codes, so that no other one gets their ids.
_spelled: dict[tuple[int, int, str, tuple[str, ...]], tuple[str, str, CodeType]] = {}


def storages_are_kept() -> bool:
    """Whether torch's object for a storage lives as long as the storage, as of torch 2.1 on.

    Of a program without torch, as one of numba's, there is none.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    tensor = torch.empty(1, device="cpu")
    return weakref.ref(tensor.untyped_storage())() is not None


@dataclass(slots=True, eq=False)
class Storage:
    """Memory that a launch was given. `reference` dies with it; None where that is not seen.

    `tensors` are those in it that launches were given; `freed` is set when it has died. Of one that
    `is_captured` the line at which it dies is noted as well.
    """

    made: Allocated
    reference: Any
    tensors: dict[tuple[Any, ...], TensorRecord] = field(default_factory=dict)
    freed: Freed | None = None
    is_captured: bool = False

    @property
    def number(self) -> int:
        return self.made.allocation.id

    def has_moved(self) -> bool:
        """Whether torch's object lives on, but not with this memory: it was resized, or swapped."""
        storage = self.reference() if self.reference is not None else None
        return storage is not None and storage.data_ptr() != self.made.allocation.address


@dataclass(slots=True)
class Given:
    """What a launch on `device` is given: what its tensors hold, if that is kept, and their memory.

    `names` are the kernel's parameters, and `caller` is the frame of the launch. `may_look`: what
    tensors of a GPU hold is read back.
    """

    names: tuple[str, ...]
    device: str
    caller: FrameType | None
    values: list[Values]
    storages: list[Storage]
    may_look: bool = False
    #: By the ids of torch's objects the numbers of tensors that are passed as what they are.
    numbers: dict[int, int] = field(default_factory=dict)

    def spelling_of(self, parameter: str) -> tuple[str, str]:
        """How the program spells what it passes, else whose parameter it is; the line that made it.

        Kept by code and instruction, as `caller.py` does: to ask for a code's hash takes longer.
        """
        frame = self.caller
        if frame is None:
            return f"tensor of {parameter}", ""
        key = id(frame.f_code), frame.f_lasti, parameter, self.names
        known = _spelled.get(key)
        if known is None:
            name = launch_in(frame).of(parameter, self.names) or f"tensor of {parameter}"
            if len(_spelled) >= MAX_SPELLED:
                _spelled.clear()
            known = _spelled[key] = name, made_at(frame, name), frame.f_code
        return known[:2]


class SeenMemory:
    """Writes each storage and tensor once, and when a storage has died.

    `sees_frees`: torch's object for a storage lives as long as the storage, and can be watched.
    `reads` is told of tensors that hold what nobody has written.
    """

    def __init__(self, log: RunLog, reads: SeenReads, *, sees_frees: bool = True) -> None:
        self._log, self._reads, self._sees_frees = log, reads, sees_frees
        self._ids = itertools.count(1)
        #: Numbers of storages that died and were not told of, and where those in graphs did.
        self.gone: deque[tuple[int, str]] = deque()
        self._storages: dict[tuple[str, int], Storage] = {}
        self._alive: dict[int, Storage] = {}
        #: Whether memory was given to another storage while torch's object for the first lives on.
        self.has_passed_on = False
        self.num_tensors = 0
        #: The types of the tensors so far whose memory is known by torch's object for it.
        self.tensor_types: set[type] = set()

    def forget(self) -> None:
        """The log begins anew: what is seen from now on is written again."""
        self._storages.clear()
        self._alive = {n: storage for n, storage in self._alive.items() if storage.is_captured}

    def write_again(self, storage: Storage) -> None:
        """Into a log that began anew: memory that a graph points into."""
        self._log.keep_event(storage.made)
        for record in storage.tensors.values():
            self._log.static(record)
        if storage.freed is not None:
            self._log.keep_event(storage.freed)
        else:
            where = storage.made.allocation
            self._storages[where.device, where.address] = storage

    def drain(self) -> None:
        """Tell of the memory that died: its finaliser may run anywhere, even in here."""
        while self.gone:
            number, site = self.gone.popleft()
            storage = self._alive.pop(number, None)
            if storage is not None:
                self.lose(storage, site or "its last tensor went away")

    def lose(self, storage: Storage, site: str) -> None:
        """Tell of memory that is there no more."""
        if storage.freed is None:
            storage.freed = Freed(**self._log.now(), allocation=storage.number, site=site)
            self._log.keep_event(storage.freed)

    def _note_death(self, number: int) -> None:
        """Called by a finaliser: no lock is taken here and nothing written."""
        storage = self._alive.get(number)
        site = ""
        if storage is not None and storage.is_captured:
            with contextlib.suppress(Exception):  # the interpreter may be shutting down
                site = caller_of_now()[1]
        self.gone.append((number, site))

    def argument(self, parameter: str, value: Any, given: Given) -> ArgumentRecord:
        """What a launch is given for a parameter; `given` takes the memory behind it."""
        tensor, cast = value, None
        if type(value) not in self.tensor_types:
            if hasattr(value, "base") and hasattr(value, "dtype") and hasattr(value, "data_ptr"):
                tensor, cast = value.base, str(value.dtype)  # triton.reinterpret
            if not hasattr(tensor, "untyped_storage") or not hasattr(tensor, "data_ptr"):
                return ArgumentRecord(parameter, None, scalar_of(value))
        storage = tensor.untyped_storage()
        where = device_of(tensor.device, given.device)
        address = storage.data_ptr()
        known = self._storages.get((where, address))
        if known is None or not self._is_same(known, storage):
            known = self._new_storage(where, address, storage, tensor, parameter, given)
        given.storages.append(known)
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        record = known.tensors.get(key)
        if record is None:
            name, _ = given.spelling_of(parameter)
            record = known.tensors[key] = self._new_tensor(known, tensor, key, name)
        number = record.id
        if cast is None:
            given.numbers[id(value)] = number
            if known.reference is not None:
                self.tensor_types.add(type(tensor))
        if where == INTERPRETER or (given.may_look and where == given.device):
            with contextlib.suppress(RuntimeError):  # of a GPU that has failed nothing can be read
                self._look_into(tensor, number, given)
        return ArgumentRecord(parameter, number, cast)

    def number_of(self, storage: Any) -> int:
        """That of memory which a launch was given, 0 for any other."""
        address = storage.data_ptr()
        for (_, at), known in self._storages.items():
            if at == address and self._is_same(known, storage):
                return known.number
        return 0

    def blocks(self, device: str, blocks: list[tuple[int, int, bool]]) -> None:
        """Memory of torch's allocator, as (address, bytes, whether it is in use)."""
        known = {address for on, address in self._storages if on == device}
        for address, num_bytes, is_used in blocks[:MAX_BLOCKS]:
            if address not in known:
                state = "in use" if is_used else "held free by the allocator"
                number = next(self._ids)
                self._record_allocation(
                    AllocationRecord(
                        id=number,
                        kind="device",
                        device=device,
                        address=address,
                        num_bytes=num_bytes,
                        name=f"memory of torch, {state}",
                        owner=FOREIGN,
                        site="",
                    )
                )
                if not is_used:
                    self._log.keep_event(
                        Freed(**self._log.now(), allocation=number, site="before the end")
                    )

    def _new_storage(
        self,
        where: str,
        address: int,
        storage: Any,
        tensor: Any,
        parameter: str,
        given: Given,
    ) -> Storage:
        before = self._storages.get((where, address))
        self.has_passed_on |= before is not None and before.has_moved()
        number = next(self._ids)
        kind = "device"
        if where == "cpu":
            kind = "pinned" if is_pinned(tensor) else "host"
        name, site = given.spelling_of(parameter)
        made = self._record_allocation(
            AllocationRecord(
                id=number,
                kind=kind,
                device=where,
                address=address,
                num_bytes=int(storage.nbytes()),
                name=name,
                owner=FOREIGN,
                site=site,
            )
        )
        reference: Any = None
        if self._sees_frees:
            reference = weakref.ref(storage, lambda _: self._note_death(number))
        known = self._storages[where, address] = Storage(made, reference)
        if self._sees_frees:
            self._alive[number] = known
        return known

    def _is_same(self, known: Storage, storage: Any) -> bool:
        if known.reference is not None:
            return known.reference() is storage
        return known.made.allocation.num_bytes == int(storage.nbytes())

    def _new_tensor(
        self, known: Storage, tensor: Any, key: tuple[Any, ...], name: str
    ) -> TensorRecord:
        """`key` is its address, shape, strides and type."""
        address, size, strides, dtype = key
        shape = tuple(size)
        record = TensorRecord(
            id=next(self._ids),
            name=name,
            owner=FOREIGN,
            dtype=dtype_of(dtype),
            shape=shape,
            strides=strides,
            offset=tensor.storage_offset(),
            allocation=known.made.allocation.id,
            address=address,
            extent_bytes=span_of(shape, strides) * tensor.element_size(),
        )
        self._log.static(record)
        self.num_tensors += 1
        return record

    def _record_allocation(self, record: AllocationRecord) -> Allocated:
        made = Allocated(**self._log.now(), allocation=record)
        self._log.keep_event(made)
        return made

    def _look_into(self, tensor: Any, number: int, given: Given) -> None:
        """Keep what a small tensor of integers holds: kernels find their way by such. Of floats
        keep in which elements there still is what nobody has written."""
        self._reads.forget(tensor)
        kind, num_bytes = dtype_of(tensor.dtype), tensor.numel() * tensor.element_size()
        if not num_bytes or any(value.tensor == number for value in given.values):
            return
        if kind in INTEGERS:
            most = MAX_LOOKED_AT_BYTES if given.may_look else MAX_VALUE_BYTES
            if num_bytes <= most:
                given.values.append(values_of(tensor, number, kind))
            return
        is_small = num_bytes <= MAX_LOOKED_AT_BYTES and tensor.is_contiguous()
        if kind in FLOATS and is_small and (undefined := undefined_in(tensor, number, kind)):
            given.values += undefined
            self._reads.look_at(tensor, number)
