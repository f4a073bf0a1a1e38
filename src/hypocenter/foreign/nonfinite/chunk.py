"""The operations whose results have not been looked at yet, with all that they read and wrote."""

from __future__ import annotations

import collections
import math
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from hypocenter.foreign.nonfinite.ops import (
    Role,
    SeenOp,
    is_hidden,
    is_overlapping,
    is_there,
    is_within,
    place_of,
    tensors_in,
)

#: Operations, results and bytes that are kept, at most. A GPU is waited for when they are looked
#: at, and has nothing to do then: of its free memory a part is kept, between these two.
MAX_OPS, MAX_RESULTS = 2048, 4096
MAX_BYTES, MAX_GPU_BYTES, MOST_GPU_BYTES = 256 << 20, 1 << 30, 4 << 30
_PART_OF_FREE = 16


def gpu_bytes(torch: Any) -> int:
    """What may be kept of results on the current GPU."""
    free: int = torch.cuda.mem_get_info()[0]
    return max(MAX_GPU_BYTES, min(free // _PART_OF_FREE, MOST_GPU_BYTES))


class OpChunk:
    """Operations in order; `num_bytes` is what they keep alive that nobody else might."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._most_bytes = MAX_BYTES
        self.clear()

    def clear(self) -> None:
        self.ops: list[SeenOp] = []
        self._num_results = 0
        self._is_on_gpu = False
        self.num_bytes = 0
        #: By storage the operations that wrote it, ascending.
        self._writers: collections.defaultdict[int, list[SeenOp]] = collections.defaultdict(list)

    def is_full(self, more_bytes: int) -> bool:
        """Whether it has to be looked at before so much more is kept."""
        has_room = self._num_results < MAX_RESULTS and len(self.ops) < MAX_OPS
        return not has_room or self.num_bytes + more_bytes > self._most_bytes

    def add(self, op: SeenOp) -> None:
        """Keep an operation that has run."""
        is_written = op.facts.role is not Role.TEST and op.facts.name != "lift_fresh"
        for result in op.results:
            self.num_bytes += result.nbytes
            if is_written:
                self._writers[result.untyped_storage()._cdata].append(op)
        if op.results[0].device.type == "cuda" and not self._is_on_gpu:
            self._is_on_gpu, self._most_bytes = True, gpu_bytes(self._torch)
        self._num_results += len(op.results)
        self.ops.append(op)

    def ops_of(self, flagged: set[int], tainted: Collection[Any]) -> Iterable[SeenOp]:
        """Those that have to be judged, in order: of these numbers, or over tainted storages."""
        return self.ops if flagged or tainted else ()

    def find_flagged(self) -> set[int]:
        """The numbers of those of which a result is not finite; the device is waited for once.

        The largest absolute number of each result is found there, many results to a launch: it is
        finite only where all are.
        """
        torch, groups = self._torch, self._by_kind()
        sums = []
        for found in groups.values():
            sums.append((found, self._largest([tensor for _, tensor in found])))
        bad: set[int] = set()
        for found, norms in sums:
            finite = torch.isfinite(norms)
            if not bool(finite.all()):
                places = torch.nonzero(~finite).flatten().tolist()
                bad |= {found[place][0] for place in places}
        return bad

    def _largest(self, tensors: list[Any]) -> Any:
        """Of each tensor a number that is finite only where all of its own are.

        On a CPU the norm of infinity takes ten times what the two ends take.
        """
        torch, first = self._torch, tensors[0]
        tensors = [t if t.numel() else t.new_zeros(1) for t in tensors]
        if first.device.type != "cpu" or first.is_complex():
            return torch.stack(torch._foreach_norm(tensors, math.inf))
        ends = [torch.stack(torch.aminmax(t)) for t in tensors]
        return torch.stack(ends).double().abs().amax(1)

    def _by_kind(self) -> dict[tuple[Any, Any], list[tuple[int, Any]]]:
        """Results with the numbers of their operations, by device and type."""
        groups: dict[tuple[Any, Any], list[tuple[int, Any]]] = collections.defaultdict(list)
        for number, tensor in self._contents():
            if "float8" in str(tensor.dtype):
                tensor = tensor.float()
            groups[tensor.device, tensor.dtype].append((number, tensor))
        return groups

    def _contents(self) -> Iterator[tuple[int, Any]]:
        for op in self.ops:
            of = op.number - (op.facts.role is Role.TEST)
            for result in op.results:
                found = self.content(result, of)
                if found is not None:
                    yield op.number, found

    def content(self, tensor: Any, number: int) -> Any | None:
        """What a tensor held after operation `number`; None where that is gone."""
        if not is_there(tensor):
            return None
        for writer in self._writers[tensor.untyped_storage()._cdata]:
            if writer.number > number:
                place = place_of(tensor)
                if place in writer.before:
                    return writer.before[place]
                is_touched = not writer.before
                for written, copy in writer.before.items():
                    if is_within(place, written) and copy.stride() == written[2]:
                        gap = (place[0] - written[0]) // tensor.element_size()
                        return copy.as_strided(*place[1:3], copy.storage_offset() + gap)
                    is_touched |= is_overlapping(place, written)
                if is_touched:
                    return None
        return tensor.detach()

    def inputs(self, op: SeenOp) -> dict[str, list[Any]]:
        """By parameter the tensors that an operation read, as they were then; None: it is gone."""
        found = {}
        for name, value in op.inputs.items():
            tensors = list(tensors_in(value))
            if tensors:
                found[name] = [
                    None if is_hidden(self._torch, t) else self.content(t, op.number - 1)
                    for t in tensors
                ]
        return found
