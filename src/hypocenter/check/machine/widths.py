"""Why an access is outside: the array's elements are narrower than the kernel reads them.

Decided by a trial, not by a name: the launch is run again with elements as wide as the access, the
same in number and value. Only where nothing at all is found then is the width told as the cause.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec
import numpy as np

from hypocenter.base.dtypes import Array
from hypocenter.check.machine.memory import UnwrittenArray
from hypocenter.device.amd.kernarg import PassedNumber
from hypocenter.replay.findings import Finding, FindingKind

Value = Array | PassedNumber | None
_WIDTHS = (2, 4, 8)


def copy_arguments(arguments: Mapping[str, Value]) -> dict[str, Value]:
    """The arguments as they are before a launch; what was one array stays one."""
    copies: dict[int, Array] = {}
    return {
        name: copies.setdefault(id(value), _copy(value)) if isinstance(value, np.ndarray) else value
        for name, value in arguments.items()
    }


def _copy(array: Array) -> Array:
    """The array, with what launches have written of it."""
    copy: Array = np.array(array, subok=True)
    if isinstance(array, UnwrittenArray) and array.written is not None:
        assert isinstance(copy, UnwrittenArray)
        copy.written = array.written.copy()
    return copy


def explain_widths(
    findings: Sequence[Finding],
    before: Mapping[str, Value],
    run_again: Callable[[Mapping[str, Value]], Sequence[Finding]],
) -> tuple[Finding, ...]:
    """The findings, where a wider array ends them all with that as the cause."""
    for finding in findings:
        if finding.kind is not FindingKind.OUT_OF_BOUNDS or finding.argument is None:
            continue
        array, width = before[finding.argument], finding.width_bytes
        if not isinstance(array, np.ndarray) or width not in _WIDTHS:
            continue
        if (
            isinstance(array, UnwrittenArray)
            or width <= array.itemsize
            or array.dtype.kind not in "iuf"
        ):
            continue
        wide = array.astype(np.dtype(f"{array.dtype.kind}{width}"))
        given = copy_arguments(before)
        if any(other is array for name, other in before.items() if name != finding.argument):
            continue
        given[finding.argument] = wide
        if run_again(given):
            continue
        told = (
            f"{finding.detail}. {finding.argument} has elements of {array.itemsize} bytes "
            f"({array.dtype}), and the kernel reads {width} at a time: with {wide.dtype} elements "
            "the same launch, run again, has no finding"
        )
        changed = msgspec.structs.replace(finding, kind=FindingKind.ELEMENT_WIDTH, detail=told)
        return tuple(changed if other is finding else other for other in findings)
    return tuple(findings)
