"""Launches of a user's file that have a reference: run on the CPU, checked, and held against it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hypocenter.check.launches import Launches
from hypocenter.check.report import CheckedLaunch
from hypocenter.replay.findings import Finding as AccessFinding
from hypocenter.replay.findings import Headroom
from hypocenter.verify.outcome import Mistake
from hypocenter.verify.own.numbers import BadReference, Held, hold
from hypocenter.verify.own.reference import Reference, reference_of

_MOST_FINDINGS = 8


@dataclass(slots=True)
class SeenKernel:
    """What was seen of one kernel."""

    name: str
    num_launches: int = 0
    num_held: int = 0
    num_planted: int = 0
    num_seen: int = 0
    worst: float = 0.0
    findings: list[Mistake] | None = None
    why_not: list[str] | None = None

    def tell(self, finding: Mistake) -> None:
        self.findings = [*(self.findings or ()), finding][:_MOST_FINDINGS]

    def leave(self, why: str) -> None:
        if why not in (self.why_not or ()):
            self.why_not = [*(self.why_not or ()), why]


class HeldLaunches(Launches):
    """Replays launches as `hypo check` does, and holds each against its kernel's reference.

    Accesses that are wrong are findings too. `failed` is the last launch that was wrong, by the
    numbers and shapes that it was made with.
    """

    def __init__(self, budget_seconds: float) -> None:
        super().__init__(budget_seconds, self._note)
        self.kernels: dict[str, SeenKernel] = {}
        self.num_wrong = 0
        self._now = ""

    def kernel(self, name: str) -> SeenKernel:
        """What was seen of the kernel of a name."""
        return self.kernels.setdefault(name, SeenKernel(name))

    def _note(self, record: CheckedLaunch | AccessFinding | Headroom) -> None:
        if isinstance(record, AccessFinding):
            self.num_wrong += 1
            at = f"{record.file}:{record.line}" if record.file else record.kernel
            of = f"{record.operation} of {record.argument}" if record.argument else record.operation
            what = f"{record.kind}: {of}; {record.detail}"
            self.kernel(record.kernel).tell(Mistake(what, at, {"kind": str(record.kind)}))

    def launch(self, jit: Any, args: tuple[Any, ...], grid: Any, kwargs: dict[str, Any]) -> None:
        """Replay one launch of `jit`, and hold what it leaves against the reference."""
        kernel, reference = self.kernel(jit.__name__), reference_of(jit)
        kernel.num_launches += 1
        if reference is None:
            kernel.leave("no reference stands beside it")
            super().launch(jit, args, grid, kwargs)
            return
        known = {name: value for name, value in kwargs.items() if name in jit.arg_names}
        bound = inspect.signature(jit.fn).bind_partial(*args, **known)
        bound.apply_defaults()
        arguments = dict(bound.arguments)
        tensors = {n: item for n, item in arguments.items() if isinstance(item, torch.Tensor)}
        before = {**arguments, **{name: item.clone() for name, item in tensors.items()}}
        super().launch(jit, args, grid, kwargs)
        if not self._is_complete:
            kernel.leave("not all programs of a launch ran within --budget")
            return
        self._hold(kernel, reference, before, tensors)

    def _hold(
        self,
        kernel: SeenKernel,
        reference: Reference,
        before: Mapping[str, Any],
        after: Mapping[str, torch.Tensor],
    ) -> None:
        try:
            found = hold(reference, before, after)
        except BadReference as error:
            kernel.leave(f"its reference cannot be used: {error}")
            return
        kernel.num_held += 1
        wrong = [item for item in found if item.share > 1]
        if wrong:
            self.num_wrong += 1
            kernel.tell(_finding(kernel.name, before, wrong[0], self._configuration))
            return
        kernel.worst = max([kernel.worst, *(item.share for item in found)])
        if found:
            kernel.num_planted += 1
            kernel.num_seen += _is_seen(reference, before, after, found[0])


def _is_seen(
    reference: Reference, before: Mapping[str, Any], after: Mapping[str, torch.Tensor], held: Held
) -> bool:
    """Whether an error of twice the bound in one number is seen."""
    changed = after[held.name].clone()
    if not changed.numel():
        return True
    if changed.dtype.is_floating_point:
        step = 2.5 * held.bound + 2.0**-6 * held.bound
        changed[held.place] = held.exact + max(step, abs(held.exact) * 2.0**-6)
    else:
        changed[held.place] += 1
    planted = hold(reference, before, {**after, held.name: changed})
    return any(item.share > 1 for item in planted)


def _finding(
    kernel: str, before: Mapping[str, Any], held: Held, configuration: str | None
) -> Mistake:
    place = ", ".join(map(str, held.place))
    what = f"{held.name}[{place}] is {held.got:.9g}, and {held.exact:.9g} by its reference"
    details: dict[str, Any] = {"launch": launch_text(before), "times_its_bound": held.share}
    if configuration:
        details["configuration"] = configuration
    return Mistake(what, f"{kernel}({launch_text(before)})", details)


def launch_text(arguments: Mapping[str, Any]) -> str:
    """The arguments of a launch for people: numbers, and types and shapes of tensors."""
    return ", ".join(f"{name}={_argument_text(value)}" for name, value in arguments.items())


def _argument_text(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return repr(value)


def smaller(
    numbers: Mapping[str, Any], choices: Mapping[str, tuple[int, ...]]
) -> Iterator[dict[str, Any]]:
    """Launches that are one step smaller: each number less by half or by one, or its next choice
    where only choices are allowed."""
    for name, value in numbers.items():
        allowed = choices.get(name)
        if allowed is None:
            steps = [
                item for item in dict.fromkeys((1, value // 2, value - 1)) if 1 <= item < value
            ]
        else:
            steps = sorted(item for item in allowed if item < value)
        for item in steps:
            yield {**numbers, name: item}


def shrink(
    numbers: dict[str, Any],
    choices: Mapping[str, tuple[int, ...]],
    is_wrong: Callable[[dict[str, Any]], bool],
    most: int = 60,
) -> dict[str, Any]:
    """The smallest numbers that are reached by steps that stay wrong, in at most so many tries."""
    found, left = numbers, most
    while left > 0:
        for item in smaller(found, choices):
            left -= 1
            if is_wrong(item):
                found = item
                break
            if left <= 0:
                break
        else:
            break
    return found
