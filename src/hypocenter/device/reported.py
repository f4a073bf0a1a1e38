"""Errors of ours and of others as the events that a recorder keeps, and its own errors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec

from hypocenter.errors import CopyRejected, DeviceFault, HypoError, LaunchRejected
from hypocenter.recording import Called, LaunchRecord, Rejected

_MAX_CHARS = 2000

P = ParamSpec("P")


def never_breaks(method: Callable[P, None]) -> Callable[P, None]:
    """What a method of the recorder cannot do is counted, told once, and does not matter."""

    @functools.wraps(method)
    def tried(*args: P.args, **keywords: P.kwargs) -> None:
        try:
            method(*args, **keywords)
        except Exception as error:
            recorder: Any = args[0]
            recorder.failed_to_write(error)

    return tried


def reported(
    error: BaseException, launch: LaunchRecord | None, *, seq: int, step: int
) -> Rejected | Called:
    """What an error says: a refusal of `launch` or of a copy, or a call that failed."""
    if isinstance(error, CopyRejected):
        kernel = f"copy of {error.tensor}"
        return Rejected(seq=seq, step=step, kernel=kernel, reason=error.reason)
    if isinstance(error, LaunchRejected):
        return Rejected(seq=seq, step=step, kernel=error.kernel, reason=error.reason, launch=launch)
    if isinstance(error, DeviceFault):
        return Called(seq=seq, step=step, call=error.call, outcome=error.reason)
    name = type(error).__name__
    call = "" if isinstance(error, HypoError) else name
    return Called(seq=seq, step=step, call=call, outcome=f"{name}: {error}"[:_MAX_CHARS])
