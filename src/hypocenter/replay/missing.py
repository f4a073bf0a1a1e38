"""Which elements of a launch's output nobody has written, as a finding of the launch.

Of flags for each byte of the memory that the output lies in; who reads it, others know.
"""

from __future__ import annotations

import numpy as np

from hypocenter.base.dtypes import Array
from hypocenter.replay.arguments import Argument, extent_bytes
from hypocenter.replay.findings import Finding, FindingKind, Site


def elements_of(flags: Array, argument: Argument) -> Array:
    """The flag of the first byte of each element."""
    strides = [stride * argument.item_bytes for stride in argument.strides]
    assert extent_bytes(argument.shape, argument.strides, argument.item_bytes) <= flags.size
    return np.lib.stride_tricks.as_strided(flags[argument.start :], argument.shape, strides)


def missing_of(
    kernel: str,
    argument: Argument,
    flags: Array,
    detail: str,
    configuration: str | None = None,
    launched_at: Site | None = None,
) -> Finding | None:
    """None where all was written. `detail` goes behind what is missing."""
    elements = elements_of(flags, argument)
    rows = elements.reshape(1) if not argument.shape else elements
    # Row by row: the index of each missing element could be larger than the tensor.
    counts = [row.size - int(np.count_nonzero(row)) for row in rows]
    missing = [number for number, count in enumerate(counts) if count]
    if not missing:
        return None
    ends = [
        (n, *np.argwhere(~rows[n])[end].tolist()) for n, end in ((missing[0], 0), (missing[-1], -1))
    ]
    return Finding(
        kind=FindingKind.NEVER_WRITTEN,
        kernel=kernel,
        operation="launch",
        argument=argument.name,
        element=ends[0] if argument.shape else (),
        num_lanes=sum(counts),
        layout=argument.layout,
        detail=f"{sum(counts)} of {elements.size} elements of shape {argument.shape}, from "
        f"{list(ends[0])} to {list(ends[1])}{detail}",
        configuration=configuration,
        launched_at=launched_at,
    )
