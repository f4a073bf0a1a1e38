"""Tensors, allocations, launches and their sources as plain records, each written once.

Tensors and allocations are known by a number, sources by the hash of their text.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from hypocenter.base.dtypes import RECORD_NAMES, TORCH_NAMES
from hypocenter.base.tensor import Allocation, Tensor
from hypocenter.record.events import (
    AllocationRecord,
    ArgumentRecord,
    ContractRecord,
    LaunchRecord,
    ScalarValue,
    SourceRecord,
    TensorRecord,
)
from hypocenter.record.recordable import Launchable

#: Names of the arrays of a packed weight, by how many there are and whether it is of a block type.
_PARTS: Mapping[tuple[int, bool], tuple[str, ...]] = {
    (1, False): ("weights",),
    (1, True): ("records",),
    (5, True): ("words", "scales", "minima", "zero", "factor"),
}
_MAX_CHARS = 200


_MAX_DEPTH = 8


class Catalogue:
    """`write` takes each record once; `allocated` is called for memory that nobody has told of."""

    def __init__(
        self, write: Callable[[Any], None], allocated: Callable[[AllocationRecord], None]
    ) -> None:
        self._write, self._allocated = write, allocated
        self._tensors: dict[tuple[Any, ...], int] = {}
        self._allocations: set[int] = set()
        self._bases: dict[tuple[str, int], int] = {}
        self._sources: set[str] = set()
        self._contracts: dict[tuple[str, Any], str] = {}
        #: Whether the text of what CPU kernels call is written too, which takes long to be had.
        self.reads_parts = False

    # -- memory ---------------------------------------------------------------------------------

    def allocation(self, allocation: Allocation, name: str, owner: str, kind: str = "") -> int:
        """The number of an allocation, which is told of now if it was not before."""
        if allocation.id not in self._allocations:
            self._allocations.add(allocation.id)
            if allocation.address:
                self._bases[allocation.device, allocation.address] = allocation.id
            self._allocated(
                AllocationRecord(
                    id=allocation.id,
                    kind=kind or ("host" if allocation.device == "cpu" else "device"),
                    device=allocation.device,
                    address=allocation.address,
                    num_bytes=allocation.num_bytes,
                    name=name,
                    owner=owner,
                    site=allocation.site,
                )
            )
        return allocation.id

    def forget(self, allocation: Allocation) -> None:
        """Its address may belong to another one from now on."""
        self._bases.pop((allocation.device, allocation.address), None)

    def at(self, device: str, address: int) -> int | None:
        """The number of the live allocation that begins at `address`."""
        return self._bases.get((device, address))

    def tensor(self, tensor: Tensor) -> int:
        """The number of a tensor, as its maker declared it."""
        key = (  # a member of an enum is slow to hash, and there is one of each
            tensor.allocation.id,
            tensor.name,
            id(tensor.dtype),
            tensor.shape,
            tensor.strides,
            tensor.offset,
        )
        number = self._tensors.get(key)
        if number is None:
            number = self._new(key, tensor, tensor.address or _address(tensor.data))
        return number

    def part(self, tensor: Tensor, index: int, part: Any) -> int:
        """The number of one array of a packed weight."""
        names = _PARTS.get((len(tensor.data.parts), tensor.dtype.is_quantised), ())
        name = names[index] if index < len(names) else str(index)
        key = (tensor.allocation.id, tensor.name, name)
        number = self._tensors.get(key)
        if number is None:
            num_bytes = getattr(part, "num_bytes", None)
            is_array = num_bytes is None
            number = self._new(
                key,
                tensor,
                _address(part) if is_array else part.address,
                name,
                int(part.nbytes) if num_bytes is None else num_bytes,
                _name_of(part.dtype) if is_array else part.dtype,
                int(part.size) if is_array else part.num_elements,
            )
        return number

    def _new(
        self,
        key: tuple[Any, ...],
        tensor: Tensor,
        address: int,
        part: str = "",
        num_bytes: int = 0,
        dtype: str = "",
        num_elements: int = 0,
    ) -> int:
        allocation = self.allocation(tensor.allocation, tensor.name, tensor.owner)
        number = self._tensors[key] = len(self._tensors) + 1
        self._write(
            TensorRecord(
                id=number,
                name=tensor.name,
                owner=tensor.owner,
                dtype=_dtype(dtype) if part else tensor.dtype.name,
                shape=(num_elements,) if part else tensor.shape,
                strides=(1,) if part else tensor.strides,
                offset=0 if part else tensor.offset,
                allocation=allocation,
                address=address,
                extent_bytes=num_bytes if part else tensor.extent_bytes,
                part=part,
            )
        )
        return number

    # -- launches -------------------------------------------------------------------------------

    def launch(self, launch: Launchable, stream: str = "") -> LaunchRecord:
        """A launch with its arguments by number; source and contract are written before it."""
        options: Mapping[str, Any] = launch.options
        kernel = launch.jit or launch.function
        names = _parameters(kernel)
        constants = {name: _scalar(options[name]) for name in names if name in options}
        return LaunchRecord(
            kernel=launch.kernel,
            function=getattr(kernel, "__name__", launch.kernel),
            device=launch.device,
            grid=tuple(int(size) for size in options.get("grid", ())),
            num_warps=int(options.get("num_warps", 0)),
            arguments=self._arguments([n for n in names if n not in options], launch),
            facts=self.facts(launch.facts),
            constants=constants,
            options={
                name: _scalar(value)
                for name, value in options.items()
                if name not in constants and name not in ("grid", "num_warps")
            },
            source=self._source(kernel),
            contract=self.contract(launch.kernel, launch.contract),
            declared=getattr(launch.contract, "place", ""),
            site=launch.site,
            caller=launch.caller,
            stream=stream,
        )

    def facts(self, facts: Mapping[str, Any]) -> tuple[ArgumentRecord, ...]:
        """A contract's arguments."""
        return tuple(self._argument(name, value) for name, value in facts.items())

    def _arguments(self, names: list[str], launch: Launchable) -> tuple[ArgumentRecord, ...]:
        """What the kernel's parameters got; a packed weight stands for several of them."""
        # A GPU kernel is given the arrays that it needs, a CPU kernel the whole weight.
        owners = {
            id(part): (tensor, index)
            for tensor in launch.tensors.values()
            for index, part in enumerate(getattr(tensor.data, "parts", ()))
        }
        values: list[Any] = []
        for value in launch.given:
            is_packed = isinstance(value, Tensor) and hasattr(value.data, "parts")
            values += value.data.parts if is_packed else [value]
            if is_packed:
                owners |= {id(p): (value, index) for index, p in enumerate(value.data.parts)}
        found = []
        for at, value in enumerate(values):
            name = names[at] if at < len(names) else f"#{at}"
            if id(value) in owners and not _is_number(value):
                found.append(ArgumentRecord(name, self.part(*owners[id(value)], value)))
            else:
                found.append(self._argument(name, value))
        return tuple(found)

    def _argument(self, name: str, value: Any) -> ArgumentRecord:
        if isinstance(value, Tensor):
            return ArgumentRecord(name, self.tensor(value), _cast(value))
        return ArgumentRecord(name, None, _scalar(value))

    def contract(self, kernel: str, contract: Any) -> str:
        """The key under which the declaration is written; a kernel may have several."""
        if not hasattr(contract, "declaration"):
            return ""
        if (kernel, contract) not in self._contracts:
            number = 1 + sum(name == kernel for name, _ in self._contracts)
            key = kernel if number == 1 else f"{kernel} {number}"
            self._contracts[kernel, contract] = key
            self._write(ContractRecord(key, contract.declaration))
        return self._contracts[kernel, contract]

    def _source(self, kernel: Any) -> str:
        # Of a kernel for the CPU they are known without what compiled it.
        known = () if self.reads_parts else getattr(kernel, "sources", ())
        records: tuple[SourceRecord, ...] = known or sources_of(kernel, self.reads_parts)
        for record in records:
            if record.id not in self._sources:
                self._sources.add(record.id)
                self._write(record)
        return records[0].id if records else ""


@lru_cache(maxsize=1024)
def _parameters(kernel: Any) -> tuple[str, ...]:
    names = getattr(kernel, "arg_names", None)
    if names is not None:
        return tuple(names)
    try:
        return tuple(inspect.signature(getattr(kernel, "py_func", kernel)).parameters)
    except (TypeError, ValueError):
        return ()


@lru_cache(maxsize=64)  # numpy takes long to spell a type
def _name_of(dtype: np.dtype[Any]) -> str:
    """A record of a packed weight, which has fields, goes by its size."""
    return str(dtype) if dtype.fields is None else f"record{dtype.itemsize}"


def _is_number(value: Any) -> bool:
    return getattr(value, "ndim", None) == 0 or isinstance(value, int | float)


def _address(data: Any) -> int:
    parts = getattr(data, "parts", None)
    array = parts[0] if parts else data
    interface = getattr(array, "__array_interface__", None)
    return int(interface["data"][0]) if interface else int(getattr(array, "address", 0))


def _cast(tensor: Tensor) -> str | None:
    """Torch's name of what a pointer is passed as, where the tensor says it holds another type."""
    given = getattr(tensor.data, "dtype", None)
    own = TORCH_NAMES.get(tensor.dtype.name)
    if tensor.device == "cpu" or given is None or own is None:
        return None
    name = str(given).removeprefix("torch.")
    return None if name == own else name


def _dtype(name: str) -> str:
    bits = {"uint16": "F16", "uint32": "I32"}  # what kernels take them for
    return bits.get(name) or RECORD_NAMES.get(name, name.upper())


def _scalar(value: Any) -> ScalarValue:
    """A number as it is; of anything else what it is, in a few words."""
    if isinstance(value, np.ndarray):
        return f"{_name_of(value.dtype)} array of shape {value.shape}"
    value = value.item() if isinstance(value, np.generic) else value
    if value is None or isinstance(value, bool | int | float | str):
        if isinstance(value, int) and not -(2**63) <= value < 2**64:
            return str(value)
        return value
    return str(getattr(value, "__name__", value))[:_MAX_CHARS]


@functools.lru_cache(maxsize=1024)
def sources_of(kernel: Any, with_parts: bool = False) -> tuple[SourceRecord, ...]:
    """The text of a Triton function or a compiled CPU kernel, and then of Triton's callees.

    `with_parts`: of what a CPU kernel calls, too. Empty when its text is not to be had. The `id` of
    a record is sha256 of its text.
    """
    known: dict[Any, SourceRecord] = {}
    _find_records(kernel, 0, with_parts, known)
    # Whoever calls comes before what it calls.
    return tuple({record.id: record for record in reversed(known.values())}.values())


def _find_records(kernel: Any, depth: int, with_parts: bool, known: dict[Any, SourceRecord]) -> str:
    """The id of a function's record; what it calls is put into `known` before it."""
    function = _python_function(kernel)
    if function in known or function is None:
        return known[function].id if function in known else ""
    try:
        lines, first_line = inspect.getsourcelines(function)
    except (OSError, TypeError):
        return ""
    ids = []
    if depth < _MAX_DEPTH:
        for callee in _callees(function, with_parts):
            ids.append(_find_records(callee, depth + 1, with_parts, known))
    text = "".join(lines)
    known[function] = SourceRecord(
        id=hashlib.sha256(text.encode()).hexdigest(),
        function=function.__name__,
        file=function.__code__.co_filename,
        first_line=max(first_line, 1),
        text=text,
        callees=tuple(dict.fromkeys(filter(None, ids))),
        constants=dict(_constants(function)),
    )
    return known[function].id


def _python_function(kernel: Any) -> Any:
    """What was compiled: `fn` of a Triton function, `py_func` of numba's."""
    for name in ("fn", "py_func"):
        if inspect.isfunction(function := getattr(kernel, name, None)):
            return function
    return None


def _constants(function: Any) -> Iterator[tuple[str, Any]]:
    """Numbers and texts of the module that the function names; Triton's constexpr by its value."""
    for name in function.__code__.co_names:
        value = function.__globals__.get(name)
        value = getattr(value, "value", value) if type(value).__name__ == "constexpr" else value
        if isinstance(value, bool | int | float | str) and name != "__name__":
            yield name, value


def _callees(function: Any, with_parts: bool) -> Iterator[Any]:
    """The other Triton functions that a Triton function names; numba's `with_parts`."""
    for name in function.__code__.co_names:
        value = function.__globals__.get(name)
        is_triton = hasattr(value, "arg_names") and inspect.isfunction(getattr(value, "fn", None))
        if is_triton or (with_parts and inspect.isfunction(getattr(value, "py_func", None))):
            yield value
