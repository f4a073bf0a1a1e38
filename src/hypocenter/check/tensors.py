"""Knows of a program's tensors which bytes nothing has written yet, and who looks at them.

`torch.empty` and its kin make undefined bytes; torch operations and kernels define them. Keeps the
outputs that a launch left partly unwritten until something reads them or the program ends.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from hypocenter.base import package
from hypocenter.base.dtypes import Array
from hypocenter.replay.arguments import Argument
from hypocenter.replay.findings import Finding, Site
from hypocenter.replay.missing import elements_of, missing_of

_UNDEFINED = frozenset(
    {
        "aten::empty",
        "aten::empty_like",
        "aten::empty_strided",
        "aten::new_empty",
        "aten::new_empty_strided",
        "aten::empty_permuted",
    }
)
#: Operations that read of their first tensor what their other arguments name.
_SELECTING = frozenset(
    {
        "aten::embedding",
        "aten::gather",
        "aten::index",
        "aten::index_select",
        "aten::masked_select",
        "aten::take",
    }
)
#: Operations that take a tensor for its shape alone.
_SHAPE_ONLY = ("_like", "aten::new_", "aten::sym_", "aten::size", "aten::stride")


_LARGE_BYTES = 256 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Pending:
    """An output that its launch wrote in part, or not at all although it has a store to it."""

    kernel: str
    configuration: str | None
    launched_at: Site | None
    argument: Argument
    flags: Array  # of the storage, one per byte: the live ones, not a copy

    def finding(self, detail: str) -> Finding | None:
        """What is still missing; None when the rest was written since."""
        return missing_of(
            self.kernel, self.argument, self.flags, detail, self.configuration, self.launched_at
        )


class TensorWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every torch operation below autograd; `flags` maps a storage's address to its bytes."""

    def __init__(self, report: Callable[[Finding], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flags: dict[int, Array] = {}
        self._storages: dict[int, tuple[int, Any]] = {}
        self._of_host: dict[int, int] = {}
        self._pending: list[Pending] = []
        self._report = report

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._pending:
            self._read(func, args, kwargs)
        result = func(*args, **kwargs)
        if self.flags:
            self._note_mutations(func, args, kwargs)
        self._note_results(func, result)
        return result

    def note_copy(self, source: torch.Tensor, copy: torch.Tensor) -> None:
        """`copy` holds the same undefined bytes as `source`."""
        flags = self.flags.get(source.untyped_storage().data_ptr())
        if flags is not None and flags.size == copy.untyped_storage().nbytes():
            self.flags[copy.untyped_storage().data_ptr()] = flags.copy()

    def find(self, address: int) -> tuple[int, int] | None:
        """Start and bytes of the live storage, or host memory, that holds a real address."""
        for start, (num_bytes, reference) in self._storages.items():
            if start <= address < start + num_bytes and not reference.expired():
                return start, num_bytes
        for start, num_bytes in self._of_host.items():
            if start <= address < start + num_bytes:
                return start, num_bytes
        return None

    def note_host(self, address: int, num_bytes: int) -> None:
        """Kernels may use these bytes, which are the host's own and no tensor's of this watch."""
        self._of_host[address] = num_bytes

    def is_of_host(self, address: int) -> bool:
        """Whether `note_host` was told of that byte."""
        return any(at <= address < at + num for at, num in self._of_host.items())

    def forget_host(self, address: int) -> None:
        self._of_host.pop(address, None)

    # -- torch operations -----------------------------------------------------------------------

    def _note_results(self, func: Any, result: Any) -> None:
        is_undefined = func._schema.name in _UNDEFINED
        aliases = [ret.alias_info is not None for ret in func._schema.returns]
        for number, tensor in enumerate(_tensors(result)):
            if aliases and aliases[min(number, len(aliases) - 1)]:
                continue
            storage = tensor.untyped_storage()
            self._storages[storage.data_ptr()] = (storage.nbytes(), _weak(storage))
            if is_undefined and storage.nbytes():
                if storage.nbytes() < _LARGE_BYTES:  # more is fresh from the system, and zero
                    torch.ops.aten.zero_(tensor)  # so that a faulty kernel repeats itself
                self.flags[storage.data_ptr()] = np.zeros(storage.nbytes(), bool)
            else:  # new memory at an address that was another's before
                self.flags.pop(storage.data_ptr(), None)

    def _note_mutations(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for tensor, is_write, _ in _operands(func, args, kwargs):
            flags = self.flags.get(tensor.untyped_storage().data_ptr())
            if is_write and flags is not None:
                _region(flags, tensor)[...] = True

    def _read(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        name = func._schema.name
        if any(part in name for part in _SHAPE_ONLY):
            return
        for tensor, is_write, is_view in _operands(func, args, kwargs):
            flags = self.flags.get(tensor.untyped_storage().data_ptr())
            if is_write or is_view or flags is None or not tensor.numel():
                continue
            is_whole = bool(_region(flags, tensor).all())
            is_selected = not is_whole and name in _SELECTING and tensor is args[0]
            if is_selected and _is_written_where_read(func, args, kwargs, flags):
                continue  # the rest may stay unwritten as long as nobody looks
            for pending in [p for p in self._pending if p.flags is flags]:
                self._pending.remove(pending)
                if not is_whole:
                    self._settle(pending, name.removeprefix("aten::"))

    # -- launches -------------------------------------------------------------------------------

    def note_launch(
        self,
        kernel: str,
        configuration: str | None,
        site: Site | None,
        arguments: tuple[Argument, ...],
        is_complete: bool,
    ) -> None:
        """Take note of what a launch did to its tensors."""
        for argument in arguments:
            flags = argument.region.init
            if flags is None or not argument.num_bytes:
                continue
            if argument.was_read:
                self._pending = [p for p in self._pending if p.flags is not flags]
            touched = argument.was_written or argument.store_seen
            if not touched:
                continue
            if not is_complete:
                # Nobody can say what the other programs write: from here on all of it counts as
                # written. (Setting the flags would touch as much memory as the tensor has.)
                self._forget(flags)
                continue
            if not elements_of(flags, argument).all():
                self._pending.append(Pending(kernel, configuration, site, argument, flags))

    def _forget(self, flags: Array) -> None:
        for address in [key for key, known in self.flags.items() if known is flags]:
            del self.flags[address]
        self._pending = [pending for pending in self._pending if pending.flags is not flags]

    def finish(self) -> None:
        """The program is over: what nobody has filled or read since is reported.

        A scatter is not: what it does not reach of a pool is somebody else's to write, or nobody's.
        """
        for pending in self._pending:
            if not pending.argument.is_scattered:
                self._settle(pending, "")
        self._pending = []

    def _settle(self, pending: Pending, reader: str) -> None:
        finding = pending.finding(f"; {reader} reads it at {_user_line()}" if reader else "")
        if finding is not None:
            self._report(finding)


def fill_undefined(data: Array, dtype: torch.dtype, written: Array, number: float | None) -> None:
    """Put `number` as an element of `dtype` where `data`, a storage's bytes, was not written.

    None sets every bit: NaN of floats, -1 of signed integers. A type takes what is nearest.
    """
    element = np.full(dtype.itemsize, 0xFF, np.uint8)
    if number is not None:
        if dtype != torch.bool:
            is_float = dtype.is_floating_point or dtype.is_complex
            limits = torch.finfo(dtype) if is_float else torch.iinfo(dtype)
            number = min(max(number, limits.min), limits.max)
        element = torch.full((1,), number, dtype=dtype).view(torch.uint8).numpy()
    data[~written] = np.resize(element, data.size)[~written]


def _is_written_where_read(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], flags: Array
) -> bool:
    """Whether all was written that a selecting operation reads of its first tensor."""
    written = np.ascontiguousarray(_region(flags, args[0]).all(axis=-1))
    return bool(func(torch.from_numpy(written), *args[1:], **kwargs).all())


def _weak(storage: torch.UntypedStorage) -> Any:
    return StorageWeakRef(storage)  # type: ignore[no-untyped-call]


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if value.layout is torch.strided and value.device.type == "cpu":
            yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)


def _operands(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[torch.Tensor, bool, bool]]:
    """(tensor, is written, is only viewed) of each tensor that goes into an operation."""
    for number, argument in enumerate(func._schema.arguments):
        value = args[number] if number < len(args) else kwargs.get(argument.name)
        alias = argument.alias_info
        is_write = alias is not None and alias.is_write
        for tensor in _tensors(value):
            yield tensor, is_write, alias is not None and not is_write


def _region(flags: Array, tensor: torch.Tensor) -> Array:
    """The flags of the first byte of each element, when written of all their bytes."""
    width = tensor.element_size()
    strides = [*(stride * width for stride in tensor.stride()), 1]
    first = flags[int(tensor.storage_offset()) * width :]
    return np.lib.stride_tricks.as_strided(first, (*tensor.shape, width), strides)


def _user_line() -> str:
    """File and line of the nearest frame that is neither torch's nor this package's."""
    frame = sys._getframe(1)
    skip = (str(torch.__file__).rsplit("__init__", 1)[0], f"{package.FOLDER}{os.sep}")
    while frame.f_back is not None and frame.f_code.co_filename.startswith(skip):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
