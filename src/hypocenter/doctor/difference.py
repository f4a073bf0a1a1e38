"""What a comparison of two recorded runs gives: facts that differ, and how much was compared.

`diff.py` finds them.
"""

from __future__ import annotations

import msgspec

from hypocenter.record.events import Place
from hypocenter.record.gap import Gap


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """One fact that differs.

    `what` is launch, grid, option, argument, request, prompt, tokens, input, statistics or end.
    With prompt the runs were not given the same text, with tokens a request has got other ones;
    `good` and `bad` are digests of them then.
    `launch` counts within the step's plan; it and `kernel` are None for what belongs to a step.
    `subject` is the argument, the tensor or the option.
    """

    step: int
    what: str
    subject: str
    good: str
    bad: str
    plan: str = ""
    launch: int | None = None
    kernel: str | None = None
    place: Place | None = None

    @property
    def text(self) -> str:
        where = f"step {self.step}"
        if self.launch is not None:
            where += f", launch {self.launch} ({self.kernel})"
        if self.what == "prompt":
            return (
                f"{where}: the two runs were given different prompts (request {self.subject}); "
                "compare runs of the same command"
            )
        if self.what == "tokens":
            return f"{where}: request {self.subject} has got other tokens in BAD than in GOOD"
        what = " ".join(word for word in (self.what, self.subject) if word)
        return f"{where}: {what}: {self.good} in GOOD, {self.bad} in BAD"


class Compared(msgspec.Struct, frozen=True):
    """How much both runs have, and was compared up to the first difference."""

    num_steps: int
    num_launches: int
    num_arguments: int
    num_inputs: int
    num_statistics: int


class RunDiff(msgspec.Struct, frozen=True):
    """`differences` are those of the first launch or step that differs, the first one first.

    `around` tells what differs beside the launches (sources, versions), `unseen` what could not
    be compared.
    """

    differences: tuple[Difference, ...]
    compared: Compared
    around: tuple[str, ...] = ()
    unseen: tuple[Gap, ...] = ()

    @property
    def first(self) -> Difference | None:
        return self.differences[0] if self.differences else None
