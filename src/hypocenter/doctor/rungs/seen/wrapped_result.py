"""Whole numbers that differ by multiples of 2**32, and the product of 32 bits that made them so.

With that product in 64 bits the launch has to store what the program's comparison wants in each
element that was kept, and change as many elements as differ, and no other. That alone proves
nothing: a hash leaves 32 bits on purpose, and the expectation may be what is wrong. What refutes it
is a program that takes the number apart again, into quotient and remainder by one of the factors,
and a kernel that put it together so: the other factor is the number of a place, and what is added
to the product is a digit, several of them, and each from 0 to that factor less one. A hash of what
was loaded has no such places, and one that is divided by its own multiplier no such digits.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

from hypocenter.base.dtypes import NUMPY_DTYPES, Array
from hypocenter.base.errors import HypoError
from hypocenter.base.wording import count_text
from hypocenter.doctor.case import Case
from hypocenter.doctor.causes import Cause
from hypocenter.doctor.diagnosis import Claim, LastWriter, Proof, RootCause, Verdict, proven, row
from hypocenter.doctor.edits.product_text import (
    counts_places,
    products_in,
    text_without,
    wide_edits,
)
from hypocenter.doctor.mask_text import MaskEdit
from hypocenter.doctor.rungs.replaying.trials import edits_of
from hypocenter.record.bundle_index import LaunchMade
from hypocenter.record.compared import ComparedSide, ComparedUnequal
from hypocenter.record.events import SourceRecord, TensorRecord
from hypocenter.record.gap import Gap
from hypocenter.replay.terms import KernelText

NAME = "failed comparison"
#: Texts that are tried; each is a replay.
MAX_TRIES = 12
_WRAP = 1 << 32


def claim_of_wrapped(
    case: Case, event: ComparedUnequal, writers: tuple[LastWriter | None, LastWriter | None]
) -> Claim | None:
    """The product, where it is one of one line; None where nothing or more than that fits."""
    for side, wanted, writer in zip(event.sides, event.sides[::-1], writers, strict=True):
        if writer is None or not writer.gives_it or not _differ_by_wraps(side, wanted):
            continue
        use = next((made for made in case.launches if made.place == writer.place), None)
        tensor = case.tensor_of(use.launch, writer.parameter) if use is not None else None
        if use is None or tensor is None or not event.is_first:
            continue
        try:
            edit = _fitting(case, event, use, (writer.parameter, tensor), (side, wanted))
            base = None
            if edit is not None:
                base = _base(case, use, edit, (writer.parameter, tensor), side)
        except (HypoError, ImportError) as error:
            what = f"products of {use.launch.kernel} in 64 bits"
            case.leave_unseen(Gap.not_examined(what, str(error)))
            return None
        if edit is not None:
            if base is None:
                return _unproven(event, use, writer, edit)
            return _claim(case, event, use, writer, tensor, edit, base)
    return None


def _base(
    case: Case,
    use: LaunchMade,
    edit: MaskEdit,
    stored: tuple[str, TensorRecord],
    side: ComparedSide,
) -> int | None:
    """The factor by which the program takes the number apart, where the kernel adds its digits."""
    divisor = _divisor(case, use, edit, side)
    if divisor is None or not _adds_digits(case, use, edit, stored, side, divisor):
        return None
    return divisor


def _divisor(case: Case, use: LaunchMade, edit: MaskEdit, side: ComparedSide) -> int | None:
    """The factor of the product by which the program takes the number apart; None without one."""
    product = ast.parse(edit.was, mode="eval").body
    source = case.sources[use.launch.source]
    values = {argument.name: argument.value for argument in use.launch.arguments}
    values = source.constants | use.launch.constants | values
    if not isinstance(product, ast.BinOp):
        return None
    for factor, other in itertools.permutations((product.left, product.right)):
        name = factor.id if isinstance(factor, ast.Name) else None
        value = factor.value if isinstance(factor, ast.Constant) else values.get(name or "")
        if type(value) is not int or abs(value) <= 1 or value not in side.divisors:
            continue
        if counts_places(source, other):
            return value
    return None


def _adds_digits(
    case: Case,
    use: LaunchMade,
    edit: MaskEdit,
    stored: tuple[str, TensorRecord],
    side: ComparedSide,
    divisor: int,
) -> bool:
    """Whether what the kernel stores without the product are digits of that base, not all the same.

    Not where the kernel says uint32: numbers without a sign leave 32 bits by their definition.
    """
    from hypocenter.replay.weightless import results_of

    source, place, (name, tensor) = case.sources[use.launch.source], use.place, stored
    text = text_without(source, edit)
    if place is None or text is None or "uint32" in source.text:
        return False
    edited = msgspec.structs.replace(source, text=text)
    made = results_of(case.index, place, text=KernelText(case.allow_source, edited=edited))
    if made is None or name not in made:
        return False
    left = _elements(made[name], tensor)
    places = [(at - tensor.address) // left.itemsize for at in _addresses(side)]
    if not all(0 <= at < left.size for at in places):
        return False
    digits = {int(left[at]) for at in places}
    return len(digits) > 1 and all(0 <= digit < abs(divisor) for digit in digits)


def _differ_by_wraps(side: ComparedSide, wanted: ComparedSide) -> bool:
    """Whether every element that was kept is wrong by a multiple of 2**32; else none is tried."""
    found, right = _numbers(side), _numbers(wanted)
    if len(found) != len(right) or not all(isinstance(n, int) for n in (*found, *right)):
        return False
    apart = [int(one) - int(other) for one, other in zip(found, right, strict=True)]
    return all(number and number % _WRAP == 0 for number in apart)


def _numbers(side: ComparedSide) -> list[int | float]:
    return [side.value, *(value for _, value in side.others)]


def _addresses(side: ComparedSide) -> list[int]:
    return [side.address, *(address for address, _ in side.others)]


def _fitting(
    case: Case,
    event: ComparedUnequal,
    use: LaunchMade,
    stored: tuple[str, TensorRecord],
    sides: tuple[ComparedSide, ComparedSide],
) -> MaskEdit | None:
    """The widest product of the one line of which some fit; its first text that does."""
    from hypocenter.replay.replay import KernelFailed
    from hypocenter.replay.weightless import results_of

    source, place = case.sources.get(use.launch.source), use.place
    if source is None or place is None:
        return None

    def results(edited: SourceRecord | None) -> Any:
        text = KernelText(case.allow_source, edited=edited)
        return results_of(case.index, place, text=text)

    before, fitting = results(None), dict[str, MaskEdit]()
    for number, edit in enumerate(_edits(source)):
        if number >= MAX_TRIES or before is None:
            return None
        try:
            after = results(msgspec.structs.replace(source, text=edit.text))
        except KernelFailed:  # a constant has no type that could be another
            continue
        if edit.was not in fitting and _takes_away(event, stored, sides, (before, after)):
            fitting[edit.was] = edit
    lines = {edit.line for edit in fitting.values()}
    return max(fitting.values(), key=lambda edit: len(edit.was)) if len(lines) == 1 else None


def _edits(source: SourceRecord) -> Iterator[MaskEdit]:
    """The kernel's text with one factor of one of its products in 64 bits, each in turn."""
    for line, node in products_in(source):
        text = ast.unparse(node)
        yield from (edit for edit in wide_edits(source, line, text) if edit.was == text)


def _takes_away(
    event: ComparedUnequal,
    stored: tuple[str, TensorRecord],
    sides: tuple[ComparedSide, ComparedSide],
    results: tuple[Any, Any],
) -> bool:
    """Whether the launch stored what was found and stores what was wanted, changing no more."""
    (name, tensor), (side, wanted), (before, after) = stored, sides, results
    if after is None or before.keys() != after.keys():
        return False
    if any((before[other] != after[other]).any() for other in before if other != name):
        return False
    was, now = (_elements(made[name], tensor) for made in (before, after))
    places = [(at - tensor.address) // was.itemsize for at in _addresses(side)]
    if was.shape != now.shape or not all(0 <= place < was.size for place in places):
        return False
    is_wrong = [int(was[place]) for place in places] == _numbers(side)
    is_right = [int(now[place]) for place in places] == _numbers(wanted)
    return is_wrong and is_right and int((was != now).sum()) == event.num_different


def _elements(data: Array, tensor: TensorRecord) -> Array:
    kind = np.dtype(NUMPY_DTYPES[tensor.dtype])
    whole = data.view(np.uint8)
    found: Array = whole[: whole.size // kind.itemsize * kind.itemsize].view(kind)
    return found


def _found_text(event: ComparedUnequal, use: LaunchMade) -> str:
    one, other = event.sides
    at = f"[{', '.join(map(str, event.index))}]"
    kept = count_text(1 + len(one.others), "element")
    return (
        f"{event.compared_at}: {one.name}{at} is {one.value} and {other.name}{at} {other.value}; "
        f"{kept} that were kept differ by multiples of 2**32, and the replay of {use.where} stores "
        "the same"
    )


def _unproven(event: ComparedUnequal, use: LaunchMade, writer: LastWriter, edit: MaskEdit) -> Claim:
    """The comparison alone: what it wants may be what is wrong."""
    kernel = use.launch.kernel
    return row(
        Cause.OFFSET_OVERFLOW,
        Verdict.INCONCLUSIVE,
        NAME,
        _found_text(event, use),
        f"with `{edit.now}` in line {edit.line} it stores what the comparison wants; whether "
        f"`{edit.was}` is to leave 32 bits, as in a hash, and what is wanted lacks that, is not "
        "known",
        would_refute=f"that `{edit.was}` is meant to leave 32 bits",
        kernel=kernel,
        argument=writer.parameter,
    )


def _claim(
    case: Case,
    event: ComparedUnequal,
    use: LaunchMade,
    writer: LastWriter,
    tensor: TensorRecord,
    edit: MaskEdit,
    divisor: int,
) -> Claim:
    source = case.sources[use.launch.source]
    edited = msgspec.structs.replace(source, text=edit.text)
    side = event.sides[0] if divisor in event.sides[0].divisors else event.sides[1]
    kept = count_text(1 + len(side.others), "element")
    root = RootCause(
        cause=Cause.OFFSET_OVERFLOW,
        sentence=f"{use.launch.kernel}: `{edit.was}` leaves 32 bits, and "
        f"{count_text(event.num_different, 'element')} of {writer.parameter} are wrong for it",
        fix=f"Compute {edit.was} in 64 bits: `{edit.now}`",
        proof=Proof(
            f"{_found_text(event, use)}; the program takes {side.name} apart again by {divisor}, "
            "into quotient and remainder, and what is added to the product are several numbers "
            f"from 0 to {abs(divisor) - 1}, so it is no hash that may leave 32 bits",
            f"`{edit.now}` in line {edit.line}",
            f"the same replay stores what the comparison wants in {kept} that were kept, and "
            f"changes {count_text(event.num_different, 'element')}: as many as differ",
        ),
        kernel=use.launch.kernel,
        argument=writer.parameter,
        tensor=tensor.name,
        file=source.file,
        line=edit.line,
        expression=edit.was,
        place=use.place,
        launched_at=writer.launched_at,
        edits=edits_of(source, edited),
    )
    refutes = "an element that differs and stays wrong with that product in 64 bits"
    return proven(root, NAME, (), refutes, use.seq, (tensor.id,))
