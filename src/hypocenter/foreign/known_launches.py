"""Launches that are like earlier ones but for grid and numbers: told in a few bytes.

The second one of a kind writes what all of them have in common; from then on each writes what
changed. What cannot be told so `recorder.py` tells in full. This runs in each launch of a program.
So what looks at the arguments is a function that is written for each way to call a kernel: without
a loop it takes a third of the time.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from hypocenter.foreign.argument_facts import scalar_of
from hypocenter.foreign.run_log import RunLog
from hypocenter.record.events import LaunchRecord, Repeated
from hypocenter.record.known_launch import KnownLaunch

#: How many kinds of launches are remembered, and ways to call kernels.
MAX_KINDS = MAX_FORMS = 4096
_NUMBERS = frozenset({int, float, bool, type(None)})
_PLAIN = _NUMBERS | {str}

#: Where a launch is made: line, device, stream.
Where = tuple[str, str, str]
Key = tuple[object, ...]


@dataclass(slots=True)
class _Kind:
    """Launches with tensors in storages that still live; `number` is 0 after the first one."""

    storages: tuple[Any, ...]
    number: int = 0


@dataclass(frozen=True, slots=True)
class Looked:
    """A launch that is to be told in full: what is there to be learned of it."""

    form: _Form
    key: Key
    tensors: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class _Form:
    """A way to call a kernel: `names` are those of its numbers.

    `look` gives the number of the kind that a launch is of, and its numbers. Where none is known it
    gives 0, what the launch has in common with others of a kind, and its tensors. It gives None for
    a launch with other arguments, or such of other types. `is_same` says whether tensors lie in
    these storages.
    """

    names: tuple[str, ...]
    look: Callable[[Where, tuple[Any, ...], Mapping[str, Any]], tuple[Any, ...] | None]
    is_same: Callable[[tuple[Any, ...], tuple[Any, ...]], bool]
    kinds: dict[Key, _Kind]


class LaunchedKernel(Protocol):
    """A kernel: `constants` says of each of its parameters whether it is one."""

    @property
    def number(self) -> int: ...

    @property
    def constants(self) -> Mapping[str, bool]: ...


class KnownLaunches:
    """The kinds of launches that one log knows; `tensor_types` grows as tensors are seen."""

    def __init__(self, log: RunLog, tensor_types: Collection[type]) -> None:
        self._log, self._tensor_types = log, tensor_types
        self._numbers = itertools.count(1)
        self._forms: dict[Key, _Form] = {}
        #: By kernel that of its last launch, which is most often that of the next.
        self._last: dict[int, _Form] = {}
        self._num_kinds = 0

    def forget(self) -> None:
        """The log begins anew."""
        self._forms.clear()
        self._last.clear()
        self._num_kinds = 0

    def tell(
        self,
        kernel: LaunchedKernel,
        where: Where,
        args: tuple[Any, ...],
        options: Mapping[str, Any],
        grid: tuple[int, ...],
    ) -> Looked | bool:
        """Write a launch of a kind that is known: True. Else what there is to learn of it.

        That is nothing (False) where it is given anything but tensors of known types and numbers.
        """
        form = self._last.get(kernel.number)
        looked = form.look(where, args, options) if form is not None else None
        if looked is None:
            form = self._form(kernel, args, options)
            looked = form.look(where, args, options) if form is not None else None
        if form is None or looked is None:
            return False
        if not looked[0]:
            return Looked(form, looked[1], looked[2])
        log = self._log
        event = Repeated(
            seq=log.next_number(),
            step=log.num_launches,
            of=looked[0],
            grid=grid,
            scalars=looked[1],
        )
        try:
            log.writer.event(event)  # which has room for one so short
        except OverflowError:  # an integer of more than 64 bits, which is told as text
            return False
        return True

    def _form(
        self, kernel: LaunchedKernel, args: tuple[Any, ...], options: Mapping[str, Any]
    ) -> _Form | None:
        """How the kernel is called, which is kept; None for a way that is not told in short."""
        call = (kernel.number, len(args), *map(type, (*args, *options.values())), *options)
        form = self._forms.get(call)
        if form is None:
            form = _form_of(kernel.constants, args, options, self._tensor_types)
            if form is None:
                return None
            if len(self._forms) >= MAX_FORMS:
                self.forget()
            self._forms[call] = form
        self._last[kernel.number] = form
        return form

    def learn(self, looked: Looked, record: LaunchRecord) -> None:
        """A launch was told in full: know its kind from the second one on."""
        form = looked.form
        kind = form.kinds.get(looked.key)
        if kind is None or not form.is_same(kind.storages, looked.tensors):
            if kind is None:
                self._num_kinds += 1
            if self._num_kinds > MAX_KINDS:
                self.forget()
                return
            storages = (weakref.ref(tensor.untyped_storage()) for tensor in looked.tensors)
            form.kinds[looked.key] = _Kind(tuple(storages))
        elif not kind.number:
            number = next(self._numbers)
            if self._log.static(KnownLaunch(id=number, launch=record, scalars=form.names)):
                kind.number = number


def _form_of(
    constants: Mapping[str, bool],
    args: tuple[Any, ...],
    options: Mapping[str, Any],
    tensor_types: Collection[type],
) -> _Form | None:
    """None where something is given that is neither a tensor of before, a number nor a constant."""
    key, tensors, numbers, names = ["where"], [], [], []
    values = (*args, *options.values())
    for at, (name, value) in enumerate(
        zip((*itertools.islice(constants, len(args)), *options), values, strict=False)
    ):
        if constants.get(name) is not False:
            key.append(f"v{at}" if type(value) in _PLAIN else f"scalar_of(v{at})")
        elif type(value) in tensor_types:
            key.append(f"v{at}.data_ptr(), v{at}.shape, v{at}.stride(), v{at}.dtype")
            tensors.append(f"v{at},")
        elif type(value) in _NUMBERS:
            numbers.append(f"v{at},")
            names.append(name)
        else:
            return None
    kinds: dict[Key, _Kind] = {}
    scope: dict[str, Any] = {"kinds": kinds, "scalar_of": scalar_of, "names": [*options]}
    scope |= {f"T{at}": type(value) for at, value in enumerate(values)}
    text = _LOOK.format(
        num_args=len(args),
        args="".join(f"v{at}, " for at in range(len(args))),
        options="".join(f"v{at}, " for at in range(len(args), len(values))),
        other=" or ".join(f"type(v{at}) is not T{at}" for at in range(len(values))) or "False",
        key=", ".join(key),
        tensors=" ".join(tensors),
        numbers=" ".join(numbers),
        same=" and ".join(
            f"s[{at}]() is {tensor[:-1]}.untyped_storage()" for at, tensor in enumerate(tensors)
        )
        or "True",
    )
    exec(compile(text, "<a way to call a kernel>", "exec"), scope)
    return _Form(tuple(names), scope["look"], scope["is_same"], kinds)


#: What `_Form` has, written out for one way to call a kernel.
_LOOK = """
def look(where, args, options):
    if len(args) != {num_args} or [*options] != names:
        return None
    [{args}] = args
    [{options}] = options.values()
    if {other}:
        return None
    key = ({key},)
    kind = kinds.get(key)
    if kind is not None and kind.number:
        s = kind.storages
        if {same}:
            return kind.number, ({numbers})
    return 0, key, ({tensors})
def is_same(s, tensors):
    [{tensors}] = tensors
    return {same}
"""
