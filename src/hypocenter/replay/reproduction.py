"""Runs one recorded launch with Triton and torch alone, each tensor in memory of its own.

On the CPU nothing around a tensor can be touched, so a wrong access ends the process at the line
that makes it. On a GPU each tensor is an allocation of its own.
"""

from __future__ import annotations

import base64
import ctypes
import faulthandler
import mmap
import os
import signal
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

#: What cannot be touched on either side of a tensor: addresses, not memory.
GUARD_BYTES = 1 << 35
#: Seconds after which a launch counts as endless, and runs that are compared to see a race.
SECONDS, NUM_RUNS = 120, 50
#: What undefined memory is filled with: no number in any type of floats.
UNDEFINED = 0xFF
#: The exit status where the launch broke, or what it wrote is wrong.
BROKEN = 3


class GpuArgument:
    """An argument of a GPU kernel: where it points, and to what."""

    def __init__(self, address: int, dtype: torch.dtype) -> None:
        self.address, self.dtype = address, dtype

    def data_ptr(self) -> int:
        """The address, as Triton asks for it."""
        return self.address


@dataclass(frozen=True)
class Recording:
    """A recorded launch: its kernel, and all that it is given.

    `memories` have `num_bytes` and `values`, or are gone; `tensors` lie in one at byte `start`.
    `numbers` are its other arguments, `options` what Triton is told beside them.
    """

    kernel: Any
    grid: Sequence[int]
    memories: Mapping[int, Mapping[str, Any]]
    tensors: Mapping[str, Mapping[str, Any]]
    numbers: Mapping[str, Any]
    options: Mapping[str, Any]

    def make(self, options: Mapping[str, Any]) -> tuple[Any, dict[int, bytes]]:
        """Make it once on fresh memory; what Triton answers, and what each memory holds then."""
        place = _on_cpu if is_on_cpu() else _on_gpu
        places = {key: place(memory) for key, memory in self.memories.items()}
        pointers = {name: _pointer(tensor, places) for name, tensor in self.tensors.items()}
        answer = self.kernel[tuple(self.grid)](**pointers, **self.numbers, **options)
        if not is_on_cpu():
            torch.cuda.synchronize()
        kept = (key for key, memory in self.memories.items() if not memory.get("gone"))
        return answer, {key: places[key][1]() for key in kept}


def is_on_cpu() -> bool:
    """Whether Triton's interpreter runs launches."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def reproduce(recording: Recording) -> int:
    """Launch in a process of its own and say what became of it; the exit status to leave with."""
    sys.stdout.flush()
    child = os.fork()
    if not child:
        os._exit(_run(recording))
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status < 0:
        print(f"reproduced: {signal.Signals(-status).name} at the kernel's line that stands above")
    elif status:
        print("reproduced: see above")
    else:
        print("not reproduced: the launch ended, and all that it wrote is defined")
    return BROKEN if status else 0


def _run(recording: Recording) -> int:
    """In the child: 0, or BROKEN where the launch or its results are wrong."""
    faulthandler.enable()
    if not is_on_cpu():
        # So that each tensor is an allocation of its own, and a freed one is gone.
        os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
        if not torch.cuda.is_available():
            print("there is no GPU: TRITON_INTERPRET=1 runs it on the CPU", file=sys.stderr)
            return BROKEN
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    options = dict(recording.options)
    is_race = bool(options.pop("is_race", False))
    first: dict[int, bytes] | None = None
    for number in range(NUM_RUNS if is_race and not is_on_cpu() else 1):
        try:
            _, held = recording.make(options)
        except Exception as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            return BROKEN
        if first is not None and held != first:
            print(f"run {number + 1} wrote something else than run 1: a race")
            return BROKEN
        first = held
    if is_race and is_on_cpu():
        print("the interpreter runs one program after the other: a race shows on a GPU alone")
    return _check_written(recording.tensors, recording.memories, first or {})


def _check_written(
    tensors: Mapping[str, Mapping[str, Any]],
    memories: Mapping[int, Mapping[str, Any]],
    held: Mapping[int, bytes],
) -> int:
    """BROKEN where an output still holds what undefined memory was filled with."""
    found = 0
    for name, tensor in tensors.items():
        if not memories[tensor["memory"]].get("undefined"):
            continue
        width = tensor["width"]
        data = held[tensor["memory"]][tensor["start"] :]
        left = sum(
            data[at : at + width] == bytes([UNDEFINED] * width)
            for at in range(0, len(data) - width + 1, width)
        )
        if left:
            print(f"{name}: {left} elements were not written, or are NaN that the kernel read")
            found = BROKEN
    return found


def _pointer(tensor: Mapping[str, Any], places: Mapping[int, Any]) -> Any:
    """The argument: on the CPU a tensor of one element at that address, for Triton keeps that."""
    address = places[tensor["memory"]][0] + tensor["start"]
    dtype = getattr(torch, tensor["dtype"])
    if not is_on_cpu():
        return GpuArgument(address if address > 0 else 0, dtype)
    width = torch.empty(0, dtype=dtype).element_size()
    return torch.frombuffer((ctypes.c_ubyte * width).from_address(address), dtype=dtype, count=1)


def _contents(memory: Mapping[str, Any]) -> list[tuple[int, bytes]]:
    """Bytes and where they stand: whole numbers of a width, or what was packed."""
    found = []
    if memory.get("undefined"):
        found.append((0, bytes([UNDEFINED]) * memory["num_bytes"]))
    for start, width, values in memory.get("values", ()):
        if isinstance(values, str):
            data = zlib.decompress(base64.b64decode(values))
        else:
            data = b"".join(n.to_bytes(width, "little", signed=n < 0) for n in values)
        found.append((start, data))
    return found


def _on_cpu(memory: Mapping[str, Any]) -> tuple[int, Callable[[], bytes]]:
    """Pages whose neighbours cannot be touched; one that is gone cannot be touched either.

    The tensor ends where the guard behind it begins; `at_start`: it begins behind the one before.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, *[ctypes.c_size_t] * 5]
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    num_bytes = memory["num_bytes"]
    whole = -(-max(1, num_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE
    no_reserve = 0x4000
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
    nowhere = (1 << 64) - 1
    for guard in (GUARD_BYTES, 1 << 30, 1 << 24):
        base = libc.mmap(None, 2 * guard + whole, 0, flags, nowhere, 0)
        if base not in (None, nowhere):
            break
    else:
        raise MemoryError(f"no room for addresses around {num_bytes} bytes")
    pages = base + guard
    if not memory.get("gone"):
        libc.mprotect(pages, whole, mmap.PROT_READ | mmap.PROT_WRITE)
    address = pages if memory.get("at_start") else pages + whole - num_bytes
    for start, data in _contents(memory):
        ctypes.memmove(address + start, data, len(data))
    # Of what is large nothing but zeros is known, and reading it would make its pages.
    is_large = num_bytes > 1 << 26
    return address, lambda: b"" if is_large else ctypes.string_at(address, num_bytes)


def _on_gpu(memory: Mapping[str, Any]) -> tuple[int, Callable[[], bytes]]:
    """An allocation at the alignment that was recorded; of what is gone the address alone."""
    if memory.get("gone") == "null pointer":
        return 0, bytes
    if memory.get("gone") == "host pointer":
        host = torch.zeros(memory["num_bytes"] + 1, dtype=torch.uint8)
        return host.data_ptr(), lambda: bytes(host.numpy())
    offset = memory.get("alignment", 0)
    buffer = torch.zeros(offset + max(1, memory["num_bytes"]), dtype=torch.uint8, device="cuda")
    address = buffer.data_ptr() + offset
    if memory.get("gone"):
        return address, bytes  # the buffer is freed with the end of this function
    for start, data in _contents(memory):
        part = buffer[offset + start : offset + start + len(data)]
        part.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    return address, lambda: bytes(buffer[offset:].cpu().numpy())
