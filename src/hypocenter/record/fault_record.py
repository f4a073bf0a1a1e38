"""How a run ended: what was said of it, by whom, and what the system knows.

Plain records; `watch/` fills them.
"""

from __future__ import annotations

import enum

import msgspec

from hypocenter.base.errors import ErrorKind
from hypocenter.base.refusals import AnyRefusal


class MemoryKill(enum.StrEnum):
    """What is known of the kernel's killer of processes where a process died.

    LOGGED: the kernel's log names the process. COUNTED, NOT_COUNTED: it ended some process of the
    control group while the run lasted, or none.
    """

    UNKNOWN = "unknown"
    LOGGED = "logged"
    COUNTED = "counted"
    NOT_COUNTED = "not counted"


class FaultRecord(msgspec.Struct, frozen=True, kw_only=True):
    """How a run ended. `kind`: crash, error, hang, nonfinite, differs, none.

    `call` is what reported it, of `kernel` where it is a launch, and with `is_statement` the text
    of the program's own line, at `site`; `error` what it said, `error_kind` what that is about.
    `address` is the fault's, where the driver gave one (AMD: that of the page, `address_bytes` its
    size); `signal` what ended the process. `refusal` has the facts of what a runtime or a compiler
    refused, or of an assertion, where its words tell them. `waiting` is where each thread stood
    when nothing was under way and nothing was begun; else it is empty.
    """

    kind: str
    message: str
    call: str = ""
    kernel: str = ""
    is_statement: bool = False
    error: str = ""
    error_kind: ErrorKind = ErrorKind.OTHER
    is_asynchronous: bool = True
    address: int | None = None
    address_bytes: int = 1
    access: str = ""
    signal: int | None = None
    exit_code: int | None = None
    stack: str = ""
    waiting: tuple[str, ...] = ()
    memory_kill: MemoryKill = MemoryKill.UNKNOWN
    site: str = ""
    refusal: AnyRefusal | None = None
