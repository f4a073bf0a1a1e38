"""What the program itself found unequal, in sentences for every form of the report."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from hypocenter.doctor.diagnosis import ComparedElement, FailedComparison, LastWriter

#: What none of it proves.
OPEN = "which of the two is right, and what made the other, is not proven"


def compared_lines(found: FailedComparison) -> Iterator[str]:
    """The comparison with the element, and for each side who stored it there."""
    yield f"{_element_text(found)}, compared at {found.compared_at}"
    for side in found.sides:
        if side.writer is not None:
            yield _stored_text(found, side, side.writer)
            if side.writer.fed_by:
                made = ", ".join(
                    f"{name}, to which {where} stores" for name, where in side.writer.fed_by
                )
                yield f"it reads {made}"
    yield _open_text(found)


def _open_text(found: FailedComparison) -> str:
    """What stays open; where one side is just what its launch makes of what it read, that it is the
    program's other side which says that it is wrong."""
    made = [side.writer is not None and side.writer.gives_it is True for side in found.sides]
    if made.count(True) != 1:
        return OPEN
    other = found.sides[1 - made.index(True)]
    return (
        f"the launch makes this number of what it read, so it is {other.name} that says it is "
        f"wrong; {OPEN}"
    )


def compared_text(found: FailedComparison) -> str:
    """The shortest: that the program found two things unequal."""
    one, other = found.sides
    return f"the program found {one.name} and {other.name} unequal at {found.site}"


def _element_text(found: FailedComparison) -> str:
    """One sentence: where the two sides differ, and how many elements do."""
    one, other = found.sides
    names = _element_name(found, one), _element_name(found, other)
    values = f"{names[0]} is {_number(one)} and {names[1]} {_number(other)}"
    if found.num_elements == 1:
        return values
    which = "of which this is the first" if found.is_first else "this one most"
    return f"{values}; {found.num_different} of {found.num_elements} elements differ, {which}"


def _stored_text(found: FailedComparison, side: ComparedElement, writer: LastWriter) -> str:
    name = _element_name(found, side)
    by = f"{writer.kernel}, launched at {writer.launched_at}" if writer.launched_at else ""
    by = by or writer.kernel
    where = f"`{writer.expression}` at {writer.file}:{writer.line} in program {writer.program}"
    stored = (
        f"of the launches that were recorded the last to store {name} was launch "
        f"{writer.place.step} of {by}: {where}"
    )
    if writer.value is None:
        return f"{stored}, which adds to what was there"
    if writer.gives_it is None:
        return f"{stored}; what it had read was not recorded, so whether it stored this is open"
    if writer.gives_it and writer.value == side.value:
        return f"{stored}; its replay stores this number, too"
    if writer.gives_it:
        return f"{stored}; its replay stores {writer.value}, which is this number but for rounding"
    other = f"{stored}; its replay stores {writer.value}"
    if writer.gives_it_cut:
        return f"{other}, and this number once the operands of tl.dot are cut to TF32"
    return f"{other} and not this number; what makes the difference is not known"


def _element_name(found: FailedComparison, side: ComparedElement) -> str:
    """The element of a side: `(x + y)[768]`, as the program would have to spell it."""
    if not found.index:
        return side.name
    at = f"[{', '.join(map(str, found.index))}]"
    return f"{side.name}{at}" if _binds(side.name) else f"({side.name}){at}"


def _binds(name: str) -> bool:
    """Whether an index behind it is of all of it; so it is of what is no expression."""
    try:
        node = ast.parse(name, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return True
    return isinstance(node, ast.Name | ast.Attribute | ast.Subscript | ast.Call)


def _number(side: ComparedElement) -> str:
    return str(side.value) if isinstance(side.value, int) else f"{side.value:.6g}"
