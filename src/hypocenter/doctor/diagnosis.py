"""What the doctor concludes of a bundle: hypotheses with verdicts, and a root cause with its proof.

Plain records; the reasoning is in `rungs/`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import msgspec

from hypocenter.doctor.causes import Blame, Cause
from hypocenter.doctor.difference import Answers
from hypocenter.doctor.kernel_text import Access
from hypocenter.doctor.run_environment import RunEnvironment
from hypocenter.record.events import Place
from hypocenter.record.gap import Gap, GapKind
from hypocenter.replay.findings import Finding

#: What sees the values of index tensors that a record has not.
WITH_VALUES = "`hypo guard -- COMMAND` and `hypo check FILE` see it"


class Verdict(enum.StrEnum):
    CONFIRMED = "CONFIRMED"
    REFUTED = "REFUTED"
    INCONCLUSIVE = "INCONCLUSIVE"
    NOT_TESTED = "NOT TESTED"


class Hypothesis(msgspec.Struct, frozen=True, kw_only=True):
    """One possible cause, what was found about it, and what would have refuted it.

    `diagnostic` names the rung of the ladder that tested it; `is_unrecorded`: what would
    test it was not recorded of this program, and `evidence` says why. `is_observed`: the run
    itself was seen to do it. `at` is the line (file:line) of the access that was seen, "" without.
    """

    cause: Cause
    verdict: Verdict
    diagnostic: str
    evidence: tuple[str, ...]
    would_refute: str = ""
    kernel: str | None = None
    argument: str | None = None
    is_unrecorded: bool = False
    is_observed: bool = False
    at: str = ""


class Proof(msgspec.Struct, frozen=True):
    """The same test twice: `red` with what was recorded, `green` with the one fact corrected."""

    red: str
    corrected: str
    green: str


class Culprit(msgspec.Struct, frozen=True):
    """The line that is to be changed: `place` is file:line, `does` says what is done there."""

    place: str
    does: str


class Edit(msgspec.Struct, frozen=True, kw_only=True):
    """A change that puts a program right: in line `line` of `file`, `new` in place of `old`.

    Both are whole lines without their indentation. With a `name` it is no text: the launch in that
    line passes the value `new` for the parameter of that name (`grid`: for its grid).
    """

    file: str
    line: int
    old: str
    new: str
    name: str = ""


class Effect(msgspec.Struct, frozen=True, kw_only=True):
    """What a fix does to a launch, by the replay with it: accesses of lanes, and elements.

    `num_gone` were outside of their tensor and are no more. `num_lost` loads were inside and are
    made no more, `num_moved` accesses go to another address, `num_unwritten` elements were written
    and are no more. A fix that has any of them is told as one only where `excused` says why they
    are no loss. `num_filled` elements that nobody wrote are written now.
    """

    num_gone: int = 0
    num_lost: int = 0
    num_moved: int = 0
    num_unwritten: int = 0
    num_filled: int = 0
    excused: str = ""


class Alternative(msgspec.Struct, frozen=True, kw_only=True):
    """Another fix that the replay accepts as well: nothing tells which one is meant."""

    fix: str
    edits: tuple[Edit, ...]
    effect: Effect


class SolvedEntry(msgspec.Struct, frozen=True, kw_only=True):
    """An element of a tensor that nobody recorded, and what it must have held."""

    argument: str
    index: tuple[int, ...]
    value: int


class RootCause(msgspec.Struct, frozen=True, kw_only=True):
    """What is claimed; never without a proof. `argument` is the contract's or kernel's name.

    `tensor` is the name of what was passed; file, line and expression are those of the kernel that
    meets the defect, None where none does. `blames` is set where it is not as the table of causes
    has it; `culprit` and `launched_at` (file:line) are None and "" where nobody recorded them.
    `finding` is the access, with one lane as its example, where a replay proved the cause.
    `zeros` names what its address hangs on and was replayed as zeros; empty where nothing is.
    `entries` follow from where a GPU stopped. `entry` is the element of an index tensor with which
    the proof is about, as it was recorded. `edits` are the fix as data, where it is a change of
    a text or of what a launch passes, and `effect` what it did when it was applied and replayed:
    None where the proof is of the cause alone. With `alternatives` none of them, nor `fix`, is
    proven to be the one that is meant. `beside` is what else the same replay found, in words.
    """

    cause: Cause
    sentence: str
    fix: str
    proof: Proof
    kernel: str | None = None
    argument: str | None = None
    tensor: str | None = None
    file: str | None = None
    line: int | None = None
    expression: str | None = None
    place: Place | None = None
    blames: Blame | None = None
    culprit: Culprit | None = None
    launched_at: str = ""
    finding: Finding | None = None
    zeros: str = ""
    entries: tuple[SolvedEntry, ...] = ()
    entry: SolvedEntry | None = None
    edits: tuple[Edit, ...] = ()
    effect: Effect | None = None
    alternatives: tuple[Alternative, ...] = ()
    beside: tuple[str, ...] = ()

    def at(self, access: Access | None) -> RootCause:
        """The same, met at that line of the kernel, where one is known."""
        if access is None:
            return self
        return msgspec.structs.replace(
            self, file=access.file, line=access.line, expression=access.expression
        )


class RungRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A rung of the ladder: how long it took, or why it was left out."""

    name: str
    seconds: float
    left_out: str = ""


class GpuSight(msgspec.Struct, frozen=True, kw_only=True):
    """Where a GPU itself stood when it stopped, as its dump (`source`) says.

    `exception` is empty where nothing was wrong and somebody asked. `file`, `line` and `text` are
    the innermost line that belongs to the program, `called_from` the lines around it. `block` is
    the program of a Triton kernel, and `num_warps` of `num_in_all` stand at that line. The access
    goes to `address`, of which the bits in `known_bits` count. `parameters` are name and value;
    `near` says which of them the address is near to, and how many bytes behind its start.
    """

    source: str
    exception: str
    kernel: str
    file: str = ""
    line: int = 0
    text: str = ""
    called_from: tuple[tuple[str, int], ...] = ()
    is_triton: bool = False
    block: tuple[int, int, int] | None = None
    threads: tuple[int, int] | None = None
    num_warps: int = 0
    num_in_all: int = 0
    operation: str = ""
    width_bytes: int = 0
    address: int | None = None
    known_bits: int = 0
    parameters: tuple[tuple[str, str], ...] = ()
    near: tuple[str, int] | None = None
    place: Place | None = None


class LastWriter(msgspec.Struct, frozen=True, kw_only=True):
    """The launch that stored an element last, by its replay: `kernel`, at `file`:`line`.

    `value` is what the replay stored, None for an atomic addition. `gives_it`: that is what the
    program found there; None where tensors that it read were replayed as zeros. `gives_it_cut`: it
    is that once float32 operands of `tl.dot` are cut to TF32. `fed_by` are the
    tensors that it reads, and in words the last launch before it whose kernel stores to each.
    """

    kernel: str
    parameter: str
    place: Place
    launched_at: str
    program: tuple[int, int, int]
    file: str
    line: int
    expression: str
    value: int | float | None = None
    gives_it: bool | None = None
    gives_it_cut: bool = False
    fed_by: tuple[tuple[str, str], ...] = ()


class ComparedElement(msgspec.Struct, frozen=True, kw_only=True):
    """One side of a comparison that failed: what it held there, and who stored that."""

    name: str
    value: int | float
    writer: LastWriter | None = None


class FailedComparison(msgspec.Struct, frozen=True, kw_only=True):
    """Two tensors that the program compared, and ended for: a place to look at, and no cause.

    The fields are those of a ComparedUnequal.
    """

    site: str
    compared_at: str
    sides: tuple[ComparedElement, ComparedElement]
    index: tuple[int, ...]
    num_different: int
    num_elements: int
    is_first: bool


class RunMade(msgspec.Struct, frozen=True, kw_only=True):
    """A run of a command that was run until a cause was proven: `name` says how.

    `ended` is how it ended and `found` what the doctor made of it, in words; `left_out` is why it
    was not made. `is_told`: the report is of this one.
    """

    name: str
    ended: str = ""
    found: str = ""
    left_out: str = ""
    is_told: bool = False


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """A doctor's report on one bundle, which says `kind` and `fault_kind`.

    `surfaced` says where the fault showed and why there. `unseen` lists what could not be looked
    at, and what would make it possible; `consequences` what follows from the roots and is no cause
    of its own. `sights` is where GPUs stood that left a dump, and `compared` what the program
    itself found unequal before it ended. `answers` is None without a good run.
    `is_unexplained`: what is proven is a defect, and not one that the run can have ended by as it
    did. `runs` are those that the command took, where it was run again. `not_compared` says why
    nothing follows from the good run, where nothing does.
    """

    kind: str
    fault_kind: str
    symptom: str
    surfaced: str
    environment: RunEnvironment
    hypotheses: tuple[Hypothesis, ...]
    roots: tuple[RootCause, ...] = ()
    unseen: tuple[Gap, ...] = ()
    consequences: tuple[str, ...] = ()
    sights: tuple[GpuSight, ...] = ()
    compared: FailedComparison | None = None
    rungs: tuple[RungRecord, ...] = ()
    seconds: float = 0.0
    answers: Answers | None = None
    is_unexplained: bool = False
    runs: tuple[RunMade, ...] = ()
    not_compared: str = ""

    @property
    def is_proven(self) -> bool:
        """Whether a root cause is proven that explains how the run ended."""
        return bool(self.roots) and not self.is_unexplained

    @property
    def has_symptom(self) -> bool:
        """Whether the run broke, or gave what is wrong."""
        return self.fault_kind != "none"

    @property
    def has_source_not_run(self) -> bool:
        """Whether kernels of the program's own were not replayed, as their text may not run."""
        return any(gap.kind is GapKind.SOURCE_NOT_RUN for gap in self.unseen)

    @property
    def is_clean(self) -> bool:
        """Whether nothing at all was found."""
        return not self.roots and all(h.verdict is not Verdict.CONFIRMED for h in self.hypotheses)


@dataclass(frozen=True, slots=True)
class Claim:
    """One row of the report. `seq` places it in the run's order of events.

    Without a root a CONFIRMED claim is an observation that carries no proof of a cause. `tensors`
    are the ids of the tensors at fault, so that what follows from the same defect is told apart.
    `place` is the launch that a claim without a root is of, where that matters to others.
    `left_by` are the step and its argument that had what is claimed of left in memory.
    """

    hypothesis: Hypothesis
    root: RootCause | None = None
    seq: int = 0
    tensors: tuple[int, ...] = ()
    place: Place | None = None
    left_by: tuple[int, str] | None = None


def proven(
    root: RootCause,
    diagnostic: str,
    evidence: tuple[str, ...],
    would_refute: str,
    seq: int = 0,
    tensors: tuple[int, ...] = (),
) -> Claim:
    """A confirmed hypothesis with its root cause, which has the proof beside this evidence."""
    return Claim(
        Hypothesis(
            cause=root.cause,
            verdict=Verdict.CONFIRMED,
            diagnostic=diagnostic,
            evidence=evidence,
            would_refute=would_refute,
            kernel=root.kernel,
            argument=root.argument,
        ),
        root,
        seq,
        tensors,
    )


def row(
    cause: Cause,
    verdict: Verdict,
    diagnostic: str,
    *evidence: str,
    would_refute: str = "",
    kernel: str | None = None,
    argument: str | None = None,
    at: str = "",
) -> Claim:
    """A hypothesis without a root cause."""
    return Claim(
        Hypothesis(
            cause=cause,
            verdict=verdict,
            diagnostic=diagnostic,
            evidence=evidence,
            would_refute=would_refute,
            kernel=kernel,
            argument=argument,
            at=at,
        )
    )
