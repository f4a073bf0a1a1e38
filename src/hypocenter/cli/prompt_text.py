"""The text that a command is to read: of -p, of a file or of stdin, decoded and bounded.

Encodes no tokens.
"""

from __future__ import annotations

import sys

from hypocenter.base.errors import UsageError
from hypocenter.cli.options import PromptOptions

#: Far above any context; keeps `-f /dev/zero` from filling the memory.
MAX_PROMPT_BYTES = 64 << 20


def read_prompt(options: PromptOptions) -> str | None:
    """The text of -p or -f; None when neither is given. Raises UsageError or OSError."""
    if options.prompt is not None and options.file is not None:
        raise UsageError("both -p and -f; give the prompt once")
    if options.prompt is not None:
        # Bytes of the command line that are not UTF-8 arrive as surrogates.
        return decode(options.prompt.encode(errors="surrogateescape"), "-p")
    if options.file is None:
        return None
    if options.file == "-":
        if not sys.stdin:
            raise UsageError("-f - reads the prompt from stdin, but stdin is closed")
        return decode(sys.stdin.buffer.read(MAX_PROMPT_BYTES + 1), "stdin")
    try:
        with open(options.file, "rb") as file:
            return decode(file.read(MAX_PROMPT_BYTES + 1), options.file)
    except (FileNotFoundError, IsADirectoryError) as error:
        raise UsageError(f"-f {options.file}: {error.strerror}") from error


def decode(data: bytes, source: str) -> str:
    """Bytes of `source` as text; raises UsageError for too many of them, and for no UTF-8."""
    if len(data) > MAX_PROMPT_BYTES:
        raise UsageError(f"{source}: the prompt is longer than {MAX_PROMPT_BYTES} bytes")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{source}: the prompt is not UTF-8: byte {data[error.start]:#04x} at {error.start}"
        ) from error
