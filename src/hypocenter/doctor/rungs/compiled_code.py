"""Rung: launches whose results are not what their replay gives: the compiler, or the GPU itself.

Of a run with `--suspect` small launches are known with all that they were given and gave, and were
made again on copies. A difference alone proves nothing. The proof is the same launch made anew on
a GPU of this machine, as it was and from other code.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from hypocenter.base.cards import Card
from hypocenter.base.errors import HypoError, MissingPackage
from hypocenter.base.wording import count_text
from hypocenter.doctor.case import Case
from hypocenter.doctor.causes import Cause
from hypocenter.doctor.diagnosis import Claim, Proof, RootCause, Verdict, proven, row
from hypocenter.doctor.run_environment import card_text
from hypocenter.record.bundle_index import LaunchMade
from hypocenter.record.contents import LaunchOutcome
from hypocenter.record.gap import Gap
from hypocenter.replay.forms import Ran, RunForm, other_forms, with_other_warps

if TYPE_CHECKING:
    from hypocenter.replay.compare import Differing, ReplayedOutcome

NAME = "compiled code"
#: Seconds of one replay, and of all of them together.
REPLAY_SECONDS, RUNG_SECONDS = 2.0, 8.0
#: How often a launch is made on each GPU to see whether bits stay, and the GPUs that are tried.
NUM_RUNS, NUM_GPUS = 8, 2
#: Launches that are made anew on a GPU, at most: each takes some seconds.
MAX_EXAMINED = 2
#: What such a kernel sums, and what it finds there, varies by right with the order of programs.
_ATOMIC = "atomic_"
_CAUSES = (Cause.MISCOMPILED, Cause.FAULTY_GPU)


@dataclass(frozen=True, slots=True)
class _Seen:
    """A launch and its replay: where the device gave else, and whether it did so each time."""

    use: LaunchMade
    outcome: LaunchOutcome
    replayed: ReplayedOutcome
    differing: list[Differing]
    is_steady: bool


def compiled_code(case: Case) -> list[Claim]:
    """Compare what launches gave with their replays; where they differ, find out who is wrong."""
    outcomes = [outcome for outcome in case.bundle.outcomes if outcome.num_again]
    if not outcomes:
        return []
    if {launch.launch.device for launch in case.launches} == {"interpreter"}:
        return _leave_untested("Triton's interpreter ran it, as it runs the replay")
    if any(claim.root is not None for claim in case.claims):
        return _leave_untested("a cause is proven without it")
    try:
        from hypocenter.replay.compare import replay_outcome
    except (MissingPackage, ImportError) as error:
        return _leave_untested(f"needs the replay of launches: {error}")
    seen = list(_replay_all(case, outcomes, replay_outcome))
    if not seen:
        return _leave_untested(
            "no launch of which all is known was replayed whole without a finding"
        )
    suspects = {
        launch.use.launch.source: launch
        for launch in reversed(seen)
        if launch.differing or not launch.is_steady
    }
    examined = list(reversed(suspects.values()))[:MAX_EXAMINED]  # the first launch of a kernel
    claims = [claim for launch in examined for claim in _judge(case, launch)]
    return claims or list(_refute(seen))


def _leave_untested(reason: str) -> list[Claim]:
    return [row(cause, Verdict.NOT_TESTED, NAME, reason) for cause in _CAUSES]


def _replay_all(
    case: Case, outcomes: Sequence[LaunchOutcome], replay_outcome: Callable[..., ReplayedOutcome]
) -> Iterator[_Seen]:
    """Those whose replay is whole and finds nothing, as long as there is time."""
    uses = {use.place: use for use in case.launches}
    deadline = case.limit.until(RUNG_SECONDS)
    for outcome in outcomes:
        left = deadline - time.monotonic()
        if left <= 0:
            case.leave_unseen(Gap.not_examined("what some launches gave", "there was no time"))
            return
        try:
            made = replay_outcome(
                case.index,
                outcome,
                allow_source=case.allow_source,
                budget_seconds=min(REPLAY_SECONDS, left),
            )
        except HypoError:  # the rung before this one has told why
            continue
        use = uses.get(made.place)
        if use is None or made.report.findings or not made.report.coverage.is_complete:
            continue
        if any(_ATOMIC in text for text in made.texts):
            continue
        differing = made.differing(_on_device(use, outcome))
        yield _Seen(use, outcome, made, differing, is_steady=not outcome.num_other)


def _on_device(use: LaunchMade, outcome: LaunchOutcome) -> dict[str, bytes]:
    """What tensors held after a launch, by parameter."""
    held = {values.tensor: values.data for values in (*outcome.given, *outcome.gave)}
    return {
        argument.name: held[argument.tensor]
        for argument in use.launch.arguments
        if argument.tensor in held
    }


def _refute(seen: Sequence[_Seen]) -> Iterator[Claim]:
    launches = count_text(len(seen), "launch", "launches")
    yield row(
        Cause.MISCOMPILED,
        Verdict.REFUTED,
        NAME,
        f"{launches} gave what a checked replay of them gives",
        would_refute="a result that differs from the replay by more than rounding",
    )
    times = sum(launch.outcome.num_again for launch in seen)
    yield row(
        Cause.FAULTY_GPU,
        Verdict.REFUTED,
        NAME,
        f"{launches}, made again {count_text(times, 'time')} in all, gave the same bits",
        would_refute="other bits from the same launch",
    )


# -- who is wrong ---------------------------------------------------------------------------------


def _judge(case: Case, one: _Seen) -> Iterator[Claim]:
    """Make the launch anew on GPUs of this machine, as it was and from other code."""
    from hypocenter.replay.device_runs import MAX_SECONDS, can_run, run_forms

    trial, index = _Trial(case, one), case.index
    if not case.allow_source or not can_run(index, one.replayed.place):
        yield from trial.leave_open(f"no GPU is here to make it again on; {_ELSEWHERE}")
        return
    own = trial.device
    places = [own, *(device for device in range(NUM_GPUS + 1) if device != own)][:NUM_GPUS]
    forms = [RunForm(device=device, num_runs=NUM_RUNS) for device in places]
    first, *others = run_forms(
        index, one.replayed.place, forms, {}, min(MAX_SECONDS, case.limit.left)
    )
    if first.problem:
        yield from trial.leave_open(f"it could not be made again: {first.problem}")
        return
    other = next((ran for ran in others if not ran.problem and trial.is_right(ran)), None)
    if not trial.is_right(first) and other is not None and other.binary == first.binary:
        yield trial.of_gpu(first, other)
        return
    if trial.is_right(first):
        yield from trial.of_code_that_ran(first)
        return
    for what, form, variables in other_forms(one.use.launch, own):
        # Right twice, in two orders: one may come near to the replay by its rounding.
        pair = [form, with_other_warps(form, one.use.launch)]
        asked = [msgspec.structs.replace(form, num_runs=NUM_RUNS) for form in pair]
        ran, again = run_forms(
            index, one.replayed.place, asked, variables, min(MAX_SECONDS, case.limit.left)
        )
        if all(not made.problem and trial.is_right(made) for made in (ran, again)):
            yield trial.of_compiler(what, first, ran)
            return
    yield from trial.leave_open(
        f"made anew it gives {'the same wrong numbers' if _is_steady(first) else 'other bits'} "
        f"again, whatever the compiler is told; {_ELSEWHERE}"
    )


_ELSEWHERE = "`hypo doctor --run-sources BUNDLE` on another GPU of this kind tells both apart"


def _is_steady(ran: Ran) -> bool:
    return all(run == ran.runs[0] for run in ran.runs)


def _times(ran: Ran) -> str:
    return f"{len(ran.runs)} of {len(ran.runs)} launches"


class _Trial:
    """A launch under suspicion: what is known of it, and the claims that follow."""

    def __init__(self, case: Case, one: _Seen) -> None:
        self._case, self._one = case, one
        number = one.use.launch.device.partition(":")[2]
        self.device = int(number) if number.isdigit() else 0

    @property
    def _only_card(self) -> tuple[Card, ...]:
        """The GPU, where there is no other: a driver numbers them otherwise than a program."""
        cards = self._case.bundle.cards
        return cards if len(cards) == 1 else ()

    @property
    def _kernel(self) -> str:
        return self._one.use.launch.kernel

    @property
    def _argument(self) -> str:
        """The tensor that is wrong."""
        if self._one.differing:
            return self._one.differing[0].argument
        wanted = self._one.outcome.others[0].tensor if self._one.outcome.others else None
        given = (a.name for a in self._one.use.launch.arguments if a.tensor == wanted)
        return next(given, "")

    @property
    def _red(self) -> str:
        """What the run itself saw."""
        outcome, told = self._one.outcome, []
        if self._one.differing:
            worst = self._one.differing[0]
            told.append(
                f"element {worst.element} of {worst.argument} was {worst.on_device:.6g}, and "
                f"{worst.in_replay:.6g} in the replay ({worst.num_elements} of {worst.num_in_all} "
                "elements differ by more than rounding)"
            )
        if not self._one.is_steady and outcome.others:
            other = outcome.others[0]
            told.append(
                f"made again {outcome.num_again} times with the same inputs it left other bits "
                f"{count_text(outcome.num_other, 'time')}: element {other.element} of "
                f"{self._argument} was {other.first} and then {other.again} (hexadecimal)"
            )
        return f"{self._one.use.where}: {'; '.join(told)}"

    def is_right(self, ran: Ran) -> bool:
        """Whether each run of a form gave the same bits, and what the replay gives."""
        replayed = self._one.replayed
        is_right = bool(ran.runs) and not replayed.differing(replayed.row_by_row(ran.runs[0]))
        return is_right and _is_steady(ran)

    def of_gpu(self, wrong: Ran, right: Ran) -> Claim:
        """The same code is right on another GPU."""
        return self._proven(
            Cause.FAULTY_GPU,
            f"the GPU computes wrongly: {wrong.name} {wrong.card}",
            f"Take {wrong.card} out of use, and have it tested",
            Proof(
                self._red,
                f"the same code on {right.card}",
                f"{_times(right)} there give what the replay gives; on {wrong.card} "
                + ("they do not" if _is_steady(wrong) else "the bits change from one to the next"),
            ),
            "wrong numbers on the other GPU as well",
        )

    def of_compiler(self, what: str, wrong: Ran, right: Ran) -> Claim:
        """Other code for the same launch is right on the same GPU."""
        return self._proven(
            Cause.MISCOMPILED,
            f"the code that Triton makes of it is wrong: {self._red}",
            f"Compile {self._kernel} with {what} until Triton is mended, and report it there with "
            "the bundle, which has the code",
            Proof(
                f"{self._red}; compiled anew (sha256 {wrong.binary[:12]}) it "
                + ("is wrong again" if _is_steady(wrong) else "gives other bits each time"),
                what,
                f"compiled with {what} (sha256 {right.binary[:12]}), {_times(right)} give what the "
                "replay gives",
            ),
            "wrong numbers from every other code as well",
        )

    def of_code_that_ran(self, anew: Ran) -> Iterator[Claim]:
        """Compiled anew it is right: what ran was other code, or the GPU erred."""
        ran = self._one.outcome.code.binary
        if not ran or not anew.binary or ran == anew.binary:
            same = "the same code" if ran and ran == anew.binary else "the launch made anew"
            yield from self.leave_open(
                f"{same} gives what the replay gives, {len(anew.runs)} of {len(anew.runs)} times "
                f"on {anew.card or 'this machine'}; {_ELSEWHERE}",
                is_seen=True,
            )
            return
        yield self._proven(
            Cause.MISCOMPILED,
            f"the code that ran is not what its source compiles to: {self._red}",
            "Empty Triton's cache (TRITON_CACHE_DIR, else ~/.triton/cache), and look at what "
            "changes the compiler in that process",
            Proof(
                f"{self._red}; the code that ran has sha256 {ran[:12]}",
                "the kernel compiled anew",
                f"with its code (sha256 {anew.binary[:12]}) {_times(anew)} on {anew.card} give "
                "what the replay gives",
            ),
            "wrong numbers from code that is compiled anew",
        )

    def _proven(
        self, cause: Cause, sentence: str, fix: str, proof: Proof, would_refute: str
    ) -> Claim:
        """A root cause of the launch, met where it stores what is wrong."""
        use = self._one.use
        root = RootCause(
            cause=cause,
            sentence=f"{self._kernel}: {sentence}",
            fix=fix,
            proof=proof,
            kernel=self._kernel,
            argument=self._argument,
            place=use.place,
        )
        root = root.at(self._case.access(use.launch, self._argument, "store"))
        return proven(root, NAME, (), would_refute, use.seq)

    def leave_open(self, why: str, *, is_seen: bool = False) -> Iterator[Claim]:
        """Both may be to blame; say what would tell. `is_seen`: that something is wrong is sure."""
        if is_seen or not self._one.is_steady:
            yield self._row(Cause.WRONG_ANSWER, Verdict.CONFIRMED, "the bits stay", why)
        for cause, would_refute in (
            (Cause.MISCOMPILED, "the same wrong numbers from other code for the same launch"),
            (Cause.FAULTY_GPU, "the same wrong numbers on another GPU"),
        ):
            yield self._row(cause, Verdict.INCONCLUSIVE, would_refute, why)

    def _row(self, cause: Cause, verdict: Verdict, would_refute: str, why: str) -> Claim:
        """What was seen, of the GPU as well, and why that proves no more."""
        return row(
            cause,
            verdict,
            NAME,
            self._red,
            why,
            *map(card_text, self._only_card),
            would_refute=would_refute,
            kernel=self._kernel,
            argument=self._argument,
        )
