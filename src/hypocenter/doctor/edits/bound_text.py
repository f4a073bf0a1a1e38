"""Masks that may be right instead of an access's own, as edits of a kernel's text.

Each with what speaks for it: the axis that its index runs along, a mask that was made and is not
used, the mask of another access with the same address. Runs nothing: a replay decides.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from hypocenter.doctor.edits.index_text import (
    AddressIndex,
    indices_of,
    number_of,
    scalars_of,
    sizes_of,
)
from hypocenter.doctor.kernel_text import calls_in, statements_in
from hypocenter.doctor.mask_text import (
    MaskedAccess,
    MaskEdit,
    assigned_in,
    comparisons,
    loops_around,
    made_of,
    names_in,
    roots_in,
    with_comparator,
    with_condition,
    with_mask,
)
from hypocenter.record.events import SourceRecord, TensorRecord

#: Conditions of one index of which pairs are made.
_MAX_OF_PAIR = 2


@dataclass(frozen=True, slots=True)
class Bound:
    """A condition that keeps an index inside the axis that it runs along.

    `is_of_axis`: its bound is the size of that axis, so that what it leaves out is no element
    there. `evidence` says how the text shows that the bound is meant for this index. With
    `is_number` the bound is a number, for none that the kernel was given has that value.
    """

    index: AddressIndex
    condition: str
    is_of_axis: bool
    evidence: tuple[str, ...] = ()
    is_number: bool = False


def bounds_of(
    access: MaskedAccess, given: Mapping[str, object], tensor: TensorRecord
) -> Iterator[Bound]:
    """For each index of the address the conditions that name the size of its axis."""
    indices = axes_of(access, given, tensor)
    for index, sizes in indices:
        found = list(_named_bounds(access, index, [one for one, _ in indices], given, sizes))
        yield from found
        yield from (
            Bound(index, f"{index.text} < {size}", True, is_number=True)
            for size in (sizes if not found else ())
        )


def axes_of(
    access: MaskedAccess, given: Mapping[str, object], tensor: TensorRecord
) -> list[tuple[AddressIndex, list[int]]]:
    """The indices of an address, each with the sizes that its axis may be said to have.

    An index to which the offset of a row was added runs over all of the tensor.
    """
    steps = {by for by in tensor.strides if by > 1}
    apart = indices_of(access, lambda factor: number_of(factor, access, given) in steps)
    found = [(index, sizes_of(index, access, given, tensor)) for index in apart]
    texts = {index.text for index in apart}
    found += [
        (index, sizes_of(index, access, given, tensor)[-1:])
        for index in indices_of(access)
        if index.text not in texts
    ]
    return [(index, sizes) for index, sizes in found if sizes]


def inside_axes(
    access: MaskedAccess, given: Mapping[str, object], tensor: TensorRecord
) -> str | None:
    """A condition that keeps each index of an address inside its own axis.

    Empty where a tensor has one axis at most; None where an index is multiplied by no stride of it.
    """
    if sum(size > 1 for size in tensor.shape) < 2:
        return ""
    lanes = indices_of(access)
    axes = axes_of(access, given, tensor)
    texts = {index.text for index, _ in axes}
    if any(index.text not in texts and not _is_split(index, axes) for index in lanes):
        return None
    for index in scalars_of(access):
        sizes = sizes_of(index, access, given, tensor)
        if not sizes and index.multipliers and not _is_of_tiles(index, access, given):
            return None
        if sizes and index.text not in texts:
            axes.append((index, sizes))
    # One index alone may count the rows as well; beside another one it ends where its row does.
    which = 0 if len(axes) > 1 else -1
    return " & ".join(f"({index.text} < {sizes[which]})" for index, sizes in axes)


def _is_of_tiles(index: AddressIndex, access: MaskedAccess, given: Mapping[str, object]) -> bool:
    """Whether an index is multiplied by the width of an arange: its tiles lie side by side."""
    steps = {number_of(factor, access, given) for factor in index.multipliers}
    widths = {
        number_of(node.args[1], access, given)
        for node in ast.walk(access.function)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).split(".")[-1] == "arange"
        and len(node.args) > 1
    }
    return None not in steps and steps <= widths


def _is_split(index: AddressIndex, axes: list[tuple[AddressIndex, list[int]]]) -> bool:
    """Whether an index that holds the offset of a row was taken apart."""
    return any(one.text in index.text for one, _ in axes)


def keeps_to_axes(
    access: MaskedAccess, mask: ast.expr, given: Mapping[str, object], tensor: TensorRecord
) -> bool:
    """Whether a mask compares indices of the address with the sizes of their axes alone.

    What it leaves out is no element of the tensor then, whatever lies there.
    """
    known = {bound.condition for bound in bounds_of(access, given, tensor)}
    axes = axes_of(access, given, tensor)
    compared = list(comparisons(access, mask))
    for compare in compared:
        one, bound = compare.left, compare.comparators[0]
        if len(compare.ops) == 1 and isinstance(compare.ops[0], ast.Gt):
            one, bound = bound, one
        elif len(compare.ops) > 1 or not isinstance(compare.ops[0], ast.Lt):
            return False
        roots = roots_in(one, access.roots)
        size = number_of(bound, access, given)
        is_axis = any(
            size in sizes and roots and roots == roots_in(index.node, access.roots)
            for index, sizes in axes
        )
        if not is_axis and ast.unparse(compare) not in known:
            return False
    return bool(compared)


def _named_bounds(
    access: MaskedAccess,
    index: AddressIndex,
    indices: list[AddressIndex],
    given: Mapping[str, object],
    sizes: list[int],
) -> Iterator[Bound]:
    around = ""
    for counter, last, step in loops_around(access):
        if number_of(ast.parse(last, mode="eval").body, access, given) not in sizes:
            continue
        around = last
        told = (f"the loop around it ends at {last}",)
        if counter in _names_behind(access, index.node):
            yield Bound(index, f"{index.text} < {last}", True, told)
        elif step is not None:
            taken = counter if step == "1" else f"{counter} * {step}"
            yield Bound(index, f"{index.text} < {last} - {taken}", True, told)
    for name, value in given.items():
        if type(value) is not int or value not in sizes or name == around:
            continue
        evidence = []
        if any(
            name in names_in(factor)
            for other in indices
            for factor in other.multipliers
            if other is not index
        ):
            evidence.append(f"{name} multiplies the index of the axis before")
        if line := _compared_with(access, index, name):
            evidence.append(f"line {line} of the kernel compares the same index with {name}")
        yield Bound(index, f"{index.text} < {name}", True, tuple(evidence))


def _names_behind(access: MaskedAccess, node: ast.expr) -> set[str]:
    """Names in an expression, and those that they were made of."""
    found: set[str] = set()
    waiting = [node]
    while waiting:
        for name in names_in(waiting.pop()) - found:
            found.add(name)
            if (made := made_of(access, name)) is not None:
                waiting.append(made)
    return found


def _compared_with(access: MaskedAccess, index: AddressIndex, name: str) -> int:
    """The line, counted from that of the function, that compares that index with a name, or 0."""
    roots = roots_in(index.node, access.roots)
    for node in ast.walk(access.function):
        if isinstance(node, ast.Compare) and len(node.comparators) == 1:
            left, right = node.left, node.comparators[0]
            for one, other in ((left, right), (right, left)):
                is_name = isinstance(other, ast.Name) and other.id == name
                if is_name and roots and roots == roots_in(one, access.roots):
                    return node.lineno
    return 0


def bound_edits_of(
    source: SourceRecord, access: MaskedAccess, bounds: list[Bound]
) -> Iterator[tuple[MaskEdit, tuple[Bound, ...]]]:
    """The text with one of the bounds as one more condition."""
    for bound in bounds:
        if not _has(access, bound.condition):
            yield with_condition(source, access, bound.condition), (bound,)


def pair_edits(
    source: SourceRecord, access: MaskedAccess, bounds: list[Bound]
) -> Iterator[tuple[MaskEdit, tuple[Bound, ...]]]:
    """The text with a condition for each of two indices, the likeliest ones of each first."""
    by_index: dict[str, list[Bound]] = {}
    for bound in bounds:
        by_index.setdefault(bound.index.text, []).append(bound)
    for same in by_index.values():
        same.sort(key=lambda bound: -len(bound.evidence))
    for one, two in itertools.combinations(by_index.values(), 2):
        for pair in itertools.product(one[:_MAX_OF_PAIR], two[:_MAX_OF_PAIR]):
            text = " & ".join(f"({bound.condition})" for bound in pair)
            yield with_condition(source, access, text), pair


def _has(access: MaskedAccess, condition: str) -> bool:
    return any(ast.unparse(compare) == condition for compare in comparisons(access))


def lower_bounds(access: MaskedAccess) -> Iterator[str]:
    """`index >= 0` for each index of the address."""
    for index in indices_of(access):
        if not isinstance(index.node, ast.Name) or roots_in(index.node, access.roots):
            yield f"{index.text} >= 0"


def wider_conditions(
    source: SourceRecord, access: MaskedAccess, given: Mapping[str, object], tensor: TensorRecord
) -> Iterator[MaskEdit]:
    """The text with the size of the axis where the mask compares an index with less than that."""
    sizes = {
        size for index in indices_of(access) for size in sizes_of(index, access, given, tensor)
    }
    for compare in comparisons(access):
        if len(compare.ops) != 1 or not isinstance(compare.ops[0], ast.Lt):
            continue
        bound = compare.comparators[0]
        now = number_of(bound, access, given)
        if now is None or not roots_in(compare.left, access.roots):
            continue
        for size in sorted(size for size in sizes if size > now):
            names = [name for name, value in given.items() if value == size]
            for text in names or [str(size)]:
                yield with_comparator(source, compare, text)


# -- masks that are there --------------------------------------------------------------------------


def unused_masks(
    source: SourceRecord, access: MaskedAccess
) -> Iterator[tuple[MaskEdit, ast.expr, str]]:
    """The text with a comparison that a line before makes and nothing uses; it, and that line."""
    used = {
        node.id
        for node in ast.walk(access.function)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    }
    for node in statements_in(access.function.body):
        if not isinstance(node, ast.Assign) or node.lineno >= access.call.lineno:
            continue
        for name, value in assigned_in(node):
            is_mask = any(isinstance(part, ast.Compare) for part in ast.walk(value))
            if name and is_mask and name not in used:
                line = source.first_line + node.lineno - 1
                told = f"line {line} makes {name}, and nothing uses it"
                yield with_condition(source, access, name), value, told


def masks_beside(
    source: SourceRecord, access: MaskedAccess
) -> Iterator[tuple[MaskEdit, ast.expr, str]]:
    """The text with the mask of another access that has the same address in another tensor."""
    own = _offset_text(access)
    told: set[str] = {ast.unparse(access.mask)} if access.mask is not None else set()
    for call, operation, bases in calls_in(access.function):
        if not operation or call is access.call:
            continue
        for parameter in bases.address:
            other = replace(access, parameter=parameter, call=call, operation=operation)
            mask = other.mask
            if mask is None or ast.unparse(mask) in told or _offset_text(other) != own:
                continue
            told.add(ast.unparse(mask))
            line = source.first_line + call.lineno - 1
            yield (
                with_mask(source, access, ast.unparse(mask)),
                mask,
                f"line {line} masks the same index with `{ast.unparse(mask)}`",
            )


def _offset_text(access: MaskedAccess) -> str:
    """The indices of an address and their factors, as text; names stand for what they hold."""
    parts = (
        " * ".join((index.text, *map(ast.unparse, index.multipliers)))
        for index in indices_of(access)
    )
    return " + ".join(sorted(parts))
