"""A launch that the driver recorded, joined with a dump and with the memory of then; facts only.

For kernels that are not Triton's: CUDA C, numba, CuPy, torch's own. Proves nothing:
`launches.py` does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hypocenter.doctor.case import Case
from hypocenter.record.driver_run import NOT_MADE, DriverMemory, DriverRun
from hypocenter.record.gpu_stop import GpuGrid, GpuStop, GpuWarp
from hypocenter.settings.environment import launch_blocking

#: A pointer has so many bytes, and lies at a multiple of them.
POINTER_BYTES = 8
_NULL_BYTES = 1 << 16
#: Other launches of a kernel that are looked at.
_MAX_OTHERS = 64


@dataclass(frozen=True, slots=True)
class KnownMemory:
    """Memory that an address lies in: `what` tells of it, `num_bytes` from `first` on.

    `is_freed`: it was there once; `freed_site` is the line that gave it back. `is_exact`: it is a
    tensor or what one call gave, and no block of a pool, which may be larger than what was asked.
    """

    what: str
    first: int
    num_bytes: int
    made_at: str = ""
    is_freed: bool = False
    freed_site: str = ""
    is_exact: bool = True

    @property
    def past(self) -> int:
        """The first address behind it."""
        return self.first + self.num_bytes


@dataclass(frozen=True, slots=True)
class Parameter:
    """Parameter `number` of a kernel: its bytes, as a number where they are eight or fewer.

    `region` is where it points, None where it is no address of known memory. `place` counts
    pointers inside a structure: the byte of the structure, 0 of what is none.
    """

    number: int
    offset: int
    num_bytes: int
    value: int
    place: int = 0
    region: KnownMemory | None = None

    @property
    def name(self) -> str:
        """`parameter 1`; of a pointer in a structure `parameter 1 at byte 8`."""
        return f"parameter {self.number}" + (f" at byte {self.place}" if self.place else "")

    @property
    def may_point(self) -> bool:
        """Whether it has the size of an address, and lies as one does."""
        return self.num_bytes == POINTER_BYTES and self.offset % POINTER_BYTES == 0


@dataclass(frozen=True, slots=True)
class DriverSight:
    """A launch of a dump as the driver was asked for it, and the lines that asked for such a one.

    `others` are the parameters of other launches of the kernel, where the dump does not tell which
    one it was. `before` are the parameters in the dump, where that is of another run of the same
    command, in which memory lay elsewhere; None where both are of one run.
    """

    kernel: str
    parameters: tuple[Parameter, ...]
    sites: tuple[str, ...]
    others: tuple[tuple[Parameter, ...], ...] = ()
    before: bytes | None = None

    @property
    def site(self) -> str:
        """The line of the program; "" where several made the same launch."""
        return self.sites[0] if len(self.sites) == 1 else ""

    def here(self, address: int, pointer: Parameter) -> int | None:
        """Where an address of the dump, that was made of `pointer`, would be in this run."""
        if self.before is None:
            return address
        text = self.before[pointer.offset : pointer.offset + POINTER_BYTES]
        if len(text) < POINTER_BYTES:
            return None
        return address - int.from_bytes(text, "little") + pointer.value


def driver_sight(
    case: Case, stop: GpuStop, warp: GpuWarp, grid: GpuGrid | None
) -> DriverSight | None:
    """The launch that a warp of a dump ran in: by name, size and parameters of its grid.

    Where the dump has no grid, since all of its warps had left: the last one of that kernel. Where
    the driver was not watched, the parameters are all that the dump has of it. None without either.
    """
    run = case.bundle.driver_run or DriverRun()
    symbol = grid.symbol if grid is not None else warp.symbol
    data = b"".join(word.to_bytes(4, "little") for word in grid.words) if grid is not None else b""
    kernels = {kernel.id: kernel for kernel in run.kernels if kernel.symbol == symbol and symbol}
    found = [
        launch
        for launch in run.launches
        if launch.kernel in kernels
        and (grid is None or (launch.grid, launch.block) == (grid.grid, grid.block))
        and launch.code not in NOT_MADE
    ]
    if not run.launches and grid is not None and grid.layout and data:
        parameters = tuple(parameters_of(case, run, grid.layout, data))
        return DriverSight(warp.kernel or symbol, parameters, ())
    if launch_blocking(case.bundle.environment):
        # The first answer that tells of a fault is that of the launch which made it.
        found = [launch for launch in found if launch.has_failed][:1] or found
    layouts = {launch.seq: kernels[launch.kernel].parameters for launch in found}
    told = {
        launch.seq: tuple(parameters_of(case, run, layouts[launch.seq], launch.data))
        for launch in found[-_MAX_OTHERS:]
    }
    same = [
        launch
        for launch in found[-_MAX_OTHERS:]
        if _agree(launch.data, data, told[launch.seq] if stop.is_of_run_before else ())
    ]
    if not same:
        return None
    last = same[-1]
    different = (told[launch.seq] for launch in same if told[launch.seq] != told[last.seq])
    return DriverSight(
        kernel=warp.kernel or symbol,
        parameters=told[last.seq],
        sites=tuple(dict.fromkeys(launch.site for launch in same)),
        others=tuple(dict.fromkeys(different)),
        before=data if stop.is_of_run_before else None,
    )


def _agree(recorded: bytes, dumped: bytes, apart: Sequence[Parameter]) -> bool:
    """Whether parameters agree as far as both are known, but for the pointers among `apart`."""
    known = min(len(recorded), len(dumped))
    texts = [bytearray(recorded[:known]), bytearray(dumped[:known])]
    for parameter in apart:
        if parameter.region is not None:
            for text in texts:
                first = parameter.offset
                text[first : first + POINTER_BYTES] = bytes(len(text[first:][:POINTER_BYTES]))
    return texts[0] == texts[1]


def parameters_of(
    case: Case, run: DriverRun, layout: tuple[tuple[int, int], ...], data: bytes
) -> Iterator[Parameter]:
    """The parameters of a launch; of a structure each word in it that is an address as well."""
    for number, (offset, num_bytes) in enumerate(layout):
        text = data[offset : offset + num_bytes]
        if len(text) < num_bytes:
            return
        value = int.from_bytes(text[:POINTER_BYTES], "little")
        whole = Parameter(number, offset, num_bytes, value)
        if whole.may_point:
            yield Parameter(number, offset, num_bytes, value, region=region_of(case, run, value))
            continue
        yield whole
        for place in range(-offset % POINTER_BYTES, num_bytes - POINTER_BYTES + 1, POINTER_BYTES):
            word = int.from_bytes(text[place : place + POINTER_BYTES], "little")
            region = region_of(case, run, word)
            if region is not None:
                yield Parameter(number, offset + place, POINTER_BYTES, word, place, region)


def region_of(case: Case, run: DriverRun, address: int) -> KnownMemory | None:
    """The innermost memory that is known to hold an address: a tensor, a block of torch's, what the
    driver gave and has not taken back, else what it has."""
    if address < _NULL_BYTES:
        return None
    tensors = [
        KnownMemory(
            what=f"{tensor.name} ({tensor.dtype} {list(tensor.shape)}, "
            f"{tensor.extent_bytes} bytes)",
            first=tensor.address,
            num_bytes=tensor.extent_bytes,
            made_at=tensor.made_at,
        )
        for tensor in run.tensors
        if tensor.address <= address < tensor.address + max(tensor.extent_bytes, 1)
    ]
    # A view begins where its base does: the smallest one that begins here is what was passed.
    begins = [region for region in tensors if region.first == address]
    for regions in (begins, tensors, list(_blocks(case, address))):
        if regions:
            return max(regions, key=lambda region: region.num_bytes)
    return driver_memory(run, address)


def driver_memory(run: DriverRun, address: int) -> KnownMemory | None:
    """What the driver gave that holds an address: what is there, else what was freed last."""
    held = [memory for memory in run.memory if memory.holds(address)]
    alive = [memory for memory in held if not memory.freed_seq]
    gone = sorted((m for m in held if m.freed_seq), key=lambda memory: memory.freed_seq)
    memory = next(iter((*alive, *gone[::-1])), None)
    return _region(memory) if memory is not None else None


def _region(memory: DriverMemory) -> KnownMemory:
    return KnownMemory(
        what=f"{memory.num_bytes} bytes of {memory.call}",
        first=memory.address,
        num_bytes=memory.num_bytes,
        made_at=memory.site,
        is_freed=bool(memory.freed_seq),
        freed_site=memory.freed_site,
    )


def _blocks(case: Case, address: int) -> Iterator[KnownMemory]:
    """Memory of torch's allocator, as it stood at the end."""
    for record in case.allocations.values():
        if record.kind != "device" or record.id in case.freed:
            continue
        if record.address <= address < record.address + record.num_bytes:
            yield KnownMemory(
                what=f"{record.name} ({record.num_bytes} bytes)",
                first=record.address,
                num_bytes=record.num_bytes,
                made_at=record.site,
                is_exact=bool(record.site),
            )


def parameter_rows(sight: DriverSight) -> Iterator[tuple[str, str]]:
    """Name and value of each parameter, for people."""
    for parameter in sight.parameters:
        region = parameter.region
        if region is not None:
            at = parameter.value - region.first
            inside = f" at byte {at}" if at else ""
            gone = ", freed" if region.is_freed else ""
            yield parameter.name, f"{parameter.value:#x}, {region.what}{inside}{gone}"
        elif parameter.num_bytes <= POINTER_BYTES:
            is_address = parameter.num_bytes == POINTER_BYTES
            shown = f"{parameter.value:#x}" if is_address else _number(parameter)
            yield parameter.name, shown
        else:
            yield parameter.name, f"a structure of {parameter.num_bytes} bytes"


def _number(parameter: Parameter) -> str:
    """A number with its sign: what a kernel takes it as is not known."""
    bits = 8 * parameter.num_bytes
    value = parameter.value
    return str(value - (1 << bits) if value >> bits - 1 else value)
