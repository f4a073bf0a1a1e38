"""`hypo diff` of two traces: where they part, how that grows, and which one float64 agrees with.

Compares by `trace/comparing.py` and judges by `engine/float64_steps.py`; runs no model.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from hypocenter.base.errors import EXIT_GATE, EXIT_USAGE, HypoError, UsageError
from hypocenter.cli.output import show, show_json
from hypocenter.engine.float64_steps import Float64Steps, NotComputed, limit_of
from hypocenter.model.gguf.file import open_gguf
from hypocenter.trace.comparing import PointDistance, TraceDiff, compare
from hypocenter.trace.points import ModelTrace, PointPlace, TracedStep
from hypocenter.trace.reading import is_trace, read_trace

#: A step of both traces, and the point of it.
_Differing = tuple[tuple[TracedStep, TracedStep], PointPlace]


class PointErrors(msgspec.Struct, frozen=True):
    """How far A and B are from float64 at a point, each computed from its own inputs."""

    step: int
    name: str
    layer: int | None
    of_a: float
    of_b: float
    limit: float

    @property
    def text(self) -> str:
        return self.name if self.layer is None else f"{self.name} of layer {self.layer}"

    @property
    def wrong(self) -> str:
        """Who float64 does not agree with: "", "A", "B" or "AB"."""
        errors = {"A": self.of_a, "B": self.of_b}
        return "".join(name for name, error in errors.items() if not error <= self.limit)


class TraceFindings(msgspec.Struct, frozen=True):
    """The result of `hypo diff` of traces. `first_wrong` is the first point at which float64 does
    not agree with one of the two; `at_first` is what it says of the first point that differs.
    `not_judged` says why float64 was not asked."""

    diff: TraceDiff
    at_first: PointErrors | None
    first_wrong: PointErrors | None
    num_judged: int
    not_judged: str


def are_traces(a: str, b: str) -> bool:
    """Whether both are traces; raises UsageError where only one is."""
    found = [is_trace(Path(name)) for name in (a, b)]
    if any(found) and not all(found):
        other = (a, b)[found.index(False)]
        raise UsageError(f"{other} is no trace, and the other one is; compare like with like")
    return all(found)


def diff_traces(a: str, b: str, *, as_json: bool) -> None:
    """Compare and print; leaves with EXIT_GATE when they differ by more than rounding, and with
    EXIT_USAGE when nothing can be compared."""
    traces = read_trace(Path(a)), read_trace(Path(b))
    found = examine(*traces)
    if as_json:
        show_json(found)
    else:
        show("\n".join(lines_of(found, *traces)))
    if found.diff.is_empty:
        sys.exit(EXIT_USAGE)
    if found.diff.first_beyond is not None or found.diff.unlike or found.diff.missing:
        sys.exit(EXIT_GATE)


def examine(a: ModelTrace, b: ModelTrace) -> TraceFindings:
    """Compare two traces, and ask float64 about the points at which they differ."""
    diff = compare(a, b)
    at_first = first_wrong = None
    num_judged, reason = 0, ""
    with contextlib.ExitStack() as stack:
        try:
            judges = [
                Float64Steps(stack.enter_context(open_gguf(trace.header.model)), trace)
                for trace in (a, b)
            ]
        except HypoError as error:  # there is no such file here, or no such form
            return TraceFindings(diff, None, None, 0, str(error))
        for steps, place in _differing(a, b, diff):
            try:
                judged = _judge(judges, steps, place)
            except NotComputed as error:
                reason = reason or str(error)
                continue
            num_judged += 1
            first = diff.first_beyond or diff.first
            assert first is not None
            if (judged.step, (judged.name, judged.layer)) == (first.step, first.place):
                at_first = judged
            if judged.wrong:
                first_wrong = judged
                break
    return TraceFindings(diff, at_first, first_wrong, num_judged, reason)


def _differing(
    a: ModelTrace, b: ModelTrace, diff: TraceDiff
) -> Iterator[tuple[tuple[TracedStep, TracedStep], PointPlace]]:
    """The points of both at which bits differ, in order, from the first one on."""
    of_b = {step.step: step for step in b.steps}
    if diff.first is None:
        return
    for step in a.steps:
        other = of_b.get(step.step)
        if other is None or step.step < diff.first.step:
            continue
        if step.token_ids != other.token_ids or step.positions != other.positions:
            return
        for place, point in step.points.items():
            if place in other.points and other.points[place].digest != point.digest:
                yield (step, other), place


def _judge(
    judges: list[Float64Steps], steps: tuple[TracedStep, TracedStep], place: PointPlace
) -> PointErrors:
    of_a, of_b = (judge.error(step, *place) for judge, step in zip(judges, steps, strict=True))
    name, layer = place
    return PointErrors(steps[0].step, name, layer, of_a, of_b, limit_of(name))


def lines_of(found: TraceFindings, a: ModelTrace, b: ModelTrace) -> Iterator[str]:
    """The result in words: the first point first, what was compared last."""
    diff = found.diff
    for name, trace in (("A", a), ("B", b)):
        if not trace.is_whole:
            yield f"{name} ends in the middle of a line: its run died"
    if diff.unlike:
        yield f"{diff.unlike} in B, so what follows it cannot be compared"
    if diff.is_empty:
        yield "nothing can be compared: the two have no point of a step in common"
    elif diff.is_equal:
        yield "no difference"
    elif diff.first is None and not diff.unlike:
        yield "the two were not traced alike; what both have is equal in all bits"
    if diff.first is not None:
        if diff.first_beyond is None:
            yield f"bits differ first {_at(diff.first)}; nowhere by more than rounding of f32"
        else:
            if diff.first != diff.first_beyond:
                yield f"bits differ first {_at(diff.first)}, by rounding of f32"
            yield f"they part {_at(diff.first_beyond)}{_what(diff.first_beyond)}"
        yield from _growth(diff)
    yield from _judgement(found, a, b)
    yield from diff.missing[:4]
    if len(diff.missing) > 4:
        yield f"and {len(diff.missing) - 4} more that only one of the two has"
    yield (
        f"compared {diff.num_points} points of {diff.num_steps} steps; {diff.num_equal} are equal "
        "in all bits"
    )


def _at(apart: PointDistance) -> str:
    if apart.is_of_bits:
        return f"at {apart.text}, step {apart.step}: only signs of zeros, or payloads of NaN"
    about = "about " if apart.is_estimate else ""
    return f"at {apart.text}, step {apart.step}: {about}{_percent(apart.relative)} apart"


def _what(apart: PointDistance) -> str:
    return f"; {apart.what}" if apart.what else ""


def _growth(diff: TraceDiff) -> Iterator[str]:
    """How far what each layer gives is apart, in the step of the first difference."""
    of_layers = [each for each in diff.growth if each.name == "layer_out"]
    ends = [each for each in diff.growth if each.name == "logits"]
    if of_layers:
        shown = of_layers
        if len(shown) > 16:
            shown = [*of_layers[:8], *of_layers[-8:]]
        numbers = ", ".join(f"{each.layer}: {_percent(each.relative)}" for each in shown)
        yield f"how it grows, by what each layer gives: {numbers}"
    for each in ends:
        yield f"logits of step {each.step} are {_percent(each.relative)} apart"


def _judgement(found: TraceFindings, a: ModelTrace, b: ModelTrace) -> Iterator[str]:
    wrong = found.first_wrong
    if wrong is not None:
        errors = f"A is {_percent(wrong.of_a)} off, B {_percent(wrong.of_b)}"
        where = f"{wrong.text}, step {wrong.step}"
        if wrong.wrong == "AB":
            yield f"float64 agrees with neither at {where}: {errors}"
        else:
            right = "A" if wrong.wrong == "B" else "B"
            yield f"float64 agrees with {right} and not with {wrong.wrong} at {where}: {errors}"
    elif found.num_judged:
        yield (
            f"float64 agrees with both at all {found.num_judged} points that differ and that it "
            "was asked about: each op does what its own inputs and weights ask"
        )
        if at := found.at_first:
            yield f"at {at.text} A is {_percent(at.of_a)} off, B {_percent(at.of_b)}"
        if a.header.model != b.header.model:
            yield "the two were run with different model files, and each was asked of its own"
    if found.not_judged and found.diff.first is not None:
        yield f"float64 was not asked{' everywhere' * bool(found.num_judged)}: {found.not_judged}"


def _percent(relative: float) -> str:
    return f"{100 * relative:.2g} %"
