"""Copies between one array of the host and memory that lies in parts, compiled: other threads of
Python go on meanwhile, which they do not between many small copies of numpy."""

from __future__ import annotations

from typing import Any

from hypocenter.base.dtypes import Array
from hypocenter.device.cpu.lang import cgutils, host_function, intrinsic, types


def _copy(data: Any, *, is_out: bool) -> Any:
    """How bytes of `data` from one on are copied to an address, or are those that lie there."""

    def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        array = context.make_array(signature.args[1])(context, builder, values[1])
        ends = builder.gep(array.data, [values[2]]), builder.inttoptr(values[0], array.data.type)
        source, to = ends if is_out else reversed(ends)
        cgutils.raw_memcpy(builder, to, source, values[3], 1)
        return context.get_dummy_value()

    return types.void(types.uint64, data, types.int64, types.int64), emit


@intrinsic
def _copy_out(_context: Any, address: Any, data: Any, start: Any, num_bytes: Any) -> Any:
    return _copy(data, is_out=True)


@intrinsic
def _copy_in(_context: Any, address: Any, data: Any, start: Any, num_bytes: Any) -> Any:
    return _copy(data, is_out=False)


@host_function
def _spread(addresses: Any, sizes: Any, data: Any) -> None:
    """Formula: sizes[i] bytes at addresses[i] = those of `data` u8 behind the ones before, for each
    i of u64 [num_parts] and i64 [num_parts]."""
    start = 0
    for part in range(len(addresses)):
        _copy_out(addresses[part], data, start, sizes[part])
        start += sizes[part]


@host_function
def _collect(addresses: Any, sizes: Any, data: Any) -> None:
    """Formula: `data` u8 = sizes[i] bytes at addresses[i], one behind the other, for each i of u64
    [num_parts] and i64 [num_parts]."""
    start = 0
    for part in range(len(addresses)):
        _copy_in(addresses[part], data, start, sizes[part])
        start += sizes[part]


def spread(data: Array, addresses: Array, sizes: Array) -> None:
    """Copy `data` u8 [sum of sizes] to the host's `addresses` u64 [num_parts], of which each takes
    one of `sizes` i64 [num_parts]. Memory there must be the caller's."""
    assert data.nbytes == sizes.sum(), (data.nbytes, sizes.sum())
    _spread(addresses, sizes, data)


def collect(data: Array, addresses: Array, sizes: Array) -> None:
    """Have `data` u8 [sum of sizes] hold what lies at `addresses`; both are as in `spread`."""
    assert data.nbytes == sizes.sum(), (data.nbytes, sizes.sum())
    _collect(addresses, sizes, data)
