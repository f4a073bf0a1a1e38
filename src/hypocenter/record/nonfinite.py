"""NaN and infinity, as a run with `--nan` saw operations make them: where, of what, and where
they came out.

`foreign/nonfinite/` writes these, and the doctor alone judges.
"""

from __future__ import annotations

import enum

import msgspec

from hypocenter.record.engine_events import Event


class NumberKind(enum.StrEnum):
    """How an operation came to give NaN or an infinity."""

    OVERFLOW = "overflow"
    ZERO_OVER_ZERO = "zero over zero"
    OVER_ZERO = "division by zero"
    LOG_OF_ZERO = "logarithm of zero"
    LOG_OF_NEGATIVE = "logarithm of a negative number"
    ROOT_OF_NEGATIVE = "root of a negative number"
    POWER_OF_NEGATIVE = "power of a negative number"
    OUTSIDE_DOMAIN = "argument outside the domain"
    INF_MINUS_INF = "infinity minus infinity"
    ZERO_TIMES_INF = "zero times infinity"
    INF_OVER_INF = "infinity over infinity"
    MASKED_ROW = "row that is masked whole"
    NO_ELEMENTS = "mean of no element"
    TOO_FEW = "variance of too few elements"
    ALL_IGNORED = "loss over no target"
    #: Nobody had written the memory that was read.
    UNDEFINED = "memory that nobody wrote"
    #: It came in with data, or as a number in the source: no operation made it.
    GIVEN = "given"
    IN_KERNEL = "made inside a kernel"
    UNKNOWN = "unknown"


class ChangedFact(enum.StrEnum):
    """The one fact of an operation that was changed for the second run of it."""

    NONE = "none"
    WIDER_TYPE = "wider type"
    DENOMINATOR = "denominator"
    CLAMPED = "clamped"
    UNMASKED = "unmasked"
    FINITE_INPUTS = "finite inputs"


class Operand(msgspec.Struct, frozen=True, kw_only=True):
    """One element of a tensor that an operation read or wrote; `name` is that of the parameter.

    `index` is empty for a number that is no tensor, and `shape` too.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    index: tuple[int, ...]
    value: float


class NonFinite(Event, frozen=True, kw_only=True, tag=True):
    """An operation gave NaN or infinity where nothing that it read there was such, or NaN of
    infinities.

    `id` numbers these events, `operation` is torch's name or that of a kernel, and `number` counts
    all operations. `site` is the program's line; in a backward pass `node` is autograd's name, and
    `forward_site` the line that made the node. `result` is the first such element, and `operands`
    are what it was made of. Of an overflow `exact` is the number in the type `wide`, and `limit`
    the largest of its own type. `comes_from` are the ids of those whose numbers it read, and
    `is_sure` says that no other can have led here. `made_at` is where memory of kind UNDEFINED was
    made. `is_reproduced`: the operation gave the same again with the same inputs; with `change`
    it gave `changed`, None where that was not tried. `launched` is the event of its launch.
    """

    id: int
    number: int
    operation: str
    kind: NumberKind
    result: Operand
    operands: tuple[Operand, ...] = ()
    site: str = ""
    #: What stands in that line.
    statement: str = ""
    node: str = ""
    forward_site: str = ""
    num_nan: int = 0
    num_inf: int = 0
    num_elements: int = 0
    exact: float | None = None
    limit: float | None = None
    wide: str = ""
    comes_from: tuple[int, ...] = ()
    is_sure: bool = True
    made_at: str = ""
    is_reproduced: bool = False
    change: ChangedFact = ChangedFact.NONE
    changed: float | None = None
    launched: int = 0


class NumberEnd(enum.StrEnum):
    """How NaN or infinity came to matter."""

    #: The host read it: `item`, `tolist`, or its text.
    READ = "read"
    PARAMETER = "parameter"
    #: The program found it, or torch did, and that ended the program.
    ENDED = "ended"


class NonFiniteReached(Event, frozen=True, kw_only=True, tag=True):
    """A number that the NonFinite `of` made has come out at `site`, as `value`.

    `is_sure`: no other such number can have come there.
    """

    of: int
    how: NumberEnd
    value: float
    site: str = ""
    is_sure: bool = True


class NumbersWatched(Event, frozen=True, kw_only=True, tag=True):
    """How much a run with `--nan` looked at. `num_lost`: results that were overwritten, or too
    large to be kept, before anybody could look; `is_eager`: torch.compile was asked for and
    switched off. `num_hidden`: operations on sparse or complex numbers, or on tensors of the
    program's own classes, whose results nobody looks at. `num_threads`: threads that the program
    began, whose operations are not seen."""

    num_operations: int
    num_launches: int = 0
    num_lost: int = 0
    num_in_graphs: int = 0
    num_hidden: int = 0
    num_threads: int = 0
    is_eager: bool = False
    problem: str = ""


class NumberRead(Event, frozen=True, kw_only=True, tag=True):
    """The host read NaN at `site`, in a run that follows no numbers: once told, never again."""

    site: str = ""
