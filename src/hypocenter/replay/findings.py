"""What a replayed launch did wrong, as plain records; `text.py` makes sentences of them.

A race that is seen at a load and again at the store behind it is one finding.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import msgspec

#: What the axes of a grid are called.
AXES = "xyz"


class Site(msgspec.Struct, frozen=True):
    """A place in a source file; `expression` is the text that was being evaluated there."""

    file: str
    line: int
    function: str
    expression: str


class StridedShape(msgspec.Struct, frozen=True):
    """Shape and strides of a tensor, in elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def is_expanded(self) -> bool:
        """Whether the elements along an axis share their memory."""
        return any(size > 1 and not by for size, by in zip(self.shape, self.strides, strict=True))


class FindingKind(enum.StrEnum):
    """What was wrong with an access, a program or a launch."""

    FREED_MEMORY = "freed memory"
    NULL_POINTER = "null pointer"
    WILD_POINTER = "wild pointer"
    HOST_POINTER = "host pointer"
    WRONG_DEVICE = "wrong device"
    ELEMENT_WIDTH = "element width"
    INT8_OVERFLOW = "int8 overflow"
    UINT8_OVERFLOW = "uint8 overflow"
    INT16_OVERFLOW = "int16 overflow"
    UINT16_OVERFLOW = "uint16 overflow"
    INT32_OVERFLOW = "int32 overflow"
    UINT32_OVERFLOW = "uint32 overflow"
    OUT_OF_BOUNDS = "out of bounds"
    BETWEEN_ROWS = "between rows"
    UNDEFINED_LANE = "undefined lane"
    UNINITIALISED_READ = "uninitialised read"
    NEVER_WRITTEN = "never written"
    RACE = "race"
    TUNED_IN_PLACE = "tuned in place"
    WAITS_FOR_EVER = "waits for ever"
    ASSERTION = "assertion"
    BAD_GRID = "bad grid"
    MISSING_WAIT = "missing wait"
    READ_IN_FLIGHT = "read in flight"
    REWRITTEN_IN_FLIGHT = "rewritten in flight"
    REUSED_IN_FLIGHT = "reused in flight"
    OTHER_RESULT = "other result"
    NOT_A_NUMBER = "not a number"


#: An offset left its type; by the type's name in Triton.
OVERFLOWS = {
    "int8": FindingKind.INT8_OVERFLOW, "uint8": FindingKind.UINT8_OVERFLOW,
    "int16": FindingKind.INT16_OVERFLOW, "uint16": FindingKind.UINT16_OVERFLOW,
    "int32": FindingKind.INT32_OVERFLOW, "uint32": FindingKind.UINT32_OVERFLOW,
}  # fmt: skip


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One fault of a kernel launch, with one lane of one program as its example.

    `sites` is the call chain inside the kernel, innermost first. `element` is the index in the
    tensor's own coordinates, None where the address lies outside of it; `number` counts elements
    from the tensor's first, and is negative before it. `values` are the names in the faulty
    expression at that lane. `threshold` is the first program, along `axis`, at which
    an int32 overflows; of an overflow `is_meant_inside` says that what it would be without one lies
    in a tensor. `width_bytes` is what is read or written at a time, where that is wrong.
    `archs` are the GPUs as on which a checked program showed it.
    `layout` is that of the argument, where it is expanded or not contiguous.
    Of a race `has_read` says that one of the two reads, and `written_back_line` is the line in
    which the same programs write what they have read; `is_of_lanes` says that both are lanes of
    one program.
    """

    kind: FindingKind
    kernel: str
    operation: str
    detail: str
    argument: str | None = None
    element: tuple[int, ...] | None = None
    number: int | None = None
    program: tuple[int, int, int] | None = None
    lane: tuple[int, ...] | None = None
    num_lanes: int = 0
    num_programs: int = 0
    sites: tuple[Site, ...] = ()
    origin: Site | None = None
    values: dict[str, bool | int | float | str] = {}
    axis: int | None = None
    threshold: int | None = None
    configuration: str | None = None
    launched_at: Site | None = None
    width_bytes: int | None = None
    has_read: bool = False
    is_of_lanes: bool = False
    is_meant_inside: bool = True
    written_back_line: int | None = None
    layout: StridedShape | None = None
    archs: tuple[str, ...] = ()

    @property
    def is_overflow(self) -> bool:
        return self.kind in OVERFLOWS.values()

    @property
    def file(self) -> str | None:
        return self.sites[0].file if self.sites else None

    @property
    def line(self) -> int | None:
        return self.sites[0].line if self.sites else None


class Headroom(msgspec.Struct, frozen=True):
    """How far a kernel's int32 offsets reach: the first program along `axis` that overflows.

    No fault of the launch that was seen, which had `num_programs` along that axis. `gave_up` says
    why the search along the axis had no end; `threshold` and `origin` are None then.
    """

    kernel: str
    axis: int
    threshold: int | None
    num_programs: int
    origin: Site | None = None
    values: dict[str, bool | int | float | str] = {}
    gave_up: str | None = None


class Coverage(msgspec.Struct, frozen=True):
    """How much of a launch was run: programs, and element accesses of them.

    `num_waiting` began and wait for ever.
    """

    num_run: int
    num_launched: int
    num_lanes: int
    seconds: float
    num_waiting: int = 0

    @property
    def is_complete(self) -> bool:
        return self.num_run == self.num_launched


class ReplayReport(msgspec.Struct, frozen=True):
    """What the replay of one launch found, and whether its kernel makes block pointers."""

    findings: tuple[Finding, ...]
    headroom: tuple[Headroom, ...]
    coverage: Coverage
    has_block_pointers: bool = False


class ChangedResult(msgspec.Struct, frozen=True):
    """Tuning in place: an element holds `again`, and `alone` where no trial had come before.

    `was_zero`: before all trials the tensor was zeros.
    """

    argument: str
    index: tuple[int, ...]
    alone: float | int
    again: float | int
    was_zero: bool

    @property
    def option(self) -> str:
        """The argument of `triton.autotune` that puts the tensor back."""
        return "reset_to_zero" if self.was_zero else "restore_value"

    def text(self, after: str) -> str:
        """`x_ptr[0, 1] is 1 after the launch alone, and 4 after ...`."""
        at = f"[{', '.join(map(str, self.index))}]"
        return (
            f"tuning runs the kernel on its own result: {self.argument}{at} is {self.alone:g} "
            f"after the launch alone, and {self.again:g} after {after}"
        )


def races_once(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """The findings; a race of programs that read an element and write it back is told once.

    Lanes that lose an addition are part of it where programs race for the same tensor.
    """
    races = (finding for finding in findings if finding.kind is FindingKind.RACE)
    raced = {finding.argument for finding in races if not finding.is_of_lanes}
    kept: list[Finding] = []
    for finding in findings:
        if finding.is_of_lanes and finding.has_read and finding.argument in raced:
            continue
        read = _read_of(finding, kept)
        if read is None:
            kept.append(finding)
            continue
        kept[kept.index(read)] = msgspec.structs.replace(
            read,
            detail=f"{read.detail}; and writes it in line {finding.line}",
            written_back_line=finding.line or 0,
        )
    return tuple(kept)


def _party(race: Finding) -> tuple[str | None, int, bool]:
    return race.argument, race.num_programs, race.is_of_lanes


def _read_of(finding: Finding, before: Sequence[Finding]) -> Finding | None:
    if (finding.kind, finding.operation) != (FindingKind.RACE, "store"):
        return None
    for other in before:
        is_read = (other.kind, other.operation) == (FindingKind.RACE, "load")
        same = _party(other) == _party(finding)
        if is_read and same and other.written_back_line is None:
            return other
    return None
