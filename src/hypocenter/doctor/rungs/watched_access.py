"""Rungs: accesses that were seen to be wrong while they were made, by a guard or by a sanitizer.

Who saw them says kernel, line, program and address: that is the red half. The program is replayed
alone for what leads there, and for a green half; and with all others of its launch where no
correction leaves what it wrote: another program may be the one that is to write that.
"""

from __future__ import annotations

import math

import msgspec

from hypocenter.base.errors import ErrorKind, HypoError, MissingPackage
from hypocenter.base.wording import count_text
from hypocenter.doctor.case import Case
from hypocenter.doctor.causes import Cause
from hypocenter.doctor.diagnosis import Claim, Proof, RootCause, Verdict, proven, row
from hypocenter.doctor.guard_findings import (
    GuardFinding,
    access_text,
    finding_of,
    launch_of,
    program_number,
)
from hypocenter.doctor.rungs.replays import claims_of_programs
from hypocenter.doctor.surfaced import symptom_of
from hypocenter.record.bundle_index import LaunchMade
from hypocenter.record.events import MaskedOff
from hypocenter.record.gap import Gap
from hypocenter.record.gpu_stop import SanitizerReport

GUARD, SANITIZER = "guarded run", "sanitizer"
#: Of the replays of one access, and accesses that are replayed.
SECONDS, MAX_ACCESSES = 8.0, 4
#: Programs of a launch that is replayed whole, where the program alone does not tell why.
MAX_PROGRAMS = 256

_OPEN = "what leads there, and which line is to be changed, is not proven"


def guarded_run(case: Case) -> list[Claim]:
    """What the guard masked off: a root cause by replay, or by the fault that went with it."""
    events = [event for event in case.index.events_of(MaskedOff) if event.fault.site.calls]
    if not events or any(claim.root is not None for claim in case.claims):
        return []
    found = [(event, finding_of(case.index, event)) for event in events]
    for event, finding in found[:MAX_ACCESSES]:
        program = program_number(event)
        told = f"the guarded run masked off this access: {access_text(finding)}"
        claims = _by_replay(case, launch_of(event), program, told, GUARD)
        if any(_is_of(claim, finding) for claim in claims):
            return claims
    if (claim := _by_fault_before(case, *found[0], len(found))) is not None:
        return [claim]
    return [_access(finding) for _, finding in found]


def sanitizer(case: Case) -> list[Claim]:
    """What a tool of others reported of the process's accesses."""
    reports = case.bundle.reports
    if not reports or any(claim.root is not None for claim in case.claims):
        return []
    for report in reports[:MAX_ACCESSES]:
        use = _launch_of(case, report)
        if use is None or report.block is None:
            continue
        x, y, z = report.block
        size = (*use.launch.grid, 1, 1)[:3]
        program = x + size[0] * (y + size[1] * z)
        claims = _by_replay(case, use, program, _report_text(report), SANITIZER)
        if any(claim.root is not None for claim in claims):
            return claims
    return [
        row(
            Cause.ACCESS_OUTSIDE,
            Verdict.CONFIRMED,
            SANITIZER,
            _report_text(report),
            *filter(None, (_launch_text(report),)),
            _OPEN,
            would_refute="memory there that the tool does not know of",
            kernel=report.kernel or None,
            at=f"{report.file}:{report.line}" if report.file else "",
        )
        for report in reports
    ]


# -- by replay ------------------------------------------------------------------------------------


def _by_replay(
    case: Case, use: LaunchMade, program: int | None, told: str, name: str
) -> list[Claim]:
    """What the replay of that program says, with `told` before its red half."""
    if program is None:
        return []
    try:
        claims = claims_of_programs(case, use, (program,), SECONDS)
        claims = _of_all_programs(case, use, claims) or claims
    except (MissingPackage, ImportError) as error:
        reason = f"needs the replay of launches: {error}"
    except HypoError as error:
        reason = str(error)
    else:
        return [_with_sight(claim, told, name) for claim in claims if claim.root is not None]
    case.leave_unseen(Gap.not_examined(f"the program of {use.launch.kernel} at fault", reason))
    return []


def _of_all_programs(case: Case, use: LaunchMade, alone: list[Claim]) -> list[Claim]:
    """Why the access strays by the replay of the whole launch, where nothing told it before."""
    num_programs = math.prod(use.launch.grid)
    vague = [claim.root for claim in alone if claim.root is not None]
    if not vague or num_programs > MAX_PROGRAMS or case.limit.left < SECONDS:
        return []
    if any(root.cause is not Cause.ACCESS_OUTSIDE for root in vague):
        return []
    sites = {(root.file, root.line, root.argument) for root in vague}
    return [
        claim
        for claim in claims_of_programs(case, use, tuple(range(num_programs)), SECONDS)
        if claim.root is not None
        and claim.root.cause is not Cause.ACCESS_OUTSIDE
        and (claim.root.file, claim.root.line, claim.root.argument) in sites
    ]


def _with_sight(claim: Claim, told: str, name: str) -> Claim:
    root = claim.root
    assert root is not None
    proof = msgspec.structs.replace(root.proof, red=f"{told}; {root.proof.red}")
    return Claim(
        msgspec.structs.replace(claim.hypothesis, diagnostic=name),
        msgspec.structs.replace(root, proof=proof),
        claim.seq,
        claim.tensors,
    )


def _is_of(claim: Claim, finding: GuardFinding) -> bool:
    """Whether a proven cause is that of the access, and not of another one of its program."""
    root = claim.root
    if root is None or root.kernel != finding.kernel:
        return False
    return root.line == finding.line or claim.hypothesis.argument == finding.argument


# -- without one ----------------------------------------------------------------------------------


def _by_fault_before(
    case: Case, event: MaskedOff, finding: GuardFinding, num_sites: int
) -> Claim | None:
    """The access as the cause of the fault, where the command ends well once it is masked off."""
    before, now = case.bundle.fault_before, case.bundle.fault
    is_of_memory = before is not None and (
        before.kind == "crash" or before.error_kind is ErrorKind.FOUND_LATER
    )
    if before is None or not is_of_memory or now.kind != "none" or now.exit_code:
        return None
    masked = "that access masked off"
    if num_sites > 1:
        masked = f"the accesses of {count_text(num_sites, 'site')} masked off, that one the first"
    tensor = _tensor_text(finding)
    root = RootCause(
        cause=Cause.NULL_POINTER if finding.is_null else Cause.ACCESS_OUTSIDE,
        sentence=f"{finding.kernel}: {access_text(finding)}, which is {_where(finding)} {tensor}; "
        f"{_OPEN}",
        fix=f"Keep what `{finding.expression}` reaches inside {tensor}",
        proof=Proof(
            f"run as it is, the command ended so: {symptom_of(before)}; guarded, "
            f"{access_text(finding)} was found {_where(finding)} {tensor}",
            masked,
            "the same command ended without a fault",
        ),
        kernel=finding.kernel,
        argument=finding.argument,
        tensor=finding.tensor or None,
        file=finding.file,
        line=finding.line,
        expression=finding.expression,
        place=launch_of(event).place,
        launched_at=finding.launched_at,
    )
    evidence = (
        "a guarded run waits for each launch as well, so a fault of timing could have gone with it",
    )
    return proven(root, GUARD, evidence, "a fault of the guarded run", event.launched)


def _access(finding: GuardFinding) -> Claim:
    """An access that is certain, and no proof of what led there."""
    ends = "rows" if finding.is_between else "ends"
    return row(
        Cause.NULL_POINTER if finding.is_null else Cause.ACCESS_OUTSIDE,
        Verdict.CONFIRMED,
        GUARD,
        f"{finding.file}:{finding.line}: {access_text(finding)}, {_where(finding)} "
        f"{_tensor_text(finding)}: `{finding.expression}`",
        f"the access itself is certain: the guard compared it with the tensor's {ends}; {_OPEN}",
        would_refute="a kernel that is meant to leave the view that it was given",
        kernel=finding.kernel,
        argument=finding.argument,
        at=f"{finding.file}:{finding.line}",
    )


def _where(finding: GuardFinding) -> str:
    return "between the rows of" if finding.is_between else "outside of"


def _tensor_text(finding: GuardFinding) -> str:
    name = finding.tensor or finding.argument
    return f"{name} ({finding.extent_bytes} bytes)" if finding.extent_bytes else name


def _launch_of(case: Case, report: SanitizerReport) -> LaunchMade | None:
    """The last recorded launch of the kernel that has such a program."""
    for use in reversed(case.launches):
        size = (*use.launch.grid, 1, 1)[:3]
        inside = report.block is None or all(
            at < most for at, most in zip(report.block, size, strict=True)
        )
        if use.launch.kernel == report.kernel.partition("(")[0] and inside:
            return use
    return None


def _launch_text(report: SanitizerReport) -> str:
    """The line that launched the kernel, which the tool does not tell."""
    if not report.launched_at:
        return ""
    return f"{report.launched_at} launches it: so the driver's watch saw in another run"


def _report_text(report: SanitizerReport) -> str:
    place = f" at {report.file}:{report.line}" if report.file else ""
    block = f" in program {report.block}" if report.block is not None else ""
    near = ""
    if report.near_bytes is not None and report.near_address is not None:
        side = "before" if report.near_bytes < 0 else "behind"
        near = f", {abs(report.near_bytes)} bytes {side} the allocation at {report.near_address:#x}"
    return (
        f"{report.tool}: {report.operation} of {report.width_bytes} bytes by {report.kernel}{place}"
        f"{block} is {report.problem}{near}"
    )
