"""Races as they are told: one that is seen at a load and again at the store behind it is one."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from hypocenter.records import Finding

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
