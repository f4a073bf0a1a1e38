"""Marks around parts of an answer, and how much of one the end of a text may be. Reads none."""

from __future__ import annotations


def num_begun(text: str, mark: str) -> int:
    """Length of the end of the text with which the mark may begin."""
    for num in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:num]):
            return num
    return 0
