"""Indices of 8 bytes that are read 4 bytes at a time, and kernels that read halves on purpose."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

pytest.importorskip("triton")
from recorded.bundles import Run
from recorded.program_launch import Launch

from hypocenter.base.dtypes import Array
from hypocenter.doctor.causes import Cause
from hypocenter.doctor.diagnosis import Diagnosis, Verdict
from hypocenter.doctor.doctor import diagnose
from hypocenter.record.compared import ComparedEqual
from hypocenter.record.events import Launched

GATHER = """
def gather_kernel(x_ptr, ids_ptr, out_ptr, n, BLOCK: tl.constexpr):
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ids = tl.load(ids_ptr.to(tl.pointer_type(tl.int32)) + r, mask=r < n, other=0)
    tl.store(out_ptr + r, tl.load(x_ptr + ids, mask=r < n, other=0.0), mask=r < n)
"""
#: The lower halves alone, on purpose.
LOWER = GATHER.replace("+ r, mask", "+ 2 * r, mask")
#: Both halves are indices: a row and a column of each pair.
PAIRS = """
def pairs_kernel(x_ptr, ids_ptr, out_ptr, n, BLOCK: tl.constexpr):
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    pair = ids_ptr.to(tl.pointer_type(tl.int32)) + 2 * r
    row = tl.load(pair, mask=2 * r < n, other=0)
    column = tl.load(pair + 1, mask=2 * r < n, other=0)
    tl.store(out_ptr + r, tl.load(x_ptr + row + column, mask=2 * r < n, other=0.0), mask=r < n)
"""
#: The bits alone, which lead nowhere.
BITS = GATHER.replace(
    "tl.load(x_ptr + ids, mask=r < n, other=0.0)", "tl.load(x_ptr + r, mask=r < n) + ids"
)
IDS = np.array([7, 30, 2, 11, 45, 9, 0, 21, 33, 5], np.int64)


def launch_of(text: str = GATHER, ids: Array = IDS, n: int = 10, **changes: Any) -> Launch:
    given: dict[str, Any] = {"held": {"ids_ptr": ids}} | changes
    return Launch(
        text,
        {"x_ptr": ("F32", (50,)), "ids_ptr": ("I64", ids.shape), "out_ptr": ("F32", (n,))},
        {"n": n},
        grid=(5,),
        constants={"BLOCK": 4},
        **given,
    )


def examined(**changes: Any) -> Diagnosis:
    return launch_of(**changes).diagnosis()


@pytest.mark.parametrize("ids", [IDS, IDS[:9], IDS + 1])
def test_indices_that_are_read_by_halves_are_proven(ids: Array) -> None:
    result = examined(ids=ids, n=ids.size)
    [root] = result.roots
    assert (root.cause, root.kernel, root.argument) == (Cause.DTYPE_WIDTH, "gather", "ids_ptr")
    assert root.line == 4
    [edit] = root.edits
    assert edit.new == "ids = tl.load(ids_ptr + r, mask=r < n, other=0)"
    assert f"elements {(ids.size + 1) // 2} to {ids.size - 1} are never read" in root.proof.red
    assert f"reads each of {ids.size} elements" in root.proof.green


@pytest.mark.parametrize(
    "changed",
    [
        {"text": LOWER},
        {"text": LOWER, "n": 5},
        {"text": PAIRS},
        {"text": BITS},
        {"n": 20},  # all halves
        {"n": 8},  # not as many as it has elements
        {"ids": IDS | (3 << 32)},  # upper halves with numbers of their own
        {"ids": np.where(np.arange(10) < 5, IDS, 0)},  # the rest was never filled
        {"held": {}},
        {"ids": IDS[:3], "n": 3},
    ],
    ids=[
        "lower", "fewer lower", "pairs", "bits", "all", "fewer", "packed", "empty rest", "unknown",
        "few",
    ],
)  # fmt: skip
def test_halves_that_may_be_read_on_purpose_are_no_fault(changed: dict[str, Any]) -> None:
    assert examined(**changed).roots == ()


#: Writes halves of 4 bytes: each second is 0, as in a workspace of pairs.
FILL = """
def fill_kernel(ids_ptr, n, BLOCK: tl.constexpr):
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    half = ids_ptr.to(tl.pointer_type(tl.int32)) + r
    tl.store(half, tl.where(r % 2 == 0, r, 0), mask=r < n)
"""


@pytest.mark.parametrize(("text", "num_roots"), [(FILL, 0), (LOWER, 1)])
def test_a_workspace_that_a_launch_before_wrote_by_halves_is_no_fault(
    text: str, num_roots: int
) -> None:
    """A launch that only read it changes nothing."""
    after = launch_of().bundle()
    run = Run()
    run.tensors |= {tensor.name: tensor for tensor in after.tensors}
    given = {name: name for name in ("x_ptr", "ids_ptr", "out_ptr") if name in text}
    site, constants = "program.py:30", {"BLOCK": 4}
    before = run.launch(
        text.split("def ")[1].split("_kernel")[0], {}, given | {"n": 10},
        source=text, grid=(5,), site=site, constants=constants,
    )  # fmt: skip
    [launched] = (event for event in after.events if isinstance(event, Launched))
    first = Launched(seq=launched.seq - 1, step=launched.step, launch=before)
    events = (*(event for event in after.events if event is not launched), first, launched)
    sources = (*after.sources, *run.bundle(after.fault).sources)
    result = diagnose(
        msgspec.structs.replace(after, events=events, sources=sources), allow_source=True
    )
    assert len(result.roots) == num_roots


SURE: dict[str, Any] = {
    "dtype": "F32",
    "origin": "apart",
    "allowed": 1e-4,
    "largest": 3.0,
    "share_unlike": 0.9,
}


def compared(
    tensor: str = "out_ptr", num_elements: int = 10, *, is_later: bool = True, **facts: Any
) -> Diagnosis:
    """The launch, and a comparison that passed behind it, or before it."""
    bundle = launch_of().bundle()
    [launched] = (event for event in bundle.events if isinstance(event, Launched))
    memory = {one.name: one.allocation for one in bundle.tensors}
    if "other" in facts:
        facts |= {"other": memory[facts["other"]]}
    passed = ComparedEqual(
        seq=launched.seq + (1 if is_later else -1), step=launched.step, site="program.py:40",
        allocation=memory[tensor], num_elements=num_elements, **(SURE | facts),
    )  # fmt: skip
    events = (*bundle.events, passed) if is_later else (passed, *bundle.events)
    return diagnose(msgspec.structs.replace(bundle, events=events), allow_source=True)


@pytest.mark.parametrize(
    ("facts", "is_silent"),
    [
        ({}, True),
        ({"num_elements": 4}, False),
        ({"tensor": "x_ptr", "num_elements": 50}, False),  # what it was given
        ({"is_later": False}, False),
        ({"origin": "derived"}, False),  # a clone of the result itself
        ({"other": "out_ptr"}, False),
        ({"share_unlike": 0.02}, False),  # all alike, beside what was allowed
        ({"other": "x_ptr"}, True),
        ({"dtype": "F16", "allowed": 0.2}, True),
        ({"dtype": "I64", "allowed": 0.0}, True),
    ],
    ids=str,
)
def test_what_the_program_itself_found_right_is_no_fault(
    facts: dict[str, Any], is_silent: bool
) -> None:
    """Its host may have put pairs into the first half of a workspace."""
    found = compared(**facts)
    assert len(found.roots) == (not is_silent)
    told = [one for one in found.hypotheses if one.diagnostic == "halved elements"]
    assert all(one.verdict is not Verdict.INCONCLUSIVE for one in told)


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        ({"origin": "unknown"}, "where the other side came from was not seen"),
        ({"allowed": 0.5}, "it allowed 0.5, beside numbers of up to 3"),
        ({"dtype": "F64"}, "it allowed 0.0001, beside numbers of up to 3"),
        ({"dtype": "I32", "allowed": 1.0}, "it allowed 1, beside"),
        ({"share_unlike": 0.3}, "of which 30% are unlike the one before"),
    ],
    ids=str,
)
def test_a_comparison_that_may_not_speak_for_the_result_leaves_it_open(
    facts: dict[str, Any], text: str
) -> None:
    found = compared(**facts)
    assert found.roots == ()
    [told] = [one for one in found.hypotheses if one.diagnostic == "halved elements"]
    assert (told.verdict, told.cause) == (Verdict.INCONCLUSIVE, Cause.DTYPE_WIDTH)
    assert (told.kernel, told.argument) == ("gather", "ids_ptr")
    assert "found the result equal to another tensor at program.py:40" in told.evidence[1]
    assert text in told.evidence[1]
