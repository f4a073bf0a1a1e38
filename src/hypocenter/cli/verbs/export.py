"""`hypo replay --export`: a recorded launch as a Python file that needs no hypocenter.

Chooses the launch and what is expected of it; `replay/export.py` writes the text.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from hypocenter.base.dtypes import NUMPY_DTYPES
from hypocenter.base.errors import HypoError, UsageError
from hypocenter.cli.bundles import bundle_at
from hypocenter.cli.launch_choice import choose_places
from hypocenter.cli.new_file import check_new_file, write_new_file
from hypocenter.cli.output import say
from hypocenter.cli.progress import ProgressDisplay
from hypocenter.doctor.case import Case
from hypocenter.doctor.diagnosis import RootCause, SolvedEntry
from hypocenter.doctor.doctor import diagnose
from hypocenter.doctor.page.example_access import example_of
from hypocenter.doctor.report_parts import subject_of
from hypocenter.record.bundle import Bundle
from hypocenter.record.bundle_index import BundleIndex
from hypocenter.record.contents import Snapshot
from hypocenter.record.events import Place, Values
from hypocenter.replay.corrections import MAX_VIEW_BYTES
from hypocenter.replay.findings import Finding
from hypocenter.replay.terms import KernelText, Schedule

#: Launches that are replayed for one with a finding, and seconds of each.
_MAX_LAUNCHES, _SECONDS = 32, 5.0


def export_launch(
    folder: str,
    file: str,
    step: int | None,
    launch: int | None,
    *,
    allow_source: bool,
    as_json: bool,
    quiet: bool = False,
) -> None:
    """Write `file`, a new one: the launch that the doctor blames, or the one that was asked for.

    Without `allow_source` nothing of the bundle runs. Raises UsageError where no launch can be
    chosen, or `file` is there; NotReplayed where its record or source does not do.
    """
    if as_json:
        raise UsageError("both --json and --export; ask for one")
    check_new_file("--export", file)
    bundle = bundle_at(folder)
    index = BundleIndex(bundle)
    # With it Triton has its interpreter where a replay has its own.
    os.environ.pop("TRITON_INTERPRET", None)
    with ProgressDisplay(quiet=quiet) as progress:
        progress("examining the bundle", 0.0)
        place, expected, finding, entries = _choose(bundle, index, step, launch, allow_source)
    from hypocenter.replay.export import repro_text

    if entries:
        index = _with_entries(bundle, place, entries)
    text = repro_text(index, place, expected, finding)
    write_new_file(file, text.encode())
    say(f"{file} makes the launch of {index.launch(place).kernel} again; expected is {expected[0]}")


def _choose(
    bundle: Bundle, index: BundleIndex, step: int | None, launch: int | None, allow_source: bool
) -> tuple[Place, list[str], Finding | None, tuple[SolvedEntry, ...]]:
    """The launch, what goes wrong there in lines of text, its finding if replayed, and what
    of its tensors follows from where a GPU stopped."""
    if step is None and launch is None:
        diagnosis = diagnose(bundle, allow_source=allow_source)
        for root in diagnosis.roots:
            if root.place is not None:
                return root.place, *_expectation(bundle, root, allow_source), root.entries
    places = choose_places(index, step, launch)
    if not places:
        raise UsageError("the bundle has no launch that could be exported")
    problem = "its replay found nothing"
    for place, found, why in _replays(index, places, allow_source):
        if found:
            return place, _lines(found), found[0], ()
        problem = why or problem
    fault = bundle.fault
    ended = f"the run ended: {fault.message}" if fault.kind != "none" else "the run ended well"
    return places[-1], [f"not known: {problem}", ended], None, ()


def _expectation(
    bundle: Bundle, root: RootCause, allow_source: bool
) -> tuple[list[str], Finding | None]:
    case = Case(bundle, allow_source=allow_source)
    lines = [f"{root.cause}{subject_of(root)}", root.sentence]
    example = example_of(case, root)
    findings = [finding for finding in (example.shown, example.outside) if finding is not None]
    if not findings and root.file:
        lines.append(f"{root.file}:{root.line}: {root.expression or ''}")
    shown = _lines(findings[:1] if example.shown is example.outside else findings)
    return lines + shown, example.outside or example.shown


def _with_entries(bundle: Bundle, place: Place, entries: Sequence[SolvedEntry]) -> BundleIndex:
    """The bundle with these elements of one tensor as what it held; its others are zeros."""
    index = BundleIndex(bundle)
    given = (a.tensor for a in index.launch(place).arguments if a.name == entries[0].argument)
    tensor = index.tensors[next(number for number in given if number is not None)]
    kind = NUMPY_DTYPES.get(tensor.dtype.upper())
    if kind is None or math.prod(tensor.shape) * kind.itemsize > MAX_VIEW_BYTES:
        return index
    held = np.zeros(tensor.shape, kind)
    for entry in entries:
        held[entry.index] = entry.value
    values = Values(tensor.id, tensor.dtype, tensor.shape, held.tobytes())
    snapshot = Snapshot(place.step, place.plan, place.launch, (values,))
    snapshots = (*bundle.snapshots, snapshot)
    return BundleIndex(msgspec.structs.replace(bundle, snapshots=snapshots))


def _lines(findings: list[Finding]) -> list[str]:
    from hypocenter.replay.export import expected_lines

    return [line for finding in findings[:2] for line in expected_lines(finding)]


def _replays(
    index: BundleIndex, places: tuple[Place, ...], allow_source: bool
) -> Iterator[tuple[Place, list[Finding], str]]:
    """Each launch with what its replay found, or why there was none."""
    from hypocenter.replay.recorded import replay_place

    for place in places[:_MAX_LAUNCHES]:
        try:
            report = replay_place(
                index,
                place,
                text=KernelText(allow_source),
                schedule=Schedule(budget_seconds=_SECONDS),
            )
        except HypoError as error:
            yield place, [], str(error)
        else:
            yield place, list(report.findings), ""
