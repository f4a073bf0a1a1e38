"""The operation inside a Triton kernel that made NaN or infinity, by a replay of its launch with
what that was given."""

from __future__ import annotations

from hypocenter.base.errors import HypoError, MissingPackage
from hypocenter.doctor.case import Case
from hypocenter.doctor.causes import Cause
from hypocenter.doctor.diagnosis import Proof, RootCause
from hypocenter.doctor.rungs.nonfinite.text import value_text
from hypocenter.record.bundle_index import LaunchMade
from hypocenter.record.nonfinite import NonFinite

#: Names of NumPy's functions, by which Triton's interpreter computes, and what they do.
_DOES = {
    "subtract": "a difference",
    "add": "a sum",
    "multiply": "a product",
    "divide": "a quotient",
    "true_divide": "a quotient",
    "exp": "an exponential",
    "exp2": "an exponential",
    "log": "a logarithm",
    "log2": "a logarithm",
    "sqrt": "a root",
    "dot": "a product of matrices",
    "fma": "a product and a sum",
    "cast": "a change of type",
}
_MINUS, _TIMES, _OVER = ("subtract", "add"), ("multiply", "fma", "dot"), ("divide", "true_divide")


def claim_of_kernel(case: Case, event: NonFinite) -> RootCause | str:
    """The root cause inside the kernel of a launch; else why none was found."""
    use = next((use for use in case.launches if use.seq == event.launched), None)
    if use is None or use.place is None:
        return "its launch was not kept"
    try:
        from hypocenter.replay.numbers import trace_numbers

        trace = trace_numbers(
            case.index,
            use.place,
            event.result.name,
            event.result.index,
            allow_source=case.allow_source,
        )
    except (HypoError, MissingPackage, ImportError) as error:
        return f"it was not replayed: {error}"
    if trace is None:
        return "a replay of the launch shows no single operation that leads to it"
    step, site = trace.step, trace.step.sites[0]
    at = f"program {step.program}, lane {list(step.lane)}"
    shown = " and ".join(map(value_text, step.operands))
    gave = f"`{site.expression}` is {value_text(step.value)}"
    gave += f", {_DOES.get(step.operation, step.operation)} of {shown}" if shown else ""
    why = why_text(step.operation, step.operands, step.value)
    argument, index = event.result.name, list(event.result.index)
    return RootCause(
        cause=Cause.NONFINITE_VALUE,
        sentence=f"{use.launch.kernel}: {gave} ({at}, {step.num_lanes} lanes){why}; "
        f"{argument}{index} becomes {value_text(trace.stored)}",
        fix=f"Keep `{site.expression}` finite, as for {shown or 'such lanes'}",
        proof=Proof(
            f"replayed with what it was given, {use.where} stores {value_text(trace.stored)} into "
            f"{argument}{index}",
            f"0 in place of what `{site.expression}` gives in these lanes",
            f"the same program stores {value_text(trace.changed)} there",
        ),
        kernel=use.launch.kernel,
        argument=argument,
        tensor=_tensor_name(case, use, argument),
        file=site.file,
        line=site.line,
        expression=site.expression,
        place=use.place,
    )


def _tensor_name(case: Case, use: LaunchMade, argument: str) -> str | None:
    tensor = case.tensor_of(use.launch, argument)
    return tensor.name if tensor is not None else None


def why_text(operation: str, operands: tuple[float, ...], value: float) -> str:
    """What such an operation of such numbers is, where it is one of the known kinds."""
    inf = float("inf")
    infinite = [x for x in operands if x in (inf, -inf)]
    if operation in _MINUS and len(infinite) == 2:
        if operation == "subtract" and infinite == [-inf, -inf]:
            return ": -infinity less -infinity, as where every entry of a row is masked"
        return ": infinity less infinity"
    if operation in _OVER and operands and operands[-1] == 0:
        return ": zero over zero" if operands[0] == 0 else ": a division by zero"
    if operation in _OVER and len(infinite) == 2:
        return ": infinity over infinity"
    if operation in _TIMES and infinite and 0.0 in operands:
        return ": zero times infinity"
    if operation.startswith("log") and operands:
        return ": the logarithm of zero" if operands[0] == 0 else ": that of a negative number"
    if operation == "sqrt" and operands and operands[0] < 0:
        return ": the root of a negative number"
    return ": an overflow" if value in (inf, -inf) and not infinite else ""
