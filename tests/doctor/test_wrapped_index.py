"""An index whose product wraps in 32 bits, by a dump: registers tell it from one that is outside.

The bundle of a real H100 is that of `far_index`, with a table of more than 2**31 elements instead.
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import msgspec
import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from recorded.core_dumps import bundle_folder

from hypocenter.doctor.causes import Cause
from hypocenter.doctor.diagnosis import Diagnosis, Verdict
from hypocenter.doctor.doctor import diagnose
from hypocenter.record import bundle as bundles
from hypocenter.record.bundle import Bundle
from hypocenter.record.events import Allocated, AnyEvent, Called, Launched

ROWS, WIDTH = 2_200_000, 1024
#: A row of the table, and one far before it, which lead to the same address in 32 bits.
INSIDE, OUTSIDE = 2_199_990, 2_199_990 - (1 << 22)
replace = msgspec.structs.replace


@functools.cache
def _recorded() -> Bundle:
    with tempfile.TemporaryDirectory() as folder:
        return bundles.load(bundle_folder("far_index", Path(folder)))


def examined(*registers: int, rows: int = ROWS) -> Diagnosis:
    """The bundle with a wide table, and what the registers of each lane hold."""
    made = _recorded()
    ids, table, out = made.tensors[:3]
    table_bytes, out_bytes = rows * WIDTH * 2, 256 * WIDTH * 4
    ids = replace(ids, dtype="I32", extent_bytes=1024)
    table = replace(
        table, dtype="BF16", shape=(rows, WIDTH), strides=(WIDTH, 1), extent_bytes=table_bytes
    )
    out = replace(out, shape=(256, WIDTH), strides=(WIDTH, 1), extent_bytes=out_bytes)
    sizes = {ids.allocation: 2048, table.allocation: table_bytes, out.allocation: out_bytes}
    events: list[AnyEvent] = []
    for event in made.events:
        if isinstance(event, Allocated) and event.allocation.id in sizes:
            num_bytes = sizes[event.allocation.id]
            allocation = replace(event.allocation, num_bytes=num_bytes)
            events.append(replace(event, allocation=allocation))
        elif isinstance(event, Launched) and event.launch.kernel == "embed":
            events.append(replace(event, launch=replace(event.launch, constants={"D": WIDTH})))
        elif isinstance(event, Called):
            events.append(event)
    wrapped = (INSIDE * WIDTH + 2**31) % 2**32 - 2**31
    stop = made.gpu_stops[0]
    warp = stop.warps[0]
    assert warp.access is not None
    access = replace(
        warp.access,
        width_bytes=16,
        known_bits=2**64 - 1,
        addresses={lane: table.address + 2 * wrapped + 16 * lane for lane in range(32)},
    )
    held = tuple(register % 2**32 for register in registers)
    lanes = tuple(replace(lane, registers=held) for lane in warp.lanes)
    stop = replace(stop, warps=(replace(warp, access=access, lanes=lanes),))
    whole = replace(made, tensors=(ids, table, out), events=tuple(events), gpu_stops=(stop,))
    return diagnose(whole, allow_source=True)


def test_an_index_that_a_register_holds_is_proven_to_wrap() -> None:
    [root] = examined(7, INSIDE).roots
    assert (root.cause, root.argument, root.tensor) == (
        Cause.OFFSET_OVERFLOW,
        "table_ptr",
        "table",
    )
    assert root.expression == "i * D"
    assert f"ids_ptr[77] is {INSIDE}, inside of table_ptr" in root.sentence
    assert [(entry.index, entry.value) for entry in root.entries] == [((77,), INSIDE)]
    assert "cast the index to int64" in root.fix
    # The fix was tried: the entry as a number of 64 bits.
    assert root.proof.corrected == "ids_ptr[77] as a number of 64 bits"


def test_by_its_address_alone_it_is_told_beside_the_other_one() -> None:
    found = examined(7)
    assert found.roots == ()
    [told] = [h for h in found.hypotheses if h.diagnostic == "core dump"]
    assert told.verdict is Verdict.INCONCLUSIVE
    assert f"ids_ptr[77] = {INSIDE}, which is inside" in told.evidence[0]
    assert f"ids_ptr[77] = {OUTSIDE} as well, which is outside" in told.evidence[1]


def test_an_index_outside_that_a_register_holds_is_no_overflow() -> None:
    found = examined(7, OUTSIDE)
    assert all(root.cause is not Cause.OFFSET_OVERFLOW for root in found.roots)
    told = [h for h in found.hypotheses if h.diagnostic == "core dump"]
    assert [h.cause for h in told] == [Cause.INDEX_RANGE]
    assert f"ids_ptr[77] holds {OUTSIDE}" in told[0].evidence[0]


def test_where_both_are_held_neither_is_proven() -> None:
    assert examined(INSIDE, OUTSIDE).roots == ()


def test_in_a_table_that_32_bits_reach_no_product_wraps() -> None:
    """The same address, of a table that ends before the row which would wrap."""
    found = examined(INSIDE, rows=2_000_000)
    assert all(h.cause is not Cause.OFFSET_OVERFLOW for h in found.hypotheses if h.kernel)
    [root] = found.roots
    assert root.cause is Cause.INDEX_RANGE
