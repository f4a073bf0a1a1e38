"""What a comparison of two recorded runs gives: facts that differ, and how much was compared.

`diff.py` finds them.
"""

from __future__ import annotations

import enum

import msgspec

from hypocenter.record.events import Place
from hypocenter.record.gap import Gap


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """One fact that differs.

    `what` is launch, grid, option, argument, contents, request, prompt, tokens, input, statistics
    or end; contents are those of a weight or a table.
    With prompt the runs were not given the same text, with tokens a request has got other ones;
    `good` and `bad` are digests of them then.
    `launch` counts within the step's plan; it and `kernel` are None for what belongs to a step.
    `subject` is the argument, the tensor or the option. A launch that one run alone has is "absent"
    in the other. `tensor` is the bare name of an input, of which `subject` is an element. With
    `is_name` an argument differs by the name of its tensor alone, which with `is_renamed` goes by
    its other name in all launches. Statistics with `is_rounding` are as far apart as another order
    of a sum makes them.
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
    tensor: str = ""
    is_name: bool = False
    is_renamed: bool = False
    is_rounding: bool = False

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for the same fact of several launches."""
        return self.kernel, self.what, self.subject, self.good, self.bad

    @property
    def is_of_prompts(self) -> bool:
        """Whether the runs were asked for other things, so that nothing else tells anything."""
        return self.what in ("prompt", "prompt size")

    @property
    def parts_the_runs(self) -> bool:
        """Whether the runs compute another text from there on, or one of them nothing more."""
        if self.what == "request":
            return self.subject == "count" or self.subject.endswith(
                ("first_position", "num_tokens")
            )
        return self.is_of_prompts or self.what in ("tokens", "end")

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
        if self.what == "prompt size":
            return (
                f"{where}: request {self.subject} begins with {self.good} tokens in GOOD and "
                f"{self.bad} in BAD, by another prompt or another -b; compare runs of the same "
                "command"
            )
        if self.what == "tokens":
            return f"{where}: request {self.subject} has got other tokens in BAD than in GOOD"
        what = " ".join(word for word in (self.what, self.subject) if word)
        return f"{where}: {what}: {self.good} in GOOD, {self.bad} in BAD"


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """A launch of BAD beside that of GOOD, or what comes before all launches of a step.

    `place` is None then. `facts` are what it was asked for and differs, `results` what it wrote
    and differs, of `num_results` that were compared.
    """

    step: int
    place: Place | None = None
    facts: tuple[Difference, ...] = ()
    results: tuple[Difference, ...] = ()
    num_results: int = 0

    @property
    def differences(self) -> tuple[Difference, ...]:
        return self.facts + self.results

    @property
    def wrong(self) -> Difference | None:
        """The first result that is another one, and not by rounding alone."""
        return next((result for result in self.results if not result.is_rounding), None)


class Answers(enum.StrEnum):
    """Whether two runs gave all their requests the same."""

    SAME = "same"
    DIFFERENT = "different"
    #: One of them ended before, or their digests have different keys.
    UNKNOWN = "unknown"


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
    be compared. `answers` is of the requests' tokens, `texts` of what was made of these.
    `was_asked_alike`: the same texts and conversations came in, so that other tokens are our own
    doing.
    """

    differences: tuple[Difference, ...]
    compared: Compared
    around: tuple[str, ...] = ()
    unseen: tuple[Gap, ...] = ()
    answers: Answers = Answers.UNKNOWN
    texts: Answers = Answers.UNKNOWN
    was_asked_alike: bool = False

    @property
    def first(self) -> Difference | None:
        return self.differences[0] if self.differences else None
