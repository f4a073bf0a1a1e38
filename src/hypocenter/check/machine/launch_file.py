"""Launches that a TOML file describes: code, kernel, grid, block, shared memory, arguments.

code = "rope.hip"
[[launch]]
kernel = "rope"
grid = [17]
block = [64]
[launch.arguments]
q = { dtype = "float16", shape = [17, 8, 64], fill = "normal" }
rows = 17
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from hypocenter.base.dtypes import Array
from hypocenter.base.errors import UsageError
from hypocenter.check.machine.launch import (
    MachineReport,
    code_of_file,
    run_checked,
    three_sizes,
)
from hypocenter.check.machine.memory import free, unwritten
from hypocenter.check.machine.widths import Value
from hypocenter.device.amd.code_object import CodeObject
from hypocenter.device.amd.executor import prepare
from hypocenter.device.amd.kernarg import LaunchShape
from hypocenter.replay.findings import Site

_MAX_FILE_BYTES = 1 << 20
_MAX_LAUNCHES, _MAX_ELEMENTS = 256, 1 << 28
Sizes = list[int] | int


class ArrayText(msgspec.Struct, forbid_unknown_fields=True):
    """How an array is made: of a .npy file, of another argument, or of type, shape and `fill`.

    `fill` is zeros, ones, arange, normal (of `seed`), unwritten, or `values` are its elements.
    `is_freed` says that its memory was given back before the launch.
    """

    dtype: str = "float32"
    shape: list[int] | None = None
    fill: str = "zeros"
    seed: int = 0
    values: list[int | float] | None = None
    file: str | None = None
    same_as: str | None = None
    is_freed: bool = False


class LaunchText(msgspec.Struct, forbid_unknown_fields=True):
    """One launch as the file has it; an argument that is "null" is a null pointer."""

    kernel: str | None = None
    grid: Sizes = 1
    block: Sizes = 64
    shared_bytes: int = 0
    arguments: dict[str, ArrayText | int | float | bool | str] = {}


class LaunchFile(msgspec.Struct, forbid_unknown_fields=True):
    code: str | None = None
    launch: list[LaunchText] = []


def read_launch_file(path: Path) -> LaunchFile:
    """The launches of a file; raises UsageError with the field that is wrong."""
    if not path.is_file():
        raise UsageError(
            f"{path}: no such file; it says kernel, grid, block and arguments of the launches "
            "(docs/amd.md)"
        )
    data = path.read_bytes()
    if len(data) > _MAX_FILE_BYTES:
        raise UsageError(f"{path} has {len(data)} bytes, limit {_MAX_FILE_BYTES}")
    try:
        found = msgspec.convert(tomllib.loads(data.decode()), LaunchFile)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.ValidationError) as error:
        raise UsageError(f"{path}: {error}") from error
    if not 0 < len(found.launch) <= _MAX_LAUNCHES:
        raise UsageError(f"{path}: {len(found.launch)} launches, but 1 to {_MAX_LAUNCHES} are run")
    return found


def run_launch_file(
    path: Path, arch: str, budget_seconds: float, code: Path | None = None
) -> list[MachineReport]:
    """Every launch of a file, in order, as code of `arch`; `code` is used where the file has none.

    Raises UsageError and BadCodeObject.
    """
    described = read_launch_file(path)
    if described.code is not None:
        code = path.parent / described.code
    if code is None:
        raise UsageError(f'{path} says no code: code = "kernel.hip", or a .hsaco or .co file')
    held = code_of_file(code, arch)
    share = budget_seconds / len(described.launch)
    lines = _lines_of_launches(path)
    return [
        _run(path, held, text, share, line)
        for text, line in zip(described.launch, lines, strict=False)
    ]


def _run(
    path: Path, code: CodeObject, text: LaunchText, budget_seconds: float, line: int
) -> MachineReport:
    arguments = arguments_of(path, text)
    grid, block = ([of] if isinstance(of, int) else of for of in (text.grid, text.block))
    shape = LaunchShape(three_sizes(grid), three_sizes(block), text.shared_bytes)
    report = run_checked(prepare(code, text.kernel), shape, arguments, budget_seconds)
    return report.launched_at(Site(str(path), line, report.launch.kernel, "[[launch]]"))


def _lines_of_launches(path: Path) -> list[int]:
    lines = path.read_text().splitlines()
    return [n for n, line in enumerate(lines, 1) if line.strip().replace(" ", "") == "[[launch]]"]


def arguments_of(path: Path, text: LaunchText) -> dict[str, Value]:
    """The arguments of a launch, in order; raises UsageError for one that cannot be made."""
    made: dict[str, Value] = {}
    for name, given in text.arguments.items():
        if isinstance(given, ArrayText):
            try:
                array = _array_of(path, given, made)
                made[name] = (
                    free(array) if given.is_freed and isinstance(array, np.ndarray) else array
                )
            except (TypeError, ValueError, OSError, OverflowError) as error:
                raise UsageError(f"{path}: argument {name}: {error}") from error
        elif isinstance(given, str):
            if given != "null":
                raise UsageError(f'{path}: argument {name} is {given!r}; a text can only be "null"')
            made[name] = None
        else:
            made[name] = given
    return made


def _array_of(path: Path, text: ArrayText, made: Mapping[str, Value]) -> Value:
    if text.same_as is not None:
        if text.same_as not in made:
            raise ValueError(f"same_as {text.same_as!r} is no earlier argument")
        return made[text.same_as]
    if text.file is not None:
        return _array_of_file(path.parent / text.file)
    dtype = np.dtype(text.dtype)
    if dtype.kind not in "biufc":
        raise ValueError(f"dtype {text.dtype!r} holds no numbers")
    if text.values is not None:
        return np.array(text.values, dtype).reshape(text.shape or -1)
    shape = _check_shape(text.shape or [])
    if text.fill not in _FILLS:
        raise ValueError(f"fill {text.fill!r}; it is one of {', '.join(_FILLS)}")
    return _FILLS[text.fill](shape, dtype, text.seed)


def _array_of_file(path: Path) -> Array:
    with path.open("rb") as file:
        if file.read(6) != b"\x93NUMPY":
            raise ValueError(f"{path} is no .npy file")
    found: Array = np.ascontiguousarray(np.load(path, allow_pickle=False))
    return found


def _check_shape(shape: Sequence[int]) -> tuple[int, ...]:
    number = 1
    for size in shape:
        number *= size
        if size < 0:
            raise ValueError(f"shape {list(shape)}; sizes are 0 or more")
        if number > _MAX_ELEMENTS:
            raise ValueError(f"shape {list(shape)}; at most {_MAX_ELEMENTS} elements are made")
    return tuple(shape)


def _count_up(shape: tuple[int, ...], dtype: Any, seed: int) -> Array:
    found: Array = np.arange(int(np.prod(shape, dtype=np.int64))).astype(dtype).reshape(shape)
    return found


def _normal(shape: tuple[int, ...], dtype: Any, seed: int) -> Array:
    return np.asarray(np.random.default_rng(seed).standard_normal(shape).astype(dtype))


_FILLS: dict[str, Callable[[tuple[int, ...], Any, int], Array]] = {
    "zeros": lambda shape, dtype, seed: np.zeros(shape, dtype),
    "ones": lambda shape, dtype, seed: np.ones(shape, dtype),
    "arange": _count_up,
    "normal": _normal,
    "unwritten": lambda shape, dtype, seed: unwritten(shape, dtype),
}
