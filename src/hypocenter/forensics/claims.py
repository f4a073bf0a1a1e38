"""What a rung of the doctor's ladder says: a hypothesis with a verdict, perhaps a root cause."""

from __future__ import annotations

from dataclasses import dataclass

from hypocenter.diagnosis import Cause, Hypothesis, RootCause, Verdict

#: Why a cause that a program of anybody's may well have is left open.
UNRECORDED = "what tensors held, and who wrote it, is not recorded of this program"


@dataclass(frozen=True, slots=True)
class Claim:
    """One row of the report. `seq` places it in the run's order of events.

    Without a root a CONFIRMED claim is an observation that carries no proof of a cause. `tensors`
    are the ids of the tensors at fault, so that what follows from the same defect is told apart.
    """

    hypothesis: Hypothesis
    root: RootCause | None = None
    seq: int = 0
    tensors: tuple[int, ...] = ()


def proven(
    root: RootCause, diagnostic: str, evidence: tuple[str, ...], would_refute: str,
    seq: int = 0, tensors: tuple[int, ...] = (),
) -> Claim:  # fmt: skip
    """A confirmed hypothesis with its root cause."""
    return Claim(
        Hypothesis(
            cause=root.cause,
            verdict=Verdict.CONFIRMED,
            diagnostic=diagnostic,
            evidence=(*evidence, f"red: {root.proof.red}", f"green: {root.proof.green}"),
            would_refute=would_refute,
            kernel=root.kernel,
            argument=root.argument,
        ),
        root,
        seq,
        tensors,
    )


def row(
    cause: Cause, verdict: Verdict, diagnostic: str, *evidence: str, would_refute: str = "",
    kernel: str | None = None, argument: str | None = None,
) -> Claim:  # fmt: skip
    """A hypothesis without a root cause."""
    return Claim(
        Hypothesis(
            cause=cause, verdict=verdict, diagnostic=diagnostic, evidence=evidence,
            would_refute=would_refute, kernel=kernel, argument=argument,
        )
    )  # fmt: skip
