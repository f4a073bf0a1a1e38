"""Two uses that nothing orders, in words: what they are, and the call that is missing."""

from __future__ import annotations

from hypocenter.base.wording import count_text
from hypocenter.order.clocks import HOST
from hypocenter.record.order_events import Disorder, Disordered, UseRecord


def sentence_of(one: Disordered) -> str:
    """What uses what, where, in which streams; no period ends it."""
    first, second = one.first, one.second
    made = f"the tensor made {_at(one.made)}" if one.made else "a tensor"
    memory = one.tensor or made
    uses, then = _use_text(first), _use_text(second)
    if one.kind is Disorder.REUSED:
        gets = "has the same memory" if one.is_same else "may be given the same memory"
        return (
            f"memory made {_at(one.made or 'a line that is not known')} is still used when it is "
            f"freed ({one.freed or 'no line is known'}): {uses}; {memory}, which comes next, "
            f"{gets}, and {then} without a wait"
        )
    return f"{memory}: {uses} and {then} use the same memory, and nothing orders the two"


def _at(site: str) -> str:
    """`at script.py:9`; autograd's own work has no line."""
    return f"at {site}" if ":" in site or " " not in site else f"in {site}"


def _use_text(use: UseRecord) -> str:
    site = use.site or "no line is known"
    where = "on the host" if use.stream == HOST else f"in {use.stream_name}"
    return f"{doing_of(use)} {where} ({site})"


def doing_of(use: UseRecord) -> str:
    """`scale (x_ptr) reads`."""
    named = f" ({use.argument})" if use.argument else ""
    return f"{use.what}{named} {'writes' if use.is_write else 'reads'}"


def call_of(one: Disordered) -> str:
    """The call that is missing, as a program writes it."""
    first, second = one.first, one.second
    if one.kind is Disorder.REUSED:
        return f"record_stream({first.stream_name})"
    if HOST in (first.stream, second.stream):
        return f"{first.stream_name}.synchronize()"
    return f"{second.stream_name}.wait_stream({first.stream_name})"


def fix_of(one: Disordered) -> str:
    """The call, and where it belongs."""
    if one.kind is not Disorder.REUSED:
        return f"{call_of(one)} before {one.second.site}"
    made = f" of the tensor made at {one.made}" if one.made else ""
    freed = f" at {one.freed}" if one.freed else ""
    return f"{call_of(one)}{made} before it is freed{freed}"


def missing_at(one: Disordered) -> str:
    """What is missing at the line that is to be changed."""
    where = "before it is freed here" if one.kind is Disorder.REUSED else "before this line"
    return f"{call_of(one)} is missing {where}"


def failure_of(one: Disordered) -> str:
    """What the walk through the record shows."""
    num = len(one.between)
    steps = f"the {count_text(num, 'record or wait', 'records and waits')}" if num else "nothing"
    verb = "do not put" if num > 1 else "does not put" if num else "puts"
    first, second = one.first, one.second
    return (
        f"{steps} asked for between the two {verb} {second.what} at {second.site} behind "
        f"{first.what} at {first.site}"
    )
