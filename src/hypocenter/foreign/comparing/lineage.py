"""What came of what a kernel that casts a pointer has left: copies of it, sums, later launches.

A comparison says something of a result only where its other side did not come of that result, nor
of the same kernel. So what torch's operations and launches make of one is followed, by storage.
What leaves torch and comes back is not: from then on it is not known of new memory.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hypocenter.foreign.streams.kernel_uses import uses_of
from hypocenter.foreign.streams.operations import Operation, Sort, operation_of, tensors_in
from hypocenter.record.compared import SideOrigin

#: Operations that are looked at in all.
MAX_NOTED = 20_000
#: Write over all that a tensor held before.
_OVERWRITING = frozenset({"fill_", "zero_", "copy_", "normal_", "uniform_", "random_"})
#: Make a tensor of numbers of the host.
_OF_HOST = frozenset({"full", "scalar_tensor", "fill_", "full_like", "lift_fresh", "new_full"})
#: Of a number that the host has: it may be any.
_UNKNOWN = ""
Tags = frozenset[str]
_NONE: Tags = frozenset()


@dataclass(slots=True)
class Lineage:
    """By storage the kernels whose results it came of; empty for what came of none.

    Nothing is followed before the first launch of a kernel that casts; `begin` is called then.
    """

    begin: Callable[[], None]
    is_on: bool = False
    #: Whether numbers of a result are in the host's hands, past torch.
    has_left: bool = False
    _num_noted: int = 0
    _tags: Any = field(default_factory=weakref.WeakKeyDictionary)
    _operations: dict[Any, Operation] = field(default_factory=dict)

    def note_launch(self, jit: Any, name: str, given: Mapping[str, Any], *, casts: bool) -> None:
        """A launch is about to be made of a kernel; `given` are its arguments by parameter."""
        if casts and not self.is_on:
            self.is_on = True
            self.begin()
        if not self.is_on:
            return
        uses = uses_of(jit)
        tensors = {key: value for key, value in given.items() if hasattr(value, "untyped_storage")}
        read = [tensor for key, tensor in tensors.items() if uses.get(key, (True, True))[0]]
        tags = frozenset({name} if casts else ()).union(*map(self._tags_of, read))
        for key, tensor in tensors.items():
            if uses.get(key, (True, True))[1]:
                self._tags[tensor.untyped_storage()] = self._tags_of(tensor) | tags

    def note(
        self, operation: Any, args: tuple[Any, ...], keywords: dict[str, Any], result: Any
    ) -> None:
        """An operation of torch's has run."""
        self._num_noted += 1
        if self._num_noted > MAX_NOTED:
            return
        used = self._operations.get(operation)
        if used is None:
            used = self._operations[operation] = operation_of(operation)
        bare = used.name.removeprefix("torch.")
        if used.sort is Sort.NOTHING and bare != "lift_fresh":
            return
        tensors = list(used.tensors_of(args, keywords))
        written = [tensor for tensor, _, is_write in tensors if is_write]
        read = [t for t, _, w in tensors if not (w and bare in _OVERWRITING and _is_whole(t))]
        tags = _NONE.union(*map(self._tags_of, read))
        if used.sort is Sort.NUMBER:
            self.has_left |= bool(tags) and _is_number(args[0])
        if bare in _OF_HOST and self.has_left:
            tags |= {_UNKNOWN}
        if bare == "lift_fresh":
            written = [args[0]]
        for tensor in (*written, *tensors_in(result)):
            self._tags[tensor.untyped_storage()] = tags

    def note_direct(self, tensor: Any, name: str) -> None:
        """A method gives a tensor to the host."""
        self.has_left |= name != "print" and bool(self._tags_of(tensor))

    def origin_of(self, result: Any, other: Any, *, is_watching: bool) -> SideOrigin:
        """Where the other side of a comparison comes from; `is_watching`: operations are seen."""
        if result.untyped_storage() is other.untyped_storage():
            return "derived"
        is_seen = is_watching and self.is_on and self._num_noted <= MAX_NOTED
        if not is_seen or threading.active_count() > 1:
            return "unknown"
        tags = self._tags_of(other)
        if tags & self._tags_of(result):
            return "derived"
        return "unknown" if _UNKNOWN in tags else "apart"

    def _tags_of(self, tensor: Any) -> Tags:
        """What is met for the first time was there before, or is of the host."""
        storage = tensor.untyped_storage()
        known: Tags | None = self._tags.get(storage)
        if known is None:
            known = self._tags[storage] = frozenset({_UNKNOWN}) if self.has_left else _NONE
        return known


def _is_whole(tensor: Any) -> bool:
    return bool(tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes())


def _is_number(tensor: Any) -> bool:
    """Whether it is more than a yes or no."""
    return bool(tensor.element_size() > 1)
