"""Launches of a run with `--suspect` that are made again, on copies of what they were given.

So the record has all that such a launch was given and gives, whether the GPU gives the same bits
each time, and what the compiler made of the kernel. The program's own memory is not touched, and
what it does with that memory meanwhile says nothing here.
"""

from __future__ import annotations

import collections
import hashlib
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hypocenter.base.dtypes import NUMPY_DTYPES
from hypocenter.foreign.argument_facts import dtype_of, is_pinned, values_of
from hypocenter.foreign.closed_kernels import is_closed
from hypocenter.record.contents import MAX_OUTCOMES, CompiledCode, OtherBits
from hypocenter.record.events import SourceRecord, Values
from hypocenter.settings.environment import launch_blocking

#: How often a launch is made again, and launches of each form of a kernel that are.
NUM_AGAIN, NUM_OF_FORM = 3, 2
#: Bytes of the memory behind a launch's tensors, and behind those of all such launches.
MAX_LAUNCH_BYTES, MAX_ALL_BYTES = 1 << 20, 24 << 20
#: Seconds that a launch may have taken that is made again, and that all which are made again may.
MAX_SECONDS, MAX_ALL_SECONDS = 1.0, 10.0
#: Bytes around each copy, so that an access near it does not leave it.
_AROUND = 1 << 20
#: Characters of a text of code, and of all texts.
MAX_TEXT_CHARS, MAX_ALL_CHARS = 1 << 18, 4 << 20
#: What a GPU ran, and texts from which it was made, by Triton's names of its stages.
_BINARIES, _TEXTS = ("cubin", "hsaco"), ("ttir", "ptx", "amdgcn")
#: Types whose values a record keeps.
_KEPT = NUMPY_DTYPES.keys() | {"F16", "BF16"}


@dataclass(slots=True)
class Repeat:
    """A launch that is about to be made: what its tensors hold is kept.

    `tensors` are its tensors by their numbers in the record, `given` what they held; `seq` is the
    number of its event, `began` a time of the monotonic clock.
    """

    args: tuple[Any, ...]
    options: Mapping[str, Any]
    tensors: dict[int, Any]
    given: tuple[Values, ...]
    began: float
    #: Copies of the memory behind the tensors, by its addresses; never written.
    copies: dict[int, Any] = field(default_factory=dict)
    seq: int = 0

    def make(self, launch: Callable[..., Any]) -> tuple[Values, ...]:
        """Make it by `launch`, which takes arguments and keywords; what copies of its tensors hold
        then. The GPU is waited for."""
        fresh: dict[int, Any] = {}
        memory = {address: _with_room(copy) for address, copy in self.copies.items()}
        args = tuple(_copy_of(value, memory, fresh) for value in self.args)
        launch(*args, **{n: _copy_of(value, memory, fresh) for n, value in self.options.items()})
        return _contents_of({number: fresh[id(t)] for number, t in self.tensors.items()})


class Repeats:
    """Which launches of a run are made again: the first of each form of a kernel."""

    def __init__(self) -> None:
        self._num_of_form: collections.Counter[str] = collections.Counter()
        self._num_chars = self._num_bytes = self._num = 0
        self._seconds = 0.0

    @property
    def has_room(self) -> bool:
        """Whether any launch is still to be made again."""
        return self._num < MAX_OUTCOMES and self._seconds <= MAX_ALL_SECONDS

    def prepare(
        self,
        form: str,
        jit: Any,
        sources: Sequence[SourceRecord],
        args: tuple[Any, ...],
        options: Mapping[str, Any],
        numbers: Mapping[int, int],
    ) -> Repeat | None:
        """Keep what a launch is given that is about to be made; None for one that is not wanted.

        `form` is what launches of the same code have in common, `numbers` are those of tensors in
        the record, by the ids of torch's objects.
        """
        if not self.has_room or self._num_of_form[form] >= NUM_OF_FORM or _is_watched(jit):
            return None
        values = [*args, *options.values()]
        tensors = {numbers[id(value)]: value for value in values if id(value) in numbers}
        if not tensors or not all(id(v) in numbers or _is_plain(v) for v in values):
            return None
        if not all(map(_is_torchs, tensors.values())) or not is_closed(sources):
            return None
        if any(map(is_pinned, tensors.values())):
            return None  # a copy of it is no memory that a GPU reads by itself
        storages = {s.data_ptr(): s for t in tensors.values() for s in [t.untyped_storage()]}
        num_bytes = sum(int(storage.nbytes()) for storage in storages.values())
        has_room = num_bytes <= min(MAX_LAUNCH_BYTES, MAX_ALL_BYTES - self._num_bytes)
        if not has_room or _overlap(storages):
            return None
        self._num_of_form[form] += 1
        self._num_bytes += num_bytes
        self._num += 1
        copies = {address: storage.clone() for address, storage in storages.items()}
        return Repeat(args, options, tensors, _contents_of(tensors), time.monotonic(), copies)

    def make(
        self, repeat: Repeat, launch: Callable[..., Any]
    ) -> tuple[tuple[Values, ...], list[list[OtherBits]]] | None:
        """What a launch gives, as tensors that it changes, and where it gave other bits in each of
        NUM_AGAIN more; None for one that took too long. It has been made by then.

        What counts is the wait for the GPU: the first launch compiles its kernel before that. Where
        each launch is waited for, all of it counts.
        """
        begun = repeat.began if launch_blocking() else time.monotonic()
        _contents_of(repeat.tensors)
        if time.monotonic() - begun > MAX_SECONDS:
            return None
        begun = time.monotonic()
        first = repeat.make(launch)
        others = []
        for _ in range(NUM_AGAIN):
            again = zip(first, repeat.make(launch), strict=True)
            others.append([_other(one, two) for one, two in again if one.data != two.data])
        self._seconds += time.monotonic() - begun
        pairs = zip(first, repeat.given, strict=True)
        return tuple(v for v, before in pairs if v.data != before.data), others

    def code_of(self, compiled: Any) -> CompiledCode:
        """What Triton answered to a launch; nothing of its interpreter."""
        stages = getattr(compiled, "asm", None)
        if not isinstance(stages, Mapping):
            return CompiledCode()
        texts = {}
        for name in _TEXTS:
            text = stages.get(name)
            left = MAX_ALL_CHARS - self._num_chars
            if isinstance(text, str) and len(text) <= min(MAX_TEXT_CHARS, left):
                texts[name] = text
                self._num_chars += len(text)
        binary = next((stages[name] for name in _BINARIES if name in stages), b"")
        return CompiledCode(
            binary=hashlib.sha256(binary).hexdigest() if binary else "", texts=texts
        )


def _is_watched(jit: Any) -> bool:
    """Whether somebody is told of each launch, who would be told of these as well."""
    runtime = getattr(getattr(sys.modules.get("triton"), "knobs", None), "runtime", None)
    hooks = (getattr(runtime, f"launch_{name}_hook", None) for name in ("enter", "exit"))
    are_set = any(hook is not None and getattr(hook, "calls", True) for hook in hooks)
    return bool(getattr(jit, "pre_run_hooks", ())) or are_set


def _is_plain(value: Any) -> bool:
    """Whether it holds no memory: a number, a text, a type."""
    if value is None or isinstance(value, bool | int | float | str):
        return True
    return type(value).__name__ in ("constexpr", "dtype")


def _is_torchs(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor) and dtype_of(value.dtype) in _KEPT


def _overlap(storages: Mapping[int, Any]) -> bool:
    """Whether two memories share bytes, as those of arrays and of other frameworks may."""
    ends = sorted((address, address + int(s.nbytes())) for address, s in storages.items())
    return any(end > start for (_, end), (start, _) in itertools.pairwise(ends))


def _with_room(storage: Any) -> tuple[Any, int]:
    """A copy of a memory with room around it, and where in that it begins."""
    torch: Any = sys.modules["torch"]
    size = int(storage.nbytes())
    whole = torch.zeros(size + 2 * _AROUND, dtype=torch.uint8, device=storage.device)
    own = torch.tensor([], dtype=torch.uint8, device=storage.device).set_(storage)
    whole[_AROUND : _AROUND + size].copy_(own)
    return whole.untyped_storage(), _AROUND


def _copy_of(value: Any, memory: Mapping[int, tuple[Any, int]], fresh: dict[int, Any]) -> Any:
    """A tensor as it is, in copies of its memory; `fresh` gets it by the id of the first."""
    if not hasattr(value, "untyped_storage"):
        return value
    if id(value) not in fresh:
        copy, start = memory[value.untyped_storage().data_ptr()]
        offset = start // value.element_size() + value.storage_offset()
        made = value.detach().new_empty(0).set_(copy, offset, value.shape, value.stride())
        fresh[id(value)] = made
    return fresh[id(value)]


def _contents_of(tensors: Mapping[int, Any]) -> tuple[Values, ...]:
    return tuple(values_of(t, number, dtype_of(t.dtype)) for number, t in tensors.items())


def _other(first: Values, again: Values) -> OtherBits:
    at = list(_differing(first, again))
    element, one, two = at[0]
    return OtherBits(
        tensor=first.tensor, element=element, num_elements=len(at), first=one.hex(), again=two.hex()
    )


def _differing(first: Values, again: Values) -> Iterator[tuple[int, bytes, bytes]]:
    num_elements = 1
    for size in first.shape:
        num_elements *= size
    width = max(1, len(first.data) // max(1, num_elements))
    for at in range(0, len(first.data), width):
        one, two = first.data[at : at + width], again.data[at : at + width]
        if one != two:
            yield at // width, one, two
