"""What a replay is asked for: which programs run, what memory holds, whose text, and who sees it.

Plain data, without Triton; `replay.py` and `recorded.py` do what it says.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hypocenter.base.dtypes import Array
from hypocenter.record.events import SourceRecord

if TYPE_CHECKING:
    from hypocenter.replay.arguments import Argument
    from hypocenter.replay.census import Census
    from hypocenter.replay.rebuild import Rebuilt


#: Makes of the operands of a `tl.dot`, and the name of its precision, those that are multiplied.
ReadOperands = Callable[[Array, Array, str], tuple[Array, Array]]


@dataclass(frozen=True, slots=True)
class Schedule:
    """Which programs of a launch run, in which order, and for how long.

    `programs` are linear numbers, x fastest; None is all, or, past `budget_seconds`, a sample.
    `first` are run before the others. A program may take `program_seconds`, or as many as
    `replay.py` says. Seconds are those of the processor. Of one of a single warp (`num_warps`) the
    lanes go in step. `operands` is asked for those of each product.
    """

    programs: Collection[int] | None = None
    first: Collection[int] = ()
    budget_seconds: float | None = None
    program_seconds: float | None = None
    num_warps: int | None = None
    operands: ReadOperands | None = None


def _nowhere(address: int) -> tuple[int, int] | None:
    return None


@dataclass(frozen=True, slots=True)
class GivenMemory:
    """What is known of the memory that a launch is given.

    `undefined` names tensors whose contents nothing has defined yet, `outputs` those that must be
    written everywhere. `initialised` maps the data pointer of a storage to one bool per byte, read
    and updated; `find_storage` gives start and bytes of the storage at a real address, for kernels
    that load pointers from memory.
    """

    undefined: Collection[str] = ()
    outputs: Collection[str] = ()
    initialised: Mapping[int, Array] = field(default_factory=dict)
    find_storage: Callable[[int], tuple[int, int] | None] = _nowhere


def _ignore(_: Any) -> None:
    return None


@dataclass(frozen=True, slots=True)
class Observers:
    """Who is told of what a replay does.

    `on_arguments` sees what became of each tensor, `on_lanes` each access, as
    `CheckedMemory.on_lanes` says, `on_program` each program before it is run, and `on_numbers` each
    result that is not finite.
    """

    on_arguments: Callable[[tuple[Any, ...]], None] = _ignore
    on_lanes: Callable[[str, Array, Array, Array, int], None] | None = None
    on_program: Callable[[tuple[int, int, int]], None] = _ignore
    on_numbers: Callable[..., Array | None] | None = None


@dataclass(frozen=True, slots=True)
class KernelText:
    """Which text of a recorded kernel runs: the recorded one, which `may_run` where it is foreign.

    `is_installed`: this installation's kernel of that name in its place. `edited` has another text
    for the recorded function of its id.
    """

    may_run: bool = False
    is_installed: bool = False
    edited: SourceRecord | None = None


@dataclass(frozen=True, slots=True)
class SeenReplay:
    """Who sees what the replay of a recorded launch did.

    `on_done` gets the launch as it was rebuilt, and its tensors as the programs left them;
    `census`, which must be a new one, every access.
    """

    on_done: Callable[[Rebuilt, Sequence[Argument]], None] | None = None
    census: Census | None = None
