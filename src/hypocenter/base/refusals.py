"""Why a launch or a copy was refused, as data: a struct for each demand that can be broken.

Made where the check fails, carried by `LaunchRejected` and `CopyRejected`, recorded, and told apart
by the doctor by their types. Their sentences are made here, by `__str__`, and read by nobody.
"""

from __future__ import annotations

import msgspec

Shape = tuple[int, ...]


class Refusal(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """`argument` is the contract's or kernel's name of what is wrong, `tensor` that of what was
    passed for it; `way_out` stands behind the sentence."""

    argument: str = ""
    tensor: str = ""
    way_out: str = ""

    @property
    def who(self) -> str:
        """The argument, and the tensor where that goes by another name."""
        is_other = self.tensor and self.argument and self.tensor != self.argument
        return f"{self.argument} ({self.tensor})" if is_other else self.argument

    def _sentence(self, what: str) -> str:
        named = f"{self.who} {what}" if self.argument else what
        return f"{named}; {self.way_out}" if self.way_out else named


class Refused(Refusal, frozen=True, kw_only=True):
    """A demand that nothing but its sentence tells apart from others."""

    what: str

    def __str__(self) -> str:
        return self._sentence(self.what)


# -- memory ---------------------------------------------------------------------------------------


class FreedTensor(Refusal, frozen=True, kw_only=True):
    """`again`: it is about to be freed a second time."""

    site: str
    again: bool = False

    def __str__(self) -> str:
        return self._sentence(f"was freed {'before, ' if self.again else ''}at {self.site}")


class Null(Refusal, frozen=True, kw_only=True):
    why: str = ""

    def __str__(self) -> str:
        return self._sentence(f"is null: {self.why}" if self.why else "is null")


class OnOtherDevice(Refusal, frozen=True, kw_only=True):
    device: str
    others: str

    def __str__(self) -> str:
        return self._sentence(f"is on {self.device}, the others on {self.others}")


class DeviceNotOpen(Refusal, frozen=True, kw_only=True):
    device: str
    opened: tuple[str, ...]

    def __str__(self) -> str:
        known = ", ".join(self.opened)
        return self._sentence(f"is on {self.device}, which is not open here (open: {known})")


class MemoryElsewhere(Refusal, frozen=True, kw_only=True):
    """A tensor of `device` at an address that is memory of `owner`, or of nobody that is known."""

    device: str
    address: int
    owner: str = ""

    def __str__(self) -> str:
        nobody = f"where nothing of {self.device} begins"
        where = f"which is memory of {self.owner}" if self.owner else nobody
        return self._sentence(
            f"is taken to be on {self.device}, but lies at {self.address:#x}, {where}"
        )


class HostArgument(Refusal, frozen=True, kw_only=True):
    type_name: str

    def __str__(self) -> str:
        return self._sentence(f"is a {self.type_name} of the host")


class TooShort(Refusal, frozen=True, kw_only=True):
    """`start` counts from the allocation, and is None where the whole tensor is meant."""

    end_bytes: int
    num_bytes: int
    start: int | None = None
    site: str = ""

    def __str__(self) -> str:
        reach = "" if self.start is None else f"from byte {self.start} "
        where_made = f", made at {self.site}," if self.site else ""
        return self._sentence(
            f"reaches {reach}to byte {self.end_bytes}, but its allocation{where_made} has "
            f"{self.num_bytes}"
        )


class OutsideTensor(Refusal, frozen=True, kw_only=True):
    """More than a tensor has was asked for: `what` and `asked`, "rows" and "3:9", say."""

    what: str
    asked: str
    num_asked: int
    num_there: int

    def __str__(self) -> str:
        return self._sentence(f"{self.asked}, but it has {self.num_there}")


class Overlap(Refusal, frozen=True, kw_only=True):
    """`other` and `other_tensor` as `argument` and `tensor`."""

    other: str
    other_tensor: str = ""

    def __str__(self) -> str:
        others = Refused(argument=self.other, tensor=self.other_tensor, what="").who
        return (
            f"{self.who} and {others} share memory, but the one is written while the other is read"
        )


class StillWritten(Refusal, frozen=True, kw_only=True):
    writer: str
    stream: str
    here: str

    def __str__(self) -> str:
        return self._sentence(
            f"is still being written by {self.writer} in stream {self.stream or 'default'}, which "
            f"stream {self.here or 'default'} has not waited for"
        )


# -- types and shapes -----------------------------------------------------------------------------


class WrongType(Refusal, frozen=True, kw_only=True):
    dtype: str
    read_as: tuple[str, ...]

    def __str__(self) -> str:
        return self._sentence(f"is {self.dtype}, but it is read as {' or '.join(self.read_as)}")


class WrongAxes(Refusal, frozen=True, kw_only=True):
    shape: Shape
    axes: str

    def __str__(self) -> str:
        return self._sentence(f"has shape {self.shape}, but must be [{self.axes}]")


class WrongSize(Refusal, frozen=True, kw_only=True):
    """`wanted` is the value of `expression`; with `at_least` more will do."""

    axis: int
    size: int
    wanted: int
    expression: str
    at_least: bool = False

    def __str__(self) -> str:
        number = self.expression.isdigit()
        shown = self.expression if number else f"{self.expression} = {self.wanted}"
        verb = "must be at least" if self.at_least else "must be"
        return self._sentence(f"has {self.size} along axis {self.axis}, but {verb} {shown}")


class WrongStrides(Refusal, frozen=True, kw_only=True):
    """`layout` is what a contract calls it; `limit` says it."""

    strides: Shape
    limit: str
    layout: str = "contiguous"

    def __str__(self) -> str:
        return self._sentence(f"has strides {self.strides}, but {self.limit}")


class Misaligned(Refusal, frozen=True, kw_only=True):
    address: int
    alignment_bytes: int
    dtype: str = ""

    def __str__(self) -> str:
        wanted = f"must be aligned to {self.alignment_bytes} bytes"
        if self.dtype:
            wanted = f"{self.dtype} needs a multiple of {self.alignment_bytes}"
        return self._sentence(f"lies at {self.address:#x}, but {wanted}")


# -- numbers --------------------------------------------------------------------------------------


class WrongScalar(Refusal, frozen=True, kw_only=True):
    value: bool | int | float | str | None
    limit: str

    def __str__(self) -> str:
        return self._sentence(f"is {self.value}, but {self.limit}")


class BrokenRule(Refusal, frozen=True, kw_only=True):
    """A relation between symbols of a contract, which have these values."""

    values: dict[str, int | float | str | None]
    condition: str
    limit: str

    def __str__(self) -> str:
        shown = ", ".join(f"{name} = {value}" for name, value in self.values.items())
        return self._sentence(f"{shown}, but {self.limit}")


class FieldOutOfRange(Refusal, frozen=True, kw_only=True):
    """A number of a model file's metadata."""

    file: str
    field: str
    value: int | float
    low: int | float
    high: int | float

    @property
    def range(self) -> str:
        low, high = (
            f"{limit:.2g}" if isinstance(limit, float) else str(limit)
            for limit in (self.low, self.high)
        )
        return f"from {low} to {high}"

    def __str__(self) -> str:
        return f"{self.field} is {self.value}, but must be {self.range}"


class EntryOutOfRange(Refusal, frozen=True, kw_only=True):
    """An index that lies outside of what it indexes, the first of `num_wrong` among `num_live`."""

    entry: Shape
    value: int
    of: str
    bound: int
    num_wrong: int = 1
    num_live: int = 0

    def __str__(self) -> str:
        return f"{_at(self)} = {self.value}, but {self.of} has {self.bound} entries"


class EntryFalls(Refusal, frozen=True, kw_only=True):
    entry: Shape
    value: int

    def __str__(self) -> str:
        return f"{_at(self)} = {self.value}, but its entries must not fall"


class EntryRepeated(Refusal, frozen=True, kw_only=True):
    entry: Shape
    value: int

    def __str__(self) -> str:
        return f"{_at(self)} = {self.value}, but an entry before has the same value"


class WrongCount(Refusal, frozen=True, kw_only=True):
    """`num` of `argument` where there must be `wanted`, the number of `of`."""

    num: int
    wanted: int
    of: str

    def __str__(self) -> str:
        return f"{self.num} {self.argument} for {self.wanted} {self.of}"


class BatchSize(Refusal, frozen=True, kw_only=True):
    num_tokens: int
    max_tokens: int

    def __str__(self) -> str:
        return f"{self.num_tokens} tokens, but 1 to {self.max_tokens} fit one step"


class TableTooShort(Refusal, frozen=True, kw_only=True):
    row: int
    num_entries: int
    num_needed: int

    def __str__(self) -> str:
        return (
            f"{self.argument}[{self.row}] has {self.num_entries} entries, but its sequence reaches "
            f"into block {self.num_needed}"
        )


class StateOfAnother(Refusal, frozen=True, kw_only=True):
    """`owner` is None where nobody has left a state."""

    row: int
    slot: int
    owner: int | None
    wanted: int

    def __str__(self) -> str:
        held = "nobody's state" if self.owner is None else f"the state of request {self.owner}"
        return (
            f"{self.argument}[{self.row}] is {self.slot}, which has {held}, but the tokens are of "
            f"request {self.wanted}"
        )


class StateElsewhere(Refusal, frozen=True, kw_only=True):
    row: int
    slot: int
    num_tokens: int
    position: int

    def __str__(self) -> str:
        return (
            f"{self.argument}[{self.row}] is {self.slot}, whose state stands for "
            f"{self.num_tokens} tokens, but its sequence goes on from position {self.position}"
        )


class StateOfOtherTokens(Refusal, frozen=True, kw_only=True):
    """Digests begin with so many letters that they can be told apart; none: it has not settled."""

    row: int
    slot: int
    owner: int
    digest: str
    wanted: int
    wanted_digest: str

    def __str__(self) -> str:
        held = f"tokens {self.digest}" if self.digest else "tokens that have not settled"
        return (
            f"{self.argument}[{self.row}] is {self.slot}, which request {self.owner} left behind "
            f"{held}, but the tokens of request {self.wanted} begin with {self.wanted_digest}"
        )


class StateInUse(Refusal, frozen=True, kw_only=True):
    """A slot of one kind where one of the other belongs, or of a sequence beside it."""

    row: int
    slot: int
    what: str

    def __str__(self) -> str:
        return f"{self.argument}[{self.row}] is {self.slot}, {self.what}"


# -- grids and resources --------------------------------------------------------------------------


class GridRank(Refusal, frozen=True, kw_only=True):
    grid: tuple[int | float | str, ...]

    def __str__(self) -> str:
        return f"grid {self.grid} has {len(self.grid)} dimensions, but a grid has 1 to 3"


class GridNotWhole(Refusal, frozen=True, kw_only=True):
    axis: int
    shown: str

    def __str__(self) -> str:
        return f"grid[{self.axis}] is {self.shown}, but must be a whole number"


class GridEmpty(Refusal, frozen=True, kw_only=True):
    axis: int
    size: int
    limit: int

    def __str__(self) -> str:
        return self._sentence(
            f"grid[{self.axis}] is {self.size}, but must be from 1 to {self.limit}"
        )


class GridAxisTooLong(Refusal, frozen=True, kw_only=True):
    axis: int
    size: int
    limit: int
    gpu: str

    def __str__(self) -> str:
        return self._sentence(
            f"grid[{self.axis}] is {self.size}, but {self.gpu} has at most {self.limit}"
        )


class GridProduct(Refusal, frozen=True, kw_only=True):
    grid: Shape
    num_programs: int
    limit: int

    def __str__(self) -> str:
        return self._sentence(
            f"grid {self.grid} has {self.num_programs} programs, but at most {self.limit} can be "
            "launched (Triton counts them in 32 bits)"
        )


class GridThreads(Refusal, frozen=True, kw_only=True):
    num_threads: int
    limit: int
    gpu: str

    def __str__(self) -> str:
        return self._sentence(
            f"grid[0] x threads is {self.num_threads}, but {self.gpu} takes at most {self.limit}"
        )


class BlockThreads(Refusal, frozen=True, kw_only=True):
    """`shown` says how many warps of how many threads; `takes` the range, or the most."""

    num_threads: int
    limit: int
    gpu: str
    shown: str = ""
    from_one: bool = False

    def __str__(self) -> str:
        least = "1 to " if self.from_one else ""
        return self._sentence(
            f"a block has {self.num_threads} threads{self.shown}, but {self.gpu} takes "
            f"{least}{self.limit}"
        )


class SharedMemory(Refusal, frozen=True, kw_only=True):
    num_bytes: int
    limit: int
    gpu: str

    def __str__(self) -> str:
        return self._sentence(
            f"a block needs {self.num_bytes} bytes of shared memory, but {self.gpu} has "
            f"{self.limit}"
        )


class ResourceExceeded(Refusal, frozen=True, kw_only=True):
    """What Triton refuses at a launch: `resource` is its own word for it."""

    resource: str
    needed: int
    limit: int
    gpu: str
    shape: str = ""

    def __str__(self) -> str:
        return self._sentence(
            f"launch failed: {self.resource} needs {self.needed}, but {self.gpu} has {self.limit} "
            f"{self.shape}"
        )


class RuntimeRefused(Refusal, frozen=True, kw_only=True):
    """An error of the CUDA or HIP runtime: its number and name, and what it says."""

    code: int
    name: str
    sentence: str
    is_no_code: bool = False
    shape: str = ""

    def __str__(self) -> str:
        return f"launch failed: {self.name} ({self.code}): {self.sentence} {self.shape}"


class NoCode(Refusal, frozen=True, kw_only=True):
    """There is no code for `wanted` (sm_120), that of `gpu`; `built_for` has those that have some.

    All three may be empty: the runtime itself names none.
    """

    sentence: str
    gpu: str = ""
    wanted: str = ""
    built_for: tuple[str, ...] = ()

    def __str__(self) -> str:
        what = f"{self.sentence}: {self.gpu} is {self.wanted}" if self.wanted else self.sentence
        there = f", and there is code for {', '.join(self.built_for)}" if self.built_for else ""
        return self._sentence(what + there)


class CompileError(Refusal, frozen=True, kw_only=True):
    """What Triton's compiler says of a kernel; `file`, `line` and `text` are where, if known."""

    sentence: str
    file: str = ""
    line: int = 0
    text: str = ""

    def __str__(self) -> str:
        return self._sentence(f"does not compile: {self.sentence}")


class NoConfiguration(Refusal, frozen=True, kw_only=True):
    """What Triton's autotuner says when it has nothing left to choose from."""

    sentence: str

    def __str__(self) -> str:
        return self._sentence(f"has no configuration left: {self.sentence}")


class OldInterpreter(Refusal, frozen=True, kw_only=True):
    """What NumPy says to the interpreter of a Triton that is older than it."""

    sentence: str

    def __str__(self) -> str:
        return self._sentence(f"needs an older NumPy in Triton's interpreter: {self.sentence}")


class CaptureError(Refusal, frozen=True, kw_only=True):
    """A call that a stream which is being captured does not take, by the number of its error.

    `in_triton`: Triton made the call, which loads a kernel when it is launched for the first time.
    """

    code: int
    sentence: str
    in_triton: bool = False

    def __str__(self) -> str:
        return self._sentence(f"a graph is being captured: {self.sentence} ({self.code})")


class DeviceAssert(Refusal, frozen=True, kw_only=True):
    """An assertion of a kernel that did not hold, in the first of `num_threads` that said so."""

    condition: str
    function: str
    file: str
    line: int
    block: tuple[int, int, int] | None = None
    thread: tuple[int, int, int] | None = None
    num_threads: int = 1

    def __str__(self) -> str:
        where = f" in block {self.block}, thread {self.thread}" if self.block else ""
        return self._sentence(
            f"{self.function} ({self.file}:{self.line}) asserts {self.condition}, which did not "
            f"hold{where}"
        )


class NotCompiled(Refusal, frozen=True, kw_only=True):
    """Why a compiler made nothing that could be launched."""

    reasons: tuple[AnyRefusal, ...]

    def __str__(self) -> str:
        return "; ".join(map(str, self.reasons))


EntryRefusal = EntryOutOfRange | EntryFalls | EntryRepeated


def _at(refusal: EntryRefusal) -> str:
    return f"{refusal.who}[{', '.join(map(str, refusal.entry))}]"


AnyRefusal = (
    Refused
    | FreedTensor
    | Null
    | OnOtherDevice
    | DeviceNotOpen
    | MemoryElsewhere
    | HostArgument
    | TooShort
    | OutsideTensor
    | Overlap
    | StillWritten
    | WrongType
    | WrongAxes
    | WrongSize
    | WrongStrides
    | Misaligned
    | WrongScalar
    | BrokenRule
    | FieldOutOfRange
    | EntryOutOfRange
    | EntryFalls
    | EntryRepeated
    | WrongCount
    | BatchSize
    | TableTooShort
    | StateOfAnother
    | StateElsewhere
    | StateOfOtherTokens
    | StateInUse
    | GridRank
    | GridNotWhole
    | GridEmpty
    | GridAxisTooLong
    | GridProduct
    | GridThreads
    | BlockThreads
    | SharedMemory
    | ResourceExceeded
    | RuntimeRefused
    | NotCompiled
    | NoCode
    | CompileError
    | NoConfiguration
    | OldInterpreter
    | CaptureError
    | DeviceAssert
)
