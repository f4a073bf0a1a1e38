"""Rung: a compiled graph of the CPU that failed at an index, by the operation that fails alone."""

from __future__ import annotations

from collections.abc import Iterator

from hypocenter.base.wording import count_text
from hypocenter.doctor.case import Case
from hypocenter.doctor.causes import Blame, index_cause
from hypocenter.doctor.diagnosis import Claim, Proof, RootCause, SolvedEntry, Verdict, proven, row
from hypocenter.record.compiled_graph import IndexMadeAgain

NAME = "compiled index"


def compiled_index(case: Case) -> list[Claim]:
    """The index that an operation of a compiled graph refused when it was run again by itself."""
    return list(_claims(case))


def _claims(case: Case) -> Iterator[Claim]:
    for event in case.index.events_of(IndexMadeAgain):
        site = event.op.sites[0] if len(event.op.sites) == 1 else ""
        file, _, line = site.rpartition(":")
        asked = f"`{event.op.text}`" if event.op.text else event.op.op
        name = event.index_name or f"the index of {asked}"
        element = f"{name}[{', '.join(map(str, event.element))}]"
        more = event.num_outside - 1
        others = f", as do {count_text(more, 'more element', 'more elements')}" if more else ""
        target = event.target_name or "what it indexes"
        size = f"dimension {event.dimension} of {target} has {event.bound} entries"
        sentence = f"{asked}: {element} is {event.value}, but {size}"
        cause = index_cause(event.value)
        red = (
            f"{event.kernel} failed; its graph, run again on the same inputs operation by "
            f"operation, fails at {asked}: {event.said}; {element} is {event.value}{others}"
        )
        if not event.is_clean_inside:
            yield row(
                cause,
                Verdict.INCONCLUSIVE,
                NAME,
                red,
                "the operation fails with each element inside as well",
                would_refute="that operation without an error",
                kernel=event.kernel,
            )
            continue
        last = event.bound - 1
        root = RootCause(
            cause=cause,
            sentence=sentence,
            fix=f"Keep {name} inside 0 to {last}",
            proof=Proof(
                red,
                f"each such element of {name} put inside",
                "the same operation has no error",
            ),
            kernel=event.kernel,
            argument=event.index_name or None,
            tensor=event.index_name or None,
            file=file or None,
            line=int(line) if line.isdigit() else None,
            expression=event.op.text or None,
            blames=Blame.UNKNOWN,
            entry=SolvedEntry(argument=name, index=event.element, value=event.value),
        )
        yield proven(root, NAME, (), "that operation without an error", event.seq)
