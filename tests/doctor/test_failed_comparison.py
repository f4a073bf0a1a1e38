"""An assertion that failed is followed to the launch that stored the element; nothing is proven."""

from __future__ import annotations

import ast
import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from recorded.program_launch import Launch

from hypocenter.doctor.causes import Cause
from hypocenter.doctor.compared_text import compared_lines
from hypocenter.doctor.diagnosis import ComparedElement, Diagnosis, FailedComparison, Verdict
from hypocenter.doctor.doctor import diagnose
from hypocenter.doctor.edits.product_text import counts_places, products_in
from hypocenter.doctor.markdown import report_markdown
from hypocenter.doctor.page.rest_section import how_it_showed
from hypocenter.doctor.report import report_text
from hypocenter.record import bundle as bundles
from hypocenter.record.bundle import Bundle
from hypocenter.record.compared import ComparedSide, ComparedUnequal
from hypocenter.record.events import SourceRecord
from hypocenter.record.fault_record import FaultRecord

pytest.importorskip("triton")
KEYS = """
def keys_kernel(tok_ptr, key_ptr, width, vocab, BLOCK: tl.constexpr):
    r = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    tok = tl.load(tok_ptr + r * width + cols)
    key = (14130 + r) * vocab + tok
    tl.store(key_ptr + r * width + cols, key)
"""
SCATTER = """
def scatter_kernel(ids_ptr, key_ptr, width, vocab, BLOCK: tl.constexpr):
    cols = tl.program_id(0) * width + tl.arange(0, BLOCK)
    ids = tl.load(ids_ptr + cols)
    tl.store(key_ptr + ids, ids.to(tl.int64) + vocab)
"""
TWICE = KEYS.replace("    tok = ", "    tl.store(key_ptr + r * width + cols, cols)\n    tok = ")
#: What the product of row 7 gives in 32 bits, and what it should.
WRAPPED, RIGHT = 14137 * 151936 + 5 - (1 << 32), 14137 * 151936 + 5
FAULT = FaultRecord(kind="error", message="AssertionError: keys")
TOKENS = np.full((8, 4), 5, np.int32)
TOKENS[5] = 6


def examined(
    text: str = KEYS,
    held: dict[str, Any] | None = None,
    value: int = WRAPPED,
    kind: str = "error",
    num_different: int = 4,
    others: tuple[tuple[int, int, int], ...] = (),
    wanted: int = RIGHT,
    divisors: tuple[int, ...] = (),
) -> Diagnosis:
    """Of a program that ended because key[7, 1] is not as it wants; `others` are elements that
    differ as well, by their number, with what they hold and what is wanted."""
    first = "ids_ptr" if text is SCATTER else "tok_ptr"
    launch = Launch(
        text,
        {first: ("I32", (8, 4)), "key_ptr": ("I64", (8, 4))},
        {"width": 4, "vocab": 151936},
        grid=(8,),
        constants={"BLOCK": 4},
        held={first: TOKENS} if held is None else held,
    )
    bundle = launch.bundle()
    keys = next(tensor for tensor in bundle.tensors if tensor.name == "key_ptr")
    side = ComparedSide(
        name="keys", dtype="I64", value=value, address=keys.address + 8 * 29,
        allocation=keys.allocation,
        others=tuple((keys.address + 8 * at, found) for at, found, _ in others),
        divisors=divisors,
    )  # fmt: skip
    other = ComparedSide(
        name="want", dtype="I64", value=wanted, others=tuple((0, right) for _, _, right in others)
    )
    event = ComparedUnequal(
        seq=max(event.seq for event in bundle.events) + 1, step=2, site="program.py:50",
        compared_at="program.py:49",
        sides=(side, other), shape=(8, 4), index=(7, 1), num_different=num_different,
        num_elements=32,
    )  # fmt: skip
    fault = FaultRecord(
        kind=kind, message="AssertionError: keys", call="`assert same`", is_statement=True,
        site="program.py:50", is_asynchronous=False,
    )  # fmt: skip
    bundle = msgspec.structs.replace(bundle, events=(*bundle.events, event), fault=fault)
    result = diagnose(bundle, allow_source=True)
    assert all(not rung.left_out for rung in result.rungs), result.rungs
    return result


def test_the_launch_the_program_and_the_line_that_stored_it_are_told() -> None:
    result = examined()
    assert not result.roots
    assert result.compared is not None
    keys, want = result.compared.sides
    assert want.writer is None
    assert keys.writer is not None
    assert (keys.writer.kernel, keys.writer.parameter) == ("keys", "key_ptr")
    assert (keys.writer.program, keys.writer.line) == ((7, 0, 0), 7)
    assert keys.writer.expression == "tl.store(key_ptr + r * width + cols, key)"
    assert (keys.writer.value, keys.writer.gives_it) == (WRAPPED, True)
    text = report_text(result)
    assert f"LOOK AT    keys[7, 1] is {WRAPPED} and want[7, 1] {RIGHT}" in text
    told = " ".join(text.split())
    assert "4 of 32 elements differ, of which this is the first" in told
    assert "in program (7, 0, 0); its replay stores this number, too" in told
    assert "it is want that says it is wrong" in told
    assert "is not proven" in told
    assert "FIX" not in text
    assert "**Look at.** keys" in report_markdown(result)
    page = "".join(how_it_showed(Bundle(kind="error", fault=FAULT), result))
    assert "Look at. </b>keys[7, 1] is" in page


def test_of_a_number_that_the_replay_does_not_store_no_reason_is_told() -> None:
    result = examined(value=3)
    assert result.compared is not None
    writer = result.compared.sides[0].writer
    assert writer is not None
    assert (writer.gives_it, writer.gives_it_cut) == (False, False)
    told = " ".join(report_text(result).split())
    assert "of the launches that were recorded the last to store keys[7, 1] was launch 1" in told
    assert (
        f"its replay stores {WRAPPED} and not this number; what makes the difference is not known"
        in told
    )
    assert "that says it is wrong" not in told


ROW_5 = (21, 14135 * 151936 + 6 - (1 << 32), 14135 * 151936 + 6)


def test_a_product_of_32_bits_is_proven_where_the_program_takes_the_number_apart() -> None:
    """Rows 5, 6 and 7 are beyond 2**31. The program divides the keys by the vocabulary."""
    result = examined(num_different=12, others=(ROW_5,), divisors=(7, 151936))
    [root] = result.roots
    assert (root.cause, root.kernel, root.argument) == (Cause.OFFSET_OVERFLOW, "keys", "key_ptr")
    assert (root.line, root.expression) == (6, "(14130 + r) * vocab")
    assert root.culprit is not None
    assert root.culprit.place == f"{root.file}:6"
    [edit] = root.edits
    assert edit.new == "key = ((14130 + r).to(tl.int64)) * vocab + tok"
    assert "2 elements that were kept differ by multiples of 2**32" in root.proof.red
    assert "the program takes keys apart again by 151936" in root.proof.red
    assert "changes 12 elements: as many as differ" in root.proof.green
    assert result.compared is not None
    assert "LOOK AT" not in report_text(result)


@pytest.mark.parametrize(
    "changed",
    [
        {"num_different": 13},  # another element differs too, which no product explains
        {"others": ((21, ROW_5[1], ROW_5[2] + 1),)},
        {"others": ((3, ROW_5[1], ROW_5[2]),)},  # it is not what the launch stores there
        {"text": KEYS.replace("* vocab", "* vocab.to(tl.int64)") + "    # in 64 bits\n"},
        {"others": ((21, ROW_5[1] - (1 << 32), ROW_5[2]),)},  # nor is this
        {"held": {}},
        # As if all tokens were 0, with which a launch is replayed of which nothing is known.
        {"held": {}, "value": WRAPPED - 5, "wanted": RIGHT - 5, "others": ()},
    ],
    ids=[
        "more differ",
        "by another number",
        "another element",
        "another value",
        "of 64 bits",
        "unknown",
        "unknown zeros",
    ],
)
def test_a_product_that_does_not_explain_all_of_it_is_not_blamed(changed: dict[str, Any]) -> None:
    given: dict[str, Any] = {"num_different": 12, "others": (ROW_5,), "divisors": (151936,)}
    result = examined(**given | changed)
    assert result.roots == ()
    assert result.compared is not None


def number_of(token: int) -> tuple[int, int, int]:
    """Row 5's first element with that token: its place, what is stored and what is wanted."""
    right = 14135 * 151936 + token
    return 20, right - (1 << 32), right


@pytest.mark.parametrize(
    ("token", "text"),
    [
        (151935, KEYS.replace("+ tok", "+ tok.to(tl.uint32).to(tl.int32)")),
        (151936, KEYS),
        (-1, KEYS),
    ],
    ids=["no sign", "the factor", "below 0"],
)
def test_what_is_no_digit_makes_the_product_no_key(token: int, text: str) -> None:
    """With 151935, and numbers that have a sign, it is one."""
    tokens = TOKENS.copy()
    tokens[5, 0] = token
    given: dict[str, Any] = {"num_different": 12, "divisors": (151936,), "text": text}
    others = (number_of(token),)
    result = examined(**given, others=others, held={"tok_ptr": tokens})
    assert result.roots == ()
    [told] = [row for row in result.hypotheses if "failed comparison" in row.diagnostic]
    assert told.verdict is Verdict.INCONCLUSIVE
    tokens[5, 0] = 151935
    others = (number_of(151935),)
    result = examined(**given | {"text": KEYS}, others=others, held={"tok_ptr": tokens})
    assert [root.cause for root in result.roots] == [Cause.OFFSET_OVERFLOW]


#: A polynomial hash takes a step for each number that it is of.
STEPS = """    state = 14130
    for _ in range(0, 1):
        state = state + r
    key = state * vocab + tok
"""
PRODUCT = "    key = (14130 + r) * vocab + tok\n"


@pytest.mark.parametrize(
    ("product", "is_key"),
    [
        ("    key = (14130 + r + (tok - tok)) * vocab + tok\n", False),
        (STEPS, False),
        ("    state = 14130 + r\n    state += tok - tok\n    key = state * vocab + tok\n", False),
        ("    row = 14130 + r\n    key = row.to(tl.int32) * vocab + tok\n", True),
    ],
    ids=["loaded", "a loop", "added to", "a row"],
)
def test_a_polynomial_of_what_was_loaded_is_no_key(product: str, is_key: bool) -> None:
    """Its digits are below the factor, and a program may take it apart into a tag and a place."""
    text = KEYS.replace(PRODUCT, product)
    result = examined(text, num_different=12, others=(ROW_5,), divisors=(151936,))
    told = [row for row in result.hypotheses if "failed comparison" in row.diagnostic]
    wanted = Verdict.CONFIRMED if is_key else Verdict.INCONCLUSIVE
    assert [(row.cause, row.verdict) for row in told] == [(Cause.OFFSET_OVERFLOW, wanted)]
    assert len(result.roots) == is_key


def test_a_hash_of_one_seed_is_no_key() -> None:
    """Without a place in it the other factor is the same number for all programs."""
    text = KEYS.replace("(14130 + r) * vocab", "width * vocab * 3535")
    source = SourceRecord(
        id="1", function="keys_kernel", file="k.py", first_line=1, text=text.strip()
    )
    products = {ast.unparse(node): node for _, node in products_in(source)}
    assert not counts_places(source, products["width * vocab * 3535"].left)
    assert counts_places(source, products["r * width"].left)


@pytest.mark.parametrize("divisors", [(), (151935, 8)], ids=["none", "others"])
def test_a_product_that_may_leave_32_bits_on_purpose_is_not_blamed(
    divisors: tuple[int, ...],
) -> None:
    """What the comparison wants may be what is wrong, as beside a hash."""
    result = examined(num_different=12, others=(ROW_5,), divisors=divisors)
    assert result.roots == ()
    [told] = [row for row in result.hypotheses if "failed comparison" in row.diagnostic]
    assert (told.verdict, told.cause) == (Verdict.INCONCLUSIVE, Cause.OFFSET_OVERFLOW)
    assert told.argument == "key_ptr"
    why = "whether `(14130 + r) * vocab` is to leave 32 bits, as in a hash"
    assert any(why in text for text in told.evidence)
    text = " ".join(report_text(result).split())
    assert "LOOK AT keys[7, 1] is" in text
    assert "FIX" not in text


@pytest.mark.parametrize("statement", ["assert same", "raise ValueError(keys)"])
def test_an_assertion_over_no_launchs_results_is_said_to_be_the_programs(statement: str) -> None:
    bundle = Launch(KEYS, {"tok_ptr": ("I32", (8, 4)), "key_ptr": ("I64", (8, 4))}).bundle()
    fault = FaultRecord(
        kind="error", message="keys", call=f"`{statement}`", is_statement=True,
        site="program.py:50", is_asynchronous=False,
    )  # fmt: skip
    result = diagnose(msgspec.structs.replace(bundle, fault=fault), allow_source=True)
    told = [gap for gap in result.unseen if gap.what == "what `assert same` at program.py:50 tests"]
    assert bool(told) == (statement == "assert same")


def test_of_two_stores_of_a_launch_the_later_one_is_named() -> None:
    found = examined(TWICE).compared
    assert found is not None
    assert found.sides[0].writer is not None
    assert (found.sides[0].writer.line, found.sides[0].writer.value) == (8, WRAPPED)


def test_where_nobody_recorded_what_it_read_the_number_stays_open() -> None:
    found = examined(held={}).compared
    assert found is not None
    assert found.sides[0].writer is not None
    assert found.sides[0].writer.line == 7
    assert found.sides[0].writer.gives_it is None


def test_a_store_whose_place_hangs_on_what_is_unknown_is_not_named() -> None:
    result = examined(SCATTER, held={})
    assert result.compared is not None
    assert result.compared.sides[0].writer is None
    assert any("whether" in gap.what and "stored keys" in gap.what for gap in result.unseen)


def test_of_a_store_by_index_that_is_known_the_last_one_is_named() -> None:
    ids = np.arange(32, dtype=np.int32).reshape(8, 4)
    found = examined(SCATTER, held={"ids_ptr": ids}, value=29 + 151936).compared
    assert found is not None
    assert found.sides[0].writer is not None
    assert (found.sides[0].writer.program, found.sides[0].writer.gives_it) == ((7, 0, 0), True)


def test_a_bundle_keeps_a_side_that_is_nan(tmp_path: Path) -> None:
    side = ComparedSide(name="out", dtype="F32", value=math.nan, address=4096, allocation=3)
    event = ComparedUnequal(
        seq=9, step=1, site="program.py:50", compared_at="program.py:49",
        sides=(side, ComparedSide(name="want", dtype="F32", value=0.5)), shape=(), index=(),
        num_different=1, num_elements=1,
    )  # fmt: skip
    bundle = Launch(KEYS, {"tok_ptr": ("I32", (8, 4)), "key_ptr": ("I64", (8, 4))}).bundle()
    bundles.save(msgspec.structs.replace(bundle, events=(*bundle.events, event)), tmp_path / "b")
    [read] = [e for e in bundles.load(tmp_path / "b").events if isinstance(e, ComparedUnequal)]
    assert math.isnan(read.sides[0].value)
    assert read.sides[1] == event.sides[1]


def test_a_program_that_ended_well_has_compared_nothing_wrong() -> None:
    assert examined(kind="none").compared is None


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("out", "out[7]"),
        ("box.out[0]", "box.out[0][7]"),
        ("add(x, y)", "add(x, y)[7]"),
        ("x + y", "(x + y)[7]"),
        ("w @ x", "(w @ x)[7]"),
        ("-x", "(-x)[7]"),
        ("a tensor", "a tensor[7]"),
    ],
)
def test_an_element_of_an_expression_is_spelled_as_that_of_all_of_it(name: str, told: str) -> None:
    one, other = ComparedElement(name=name, value=1.5), ComparedElement(name="want", value=2.5)
    found = FailedComparison(
        site="p.py:9", compared_at="p.py:9", sides=(one, other), index=(7,), num_different=1,
        num_elements=8, is_first=True,
    )  # fmt: skip
    first, *_ = compared_lines(found)
    assert first.startswith(f"{told} is 1.5 and want[7] 2.5; ")
