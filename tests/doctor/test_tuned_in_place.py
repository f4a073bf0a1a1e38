"""A kernel that its autotuner ran on its own results is named, with the option that puts back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from recorded.bundles import Run

from hypocenter.doctor.causes import Cause
from hypocenter.doctor.diagnosis import Diagnosis, Verdict
from hypocenter.doctor.doctor import diagnose
from hypocenter.foreign.tuning_hooks import decorator_of
from hypocenter.record.contents import LaunchOutcome
from hypocenter.record.events import FOREIGN, Launched, Tuned, Values
from hypocenter.record.fault_record import FaultRecord

TEXT = """@triton.jit
def slope_kernel(x, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    v = tl.load(x + i, mask=i < n, other=0.0)
    tl.store(x + i, {}, mask=i < n)
"""
LEAKY = TEXT.format("tl.where(v > 0, v, v * 0.5)")
CLAMP = TEXT.format("tl.maximum(v, 0.0)")
DECORATOR = """@triton.autotune(
    configs=CONFIGS,
    key=["n"],
)"""
BEFORE = np.linspace(-4, 4, 32, dtype=np.float32)


def tuned(
    text: str = LEAKY, held: Any = None, decorator: str = DECORATOR, restored: tuple[str, ...] = ()
) -> Diagnosis:
    """What is said of a launch behind two trials, which began with `held` in its tensor."""
    run = Run()
    run.tensor("x", "F32", 32, owner=FOREIGN)
    launch = run.launch(
        "slope", {}, {"x": "x", "n": 32}, source=text, grid=(1,), constants={"B": 32}
    )
    began = run.emit(Launched, launch=launch).seq - 1
    run.seq += 1
    trial = run.emit(Launched, launch=launch)
    run.emit(
        Tuned, kernel="slope_kernel", began=began, restored=restored, file="leaky.py", line=7,
        text=decorator,
    )  # fmt: skip
    made = run.emit(Launched, launch=launch)
    contents = {trial.seq - 2: BEFORE, made.seq: BEFORE / 4 if held is None else held}
    outcomes = tuple(
        LaunchOutcome(
            step=0, launch=seq, given=(Values(run.tensors["x"].id, "F32", (32,), x.tobytes()),),
            gave=(),
        )
        for seq, x in contents.items()
    )  # fmt: skip
    return diagnose(
        run.bundle(FaultRecord(kind="none", message=""), outcomes=outcomes), allow_source=True
    )


def test_the_kernel_its_tensor_and_the_option_are_named() -> None:
    [root] = tuned().roots
    assert (root.cause, root.kernel, root.argument) == (Cause.TUNED_IN_PLACE, "slope", "x")
    assert root.fix == 'Pass restore_value=["x"] to triton.autotune'
    assert "x[0] is -2 after the launch alone, and -0.5 after 2 trials" in root.sentence
    assert "x[0] is -2" in root.proof.green
    [edit] = root.edits
    assert (edit.file, edit.line) == ("leaky.py", 9)
    assert (edit.old, edit.new) == ('key=["n"],', 'restore_value=["x"], key=["n"],')


def test_an_option_that_is_there_already_is_told_and_not_edited() -> None:
    decorator = DECORATOR.replace("key=", 'restore_value=["y"], key=')
    [root] = tuned(decorator=decorator).roots
    assert 'restore_value=["x"]' in root.fix
    assert root.edits == ()


@pytest.mark.parametrize(
    ("text", "held"),
    [(LEAKY, BEFORE), (CLAMP, np.maximum(BEFORE, 0))],
    ids=["put back", "no other result for it"],
)
def test_a_launch_that_tuning_changes_nothing_of_has_no_finding(text: str, held: Any) -> None:
    found = tuned(text, held)
    assert found.roots == ()
    confirmed = [h for h in found.hypotheses if h.verdict is Verdict.CONFIRMED]
    assert confirmed == []


def test_the_decorator_is_found_with_all_its_lines(tmp_path: Path) -> None:
    scope: dict[str, Any] = {}
    file = tmp_path / "leaky.py"
    file.write_text(
        f"import triton\nimport triton.language as tl\nCONFIGS = []\n\n{DECORATOR}\n{CLAMP}"
    )
    exec(compile(file.read_text().replace("CONFIGS = []", ""), str(file), "exec"), _configs(scope))
    assert decorator_of(scope["slope_kernel"].base_fn) == (str(file), 5, DECORATOR)


def _configs(scope: dict[str, Any]) -> dict[str, Any]:
    import triton

    scope["CONFIGS"] = [triton.Config({"B": 32})]
    return scope
