"""What verbs write: data to stdout at once, everything else to stderr, nothing raw.

Texts of files and bundles may come from anyone: what would steer a terminal is spelled out. Only
what a model generates goes out as it is.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import sys
from typing import Any, NoReturn

import msgspec

from hypocenter.base.errors import EXIT_PIPE


def emit(text: str) -> None:
    """Put a piece of what a model generates on stdout at once."""
    _put(text)


def think(text: str) -> None:
    """Put a piece of what a model thinks on stderr at once: it is no part of the answer."""
    print(text, end="", file=sys.stderr, flush=True)


def show(text: str) -> None:
    """Put a text of ours on stdout, as whole lines."""
    _put(printable(text.removesuffix("\n")) + "\n")


def show_json(value: Any) -> None:
    """Put a value of structs, dictionaries and lists on stdout as JSON; NaN becomes null.

    Characters that are not printable are escaped as JSON has it, so that it stays JSON.
    """
    plain = _finite(msgspec.to_builtins(value, str_keys=True))
    text = json.dumps(plain, indent=2, ensure_ascii=False, allow_nan=False)
    # Outside of strings JSON has ASCII alone, and a line end inside one is escaped already.
    _put(re.sub(r"[^\n\x20-\x7e]", _escape, text) + "\n")


def _put(text: str) -> None:
    """Raises OSError that names stdout: of a full disk one wants to know which."""
    try:
        print(text, end="", flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OSError(error.errno, error.strerror, "stdout") from error


def say(message: str) -> None:
    """A line that is no data."""
    print(f"hypo: {one_line(message)}", file=sys.stderr, flush=True)


def printable(text: str) -> str:
    """The text with control characters spelled out, line ends kept."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)


def one_line(text: str) -> str:
    """The text with control characters spelled out, line ends too."""
    return printable(text).replace("\n", "\\n")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _escape(match: re.Match[str]) -> str:
    character = match[0]
    return character if character.isprintable() else json.dumps(character)[1:-1]


def leave_broken_pipe() -> NoReturn:
    """Leave without a word; what is still buffered for stdout has no reader."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    with contextlib.suppress(OSError, ValueError):
        os.dup2(devnull, sys.stdout.fileno())
    sys.exit(EXIT_PIPE)
