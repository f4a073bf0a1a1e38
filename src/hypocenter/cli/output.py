"""What verbs write: data to stdout at once, everything else to stderr, nothing raw."""

from __future__ import annotations

import sys


def emit(text: str) -> None:
    """Put a piece of the answer on stdout at once."""
    print(text, end="", flush=True)


def say(message: str) -> None:
    """A line that is no data."""
    print(f"hypo: {message}", file=sys.stderr, flush=True)


def printable(text: str) -> str:
    """The text with control characters spelled out: a bundle may come from anyone."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)
