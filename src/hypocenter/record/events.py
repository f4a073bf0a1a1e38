"""What a run leaves behind: plain records of its memory, plans, steps, events and its end.

Written before the thing happens (`record/recorder.py`), kept in a bundle (`bundle.py`), read by
the doctor. Nothing here knows torch, Triton or a device; addresses and sizes are plain numbers.
"""

from __future__ import annotations

from typing import TypedDict

import msgspec

from hypocenter.base.errors import ErrorKind
from hypocenter.base.refusals import AnyRefusal
from hypocenter.record.compared import ComparedEqual, ComparedUnequal
from hypocenter.record.compiled_graph import FusedKernel, IndexMadeAgain
from hypocenter.record.engine_events import (
    Answered,
    BlockChanged,
    BlocksNamed,
    Drawn,
    Entered,
    Event,
    LostRank,
    TextAsked,
)
from hypocenter.record.guard_faults import AccessFault
from hypocenter.record.nonfinite import NonFinite, NonFiniteReached, NumberRead, NumbersWatched
from hypocenter.record.order_events import Disordered, OrderWatched

ScalarValue = bool | int | float | str | None

#: The owner of all tensors of a program that is not this package's.
FOREIGN = "the program"


class AllocationRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Memory that was asked for. `kind`: device, mapped (another process's), host
    (pageable) or pinned; `site` is file:line."""

    id: int
    kind: str
    device: str
    address: int
    num_bytes: int
    name: str
    owner: str
    site: str


class TensorRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A named view as its maker declared it; `strides` and `offset` count elements of `dtype`.

    A packed weight has its GGUF dtype here. `part` names the array of a packed weight (words,
    scales, minima) that a kernel's pointer refers to, with the dtype and extent of that array.
    """

    id: int
    name: str
    owner: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    allocation: int
    address: int
    extent_bytes: int
    part: str = ""


class ArgumentRecord(msgspec.Struct, frozen=True):
    """A kernel's or contract's argument: a tensor by its id, or a scalar; null is neither.

    Beside a tensor `value` is torch's name of the type that its pointer is passed as, where that
    is not the tensor's own.
    """

    name: str
    tensor: int | None = None
    value: ScalarValue = None


class SourceRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The source text of a kernel or of a function that it calls; `id` is its sha256.

    `constants` are the numbers of its module that it names.
    """

    id: str
    function: str
    file: str
    first_line: int
    text: str
    callees: tuple[str, ...] = ()
    constants: dict[str, ScalarValue] = {}


class LaunchRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A prepared launch. `arguments` are the kernel's parameters, `facts` the contract's.

    `constants` are tl.constexpr parameters and `options` what was told to the compiler; `contract`
    is a key of `Bundle.contracts`, and `declared` the contract's module and name, as in
    "hypocenter.kernels.rowwise.norm:CONTRACT". `site` is where it was prepared (file:line), and
    `caller` the line beyond the kernels' own files that asked for it; "" where nobody knows.
    """

    kernel: str
    function: str
    device: str
    grid: tuple[int, ...] = ()
    num_warps: int = 0
    arguments: tuple[ArgumentRecord, ...] = ()
    facts: tuple[ArgumentRecord, ...] = ()
    constants: dict[str, ScalarValue] = {}
    options: dict[str, ScalarValue] = {}
    source: str = ""
    contract: str = ""
    declared: str = ""
    site: str = ""
    caller: str = ""
    #: Where the launch is not on the device's default stream.
    stream: str = ""


class PlanRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The launches of a step (`name` says of which shape), in order, over static buffers.

    `host_launches` are those of the CPU that launches of a GPU make in their place.
    """

    id: int
    name: str
    device: str
    launches: tuple[LaunchRecord, ...]
    host_launches: tuple[LaunchRecord, ...] = ()


class Values(msgspec.Struct, frozen=True):
    """What the host put into a tensor: the bytes of `shape` elements of `dtype`, row-major."""

    tensor: int
    dtype: str
    shape: tuple[int, ...]
    data: bytes


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A request of a step: its row of the block table, what runs, and the blocks that it has.

    The first `num_adopted` blocks it reads: the cache kept them of another request, which may be in
    the same step. All others are its own, until it has filled them.

    Where layers carry a state, `state_slot` is its slot. Its first step may read the checkpoint in
    slot `state_source`, which the request `left_by` has left; None: it goes on from its own.

    `samples`: a token is drawn from the logits of its last one. The last `num_drafts` of those that
    run were tried before they were chosen, so a token is drawn before each of these, too. Of those
    that run `num_kept` have logits that are kept, from number `first_kept` on. `samples` and
    `num_kept` are None in bundles from before these fields.

    `digest` is a keyed one over all its token ids so far (`keyed_digest.py`): equal runs of one
    machine have equal digests, and without its key nobody can try what the text was.
    """

    id: int
    row: int
    first_position: int
    num_tokens: int
    blocks: tuple[int, ...]
    digest: str = ""
    num_adopted: int = 0
    state_slot: int | None = None
    state_source: int | None = None
    left_by: int | None = None
    samples: bool | None = None
    num_kept: int | None = None
    first_kept: int = 0
    num_drafts: int = 0

    @property
    def first_drawn(self) -> int:
        """The position of the first token that is drawn, where one is."""
        return self.first_position + self.num_tokens - self.num_drafts


class ArgumentDeclaration(msgspec.Struct, frozen=True, kw_only=True):
    """What a contract says of a tensor argument; the fields of `contracts/demands.py:Arg`.

    `reach` and `indexes` say in words what is written and what is indexed, up to `bound`.
    """

    name: str
    dtypes: tuple[str, ...]
    shape: str
    layout: str = "contiguous"
    access: str = "read"
    fills: str = ""
    reach: str = ""
    hides: bool = False
    indexes: str = ""
    bound: str = ""

    @property
    def is_written(self) -> bool:
        return self.access in ("write", "both")


class Declaration(msgspec.Struct, frozen=True, kw_only=True):
    """What a kernel demands of its arguments; of scalars and among symbols in words."""

    kernel: str
    arguments: tuple[ArgumentDeclaration, ...] = ()
    scalars: dict[str, str] = {}
    rules: tuple[str, ...] = ()

    def argument(self, name: str) -> ArgumentDeclaration | None:
        """What is said of an argument; None for one that is not a tensor."""
        return next((arg for arg in self.arguments if arg.name == name), None)


class ContractRecord(msgspec.Struct, frozen=True):
    """A declaration, and the key that launches name it by: a kernel may have several."""

    key: str
    declaration: Declaration


# -- events, in the order in which the host made them ---------------------------------------------


class Now(TypedDict):
    """The fields of an event that is made now."""

    seq: int
    step: int


class Allocated(Event, frozen=True, kw_only=True, tag=True):
    allocation: AllocationRecord


class Freed(Event, frozen=True, kw_only=True, tag=True):
    allocation: int
    site: str


class Stepped(Event, frozen=True, kw_only=True, tag=True):
    """A plan is about to run, with what the host put into its inputs; `graph` is replayed, if any.

    A step may run several: the decoder's, the sampler's. `filled_by_device` is an input that the
    device has filled by itself, in a step before, or 0: with what, stands among `inputs` if that
    was learned.
    """

    plan: int
    graph: int = 0
    inputs: tuple[Values, ...] = ()
    requests: tuple[RequestRecord, ...] = ()
    filled_by_device: int = 0


class IdsLearned(Event, frozen=True, kw_only=True, tag=True):
    """With what the device had filled an input of the Stepped number `of`, once it is known.

    `digests` are those of the requests there; empty for one that had ended by then, so that nobody
    wants what the step brings it.
    """

    of: int
    inputs: tuple[Values, ...]
    digests: tuple[str, ...]


class Copied(Event, frozen=True, kw_only=True, tag=True):
    """A copy between host and device, written before it; `direction`: in, out.

    `is_pinned`: the device reads or writes the host buffer at `host_address` later, by itself.
    """

    direction: str
    tensor: int | None
    address: int
    num_bytes: int
    host_address: int = 0
    is_pinned: bool = False
    stream: str = ""
    site: str = ""


class Waited(Event, frozen=True, kw_only=True, tag=True):
    """The host has waited for a copy to itself that was asked for before, in step `copied_in`.

    Such a copy `is_pinned`; of others the host waits at once.
    """

    copied_in: int
    tensor: int | None


class HostWrote(Event, frozen=True, kw_only=True, tag=True):
    """The host changed a pinned buffer."""

    host_address: int
    num_bytes: int
    site: str = ""


class Launched(Event, frozen=True, kw_only=True, tag=True):
    """A launch outside of every plan.

    With `graph` it was captured into that graph, and runs at each GraphReplayed. `compiled`: its
    kernel was compiled for it, during the capture.
    """

    launch: LaunchRecord
    graph: int = 0
    compiled: bool = False


class Repeated(Event, frozen=True, kw_only=True, tag=True):
    """A launch as the KnownLaunch `of`, but for grid and numbers; it is read as a Launched."""

    of: int
    grid: tuple[int, ...]
    scalars: tuple[ScalarValue, ...]


class Tuned(Event, frozen=True, kw_only=True, tag=True):
    """Triton's autotuner has run one configuration of `kernel` to take its time.

    Launches of that kernel between the events `began` and this one were such trials. Before each
    the tuner clears the tensors of the parameters `cleared`, and after it puts back `restored`.
    `file`, `line` and `text` are those of the decorator that tunes, "" where nobody knows.
    """

    kernel: str
    began: int
    restored: tuple[str, ...] = ()
    cleared: tuple[str, ...] = ()
    file: str = ""
    line: int = 0
    text: str = ""


class UnwrittenRead(Event, frozen=True, kw_only=True, tag=True):
    """Torch read what nobody wrote. `is_decided`: one number or a comparison came of it."""

    tensor: int
    operation: str
    site: str
    num_unwritten: int = 0
    num_elements: int = 0
    first: tuple[int, ...] = ()
    last: tuple[int, ...] = ()
    is_decided: bool = True


class StaleAddress(Event, frozen=True, kw_only=True, tag=True):
    """A launch (`launched`) was given a table whose element `index` is an address without memory.

    The program had asked a tensor for it at `asked_at`; the `num_bytes` there were freed at
    `freed_at`.
    """

    launched: int
    tensor: int
    index: tuple[int, ...]
    address: int
    num_bytes: int
    asked_at: str = ""
    freed_at: str = ""


class StreamEvent(Event, frozen=True, kw_only=True, tag=True):
    """`action` record or wait, of event `event`, in `stream`; synchronise waits for all."""

    action: str
    event: int
    stream: str
    site: str = ""


class Captured(Event, frozen=True, kw_only=True, tag=True):
    """A graph took a plan's launches, with the allocations that its pointers lie in.

    Outside of plans: the Launched of that graph, without what lies in memory of the graph's own.
    `seq` is that of the capture's beginning then, and `site` where it was ended.
    """

    graph: int
    plan: int
    allocations: tuple[int, ...]
    site: str = ""


class GraphReplayed(Event, frozen=True, kw_only=True, tag=True):
    """All launches that were captured into `graph`, outside of plans, are about to run again."""

    graph: int
    site: str = ""
    stream: str = ""


class CodePlace(msgspec.Struct, frozen=True, kw_only=True):
    """A statement of this package's own Python; `module` is its name below the package."""

    module: str
    function: str
    file: str
    line: int
    text: str


class Called(Event, frozen=True, kw_only=True, tag=True):
    """A call of the runtime that reported something other than success, and where it was made.

    `outcome` is what it said, `kernel` that of a launch. With `is_statement` the call is the text
    of the program's own line, in which an exception ended it. `raised_in` is where this package's
    own Python raised, the innermost statement first; empty for what it raises on purpose. `lost` is
    the process that the call needed and that was gone.
    """

    call: str
    outcome: str
    site: str = ""
    kernel: str = ""
    kind: ErrorKind = ErrorKind.OTHER
    is_statement: bool = False
    raised_in: tuple[CodePlace, ...] = ()
    lost: LostRank | None = None


class Rejected(Event, frozen=True, kw_only=True, tag=True):
    """A launch of `kernel`, or a copy of `tensor`, that was refused before it was made.

    `site` is the line of the program that asked for it, where that is known.
    """

    refusal: AnyRefusal
    site: str = ""
    kernel: str = ""
    tensor: str = ""
    launch: LaunchRecord | None = None

    @property
    def what(self) -> str:
        return self.kernel or f"copy of {self.tensor}"


class MaskedOff(Event, frozen=True, kw_only=True, tag=True):
    """An access of a guarded launch left its tensor, and was masked off: the first of its site.

    `launched` is the number of the event that tells of the launch, `launch` its record.
    """

    fault: AccessFault
    launched: int
    launch: LaunchRecord


class RanUnguarded(Event, frozen=True, kw_only=True, tag=True):
    """Launches of `kernel` ran as they are in a guarded run: why, and at which of its lines."""

    kernel: str
    reason: str
    file: str = ""
    line: int = 0
    expression: str = ""


class LostLaunch(Event, frozen=True, kw_only=True, tag=True):
    """`num` launches of `kernel` so far could not be recorded, for one reason."""

    kernel: str
    reason: str
    num: int


AnyEvent = (
    Allocated
    | Freed
    | Stepped
    | IdsLearned
    | Entered
    | TextAsked
    | BlockChanged
    | BlocksNamed
    | Drawn
    | Answered
    | Copied
    | Waited
    | HostWrote
    | Launched
    | Repeated
    | Tuned
    | UnwrittenRead
    | StaleAddress
    | ComparedEqual
    | ComparedUnequal
    | StreamEvent
    | Captured
    | GraphReplayed
    | Called
    | Rejected
    | MaskedOff
    | RanUnguarded
    | LostLaunch
    | Disordered
    | OrderWatched
    | NonFinite
    | NonFiniteReached
    | NumbersWatched
    | NumberRead
    | FusedKernel
    | IndexMadeAgain
)


def is_lasting(event: AnyEvent) -> bool:
    """Whether it stays without its step: of memory or a compiler, found by a watch, a graph's."""
    if isinstance(event, Launched):
        return event.graph > 0
    of_memory = Allocated | Freed | Captured | MaskedOff | RanUnguarded | LostLaunch | Tuned
    of_memory |= StaleAddress | ComparedEqual | ComparedUnequal
    of_order = Disordered | OrderWatched
    of_numbers = NonFinite | NonFiniteReached | NumbersWatched | NumberRead
    of_compiler = FusedKernel | IndexMadeAgain
    return isinstance(event, of_memory | of_order | of_numbers | of_compiler)


#: The plan of a Place whose launch belongs to no plan; its `launch` is the event's `seq` then.
OUTSIDE_PLANS = -1


class Place(msgspec.Struct, frozen=True):
    """A launch of a plan in a step: number `launch` of plan `plan`."""

    step: int
    plan: int
    launch: int


class Reached(msgspec.Struct, frozen=True):
    """What is known without waiting: everything up to `completed` ended, `submitted` was begun."""

    submitted: Place | None
    completed: Place | None = None


class Statistics(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor after a launch: figures of its finite elements, and how many are not finite.

    `digest` is a keyed one of its bytes; `first_nonfinite` the index of the first NaN or infinity;
    `num_poisoned` counts elements that still hold the pattern of undefined memory, `num_below`
    those of `num_inf` that are -infinity. `sketch` are a few sums of the finite elements with
    signs that depend on their index alone: of two tensors of one shape the sketches are about as
    far apart as the elements (Johnson and Lindenstrauss, 1984), in the unit of `rms`. Of packed
    weights nothing but the digest is known: `is_digest_alone`.
    """

    place: Place
    tensor: int
    digest: str
    low: float
    high: float
    mean: float
    rms: float
    num_nan: int
    num_inf: int
    num_poisoned: int = 0
    num_below: int = 0
    first_nonfinite: tuple[int, ...] | None = None
    sketch: tuple[float, ...] = ()
    is_digest_alone: bool = False
