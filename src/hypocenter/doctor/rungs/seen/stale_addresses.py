"""Rung: tables of addresses whose memory had been freed before the launch that reads through them.

The recorder saw a tensor asked for the address, its memory go, and the launch. Only where the
kernel makes a pointer of what it loads there, and a replay goes there, is it told.
"""

from __future__ import annotations

import ast

from hypocenter.base.errors import HypoError
from hypocenter.doctor.case import Case
from hypocenter.doctor.causes import Cause
from hypocenter.doctor.diagnosis import Claim, Culprit, Proof, RootCause, proven
from hypocenter.doctor.kernel_text import Access, calls_in, function_of
from hypocenter.record.bundle_index import LaunchMade
from hypocenter.record.events import SourceRecord, StaleAddress
from hypocenter.record.gap import Gap
from hypocenter.replay.terms import KernelText

NAME = "stale addresses"


def stale_addresses(case: Case) -> list[Claim]:
    """The first such address of each table."""
    claims: dict[int, Claim] = {}
    for event in case.index.events_of(StaleAddress):
        use = next((made for made in case.launches if made.seq == event.launched), None)
        claim = _claim(case, use, event) if use and event.tensor not in claims else None
        if claim is not None:
            claims[event.tensor] = claim
    return list(claims.values())


def _claim(case: Case, use: LaunchMade, event: StaleAddress) -> Claim | None:
    """None where the kernel makes no pointer of what it finds there."""
    named = [arg.name for arg in use.launch.arguments if arg.tensor == event.tensor]
    source = case.sources.get(use.launch.source)
    access = through(source, named[0]) if named and source is not None else None
    if access is None or not _is_reached(case, use, event):
        return None
    name, tensor = named[0], case.tensors.get(event.tensor)
    what = f"{name}{list(event.index)} = {event.address:#x}"
    asked = f"a tensor was asked for it at {event.asked_at}" if event.asked_at else "it was asked"
    gone = f"its {event.num_bytes} bytes were freed"
    gone += f" at {event.freed_at}" if event.freed_at else ""
    root = RootCause(
        cause=Cause.USE_AFTER_FREE,
        sentence=f"{use.launch.kernel}: {what} leads to memory that is gone: {asked}, and {gone} "
        f"before {use.where}",
        fix=f"Keep the tensors alive whose addresses {name} holds, until {use.launch.kernel} has "
        "ended",
        proof=Proof(
            f"{use.where} was given {what}, and goes there when it is replayed; nothing that the "
            "program had asked for its address was there",
            "the tensor kept until then",
            "memory that lives and has the address passes the same test",
        ),
        kernel=use.launch.kernel,
        argument=name,
        tensor=tensor.name if tensor is not None else None,
        place=use.place,
        culprit=Culprit(event.freed_at, "frees it") if event.freed_at else None,
    ).at(access)
    return proven(root, NAME, (), "memory at that address", use.seq, (event.tensor,))


def _is_reached(case: Case, use: LaunchMade, event: StaleAddress) -> bool:
    """Whether a replay goes there: a table may hold entries that a launch leaves alone."""
    if use.place is None:
        return False
    try:
        from hypocenter.replay.reached import reaches

        past = event.address + event.num_bytes
        text = KernelText(case.allow_source)
        return bool(reaches(case.index, use.place, event.address, past, text=text))
    except (HypoError, ImportError) as error:
        why = f"the launch was not replayed: {error}"
        case.leave_unseen(Gap.not_examined("addresses without memory in a table", why))
        return False


def through(source: SourceRecord, parameter: str) -> Access | None:
    """The first access through a pointer that the kernel makes of what it loads by `parameter`."""
    function = function_of(source.text)
    if function is None:
        return None
    loads = [
        call
        for call, operation, bases in calls_in(function)
        if operation == "load" and parameter in bases.address
    ]
    pointers = {
        target.id
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and _is_pointer_of(node.value, loads)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for call, operation, _ in calls_in(function):
        address = call.args[0] if call.args else None
        names = {n.id for n in ast.walk(address) if isinstance(n, ast.Name)} if address else set()
        if operation and names & pointers:
            line = source.first_line + call.lineno - 1
            text = ast.unparse(call)
            return Access(source.file, line, source.function, text, operation, False)
    return None


def _is_pointer_of(node: ast.expr, loads: list[ast.Call]) -> bool:
    """Whether it is `tl.load(...).to(tl.pointer_type(...))` of one of these loads."""
    is_cast = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    if not is_cast or node.func.attr != "to" or not node.args:  # type: ignore[attr-defined]
        return False
    is_pointer = "pointer_type" in ast.unparse(node.args[0])  # type: ignore[attr-defined]
    return is_pointer and node.func.value in loads  # type: ignore[attr-defined]
