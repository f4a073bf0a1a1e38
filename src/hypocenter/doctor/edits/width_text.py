"""A kernel's text in which what it loads is float32. Runs nothing: a replay says what that does."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from hypocenter.doctor.kernel_text import function_of
from hypocenter.doctor.mask_text import MaskEdit, accesses_at, splice_text
from hypocenter.record.events import SourceRecord


def float_edits(source: SourceRecord, parameter: str) -> Iterator[MaskEdit]:
    """The text with one load through `parameter` cast to float32, each in turn."""
    function = function_of(source.text)
    if function is None:
        return
    for at in range(function.lineno, (function.end_lineno or function.lineno) + 1):
        for access in accesses_at(source, source.first_line + at - 1, parameter):
            call = access.call
            if access.operation != "load" or call.lineno != at:
                continue
            stop = call.end_lineno or call.lineno, call.end_col_offset or 0
            was = ast.unparse(call)
            yield MaskEdit(
                source.first_line + at - 1,
                was,
                f"{was}.to(tl.float32)",
                splice_text(source, stop, stop, ".to(tl.float32)"),
            )
