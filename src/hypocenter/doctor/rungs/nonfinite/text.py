"""What is said of an operation that gave NaN or infinity; decides nothing."""

from __future__ import annotations

from hypocenter.record.nonfinite import (
    ChangedFact,
    NonFinite,
    NonFiniteReached,
    NumberEnd,
    NumberKind,
    Operand,
)

_WAYS = {
    NumberEnd.READ: "the host read {value} at {site}",
    NumberEnd.PARAMETER: "a parameter became {value} at {site}",
    NumberEnd.ENDED: "the program ended at {site}, where it found {value}",
}


def operation_text(event: NonFinite) -> str:
    """`div`, or `div of SqrtBackward0`."""
    return f"{event.operation} of {event.node}" if event.node else event.operation


def value_text(value: float) -> str:
    """A number as a person writes it."""
    if value != value:
        return "NaN"
    if value in (float("inf"), float("-inf")):
        return "infinity" if value > 0 else "-infinity"
    return f"{value:.6g}"


def _operand_text(operand: Operand) -> str:
    at = f"{list(operand.index)}" if operand.shape else ""
    return f"{operand.name}{at} = {value_text(operand.value)}"


def _operands_text(event: NonFinite) -> str:
    return ", ".join(map(_operand_text, event.operands))


def where_text(event: NonFinite) -> str:
    """Which element of which result."""
    result = event.result
    shape = "x".join(map(str, result.shape)) or "one number"
    return (
        f"{value_text(result.value)} at {list(result.index)} of a result of {result.dtype}, "
        f"{shape} ({event.num_nan} NaN and {event.num_inf} infinite of {event.num_elements})"
    )


def sentence_of(event: NonFinite, unsure: str = "") -> str:
    """What the operation did, with the values that it read there.

    `unsure`: why what came in may have been made by another operation.
    """
    told = f"{operation_text(event)} at {event.site or 'a line that is not known'}"
    if event.kind is NumberKind.GIVEN:
        why = (
            f"but {unsure}: whether it came in with the data is not known"
            if unsure
            else "so it came in with the data"
        )
        return (
            f"{_operand_text(event.result)} was there before {told} read it; no operation that was "
            f"seen had made it, {why}"
        )
    if event.kind is NumberKind.UNDEFINED:
        return (
            f"{told} read {event.result.name}{list(event.result.index)}, which nobody had written "
            f"since it was made at {event.made_at}"
        )
    values = _operands_text(event)
    of = f" of {values}" if values else ""
    why = _WHY.get(event.kind, "")
    text = f"{told} gave {where_text(event)}{of}"
    if event.kind is NumberKind.OVERFLOW:
        return f"{text}: {_overflow_text(event)}"
    return f"{text}: {why}" if why else text


def _overflow_text(event: NonFinite) -> str:
    limit = f"{event.result.dtype} holds at most {value_text(event.limit or 0.0)}"
    if event.exact is None:
        return f"an overflow, {limit}, and no wider type of torch holds it either"
    if abs(event.exact) > (event.limit or 0.0):
        return f"an overflow, it is {value_text(event.exact)}, and {limit}"
    return (
        f"an overflow on the way: the result is {value_text(event.exact)}, but what is summed up "
        f"to it exceeds {event.result.dtype}"
    )


_WHY = {
    NumberKind.ZERO_OVER_ZERO: "zero was divided by zero",
    NumberKind.OVER_ZERO: "a number was divided by zero",
    NumberKind.LOG_OF_ZERO: "the logarithm of zero",
    NumberKind.LOG_OF_NEGATIVE: "the logarithm of a negative number",
    NumberKind.ROOT_OF_NEGATIVE: "the root of a negative number",
    NumberKind.POWER_OF_NEGATIVE: "a negative number to a power that is not whole",
    NumberKind.OUTSIDE_DOMAIN: "the argument lies outside the domain of the function",
    NumberKind.INF_MINUS_INF: "infinity less infinity",
    NumberKind.ZERO_TIMES_INF: "zero times infinity",
    NumberKind.INF_OVER_INF: "infinity over infinity",
    NumberKind.MASKED_ROW: "a row is masked whole, so each of its entries is -infinity",
    NumberKind.NO_ELEMENTS: "the mean of no element is 0 / 0",
    NumberKind.TOO_FEW: "there are too few elements for a variance, which divides by their number "
    "less the correction",
    NumberKind.ALL_IGNORED: "each target is ignored, so the loss divides by zero",
}

_FIXES = {
    NumberKind.ZERO_OVER_ZERO: "Keep the denominator from zero",
    NumberKind.OVER_ZERO: "Keep the denominator from zero",
    NumberKind.LOG_OF_ZERO: "Keep the argument above zero",
    NumberKind.LOG_OF_NEGATIVE: "Keep the argument above zero",
    NumberKind.ROOT_OF_NEGATIVE: "Keep the argument from falling below zero",
    NumberKind.POWER_OF_NEGATIVE: "Keep the base from falling below zero",
    NumberKind.OUTSIDE_DOMAIN: "Keep the argument inside the domain",
    NumberKind.INF_MINUS_INF: "Keep both infinities out of it",
    NumberKind.ZERO_TIMES_INF: "Keep the infinity out of it",
    NumberKind.INF_OVER_INF: "Keep both infinities out of it",
    NumberKind.MASKED_ROW: "Leave at least one key of each row unmasked, or skip such rows",
}


def fix_text(event: NonFinite) -> str:
    """What was tried in place of what was done."""
    if event.kind is NumberKind.OVERFLOW:
        return f"Compute {operation_text(event)} in a wider type than {event.result.dtype}"
    text = _FIXES.get(event.kind, "")
    if event.node:
        return f"{text}, in the forward pass: {event.node} reads it there"
    return text


_CHANGES = {
    ChangedFact.DENOMINATOR: "1 in place of each zero in the denominator",
    ChangedFact.CLAMPED: "its argument kept inside the domain",
    ChangedFact.UNMASKED: "0 in place of each -infinity",
    ChangedFact.FINITE_INPUTS: "1 and -1 in place of the infinities, 0 in place of NaN",
}


def change_text(event: NonFinite) -> str:
    """The one fact that was changed."""
    if event.change is ChangedFact.WIDER_TYPE:
        return f"the same inputs in {event.wide}"
    return _CHANGES.get(event.change, "")


def link_text(event: NonFinite) -> str:
    """One step of the way from the first number to the last."""
    if event.kind is NumberKind.GIVEN and event.result.value == event.result.value:
        return (
            f"{value_text(event.result.value)} is meant: it stands at {event.site} "
            f"({event.operation})"
        )
    return f"then {sentence_of(event)}"


def reached_text(event: NonFiniteReached) -> str:
    """Where it came out."""
    return _WAYS[event.how].format(value=value_text(event.value), site=event.site or "its end")
