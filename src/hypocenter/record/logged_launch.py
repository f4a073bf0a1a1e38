"""The launch that a runtime's own log ends in; facts, for a bundle.

`coredump/rocm_log.py` reads it of a log of ROCm's. Knows no vendor's format.
"""

from __future__ import annotations

import msgspec

from hypocenter.record.driver_run import Dims

#: Parameters that are kept of one launch.
MAX_ARGUMENTS = 256


class LoggedArgument(msgspec.Struct, frozen=True, kw_only=True):
    """Parameter `number`: an address or a number, None where the log has none of it.

    `first` and `past` are the memory that the runtime knows at an address, None without such. Of
    memory that a program hands out by itself, as torch does, it is the whole that was asked for.
    """

    number: int
    name: str = ""
    value: int | None = None
    is_address: bool = False
    first: int | None = None
    past: int | None = None


class LoggedLaunch(msgspec.Struct, frozen=True, kw_only=True):
    """The launch whose call was still open where the log ends, or first returned with `outcome`.

    `grid` counts blocks, `block` threads; both are zeros where the log does not tell. `variable` is
    what had each launch waited for, so that no other one of its thread was under way.
    `num_launches` were logged by its process, with this one.
    """

    kernel: str
    call: str
    outcome: str = ""
    variable: str
    num_launches: int
    grid: Dims = (0, 0, 0)
    block: Dims = (0, 0, 0)
    shared_bytes: int = 0
    arguments: tuple[LoggedArgument, ...] = ()
