"""The bundle of a program of anybody's that made one launch, which takes elements by an index."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from hypocenter.record.bundle import Bundle
from hypocenter.record.contents import Snapshot
from hypocenter.record.events import FOREIGN, OUTSIDE_PLANS, Launched, Values
from hypocenter.record.fault_record import FaultRecord
from recorded.bundles import Run

TAKE = """@triton.jit
def take_entry_kernel(x, ids, o, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    at = tl.load(ids + i, mask=i < n, other=0)
    tl.store(o + i, tl.load(x + at, mask=i < n), mask=i < n)
"""


def launch_of(
    text: str,
    ids: list[int] | None = None,
    *,
    name: str = "take_entry",
    freed: str = "",
    **other: Any,
) -> Bundle:
    """One launch of a program of anybody's, over 100 elements in two programs."""
    run = Run()
    run.tensor("x", "F32", 100, owner=FOREIGN)
    run.tensor("ids", "I32", 100, owner=FOREIGN)
    run.tensor("o", "F32", 100, owner=FOREIGN)
    run.step += 1
    if freed:
        run.free(freed)
    given = {"x": "x", "ids": "ids", "o": "o", "n": 100}
    if name != "take_entry":
        given.pop("ids")
    launch = run.launch(name, {}, given, source=text, grid=(2,), constants={"B": 64}, **other)
    run.emit(Launched, launch=launch)
    bundle = run.bundle(FaultRecord(kind="crash", message="it broke", signal=11))
    if ids is None:
        return bundle
    held = Values(run.tensors["ids"].id, "I32", (100,), np.array(ids, np.int32).tobytes())
    snapshot = Snapshot(1, OUTSIDE_PLANS, run.seq, (held,))
    return msgspec.structs.replace(bundle, snapshots=(snapshot,))
