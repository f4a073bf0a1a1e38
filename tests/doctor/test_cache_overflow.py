"""A cache that holds infinity because numbers without room in its type were stored there."""

from __future__ import annotations

from recorded.bundles import Run, decoder, inputs, tensors_of_decoder

from hypocenter.doctor.causes import Cause
from hypocenter.doctor.diagnosis import RootCause
from hypocenter.doctor.doctor import diagnose
from hypocenter.record.events import Place, Statistics
from hypocenter.record.fault_record import FaultRecord

#: The launches of `decoder`: the cache is written by kv_write, and read by attention.
KV_WRITE, ATTENTION = 2, 3


def root_of(largest: float, dtype: str = "F16") -> RootCause:
    """What is said of a run whose attention made NaN out of a cache with infinity."""
    run = Run()
    tensors_of_decoder(run, v_cache={"dtype": dtype})
    plan = decoder(run)
    run.run(plan, inputs())

    def seen(name: str, launch: int, high: float = 1.0, **bad: int) -> Statistics:
        return Statistics(
            place=Place(1, plan, launch), tensor=run.tensors[name].id, digest="", low=-high / 2,
            high=high, mean=0.5, rms=0.5, num_nan=bad.get("nan", 0), num_inf=bad.get("inf", 0),
            first_nonfinite=(0, 0) if bad else None,
        )  # fmt: skip

    figures = (
        seen("v", KV_WRITE - 1, largest), seen("out", ATTENTION, nan=4),
        seen("v_cache", ATTENTION, inf=28), seen("q", ATTENTION),
    )  # fmt: skip
    fault = FaultRecord(kind="nonfinite", message="logits row 0: 512 of 512 values are NaN")
    found = diagnose(run.bundle(fault, statistics=figures), without=("replay", "hang"))
    assert all(not rung.left_out for rung in found.rungs if rung.name == "values"), found.rungs
    return found.roots[0]


def test_the_launch_that_stored_too_large_numbers_is_named() -> None:
    root = root_of(1e6)
    assert (root.cause, root.kernel, root.argument) == (Cause.NONFINITE_VALUE, "kv_write", "v")
    assert "v of up to 1e+06 is stored into v_cache (v_cache), whose F16 holds at most" in (
        root.sentence
    )


def test_numbers_that_have_room_leave_the_reader_to_blame() -> None:
    for root in (root_of(6e4), root_of(1e6, dtype="F32")):
        assert (root.cause, root.kernel) == (Cause.NONFINITE_PADDING, "attention")
