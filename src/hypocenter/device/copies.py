"""Copies between host and device: what each must meet before it begins, and lines that tell of it.

On the CPU a copy is a copy all the same: code above this floor never reaches for `.data`. A copy
that is refused has touched nothing.
"""

from __future__ import annotations

import contextlib
import logging
import math
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import numpy as np

from hypocenter.base.dtypes import Array
from hypocenter.base.errors import CopyRejected
from hypocenter.base.refusals import (
    AnyRefusal,
    DeviceNotOpen,
    FreedTensor,
    MemoryElsewhere,
    Misaligned,
    Null,
    OutsideTensor,
    Refused,
    StillWritten,
    TooShort,
    WrongStrides,
)
from hypocenter.base.tensor import DType, Tensor
from hypocenter.device.arrays import AnyArray, address_of, constants, is_host, kind_of, on_host
from hypocenter.device.devices import (
    call_device,
    call_site,
    is_open,
    names_of,
    open_names,
    order_of,
    record_errors,
    stream_of,
    will_run,
)
from hypocenter.device.stream_order import AddressRange, Writes
from hypocenter.record.recorder import current

log = logging.getLogger("hypocenter.copies")


_is_armed = True

#: What the host sees of each type that can be copied.
NUMPY_TYPES: dict[DType, Any] = {
    DType.F32: np.float32,
    DType.F16: np.uint16,  # bits; kernels convert them as they load
    DType.BF16: np.int16,  # bits too
    DType.I16: np.int16,
    DType.I32: np.int32,
    DType.I64: np.int64,
    DType.U8: np.uint8,
}
_KINDS: dict[DType, np.dtype[Any]] = {dtype: np.dtype(kind) for dtype, kind in NUMPY_TYPES.items()}


def to_device(tensor: Tensor, values: Array, *, is_recorded: bool = False) -> None:
    """Copy host values into the leading part of `tensor`; the element types must be equal.

    On a GPU the rest of the rows that are written becomes zero. `is_recorded`: a record of the
    step holds them already. Raises CopyRejected, before anything is copied, when the values do not
    fit or there is no memory for them.
    """
    _refuse_missing(tensor)
    _refuse_for(tensor, _misfit_in(tensor, values) or obstacle(tensor, values.nbytes))
    if tensor.device == "cpu":
        tensor.data[tuple(slice(0, size) for size in values.shape)] = values
        return
    if values.shape[1:] != tensor.shape[1:]:
        wide = np.zeros((values.shape[0], *tensor.shape[1:]), values.dtype)
        wide[tuple(slice(0, size) for size in values.shape)] = values
        values = wide
        _refuse_for(tensor, obstacle(tensor, values.nbytes))
    data = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    if data.nbytes:
        if not is_recorded:
            _record_copy("in", tensor, data.nbytes)
        _will_write(tensor, data.nbytes)
        copy_in(tensor.device, _who(tensor), tensor.address, data)


def array_to_host(tensor: Tensor, array: AnyArray) -> Array:
    """The elements of `array`, the first ones of `tensor`, for a launch of a GPU that is running:
    it has been let through, and waits for those before it."""
    _record_copy("out", tensor, array.nbytes)
    return on_host(array)


def array_to_device(tensor: Tensor, array: AnyArray, values: Array) -> None:
    """Put as many values of its type into `array`, the first elements of `tensor`; as above."""
    _record_copy("in", tensor, values.nbytes)
    array[:] = constants(values, kind_of(array), array)


def refuse_unfit(whole: Tensor, filled: Iterable[tuple[Tensor, Array]]) -> None:
    """Raises CopyRejected when values do not fit their tensors, or `whole`, in which these lie, is
    no longer there."""
    _refuse_missing(whole)
    if _is_armed:
        for tensor, values in filled:
            _refuse_for(tensor, _misfit_in(tensor, values))
        _refuse_for(whole, obstacle(whole, whole.extent_bytes))


def to_host(tensor: Tensor, num_rows: int | None = None, *, out: Array | None = None) -> Array:
    """A host copy of the first `num_rows` rows (all by default), after all launches before it.

    `out` is an array of that shape to copy into. It waits for the stream that the caller is in.
    Raises CopyRejected, before anything is copied, for memory that is not there, an `out` that
    does not fit, and a tensor that another stream may still be writing.
    """
    shape = _looked_at(tensor, num_rows)
    if out is not None:
        _refuse_for(tensor, _misfit_out(tensor, shape, out))
    copied = _copying(tensor, shape, is_later=False)()
    if out is None:
        return copied
    out[...] = copied
    return out


def to_host_later(tensor: Tensor, num_rows: int | None = None) -> Callable[[], Array]:
    """`to_host` without the wait: what is returned waits for the copy, and for nothing after it."""
    return _copying(tensor, _looked_at(tensor, num_rows), is_later=True)


def _looked_at(tensor: Tensor, num_rows: int | None) -> tuple[int, ...]:
    """The shape of the first rows of `tensor`, which can be copied to the host."""
    _refuse_missing(tensor)
    num_rows = tensor.shape[0] if num_rows is None else num_rows
    if not 0 <= num_rows <= tensor.shape[0]:
        beyond = OutsideTensor(
            what="rows",
            asked=f"{num_rows} rows",
            num_asked=num_rows,
            num_there=tensor.shape[0],
            way_out="ask for 0 to that many",
        )
        refuse(tensor, beyond)
    shape = (num_rows, *tensor.shape[1:])
    _refuse_for(tensor, obstacle(tensor, math.prod(shape) * tensor.dtype.block_bytes))
    return shape


def _copying(tensor: Tensor, shape: tuple[int, ...], *, is_later: bool) -> Callable[[], Array]:
    if tensor.device == "cpu":
        copied = np.array(tensor.data[: shape[0]])
        return lambda: copied
    num_bytes = math.prod(shape) * tensor.dtype.block_bytes
    _refuse_for(tensor, _missing_wait(tensor, num_bytes))
    waited, kind = _copy_out(tensor, num_bytes, is_later), _KINDS[tensor.dtype]
    return lambda: waited().view(kind).reshape(shape)


def peek(tensor: Tensor) -> Array | None:
    """What lies in a tensor, for whoever looks on at work in progress; None where `obstacle` says.

    Other streams may still be writing it.
    """
    if not tensor.shape or obstacle(tensor, tensor.extent_bytes):
        return None
    if tensor.device == "cpu":
        return np.array(tensor.data)
    copied = _copy_out(tensor, tensor.extent_bytes)().view(_KINDS[tensor.dtype])
    return np.asarray(copied.reshape(tensor.shape))


def arm_copies(is_armed: bool) -> None:
    """Say whether copies are refused; without that a wrong one is the device's to refuse."""
    global _is_armed
    _is_armed = is_armed
    current().arm("host copies", is_armed)


def obstacle(tensor: Tensor, num_bytes: int) -> AnyRefusal | None:
    """Why the first `num_bytes` of `tensor` cannot be copied at all; None when they can be."""
    if found := _own_obstacle(tensor, num_bytes):
        return found
    device, address = tensor.device, tensor.allocation.address
    if device == "cpu" or not num_bytes:
        return None
    if not is_open(device):
        known = ("cpu", *open_names())
        return DeviceNotOpen(device=device, opened=known, way_out="open_device it first")
    if address in names_of(device):
        return None
    owner = next((name for name in open_names() if address in names_of(name)), "")
    return MemoryElsewhere(
        device=device,
        address=address,
        owner=owner,
        way_out="copy it by the device that it was allocated on",
    )


def _copy_out(tensor: Tensor, num_bytes: int, is_later: bool = False) -> Callable[[], Array]:
    """Ask for a copy; what is returned waits for it, which the record is told if it `is_later`."""
    if not num_bytes:
        return lambda: np.zeros(0, np.uint8)
    device, address = tensor.device, tensor.address
    _record_copy("out", tensor, num_bytes, is_pinned=is_later)
    step = current().current_step
    order, stream = order_of(device), stream_of(device)
    before, sync = order.record_event(stream), f"waits for {order.num_pending(stream)} before it"
    at: dict[str, int] = {}
    with contextlib.ExitStack() as asking:
        if log.isEnabledFor(logging.DEBUG):
            told = _log_copy(
                "D2H", _who(tensor), src=address, num_bytes=num_bytes, stream=stream, sync=sync
            )
            at = asking.enter_context(told)
        asked = call_device(device, "copy_out_later", address, num_bytes)
        waiting = asking.pop_all()

    def wait_for_copy() -> Array:
        with waiting:
            copied = record_errors(asked)
            at["dst"] = copied.ctypes.data
        order.host_waited(before)
        if is_later:
            current().record_wait(tensor, step)
        return np.asarray(copied)

    return wait_for_copy


def copy_in(device: str, who: str, address: int, data: AnyArray, *, pinned: bool = False) -> None:
    """Copy bytes to an address that was allocated for them; `who` has it, for the log.

    They lie on the host, or in the device's scratch memory.
    """
    # Without the keyword, as most of those who do it know none.
    keywords = {"pinned": True} if pinned else {}
    if not log.isEnabledFor(logging.DEBUG):
        call_device(device, "copy_in", address, data, **keywords)
        return
    sync = "pinned, read when the stream gets there" if pinned else "staged, in stream order"
    with _log_copy(
        "H2D" if is_host(data) else "D2D",
        who,
        src=address_of(data),
        dst=address,
        num_bytes=data.nbytes,
        stream=stream_of(device),
        sync=sync,
    ):
        call_device(device, "copy_in", address, data, **keywords)


def _record_copy(
    direction: str,
    tensor: Tensor,
    num_bytes: int,
    *,
    host_address: int = 0,
    is_pinned: bool = False,
) -> None:
    current().record_copy(
        direction,
        tensor,
        num_bytes,
        host_address=host_address,
        is_pinned=is_pinned,
        stream=stream_of(tensor.device),
        site=call_site(),
    )


def fill_pinned(buffer: Tensor, values: Array) -> None:
    """Put values into the leading part of a pinned tensor, which no copy may still be reading."""
    current().record_host_write(buffer.address, values.nbytes, call_site())
    to_device(buffer, values)


def copy_in_pinned(tensor: Tensor, buffer: Tensor) -> None:
    """Copy a pinned tensor into `tensor` when the current stream gets there; returns at once.

    Raises CopyRejected when shapes or types differ, or one of the two has no memory.
    """
    for side in (tensor, buffer):
        _refuse_missing(side)
        _refuse_for(side, obstacle(side, side.extent_bytes))
    if buffer.device != "cpu" or tensor.device == "cpu":
        wanted = "give a pinned one of the host for a GPU's"
        refuse(tensor, Refused(what=f"{buffer!r} into {tensor!r}", way_out=wanted))
    if (tensor.dtype, tensor.shape) != (buffer.dtype, buffer.shape):
        refuse(tensor, Refused(what=f"{buffer!r} into {tensor!r}", way_out="make them alike"))
    data = buffer.data.reshape(-1).view(np.uint8)
    _record_copy("in", tensor, data.nbytes, host_address=buffer.address, is_pinned=True)
    _will_write(tensor, data.nbytes)
    copy_in(tensor.device, _who(tensor), tensor.address, data, pinned=True)


def _will_write(tensor: Tensor, num_bytes: int) -> None:
    end = tensor.address + num_bytes
    stretch = AddressRange(tensor.allocation.id, tensor.address, end, "a copy to the device")
    will_run(tensor.device, Writes(stretches=(stretch,)))


def _missing_wait(tensor: Tensor, num_bytes: int) -> StillWritten | None:
    """Why `tensor` may not have its values yet where the caller is; or None."""
    device = tensor.device
    here = stream_of(device)
    found = order_of(device).missing_wait(tensor, num_bytes, here) if num_bytes else None
    if found is None:
        return None
    writer, there = found
    return StillWritten(
        writer=writer,
        stream=there,
        here=here,
        way_out=f"record_event there and wait_event here, or synchronise({device!r})",
    )


def _refuse_missing(tensor: Tensor | None) -> None:
    if _is_armed:
        current().record_check("host copies")
    if tensor is None:
        _raise(CopyRejected("a tensor", Null(way_out="allocate it first")))


def _refuse_for(tensor: Tensor, refusal: AnyRefusal | None) -> None:
    if refusal is not None and _is_armed:
        refuse(tensor, refusal)


def refuse(tensor: Tensor, refusal: AnyRefusal) -> NoReturn:
    """Raise CopyRejected, noted in the record and in the log."""
    log.debug("[COPY] %s REFUSED: %s", _who(tensor), refusal)
    _raise(CopyRejected(tensor.name, refusal, tensor.owner))


def _raise(error: CopyRejected) -> NoReturn:
    current().record_failure(error)
    raise error


def _who(tensor: Tensor) -> str:
    return f"{tensor.name} ({tensor.owner})"


def _own_obstacle(tensor: Tensor, num_bytes: int) -> AnyRefusal | None:
    """Why the first `num_bytes` of `tensor` cannot be copied, by what is known of it; or None."""
    allocation, dtype = tensor.allocation, tensor.dtype
    if allocation.freed_at:
        return FreedTensor(
            site=allocation.freed_at, way_out="copy it before that, or free it later"
        )
    if dtype not in NUMPY_TYPES or hasattr(tensor.data, "parts"):
        known = ", ".join(dtype.name for dtype in NUMPY_TYPES)
        what = f"is {dtype.name}, or a packed weight, but a copy takes plain elements of {known}"
        return Refused(what=what, way_out="read a weight from its file")
    if allocation.device == "cpu":
        return None if isinstance(tensor.data, np.ndarray) else Null(why="it has no array")
    if not num_bytes:
        return None
    if not allocation.address:
        why = f"its allocation, made at {allocation.site}, has no address for {num_bytes} bytes"
        return Null(why=why, way_out="allocate them first")
    if not tensor.is_contiguous:
        return WrongStrides(
            strides=tensor.strides,
            limit="a copy takes contiguous tensors",
            way_out="copy the whole and slice it on the host",
        )
    if tensor.address % dtype.block_bytes:
        return Misaligned(
            address=tensor.address,
            alignment_bytes=dtype.block_bytes,
            dtype=dtype.name,
            way_out="begin at a whole element",
        )
    end = tensor.address - allocation.address + num_bytes
    if end > allocation.num_bytes or end < num_bytes:
        return TooShort(
            start=end - num_bytes,
            end_bytes=end,
            num_bytes=allocation.num_bytes,
            site=allocation.site,
            way_out="allocate more, or copy fewer rows",
        )
    return None


def _misfit_in(tensor: Tensor, values: Any) -> Refused | None:
    """Why `values` cannot be put into the leading part of `tensor`; or None."""
    if not isinstance(values, np.ndarray):
        what, way_out = f"{values!r} is no array of the host", "bring it there by to_host first"
        return Refused(what=what, way_out=way_out)
    kind = _KINDS.get(tensor.dtype)
    if kind is not None and values.dtype != kind:
        what = f"{values.dtype} values for {tensor.dtype.name}"
        return Refused(what=what, way_out=f"give them as {kind.name}")
    given = values.shape
    if len(given) != len(tensor.shape) or not all(map(operator.le, given, tensor.shape)):
        what = f"shape {values.shape} into {tensor.shape}"
        return Refused(what=what, way_out="give less, or allocate more")
    return None


def _misfit_out(tensor: Tensor, shape: tuple[int, ...], out: Any) -> Refused | None:
    """Why `out` cannot take elements of `tensor` in `shape`; or None."""
    kind = _KINDS[tensor.dtype]
    if not isinstance(out, np.ndarray):
        return Refused(what=f"into {out!r}, which is no array of the host")
    if out.dtype != kind:
        what = f"{tensor.dtype.name} into {out.dtype}"
        return Refused(what=what, way_out=f"make it {kind.name}")
    if not out.flags.c_contiguous or not out.flags.writeable:
        what = "into an array that is not contiguous or not writable"
        return Refused(what=what, way_out="make a fresh one")
    if out.shape != shape:
        needed = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
        what = f"shape {shape}, {needed} bytes, into {out.shape}, {out.nbytes} bytes"
        return Refused(what=what, way_out=f"make it np.empty({shape})")
    return None


@contextlib.contextmanager
def _log_copy(
    way: str, who: str, *, src: int = 0, dst: int = 0, num_bytes: int, stream: str, sync: str
) -> Iterator[dict[str, int]]:
    """Log a copy (`way`: D2H or H2D) before it begins, and how it ended.

    Addresses that are known later are put into what is yielded.
    """
    at = {"src": src, "dst": dst}

    def line(when: str, note: str) -> None:
        places = "".join(f"{name}={place:#x}, " for name, place in at.items() if place)
        log.debug(
            "[%s] %s %s: %sbytes=%d, stream=%s, sync=%s",
            way,
            who,
            when,
            places,
            num_bytes,
            stream or "default",
            note,
        )

    line("before", sync)
    try:
        yield at
    except Exception as error:
        line("FAILED", f"{sync}: {type(error).__name__}: {error}")
        raise
    line("after", "waited for" if way == "D2H" else sync)
