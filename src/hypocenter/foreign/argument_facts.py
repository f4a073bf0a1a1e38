"""What torch's tensors and Triton's arguments are, in the words of the record; marks new ones.

Knows them by what they answer, and imports neither.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable
from typing import Any

from hypocenter.base.dtypes import RECORD_NAMES
from hypocenter.record.events import ScalarValue, Values
from hypocenter.record.run_records import MARKED_BYTES

#: The device of launches that Triton's interpreter runs on the CPU.
INTERPRETER = "interpreter"
#: The byte that stands where nobody has written.
UNDEFINED = 0xFF
#: Where a run is looked at closely, so many bytes of a tensor are, and new memory is filled.
MAX_LOOKED_AT_BYTES = MARKED_BYTES
_MAX_CHARS = 200


def values_of(tensor: Any, number: int, dtype: str) -> Values:
    """What a tensor holds; it is waited for where a GPU has it."""
    return Values(number, dtype, tuple(tensor.shape), _bytes_of(tensor))


def _bytes_of(tensor: Any) -> bytes:
    held = tensor.detach().cpu().contiguous()
    return ctypes.string_at(held.data_ptr(), held.numel() * held.element_size())


def mark_undefined(
    torch: Any,
    within: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    after: Callable[[], None] = lambda: None,
) -> None:
    """Fill what nobody has written in small new tensors of floats with UNDEFINED, which is NaN.

    It is done `within` that, and `after` is called where a GPU was asked to.

    Not what is made while a graph is captured, which would be filled at each replay, nor what is
    given to be written to (`out=`), nor what torch.compile only imagines.
    """

    def mark(original: Any) -> Any:
        @functools.wraps(original)
        def make(*args: Any, **options: Any) -> Any:
            tensor = original(*args, **options)
            if not torch.compiler.is_compiling() and options.get("out") is None:
                # Tensors of vmap, and sparse ones, have no memory that could be filled.
                with contextlib.suppress(RuntimeError), within():
                    _fill(torch, tensor, after)
            return tensor

        return make

    for owner, name in (
        (torch, "empty"),
        (torch, "empty_like"),
        (torch, "empty_strided"),
        (torch.Tensor, "new_empty"),
    ):
        setattr(owner, name, mark(getattr(owner, name)))


def _fill(torch: Any, tensor: Any, after: Callable[[], None]) -> None:
    """Fill one; `after` is called where a GPU was asked to."""
    kind = tensor.device.type
    if not tensor.dtype.is_floating_point:
        return
    if kind == "cpu" or (kind == "cuda" and not torch.cuda.is_current_stream_capturing()):
        storage = tensor.untyped_storage()
        if storage.nbytes() <= MAX_LOOKED_AT_BYTES:
            storage.fill_(UNDEFINED)
            if kind == "cuda":
                after()


def undefined_in(tensor: Any, number: int, dtype: str) -> list[Values]:
    """Which elements of a tensor nobody has written, if there are any.

    The others are zeros in it: what a program computes with is its own business.
    """
    width = tensor.element_size()
    data = bytearray(_bytes_of(tensor))
    undefined = bytes([UNDEFINED]) * width
    if undefined not in data:
        return []
    for at in range(0, len(data), width):
        if data[at : at + width] != undefined:
            data[at : at + width] = bytes(width)
    return [Values(number, dtype, tuple(tensor.shape), bytes(data))] if any(data) else []


@functools.lru_cache(maxsize=1024)
def device_of(place: Any, device: str) -> str:
    """Where a tensor lies whose `device` is `place`, in the words of `device`, the launch's."""
    kind, index = place.type, place.index
    if kind == "cpu":
        return INTERPRETER if device == INTERPRETER else "cpu"
    return f"{device.split(':')[0]}:{index or 0}" if kind == "cuda" else f"{kind}:{index or 0}"


def device_and_stream(torch: Any) -> tuple[str, str]:
    """On which device and stream a launch of this thread goes, "" for the default stream.

    Asks torch as Triton itself does for each launch: `torch.cuda.current_stream` makes an object.
    """
    ask: Any = getattr(torch, "_C", None)
    if hasattr(ask, "_cuda_getCurrentRawStream"):
        number = ask._cuda_getDevice()
        stream = ask._cuda_getCurrentRawStream(number)
    else:  # torch without a GPU, in whose place something else stands
        number = int(torch.cuda.current_device())
        stream = int(torch.cuda.current_stream(number).cuda_stream)
    return _device_and_stream_text(torch.version.hip, number, stream)


@functools.lru_cache(maxsize=1024)
def _device_and_stream_text(hip: str | None, number: int, stream: int) -> tuple[str, str]:
    return f"{'hip' if hip else 'cuda'}:{number}", f"{stream:#x}" if stream else ""


@functools.lru_cache(maxsize=1024)
def dtype_of(dtype: Any) -> str:
    name = str(dtype).removeprefix("torch.")
    return RECORD_NAMES.get(name, name.upper())


def is_pinned(tensor: Any) -> bool:
    try:
        return bool(tensor.is_pinned())
    except Exception:  # a driver that has failed before
        return False


def scalar_of(value: Any) -> ScalarValue:
    """A number or text as it is; of anything else what it is, in a few words."""
    if type(value).__name__ == "constexpr":
        value = value.value
    if isinstance(value, int) and not isinstance(value, bool):
        return int(value) if -(2**63) <= value < 2**64 else str(value)
    if value is None or isinstance(value, bool | float | str):
        return value
    return str(value)[:_MAX_CHARS]
