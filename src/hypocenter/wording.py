"""How counts and foreign text are spelled in messages."""

from __future__ import annotations

import signal


def count_text(number: int, noun: str, plural: str = "") -> str:
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def signal_name(number: int) -> str:
    """SIGABRT and the like; `signal 99` for one that has no name here."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
