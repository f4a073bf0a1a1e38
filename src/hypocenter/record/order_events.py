"""Two uses of one memory that nothing orders, as a program was seen to ask for them."""

from __future__ import annotations

import enum

import msgspec

from hypocenter.record.engine_events import Event


class Disorder(enum.StrEnum):
    """What a use of memory without order is.

    WAIT: two streams use it. HOST_READ: the host reads what a stream still writes. HOST_WRITE: the
    host writes what a stream still uses. REUSED: it was freed while a stream still used it, and
    what was made next has it, or may have it.
    """

    WAIT = "wait"
    HOST_READ = "host read"
    HOST_WRITE = "host write"
    REUSED = "reused"


class UseRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A use of memory: `what` did it at `site` in `stream`, which the program calls `stream_name`.

    `launch` is the number of the event that tells of a Triton launch, 0 for others, and `argument`
    its parameter, or that of torch's operation. `address` to `end` is what it may use of it.
    """

    what: str
    site: str
    stream: str
    stream_name: str
    is_write: bool
    address: int
    end: int
    launch: int = 0
    argument: str = ""


class OrderStep(msgspec.Struct, frozen=True):
    """`action`: record or wait, of event `event` in `stream`; host waits for `event`, or for
    `stream`, "" for all; blocking: `stream` and the default stream `other` order themselves."""

    action: str
    stream: str = ""
    event: int = 0
    other: str = ""


class Disordered(Event, frozen=True, kw_only=True, tag=True):
    """`first` and `second` use the same memory, one writes, and nothing orders them.

    `between` is all that was asked for between the two which might have ordered them; without its
    beginning where `is_cut`. `tensor` is how the program spells the memory at the second use, made
    at `made`; of what was REUSED it was freed at `freed`, and `is_same` says whether the second use
    is of the very bytes. `is_whole` says that both uses are known to the byte, and have one in
    common.
    """

    kind: Disorder
    first: UseRecord
    second: UseRecord
    between: tuple[OrderStep, ...] = ()
    is_cut: bool = False
    tensor: str = ""
    made: str = ""
    freed: str = ""
    is_same: bool = True
    is_whole: bool = True
    graph: bool = False


class OrderWatched(Event, frozen=True, kw_only=True, tag=True):
    """The order of a program was watched to its end: how much of it there was.

    `num_dropped` pairs without order are not told of. `problem` is why not all of it was watched.
    """

    num_operations: int
    num_launches: int
    streams: tuple[str, ...]
    num_waits: int
    num_dropped: int = 0
    problem: str = ""
