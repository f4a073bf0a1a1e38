"""What a guarded run of a command came to, and that as text. Decides nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from hypocenter.base.wording import count_text
from hypocenter.device.guard.rows import ViewRows
from hypocenter.doctor.guard_findings import GuardFinding
from hypocenter.record.events import RanUnguarded, TensorRecord
from hypocenter.record.gap import Gap
from hypocenter.replay.arguments import Gaps
from hypocenter.replay.text import values_text

#: Views that are named one by one.
_MAX_NAMED = 4


class UnguardedKernel(msgspec.Struct, frozen=True, kw_only=True):
    """A kernel whose launches ran as they are, and why: `expression` is what stands in its way."""

    kernel: str
    reason: str
    file: str
    line: int
    expression: str


class GuardReport(msgspec.Struct, frozen=True, kw_only=True):
    """A guarded run: its findings, what was not guarded, and how much was.

    `exit_code` is the command's own, None where `signal` ended it.
    """

    command: tuple[str, ...]
    exit_code: int | None
    signal: int | None
    findings: tuple[GuardFinding, ...]
    unguarded: tuple[UnguardedKernel, ...]
    num_launches: int
    num_guarded: int
    num_processes: int
    unseen: tuple[Gap, ...] = ()


def kernels_of(events: Iterable[RanUnguarded]) -> tuple[UnguardedKernel, ...]:
    """Each kernel and reason once."""
    found = (
        UnguardedKernel(
            kernel=event.kernel,
            reason=event.reason,
            file=event.file,
            line=event.line,
            expression=event.expression,
        )
        for event in events
    )
    return tuple(dict.fromkeys(found))


def unseen_rows(tensors: Iterable[TensorRecord]) -> tuple[Gap, ...]:
    """Views of which the guard knows the end, and not all that lies between their elements."""
    names = list(dict.fromkeys(tensor.name for tensor in tensors if not _knows_rows(tensor)))
    if not names:
        return ()
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    what = f"what lies between the rows of {', '.join(names[:_MAX_NAMED])}{more}"
    return (
        Gap.not_examined(
            what,
            "the guard counts some of it as inside, for the gaps have several sizes; `hypo check` "
            "and `hypo doctor --suspect` know them all",
        ),
    )


def _knows_rows(tensor: TensorRecord) -> bool:
    shape, strides = tuple(tensor.shape), tuple(tensor.strides)
    if Gaps.of(shape, strides) is None:
        return True
    rows = ViewRows.of(shape, strides, 1)
    return rows is not None and rows.is_whole


def once_per_site(findings: Sequence[GuardFinding]) -> tuple[GuardFinding, ...]:
    """Of several processes that have the same finding the first."""
    first: dict[tuple[object, ...], GuardFinding] = {}
    for finding in findings:
        key = finding.kernel, finding.file, finding.line, finding.operation, finding.argument
        first.setdefault((*key, finding.expression), finding)
    return tuple(first.values())


def report_text(report: GuardReport) -> str:
    """Findings, then what ran as it is, then how much was guarded."""
    parts = ["\n".join(_lines(finding)) for finding in report.findings]
    lines = ["\n\n".join(parts), ""] if parts else []
    if report.unguarded:
        lines.append("not guarded, run as they are")
        lines += [f"    {_unguarded_text(kernel)}" for kernel in report.unguarded]
    if report.unseen:
        lines.append("not seen")
        lines += [f"    {gap}" for gap in report.unseen]
    lines.append(summary(report))
    # A name of a program's may hold a line end, and no line of it may pass for one of ours.
    return "\n".join(lines)


def summary(report: GuardReport) -> str:
    """`2 wrong accesses; 3 of 4 launches guarded, in 1 process`."""
    found = count_text(len(report.findings), "wrong access", "wrong accesses")
    launches = count_text(report.num_launches, "launch", "launches")
    processes = count_text(report.num_processes, "process", "processes")
    return f"{found}; {report.num_guarded} of {launches} guarded, in {processes}"


def _lines(finding: GuardFinding) -> Iterator[str]:
    what = f"{finding.operation} of {finding.argument} in {finding.kernel}"
    null = ", which is null or empty" if finding.is_null else ", outside its tensor"
    null = ", between the rows of its tensor" if finding.is_between else null
    yield _one_line(f"{finding.file}:{finding.line}: {what}{null}")
    yield _one_line(f"    {finding.expression}")
    if finding.overflow:
        place, text = finding.overflows_at or ("", "")
        what = f"{text} ({place})" if text else "its offset"
        yield _one_line(f"    {what} overflows {finding.overflow}: the address is of what is left")
    program = f"program {finding.program}" if finding.program else "a program of a large grid"
    if finding.first_program is not None:
        lane = f" lane ({', '.join(map(str, finding.lane))})" if finding.lane else ""
        values = f": {values_text(finding.values)}" if finding.values else ""
        at = f", at element {finding.lane_element}" if finding.lane_element is not None else ""
        first = f"program {finding.first_program}{lane}"
        yield _one_line(f"    in a replay {first} is the first at fault{at}{values}")
    yield _one_line(f"    the guard stopped {program}: {_place_text(finding)}")
    if finding.first_program is None and finding.unreplayed:
        yield _one_line(f"    lane and index values are not known: {finding.unreplayed}")
    for call in finding.called_from:
        yield _one_line(f"    called at {call.file}:{call.line} in {call.function}")
    if finding.tensor:
        yield _one_line(f"    {finding.argument} is {_tensor_text(finding)}")
    process = f" of process {finding.pid}" if finding.pid is not None else ""
    at = f", made at {finding.launched_at}" if finding.launched_at else ""
    yield _one_line(f"    launch {finding.launch}{process}{at}; later ones are not told")


def _place_text(finding: GuardFinding) -> str:
    further = " or further" if finding.is_far else ""
    place = f"byte {finding.byte_offset}{further}"
    if finding.is_null:
        return place
    if finding.is_between:
        return f"{place} (element {finding.element}), between the rows of {finding.shape}"
    if finding.byte_offset < 0:
        return f"{place} (element {finding.element}{further}), before the first"
    end = f", past the end at byte {finding.extent_bytes}" if finding.extent_bytes else ""
    return f"{place} (element {finding.element}{further}){end}"


def _tensor_text(finding: GuardFinding) -> str:
    text = f"{finding.tensor}: {finding.dtype} of shape {finding.shape}, strides {finding.strides}"
    if finding.is_inside_storage:
        text += (
            f"; a view of memory of {finding.storage_bytes} bytes, in which that byte lies: pass "
            "what it is a view of, if the kernel is meant to go there"
        )
    return text


def _unguarded_text(kernel: UnguardedKernel) -> str:
    place = f" ({kernel.file}:{kernel.line})" if kernel.file else ""
    where = f": {kernel.expression}" if kernel.expression else ""
    return _one_line(f"{kernel.kernel}{place}: {kernel.reason}{where}")


def _one_line(text: str) -> str:
    return text.replace("\n", "\\n")
