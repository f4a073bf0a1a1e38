"""Where a GPU stood when it stopped: a dump's facts joined with the record, and in words.

Proves nothing: `rungs/gpu_stop.py` does.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import PurePath

from hypocenter.base.wording import count_text
from hypocenter.doctor.case import Case
from hypocenter.doctor.diagnosis import GpuSight
from hypocenter.doctor.kernel_text import line_text
from hypocenter.doctor.rungs.driver.launch_sight import driver_sight, parameter_rows
from hypocenter.record.bundle_index import LaunchMade
from hypocenter.record.events import LaunchRecord
from hypocenter.record.gpu_stop import Block, GpuFrame, GpuGrid, GpuStop, GpuWarp

_WHOLE = (1 << 64) - 1
#: Parameters that are shown, and how far from one an address may be to be told as near it.
_MAX_PARAMETERS, _NEAR_BYTES = 12, 1 << 30


def sight_of(case: Case, stop: GpuStop) -> GpuSight | None:
    """What a dump says of the warp at fault, or of the line at which most stand."""
    warp = stop.faulting
    if warp is None:
        return None
    grid = grid_of(stop, warp)
    use = launch_of(case, grid) if grid is not None else None
    frame = own_frame(case, warp, use)
    address, parameters = lowest_address(warp), tuple(_parameters(case, stop, grid, use))
    at = (frame.file, frame.line) if frame else ("", 0)
    access = warp.access
    return GpuSight(
        source=stop.source,
        exception=stop.exception or warp.exception,
        kernel=warp.kernel or (grid.kernel if grid else ""),
        file=at[0],
        line=at[1],
        text=_text(case, use, frame),
        called_from=tuple((f.file, f.line) for f in warp.frames if (f.file, f.line) != at),
        is_triton=use is not None,
        block=warp.block,
        threads=_threads(warp, grid),
        num_warps=sum(s.num_warps for s in stop.standing if (s.file, s.line) == _place(warp)),
        num_in_all=stop.num_warps,
        operation=access.operation if access else "",
        width_bytes=access.width_bytes if access else 0,
        address=address if address is not None else stop.address,
        known_bits=access.known_bits if access and address is not None else _WHOLE,
        parameters=parameters,
        near=_near(grid, use, warp, address),
        place=use.place if use is not None else None,
    )


def grid_of(stop: GpuStop, warp: GpuWarp) -> GpuGrid | None:
    return stop.grids[warp.grid] if 0 <= warp.grid < len(stop.grids) else None


def launch_of(case: Case, grid: GpuGrid) -> LaunchMade | None:
    """The recorded launch that a dump's grid is: its kernel, its size, its tensors' addresses."""
    for use in reversed(case.launches):
        launch = use.launch
        names = {launch.kernel, launch.function}
        is_named = grid.symbol in names or any(grid.symbol.startswith(f"{n}_") for n in names if n)
        size = (*launch.grid, 1, 1, 1)[:3]
        if is_named and grid.grid in (size, (0, 0, 0)) and _has_addresses(case, launch, grid):
            return use
    return None


def own_frame(case: Case, warp: GpuWarp, use: LaunchMade | None) -> GpuFrame | None:
    """The innermost line of the kernel and what it calls, and not of a library's function.

    Of CUDA C it is the innermost that no header of the toolkit has, as the one of an atomic.
    """
    sources = case.sources
    kernel = sources.get(use.launch.source) if use is not None else None
    files = (
        {kernel.file, *(sources[k].file for k in kernel.callees if k in sources)} if kernel else ()
    )
    own = (frame for frame in warp.frames if frame.file in files)
    written = (frame for frame in warp.frames if not _is_of_toolkit(frame.file))
    return next(own, next(written, next(iter(warp.frames), None)))


def _is_of_toolkit(file: str) -> bool:
    """Whether a file is a header of CUDA's toolkit, by the folders that it is installed in."""
    folders = PurePath(file).parts[:-1]
    return "include" in folders and any(part.startswith(("cu", "nvidia")) for part in folders)


def lowest_address(warp: GpuWarp) -> int | None:
    """The first address of the access at fault, in the order of its lanes."""
    if warp.access is None or not warp.access.addresses:
        return None
    return warp.access.addresses[min(warp.access.addresses)]


def thread_number(thread: Block, block: Block) -> int:
    """A thread's number in its block, x fastest."""
    return thread[0] + block[0] * (thread[1] + block[1] * thread[2])


def words64(grid: GpuGrid) -> list[int]:
    """The parameters of a launch as words of 8 bytes."""
    pairs = zip(grid.words[::2], grid.words[1::2], strict=False)
    return [low | high << 32 for low, high in pairs]


_VERBS = {"load": "reads", "store": "writes", "atomic": "changes"}


def sight_lines(sight: GpuSight) -> Iterator[str]:
    """The sight in sentences: where, what was asked for, with what parameters."""
    yield sight_text(sight)
    if sight.address is not None and sight.operation:
        shown = address_text(sight.address, sight.known_bits)
        verb = _VERBS.get(sight.operation, "accesses")  # a bundle may hold any word
        near = ""
        if sight.near is not None:
            name, distance = sight.near
            side = "behind the start of" if distance >= 0 else "before"
            near = f", {abs(distance)} bytes {side} {name}"
        width = f" {count_text(sight.width_bytes, 'byte')}" if sight.width_bytes else ""
        yield f"its first lane {verb}{width} at {shown}{near}"
    if sight.parameters:
        pairs = ", ".join(f"{name} = {value}" for name, value in sight.parameters)
        yield f"parameters: {pairs}"


def sight_text(sight: GpuSight) -> str:
    """One sentence: what stopped where."""
    kernel = sight.kernel or "a kernel that it does not name"
    place = f" at {sight.file}:{sight.line}" if sight.file else ""
    what = f"{kernel} stopped{place}" if sight.exception else f"{kernel} stands{place}"
    parts = [f"{what}: {sight.exception}" if sight.exception else what]
    if sight.block is not None:
        threads = f", threads {sight.threads[0]} to {sight.threads[1]}" if sight.threads else ""
        parts.append(f"{'program' if sight.is_triton else 'block'} {sight.block}{threads}")
    if sight.num_in_all > 1:
        here = count_text(sight.num_warps, "warp")
        parts.append(f"{here} of {sight.num_in_all} stood there")
    return "; ".join(parts)


def address_text(address: int, known: int) -> str:
    """An address; of one whose upper half is lost the lower one."""
    return f"{address:#x}" if known == _WHOLE else f"0x...{address & 0xFFFFFFFF:08x}"


def _place(warp: GpuWarp) -> tuple[str, int]:
    return (warp.frames[0].file, warp.frames[0].line) if warp.frames else ("", 0)


def _threads(warp: GpuWarp, grid: GpuGrid | None) -> tuple[int, int] | None:
    if grid is None or 0 in grid.block:
        return None
    numbers = [thread_number(lane.thread, grid.block) for lane in warp.lanes if lane.thread]
    return (min(numbers), max(numbers)) if len(numbers) > 1 else None


def _text(case: Case, use: LaunchMade | None, frame: GpuFrame | None) -> str:
    """The line as it was recorded with the kernel, else as it stood when the dump was read."""
    if frame is None:
        return ""
    for source in case.sources.values():
        if source.file == frame.file and (text := line_text(source, frame.line)):
            return text
    return frame.text


def _has_addresses(case: Case, launch: LaunchRecord, grid: GpuGrid) -> bool:
    """Whether the tensors of a launch are parameters of a grid, in this order."""
    words = iter(words64(grid))
    if not grid.words:  # the dump has none to compare with
        return True
    tensors = (case.tensors.get(arg.tensor) for arg in launch.arguments if arg.tensor is not None)
    return all(tensor is not None and tensor.address in words for tensor in tensors)


def _parameters(
    case: Case, stop: GpuStop, grid: GpuGrid | None, use: LaunchMade | None
) -> Iterator[tuple[str, str]]:
    if use is not None:
        for arg in use.launch.arguments[:_MAX_PARAMETERS]:
            tensor = case.tensors.get(arg.tensor) if arg.tensor is not None else None
            yield arg.name, f"{tensor.name} ({tensor.address:#x})" if tensor else str(arg.value)
    elif (
        stop.faulting is not None
        and (driven := driver_sight(case, stop, stop.faulting, grid)) is not None
    ):
        yield from itertools.islice(parameter_rows(driven), _MAX_PARAMETERS)
    elif grid is not None:
        for number, word in enumerate(words64(grid)[:_MAX_PARAMETERS]):
            yield f"word {number}", f"{word:#x}"


def _near(
    grid: GpuGrid | None, use: LaunchMade | None, warp: GpuWarp, address: int | None
) -> tuple[str, int] | None:
    """Of a launch that nobody recorded: the parameter that an address is nearest to, and how far.

    Of one that was recorded the replay says which tensor an access aims at.
    """
    is_known = warp.access is not None and warp.access.known_bits == _WHOLE
    if address is None or not is_known or use is not None or grid is None:
        return None
    words = [(f"word {number}", word) for number, word in enumerate(words64(grid)) if word >> 32]
    near = min(words, key=lambda pair: abs(address - pair[1]), default=None)
    if near is None or abs(address - near[1]) > _NEAR_BYTES:
        return None
    return near[0], address - near[1]
