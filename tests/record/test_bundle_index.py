"""The one index of a bundle: what was under way at the end, for the doctor and for a replay."""

from __future__ import annotations

from recorded.bundles import Run

from hypocenter.cli.launch_choice import choose_places
from hypocenter.doctor.case import Case
from hypocenter.record.bundle import Bundle
from hypocenter.record.bundle_index import BundleIndex
from hypocenter.record.events import Copied, Launched, Place, Reached, Stepped
from hypocenter.record.fault_record import FaultRecord

CRASH = FaultRecord(kind="crash", message="")


def two_plans(progress: Reached, *, copy_between: bool = False) -> Bundle:
    """Step 1 and 2 of a decoder of three launches and a sampler of two."""
    run = Run()
    run.tensor("x", "F32", 4)
    launch = run.launch("theirs", {}, {"x_ptr": "x"})
    decoder, sampler = run.plan(launch, launch, launch), run.plan(launch, launch)
    for run.step in (1, 2):
        run.emit(Stepped, plan=decoder)
        if copy_between and run.step == 2:
            run.emit(Copied, direction="out", tensor=1, address=0, num_bytes=4)
        run.emit(Stepped, plan=sampler)
    return run.bundle(CRASH, progress=progress)


def under_way(bundle: Bundle) -> list[tuple[int, int, int]]:
    """The places of the doctor's launches, which are those of a replay as well."""
    index = BundleIndex(bundle)
    places = [one.place for one in Case(bundle).index.under_way if one.place is not None]
    assert tuple(places) == choose_places(index, None, None)
    return [(one.step, one.plan, one.launch) for one in places]


def test_a_plan_that_is_over_is_not_under_way() -> None:
    """Launch 0 of the sampler is done, so all three of the decoder before it are."""
    done, last = Place(2, 2, 0), Place(2, 2, 1)
    assert under_way(two_plans(Reached(last, done))) == [(2, 2, 1)]


def test_under_way_ends_with_what_was_submitted() -> None:
    done, last = Place(1, 2, 0), Place(2, 1, 1)
    assert under_way(two_plans(Reached(last, done))) == [(1, 2, 1), (2, 1, 0), (2, 1, 1)]


def test_without_a_mark_a_copy_to_the_host_says_what_is_over() -> None:
    last = Reached(Place(2, 2, 1))
    assert under_way(two_plans(last, copy_between=True)) == [(2, 2, 0), (2, 2, 1)]
    assert len(under_way(two_plans(last))) == 10


def test_the_last_step_may_have_lost_its_event() -> None:
    bundle = two_plans(Reached(Place(3, 1, 1)))
    assert under_way(bundle) == [(3, 1, 0), (3, 1, 1)]


def test_a_mark_beyond_its_plan_costs_no_memory() -> None:
    """A number of the file is no count of ours: there are three launches, whatever it says."""
    bundle = two_plans(Reached(Place(3, 1, 1 << 40)))
    assert under_way(bundle) == [(3, 1, 0), (3, 1, 1), (3, 1, 2)]


def test_of_launches_outside_plans_those_behind_the_last_copy_are_under_way() -> None:
    run = Run()
    run.tensor("x", "F32", 4)
    launch = run.launch("theirs", {}, {"x_ptr": "x"})
    first = run.emit(Launched, launch=launch)
    run.emit(Copied, direction="out", tensor=1, address=0, num_bytes=4)
    second = run.emit(Launched, launch=launch)
    bundle = run.bundle(CRASH, progress=Reached(None))
    assert under_way(bundle) == [(0, -1, second.seq)]
    assert [one.seq for one in BundleIndex(bundle).launches] == [first.seq, second.seq]
