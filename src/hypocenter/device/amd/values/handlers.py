"""The machine code of each opcode's meaning: compiled by numba when first needed, kept on disk.

A handler takes the address of rows of 64 int64 and a number of lanes. It reads the operands' rows
and writes those of the result and the flag. It knows no registers, so one serves each encoding.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite
import numba
import numpy as np
from numba import carray, cfunc, types
from numba.core.registry import cpu_target
from numba.core.runtime import rtsys

from hypocenter.device.amd.values import arithmetic, division
from hypocenter.device.amd.values.meanings import Meaning
from hypocenter.settings.cache_folder import private_folder

#: Rows: operands a, b, c, what the destination held, condition in, result, flag.
ROW_A, ROW_D, ROW_K, ROW_RESULT, ROW_FLAG = 0, 3, 4, 5, 6
NUM_ROWS, LANES = 10, 64

_SIGNATURE = types.void(types.CPointer(types.int64), types.int64)
_TO_OPERAND = {
    "u16": "{} & 0xFFFF",
    "i16": "sign_extend({}, 16)",
    "u32": "{} & 0xFFFFFFFF",
    "i32": "sign_extend({}, 32)",
    "u64": "{}",
    "i64": "{}",
    "f16": "as_f16({} & 0xFFFF)",
    "f32": "as_f32({})",
    "f64": "as_f64({})",
}
_FROM_RESULT = {
    "u16": "{} & 0xFFFF",
    "u32": "{} & 0xFFFFFFFF",
    "u64": "{}",
    "f16": "bits16({})",
    "f32": "bits32({})",
    "f64": "bits64({})",
    "none": "{}",
}


def source_of(meaning: Meaning) -> str:
    """The Python of a handler."""
    lines = [
        f"{name} = {_TO_OPERAND[kind].format(f't[l + {LANES * row}]')}"
        for row, (name, kind) in enumerate(zip("abc", meaning.types, strict=False))
    ]
    if meaning.uses("d"):
        # What is added to has the result's type.
        read = _TO_OPERAND[meaning.result_type].format(f"t[l + {LANES * ROW_D}]")
        lines.append(f"d = {read}")
    if meaning.uses("k"):
        lines.append(f"k = t[l + {LANES * ROW_K}]")
    if meaning.uses("lane"):
        lines.append("lane = l")
    lines.append(f"r = {_FROM_RESULT[meaning.result_type].format(f'({meaning.result})')}")
    lines.append(f"t[l + {LANES * ROW_RESULT}] = r")
    if meaning.flag:
        lines.append(f"t[l + {LANES * ROW_FLAG}] = 1 if ({meaning.flag}) else 0")
    body = "\n        ".join(lines)
    return (
        f"def handler(rows, n):\n    t = carray(rows, {NUM_ROWS * LANES})\n"
        f"    for l in range(n):\n        {body}\n"
    )


@cache
def address_of_meaning(meaning: Meaning) -> int:
    """Where the machine code of a meaning lies: from disk, or compiled now and left there."""
    source = source_of(meaning)
    folder, _ = private_folder("amd")
    digest = hashlib.sha256(f"{_version()}\n{source}".encode()).hexdigest()[:32]
    file = Path(folder) / f"{digest}.o" if folder else None
    if file is not None and file.is_file() and (found := _load(file.read_bytes())):
        return found
    compiled = _compile(source)
    if file is not None:
        _keep(file, compiled)
    return int(compiled.address)


#: Machine code that must not be freed while its address may be called.
_ALIVE: list[Any] = []


def _compile(source: str) -> Any:
    namespace = {"carray": carray, "np": np, **_helpers()}
    exec(compile(source, "<meaning>", "exec"), namespace)
    compiled = cfunc(_SIGNATURE, error_model="numpy")(namespace["handler"])
    _ALIVE.append(compiled)
    return compiled


def _keep(file: Path, compiled: Any) -> None:
    """Name, object code and bitcode, each with its length before it; moved there when whole."""
    name, _, (code, bitcode) = compiled._library.serialize_using_object_code()
    parts = [name.encode(), compiled.native_name.encode(), code, bitcode]
    data = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    aside = file.with_name(f"{file.name}.{os.getpid()}")
    aside.write_bytes(data)
    aside.replace(file)


def _load(data: bytes) -> int:
    """The address of a handler kept on disk; 0 where the file is not whole."""
    parts = []
    while len(data) >= 8:
        size = int.from_bytes(data[:8], "little")
        parts.append(data[8 : 8 + size])
        data = data[8 + size :]
    if len(parts) != 4 or data:
        return 0
    state = (parts[0].decode(), "object", (parts[2], parts[3]))
    rtsys.initialize(cpu_target.target_context)
    library = cpu_target.target_context.codegen().unserialize_library(state)
    _ALIVE.append(library)
    return int(library.get_pointer_to_function(parts[1].decode()))


def _helpers() -> dict[str, Callable[..., Any]]:
    return {
        name: value
        for module in (division, arithmetic)
        for name, value in vars(module).items()
        if callable(value) and not name.startswith("_")
    }


@cache
def _version() -> str:
    """What machine code depends on beside its own source."""
    files = [Path(module.__file__ or "").read_bytes() for module in (arithmetic, division)]
    codegen = cpu_target.target_context.codegen()
    made_by = (numba.__version__, llvmlite.__version__, *map(str, codegen.magic_tuple()))
    return hashlib.sha256(b"".join(files) + repr(made_by).encode()).hexdigest()
