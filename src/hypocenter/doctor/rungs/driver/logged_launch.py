"""Rung: the launch that the runtime's own log ends in, and how the fault's page lies to its memory.

Proves nothing: a fault reaches a process a moment after it was made, and of the memory of a program
only what the launch was given is known.
"""

from __future__ import annotations

from collections.abc import Iterator

from hypocenter.base.wording import count_text
from hypocenter.doctor.case import Case
from hypocenter.doctor.causes import Cause
from hypocenter.doctor.diagnosis import Claim, Verdict, row
from hypocenter.record.logged_launch import LoggedArgument, LoggedLaunch

NAME = "launch log"
#: A page below this is that of nothing; one so near to memory is told as near it.
NULL_BYTES, NEAR_BYTES = 1 << 16, 1 << 30
_OPEN = (
    "what leads there is not known: the log has no access, and no memory but what the launch was "
    "given"
)


def logged_launch(case: Case) -> list[Claim]:
    """How the page of the fault lies to what the launch was given, where that says something."""
    launch, fault = case.bundle.logged_launch, case.bundle.fault
    if launch is None or fault.address is None or any(claim.root for claim in case.claims):
        return []
    found = _null(launch, fault.address) or _near(launch, fault.address)
    if found is None:
        return []
    cause, argument, told = found
    return [
        row(
            cause,
            Verdict.INCONCLUSIVE,
            NAME,
            f"{launch_text(launch)}: {told}",
            *_rows(launch),
            _OPEN,
            would_refute="another kernel that was under way, or other memory at that address",
            kernel=launch.kernel,
            argument=name_of(argument),
        )
    ]


def launch_text(launch: LoggedLaunch) -> str:
    """What the log ends in, in a few words."""
    how = f"returned {launch.outcome}" if launch.outcome else "had not returned when its log ended"
    size = ""
    if all(launch.grid):
        size = f", grid {launch.grid}, blocks of {launch.block} threads"
    made = count_text(launch.num_launches, "launch", "launches")
    return f"{launch.call} of {launch.kernel}{size}, the last of {made}, {how}"


def name_of(argument: LoggedArgument) -> str:
    """`parameter 1`, with the name that the kernel's own record has for it."""
    return f"parameter {argument.number}" + (f" ({argument.name})" if argument.name else "")


def _null(launch: LoggedLaunch, page: int) -> tuple[Cause, LoggedArgument, str] | None:
    """The one address that is null, at a page where nothing is."""
    if page >= NULL_BYTES:
        return None
    nulls = [
        argument for argument in launch.arguments if argument.is_address and argument.value == 0
    ]
    if len(nulls) != 1:
        return None
    told = f"{name_of(nulls[0])} is null, and the fault is at page {page:#x}"
    return Cause.NULL_POINTER, nulls[0], told


def _near(launch: LoggedLaunch, page: int) -> tuple[Cause, LoggedArgument, str] | None:
    """The memory of the launch that the page of the fault lies nearest to, outside of all of it."""
    known = [
        (argument, argument.first, argument.past)
        for argument in launch.arguments
        if argument.first is not None
        and argument.past is not None
        and argument.first < argument.past
    ]
    if any(first <= page < past for _, first, past in known):
        return None  # an address in it may be one that was freed, or may not be written
    distances = [
        (page - past if page >= past else first - page, argument, first, past)
        for argument, first, past in known
    ]
    distance, argument, first, past = min(
        distances, key=lambda found: found[0], default=(NEAR_BYTES, None, 0, 0)
    )
    if argument is None or distance >= NEAR_BYTES:
        return None
    side = f"{distance} bytes before"
    if page >= past:
        side = f"{distance} bytes behind the end of" if distance else "right behind"
    told = f"page {page:#x}, where the fault is, begins {side} the memory of {name_of(argument)}"
    return Cause.ACCESS_OUTSIDE, argument, f"{told}, {past - first} bytes from {first:#x}"


def _rows(launch: LoggedLaunch) -> Iterator[str]:
    shown = []
    for argument in launch.arguments[:16]:
        value = "not logged" if argument.value is None else str(argument.value)
        if argument.is_address and argument.value is not None:
            value = f"{argument.value:#x}"
            if argument.first is not None and argument.past is not None:
                value += f" in {argument.past - argument.first} bytes from {argument.first:#x}"
        shown.append(f"{name_of(argument)} = {value}")
    if shown:
        yield ", ".join(shown)
