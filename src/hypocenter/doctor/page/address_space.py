"""The memory around a wrong address as it was when the launch ran, as plain records.

Tells what lies where; `address_picture.py` draws it.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass

from hypocenter.doctor.case import Case
from hypocenter.doctor.diagnosis import RootCause
from hypocenter.doctor.page.example_access import (
    ExampleAccess,
    address_of_finding,
    launch_of_root,
    tensor_of_finding,
)
from hypocenter.record.bundle_index import LaunchMade
from hypocenter.record.events import AllocationRecord, TensorRecord

#: Blocks on either side of the address, and those of the launch besides.
_NUM_NEAR, _NUM_ARGUMENTS = 2, 5
_WHOLE = (1 << 64) - 1


class BlockState(enum.StrEnum):
    """What a block is at that time."""

    LIVE = "live"
    FREED = "freed"
    HOST = "memory of the host"


@dataclass(frozen=True, slots=True)
class MemoryBlock:
    """A range of memory: an allocation, or a tensor (`is_view`) that is a part of one.

    `arguments` are the parameters of the launch that point into it; `is_blamed` of the root cause.
    """

    allocation: int
    start: int
    num_bytes: int
    name: str
    owner: str
    state: BlockState
    arguments: tuple[str, ...] = ()
    is_blamed: bool = False
    is_view: bool = False

    @property
    def end(self) -> int:
        return self.start + self.num_bytes


@dataclass(frozen=True, slots=True)
class WrongAddress:
    """Where the access went; `how` says who says so."""

    start: int
    num_bytes: int
    how: str


@dataclass(frozen=True, slots=True)
class AddressSpace:
    """Blocks by their addresses, and the wrong address where one is known."""

    blocks: tuple[MemoryBlock, ...]
    wrong: WrongAddress | None
    num_left_out: int = 0


def wrong_address(
    case: Case, root: RootCause | None, example: ExampleAccess
) -> WrongAddress | None:
    """As the driver or a core dump says; else as the replay works it out."""
    fault = case.bundle.fault
    finding = example.outside or example.shown
    found = address_of_finding(case, root, finding) if root and finding else None
    if fault.address is not None:
        end = fault.address + fault.address_bytes
        if found is not None and fault.address <= found[0] < end:
            return WrongAddress(*found, "by the replay; the driver reported its page")
        page = "the driver reported this page" if fault.address_bytes > 1 else "by the driver"
        return WrongAddress(fault.address, fault.address_bytes, page)
    for sight in case.sights:
        if sight.address is not None and sight.known_bits == _WHOLE:
            return WrongAddress(sight.address, max(sight.width_bytes, 1), "by the GPU's core dump")
    return WrongAddress(*found, "by the replay") if found is not None else None


def address_space(
    case: Case, root: RootCause | None, example: ExampleAccess
) -> AddressSpace | None:
    """What lies around the wrong address, or around the blamed tensor; None where nothing is."""
    use = launch_of_root(case, root) if root else None
    wrong = wrong_address(case, root, example)
    blamed = _blamed_tensor(case, root, use, example)
    focus = wrong.start if wrong else blamed.address if blamed else None
    memories = [memory for memory in case.allocations.values() if memory.address]
    if focus is None or not memories:
        return None
    arguments = _arguments(case, use)
    kept = _near(case, memories, focus, use)
    kept |= {memory.id: memory for memory in memories if blamed and memory.id == blamed.allocation}
    for number in arguments:
        if number in case.allocations and len(kept) < 2 * _NUM_NEAR + 1 + _NUM_ARGUMENTS:
            kept.setdefault(number, case.allocations[number])
    blocks = [_block(case, memory, use, arguments, blamed) for memory in kept.values()]
    blocks += _views(case, blocks, use, blamed)
    blocks.sort(key=lambda block: (block.start, -block.num_bytes))
    return AddressSpace(tuple(blocks), wrong, len(memories) - len(kept))


def _blamed_tensor(
    case: Case, root: RootCause | None, use: LaunchMade | None, example: ExampleAccess
) -> TensorRecord | None:
    if root is None:
        return None
    finding = example.outside or example.shown
    if finding is not None and (tensor := tensor_of_finding(case, root, finding)) is not None:
        return tensor
    return case.tensor_of(use.launch, root.argument) if use and root.argument else None


def _arguments(case: Case, use: LaunchMade | None) -> dict[int, tuple[str, ...]]:
    """Of each allocation the parameters of the launch that point into it."""
    found: dict[int, tuple[str, ...]] = {}
    for argument in use.launch.arguments if use else ():
        tensor = case.tensors.get(argument.tensor) if argument.tensor is not None else None
        if tensor is not None:
            found[tensor.allocation] = (*found.get(tensor.allocation, ()), argument.name)
    return found


def _near(
    case: Case, memories: list[AllocationRecord], focus: int, use: LaunchMade | None
) -> dict[int, AllocationRecord]:
    """What holds the address, and the nearest blocks below and above it that live or lived."""
    holding = [m for m in memories if m.address <= focus < m.address + m.num_bytes]
    below = [m for m in memories if m.address + m.num_bytes <= focus]
    above = [m for m in memories if m.address > focus]
    below.sort(key=lambda m: (focus - m.address - m.num_bytes, _is_freed(case, m, use)))
    above.sort(key=lambda m: (m.address - focus, _is_freed(case, m, use)))
    near = [*holding[-3:], *below[:_NUM_NEAR], *above[:_NUM_NEAR]]
    return {memory.id: memory for memory in near}


def _is_freed(case: Case, memory: AllocationRecord, use: LaunchMade | None) -> bool:
    if use is None or use.place is None:
        return memory.id in case.freed
    return case.index.is_freed(memory.id, use.place) is not None


def _block(
    case: Case,
    memory: AllocationRecord,
    use: LaunchMade | None,
    arguments: dict[int, tuple[str, ...]],
    blamed: TensorRecord | None,
) -> MemoryBlock:
    state = BlockState.LIVE if memory.kind == "device" else BlockState.HOST
    return MemoryBlock(
        memory.id,
        memory.address,
        memory.num_bytes,
        memory.name or f"allocation {memory.id}",
        memory.owner,
        BlockState.FREED if _is_freed(case, memory, use) else state,
        arguments.get(memory.id, ()),
        is_blamed=blamed is not None and blamed.allocation == memory.id,
    )


def _views(
    case: Case, blocks: list[MemoryBlock], use: LaunchMade | None, blamed: TensorRecord | None
) -> Iterator[MemoryBlock]:
    """The blamed tensor itself, where it is a part of its allocation."""
    if blamed is None or not blamed.extent_bytes:
        return
    whole = next((block for block in blocks if block.is_blamed), None)
    if whole is None or (whole.start, whole.num_bytes) == (blamed.address, blamed.extent_bytes):
        return
    yield MemoryBlock(
        blamed.allocation,
        blamed.address,
        blamed.extent_bytes,
        blamed.name,
        blamed.owner,
        whole.state,
        is_blamed=True,
        is_view=True,
    )
