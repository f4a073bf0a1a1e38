"""Why a cause has no verdict, and what would give it one: derived from what a bundle holds.

Each reason stands beside the fact that makes it true, and is given only where that is so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from hypocenter.base.wording import count_text
from hypocenter.doctor.case import Case
from hypocenter.doctor.causes import CAUSES, Cause, TestedBy
from hypocenter.record.events import TensorRecord
from hypocenter.record.run_records import MARKED_BYTES

_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
_MAX_NAMED = 4
_NO_LAUNCH = "no launch of this run was recorded"


@dataclass(frozen=True, slots=True)
class Reason:
    """`text` is true of a case of which `holds` is."""

    text: str
    holds: Callable[[Case], bool]


def is_traced(case: Case) -> bool:
    """Whether values were looked at: of an engine after launches, of a program by `--suspect`."""
    return bool(case.bundle.statistics or case.bundle.snapshots) or _is_suspected(case)


def _is_suspected(case: Case) -> bool:
    return case.bundle.sees_reads or "HYPO_TRACE" in case.bundle.environment


_NOT_KNOWN = Reason(
    "what this program's kernels expect of their arguments is not known",
    lambda case: case.is_foreign and not case.bundle.contracts,
)
_NO_LIMITS = Reason(
    "the limits of the device are not known", lambda case: case.bundle.limits is None
)
_ANY = Reason("what this run recorded does not show it", lambda case: True)
_NO_VALUES = Reason(
    "values: what launches gave is recorded of hypocenter's own engine alone; of a program small "
    "launches are kept with --suspect",
    lambda case: case.is_foreign and not case.bundle.statistics,
)
_NO_OUTCOMES = Reason(
    "compiled code: no launch was small enough that all it was given and gave is kept",
    lambda case: _is_suspected(case) and not case.bundle.outcomes,
)
#: Of a foreign program what may be said before the reason that the table of causes has.
_OF_PROGRAMS = {
    TestedBy.ARGUMENTS: _NOT_KNOWN,
    TestedBy.ENTRIES: _NOT_KNOWN,
    TestedBy.LIMITS: _NO_LIMITS,
}
_BY_CAUSE = {
    Cause.NONFINITE_VALUE: (_NO_VALUES,),
    Cause.MISCOMPILED: (_NO_OUTCOMES,),
    Cause.FAULTY_GPU: (_NO_OUTCOMES,),
}
#: Where a reason of the table of causes is not true, by the table's own names for them.
_UNTRUE: dict[str, Callable[[Case], bool]] = {
    "values": is_traced,
    "compiled code": lambda case: bool(case.bundle.outcomes),
    "good arguments": lambda case: case.good is not None,
    "hang": lambda case: case.bundle.fault.kind == "hang",
    "ownership": lambda case: any(step.requests for step in case.steps),
}


def why_untested(case: Case, cause: Cause) -> str:
    """The reason why nothing was found out about a cause."""
    if not case.launches:
        return _NO_LAUNCH
    tested_by = CAUSES[cause].tested_by
    possible = list(_BY_CAUSE.get(cause, ()))
    if case.is_foreign and tested_by in _OF_PROGRAMS:
        possible.append(_OF_PROGRAMS[tested_by])
    for reason in possible:
        if reason.holds(case):
            return reason.text
    text = CAUSES[cause].untested
    is_untrue = _UNTRUE.get(text.partition(":")[0])
    return _ANY.text if is_untrue is not None and is_untrue(case) else text


# -- what nobody wrote ----------------------------------------------------------------------------


def why_history_untested(case: Case) -> str:
    """Of a foreign program: why nothing is said of elements that nobody wrote."""
    if not _is_suspected(case):
        return (
            "who wrote which element was not watched: --suspect marks new memory and sees it read; "
            "`hypo check` watches a run of it"
        )
    others = list(_unmarked_tensors(case))
    marked = [tensor for tensor in _given_memory(case) if tensor not in others]
    seen = count_text(len(marked), "tensor")
    if not case.bundle.sees_reads:
        return (
            f"new memory of {seen} was marked, but this version of torch lets nobody see its "
            "operations; `hypo check` watches a run of it"
        )
    nothing = "nothing else" if case.index.unwritten_reads else "nothing"
    read = f"torch was seen to read {nothing} unwritten of {seen} of floats"
    if not others:
        return f"{read}; what kernels read of each other's output `hypo check` watches"
    names = ", ".join(_name_and_size(tensor) for tensor in others[:_MAX_NAMED])
    more = f" and {len(others) - _MAX_NAMED} more" if len(others) > _MAX_NAMED else ""
    return (
        f"{read}; not watched: {names}{more}, for only floats of up to {MARKED_BYTES} bytes are; "
        "`hypo check` watches a run of it"
    )


def _given_memory(case: Case) -> list[TensorRecord]:
    """Each memory that launches were given once, by the largest tensor on it."""
    largest: dict[int, TensorRecord] = {}
    for use in case.launches:
        for tensor in case.tensors_of(use.launch).values():
            known = largest.get(tensor.allocation)
            if known is None or tensor.extent_bytes > known.extent_bytes:
                largest[tensor.allocation] = tensor
    return list(largest.values())


def _unmarked_tensors(case: Case) -> Iterator[TensorRecord]:
    for tensor in _given_memory(case):
        memory = case.allocations.get(tensor.allocation)
        num_bytes = memory.num_bytes if memory is not None else tensor.extent_bytes
        if tensor.dtype not in _FLOATS or num_bytes > MARKED_BYTES:
            yield tensor


def _name_and_size(tensor: TensorRecord) -> str:
    return f"{tensor.name} ({tensor.dtype}, {tensor.extent_bytes} bytes)"
