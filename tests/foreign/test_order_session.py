"""What the watch of streams itself asks of a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hypocenter.foreign.streams.session import OrderSession


@pytest.mark.parametrize(
    ("has_streams", "is_capturing", "num_waits"),
    [(True, False, 1), (True, True, 0), (False, False, 0)],
)
def test_nothing_is_waited_for_while_a_graph_is_captured(
    has_streams: bool, is_capturing: bool, num_waits: int
) -> None:
    waits: list[int] = []
    torch: Any = SimpleNamespace(
        cuda=SimpleNamespace(is_current_stream_capturing=lambda: is_capturing),
        _C=SimpleNamespace(_cuda_synchronize=lambda: waits.append(1)),
    )
    session = OrderSession.__new__(OrderSession)
    session._torch, session.watch = torch, SimpleNamespace(has_streams=has_streams)  # type: ignore[assignment]
    session.end_filling()
    assert len(waits) == num_waits
