"""A bundle that ends with a comparison which failed: what a launch gave, beside what was wanted."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from hypocenter.base.dtypes import Array
from hypocenter.record.bundle import Bundle
from hypocenter.record.compared import ComparedSide, ComparedUnequal
from hypocenter.record.fault_record import FaultRecord

_DTYPES = {"float16": "F16", "float32": "F32"}


def with_failed_comparison(
    bundle: Bundle,
    gave: Array,
    want: Array,
    *,
    within: float = 1e-3,
    call: str = "`assert close`",
    **changes: Any,
) -> Bundle:
    """The bundle of a launch whose `y_ptr` held `gave`, f16 or f32, and of an assertion that wants
    `want`, of the same shape. What differs by more than `within` is
    wrong; `changes` are fields of the event."""
    y = next(tensor for tensor in bundle.tensors if tensor.name == "y_ptr")
    wrong = np.argwhere(~(np.abs(gave.astype(np.float64) - want) <= within))
    index = tuple(map(int, wrong[0]))
    at = int(np.ravel_multi_index(index, gave.shape))
    sides = (
        ComparedSide(
            name="y",
            dtype=_DTYPES[gave.dtype.name],
            value=float(gave[index]),
            data=gave.tobytes(),
            address=y.address + gave.itemsize * at,
            allocation=y.allocation,
        ),
        ComparedSide(
            name="want",
            dtype="F32",
            value=float(want[index]),
            data=want.astype(np.float32).tobytes(),
        ),
    )
    event = ComparedUnequal(
        seq=max(event.seq for event in bundle.events) + 1,
        step=2,
        site="program.py:50",
        compared_at="program.py:49",
        sides=sides,
        shape=gave.shape,
        index=index,
        num_different=len(wrong),
        num_elements=gave.size,
        rtol=0.0,
        atol=within,
    )
    fault = FaultRecord(
        kind="error",
        message="AssertionError",
        call=call,
        is_statement=True,
        site="program.py:50",
        is_asynchronous=False,
    )
    event = msgspec.structs.replace(event, **changes)
    return msgspec.structs.replace(bundle, events=(*bundle.events, event), fault=fault)
