"""Runs a piece of a torch program under the watch over numbers, in this process, and judges it."""

from __future__ import annotations

import contextlib
import io
import itertools
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hypocenter.doctor.case import Case
from hypocenter.doctor.diagnosis import Claim
from hypocenter.doctor.rungs.nonfinite.first import nonfinite
from hypocenter.foreign.last_exception import call_of
from hypocenter.foreign.nonfinite.hooks import NumberHooks
from hypocenter.foreign.ops.build import NotBuilt, load
from hypocenter.foreign.ops.native import NativeOps
from hypocenter.record.bundle import Bundle
from hypocenter.record.fault_record import FaultRecord

#: The machine code of this process; None: Python sees the operations.
_NATIVE: list[NativeOps | None] = [None]


def native_ops() -> NativeOps | None:
    """What sees the operations."""
    return _NATIVE[0]


@contextlib.contextmanager
def seen_natively() -> Iterator[None]:
    """Within, machine code sees the operations; skips where it cannot be had."""
    import torch

    try:
        _NATIVE[0] = NativeOps(torch, load(torch))
    except NotBuilt as error:
        pytest.skip(str(error))
    try:
        yield
    finally:
        _NATIVE[0] = None


def events_of(program: Callable[[], object]) -> list[Any]:
    """What a run of `program` leaves; an exception ends it as it would end a script."""
    import torch

    events: list[Any] = []
    numbers = itertools.count(1)

    def tell(event: Any, **fields: Any) -> None:
        events.append(event(seq=next(numbers), step=0, **fields))

    hooks = NumberHooks(lambda: None, lambda: True)
    begin = threading.Thread.start
    readers = {name: getattr(torch.Tensor, name) for name in ("tolist", "__repr__")}
    for name in readers:
        hooks._watch_reader(torch.Tensor, name)
    passes = {name: getattr(torch.autograd, name) for name in ("backward", "grad")}
    for name in passes:
        hooks._watch_backward(torch.autograd, name)
    hooks._watch_threads(threading.Thread)
    native = native_ops()
    mode = hooks.see(torch, tell, lambda made, given: None, native)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            program()
    except Exception as error:
        call, site, _ = call_of(error.__traceback__)
        hooks.note_end(error, site, call)
        traceback.clear_frames(error.__traceback__)
    finally:
        hooks.close()
        if native is not None:
            native.end()
            native.asked.told.clear()
        else:
            mode.__exit__(None, None, None)
        threading.Thread.start = begin  # type: ignore[method-assign]
        for name, reader in readers.items():
            setattr(torch.Tensor, name, reader)
        for name, run in passes.items():
            setattr(torch.autograd, name, run)
    return events


def judged(program: Callable[[], object]) -> Claim:
    """What the doctor says of a run of `program`."""
    fault = FaultRecord(kind="none", message="")
    bundle = Bundle(kind="suspect", fault=fault, events=tuple(events_of(program)))
    [claim] = nonfinite(Case(bundle))
    return claim
