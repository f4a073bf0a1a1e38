"""From which value of an index on a recorded launch goes wrong, found by replaying one program."""

from __future__ import annotations

from typing import Any

from hypocenter.bundle import Bundle
from hypocenter.forensics.bundle_index import BundleIndex
from hypocenter.forensics.replay_bundle import replay_place
from hypocenter.forensics.replay_facts import TensorFact
from hypocenter.recording import Place
from hypocenter.records import Finding


def index_threshold(
    bundle: Bundle | BundleIndex, place: Place, finding: Finding, argument: str,
    at: tuple[int, ...], value: int, *, allow_source: bool = False,
) -> int | None:  # fmt: skip
    """The least value of entry `at` of index tensor `argument` with which `finding` occurs.

    `finding` is one of the launch at `place`, `value` what the entry held then. Exact where a
    larger value never makes it right again; about 31 replays of one program. None when the
    finding does not depend on that entry. Raises as `replay_place` does.
    """
    index = bundle if isinstance(bundle, BundleIndex) else BundleIndex(bundle)
    grid = (*index.launch(place).grid, 1, 1)[:3]
    if finding.program is None:
        return None
    x, y, z = finding.program
    programs = [x + grid[0] * (y + grid[1] * z)]

    def occurs(entry: int) -> bool:
        report = replay_place(
            index, place, corrections={argument: TensorFact(elements={at: entry})},
            programs=programs, allow_source=allow_source,
        )  # fmt: skip
        return any(_is_same(one, finding) for one in report.findings)

    if value <= 0 or occurs(0) or not occurs(value):
        return None
    low, high = 0, value
    while high - low > 1:
        middle = (low + high) // 2
        if occurs(middle):
            high = middle
        else:
            low = middle
    return high


def index_thresholds(
    index: BundleIndex, place: Place, finding: Finding, *, allow_source: bool = False
) -> tuple[str, ...]:
    """For each index entry that decides `finding`: what it held, and from what value on it occurs.

    Looked at are entries of the program's own row.
    """
    if finding.program is None:
        return ()
    found = []
    known, row = index.values(place), finding.program[0]
    for fact in index.launch(place).facts:
        values = known.get(fact.tensor) if fact.tensor is not None else None
        if values is None or values.dtype != "I32" or fact.name == "counts":
            continue
        if len(values.shape) != 1 or not row < values.shape[0] == len(values.data) // 4:
            continue
        value = int.from_bytes(values.data[4 * row : 4 * row + 4], "little", signed=True)
        least = index_threshold(
            index, place, finding, fact.name, (row,), value, allow_source=allow_source
        )
        if least is not None:
            found.append(f"{fact.name}[{row}] is {value}; it goes wrong from {least} on")
    return tuple(found)


def _is_same(one: Finding, other: Finding) -> bool:
    def key(finding: Finding) -> tuple[Any, ...]:
        line = finding.sites[0].line if finding.sites else None
        return finding.kind, finding.argument, finding.operation, line

    return key(one) == key(other)
