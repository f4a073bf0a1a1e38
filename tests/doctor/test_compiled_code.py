"""Results that are not what the replay gives: of the compiler, of the GPU, or of nobody knows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from recorded.bundles import Run

from hypocenter.base.cards import Card
from hypocenter.base.dtypes import Array
from hypocenter.doctor.causes import Cause
from hypocenter.doctor.diagnosis import Diagnosis, Verdict
from hypocenter.doctor.doctor import diagnose
from hypocenter.record.bundle import Bundle
from hypocenter.record.bundle_index import BundleIndex
from hypocenter.record.contents import CompiledCode, LaunchOutcome, OtherBits
from hypocenter.record.events import FOREIGN, OUTSIDE_PLANS, Launched, Place, Values
from hypocenter.record.fault_record import FaultRecord
from hypocenter.replay import compare, device_runs
from hypocenter.replay.forms import Ran, RunForm

THRICE = """@triton.jit
def thrice_kernel(x, out, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(out + i, 3 * tl.load(x + i, mask=i < n), mask=i < n)
"""
DOT = """@triton.jit
def product_kernel(x, out, n, B: tl.constexpr):
    i = tl.arange(0, 16)
    at = i[:, None] * 16 + i[None, :]
    a = tl.load(x + at)
    tl.store(out + at, tl.dot(a, a))
"""
SUM = """@triton.jit
def sum_kernel(x, out, n, B: tl.constexpr):
    i = tl.arange(0, B)
    tl.store(out, tl.sum(tl.load(x + i, mask=i < n, other=0.0), axis=0))
"""
SUMS = """@triton.jit
def sums_kernel(x, out, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.atomic_add(out, tl.sum(tl.load(x + i, mask=i < n), axis=0))
"""
X = np.arange(1, 101, dtype=np.float32)
RIGHT = 3 * X
CANCELLING = np.array([2.0**24, 1.0, -(2.0**24), 3.0], np.float32)
WRONG = np.where(np.arange(100) == 17, RIGHT + 50, RIGHT)
CAUSES = (Cause.MISCOMPILED, Cause.FAULTY_GPU)


def bundle_of(
    gave: Array,
    x: Array = X,
    text: str = THRICE,
    device: str = "cuda:0",
    grid: int = 2,
    **outcome: Any,
) -> Bundle:
    """A program with one launch, of which all is known."""
    run = Run()
    size = len(x)
    run.tensor("x", "F32", size, owner=FOREIGN, device=device)
    run.tensor("out", "F32", len(gave), owner=FOREIGN, device=device)
    run.step += 1
    kernel = text.split("def ")[1].split("_kernel")[0]
    given = {"x": "x", "out": "out", "n": size}
    launch = run.launch(kernel, {}, given, source=text, grid=(grid,), constants={"B": 64})
    launch = msgspec.structs.replace(launch, device=device)
    event = run.emit(Launched, launch=launch)
    numbers = [run.tensors[name].id for name in ("x", "out")]
    held = (x, np.zeros(len(gave), np.float32))
    before = [Values(n, "F32", a.shape, a.tobytes()) for n, a in zip(numbers, held, strict=True)]
    after = Values(numbers[1], "F32", gave.shape, gave.astype(np.float32).tobytes())
    made = LaunchOutcome(
        step=run.step, launch=event.seq, given=tuple(before), gave=(after,), num_again=3, **outcome
    )
    bundle = run.bundle(FaultRecord(kind="none", message=""))
    return msgspec.structs.replace(bundle, outcomes=(made,))


def place_in(bundle: Bundle) -> Place:
    return Place(bundle.outcomes[0].step, OUTSIDE_PLANS, bundle.outcomes[0].launch)


def ran(*results: Array, card: str = "GPU-a", binary: str = "one", problem: str = "") -> Ran:
    runs = tuple({"x": X.tobytes(), "out": r.astype(np.float32).tobytes()} for r in results)
    return Ran(runs=runs, card=card, name="H200", binary=binary, problem=problem)


def diagnosed(
    monkeypatch: pytest.MonkeyPatch, bundle: Bundle, *answers: Sequence[Ran], is_there: bool = True
) -> Diagnosis:
    """What the doctor says where a GPU answers so to one question after the other."""
    left = list(answers)
    monkeypatch.setattr(device_runs, "can_run", lambda index, place: is_there)
    monkeypatch.setattr(device_runs, "run_forms", lambda *asked: list(left.pop(0)))
    found = diagnose(bundle, allow_source=True)
    assert not left
    return found


def verdicts(found: Diagnosis) -> dict[Cause, Verdict]:
    return {
        h.cause: h.verdict for h in found.hypotheses if h.cause in (*CAUSES, Cause.WRONG_ANSWER)
    }


def test_launches_that_gave_what_their_replay_gives_refute_both() -> None:
    found = diagnose(bundle_of(RIGHT * np.float32(1 + 1e-5)), allow_source=True)  # rounding
    assert [verdicts(found)[cause] for cause in CAUSES] == [Verdict.REFUTED] * 2
    assert found.is_clean


def test_a_difference_alone_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    found = diagnosed(monkeypatch, bundle_of(WRONG), is_there=False)
    assert [verdicts(found)[cause] for cause in CAUSES] == [Verdict.INCONCLUSIVE] * 2
    assert found.is_clean
    [said, *_] = next(h for h in found.hypotheses if h.cause is Cause.FAULTY_GPU).evidence
    assert "element 17 of out was 104, and 54 in the replay (1 of 100 elements" in said


def test_other_code_that_is_right_on_the_same_gpu_convicts_the_compiler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    absent = Ran(problem="there is no GPU 1")
    found = diagnosed(
        monkeypatch, bundle_of(WRONG), [ran(WRONG, WRONG), absent],
        [ran(WRONG, WRONG)] * 2, [ran(RIGHT, RIGHT, binary="two")] * 2,
    )  # fmt: skip
    [root] = found.roots
    assert (root.cause, root.kernel, root.argument, root.line) == (
        Cause.MISCOMPILED, "thrice", "out", 4,
    )  # fmt: skip
    assert root.proof.corrected == "num_warps = 2"


def test_code_that_is_right_when_it_is_compiled_anew_was_other_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bundle = bundle_of(WRONG, code=CompiledCode(binary="57a1e"))
    found = diagnosed(monkeypatch, bundle, [ran(RIGHT, RIGHT)])
    [root] = found.roots
    assert (root.cause, root.proof.corrected) == (Cause.MISCOMPILED, "the kernel compiled anew")
    assert "Triton's cache" in root.fix


@pytest.mark.parametrize("is_there", [True, False])
def test_other_bits_of_the_run_itself_are_told_though_they_do_not_show_again(
    monkeypatch: pytest.MonkeyPatch, is_there: bool
) -> None:
    other = OtherBits(tensor=2, element=17, num_elements=1, first="00", again="01")
    bundle = bundle_of(RIGHT, num_other=2, others=(other,))
    answers = [[ran(RIGHT, RIGHT, binary="")]] * is_there
    found = diagnosed(monkeypatch, bundle, *answers, is_there=is_there)
    assert not found.roots
    assert verdicts(found)[Cause.WRONG_ANSWER] is Verdict.CONFIRMED
    wrong = next(h for h in found.hypotheses if h.cause is Cause.WRONG_ANSWER)
    assert "it left other bits 2 times" in wrong.evidence[0]


@pytest.mark.parametrize(("num_cards", "is_told"), [(1, True), (2, False)])
def test_a_gpu_is_named_where_there_is_no_other(
    monkeypatch: pytest.MonkeyPatch, num_cards: int, is_told: bool
) -> None:
    """A driver numbers GPUs otherwise than a program."""
    cards = tuple(Card(index=number, uuid=f"GPU-{number}") for number in range(num_cards))
    bundle = msgspec.structs.replace(bundle_of(WRONG), cards=cards)
    found = diagnosed(monkeypatch, bundle, is_there=False)
    faulty = next(h for h in found.hypotheses if h.cause is Cause.FAULTY_GPU)
    assert any("GPU-0" in text for text in faulty.evidence) == is_told
    assert [
        f"{card.uuid}" in text for card, text in zip(cards, found.environment.cards, strict=True)
    ] == ([True] * num_cards)


@pytest.mark.parametrize(
    ("text", "x", "gave"),
    [
        # What is summed cancels: the result is small, its rounding is that of what was summed.
        (SUM, CANCELLING, np.array([3.0])),
        (SUM, CANCELLING, np.array([4.0])),
        # Near the end of a type one rounds to infinity and another does not.
        (THRICE, np.full(4, 1.1342e38, np.float32), np.full(4, np.inf)),
    ],
    ids=["one order", "another order", "the end of a type"],
)
def test_rounding_is_no_fault(text: str, x: Array, gave: Array) -> None:
    found = diagnose(bundle_of(gave, x, text, grid=1), allow_source=True)
    assert [verdicts(found)[cause] for cause in CAUSES] == [Verdict.REFUTED] * 2


@pytest.mark.parametrize("binary", ["", "one"], ids=["unknown code", "the same code"])
def test_what_does_not_show_again_is_seen_and_not_proven(
    monkeypatch: pytest.MonkeyPatch, binary: str
) -> None:
    bundle = bundle_of(WRONG, code=CompiledCode(binary=binary))
    found = diagnosed(monkeypatch, bundle, [ran(RIGHT, RIGHT)])
    assert not found.roots
    assert not found.is_clean
    assert verdicts(found)[Cause.WRONG_ANSWER] is Verdict.CONFIRMED


def test_the_same_code_that_is_right_on_another_gpu_convicts_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    others = [OtherBits(tensor=2, element=17, num_elements=1, first="00", again="01")]
    bundle = bundle_of(RIGHT, num_other=2, others=tuple(others))
    answers = [ran(RIGHT, WRONG), ran(RIGHT, RIGHT, card="GPU-b")]
    found = diagnosed(monkeypatch, bundle, answers)
    [root] = found.roots
    assert root.cause is Cause.FAULTY_GPU
    assert "GPU-a" in root.fix
    assert root.proof.corrected == "the same code on GPU-b"
    # Other code there says nothing of the GPU.
    other = [ran(RIGHT, WRONG), ran(RIGHT, RIGHT, card="GPU-b", binary="two")]
    left = [[ran(RIGHT, WRONG)] * 2] * 3
    assert not diagnosed(monkeypatch, bundle, other, *left).roots


def test_what_every_form_gives_may_be_the_replays_own_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wrong = [ran(WRONG, WRONG)]
    found = diagnosed(monkeypatch, bundle_of(WRONG), wrong, *[wrong * 2] * 3)
    assert found.is_clean
    assert [verdicts(found)[cause] for cause in CAUSES] == [Verdict.INCONCLUSIVE] * 2


def test_what_atomics_give_depends_on_the_order_of_programs() -> None:
    other = OtherBits(tensor=2, element=0, num_elements=1, first="00", again="01")
    bundle = bundle_of(np.array([5051.0]), text=SUMS, num_other=3, others=(other,))
    found = diagnose(bundle, allow_source=True)
    assert [verdicts(found)[cause] for cause in CAUSES] == [Verdict.NOT_TESTED] * 2


@pytest.mark.parametrize(("off", "verdict"), [(1e-2, "REFUTED"), (1e-1, "INCONCLUSIVE")])
def test_matrix_units_may_shorten_their_inputs(
    monkeypatch: pytest.MonkeyPatch, off: float, verdict: str
) -> None:
    x = np.linspace(-1, 1, 256, dtype=np.float32)
    right = (x.reshape(16, 16) @ x.reshape(16, 16)).reshape(-1)
    bundle = bundle_of(right + off * np.abs(right).max(), x, DOT, grid=1)
    monkeypatch.setattr(device_runs, "can_run", lambda index, place: False)
    found = diagnose(bundle, allow_source=True)
    assert verdicts(found)[Cause.MISCOMPILED].value == verdict


def test_a_launch_whose_replay_finds_a_fault_is_not_compared() -> None:
    bundle = bundle_of(WRONG[:40])  # a tail without a mask
    found = diagnose(bundle, allow_source=True)
    assert not {Verdict.INCONCLUSIVE, Verdict.REFUTED} & {
        verdicts(found)[cause] for cause in CAUSES
    }


def test_a_launch_that_cannot_be_given_what_it_was_given_is_not_compared() -> None:
    """Its replay would be of other numbers, and so would each launch made anew."""
    bundle = bundle_of(WRONG)
    [outcome] = bundle.outcomes
    x, out = outcome.given
    half = msgspec.structs.replace(x, shape=(50,), data=x.data[:200])
    made = msgspec.structs.replace(outcome, given=(half, out))
    found = diagnose(msgspec.structs.replace(bundle, outcomes=(made,)), allow_source=True)
    assert [verdicts(found)[cause] for cause in CAUSES] == [Verdict.NOT_TESTED] * 2


def test_code_that_is_right_by_chance_alone_proves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In another order it is wrong again."""
    wrong, chance = [ran(WRONG, WRONG)] * 2, [ran(RIGHT, RIGHT), ran(WRONG, WRONG)]
    found = diagnosed(monkeypatch, bundle_of(WRONG), wrong, chance, wrong, wrong)
    assert not found.roots


def test_forms_run_in_a_process_of_their_own() -> None:
    """In Triton's interpreter, which stands for a GPU here."""
    bundle = bundle_of(RIGHT, device="interpreter")
    asked = [RunForm(num_runs=2), RunForm(options={"num_stages": 1})]
    first, second = device_runs.run_forms(BundleIndex(bundle), place_in(bundle), asked, {})
    assert (len(first.runs), len(second.runs)) == (2, 1)
    for run in (*first.runs, *second.runs):
        assert np.frombuffer(run["out"], np.float32).tolist() == RIGHT.tolist()


def test_what_the_interpreter_gives_is_not_compared_with_itself() -> None:
    found = diagnose(bundle_of(WRONG, device="interpreter"), allow_source=True)
    assert [verdicts(found)[cause] for cause in CAUSES] == [Verdict.NOT_TESTED] * 2


@pytest.mark.parametrize(
    ("shape", "strides"),
    [((10, 10), (1 << 30, 1 - (1 << 30))), ((1 << 22,), (1,)), ((1 << 31,), (0,)), ((100,), (-1,)),
     ((100,), (1, 1))],
)  # fmt: skip
def test_no_bundle_has_memory_beside_its_tensors_touched(
    shape: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    bundle = bundle_of(WRONG)
    tensors = [
        msgspec.structs.replace(tensor, shape=shape, strides=strides) for tensor in bundle.tensors
    ]
    [outcome] = bundle.outcomes
    given = tuple(msgspec.structs.replace(v, shape=shape) for v in outcome.given)
    made = msgspec.structs.replace(outcome, given=given)
    hostile = msgspec.structs.replace(bundle, tensors=tuple(tensors), outcomes=(made,))
    for allow_source in (False, True):
        found = diagnose(hostile, allow_source=allow_source)
        assert not any(root.cause in CAUSES for root in found.roots)


@pytest.mark.parametrize(
    "change",
    [{"num_other": 3, "num_again": -5}, {"num_again": 1000, "num_other": 1},
     {"others": (OtherBits(tensor=99, element=0, num_elements=1, first="00", again="01"),)},
     {"others": (OtherBits(tensor=2, element=-1, num_elements=1, first="00", again="01"),)},
     {"others": (OtherBits(tensor=2, element=0, num_elements=1, first="\x1b[3", again="01"),)},
     {"code": CompiledCode(binary="z" * 64)}],
)  # fmt: skip
def test_an_outcome_that_no_run_can_have_left_is_damage(change: dict[str, Any]) -> None:
    [outcome] = bundle_of(WRONG).outcomes
    assert not outcome.problem()
    assert msgspec.structs.replace(outcome, **change).problem()


def test_the_text_of_a_bundle_runs_only_where_that_is_allowed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device_runs, "run_forms", lambda *asked: pytest.fail("it ran"))
    monkeypatch.setattr(compare, "Rebuilt", lambda *given: pytest.fail("its memory was made"))
    found = diagnose(bundle_of(WRONG))
    assert [verdicts(found)[cause] for cause in CAUSES] == [Verdict.NOT_TESTED] * 2


def test_a_form_that_fails_is_told_with_its_reason() -> None:
    bundle = bundle_of(RIGHT, text=THRICE.replace("3 *", "absent *"), device="interpreter")
    [one] = device_runs.run_forms(BundleIndex(bundle), place_in(bundle), [RunForm()], {})
    assert "absent" in one.problem
    assert not one.runs
