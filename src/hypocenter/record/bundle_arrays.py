"""The arrays of a bundle: what tensors held, in a file beside its records, each under a key.

The keys are made of numbers that stay the same when a record beside it is damaged.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec
import numpy as np
import safetensors
import safetensors.numpy

from hypocenter.base.dtypes import NUMPY_DTYPES, RECORD_NAMES
from hypocenter.base.tensor import DType
from hypocenter.record.bundle_json import DAMAGE, MAX_AXES, damage_text
from hypocenter.record.contents import LaunchOutcome, Snapshot
from hypocenter.record.events import AnyEvent, Stepped, Values
from hypocenter.record.gap import Gap

#: Arrays of a bundle, and the bytes of a name, type and place of one at most: what their file says
#: of them is parsed as a whole, at ten times its size in memory.
MAX_ARRAYS, MAX_ENTRY_BYTES = 1 << 17, 128

Record = AnyEvent | Snapshot | LaunchOutcome
_R = TypeVar("_R", bound=Record)


def arrays_as_bytes(records: Iterator[Record]) -> bytes:
    """The file of all arrays in these records."""
    seen: collections.Counter[str] = collections.Counter()
    pairs = (pair for record in records for part in _parts(record, seen) for pair in part[1])
    return safetensors.numpy.save({key: np.frombuffer(v.data, np.uint8) for key, v in pairs})


def read_arrays(data: bytes, name: str, missing: list[Gap]) -> dict[str, bytes]:
    """The arrays in such a file, by their keys; what is wrong with it is told in `missing`."""
    num_bytes = int.from_bytes(data[:8], "little")
    if num_bytes > MAX_ARRAYS * MAX_ENTRY_BYTES:
        limit = f"above {MAX_ARRAYS * MAX_ENTRY_BYTES}, which is enough for {MAX_ARRAYS} arrays"
        missing.append(Gap.damage(name, f"its header has {num_bytes} bytes, {limit}"))
        return {}
    try:
        arrays: list[tuple[str, dict[str, Any]]] = safetensors.deserialize(data)  # type: ignore[no-untyped-call]
        return {key: bytes(array["data"]) for key, array in arrays}
    except (safetensors.SafetensorError, LookupError, TypeError, *DAMAGE) as error:
        missing.append(Gap.damage(name, damage_text(error)))
        return {}


class ArrayFiller:
    """Puts arrays back into records, in the order in which they were written.

    `num_lost` counts those that are not there, or not as long as their shape says.
    """

    def __init__(self, arrays: dict[str, bytes]) -> None:
        self._arrays = arrays
        self._seen: collections.Counter[str] = collections.Counter()
        self.num_lost = 0

    def fill(self, record: _R) -> _R:
        """The record with what its tensors held; without those that are lost."""
        filled = {}
        for name, pairs in _parts(record, self._seen):
            held = [(values, self._arrays.get(key)) for key, values in pairs]
            whole = [(values, data) for values, data in held if _fits(values, data)]
            self.num_lost += len(held) - len(whole)
            filled[name] = tuple(msgspec.structs.replace(v, data=data) for v, data in whole)
        return msgspec.structs.replace(record, **filled) if filled else record


def _parts(
    record: Record, seen: collections.Counter[str]
) -> Iterator[tuple[str, list[tuple[str, Values]]]]:
    """Each field of a record that holds arrays: its name, and arrays with their keys."""
    if isinstance(record, Stepped):
        fields = {"inputs": f"step{record.step}.{record.seq}"}
    elif isinstance(record, Snapshot):
        fields = {"values": f"snapshot{record.step}.{record.plan}.{record.launch}"}
    elif isinstance(record, LaunchOutcome):
        fields = {part: f"{part}{record.step}.{record.launch}" for part in ("given", "gave")}
    else:
        return
    for name, stem in fields.items():
        seen[stem] += 1
        again = f"#{seen[stem]}" if seen[stem] > 1 else ""
        held: tuple[Values, ...] = getattr(record, name)
        yield name, [(f"{stem}{again}.{at}", values) for at, values in enumerate(held)]


def _fits(values: Values, data: bytes | None) -> bool:
    name = RECORD_NAMES.get(values.dtype, values.dtype.upper())
    if data is None or len(values.shape) > MAX_AXES or min(values.shape, default=1) < 0:
        return False
    num_elements = math.prod(values.shape)
    if name not in DType.__members__:
        plain = NUMPY_DTYPES.get(name)
        return plain is not None and num_elements * plain.itemsize == len(data)
    dtype = DType[name]
    return (
        len(values.shape) <= MAX_AXES
        and num_elements % dtype.block_elements == 0
        and dtype.num_bytes(num_elements) == len(data)
    )
