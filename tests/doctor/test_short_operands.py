"""A comparison that fails because the GPU cut operands to TF32, and those that fail otherwise."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from recorded.bundles import Run

from hypocenter.base.dtypes import Array
from hypocenter.doctor.causes import Cause
from hypocenter.doctor.diagnosis import Diagnosis
from hypocenter.doctor.doctor import diagnose
from hypocenter.doctor.report import report_text
from hypocenter.record.compared import ComparedSide, ComparedUnequal
from hypocenter.record.contents import LaunchOutcome
from hypocenter.record.events import FOREIGN, Launched, Values
from hypocenter.record.fault_record import FaultRecord

PRODUCT = """@triton.jit
def product_kernel(x, y, out, B: tl.constexpr):
    i = tl.arange(0, 16)
    at = i[:, None] * 16 + i[None, :]
    acc = tl.dot(tl.load(x + at), tl.load(y + at))
    tl.store(out + at, acc)
"""
EXACT = PRODUCT.replace("tl.load(y + at))", 'tl.load(y + at), input_precision="ieee")')
_random = np.random.default_rng(0)
X, Y = (_random.standard_normal((16, 16)).astype(np.float32) for _ in range(2))
WHOLE = (X.astype(np.float64) @ Y).astype(np.float32)


def cut(numbers: Array) -> Array:
    return (numbers.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


CUT = (cut(X).astype(np.float64) @ cut(Y)).astype(np.float32)


def examined(
    gave: Array = CUT,
    want: Array = WHOLE,
    text: str = PRODUCT,
    atol: float | None = 1e-4,
    keeps_contents: bool = True,
) -> Diagnosis:
    """Of a program whose one launch gave `gave`, where it wants `want`."""
    run, held = Run(), {"x": X, "y": Y, "out": np.zeros((16, 16), np.float32)}
    for name in held:
        run.tensor(name, "F32", 16, 16, owner=FOREIGN, device="cuda:0")
    run.step += 1
    launch = run.launch(
        "product", {}, {name: name for name in held}, source=text, grid=(1,), constants={"B": 16}
    )
    event = run.emit(Launched, launch=msgspec.structs.replace(launch, device="cuda:0"))
    numbers = {name: run.tensors[name].id for name in held}
    given = [Values(numbers[name], "F32", (16, 16), held[name].tobytes()) for name in held]
    after = Values(numbers["out"], "F32", (16, 16), gave.tobytes())
    made = LaunchOutcome(
        step=run.step, launch=event.seq, given=tuple(given), gave=(after,), num_again=3
    )
    wrong = np.argwhere(~(np.abs(gave - want) <= (atol or 0.0)))
    index = tuple(map(int, wrong[0]))
    run.emit(
        ComparedUnequal, site="program.py:9", compared_at="program.py:8", shape=(16, 16),
        index=index, num_different=len(wrong), num_elements=256, is_first=atol is not None,
        rtol=None if atol is None else 0.0, atol=atol,
        sides=tuple(
            ComparedSide(
                name=name, dtype="F32", value=float(numbers[index]),
                allocation=run.tensors["out"].allocation if name == "out" else 0,
                address=run.tensors["out"].address + 4 * (16 * index[0] + index[1]),
                data=numbers.tobytes() if keeps_contents else b"",
            )
            for name, numbers in (("out", gave), ("want", want))
        ),
    )  # fmt: skip
    bundle = run.bundle(
        FaultRecord(
            kind="error", message="AssertionError", call="`assert`", is_statement=True,
            site="program.py:9", is_asynchronous=False,
        )
    )  # fmt: skip
    found = diagnose(msgspec.structs.replace(bundle, outcomes=(made,)), allow_source=True)
    assert all(not rung.left_out for rung in found.rungs), found.rungs
    return found


def test_operands_that_the_gpu_cut_are_the_cause() -> None:
    found = examined()
    [root] = found.roots
    assert (root.cause, root.kernel, root.argument) == (Cause.SHORT_OPERANDS, "product", "out")
    assert root.expression is not None
    assert root.expression.startswith("tl.dot(")
    [edit] = root.edits
    assert edit.new == 'acc = tl.dot(tl.load(x + at), tl.load(y + at), input_precision="ieee")'
    assert edit.line == root.line
    assert 'input_precision="ieee"' in root.fix


@pytest.mark.parametrize(
    "changes",
    [
        {"want": 2 * WHOLE},  # wrong in another way as well
        {"want": np.where(np.arange(256).reshape(16, 16) == 200, WHOLE + 1, WHOLE)},
        {"gave": WHOLE + np.float32(3e-4)},  # of another kind, though as small
        {"atol": None},
        {"keeps_contents": False},
        {"text": EXACT},  # what nothing was cut for
    ],
    ids=[
        "twice",
        "one element",
        "whole operands",
        "no tolerance",
        "no contents",
        "told to be exact",
    ],
)
def test_what_whole_operands_would_not_mend_is_not_blamed_on_them(
    changes: dict[str, Array],
) -> None:
    found = examined(**changes)  # type: ignore[arg-type]
    assert not found.roots


def told_of_writer(found: Diagnosis) -> tuple[bool | None, bool, str]:
    """Of the launch that stored the element: whether its replay gives it, and what is said."""
    assert found.compared is not None
    writer = found.compared.sides[0].writer
    assert writer is not None
    return writer.gives_it, writer.gives_it_cut, " ".join(report_text(found).split())


def test_where_more_is_wrong_the_replay_with_cut_operands_is_told() -> None:
    gives_it, gives_it_cut, told = told_of_writer(examined(want=2 * WHOLE))
    assert (gives_it, gives_it_cut) == (False, True)
    assert "and this number once the operands of tl.dot are cut to TF32" in told
    assert "the difference is not known" not in told


@pytest.mark.parametrize(
    "changes",
    [{"gave": CUT + 1}, {"gave": CUT, "text": EXACT}],
    ids=["another number", "whole operands"],
)
def test_a_number_that_cut_operands_do_not_give_is_left_open(
    changes: dict[str, Any],
) -> None:
    gives_it, gives_it_cut, told = told_of_writer(examined(want=2 * WHOLE, **changes))
    assert (gives_it, gives_it_cut) == (False, False)
    assert "what makes the difference is not known" in told
