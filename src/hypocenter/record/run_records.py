"""What a run was, as its own process told it: the process, the model, the devices.

What the run did is in `events.py`.
"""

from __future__ import annotations

import msgspec


class ProcessRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The process that recorded: its command, when it began, and what it ran with.

    `environment` holds the variables that change what is run, `packages` versions by name, and
    `driver` those of the GPU drivers that are loaded.
    """

    pid: int
    command: tuple[str, ...]
    started: str
    python: str = ""
    platform: str = ""
    driver: str | None = None
    environment: dict[str, str] = {}
    packages: dict[str, str] = {}


class ModelRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The model that a run loaded: the name of its file without the folder, and what that says.

    `quantisation` is what most of its tensors are of, such as Q4_K_M.
    """

    name: str
    architecture: str
    quantisation: str


class DeviceRecord(msgspec.Struct, frozen=True, kw_only=True):
    """An opened device; `limits` are the fields of `device/limits.py:GpuLimits`.

    `slot` is the number under which its marks write, None where it has none. `is_read_back`: what
    small tensors of a program held there was read before each launch. `sees_reads`: new memory was
    marked, and torch's operations were seen to read of it.
    """

    name: str
    limits: dict[str, int | str | tuple[int, int, int]] | None = None
    slot: int | None = None
    is_read_back: bool = False
    sees_reads: bool = False


#: Where a program is looked at closely, new memory of floats is marked, up to so many bytes of it.
MARKED_BYTES = 1 << 16


class CheckRecord(msgspec.Struct, frozen=True):
    """A check that may be on (`armed`), and how often it ran."""

    name: str
    armed: bool
    num_runs: int
