"""Counts the launches of a program that could not be recorded, by kernel and reason.

A launch is never lost in silence: each reason is written down when it is met first, and its number
each time that it has doubled and at the end. Nothing in here reaches the program.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from typing import Any

#: Kernels with a reason that are told apart.
MAX_REASONS, MAX_REASON_CHARS = 64, 300
_OTHERS = ("other kernels", "of more reasons than are told")


class LostLaunches:
    """`opened` gives the recorder of this process, or None where there is none."""

    def __init__(self, opened: Callable[[], Any]) -> None:
        self._opened = opened
        self._nums: Counter[tuple[str, str]] = Counter()

    def count(self, kernel: str, reason: str) -> None:
        """A launch of `kernel` was or is being made, and cannot be recorded."""
        key = kernel, reason[:MAX_REASON_CHARS]
        if key not in self._nums and len(self._nums) >= MAX_REASONS:
            key = _OTHERS
        self._nums[key] += 1
        num = self._nums[key]
        if num & (num - 1) == 0:
            self._tell(key)

    def tell(self) -> None:
        """Write all numbers down: the program ends."""
        for key in list(self._nums):
            self._tell(key)

    def _tell(self, key: tuple[str, str]) -> None:
        with contextlib.suppress(Exception):  # a recorder that fails has warned on stderr
            if (recorder := self._opened()) is not None:
                recorder.record_lost(*key, self._nums[key])
