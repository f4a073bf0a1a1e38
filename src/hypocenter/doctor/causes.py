"""The one table of causes: which symptoms each may have, who tests it, what a clean test refutes.

A new cause is a member of `Cause`, a row of `CAUSES`, and the rung that finds it.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass


class Cause(enum.StrEnum):
    """The classes of defects that the doctor tells apart, and that the lab plants."""

    OFFSET_OVERFLOW = "offset overflow"
    DTYPE_WIDTH = "dtype width"
    BUFFER_TOO_SMALL = "buffer too small"
    WRONG_STRIDE = "wrong stride"
    MISALIGNMENT = "misalignment"
    NULL_POINTER = "null pointer"
    WILD_POINTER = "wild pointer"
    ACCESS_OUTSIDE = "access outside its tensor"
    BLOCK_TABLE_RANGE = "block table entry out of range"
    STALE_SLOT = "stale slot"
    SENTINEL_CONSUMED = "sentinel consumed"
    TOKEN_RANGE = "token id out of range"
    POSITION_RANGE = "position out of range"
    INDEX_RANGE = "index out of range"
    FOREIGN_BLOCK = "block of another request"
    KEPT_BLOCK_CHANGED = "kept block changed"
    FOREIGN_STATE = "state of another request"
    WRONG_INPUT = "step input of another request"
    CHANGED_INPUT = "step input changed on its way"
    MISSING_MASK = "missing tail mask"
    OFF_BY_ONE = "off by one"
    PROGRAM_RACE = "race between programs"
    LANE_RACE = "race between lanes"
    TUNED_IN_PLACE = "autotuned in place"
    OUTPUT_NOT_WRITTEN = "output not written"
    UNINITIALISED_READ = "uninitialised read"
    UNDEFINED_LANE = "undefined lane"
    NONFINITE_PADDING = "non-finite padding"
    NONFINITE_VALUE = "non-finite value"
    USE_AFTER_FREE = "use after free"
    CAPTURED_POINTER = "captured pointer freed"
    REWRITTEN_IN_FLIGHT = "buffer rewritten in flight"
    MISSING_WAIT = "missing wait between streams"
    READ_IN_FLIGHT = "buffer read in flight"
    REUSED_IN_FLIGHT = "memory reused in flight"
    EMPTY_LAUNCH = "empty launch"
    GRID_TOO_SMALL = "grid too small"
    GRID_LIMIT = "grid over the limit"
    GRID_PRODUCT = "grid product over 32 bits"
    SHARED_MEMORY = "shared memory over the limit"
    THREAD_LIMIT = "threads over the limit"
    TENSOR_MEMORY = "tensor memory over the limit"
    NO_CODE_OBJECT = "no code for this architecture"
    NOT_COMPILED = "kernel does not compile"
    NO_CONFIGURATION = "no configuration left"
    OLD_INTERPRETER = "interpreter older than NumPy"
    DEVICE_ASSERT = "assertion of a kernel"
    CAPTURE_REFUSED = "call not allowed during capture"
    WRONG_DEVICE = "tensor on another device"
    HOST_POINTER = "host pointer"
    BAD_SCALAR = "scalar out of range"
    PENDING_ERROR = "error of an earlier call"
    LATE_OUT_OF_MEMORY = "out of memory reported late"
    ENDLESS_LOOP = "endless loop"
    LOST_EVENT = "event never recorded"
    BROKEN_CHECK = "check of the engine's own"
    PASSED_OVER = "request passed over"
    LOST_RANK = "process of another rank ended"
    MISCOMPILED = "wrong code of the compiler"
    FAULTY_GPU = "GPU that computes wrongly"
    SHORT_OPERANDS = "operands cut to TF32"
    CARD_HARDWARE = "broken hardware of the GPU"
    WRONG_ANSWER = "wrong answer"
    CHANGED_LINE = "changed line of the engine"


class TestedBy(enum.Enum):
    """The tests that can refute a cause by finding nothing."""

    ARGUMENTS = enum.auto()
    ENTRIES = enum.auto()
    LIMITS = enum.auto()
    REPLAY = enum.auto()


class Blame(enum.Enum):
    """Where the defect of a cause lies: the line that is to be changed."""

    #: In the line of the kernel that meets it.
    KERNEL = enum.auto()
    #: Where the host made the tensor, gave its memory back, or launched the kernel.
    MAKER = enum.auto()
    FREE = enum.auto()
    LAUNCH = enum.auto()
    #: Nobody recorded it: who filled a tensor with wrong values, say.
    UNKNOWN = enum.auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class CauseRow:
    """What is known of a cause whatever the run.

    `symptoms` are the kinds of a Case that it may show as. `untested`: why it may stand without a
    verdict, and what would give it one. `blames` says where the defect itself lies. `tested_by`
    refutes it by finding that `clean` holds. With `is_of_engine` hypo's own engine alone can have
    it; of another program it says nothing.
    """

    symptoms: frozenset[str]
    untested: str = "what this run recorded does not show it"
    blames: Blame = Blame.UNKNOWN
    tested_by: TestedBy | None = None
    clean: str = ""
    is_of_engine: bool = False


def refutable(test: TestedBy) -> dict[Cause, str]:
    """The causes that a test can refute, and what a run is like that has none of them."""
    return {cause: row.clean for cause, row in CAUSES.items() if row.tested_by is test}


def plausible(kind: str) -> Iterable[Cause]:
    """The causes that a symptom of that kind may have; each gets a verdict."""
    known = kind if kind in _KINDS else "none"
    return (cause for cause, row in CAUSES.items() if known in row.symptoms)


def explains(cause: Cause, kind: str) -> bool:
    """Whether a defect of that class can be why a run showed a symptom of that kind."""
    symptoms = (CAUSES[cause].symptoms or _OF_MEMORY | _ERROR) | _ALSO.get(cause, frozenset())
    return (kind if kind in _KINDS else "none") in symptoms


_KINDS = frozenset({"crash", "error", "hang", "nonfinite", "differs", "none"})
_OF_VALUES = frozenset({"nonfinite", "differs", "none"})
_OF_MEMORY = _OF_VALUES | {"crash"}
_ERROR, _HANG = frozenset({"error"}), frozenset({"hang"})
#: What a cause can show as besides, though no such symptom puts it in question.
_ALSO = {
    Cause.NO_CODE_OBJECT: frozenset({"crash"}),
    Cause.CARD_HARDWARE: _HANG,
    # Triton makes no such launch and says nothing.
    Cause.GRID_PRODUCT: _OF_VALUES,
}

_ENTRIES = "arguments: index values of it were not recorded, or its arguments were refused first"
_REPLAY = "replay: it was left out"
_TRACE = "values: the run was not traced; `hypo doctor --suspect -- ...` traces it"
_OWNERS = "ownership: no step recorded its requests"
_OUTCOMES = (
    "compiled code: nothing was kept of what launches gave; `--suspect` keeps it of a program"
)
_REFUSED = "refusals: no launch was refused for it"

CAUSES: dict[Cause, CauseRow] = {
    Cause.WRONG_ANSWER: CauseRow(
        symptoms=_OF_VALUES,
        untested="good arguments: give the bundle of a run that is right with --good",
    ),
    # -- of values
    Cause.OUTPUT_NOT_WRITTEN: CauseRow(
        symptoms=_OF_VALUES, blames=Blame.KERNEL, untested=_REPLAY, tested_by=TestedBy.REPLAY,
        clean="every live row is written whole",
    ),
    Cause.UNINITIALISED_READ: CauseRow(
        symptoms=_OF_VALUES, untested=_REPLAY, tested_by=TestedBy.REPLAY,
        clean="nothing is read that nobody wrote",
    ),
    Cause.NONFINITE_PADDING: CauseRow(
        symptoms=_OF_VALUES, blames=Blame.KERNEL, untested=_TRACE, is_of_engine=True
    ),
    Cause.NONFINITE_VALUE: CauseRow(symptoms=_OF_VALUES, untested=_TRACE),
    Cause.FOREIGN_BLOCK: CauseRow(
        symptoms=_OF_VALUES | _ERROR, untested=_OWNERS, is_of_engine=True
    ),
    Cause.KEPT_BLOCK_CHANGED: CauseRow(
        symptoms=_OF_VALUES | _ERROR, untested=_TRACE, is_of_engine=True
    ),
    Cause.FOREIGN_STATE: CauseRow(
        symptoms=_OF_VALUES | _ERROR,
        untested="states: no layer of the model carries one, or no step recorded its requests",
        is_of_engine=True,
    ),
    Cause.WRONG_INPUT: CauseRow(
        symptoms=_OF_MEMORY | _ERROR, untested=_OWNERS, is_of_engine=True
    ),
    Cause.CHANGED_INPUT: CauseRow(
        symptoms=_OF_MEMORY | _ERROR, untested=_TRACE, is_of_engine=True
    ),
    Cause.PROGRAM_RACE: CauseRow(
        symptoms=_OF_VALUES | _HANG, blames=Blame.KERNEL, untested=_REPLAY,
        tested_by=TestedBy.REPLAY,
        clean="no two programs touch the same element, one writing",
    ),
    Cause.LANE_RACE: CauseRow(
        symptoms=_OF_VALUES, blames=Blame.KERNEL, untested=_REPLAY, tested_by=TestedBy.REPLAY,
        clean="no two lanes of a program touch the same element, one writing, without a barrier",
    ),
    Cause.UNDEFINED_LANE: CauseRow(
        symptoms=_OF_VALUES, blames=Blame.KERNEL, untested=_REPLAY, tested_by=TestedBy.REPLAY,
        clean="no lane that a masked load leaves out reaches a result",
    ),
    Cause.TUNED_IN_PLACE: CauseRow(
        symptoms=_OF_VALUES, blames=Blame.KERNEL,
        untested="tuning: no trial of an autotuner was recorded with what its tensors held, which "
        "--suspect keeps of small ones",
    ),
    Cause.MISCOMPILED: CauseRow(
        symptoms=_OF_VALUES, blames=Blame.LAUNCH, untested=_OUTCOMES
    ),
    Cause.FAULTY_GPU: CauseRow(symptoms=_OF_VALUES, untested=_OUTCOMES),
    Cause.SHORT_OPERANDS: CauseRow(symptoms=frozenset(), blames=Blame.KERNEL),
    # -- of what launches are asked for
    Cause.EMPTY_LAUNCH: CauseRow(symptoms=_ERROR, blames=Blame.LAUNCH, tested_by=TestedBy.LIMITS),
    Cause.GRID_LIMIT: CauseRow(
        symptoms=_OF_MEMORY | _ERROR, blames=Blame.LAUNCH, tested_by=TestedBy.LIMITS
    ),
    Cause.GRID_PRODUCT: CauseRow(symptoms=_ERROR, blames=Blame.LAUNCH, tested_by=TestedBy.LIMITS),
    Cause.SHARED_MEMORY: CauseRow(symptoms=_ERROR, blames=Blame.LAUNCH, untested=_REFUSED),
    Cause.THREAD_LIMIT: CauseRow(
        symptoms=_OF_MEMORY | _ERROR, blames=Blame.LAUNCH, tested_by=TestedBy.LIMITS
    ),
    Cause.NO_CODE_OBJECT: CauseRow(symptoms=_ERROR, blames=Blame.LAUNCH, untested=_REFUSED),
    Cause.CARD_HARDWARE: CauseRow(symptoms=frozenset()),
    # Of which only a replay or a refusal tells: where there is none, they are not in question.
    Cause.GRID_TOO_SMALL: CauseRow(symptoms=frozenset(), blames=Blame.LAUNCH),
    Cause.TENSOR_MEMORY: CauseRow(symptoms=frozenset(), blames=Blame.LAUNCH),
    Cause.NOT_COMPILED: CauseRow(symptoms=frozenset(), blames=Blame.KERNEL),
    Cause.NO_CONFIGURATION: CauseRow(symptoms=frozenset(), blames=Blame.LAUNCH),
    Cause.OLD_INTERPRETER: CauseRow(symptoms=frozenset()),
    Cause.DEVICE_ASSERT: CauseRow(symptoms=frozenset()),
    Cause.CAPTURE_REFUSED: CauseRow(symptoms=frozenset(), blames=Blame.LAUNCH),
    Cause.LOST_RANK: CauseRow(symptoms=frozenset(), is_of_engine=True),
    Cause.PASSED_OVER: CauseRow(symptoms=frozenset(), is_of_engine=True),
    Cause.CHANGED_LINE: CauseRow(symptoms=frozenset(), is_of_engine=True),
    Cause.BROKEN_CHECK: CauseRow(symptoms=frozenset(), blames=Blame.KERNEL, is_of_engine=True),
    # -- of arguments
    Cause.NULL_POINTER: CauseRow(
        symptoms=_OF_MEMORY | _ERROR, blames=Blame.MAKER, tested_by=TestedBy.ARGUMENTS,
        clean="every pointer argument of every launch is set",
    ),
    Cause.DTYPE_WIDTH: CauseRow(
        symptoms=_OF_MEMORY | _ERROR, blames=Blame.MAKER, tested_by=TestedBy.ARGUMENTS,
        clean="every argument has the width that its kernel reads, in memory that fits",
    ),
    Cause.BUFFER_TOO_SMALL: CauseRow(
        symptoms=_OF_MEMORY | _ERROR, blames=Blame.MAKER, tested_by=TestedBy.ARGUMENTS,
        clean="every argument lies wholly inside its allocation",
    ),
    Cause.WRONG_STRIDE: CauseRow(
        symptoms=_OF_MEMORY, blames=Blame.MAKER, tested_by=TestedBy.ARGUMENTS,
        clean="every argument has the shape and layout that its kernel takes",
    ),
    Cause.BAD_SCALAR: CauseRow(
        symptoms=_OF_MEMORY | _ERROR, blames=Blame.LAUNCH, tested_by=TestedBy.ARGUMENTS,
        is_of_engine=True,
        clean="every number is in its range",
    ),
    Cause.WRONG_DEVICE: CauseRow(
        symptoms=_OF_MEMORY | _ERROR, blames=Blame.MAKER, tested_by=TestedBy.ARGUMENTS,
        clean="all arguments of each launch lie on its device",
    ),
    Cause.HOST_POINTER: CauseRow(
        symptoms=_OF_MEMORY | _ERROR, blames=Blame.MAKER, tested_by=TestedBy.ARGUMENTS,
        clean="no argument of a GPU kernel lies in host memory",
    ),
    Cause.MISALIGNMENT: CauseRow(
        symptoms=_OF_MEMORY, blames=Blame.MAKER, tested_by=TestedBy.ARGUMENTS,
        clean="every argument is aligned as its kernel demands",
    ),
    # -- of index values
    Cause.TOKEN_RANGE: CauseRow(
        symptoms=_OF_MEMORY | _ERROR, untested=_ENTRIES, tested_by=TestedBy.ENTRIES,
        is_of_engine=True, clean="all token ids lie inside the vocabulary",
    ),
    Cause.POSITION_RANGE: CauseRow(
        symptoms=_OF_MEMORY | _ERROR, untested=_ENTRIES, tested_by=TestedBy.ENTRIES,
        is_of_engine=True, clean="all positions lie inside their tables",
    ),
    Cause.BLOCK_TABLE_RANGE: CauseRow(
        symptoms=_OF_MEMORY | _ERROR, untested=_ENTRIES, tested_by=TestedBy.ENTRIES,
        is_of_engine=True, clean="all live entries of the block tables lie inside the cache",
    ),
    Cause.WILD_POINTER: CauseRow(symptoms=frozenset()),
    Cause.ACCESS_OUTSIDE: CauseRow(symptoms=frozenset(), blames=Blame.KERNEL),
    Cause.INDEX_RANGE: CauseRow(
        symptoms=frozenset(), untested=_ENTRIES, tested_by=TestedBy.ENTRIES,
        clean="all slots and row indices lie inside what they index",
    ),
    Cause.SENTINEL_CONSUMED: CauseRow(symptoms=_OF_MEMORY, untested=_ENTRIES),
    Cause.STALE_SLOT: CauseRow(
        symptoms=_OF_MEMORY | _ERROR, untested=_OWNERS, is_of_engine=True
    ),
    # -- of kernels
    Cause.MISSING_MASK: CauseRow(
        symptoms=_OF_MEMORY, blames=Blame.KERNEL, untested=_REPLAY, tested_by=TestedBy.REPLAY,
        clean="no access leaves its tensor",
    ),
    Cause.OFF_BY_ONE: CauseRow(
        symptoms=_OF_MEMORY, blames=Blame.KERNEL, untested=_REPLAY, tested_by=TestedBy.REPLAY,
        clean="no access leaves its tensor or reads an entry that is not live",
    ),
    Cause.OFFSET_OVERFLOW: CauseRow(
        symptoms=_OF_MEMORY, blames=Blame.KERNEL, untested=_REPLAY, tested_by=TestedBy.REPLAY,
        clean="no address has left 32 bits that should not have",
    ),
    # -- of order
    Cause.USE_AFTER_FREE: CauseRow(symptoms=_OF_MEMORY, blames=Blame.FREE),
    Cause.CAPTURED_POINTER: CauseRow(symptoms=_OF_MEMORY, blames=Blame.FREE),
    Cause.MISSING_WAIT: CauseRow(symptoms=_OF_MEMORY | _HANG, is_of_engine=True),
    Cause.REWRITTEN_IN_FLIGHT: CauseRow(symptoms=_OF_MEMORY, is_of_engine=True),
    # Of which only the order of a program tells: where it was not watched, no row does.
    Cause.READ_IN_FLIGHT: CauseRow(symptoms=frozenset()),
    Cause.REUSED_IN_FLIGHT: CauseRow(symptoms=frozenset()),
    Cause.PENDING_ERROR: CauseRow(symptoms=_ERROR | {"crash"}),
    Cause.LATE_OUT_OF_MEMORY: CauseRow(
        symptoms=_ERROR | {"crash"}, untested="refusals: no call reported that memory was out"
    ),
    Cause.ENDLESS_LOOP: CauseRow(
        symptoms=_HANG, blames=Blame.KERNEL, untested="hang: no step was past its deadline"
    ),
    Cause.LOST_EVENT: CauseRow(symptoms=_HANG, is_of_engine=True),
}  # fmt: skip

#: What stands in the name of an index tensor, and the cause of an entry that lies outside.
_INDICES = {
    "token_ids": Cause.TOKEN_RANGE,
    "context_ids": Cause.TOKEN_RANGE,
    "positions": Cause.POSITION_RANGE,
    "block_tables": Cause.BLOCK_TABLE_RANGE,
    "counts": Cause.BAD_SCALAR,
}


def index_cause(value: int, *names: str) -> Cause:
    """The class of an index out of range, by the names that its tensor goes by."""
    if value == -1:
        return Cause.SENTINEL_CONSUMED
    found = (cause for known, cause in _INDICES.items() if any(known in name for name in names))
    return next(found, Cause.INDEX_RANGE)
