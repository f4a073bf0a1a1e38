"""How counts and foreign text are spelled in messages."""

from __future__ import annotations


def count_text(number: int, noun: str, plural: str = "") -> str:
    return f"{number} {noun if number == 1 else plural or noun + 's'}"
