"""Notes that the host reads NaN in a run that follows no operation: one with `--nan` is of use."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hypocenter.foreign.caller import caller_of_now
from hypocenter.record.nonfinite import NumberRead

if TYPE_CHECKING:
    from hypocenter.foreign.recorder import ForeignRecorder


def watch_first_read(
    torch: Any, opened: Callable[[], ForeignRecorder | None], attempt: Callable[..., None]
) -> None:
    """Have the line of the program recorded at which `item` first gives NaN."""
    original = torch.Tensor.item
    is_told = False

    @functools.wraps(original)
    def item(tensor: Any) -> Any:
        nonlocal is_told
        value = original(tensor)
        recorder = opened() if value != value and not is_told else None
        if recorder is not None:
            is_told = True
            site = caller_of_now()[1]
            attempt(functools.partial(recorder.record_number, NumberRead, site=site))
        return value

    torch.Tensor.item = item
