"""A fix as the doctor gives it, applied: to the text of a kernel, or to what a launch passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hypocenter.doctor.diagnosis import Edit
from recorded.program_launch import Launch


def applied(launch: Launch, edits: Sequence[Edit], first_line: int = 1) -> Launch:
    """The launch with the edits; each must find its old text or value in its place."""
    assert edits
    lines = launch.text.splitlines()
    for edit in edits:
        if edit.name == "grid":
            assert edit.old == str(launch.grid)
            numbers = edit.new.strip("()").split(",")
            launch = replace(launch, grid=tuple(int(number) for number in numbers if number))
        elif edit.name:
            assert launch.scalars[edit.name] == int(edit.old)
            launch = replace(launch, scalars=launch.scalars | {edit.name: int(edit.new)})
        else:
            at = edit.line - first_line
            assert lines[at].strip() == edit.old
            indent = len(lines[at]) - len(lines[at].lstrip())
            lines[at] = f"{' ' * indent}{edit.new}"
    return replace(launch, text="\n".join(lines) + "\n")
