"""Has a program's questions where its tensors lie noted."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hypocenter.foreign.asked_addresses import ASKED

if TYPE_CHECKING:
    from hypocenter.foreign.graph_hooks import GraphWatch
    from hypocenter.foreign.recorder import ForeignRecorder


def watch_asked(
    torch: Any,
    opened: Callable[[], ForeignRecorder | None],
    graphs: GraphWatch,
    attempt: Callable[..., None],
) -> None:
    """Have each `data_ptr()` of a tensor noted.

    But not in a launch, which asks for its arguments' own, nor in a capture: what a graph is
    captured with lives on in its pool.
    """
    original = torch.Tensor.data_ptr

    @functools.wraps(original)
    def data_ptr(tensor: Any) -> int:
        address: int = original(tensor)
        recorder = opened()
        is_in_launch = recorder is not None and recorder.reads.is_in_launch
        if not is_in_launch and graphs.captured_into is None:
            attempt(ASKED.note, tensor, address)
        return address

    torch.Tensor.data_ptr = data_ptr
