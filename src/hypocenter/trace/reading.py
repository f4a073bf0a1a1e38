"""Reads a trace, whoever wrote it: every size is bounded, and what does not fit is refused."""

from __future__ import annotations

import itertools
import math
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec
import numpy as np

from hypocenter.base.dtypes import Float32s
from hypocenter.base.errors import UsageError
from hypocenter.trace.points import (
    FORMAT,
    MAX_LAYERS,
    MAX_STEPS,
    NUM_SKETCHES,
    OF_LAYERS,
    OF_LOGIT_ROWS,
    POINTS,
    VERSION,
    ModelTrace,
    Point,
    PointGroup,
    PointPlace,
    StepLine,
    TracedStep,
    TraceHeader,
    order_of,
)

#: Of the first line, of a line, and of all lines.
_MAX_HEADER_BYTES, _MAX_LINE_BYTES, _MAX_BYTES = 1 << 16, 1 << 30, 8 << 30
_MAX_TOKENS, _MAX_AXIS, _MAX_AXES = 1 << 20, 1 << 31, 8
_T = TypeVar("_T")


def is_trace(path: Path) -> bool:
    """Whether a file begins as a trace does."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(64).startswith(b'{"format":"' + FORMAT.encode() + b'"')


def read_trace(path: Path) -> ModelTrace:
    """Raises UsageError for what is no trace, one of another version, or one that is damaged."""
    try:
        with open_regular(path) as file:
            return _read(path, file)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error


def open_regular(path: Path) -> BinaryIO:
    """Open to read; raises UsageError for what is no regular file, and OSError."""
    # Without O_NONBLOCK, opening a named pipe would wait for a writer.
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise UsageError(f"{path} is no regular file; name one")
    return file


def _read(path: Path, file: BinaryIO) -> ModelTrace:
    first = file.readline(_MAX_HEADER_BYTES)
    header = _decode(path, 1, first, TraceHeader)
    if header.format != FORMAT or header.version != VERSION:
        raise UsageError(
            f"{path}: a {header.format!r} of version {header.version}; this program reads version "
            f"{VERSION} of a {FORMAT!r}"
        )
    if not 0 <= header.num_layers <= MAX_LAYERS:
        raise UsageError(f"{path}: {header.num_layers} layers; at most {MAX_LAYERS} are read")
    steps: list[TracedStep] = []
    for number, line in _lines(path, file, len(first)):
        if not line.endswith(b"\n"):
            return ModelTrace(header, tuple(steps), is_whole=False)  # its writer died
        step = _step_of(path, number, _decode(path, number, line, StepLine), header)
        if steps and step.step <= steps[-1].step:
            raise UsageError(f"{path}: line {number} has step {step.step} out of order")
        steps.append(step)
    return ModelTrace(header, tuple(steps))


def _lines(path: Path, file: BinaryIO, num_read: int) -> Iterator[tuple[int, bytes]]:
    for number in itertools.count(2):
        if not (line := file.readline(_MAX_LINE_BYTES)):
            return
        num_read += len(line)
        if len(line) == _MAX_LINE_BYTES or num_read > _MAX_BYTES or number > MAX_STEPS:
            raise UsageError(
                f"{path}: line {number} is beyond what is read of a trace ({_MAX_BYTES} bytes, "
                f"{_MAX_LINE_BYTES} a line, {MAX_STEPS} steps); trace fewer points or steps"
            )
        yield number, line


def _decode(path: Path, number: int, line: bytes, kind: type[_T]) -> _T:
    try:
        return msgspec.json.decode(line, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: line {number} is none of a trace: {error}") from error


def _step_of(path: Path, number: int, line: StepLine, header: TraceHeader) -> TracedStep:
    """Raises UsageError for numbers that contradict one another."""
    wrong = _fault_of_tokens(line)
    points: dict[PointPlace, Point] = {}
    for group in line.groups:
        wrong = wrong or _fault_of(group, header) or _fault_of_rows(group, line)
        if not wrong:
            for point in _points_of(group):
                if point.place in points:
                    wrong = f"{point.text} is there twice"
                points[point.place] = point
    if wrong:
        raise UsageError(f"{path}: line {number} is damaged: {wrong}")
    return TracedStep(
        line.step,
        line.token_ids,
        line.positions,
        line.sequences,
        line.logit_rows,
        {place: points[place] for place in sorted(points, key=order_of)},
    )


def _points_of(group: PointGroup) -> Iterator[Point]:
    num = len(group.names)
    sketches = np.frombuffer(group.sketches, "<f4").reshape(num, NUM_SKETCHES)
    data: Iterable[Float32s | None] = [None] * num
    if group.data is not None:
        data = np.frombuffer(group.data, "<f4").reshape(num, *group.shape)
    for at, values in enumerate(data):
        yield Point(
            name=group.names[at],
            layer=group.layers[at],
            shape=group.shape,
            dtype=group.dtype,
            digest=group.digests[16 * at : 16 * at + 16],
            low=group.low[at],
            high=group.high[at],
            mean=group.mean[at],
            rms=group.rms[at],
            num_nan=group.num_nan[at],
            num_inf=group.num_inf[at],
            sketch=sketches[at],
            values=values,
        )


def _fault_of_tokens(line: StepLine) -> str:
    """What cannot be in the lists of a step; empty where all can."""
    num = len(line.token_ids)
    if not num == len(line.positions) == len(line.sequences) <= _MAX_TOKENS:
        return "its lists of tokens differ in length"
    limits = {"step": (1 << 62, (line.step,)), "logit_rows": (num, line.logit_rows)}
    for name in ("token_ids", "positions", "sequences"):
        limits[name] = 1 << 31, getattr(line, name)
    for name, (limit, values) in limits.items():
        for value in values:
            if not 0 <= value < limit:
                return f"{value} in {name}, which must be from 0 to {limit - 1}"
    return "" if num else "it has no tokens"


def _fault_of_rows(group: PointGroup, line: StepLine) -> str:
    """Whether each point has a row for each token, or for each logit row."""
    for name in group.names:
        num = len(line.logit_rows if name in OF_LOGIT_ROWS else line.token_ids)
        if len(group.shape) != 2 or group.shape[0] != num:
            return f"{name} has the shape {group.shape}, and there are {num} rows"
    return ""


def _fault_of(group: PointGroup, header: TraceHeader) -> str:
    """What does not fit in a group; empty where all does."""
    num = len(group.names)
    lists = (group.layers, group.low, group.high, group.mean, group.rms)
    if any(len(each) != num for each in (*lists, group.num_nan, group.num_inf)):
        return f"lists of {', '.join(group.names)[:64]} differ in length"
    if len(group.digests) != 16 * num or len(group.sketches) != 4 * NUM_SKETCHES * num:
        return f"digests or sketches of {', '.join(group.names)[:64]} are not {num}"
    for name, layer in zip(group.names, group.layers, strict=True):
        if name not in POINTS:
            return f"there is no point {name[:64]!r}"
        if (layer is None) == (name in OF_LAYERS):
            return f"{name} has the layer {layer}"
        if layer is not None and not 0 <= layer < header.num_layers:
            return f"{name} is of layer {layer}, and there are {header.num_layers}"
    of = group.names[0] if num else "nothing"
    if not 0 < len(group.shape) <= _MAX_AXES:
        return f"{of} has a shape of {len(group.shape)} axes"
    if any(not 0 <= axis < _MAX_AXIS for axis in group.shape):
        return f"{of} has the shape {group.shape}"
    if not np.isfinite(np.frombuffer(group.sketches, "<f4")).all():
        return f"a sketch of {of} is not finite"
    if group.data is not None and len(group.data) != 4 * num * math.prod(group.shape):
        return f"{len(group.data)} bytes of elements for {num} points of {group.shape}"
    return ""
