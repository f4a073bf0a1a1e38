"""What a replay's finding is taken for, and the scalars and grids that may be to blame for it.

`replay_causes.py` tells the classes apart.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hypocenter.doctor.case import Case
from hypocenter.doctor.causes import Cause
from hypocenter.doctor.rungs.replaying.ranks import BOUND, SCALAR
from hypocenter.record.bundle_index import LaunchMade
from hypocenter.record.events import SourceRecord
from hypocenter.replay.findings import AXES, Finding, Site

#: Makes what is put right about a tensor: `replay/corrections.py:TensorCorrection`.
MakeCorrection = Callable[..., Any]
_WORD = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True, slots=True)
class TextEdit:
    """A correction of the kernel itself: in words, and the function with the text to replay."""

    said: str
    source: SourceRecord


@dataclass(frozen=True, slots=True)
class Allowed:
    """What a right correction may do besides taking the finding away, and why that is no loss.

    `lost`: loads that its condition leaves out are no elements of their axis. `moved`: arguments
    whose accesses go elsewhere by the nature of the correction, `anywhere` all of them, with
    what they write. `races`:
    it changes values, which may meet. `if_same_results`: loads are lost, and what is written is
    not another one for it. `is_test`: it is no correction and only shows the cause, so
    it may leave out anything.
    """

    lost: bool = False
    moved: frozenset[str] = frozenset()
    anywhere: bool = False
    races: bool = False
    is_test: bool = False
    if_same_results: bool = False
    why: str = ""


NOTHING = Allowed()
#: Shows the cause, and is no correction.
TEST = Allowed(is_test=True)


@dataclass(frozen=True, slots=True)
class ReplayCause:
    """The class of a finding, the guilty line, and corrections to try, the likeliest first.

    `argument` where another one is to blame than the one whose access was found. Causes of one
    `rank` are tried together; of those that are right the one with most `support` is told, and
    equal ones as alternatives. With `is_fix` the correction that is tried is `fix` itself, else a
    test that proves the cause alone.
    """

    cause: Cause
    fix: str
    evidence: tuple[str, ...]
    tries: tuple[tuple[str, Callable[[MakeCorrection], Mapping[str, Any]]], ...]
    file: str | None = None
    line: int | None = None
    expression: str | None = None
    argument: str | None = None
    in_kernel: bool = True
    #: The kernel with another text, which is the only correction that is tried then.
    edit: TextEdit | None = None
    #: A correction that needs no replay, and what it gives.
    settled: tuple[str, str] | None = None
    #: The scalar whose largest right value is the correction, and that value where it is known.
    scalar: str | None = None
    largest: int | None = None
    #: With this the finding must still be there, or the correction says too little.
    too_little: Callable[[MakeCorrection], Mapping[str, Any]] | None = None
    #: What may be to blame instead, and is where its own correction makes the replay clean.
    sooner: tuple[ReplayCause, ...] = ()
    #: Of `argument` the element that led outside, and what it held.
    entry: tuple[tuple[int, ...], int] | None = None
    is_fix: bool = False
    rank: int = 0
    support: tuple[str, ...] = ()
    allowed: Allowed = NOTHING
    #: The causes themselves, where it takes replays to say; called with a `trials.py:Bench`.
    resolve: Callable[[Any, Finding], Iterable[ReplayCause]] | None = None
    #: What the launch passes otherwise with this correction: the name, its value then and now.
    passed: tuple[tuple[str, str, str], ...] = ()

    def corrections(self, make: MakeCorrection) -> Iterator[tuple[str, Mapping[str, Any]]]:
        for text, put_right in self.tries:
            yield text, put_right(make)


def place_of(site: Site | None) -> dict[str, Any]:
    """File, line and expression, as the fields of a ReplayCause."""
    if site is None:
        return {}
    return {"file": site.file, "line": site.line, "expression": site.expression}


def scalars_in(use: LaunchMade, finding: Finding, text: str = "") -> list[str]:
    """Whole numbers above 1 that the launch was given and the faulty access names, or `text`."""
    named = {*finding.values, *_WORD.findall(text)}
    return [
        argument.name
        for argument in use.launch.arguments
        if argument.tensor is None
        and isinstance(argument.value, int)
        and argument.value > 1
        and argument.name in named
    ]


def counts_and_grids(
    use: LaunchMade, finding: Finding, sizes: Iterable[int], guard: str, site: Site | None
) -> tuple[ReplayCause, ...]:
    """What the launch may be to blame for: a number of elements that was passed, where the mask
    `guard` compares with it, or programs that have no row of their own.

    `sizes` are what a number that is right may be: elements, rows, columns of the tensor.
    """
    if use.launch.facts:
        return ()
    given = {argument.name: argument.value for argument in use.launch.arguments}
    counts = [
        ReplayCause(
            Cause.BAD_SCALAR,
            f"Pass {size} for {name} instead of {given[name]}: {finding.argument} holds {size}",
            (f"the mask is `{guard}`",),
            (),
            **place_of(site),
            argument=name,
            in_kernel=False,
            scalar=name,
            largest=size,
            is_fix=True,
            rank=SCALAR,
        )
        for name in (scalars_in(use, finding, guard) if guard else ())
        if name in _WORD.findall(guard)
        for size in sizes
    ]
    program, grid = finding.program or (0, 0, 0), use.launch.grid
    axes = [axis for axis, size in enumerate(grid) if 0 < program[axis] < size]
    is_whole = not any(finding.lane or ()) and len(axes) == 1
    if not is_whole:
        return tuple(counts)
    axis = axes[0]
    cut = (*grid[:axis], program[axis], *grid[axis + 1 :])
    rows = ReplayCause(
        Cause.MISSING_MASK,
        f"Launch {program[axis]} programs along {AXES[axis]}, or have the others return at once: "
        f"{finding.argument} has no more rows",
        (f"program {program} lies outside from its first lane on",),
        ((f"grid {cut}, whose programs all have a row", lambda make: {"grid": cut}),),
        **place_of(site),
        in_kernel=False,
        is_fix=True,
        rank=BOUND,
        passed=(("grid", str(grid), str(cut)),),
    )
    return (*counts, rows)


def source_of(case: Case, use: LaunchMade, site: Site | None) -> SourceRecord | None:
    """The text of the function that a site lies in."""
    if site is None:
        return None
    for source in case.bundle.sources:
        last = source.first_line + source.text.count("\n") + 1
        if source.function == site.function and source.first_line <= site.line <= last:
            return source
    return case.sources.get(use.launch.source)


def indices_of(shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """All indices of an array of that shape, the last axis fastest."""
    yield from itertools.product(*map(range, shape))
