"""What a replayed launch did wrong, as plain records; `text.py` makes sentences of them.

A race that is seen at a load and again at the store behind it is one finding.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class Site(msgspec.Struct, frozen=True):
    """A place in a source file; `expression` is the text that was being evaluated there."""

    file: str
    line: int
    function: str
    expression: str


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One fault of a kernel launch, with one lane of one program as its example.

    `sites` is the call chain inside the kernel, innermost first. `element` is the index in the
    tensor's own coordinates, None where the address lies outside of it; `number` counts elements
    from the tensor's first, and is negative before it. `values` are the names in the faulty
    expression at that lane. `threshold` is the first program, along `axis`, at which
    an int32 overflows.
    """

    kind: str
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
    """How much of a launch was run: programs, and element accesses of them."""

    num_run: int
    num_launched: int
    num_lanes: int
    seconds: float

    @property
    def is_complete(self) -> bool:
        return self.num_run == self.num_launched


class ReplayReport(msgspec.Struct, frozen=True):
    """What the replay of one launch found."""

    findings: tuple[Finding, ...]
    headroom: tuple[Headroom, ...]
    coverage: Coverage


#: Behind the detail of a race at a load: the same programs write the element too.
WRITTEN_BACK = "; and writes it"


def races_once(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """The findings; a race of programs that read an element and write it back is told once."""
    kept: list[Finding] = []
    for one in findings:
        read = _read_of(one, kept)
        if read is None:
            kept.append(one)
            continue
        detail = f"{read.detail}{WRITTEN_BACK} in line {one.line}"
        kept[kept.index(read)] = msgspec.structs.replace(read, detail=detail)
    return tuple(kept)


def _read_of(one: Finding, before: Sequence[Finding]) -> Finding | None:
    if (one.kind, one.operation) != ("race", "store"):
        return None
    for other in before:
        is_read = (other.kind, other.operation) == ("race", "load")
        same = (other.argument, other.num_programs) == (one.argument, one.num_programs)
        if is_read and same and WRITTEN_BACK not in other.detail:
            return other
    return None
