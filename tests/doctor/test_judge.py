"""The one order among proven causes: the earliest is the root, and what follows from it is not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest
from recorded.bundles import Run, inputs, tensors_of_decoder

from hypocenter.doctor.case import Case
from hypocenter.doctor.causes import Cause
from hypocenter.doctor.diagnosis import Claim, Proof, RootCause, Verdict, proven, row
from hypocenter.doctor.installed_text import changes, texts_of
from hypocenter.doctor.judging.judge import Judged, judge
from hypocenter.record.bundle import Bundle
from hypocenter.record.events import Place
from hypocenter.record.fault_record import FaultRecord

DIFFERS = FaultRecord(kind="differs", message="")
ENDED = FaultRecord(kind="none", message="")
KERNEL = """@triton.jit
def rope_kernel(x):
    tl.store(x, 1.0)
"""


def steps(fault: FaultRecord, text: str = KERNEL) -> Bundle:
    """Two steps of three launches, of one kernel with that text."""
    run = Run()
    tensors_of_decoder(run)
    launch = run.launch("rope", {"x": "q"}, source=text)
    plan = run.plan(launch, launch, launch)
    run.run(plan, inputs())
    run.run(plan, inputs())
    return run.bundle(fault)


def claim(
    cause: Cause, at: tuple[int, int] | None, rung: str = "replay", tensors: tuple[int, ...] = ()
) -> Claim:
    """What a rung proved of launch `at[1]` in step `at[0]`."""
    place = Place(at[0], 1, at[1]) if at else None
    root = RootCause(
        cause=cause, sentence=f"{cause} {at}", fix="", proof=Proof("", "", ""), kernel="rope",
        place=place,
    )  # fmt: skip
    return proven(root, rung, (), "", seq_of(at[0]) if at else 1 << 62, tensors)


def seq_of(step: int) -> int:
    bundle = steps(DIFFERS)
    return next(event.seq for event in bundle.events if event.step == step)


def judged(*claims: Claim, bad: Bundle | None = None, good: Bundle | None = None) -> Judged:
    case = Case(bad or steps(DIFFERS), good or steps(ENDED))
    case.claims = list(claims)
    return judge(case, {})


def order(found: Judged) -> list[str]:
    return [root.sentence for root in found.roots]


PARTS = claim(Cause.WRONG_ANSWER, (1, 1), "good results")


@pytest.mark.parametrize(
    "cause",
    [
        Cause.OUTPUT_NOT_WRITTEN,
        Cause.PROGRAM_RACE,
        Cause.INDEX_RANGE,
        Cause.UNINITIALISED_READ,
        Cause.NONFINITE_VALUE,
    ],
)
def test_what_was_proven_behind_the_first_wrong_result_follows_from_it(cause: Cause) -> None:
    for later in ((1, 2), (2, 0)):
        found = judged(claim(cause, later), PARTS)
        assert order(found) == ["wrong answer (1, 1)"]
        assert found.consequences == (f"{cause} {later}",)


@pytest.mark.parametrize("at", [(1, 0), (1, 1)])
def test_what_a_check_proves_of_that_launch_or_one_before_is_the_root(at: tuple[int, int]) -> None:
    found = judged(PARTS, claim(Cause.PROGRAM_RACE, at))
    assert order(found) == [f"race between programs {at}"]
    assert found.consequences == ("wrong answer (1, 1)",)


def changed_line(text: str, was: str) -> tuple[Bundle, Bundle, RootCause]:
    """Both runs, and the root of a good run whose line differs."""
    bad, good = steps(DIFFERS, text), steps(ENDED, was)
    line = changes(Case(bad, good).launches[0].launch, Case(bad).sources, texts_of(good.sources))[0]
    assert PARTS.root is not None
    return bad, good, msgspec.structs.replace(PARTS.root, file=line.file, line=line.line)


def test_a_kernel_whose_text_changed_has_a_defect_of_its_own_wherever_it_stands() -> None:
    late = claim(Cause.OUTPUT_NOT_WRITTEN, (2, 0))
    changed = steps(DIFFERS, KERNEL.replace("1.0", "2.0"))
    assert len(judged(late, PARTS, bad=changed).roots) == 2


def test_a_kernel_whose_one_changed_line_is_the_root_has_no_second_defect() -> None:
    late = claim(Cause.OUTPUT_NOT_WRITTEN, (2, 0))
    was = f"{KERNEL}    tl.load(x)\n    tl.store(x, 3.0)\n"

    def num_roots(text: str) -> int:
        bad, good, root = changed_line(text, was)
        return len(judged(late, replace(PARTS, root=root), bad=bad, good=good).roots)

    assert num_roots(was.replace("1.0", "2.0")) == 1
    assert num_roots(was.replace("1.0", "2.0").replace("3.0", "4.0")) == 2


def test_a_check_of_the_one_line_that_differs_says_what_is_wrong_with_it() -> None:
    """Also where the launch that was checked is a later one."""
    was = f"{KERNEL}    tl.load(x)\n    tl.store(x, 3.0)\n"

    def found(text: str, *, is_same_line: bool = True) -> Judged:
        bad, good, root = changed_line(text, was)
        late = claim(Cause.MISSING_MASK, (2, 0))
        assert late.root is not None
        there = msgspec.structs.replace(late.root, file=root.file, line=root.line)
        checked = replace(late, root=there) if is_same_line else late
        return judged(checked, replace(PARTS, root=root), bad=bad, good=good)

    one_line, two_lines = was.replace("1.0", "2.0"), was.replace("1.0", "2.0").replace("3.0", "4.0")
    assert order(found(one_line)) == ["missing tail mask (2, 0)"]
    assert found(one_line).consequences == ("wrong answer (1, 1)",)
    # Of two lines that differ nobody knows which of them gave the first wrong result.
    assert order(found(two_lines))[0] == "wrong answer (1, 1)"
    assert order(found(one_line, is_same_line=False))[0] == "wrong answer (1, 1)"


def test_what_a_launch_left_is_told_where_the_good_run_left_it_elsewhere() -> None:
    assert PARTS.root is not None
    told = msgspec.structs.replace(PARTS.root, argument="checkpoint_slots")
    parts = replace(PARTS, root=told)
    foreign = claim(Cause.FOREIGN_STATE, (2, 0), "states")

    def first(left_by: tuple[int, str]) -> RootCause:
        return judged(parts, replace(foreign, left_by=left_by)).roots[0]

    root = first((1, "checkpoint_slots"))
    assert (root.cause, root.argument) == (Cause.FOREIGN_STATE, "checkpoint_slots")
    assert root.place == told.place
    assert root.sentence == "wrong answer (1, 1); then state of another request (2, 0)"
    assert first((1, "state_slots")).cause is Cause.WRONG_ANSWER
    assert first((2, "checkpoint_slots")).cause is Cause.WRONG_ANSWER


def test_a_launch_that_was_never_made_is_why_its_results_are_not_the_good_runs() -> None:
    found = judged(PARTS, claim(Cause.GRID_PRODUCT, (1, 1), "limits"))
    assert order(found) == ["grid product over 32 bits (1, 1)"]
    assert found.consequences == ("wrong answer (1, 1)",)


def test_what_does_not_hang_on_memory_is_a_cause_of_its_own_behind_the_root() -> None:
    found = judged(claim(Cause.FOREIGN_BLOCK, (2, 0), "ownership"), PARTS)
    assert order(found) == ["wrong answer (1, 1)", "block of another request (2, 0)"]


def test_a_kept_page_follows_from_a_launch_that_writes_pages_and_strayed() -> None:
    def with_pages(name: str) -> Bundle:
        run = Run()
        tensors_of_decoder(run, k_cache={"owner": "kv_cache"}, v_cache={"owner": "kv_cache"})
        plan = run.plan(*[run.launch("rope", {"x": name}, source=KERNEL)] * 3)
        run.run(plan, inputs())
        run.run(plan, inputs())
        return run.bundle(ENDED)

    def num_roots(cause: Cause, at: tuple[int, int], *, writes: str = "v_cache") -> int:
        bad = with_pages(writes)
        [page] = [tensor.id for tensor in bad.tensors if tensor.name == "k_cache"]
        kept = claim(Cause.KEPT_BLOCK_CHANGED, (2, 0), "kept blocks", (page,))
        return len(judged(kept, claim(cause, at), bad=bad).roots)

    assert num_roots(Cause.INDEX_RANGE, (1, 2)) == 1
    assert num_roots(Cause.INDEX_RANGE, (1, 2), writes="q") == 2
    assert num_roots(Cause.INDEX_RANGE, (2, 1)) == 2
    assert num_roots(Cause.MISALIGNMENT, (1, 2)) == 2


def test_a_changed_line_without_a_place_stands_behind_what_has_one() -> None:
    whole = claim(Cause.WRONG_ANSWER, None, "good results")
    found = judged(whole, claim(Cause.FOREIGN_BLOCK, (2, 0), "adopted blocks"))
    assert order(found) == ["block of another request (2, 0)"]


def test_a_number_that_is_none_is_a_sight_of_any_other_cause() -> None:
    nan = claim(Cause.NONFINITE_VALUE, (1, 0), "values")
    found = judged(nan, claim(Cause.OFFSET_OVERFLOW, (1, 2)))
    assert order(found) == ["offset overflow (1, 2)"]
    assert order(judged(nan)) == ["non-finite value (1, 0)"]


def test_what_looks_unwritten_behind_a_read_of_freed_memory_is_no_cause_of_its_own() -> None:
    freed = claim(Cause.USE_AFTER_FREE, (0, 1), "arguments", tensors=(1,))
    unwritten = claim(Cause.OUTPUT_NOT_WRITTEN, (0, 1), tensors=(2,))
    assert order(judged(freed, unwritten)) == [f"{Cause.USE_AFTER_FREE} (0, 1)"]
    # Of another launch it is.
    elsewhere = claim(Cause.OUTPUT_NOT_WRITTEN, (1, 2), tensors=(2,))
    assert len(order(judged(freed, elsewhere))) == 2


def test_causes_of_one_tensor_are_told_once() -> None:
    one = claim(Cause.BUFFER_TOO_SMALL, (1, 0), "arguments", (3,))
    found = judged(claim(Cause.MISSING_MASK, (1, 2), tensors=(3,)), one)
    assert order(found) == ["buffer too small (1, 0)"]


def test_what_the_good_run_has_as_well_is_no_reason_for_another_answer() -> None:
    shared = claim(Cause.MISSING_MASK, (1, 0), "limits")

    def rung(case: Case) -> list[Claim]:
        return [shared]

    def clean(case: Case) -> list[Claim]:
        return []

    def first(check: Callable[[Case], list[Claim]]) -> str:
        case = Case(steps(DIFFERS), steps(ENDED))
        case.claims = [shared, PARTS]
        return order(judge(case, {"limits": check}))[0]

    assert first(rung) == "wrong answer (1, 1)"
    assert first(clean) == "missing tail mask (1, 0)"


def test_where_no_test_tells_which_fact_it_is_nothing_later_is_called_the_root() -> None:
    text = "the first wrong result, and two facts differ there"
    parted = row(Cause.WRONG_ANSWER, Verdict.INCONCLUSIVE, "good arguments", text)
    open_end = Claim(parted.hypothesis, None, seq_of(1), (), Place(1, 1, 1))
    late = claim(Cause.OUTPUT_NOT_WRITTEN, (1, 2))
    found = judged(open_end, late)
    assert found.roots == ()
    assert found.consequences == ("output not written (1, 2)",)
    assert order(judged(open_end, claim(Cause.OUTPUT_NOT_WRITTEN, (1, 0)))) == [
        "output not written (1, 0)"
    ]
