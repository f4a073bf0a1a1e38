"""What stands in a recorder's place where nothing is recorded: it takes all and does nothing.

Who records so needs no `if`: the methods of a `Recorder` are all here.
"""

from __future__ import annotations

from typing import Any

from hypocenter.record.ring import HEADER_BYTES

Header = memoryview
#: A header that nobody reads, and the first place in it.
UNREAD_HEADER: tuple[Header, int] = (memoryview(bytearray(HEADER_BYTES)).cast("Q"), 0)


class NotRecording:
    """See `Recorder`, whose methods these are."""

    is_on = False
    #: There is no step in a record that is not made.
    current_step = 0

    def record_begin(self, plan: Any) -> tuple[Header, int]:
        return UNREAD_HEADER

    def record_capture(self, plan: Any, device: str, bases: Any) -> int:
        return 0

    def _ignore(self, *arguments: Any, **keywords: Any) -> None: ...

    record_allocation = record_free = record_copy = record_wait = record_host_write = _ignore
    record_launch_outside_plans = record_failure = record_refusal = record_check = record_ids = (
        _ignore
    )
    record_asked = record_entry = record_block_change = record_answer = record_blocks = (
        record_draws
    ) = _ignore
    record_stream_event = record_step = record_model = device = resume = end_step = arm = _ignore
