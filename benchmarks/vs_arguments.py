"""Counts as the comparisons with llama.cpp take them from their command lines."""

from __future__ import annotations

import argparse


def natural(text: str) -> int:
    """From 0 on, of seven digits at most; raises ArgumentTypeError."""
    if not text.isascii() or not text.isdigit() or len(text) > 7:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 on")
    return int(text)


def positive(text: str) -> int:
    """The same, but for 0."""
    if natural(text) == 0:
        raise argparse.ArgumentTypeError("0 is too few")
    return int(text)
