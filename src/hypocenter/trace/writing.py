"""Writes a trace, a line for its header and one for each step. What the lines hold is given."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from hypocenter.base.errors import UsageError
from hypocenter.trace.points import StepLine, TraceHeader

_ENCODER = msgspec.json.Encoder()


class TraceFile:
    """A trace that is being written, each line at once; the last may be cut by a death."""

    def __init__(self, path: Path, header: TraceHeader) -> None:
        """Raises UsageError where there is such a file already, or none can be made."""
        try:
            self._file = path.open("xb", buffering=0)
        except FileExistsError:
            raise UsageError(f"{path} is there already; name a new file for the trace") from None
        except OSError as error:
            raise UsageError(f"the trace cannot be written to {path}: {error.strerror}") from error
        self.path = path
        self._line(header)

    def write(self, step: StepLine) -> None:
        """Raises OSError where it cannot."""
        self._line(step)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _line(self, record: TraceHeader | StepLine) -> None:
        self._file.write(_ENCODER.encode(record) + b"\n")
