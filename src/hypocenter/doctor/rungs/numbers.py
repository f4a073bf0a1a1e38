"""Rung: numbers that a kernel got beside its tensors: strides, and the width of its offsets.

A kernel's parameter `x_stride` is taken for the first stride of what is passed for `x_ptr`, and
`WIDE` for whether offsets have 64 bits; other names are nobody's business here.
"""

from __future__ import annotations

from collections.abc import Iterator

from hypocenter.base.tensor import Tensor, span_of
from hypocenter.contracts.registry import recorded_contract
from hypocenter.doctor.case import Case
from hypocenter.doctor.causes import Blame, Cause
from hypocenter.doctor.diagnosis import Claim, Proof, RootCause, Verdict, proven, row
from hypocenter.doctor.rungs.contracts import rebuilt_facts
from hypocenter.record.bundle_index import LaunchMade

NAME = "numbers"
_WIDE_ELEMENTS = 1 << 31


def numbers(case: Case) -> list[Claim]:
    """Strides that are not the tensor's, and 32-bit offsets for tensors that need more."""
    claims: list[Claim] = []
    seen: set[object] = set()
    num_strides = 0
    for use in case.launches:
        if id(use.launch) in seen:
            continue
        seen.add(id(use.launch))
        strides = list(_strides(case, use))
        num_strides += len(strides)
        for parameter, given, fact, right in strides:
            key = (use.launch.kernel, parameter)
            if given != right and key not in seen:
                seen.add(key)
                claims.append(_wrong_stride(case, use, parameter, given, fact, right))
        if (use.launch.kernel, "WIDE") not in seen and (claim := _narrow(case, use)):
            seen.add((use.launch.kernel, "WIDE"))
            claims.append(claim)
    if num_strides and not claims:
        claims.append(
            row(
                Cause.WRONG_STRIDE,
                Verdict.REFUTED,
                NAME,
                f"all {num_strides} strides that kernels got are those of their tensors",
                would_refute="a stride that is not its tensor's",
            )
        )
    return claims


def _strides(case: Case, use: LaunchMade) -> Iterator[tuple[str, int, str, int]]:
    """(parameter, what was passed, the tensor's parameter, its first stride)."""
    for arg in use.launch.arguments:
        base = arg.name.removesuffix("_stride")
        if base == arg.name or not isinstance(arg.value, int):
            continue
        tensor = case.tensor_of(use.launch, f"{base}_ptr")
        if tensor is not None and len(tensor.shape) > 1 and tensor.shape[0] > 1:
            yield arg.name, arg.value, f"{base}_ptr", tensor.strides[0]


def _wrong_stride(
    case: Case, use: LaunchMade, parameter: str, given: int, pointer: str, right: int
) -> Claim:
    launch = use.launch
    tensor = case.tensor_of(launch, pointer)
    assert tensor is not None
    fact = case.fact_of(launch, pointer)
    rows = tensor.shape[0]
    span = span_of(tensor.shape, tensor.strides)
    reach = (rows - 1) * given + span - (rows - 1) * right
    text = (
        f"{parameter} is {given}, but the rows of {fact} ({tensor.name}, shape {tensor.shape}) lie "
        f"{right} elements apart"
    )
    far = f"row {rows - 1} is looked for at element {(rows - 1) * given} of {span}"
    if reach > span:
        far += f": {reach - span} elements beyond the tensor"
    access = case.access(launch, parameter) or case.access(launch, fact)
    root = RootCause(
        cause=Cause.WRONG_STRIDE,
        blames=Blame.LAUNCH,
        sentence=f"{launch.kernel}: {text}",
        fix=f"Pass {parameter} = {right} (the first stride of {tensor.name}) instead of {given}",
        proof=Proof(
            f"{text}; {far}",
            f"{parameter} = {right}",
            f"with {parameter} = {right} row {rows - 1} begins at element {(rows - 1) * right}, "
            f"where the tensor has it, and the last element used is {span - 1} of {span}",
        ),
        kernel=launch.kernel,
        argument=fact,
        tensor=tensor.name,
        place=use.place,
    ).at(access)
    return proven(
        root,
        NAME,
        (f"{use.where}: {text}",),
        f"a kernel for which {parameter} is no stride",
        use.seq,
        (tensor.id,),
    )


def _narrow(case: Case, use: LaunchMade) -> Claim | None:
    """A kernel told to use 32-bit offsets on a tensor of 2**31 elements or more."""
    launch = use.launch
    if launch.constants.get("WIDE") is not False:
        return None
    contract = recorded_contract(case.bundle, launch)
    facts = rebuilt_facts(case, launch, use.seq) if contract is not None else None
    if contract is None or facts is None or not contract.needs_int64(**facts):
        return None
    sizes = {
        name: span_of(fact.shape, fact.strides)
        for name, fact in facts.items()
        if isinstance(fact, Tensor) and fact.num_elements
    }
    name = max(sizes, key=lambda name: sizes[name])
    tensor = case.tensor_of(launch, name)
    text = (
        f"WIDE is False, so offsets have 32 bits, but {name} "
        f"({tensor.name if tensor else '?'}) spans {sizes[name]} elements and 32 bits reach "
        f"{_WIDE_ELEMENTS - 1}"
    )
    access = case.access(launch, name)
    root = RootCause(
        cause=Cause.OFFSET_OVERFLOW,
        blames=Blame.LAUNCH,
        sentence=f"{launch.kernel}: {text}",
        fix=f"Launch the 64-bit variant of {launch.kernel} (WIDE = True) for tensors of 2**31 "
        "elements or more",
        proof=Proof(
            text,
            "WIDE = True",
            f"element {sizes[name] - 1} of {name} is {sizes[name] - 1 - (1 << 32)} in 32 bits and "
            f"itself in 64"
            if sizes[name] > 1 << 31
            else "64-bit offsets reach every element",
        ),
        kernel=launch.kernel,
        argument=name,
        tensor=tensor.name if tensor else None,
        place=use.place,
    ).at(access)
    return proven(
        root,
        NAME,
        (f"{use.where}: {text}",),
        "a tensor of fewer elements",
        use.seq,
        (tensor.id,) if tensor else (),
    )
