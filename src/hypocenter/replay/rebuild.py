"""The launch that a bundle tells of, with arguments as `replay` takes them, and whose they were.

Runs nothing: `recorded.py` does.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from hypocenter.base.dtypes import TORCH_NAMES, Array
from hypocenter.base.errors import UsageError
from hypocenter.base.tensor import contiguous_strides
from hypocenter.contracts.registry import recorded_contract
from hypocenter.device.offline.specimen import of_device
from hypocenter.record.bundle_index import BundleIndex
from hypocenter.record.events import (
    OUTSIDE_PLANS,
    ArgumentRecord,
    LaunchRecord,
    Place,
    TensorRecord,
    Values,
)
from hypocenter.replay.admission import RecordedTensor
from hypocenter.replay.arguments import Argument, extent_bytes
from hypocenter.replay.corrections import (
    FLOATS,
    TensorCorrection,
    bytes_of_number,
    element_bytes,
    numpy_type,
    write_rows,
)
from hypocenter.replay.findings import Finding, FindingKind, Site
from hypocenter.replay.missing import missing_of
from hypocenter.replay.source import is_project_kernel, recorded_file

#: Allocations above this are extents only: nothing is known of their contents.
MAX_ALLOCATION_BYTES = 64 << 20
MAX_TOTAL_BYTES = 512 << 20
#: Programs that run before all others, at most.
_MAX_FIRST = 96
#: What `device/sim/memory.py` fills undefined memory with.
_POISON = 0xFF
#: Kinds of an access to where its tensor is not.
_OUTSIDE = (FindingKind.OUT_OF_BOUNDS, FindingKind.NULL_POINTER)


class Rebuilt:
    """A recorded launch with its arguments as `replay` takes them."""

    def __init__(
        self, index: BundleIndex, place: Place, launch: LaunchRecord, corrections: dict[str, Any]
    ) -> None:
        self.index, self.place, self.launch = index, place, launch
        self._corrections = corrections
        self._unused = set(corrections)
        self._known = index.values(place)
        self._images: dict[int, tuple[Array, Array | None]] = {}
        self._room = MAX_TOTAL_BYTES
        # A kernel with a contract never casts a pointer.
        self._is_ours = index.bundle.declaration(launch) is not None or is_project_kernel(
            index.sources.get(launch.source)
        )
        self._facts = {
            fact.name: index.tensors[fact.tensor]
            for fact in launch.facts
            if fact.tensor in index.tensors
        }
        self._contract = recorded_contract(index.bundle, launch)
        self._assume_counts()
        self.tensors: dict[str, TensorRecord] = {}
        self.contents: dict[str, Array] = {}
        self.grid = tuple(self._correct("grid", launch.grid))
        constants = dict(launch.constants)
        if self._is_ours:
            constants |= of_device(constants, is_nvidia=False, overlaps=False)
        constants = {k: self._correct(k, v) for k, v in constants.items()}
        self.arguments = {arg.name: self._argument(arg) for arg in launch.arguments} | constants
        if self._unused:
            raise UsageError(
                f"{launch.kernel} has no {sorted(self._unused)[0]} that could be corrected; "
                f"it has grid, {', '.join(self.arguments)}"
            )

    def also(self, facts: dict[str, TensorCorrection]) -> dict[str, Any]:
        """The corrections with `facts`, by parameter, of tensors that were not put right."""
        return facts | self._corrections

    def _correct(self, name: str, value: Any) -> Any:
        if name not in self._corrections:
            return value
        self._unused.discard(name)
        return self._corrections[name]

    # -- arguments ------------------------------------------------------------------------------

    def _argument(self, argument: ArgumentRecord) -> Any:
        names = [argument.name, argument.name.removesuffix("_ptr")]
        if argument.tensor is None:
            given = next((name for name in names if name in self._corrections), argument.name)
            return self._correct(given, argument.value)
        tensor = self.index.tensors.get(argument.tensor)
        if tensor is None:
            raise UsageError(
                f"the bundle does not say which tensor {argument.name} of {self.launch.kernel} is"
            )
        self.tensors[argument.name] = tensor
        given = next((n for n in (*names, tensor.name) if n in self._corrections), argument.name)
        fact = self._correct(given, TensorCorrection())
        if not isinstance(fact, TensorCorrection):
            raise UsageError(f"{given} is a tensor; correct it by a TensorCorrection")
        # A recorder that knows how the kernel was compiled says so beside the tensor.
        pointer = argument.value if isinstance(argument.value, str) else None
        return self._tensor(argument.name, tensor, fact, pointer)

    def _tensor(
        self, name: str, tensor: TensorRecord, fact: TensorCorrection, pointer: str | None
    ) -> RecordedTensor:
        dtype = (fact.dtype or tensor.dtype).upper()
        width = element_bytes(dtype)
        shape = tensor.shape if fact.shape is None else fact.shape
        strides = tensor.strides if fact.strides is None else fact.strides
        if fact.shape is not None and fact.strides is None:
            strides = contiguous_strides(fact.shape)
        if width is None:  # packed blocks: bytes to everybody but their own kernel
            width, shape, strides = 1, (tensor.extent_bytes,), (1,)
        room = self.index.room(tensor, self.place)
        if fact.is_alive:
            room = max(room, tensor.extent_bytes)
        elif self._unreachable(tensor):
            room = 0
        if fact.num_bytes is not None:
            room = fact.num_bytes
        elif fact.dtype or fact.shape is not None or fact.strides is not None:
            room = extent_bytes(shape, strides, width)
        made: dict[str, Any] = {
            "dtype": pointer or TORCH_NAMES.get(dtype, "uint8"),
            "shape": shape,
            "strides": strides,
            "item_bytes": width,
            "num_bytes": room,
            "alignment": tensor.address,
            "keeps_width": self._is_ours and dtype in TORCH_NAMES and not tensor.part,
        }
        is_own = fact != TensorCorrection(elements=fact.elements, defined_as=fact.defined_as)
        data, start, init = self._bytes(tensor, room, is_own, made["dtype"])
        if data is not None:
            if fact.defined_as is not None and init is not None:
                own = slice(start, start + room)
                number = bytes_of_number(fact.defined_as, made["dtype"])
                whole = np.resize(number, room)
                data[own][~init[own]] = whole[~init[own]]
                init[own] = True
            self._fill(name, tensor, fact, dtype, shape, data[start:])
        return RecordedTensor(**made, data=data, start=start, init=init)

    def _bytes(
        self, tensor: TensorRecord, room: int, is_own: bool, dtype: str
    ) -> tuple[Array | None, int, Array | None]:
        """The bytes of the tensor's allocation, where it begins there, and which are defined.

        Tensors of one allocation share its bytes, so that a race between two of them shows; one
        that was put right about its extent has bytes of its own.
        """
        allocation = self.index.allocations.get(tensor.allocation)
        if is_own or allocation is None or not room:
            if not 0 < room <= min(MAX_ALLOCATION_BYTES, self._room):
                return None, 0, None
            self._room -= room
            return np.zeros(room, np.uint8), 0, None
        if allocation.id not in self._images:
            if allocation.num_bytes > min(MAX_ALLOCATION_BYTES, self._room):
                return None, 0, None
            self._room -= allocation.num_bytes
            data = np.zeros(allocation.num_bytes, np.uint8)
            self._images[allocation.id] = data, self._place_known(allocation.id, data, dtype)
        data, init = self._images[allocation.id]
        return data, tensor.address - allocation.address, init

    def _place_known(self, allocation: int, data: Array, dtype: str) -> Array | None:
        """Write recorded values into an allocation's bytes; which bytes are defined, if not all."""
        address = self.index.allocations[allocation].address
        poisoned: list[slice] = []
        for values in self._known.values():
            tensor = self.index.tensors.get(values.tensor)
            if tensor is None or tensor.allocation != allocation:
                continue
            given = np.frombuffer(values.data, np.uint8)
            start = tensor.address - address
            if not 0 <= start <= data.size:
                continue
            given = given[: data.size - start]
            write_rows(data[start:], given, values, tensor)
            width = element_bytes(values.dtype.upper()) or 1
            whole = given[: given.size // width * width].reshape(-1, width)
            bad = np.flatnonzero((whole == _POISON).all(1))
            if TORCH_NAMES.get(values.dtype.upper()) in FLOATS and bad.size:
                poisoned += (slice(start + b * width, start + (b + 1) * width) for b in bad)
        if not poisoned or dtype not in FLOATS:
            return None
        init = np.ones(data.size, bool)
        for part in poisoned:
            init[part] = False
        return init

    def _fill(
        self,
        name: str,
        tensor: TensorRecord,
        fact: TensorCorrection,
        dtype: str,
        shape: tuple[int, ...],
        data: Array,
    ) -> None:
        """Put recorded values where a corrected tensor has them; keep index values for later."""
        kind = numpy_type(dtype)
        known = self._values(tensor)
        if kind is None or (known is None and not fact.elements):
            return
        if known is not None and (fact.dtype or fact.num_bytes is not None):
            flat = known.reshape(-1).astype(kind)
            room = data.size // kind.itemsize
            data[: room * kind.itemsize].view(kind)[: flat.size] = flat[:room]
        strides = fact.strides or tensor.strides
        for at, value in fact.elements.items():
            offset = sum(i * s for i, s in zip(at, strides, strict=True)) * kind.itemsize
            data[offset : offset + kind.itemsize] = np.array([value], kind).view(np.uint8)
        if known is not None and known.dtype.kind in "iu":
            contents = known.astype(np.int64)
            for at, value in fact.elements.items():
                if len(at) == contents.ndim and all(map(int.__lt__, at, contents.shape)):
                    contents[at] = value
            self.contents[name] = contents

    def _assume_counts(self) -> None:
        """Where the `counts` of a step are not recorded, every row of it counts as live.

        Zeros there would have every program return at once.
        """
        counts = self._facts.get("counts")
        if self._contract is None or counts is None or self._values(counts) is not None:
            return
        shapes = {name: tensor.shape for name, tensor in self._facts.items()}
        if (num_rows := self._contract.num_rows(shapes)) is not None:
            held = np.full(counts.shape, num_rows, np.int32)
            self._known[counts.id] = Values(counts.id, "I32", counts.shape, held.tobytes())

    def _values(self, tensor: TensorRecord) -> Array | None:
        """The recorded values of a tensor, or of one that begins at the same address."""
        found = self._known.get(tensor.id)
        if found is None:
            same = (
                v
                for v in self._known.values()
                if (t := self.index.tensors.get(v.tensor)) and t.address == tensor.address
            )
            found = next(same, None)
        if found is None or (kind := numpy_type(found.dtype.upper())) is None:
            return None
        count = math.prod(found.shape)
        if count * kind.itemsize > len(found.data):
            return None
        return np.frombuffer(found.data, kind, count).reshape(found.shape)

    # -- which programs first, and what was found -------------------------------------------------

    def suspicious(self) -> list[int]:
        """Linear numbers of programs at the corners of the grid and at rows of extreme indices."""
        if not self.grid or min(self.grid) < 1:
            return []
        columns = {0, self.grid[0] - 1}
        for contents in self.contents.values():
            if contents.ndim == 1 and contents.size:
                columns |= {int(contents.argmin()), int(contents.argmax()), contents.size - 1}
            elif contents.ndim == 2 and contents.size:
                columns |= {int(contents.max(1).argmax()), int(contents.min(1).argmin())}
        rest = [sorted({0, size - 1}) for size in self.grid[1:]]
        inside = sorted(column for column in columns if column < self.grid[0])
        steps = [math.prod(self.grid[:axis]) for axis in range(len(self.grid))]
        found = (
            sum(i * step for i, step in zip(at, steps, strict=True))
            for at in itertools.product(inside, *rest)
        )
        return list(itertools.islice(found, _MAX_FIRST))

    def unwritten(self, done: Sequence[Argument]) -> Iterator[Finding]:
        """Elements of live rows that the contract has this launch write, and that it did not.

        A tensor that the launch read as well may be meant to be written in part. Without a
        contract it is what nobody had written when torch was seen to read it.
        """
        contract, counts = self._contract, self.contents.get("counts_ptr")
        if contract is None:
            yield from self._read_unwritten(done)
            return
        names = {tensor.id: name for name, tensor in self._facts.items()}
        parameters = {a.name: names.get(a.tensor) for a in self.launch.arguments if a.tensor}
        scalars = {f.name: f.value for f in self.launch.facts if f.tensor is None}
        shapes = {name: tensor.shape for name, tensor in self._facts.items()}
        contents = {
            name: self.contents[arg]
            for arg, name in parameters.items()
            if name is not None and arg in self.contents
        }
        for argument in done:
            name = parameters.get(argument.name)
            if name is None or name not in contract.written or argument.was_read:
                continue
            shape = contract.shape_of(name, shapes, scalars)
            try:
                reach = contract.mask_written(name, shapes, scalars | contents)
            except (KeyError, IndexError):  # index values were not recorded, or are wrong
                continue
            live = contract.num_live(name, counts, scalars) if counts is not None else None
            if live is None and reach is not None:  # which says it of all rows
                live = shapes[name][0]
            if live is not None and shape is not None:
                yield from self._unwritten(argument, (live, *shape[1:]), reach)

    def _read_unwritten(self, done: Sequence[Argument]) -> Iterator[Finding]:
        read = self.index.unwritten_reads.get(self.place.launch)
        if read is None or not read.is_decided or self.place.plan != OUTSIDE_PLANS:
            return
        for argument in done:
            tensor, flags = self.tensors.get(argument.name), argument.region.init
            is_output = argument.was_written or argument.store_seen
            if tensor is None or flags is None or not is_output or argument.was_read:
                continue
            if tensor.allocation == self.index.tensors[read.tensor].allocation:
                detail = f"; {read.operation} reads it at {read.site}"
                found = missing_of(self.launch.function, argument, flags, detail)
                yield from [found] if found is not None else []

    def _unwritten(
        self, argument: Argument, shape: tuple[int, ...], reach: Array | None
    ) -> Iterator[Finding]:
        region, width = argument.region, argument.item_bytes
        span = extent_bytes(shape, argument.strides, width) if min(shape) else 0
        if region.data is None or not 0 < span <= argument.num_bytes:
            return
        flags = region.writer[argument.start // region.granule :] != 0
        steps = [stride * width // region.granule for stride in argument.strides]
        wanted = np.broadcast_to(True if reach is None else reach, shape)
        bad = np.argwhere(wanted & ~np.lib.stride_tricks.as_strided(flags, shape, steps))
        if len(bad):
            first, last = ([int(i) for i in bad[end]] for end in (0, -1))
            yield Finding(
                kind=FindingKind.NEVER_WRITTEN,
                kernel=self.launch.function,
                operation="launch",
                argument=argument.name,
                element=tuple(first),
                num_lanes=len(bad),
                detail=f"{len(bad)} of {wanted.sum()} elements of the live rows, from "
                f"{first} to {last}",
            )

    def restate(self, finding: Finding) -> Finding:
        """The finding with source files as they were recorded, and with whose memory was hit."""
        sites = tuple(map(recorded_site, finding.sites))
        origin = recorded_site(finding.origin) if finding.origin else None
        finding = msgspec.structs.replace(finding, sites=sites, origin=origin)
        tensor = self.tensors.get(finding.argument or "")
        if tensor is None or finding.kind not in _OUTSIDE:
            return finding
        if found := self._unreachable(tensor):
            kind, why = found
            return msgspec.structs.replace(finding, kind=kind, detail=f"{finding.detail}; {why}")
        return msgspec.structs.replace(finding, detail=finding.detail + self._hit(finding, tensor))

    def _unreachable(self, tensor: TensorRecord) -> tuple[FindingKind, str] | None:
        """Why no access to a tensor can be right, as a kind of finding and in words."""
        if freed := self.index.is_freed(tensor.allocation, self.place):
            return FindingKind.FREED_MEMORY, f"freed in step {freed.step} at {freed.site}"
        if not tensor.address and tensor.extent_bytes:
            return FindingKind.NULL_POINTER, f"{tensor.name} lies at address 0"
        allocation = self.index.allocations.get(tensor.allocation)
        if allocation is None or allocation.device == self.launch.device:
            return None
        if allocation.kind == "host":
            return FindingKind.HOST_POINTER, f"{tensor.name} lies in the memory of the host"
        if allocation.kind == "device":
            return FindingKind.WRONG_DEVICE, f"{tensor.name} is on {allocation.device}"
        return None

    def _hit(self, finding: Finding, tensor: TensorRecord) -> str:
        """Whose memory an access outside of a tensor went to, in words."""
        if finding.number is None:
            return ""
        width = element_bytes(tensor.dtype.upper()) or 1
        address = tensor.address + finding.number * width
        owner = self.index.owner(self.launch.device, address, self.place)
        if owner is None:
            return f"; address {address:#x} is in no allocation"
        if owner.id == tensor.allocation:
            return f"; that is still inside the allocation of {owner.name}"
        return f"; that is {owner.name} ({owner.owner}), byte {address - owner.address}"


def recorded_site(site: Site) -> Site:
    return msgspec.structs.replace(site, file=recorded_file(site.file))
