"""Runs a piece of a torch program under the watch over numbers, in this process, and judges it."""

from __future__ import annotations

import contextlib
import io
import itertools
import traceback
from collections.abc import Callable
from typing import Any

from hypocenter.doctor.case import Case
from hypocenter.doctor.diagnosis import Claim
from hypocenter.doctor.rungs.nonfinite.first import nonfinite
from hypocenter.foreign.last_exception import call_of
from hypocenter.foreign.nonfinite.hooks import NumberHooks, enter_mode
from hypocenter.foreign.nonfinite.watch import NumberWatch
from hypocenter.record.bundle import Bundle
from hypocenter.record.fault_record import FaultRecord


def events_of(program: Callable[[], object]) -> list[Any]:
    """What a run of `program` leaves; an exception ends it as it would end a script."""
    import torch

    events: list[Any] = []
    numbers = itertools.count(1)

    def tell(event: Any, **fields: Any) -> None:
        events.append(event(seq=next(numbers), step=0, **fields))

    hooks = NumberHooks(lambda: None, lambda: True)
    hooks.watch = NumberWatch(torch, tell, lambda: True, lambda made, given: None)
    readers = {name: getattr(torch.Tensor, name) for name in ("tolist", "__repr__")}
    for name in readers:
        hooks._watch_reader(torch.Tensor, name)
    passes = {name: getattr(torch.autograd, name) for name in ("backward", "grad")}
    for name in passes:
        hooks._watch_backward(torch.autograd, name)
    mode = enter_mode(torch, hooks)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            program()
    except Exception as error:
        call, site, _ = call_of(error.__traceback__)
        hooks.note_end(error, site, call)
        traceback.clear_frames(error.__traceback__)
    finally:
        hooks.close()
        mode.__exit__(None, None, None)
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
