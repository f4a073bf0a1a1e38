"""Which reads of undefined memory count: those with which a launch writes something else.

Decided by trial, with other numbers there. Runs nothing itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

from hypocenter.replay.arguments import Argument
from hypocenter.replay.corrections import written_bytes
from hypocenter.replay.findings import Finding, FindingKind

#: Above what any program computes with: who fills an element takes the largest of its type.
_LARGE = math.inf

_Key = TypeVar("_Key", bound=Hashable)

#: What a launch does with a number in the undefined elements of each argument, where None is NaN
#: and infinity the largest number of the argument's type; None where that cannot be told.
Results = Callable[[Mapping[str, float | None]], Sequence[Any] | None]


def without_harmless(
    findings: Sequence[Finding], done: Sequence[Argument], results: Results
) -> list[Finding]:
    """The findings of a launch that ran whole, without reads that reach no result.

    That is what a mask is for. They reach one if it is another with other numbers there: zeros,
    NaN, large ones, which a maximum takes where it leaves NaN out. Of several arguments each is
    looked at alone, the others holding zeros. `done` is what became of the launch's arguments.
    """
    undefined = {f.argument or "" for f in findings if f.kind == FindingKind.UNINITIALISED_READ}
    spared = harmless(undefined, results) if undefined and _tells_results(done) else set()
    return [
        finding
        for finding in findings
        if finding.kind != FindingKind.UNINITIALISED_READ or finding.argument not in spared
    ]


def results_in(done: Sequence[Argument]) -> list[bytes]:
    """What a launch wrote, tensor by tensor."""
    return [written_bytes(argument) for argument in done if argument.was_written]


def harmless(
    undefined: set[_Key], results: Callable[[Mapping[_Key, float | None]], Sequence[Any] | None]
) -> set[_Key]:
    """Those of `undefined` that reach no result; `results` is as `Results`, by whatever names
    them."""
    zeros = dict.fromkeys(undefined, 0.0)
    wanted = results(zeros)
    if wanted is None:
        return set()

    def reaches(names: set[_Key]) -> bool:
        numbers = (None, _LARGE, -_LARGE)
        return any(results(zeros | dict.fromkeys(names, number)) != wanted for number in numbers)

    if not reaches(undefined):
        return undefined
    alone = {name for name in undefined if len(undefined) > 1 and not reaches({name})}
    return alone if alone != undefined else set()


def _tells_results(done: Sequence[Argument]) -> bool:
    """Whether the launch wrote something, and all that it wrote is there to be looked at."""
    stored = [argument for argument in done if argument.was_written or argument.store_seen]
    return bool(stored) and all(argument.region.data is not None for argument in stored)
