"""Causes of torch.compile's kernels in the words of the program, from records alone."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
import numpy as np
import pytest
from recorded.bundles import Run

from hypocenter.base.refusals import DeviceAssert
from hypocenter.doctor.case import Case
from hypocenter.doctor.causes import Cause
from hypocenter.doctor.compiled.asserted import asserted_index
from hypocenter.doctor.compiled.words import in_users_words, operation_of, user_name_of
from hypocenter.doctor.diagnosis import Proof, RootCause, SolvedEntry, Verdict
from hypocenter.doctor.doctor import diagnose
from hypocenter.record.compiled_graph import FusedKernel, GraphOp, IndexMadeAgain
from hypocenter.record.contents import Snapshot
from hypocenter.record.events import FOREIGN, OUTSIDE_PLANS, Launched, SourceRecord, Values
from hypocenter.record.fault_record import FaultRecord

#: As Inductor writes it, but for the names of its helpers.
KERNEL = """@triton.jit
def triton_poi_fused_index_0(in_ptr0, in_ptr1, out_ptr0, xnumel, XBLOCK: tl.constexpr):
    xindex = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)[:]
    xmask = xindex < xnumel
    x1 = xindex // 16
    x0 = (xindex % 16)
    tmp0 = tl.load(in_ptr0 + (x1), xmask, eviction_policy='evict_last')
    tmp1 = tl.full([XBLOCK], 40, tl.int32)
    tmp2 = tmp0 + tmp1
    tmp3 = tmp0 < 0
    tmp4 = tl.where(tmp3, tmp2, tmp0)
    tl.device_assert(((0 <= tmp4) & (tmp4 < 40)) | ~(xmask), "index out of bounds: 0 <= tmp4 < 40")
    tmp6 = tl.load(in_ptr1 + (x0 + 16*tmp4), xmask)
    tl.store(out_ptr0 + (xindex), tmp6, xmask)
"""
CONDITION = "index out of bounds: 0 <= tmp4 < 40"
NAME = "triton_poi_fused_index_0"
LOOK_UP = GraphOp(
    node="index", op="aten.index.Tensor", operands=("arg0_1", "arg1_1"),
    sites=("/home/ann/model.py:12",), text="return x[ids] * 2",
)  # fmt: skip
OTHER = msgspec.structs.replace(
    LOOK_UP, node="index_1", operands=("arg0_1", "arg2_1"), sites=("/home/ann/model.py:13",)
)
PASSED = {"in_ptr0": "arg1_1", "in_ptr1": "arg0_1", "out_ptr0": "buf0"}
NAMES = {"arg0_1": "x", "arg1_1": "ids"}


def source_of(text: str) -> SourceRecord:
    digest = hashlib.sha256(text.encode()).hexdigest()
    return SourceRecord(id=digest, function=NAME, file=f"{NAME}.py", first_line=1, text=text)


def run_of(*ops: GraphOp, names: dict[str, str] | None = None, **more: Any) -> Run:
    """A launch of the kernel, and what it is made of."""
    run = Run("sim:h200")
    run.tensor("tensor of in_ptr0", "I64", 32, owner=FOREIGN)
    run.tensor("tensor of in_ptr1", "F32", 40, 16, owner=FOREIGN)
    run.tensor("tensor of out_ptr0", "F32", 32, 16, owner=FOREIGN)
    given = {name: f"tensor of {name}" for name in PASSED} | {"xnumel": 512}
    run.step = 1
    launch = run.launch(NAME, {}, given, source=KERNEL, grid=(4,), constants={"XBLOCK": 128})
    run.emit(Launched, launch=launch)
    fields = {"parameters": PASSED, "names": NAMES if names is None else names, **more}
    run.emit(FusedKernel, kernel=NAME, source=launch.source, ops=ops, **fields)
    return run


def asserting(run: Run, **more: Any) -> Any:
    """The bundle of a run that ended by the kernel's assertion in its third program."""
    refusal = DeviceAssert(
        condition=CONDITION, function="unknown", file=f"{NAME}.py", line=12, block=(2, 0, 0),
        thread=(80, 0, 0), num_threads=16,
    )  # fmt: skip
    fault = FaultRecord(kind="crash", message="CUDA error: device-side assert", refusal=refusal)
    return run.bundle(fault, **more)


def test_an_assertion_is_told_at_the_programs_line_and_of_its_tensor() -> None:
    [root] = diagnose(asserting(run_of(LOOK_UP))).roots
    assert (root.cause, root.kernel, root.argument) == (Cause.INDEX_RANGE, NAME, "in_ptr0")
    assert (root.file, root.line) == ("/home/ann/model.py", 12)
    assert (root.tensor, root.expression) == ("ids", "return x[ids] * 2")
    assert root.fix == "Keep ids inside 0 to 39"
    assert any(f"{NAME}.py:12" in text for text in root.beside)


def test_where_two_operations_may_be_meant_none_is_told() -> None:
    run = run_of(LOOK_UP, msgspec.structs.replace(OTHER, operands=("arg0_1", "arg1_1")))
    [root] = diagnose(asserting(run)).roots
    assert (root.file, root.line, root.tensor) == (f"{NAME}.py", 12, "ids")
    # Of two the one whose index is made of that parameter is it.
    [root] = diagnose(asserting(run_of(LOOK_UP, OTHER))).roots
    assert root.line == 12
    assert root.file == "/home/ann/model.py"


def test_the_kernel_is_that_of_the_assertions_file_and_not_the_last_one() -> None:
    run = run_of(LOOK_UP)
    text = KERNEL.replace(NAME, "triton_other_1")
    given = {name: f"tensor of {name}" for name in PASSED} | {"xnumel": 512}
    launch = run.launch("triton_other_1", {}, given, source=text, grid=(4,))
    run.step += 1
    run.emit(Launched, launch=launch)
    [root] = diagnose(asserting(run)).roots
    assert root.kernel == NAME


@pytest.mark.parametrize("value", [40, -41, 39, -40])
def test_the_element_is_solved_where_its_tensor_is_on_record(value: int) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    run = run_of(LOOK_UP)
    ids = np.arange(32, dtype=np.int64)
    ids[21] = value
    launched = next(event for event in run.events if isinstance(event, Launched))
    tensor = run.tensors["tensor of in_ptr0"].id
    held = Snapshot(
        step=launched.step,
        plan=OUTSIDE_PLANS,
        launch=launched.seq,
        values=(Values(tensor, "I64", (32,), ids.tobytes()),),
    )
    found = diagnose(asserting(run, snapshots=(held,)), allow_source=True)
    root = found.roots[0]
    if -40 <= value < 40:
        assert root.entry is None
        return
    assert root.entry == SolvedEntry(argument="in_ptr0", index=(21,), value=value)
    assert f"ids[21] is {value}, and 40 is the limit" in root.sentence


def test_what_an_assertion_checks_follows_from_the_text_alone() -> None:
    source = source_of(KERNEL)
    found = asserted_index(source, CONDITION)
    assert found is not None
    assert (found.parameter, found.line, found.bound, found.wraps) == ("in_ptr0", 7, "40", True)
    # What was loaded is changed before it is checked: whose it is is known, and no element of it.
    text = KERNEL.replace("tmp2 = tmp0 + tmp1", "tmp2 = tmp0 + tmp1\n    tmp0 = tmp0 + 1")
    text = (
        text.replace("tl.load(in_ptr0 + (x1)", "tl.load(in_ptr0 + (x1)")
        .replace("    tmp0 = tl.load", "    tmp9 = tl.load")
        .replace("tmp0 = tmp0 + 1", "tmp0 = tmp9 + 1")
    )
    found = asserted_index(source_of(text), CONDITION)
    assert found is not None
    assert (found.parameter, found.line) == ("in_ptr0", 0)
    assert asserted_index(source, "n > 0") is None


def test_names_and_operations_need_one_meaning() -> None:
    case = Case(run_of(LOOK_UP).bundle())
    launch = case.launches[0].launch
    assert user_name_of(case, launch, "in_ptr0") == "ids"
    assert user_name_of(case, launch, "out_ptr0") == "out_ptr0"
    assert operation_of(case, launch, "in_ptr0") == LOOK_UP
    # The table is no index, and neither is what is written.
    assert operation_of(case, launch, "in_ptr1") is None
    assert operation_of(case, launch, "out_ptr0") is None


def test_an_index_that_another_kernel_made_is_followed_by_its_node() -> None:
    made = msgspec.structs.replace(LOOK_UP, operands=("arg0_1", "add"))
    run = run_of(made, names={"arg0_1": "x"}, parameters={**PASSED, "in_ptr0": "buf7"})
    case = Case(run.bundle())
    assert operation_of(case, case.launches[0].launch, "in_ptr0") == made
    # Two nodes that nobody passes: which of them the buffer is is not known.
    two = msgspec.structs.replace(OTHER, operands=("mul", "arg1_1"))
    case = Case(run_of(made, two, parameters={**PASSED, "in_ptr0": "buf7"}).bundle())
    assert operation_of(case, case.launches[0].launch, "in_ptr0") is None


def test_an_index_that_is_taken_from_a_table_has_the_tables_values() -> None:
    """As in `cache[table[which]]`: each of both indices is of one operation."""
    inner = msgspec.structs.replace(LOOK_UP, node="rows", operands=("arg2_1", "arg1_1"))
    outer = msgspec.structs.replace(OTHER, operands=("arg0_1", "rows"))
    case = Case(run_of(inner, outer, parameters={**PASSED, "in_ptr2": "arg2_1"}).bundle())
    launch = case.launches[0].launch
    assert operation_of(case, launch, "in_ptr0") == inner
    assert operation_of(case, launch, "in_ptr2") == outer


def test_a_kernel_of_the_programs_own_is_told_in_its_own_file() -> None:
    run = run_of(original="/home/ann/kernels.py:41")
    case = Case(run.bundle())
    root = RootCause(
        cause=Cause.MISSING_MASK, sentence="", fix="", proof=Proof("", "", ""), kernel=NAME,
        argument="in_ptr1", file=f"{NAME}.py", line=13, place=case.launches[0].place,
    )  # fmt: skip
    told = in_users_words(case, root)
    # `def` is line 2 of the text, and line 41 of the file.
    assert (told.file, told.line, told.tensor) == ("/home/ann/kernels.py", 52, "x")


def made_again(**changes: Any) -> IndexMadeAgain:
    facts: dict[str, Any] = {
        "seq": 3, "step": 1, "kernel": "cpp_fused_index_0", "op": LOOK_UP, "said": "IndexError: no",
        "index_name": "ids", "element": (5,), "value": 40, "target_name": "x", "dimension": 0,
        "bound": 40, "num_outside": 1, "is_clean_inside": True,
    }  # fmt: skip
    return IndexMadeAgain(**facts | changes)


def test_a_graph_of_the_cpu_is_told_by_the_operation_that_fails_alone() -> None:
    fault = FaultRecord(kind="error", message="", is_statement=True)
    bundle = Run().bundle(fault)
    found = diagnose(msgspec.structs.replace(bundle, events=(made_again(),)))
    [root] = found.roots
    assert (root.cause, root.file, root.line) == (Cause.INDEX_RANGE, "/home/ann/model.py", 12)
    assert "ids[5] is 40, but dimension 0 of x has 40 entries" in root.sentence
    assert root.fix == "Keep ids inside 0 to 39"
    assert not found.is_unexplained
    open_ = diagnose(msgspec.structs.replace(bundle, events=(made_again(is_clean_inside=False),)))
    assert not open_.roots
    told = [h for h in open_.hypotheses if h.diagnostic == "compiled index"]
    assert [h.verdict for h in told] == [Verdict.INCONCLUSIVE]
