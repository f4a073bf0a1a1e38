"""Whether a kernel uses what is not live: entries and rows behind the last of a step.

Dead index entries are made absurd and dead rows are taken away, then the launch is replayed: a
kernel that uses none of them does not notice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hypocenter.base.dtypes import Array
from hypocenter.contracts.registry import recorded_contract
from hypocenter.doctor.case import Case
from hypocenter.doctor.causes import Cause
from hypocenter.doctor.diagnosis import Claim, Proof, RootCause, proven
from hypocenter.doctor.kernel_text import accesses, guard_line, line_text
from hypocenter.doctor.rungs.contracts import rebuilt_facts
from hypocenter.record.bundle_index import LaunchMade
from hypocenter.replay.findings import Finding, FindingKind, ReplayReport

NAME = "replay"
_ABSURD = 1 << 28
#: Entries behind the live ones that are tried; a shape comes from the bundle.
_MAX_DEAD = 1 << 16
#: Runs a launch again with corrections by parameter; None when it cannot.
ReplayAgain = Callable[[LaunchMade, Mapping[str, Any]], ReplayReport | None]


@dataclass(frozen=True, slots=True)
class _Tried:
    """A change of what is dead. `later` leaves the first dead entry or row as it was."""

    fact: str
    live: int
    text: str
    changed: dict[str, Any]
    later: dict[str, Any] | None


def uses_of_dead_rows(
    case: Case, use: LaunchMade, run: ReplayAgain, make: Callable[..., Any]
) -> Iterator[Claim]:
    """At most one claim: the first argument of which dead parts are used."""
    counts = case.tensor_of(use.launch, "counts")
    recorded = case.index.values_of(counts.id, use.seq) if counts else None
    if counts is None or recorded is None:
        return
    values = case.full_array(recorded, counts.shape).reshape(-1)
    for tried in (*_entries(case, use, values, make), *_rows(case, use, values, make)):
        found = _bad_findings(run(use, tried.changed))
        if found:
            is_one = tried.later is None or not _bad_findings(run(use, tried.later))
            yield _claim(case, use, tried, found[0], is_one)
            return


def _bad_findings(report: ReplayReport | None) -> list[Finding]:
    kinds = (FindingKind.OUT_OF_BOUNDS, FindingKind.INT32_OVERFLOW)
    return [finding for finding in report.findings if finding.kind in kinds] if report else []


def _entries(
    case: Case, use: LaunchMade, counts: Array, make: Callable[..., Any]
) -> Iterator[_Tried]:
    which = next((fact.value for fact in use.launch.facts if fact.name == "count"), 0)
    live = int(counts[which]) if isinstance(which, int) and which < counts.size else 0
    if any(fact.name == "rows" for fact in use.launch.facts) and counts.size > 1:
        live = int(counts[1])
    for fact in ("slots", "token_ids", "rows", "positions"):
        tensor = case.tensor_of(use.launch, fact)
        if tensor is None or len(tensor.shape) != 1 or not 0 < live < tensor.shape[0]:
            continue
        parameter = case.parameter_of(use.launch, fact)
        dead = range(live, min(tensor.shape[0], live + _MAX_DEAD))
        absurd = {(i,): _ABSURD for i in dead}
        later = {at: value for at, value in absurd.items() if at[0] > live}
        yield _Tried(
            fact,
            live,
            f"an absurd {fact}[{live}]",
            {parameter: make(elements=absurd)},
            {parameter: make(elements=later)} if later else None,
        )


def _rows(case: Case, use: LaunchMade, counts: Array, make: Callable[..., Any]) -> Iterator[_Tried]:
    launch = use.launch
    contract = recorded_contract(case.bundle, launch)
    facts = rebuilt_facts(case, launch, use.seq) if contract is not None else None
    if contract is None or facts is None:
        return
    for arg in contract.args:
        tensor = case.tensor_of(launch, arg.name)
        if tensor is None or arg.index is not None or len(tensor.shape) < 2:
            continue
        live = contract.num_live(arg.name, counts, facts)
        if live is None or not 0 < live < tensor.shape[0]:
            continue
        row_bytes = tensor.extent_bytes // tensor.shape[0]
        parameter = case.parameter_of(launch, arg.name)
        more = live + 1 < tensor.shape[0]
        yield _Tried(
            arg.name,
            live,
            f"{arg.name} of {live} rows alone",
            {parameter: make(num_bytes=live * row_bytes)},
            {parameter: make(num_bytes=(live + 1) * row_bytes)} if more else None,
        )


def _claim(case: Case, use: LaunchMade, tried: _Tried, finding: Finding, is_one: bool) -> Claim:
    launch, fact, live = use.launch, tried.fact, tried.live
    place = _guilty(case, use, finding)
    tensor = case.tensor_of(launch, fact)
    what = f"{fact}[{live}]" if is_one else f"{fact}[{live}] and what follows"
    text = f"the kernel uses {what}, though only {live} are live"
    where = f" at line {finding.line}" if finding.line else ""
    red = f"the replay of {use.where} with {tried.text}: {finding.kind}{where}: {finding.detail}"
    root = RootCause(
        cause=Cause.OFF_BY_ONE if is_one else Cause.MISSING_MASK,
        sentence=f"{launch.kernel}: {text}",
        fix=f"Stop one earlier: the test in `{place[2]}` lets one too many through"
        if is_one
        else f"Mask what lies behind the {live} live entries of {fact}",
        proof=Proof(
            red,
            f"{fact}[{live}] left as it was, all behind it changed"
            if is_one
            else f"{fact} as it was",
            "the same replay: no such finding",
        ),
        kernel=launch.kernel,
        argument=fact,
        tensor=tensor.name if tensor else None,
        file=place[0],
        line=place[1],
        expression=place[2],
        place=use.place,
    )
    return proven(
        root,
        NAME,
        (),
        "a replay that does not notice what was done to the dead part",
        use.seq,
        (tensor.id,) if tensor else (),
    )


def _guilty(case: Case, use: LaunchMade, finding: Finding) -> tuple[str | None, int | None, str]:
    """The test that lets too much through: of the access's mask, else of the program's number."""
    site = finding.sites[0] if finding.sites else None
    sources = [s for s in case.bundle.sources if site and s.function == site.function]
    for source in sources:
        guard = guard_line(source, site.line) if site else None
        if guard is not None and any(sign in guard[1] for sign in ("<=", ">=")):
            return source.file, *guard
    source_of = case.sources.get(use.launch.source)
    if source_of is not None:
        for access in accesses(source_of, case.parameter_of(use.launch, "counts"), {}):
            return access.file, access.line, line_text(source_of, access.line)
    return (site.file, site.line, site.expression) if site else (None, None, "")
