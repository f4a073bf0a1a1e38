"""What two programs that meet at one element are taken for: a mask, a stride, an atomic, a table.

A grid of one program ends every race, so that it tells nothing of why programs meet. A race is told
as a cause of its own only where what else makes programs meet was tried, and was not it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from hypocenter.doctor.case import Case, array_of
from hypocenter.doctor.causes import Cause
from hypocenter.doctor.edits.bound_text import inside_axes
from hypocenter.doctor.edits.index_text import indices_of as indices_of_address
from hypocenter.doctor.edits.product_text import atomic_edits
from hypocenter.doctor.judging.origin import last_writer
from hypocenter.doctor.kernel_text import follows_what_it_loads, program_line
from hypocenter.doctor.mask_text import with_condition
from hypocenter.doctor.rungs.replaying.index_causes import elements_of
from hypocenter.doctor.rungs.replaying.mask_causes import MaskedSite, mask_causes, with_edit
from hypocenter.doctor.rungs.replaying.ranks import ATOMIC, LAST
from hypocenter.doctor.rungs.replaying.replay_cause import (
    TEST,
    Allowed,
    ReplayCause,
    TextEdit,
    indices_of,
    place_of,
    source_of,
)
from hypocenter.doctor.rungs.replaying.stride_causes import stride_causes
from hypocenter.doctor.rungs.replaying.trials import Bench, Seen, has
from hypocenter.record.bundle_index import LaunchMade
from hypocenter.record.events import SourceRecord, TensorRecord
from hypocenter.replay.findings import Finding, Site

#: Entries of a table that several programs follow, of which that is asked.
_MAX_ASKED = 4


@dataclass(frozen=True)
class _Meeting:
    """The access at which programs meet, and the text that makes its address."""

    case: Case
    use: LaunchMade
    finding: Finding
    tensor: TensorRecord | None
    site: Site | None
    source: SourceRecord | None

    @property
    def name(self) -> str:
        return self.finding.argument or "it"

    @property
    def shared_axis(self) -> int | None:
        """An axis along which the elements share their memory."""
        if self.tensor is None:
            return None
        pairs = enumerate(zip(self.tensor.shape, self.tensor.strides, strict=False))
        return next((axis for axis, (size, by) in pairs if size > 1 and not by), None)

    @property
    def at(self) -> MaskedSite | None:
        if self.source is None or self.site is None or self.tensor is None:
            return None
        is_known = self.case.index.values_of(self.tensor.id, self.use.seq) is not None
        return MaskedSite(self.use, self.source, self.finding, self.tensor, self.site, is_known)

    @property
    def has_index(self) -> bool:
        """Whether the address is worked out at all, and is not the first element for everybody."""
        return self.at is None or any(indices_of_address(access) for access in self.at.accesses)

    @property
    def tables(self) -> list[tuple[str, TensorRecord]]:
        """Tensors whose values decide where the kernel reads and writes."""
        kernel = self.case.sources.get(self.use.launch.source)
        return [
            (parameter, tensor)
            for parameter, tensor in self.case.tensors_of(self.use.launch).items()
            if parameter != self.finding.argument
            and (kernel is None or follows_what_it_loads(kernel, parameter))
        ]


def race_cause(case: Case, use: LaunchMade, finding: Finding, site: Site | None) -> ReplayCause:
    """The race itself; what else may make programs meet comes before."""
    tensor = case.tensor_of(use.launch, finding.argument or "")
    meeting = _Meeting(case, use, finding, tensor, site, source_of(case, use, site))
    folded = program_line(meeting.source) if meeting.source else None
    place = place_of(site)
    if folded is not None and site is not None:
        place = {"file": site.file, "line": folded[0], "expression": folded[1]}
    single = (1,) * len(use.launch.grid)
    shared = meeting.shared_axis
    is_read = finding.has_read and not folded and finding.written_back_line is None
    evidence: tuple[str, ...] = (
        (f"`{folded[1]}` gives several programs one index",) if folded else ()
    )
    if is_read:
        fix = (
            "Let no program read what another one writes: make two launches of it, or read from a "
            f"copy of {meeting.name}"
        )
    else:
        fix = "Let one program write each element, or add with an atomic"
    if shared is not None:
        evidence += (f"its stride along axis {shared} is 0: elements of it share their memory",)
        fix = f"Pass a copy whose elements have memory of their own: {meeting.name}.contiguous()"
    race = ReplayCause(
        Cause.PROGRAM_RACE,
        fix,
        evidence,
        (("a grid of one program, which has nobody to race with", lambda make: {"grid": single}),),
        **place,
        rank=LAST,
        allowed=TEST,
    )
    # The indices and sizes of this package's own kernels are checked by their contracts.
    if not case.is_foreign:
        return race
    return ReplayCause(
        race.cause,
        race.fix,
        race.evidence,
        (),
        **place,
        sooner=tuple(_sooner(meeting)),
        rank=LAST,
        allowed=TEST,
        resolve=partial(_if_its_own, meeting, race),
    )


def _sooner(meeting: _Meeting) -> Iterator[ReplayCause]:
    at, site, source = meeting.at, meeting.site, meeting.source
    if at is None or site is None or source is None or meeting.tensor is None:
        return
    yield from mask_causes(at)
    yield from stride_causes(meeting.use, source, meeting.finding, meeting.tensor, site)
    if meeting.shared_axis is not None:
        return
    for atomic in atomic_causes(source, meeting.finding, site, Cause.PROGRAM_RACE):
        yield ReplayCause(
            atomic.cause, "", (), (), rank=ATOMIC, resolve=partial(_if_inside, meeting, atomic)
        )


def atomic_causes(
    source: SourceRecord | None, finding: Finding, site: Site | None, cause: Cause
) -> Iterator[ReplayCause]:
    """An atomic in place of a load, an addition and a store."""
    if source is None or site is None:
        return
    others = "lanes" if cause is Cause.LANE_RACE else "programs"
    for edit in atomic_edits(source, site.line, finding.argument or ""):
        yield ReplayCause(
            cause,
            f"Add with an atomic: `{edit.now}`",
            (f"`{edit.was}` writes what it has read before, and so do other {others}",),
            (),
            source.file,
            edit.line,
            edit.was,
            edit=TextEdit(f"`{edit.now}` in line {edit.line}", with_edit(source, edit)),
            is_fix=True,
            rank=ATOMIC,
            allowed=Allowed(lost=True, why="the atomic reads what it adds to"),
        )


# -- whether programs meet by right indices --------------------------------------------------------


def _if_inside(
    meeting: _Meeting, cause: ReplayCause, bench: Bench, finding: Finding
) -> Iterator[ReplayCause]:
    """The cause, where programs meet with each index inside its axis as well."""
    at = meeting.at
    if at is None:
        return
    for access in at.accesses:
        condition = inside_axes(access, at.given, at.tensor)
        if condition is None:
            return
        if not condition:
            continue
        edited = with_edit(at.source, with_condition(at.source, access, condition))
        kept = bench.replay({}, edited, False)
        if kept is None or not has(kept.report, finding):
            return
    yield cause


def _if_its_own(
    meeting: _Meeting, race: ReplayCause, bench: Bench, finding: Finding
) -> Iterator[ReplayCause]:
    """The race, where neither a table nor an index behind its axis makes the programs meet.

    Where elements are left that nobody writes, some of those who meet may have been meant for them.
    """
    if meeting.tables:
        yield from _same_entries(meeting, bench, finding)
    elif not meeting.has_index or not leaves_gaps(bench.before, finding.argument or ""):
        yield from _if_inside(meeting, race, bench, finding)


def leaves_gaps(seen: Seen, name: str) -> bool:
    """Whether elements of an argument are written by no program, or not all that is known."""
    argument = next((a for a in seen.census.arguments if a.name == name), None)
    if argument is None or not seen.census.is_whole or not seen.report.coverage.is_complete:
        return True
    own = [a for a in seen.census.arguments if a.region is argument.region]
    found = [np.zeros(0, np.int64)]
    for access in seen.census.accesses.values():
        if access.operation == "load":
            continue
        pointers = access.pointers[seen.census.inside(access)]
        for alias in own:
            offsets = (pointers - np.uint64(alias.address)).view(np.int64)
            is_own = (offsets >= 0) & (offsets < alias.num_bytes)
            found.append(offsets[is_own] + alias.start - argument.start)
    written = np.unique(np.concatenate(found))
    written = written[(written >= 0) & (written < argument.num_bytes)]
    pairs = zip(argument.shape, argument.strides, strict=True)
    return bool(written.size < np.prod([size if by else 1 for size, by in pairs], dtype=np.int64))


def _same_entries(meeting: _Meeting, bench: Bench, finding: Finding) -> Iterator[ReplayCause]:
    """A table of which two entries are equal, and lead programs to one element.

    One that a launch before has written may have it from there: then nothing is told.
    """
    for parameter, tensor in meeting.tables:
        recorded = meeting.case.index.values_of(tensor.id, meeting.use.seq)
        is_integers = recorded is not None and recorded.dtype.startswith(("I", "U"))
        if recorded is None or not is_integers:
            continue
        if last_writer(meeting.case, meeting.use, tensor) is not None:
            continue
        values = array_of(recorded).flat
        entries = {
            at: int(value) for at, value in zip(indices_of(recorded.shape), values, strict=False)
        }
        yield from _of_equal(meeting, bench, finding, parameter, entries)


def _of_equal(
    meeting: _Meeting,
    bench: Bench,
    finding: Finding,
    parameter: str,
    entries: Mapping[tuple[int, ...], int],
) -> Iterator[ReplayCause]:
    counts = Counter(entries.values())
    free = next((n for n in range(max(counts, default=0) + 2) if n not in counts), 0)
    equal = [value for value, count in counts.items() if count > 1][:_MAX_ASKED]
    for value in equal:
        same = [at for at, other in entries.items() if other == value]
        apart = dict.fromkeys(same[1:], free)
        corrections: Mapping[str, Any] = {parameter: bench.make(elements=apart)}
        if len(same) > 2 or not _ends(bench, finding, corrections):
            continue
        shown = " = ".join(f"{parameter}[{', '.join(map(str, at))}]" for at in same)
        yield ReplayCause(
            Cause.PROGRAM_RACE,
            f"Let no two entries of {parameter} lead to one element of {meeting.name}, or have "
            "one program write it",
            (f"{shown} = {value}, and the program of each of them writes there",),
            (
                (
                    f"{parameter}[{', '.join(map(str, same[1]))}] = {free}",
                    elements_of(parameter, apart),
                ),
            ),
            **place_of(meeting.site),
            rank=LAST,
            allowed=TEST,
        )
        return


def _ends(bench: Bench, finding: Finding, corrections: Mapping[str, Any]) -> bool:
    seen = bench.replay(corrections, None, False)
    return seen is not None and not has(seen.report, finding)
