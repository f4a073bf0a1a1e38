"""What a guarded access is, and what one that left its tensor leaves behind.

`device/guard/` makes them, of the engine's plans and of other programs' launches.
"""

from __future__ import annotations

import msgspec


class SourceLine(msgspec.Struct, frozen=True):
    """A line of somebody's source, and the function that it belongs to."""

    file: str
    line: int
    function: str


class GuardSite(msgspec.Struct, frozen=True):
    """One guarded access: `expression` at `calls[0]`, reached through `calls[1:]` outwards.

    It may go through each of `parameters` (one or two) of the kernel; the words of a launch's slots
    from `slot` on belong to it, one per parameter.
    """

    slot: int
    operation: str
    parameters: tuple[str, ...]
    expression: str
    calls: tuple[SourceLine, ...]


#: A byte offset that is this large, or its negative less one, may be any beyond it.
FAR = (1 << 35) - 1


class AccessFault(msgspec.Struct, frozen=True):
    """An access that a guarded launch masked off because it lay outside its parameter's tensor.

    `byte_offset` counts from the tensor's first element; of the lanes and programs at fault at this
    site it is one. `program` is None when the grid is too large for the record to tell. `launch` is
    the number of the launch within its step, from 0.
    """

    kernel: str
    site: GuardSite
    parameter: str
    null: bool
    byte_offset: int
    program: tuple[int, int, int] | None
    launch: int = 0

    @property
    def is_far(self) -> bool:
        """Whether the access was at `byte_offset` or further away."""
        return not -FAR <= self.byte_offset < FAR
