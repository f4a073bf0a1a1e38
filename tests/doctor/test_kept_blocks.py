"""A block that the cache keeps and that was written: by whom, and who reads it."""

from __future__ import annotations

import msgspec
from recorded.bundles import REQUEST, Run, decoder, inputs, tensors_of_decoder

from hypocenter.doctor.causes import Cause
from hypocenter.doctor.diagnosis import Culprit, RootCause, Verdict
from hypocenter.doctor.doctor import diagnose
from hypocenter.record.bundle import Bundle
from hypocenter.record.engine_events import BlockChanged
from hypocenter.record.events import (
    Copied,
    Place,
    Statistics,
)
from hypocenter.record.fault_record import FaultRecord

DIFFERS = FaultRecord(kind="differs", message="the text is not that of the good run")
NO_REPLAY = ("replay", "hang")
#: It reads the first block of request 7, and writes its own.
READER = msgspec.structs.replace(
    REQUEST, id=9, first_position=16, num_tokens=1, blocks=(2, 4), num_adopted=1
)


def run_of(slot: int, *, copies: bool = False, changes: bool = True) -> Bundle:
    """Request 7 fills block 2; in step 2 request 9, which adopted it, writes `slot`."""
    run = Run()
    tensors_of_decoder(run)
    plan = decoder(run)
    run.run(plan, inputs(), (REQUEST,))
    if copies:
        page = run.tensors["k_cache"]
        run.emit(
            Copied, direction="in", tensor=page.id, address=page.address, num_bytes=64,
            site="clean_up.py:12",
        )  # fmt: skip
    given = inputs(positions=[16], slots=[slot], sequence_rows=[0], counts=[1, 1])
    given["block_tables"][0, 1] = 4
    run.run(plan, given, (READER,))
    if changes:
        run.emit(BlockChanged, tensor=run.tensors["k_cache"].id, block=2, request=7, kept_in=1)
    figures = Statistics(
        place=Place(2, plan, 2), tensor=1, digest="", low=0.0, high=1.0, mean=0.5, rms=0.5,
        num_nan=0, num_inf=0,
    )  # fmt: skip
    return run.bundle(DIFFERS, statistics=(figures,))


def root_of(made: Bundle) -> RootCause:
    found = diagnose(made, without=(*NO_REPLAY, "ownership"))
    assert all(not rung.left_out for rung in found.rungs if rung.name == "kept blocks")
    return found.roots[0]


def test_a_block_as_it_was_kept_is_no_finding() -> None:
    found = diagnose(run_of(64, changes=False), without=NO_REPLAY)
    assert not found.roots
    rows = {one.cause: one.verdict for one in found.hypotheses}
    assert rows[Cause.KEPT_BLOCK_CHANGED] is Verdict.REFUTED


def test_the_launch_that_wrote_a_kept_block_is_the_cause() -> None:
    root = root_of(run_of(33))
    assert (root.cause, root.kernel) == (Cause.KEPT_BLOCK_CHANGED, "kv_write")
    assert root.argument == "k_cache"
    assert "kept since step 1, when request 7 had filled it" in root.sentence
    assert "changed in step 2 by launch 2, at slot 33 of request 9" in root.sentence
    assert "request 9 reads it in step 2" in root.sentence
    assert root.proof.green == "read back after step 1, it still was"


def test_a_kernel_that_wrote_beside_its_slots_is_told_from_a_wrong_slot() -> None:
    assert "though no slot of that step lies in it" in root_of(run_of(64)).sentence


def test_a_copy_between_the_steps_is_the_cause() -> None:
    root = root_of(run_of(64, copies=True))
    assert root.kernel is None
    assert "changed in step 2 by a copy from the host at clean_up.py:12" in root.sentence
    assert root.culprit == Culprit("clean_up.py:12", "copies into k_cache")
