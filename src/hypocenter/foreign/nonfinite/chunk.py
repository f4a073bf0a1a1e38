"""The operations whose flags have not been looked at yet, with all that they read and wrote."""

from __future__ import annotations

import collections
from typing import Any

from hypocenter.foreign.nonfinite.ops import Op, Role, place_of, tensors_in

#: Operations and bytes that are kept, at most; a GPU has more to be waited for.
MAX_OPS, MAX_SLOTS = 256, 2048
MAX_BYTES, MAX_GPU_BYTES = 256 << 20, 1 << 30


class Chunk:
    """Operations in order; `num_bytes` is what they keep alive that nobody else might."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._buffers: dict[Any, Any] = {}
        self._most_bytes = MAX_BYTES
        self.clear()

    def clear(self) -> None:
        self.ops: list[Op] = []
        self._num_slots = 0
        self.num_bytes = 0
        #: By storage the numbers of operations that wrote it, ascending.
        self._writers: collections.defaultdict[int, list[int]] = collections.defaultdict(list)
        self._devices: set[Any] = set()

    def is_full(self, more_bytes: int) -> bool:
        """Whether it has to be looked at before so much more is kept."""
        has_slots = self._num_slots < MAX_SLOTS // 2 and len(self.ops) < MAX_OPS
        return not has_slots or self.num_bytes + more_bytes > self._most_bytes

    def add(self, op: Op) -> None:
        """Sum its results into slots of their device, without waiting for it."""
        first = self._num_slots
        with self._torch.no_grad():
            for result in self._sums_of(op):
                self._put(result)
        op.slots = first, self._num_slots
        for result in op.results:
            self.num_bytes += result.nbytes
            if op.facts.role is not Role.TEST and op.facts.name != "lift_fresh":
                self._writers[result.untyped_storage()._cdata].append(op.number)
        self.ops.append(op)

    def _sums_of(self, op: Op) -> list[Any]:
        """Results, or one number that tells of many."""
        many = len(op.results) > 8 and all(r.device.type == "cuda" for r in op.results)
        same = many and len({(r.device, r.dtype) for r in op.results}) == 1
        if not same or "float8" in str(op.results[0].dtype):
            return op.results
        norms = self._torch._foreach_norm([r.detach() for r in op.results], 1)
        return [self._torch.stack(norms)]

    def _put(self, result: Any) -> None:
        torch, device = self._torch, result.device
        if device.type == "cuda":
            self._most_bytes = MAX_GPU_BYTES
        buffer = self._buffers.get(device)
        if buffer is None:
            made = torch.zeros(MAX_SLOTS, dtype=torch.float32, device=device)
            buffer = self._buffers[device] = list(made.unbind()), made
        if device not in self._devices:
            self._devices.add(device)
            buffer[1].zero_()
        if self._num_slots == MAX_SLOTS:  # one operation has more results than there are slots
            self._num_slots -= 1
            slot = torch.zeros((), dtype=torch.float32, device=device)
            self._sum(result, slot)
            buffer[0][self._num_slots].add_(slot)
        else:
            self._sum(result, buffer[0][self._num_slots])
        self._num_slots += 1

    def _sum(self, result: Any, slot: Any) -> None:
        torch, values = self._torch, result.detach()
        if "float8" in str(values.dtype):
            values = values.float()
        if values.dtype is torch.float64:
            slot.copy_(values.sum())
        elif values.dim():
            torch.sum(values, list(range(values.dim())), dtype=torch.float32, out=slot)
        else:
            slot.copy_(values)

    def flagged(self) -> list[Op]:
        """Those of which a result may not be finite; waits for the devices."""
        torch, bad = self._torch, set()
        for device in self._devices:
            sums = self._buffers[device][1][: self._num_slots]
            if not bool(torch.isfinite(sums).all()):
                bad |= set(torch.nonzero(~torch.isfinite(sums)).flatten().tolist())
        if not bad:
            return []
        return [op for op in self.ops if any(slot in bad for slot in range(*op.slots))]

    def content(self, tensor: Any, number: int) -> Any | None:
        """What a tensor held after operation `number`; None where that is gone."""
        later = [n for n in self._writers[tensor.untyped_storage()._cdata] if n > number]
        if not later:
            return tensor.detach()
        writer = next(op for op in self.ops if op.number == later[0])
        return writer.before.get(place_of(tensor))

    def inputs(self, op: Op) -> dict[str, list[Any]]:
        """By parameter the tensors that an operation read, as they were then; None: it is gone."""
        found = {}
        for name, value in op.inputs.items():
            tensors = list(tensors_in(value))
            if tensors:
                found[name] = [self.content(tensor, op.number - 1) for tensor in tensors]
        return found
