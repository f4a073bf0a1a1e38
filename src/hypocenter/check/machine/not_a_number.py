"""Which number of a launch made NaN of what held none: one that is zero, by a trial.

The launch is run again with each number that is zero as one. Only where no NaN is left then is that
number told. NaN that nothing explains are told by nobody: a kernel may mean them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from hypocenter.base.dtypes import Array
from hypocenter.check.machine.memory import UnwrittenArray
from hypocenter.check.machine.widths import Value, copy_arguments
from hypocenter.replay.findings import Finding, FindingKind


def explain_nan(
    kernel: str,
    before: Mapping[str, Value],
    after: Mapping[str, Value],
    run_again: Callable[[Mapping[str, Value]], bool],
) -> tuple[Finding, ...]:
    """A finding for the number that made NaN; `run_again` changes its arrays, and says whether the
    launch came to its end with nothing found."""
    if any(map(_num_nan, before.values())):
        return ()
    made = {name: number for name, value in after.items() if (number := _num_nan(value))}
    zeros = [name for name, value in before.items() if _is_zero(value)]
    if not made or not zeros:
        return ()
    for name in zeros:
        given = copy_arguments(before)
        given[name] = 1.0 if isinstance(before[name], float) else 1
        if run_again(given) and not any(map(_num_nan, given.values())):
            return (_finding(kernel, name, before[name], made, after),)
    return ()


def _finding(
    kernel: str,
    name: str,
    value: Value,
    made: Mapping[str, int],
    after: Mapping[str, Value],
) -> Finding:
    array, number = next(iter(made.items()))
    held = after[array]
    assert isinstance(held, np.ndarray)
    first = int(np.flatnonzero(np.isnan(held))[0])
    return Finding(
        kind=FindingKind.NOT_A_NUMBER,
        kernel=kernel,
        operation="launch",
        argument=name,
        number=first,
        detail=(
            f"{number} of {held.size} elements of {array} are NaN after the launch, the first is "
            f"element {first}, and no array held one before. {name} is {value}: with 1 the same "
            "launch, run again, leaves none"
        ),
    )


def _num_nan(value: Value) -> int:
    """NaN in an array, or in a number; what nobody wrote holds none."""
    if isinstance(value, UnwrittenArray) or not isinstance(value, (np.ndarray, float)):
        return 0
    held: Array = np.asarray(value)
    return int(np.isnan(held).sum()) if held.dtype.kind == "f" else 0


def _is_zero(value: Value) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and value == 0
