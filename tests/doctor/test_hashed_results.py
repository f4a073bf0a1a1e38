"""A hash that wraps on purpose beside an expectation of 64 bits: the kernel is not blamed."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import pytest

pytest.importorskip("triton")
from recorded.program_launch import Launch

from hypocenter.doctor.causes import Cause
from hypocenter.doctor.diagnosis import Diagnosis, Verdict
from hypocenter.doctor.doctor import diagnose
from hypocenter.record.compared import ComparedSide, ComparedUnequal
from hypocenter.record.fault_record import FaultRecord

HASH = """
def hash_kernel(x_ptr, hash_ptr, multiplier, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at)
    hashed = {}
    tl.store(hash_ptr + at, hashed.to(tl.int64))
"""
#: Large enough that every product leaves 32 bits.
X = np.arange(16, dtype=np.int32) * 65_537 + 1_000_003
#: By name what a kernel computes, and the same of a whole number without a limit.
IDIOMS: dict[str, tuple[str, Callable[[int], int]]] = {
    "generator": ("x * 1664525 + 1013904223", lambda x: x * 1664525 + 1013904223),
    "multiplicative": ("x.to(tl.uint32) * 2654435761", lambda x: x * 2654435761),
    "by an argument": ("x * multiplier", lambda x: x * 1000003),
    "fnv": (
        "(x.to(tl.uint32) ^ 2166136261) * 16777619",
        lambda x: (x ^ 2166136261) * 16777619,
    ),
    "murmur": (
        "(x.to(tl.uint32) ^ (x.to(tl.uint32) >> 16)) * 0x85EBCA6B",
        lambda x: (x ^ (x >> 16)) * 0x85EBCA6B,
    ),
    "xxhash": (
        "x.to(tl.uint32) * 3266489917 + 374761397",
        lambda x: x * 3266489917 + 374761397,
    ),
    "philox": ("x.to(tl.uint32) * 0xD2511F53", lambda x: x * 0xD2511F53),
    "rolling": ("(7 * multiplier + x) * multiplier + 5",
                lambda x: (7 * 1000003 + x) * 1000003 + 5),
}  # fmt: skip


def examined(
    name: str, wanted: Callable[[int], int], divisors: tuple[int, ...] = ()
) -> Diagnosis | None:
    """Of a program that ended because a hash is not as it wants; None where it is."""
    text, whole = IDIOMS[name]
    is_signed = "uint32" not in text
    found = [_narrow(whole(int(x)), is_signed=is_signed) for x in X]
    right = [wanted(whole(int(x))) for x in X]
    at = [place for place in range(16) if found[place] != right[place]]
    if not at:
        return None
    launch = Launch(
        HASH.format(text),
        {"x_ptr": ("I32", (16,)), "hash_ptr": ("I64", (16,))},
        {"multiplier": 1000003},
        grid=(4,),
        constants={"BLOCK": 4},
        held={"x_ptr": X},
    )
    bundle = launch.bundle()
    hashes = next(tensor for tensor in bundle.tensors if tensor.name == "hash_ptr")
    side = ComparedSide(
        name="hashes", dtype="I64", value=found[at[0]], address=hashes.address + 8 * at[0],
        allocation=hashes.allocation,
        others=tuple((hashes.address + 8 * place, found[place]) for place in at[1:]),
        divisors=divisors,
    )  # fmt: skip
    other = ComparedSide(
        name="want", dtype="I64", value=right[at[0]],
        others=tuple((0, right[place]) for place in at[1:]),
    )  # fmt: skip
    event = ComparedUnequal(
        seq=max(event.seq for event in bundle.events) + 1, step=2, site="program.py:50",
        compared_at="program.py:49",
        sides=(side, other), shape=(16,), index=(at[0],), num_different=len(at), num_elements=16,
    )  # fmt: skip
    fault = FaultRecord(
        kind="error", message="AssertionError: hashes", call="`assert same`", is_statement=True,
        site="program.py:50", is_asynchronous=False,
    )  # fmt: skip
    bundle = msgspec.structs.replace(bundle, events=(*bundle.events, event), fault=fault)
    result = diagnose(bundle, allow_source=True)
    assert all(not rung.left_out for rung in result.rungs), result.rungs
    assert result.compared is not None
    writer = result.compared.sides[0].writer
    assert writer is not None
    assert writer.gives_it
    return result


def _narrow(number: int, *, is_signed: bool) -> int:
    number &= 0xFFFFFFFF
    return number - (1 << 32) if is_signed and number >> 31 else number


#: Each multiplier above: a program that takes a hash apart by its own.
MULTIPLIERS = (1664525, 2654435761, 1000003, 16777619, 0x85EBCA6B, 3266489917, 0xD2511F53)


@pytest.mark.parametrize("divisors", [(), MULTIPLIERS], ids=["whole", "divided"])
@pytest.mark.parametrize("name", IDIOMS)
def test_a_hash_is_not_blamed_for_an_expectation_that_does_not_wrap(
    name: str, divisors: tuple[int, ...]
) -> None:
    result = examined(name, lambda number: number, divisors)
    assert result is not None
    assert result.roots == ()
    rows = [row for row in result.hypotheses if row.cause is Cause.OFFSET_OVERFLOW]
    assert not any(row.verdict is Verdict.CONFIRMED for row in rows)
    [told] = [row for row in rows if "failed comparison" in row.diagnostic]
    assert told.verdict is Verdict.INCONCLUSIVE
    assert any("as in a hash" in text for text in told.evidence)


@pytest.mark.parametrize("name", IDIOMS)
def test_a_hash_beside_an_expectation_of_32_bits_is_as_it_wants(name: str) -> None:
    is_signed = "uint32" not in IDIOMS[name][0]
    assert examined(name, lambda number: _narrow(number, is_signed=is_signed)) is None


@pytest.mark.parametrize("name", ["generator", "by an argument"])
def test_a_sign_that_the_expectation_lacks_is_not_blamed_on_a_product(name: str) -> None:
    result = examined(name, lambda number: number & 0xFFFFFFFF)
    assert result is not None
    assert result.roots == ()
