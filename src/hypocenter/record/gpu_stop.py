"""Where a GPU stood when it stopped: kernel, line, block, threads, registers; facts of a dump.

Read of a core dump or a debug agent's text by `coredump/`, kept in a bundle. Knows no vendor's
format; numbers are those of the dump.
"""

from __future__ import annotations

import msgspec

#: What is kept of a dump, and read of a bundle, at most.
MAX_STOPS, MAX_GRIDS, MAX_WARPS, MAX_STANDINGS, MAX_REPORTS = 8, 64, 64, 64, 16
MAX_WORDS, MAX_LANES, MAX_REGISTERS, MAX_FRAMES = 4096, 64, 512, 32
#: Warps whose registers are kept, those with an exception first.
MAX_DEEP_WARPS = 4

Block = tuple[int, int, int]


class SanitizerReport(msgspec.Struct, frozen=True, kw_only=True):
    """A wrong access that a tool of others saw, by its own words: `problem` is what was wrong.

    `operation` load, store or atomic; `block` is the program of a Triton kernel. `near_bytes` is
    how far behind the allocation at `near_address` the access was, negative before it; None where
    the tool does not tell. `launched_at` is the one line that launched the kernel in another run of
    the command, in which the driver was watched; "" without such.
    """

    tool: str
    problem: str
    operation: str
    width_bytes: int
    kernel: str
    file: str = ""
    line: int = 0
    thread: Block | None = None
    block: Block | None = None
    address: int | None = None
    near_address: int | None = None
    near_bytes: int | None = None
    launched_at: str = ""


class GpuFrame(msgspec.Struct, frozen=True):
    """A line of source; `function` is empty where the dump does not name it.

    `text` is what stood there when the dump was read, where that could be had.
    """

    file: str
    line: int
    function: str = ""
    text: str = ""


class GpuAccess(msgspec.Struct, frozen=True, kw_only=True):
    """The memory instruction at the error: `operation` load, store or atomic, of `width_bytes`.

    `addresses` has what each lane of the warp asked for, as far as its registers still tell, by
    the lane's number; only the bits in `known_bits` count. Without an address it is empty.
    `parameters` are offsets in the kernel's parameters that the address may have been made of, by
    the code before it: all of them, and perhaps more. It is empty where that is not known.
    `is_of_loaded`: so may something of 8 bytes that was loaded, which may be an address itself.
    """

    operation: str
    width_bytes: int
    addresses: dict[int, int] = {}
    known_bits: int = 0
    parameters: tuple[int, ...] = ()
    is_of_loaded: bool = False


class GpuLane(msgspec.Struct, frozen=True, kw_only=True):
    """One thread of a warp: its index in the block, where it is, and its 32-bit registers.

    `thread` is None where the dump does not tell.
    """

    lane: int
    thread: Block | None
    pc: int
    exception: str = ""
    registers: tuple[int, ...] = ()


class GpuWarp(msgspec.Struct, frozen=True, kw_only=True):
    """Threads that run together, of block `block` of grid `grid` (its index in `GpuStop.grids`).

    `pc` is the instruction at fault where `is_error`, else the one that comes next. `frames` are
    the lines there, the innermost first; none without line information. `offset` counts bytes from
    the start of `kernel`, which the compiler calls `symbol`. `uniform` are the registers that all
    lanes share. `block` is None where the dump does not tell, as of warps that had left when it was
    made; `grid` is -1 then, or where there is none.
    """

    grid: int
    block: Block | None
    warp: int
    kernel: str
    pc: int
    symbol: str = ""
    offset: int = 0
    is_error: bool = False
    exception: str = ""
    frames: tuple[GpuFrame, ...] = ()
    access: GpuAccess | None = None
    lanes: tuple[GpuLane, ...] = ()
    uniform: tuple[int, ...] = ()


class GpuGrid(msgspec.Struct, frozen=True, kw_only=True):
    """A launch that ran: `symbol` is the kernel's name as the compiler has it.

    `words` are its parameters, 4 bytes each, as they lie in memory; `block` counts threads.
    `layout` has offset and bytes of each parameter, as the code itself says; empty where it does
    not.
    """

    kernel: str
    symbol: str
    grid: Block
    block: Block
    words: tuple[int, ...] = ()
    layout: tuple[tuple[int, int], ...] = ()


class GpuStanding(msgspec.Struct, frozen=True, kw_only=True):
    """How many warps stand at one line of a kernel; `file` is empty without line information."""

    kernel: str
    file: str
    line: int
    num_warps: int


class GpuStop(msgspec.Struct, frozen=True, kw_only=True):
    """What one dump says. `source` names the kind of dump, `pid` the process, 0 where unknown.

    `exception` is the first that the dump names, empty for one made on request; `address` the
    fault's where the dump itself names one. `is_of_run_before`: the same command had left it when
    it was run without the driver being watched; addresses are those of then. `num_warps` were on
    the GPU, of which `warps` are kept.
    """

    source: str
    pid: int = 0
    device: str = ""
    driver: str = ""
    exception: str = ""
    address: int | None = None
    is_on_request: bool = False
    is_of_run_before: bool = False
    grids: tuple[GpuGrid, ...] = ()
    warps: tuple[GpuWarp, ...] = ()
    standing: tuple[GpuStanding, ...] = ()
    num_warps: int = 0

    @property
    def faulting(self) -> GpuWarp | None:
        """The warp at fault; where nothing is said to be wrong, the first one that is known."""
        wrong = [warp for warp in self.warps if warp.is_error or warp.exception]
        return next(iter((*wrong, *self.warps)), None)

    def problem(self) -> str:
        """What of its sizes no dump can have had; "" where all can."""
        sizes = {
            "grids": (len(self.grids), MAX_GRIDS),
            "warps": (len(self.warps), MAX_WARPS),
            "lines": (len(self.standing), MAX_STANDINGS),
            "layout": (max((len(grid.layout) for grid in self.grids), default=0), MAX_WORDS),
            "parameters": (max((len(grid.words) for grid in self.grids), default=0), MAX_WORDS),
            "lanes": (max((len(warp.lanes) for warp in self.warps), default=0), MAX_LANES),
            "sources": (
                max((len(w.access.parameters) for w in self.warps if w.access), default=0),
                MAX_WORDS,
            ),
            "frames": (max((len(warp.frames) for warp in self.warps), default=0), MAX_FRAMES),
        }
        over = (f"{n} {name}, limit {limit}" for name, (n, limit) in sizes.items() if n > limit)
        return next(over, "")
