"""A pipeline of kernels: the launch that first made a bad entry, and not the one that used it."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import msgspec
import numpy as np
from recorded.bundles import Run
from recorded.foreign_launch import TAKE

from hypocenter.doctor.case import Case
from hypocenter.doctor.causes import Cause
from hypocenter.doctor.diagnosis import Diagnosis, Proof, RootCause, SolvedEntry, proven
from hypocenter.doctor.doctor import diagnose
from hypocenter.doctor.judging.judge import judge
from hypocenter.doctor.judging.origin import last_writer
from hypocenter.record.bundle import Bundle
from hypocenter.record.contents import Snapshot
from hypocenter.record.events import FOREIGN, OUTSIDE_PLANS, Launched, Values
from hypocenter.record.fault_record import FaultRecord

NUM = 100
MAKE = """@triton.jit
def make_ids_kernel(given, made, n, step, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    v = tl.load(given + i, mask=i < n, other=0)
    tl.store(made + i, v + step, mask=i < n)
"""
COPY = """@triton.jit
def move_ids_kernel(given, moved, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(moved + i, tl.load(given + i, mask=i < n), mask=i < n)
"""
CLEAR = """@triton.jit
def clear_kernel(other, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(other + i, 0, mask=i < n)
"""


class Pipeline:
    """Launches over 100 elements; before each one what its tensors of integers held is noted."""

    def __init__(self) -> None:
        self.run = Run()
        for name in ("x", "o"):
            self.run.tensor(name, "F32", NUM, owner=FOREIGN)
        self.held = {}
        for name in ("given", "made", "moved", "other"):
            self.run.tensor(name, "I32", NUM, owner=FOREIGN)
            self.held[name] = np.zeros(NUM, np.int32)
        self.snapshots: list[Snapshot] = []

    def launch(self, text: str, **given: object) -> None:
        self.run.step += 1
        name = text.split("def ")[1].split("_kernel")[0]
        launch = self.run.launch(
            name, {}, {**given, "n": NUM}, source=text, grid=(2,), constants={"B": 64},
            site=f"program.py:{self.run.step}",
        )  # fmt: skip
        self.run.emit(Launched, launch=launch)
        values = tuple(
            Values(self.run.tensors[tensor].id, "I32", (NUM,), self.held[tensor].tobytes())
            for tensor in given.values()
            if isinstance(tensor, str) and tensor in self.held
        )
        self.snapshots.append(Snapshot(self.run.step, OUTSIDE_PLANS, self.run.seq, values))

    def bundle(self) -> Bundle:
        fault = FaultRecord(kind="crash", message="it broke", signal=11)
        return msgspec.structs.replace(self.run.bundle(fault), snapshots=tuple(self.snapshots))

    def found(self) -> Diagnosis:
        return diagnose(self.bundle(), allow_source=True)


def three_stages(entry: int, step: int) -> Pipeline:
    """Ids are made by one kernel, moved by the next, and used by the third."""
    made = Pipeline()
    made.held["given"][:] = 3
    made.held["given"][7] = entry
    made.launch(MAKE, given="given", made="made", step=step)
    made.held["made"] = made.held["given"] + step
    made.launch(COPY, given="made", moved="moved")
    made.held["moved"] = made.held["made"].copy()
    made.launch(CLEAR, other="other")
    made.launch(TAKE, x="x", ids="moved", o="o")
    return made


def test_the_kernel_that_made_the_entry_is_named_and_neither_who_moved_nor_who_used_it() -> None:
    [root] = three_stages(entry=95, step=50).found().roots
    assert (root.cause, root.kernel, root.argument) == (Cause.INDEX_RANGE, "make_ids", "made")
    assert root.expression is not None
    assert "made" in root.expression
    assert root.sentence.startswith("make_ids writes made[7] = 145, with which take_entry then")
    assert "launch 1 at program.py:1 (make_ids) wrote it" in root.proof.red
    assert "(move_ids) wrote it" in root.proof.red
    assert "clear" not in root.proof.red


def test_an_entry_that_was_only_handed_on_is_blamed_on_who_gave_it() -> None:
    [root] = three_stages(entry=145, step=0).found().roots
    assert (root.kernel, root.argument, root.culprit) == ("make_ids", "given", None)
    assert root.sentence.startswith("make_ids is given given[7] = 145, with which take_entry then")
    healthy = three_stages(entry=45, step=50).found()
    assert not healthy.roots


def test_where_the_host_wrote_between_two_launches_no_kernel_is_named() -> None:
    made = Pipeline()
    made.launch(COPY, given="given", moved="moved")
    made.launch(CLEAR, other="moved")
    made.held["moved"][7] = 145
    made.launch(TAKE, x="x", ids="moved", o="o")
    found = made.found()
    [root] = found.roots
    assert (root.kernel, root.argument) == ("take_entry", "ids")
    [gap] = [gap for gap in found.unseen if "which launch wrote" in gap.what]
    assert gap.what == "which launch wrote ids[7] = 145"
    assert gap.reason.startswith("clear may have; no replay of them")


def test_an_equal_entry_of_an_input_is_not_where_a_value_came_from() -> None:
    """The kernel works 145 out; that an input holds 145 too is a coincidence."""
    made = Pipeline()
    made.held["given"][:] = 3
    made.held["given"][7] = 95
    made.held["moved"][7] = 145
    made.launch(COPY, given="moved", moved="other")
    made.held["other"][7] = 145
    both = MAKE.replace("made, n", "made, other, n").replace(
        "v + step", "v + step + 0 * tl.load(other + i, mask=i < n, other=0)"
    )
    made.launch(both, given="given", made="made", other="other", step=50)
    made.held["made"] = made.held["given"] + 50
    made.launch(TAKE, x="x", ids="made", o="o")
    [root] = made.found().roots
    assert (root.kernel, root.argument) == ("make_ids", "made")


def test_minus_one_may_be_meant_and_stays_with_who_used_it() -> None:
    [root] = three_stages(entry=-1, step=0).found().roots
    assert (root.cause, root.kernel) == (Cause.SENTINEL_CONSUMED, "take_entry")


def test_the_last_launch_that_may_have_written_a_tensor_is_one_that_stores_to_its_memory() -> None:
    made = three_stages(entry=95, step=50)
    case = Case(made.bundle())
    use = case.launches[-1]
    names = {}
    for name in ("moved", "other", "given"):
        writer = last_writer(case, use, made.run.tensors[name])
        names[name] = writer.launch.kernel if writer else None
    assert names == {"moved": "move_ids", "other": "clear", "given": None}
    assert last_writer(case, case.launches[0], made.run.tensors["made"]) is None


@pytest.mark.parametrize(("wrote_it", "causes"), [(1, [Cause.MISSING_MASK]), (2, None)])
def test_a_bad_entry_follows_from_what_is_wrong_in_the_launch_that_wrote_it_last(
    wrote_it: int, causes: list[Cause] | None
) -> None:
    """The second launch wrote the ids, the third one other memory."""
    case = Case(three_stages(entry=95, step=50).bundle())
    writer, user = case.launches[wrote_it], case.launches[-1]
    entry = SolvedEntry(argument="ids", index=(7,), value=145)
    case.claims = [
        proven(
            RootCause(
                cause=cause, sentence=f"{cause}", fix="", proof=Proof("", "", ""),
                kernel=use.launch.kernel, place=use.place, entry=with_entry,
            ),
            "replay", (), "", use.seq, (),
        )
        for cause, use, with_entry in (
            (Cause.MISSING_MASK, writer, None), (Cause.INDEX_RANGE, user, entry),
        )
    ]  # fmt: skip
    found = [root.cause for root in judge(case, {}).roots]
    assert found == (causes or [Cause.MISSING_MASK, Cause.INDEX_RANGE])
