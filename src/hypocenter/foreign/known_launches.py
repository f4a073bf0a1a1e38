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
from dataclasses import dataclass, field
from typing import Any

from hypocenter.foreign.argument_facts import scalar_of
from hypocenter.foreign.run_log import RunLog
from hypocenter.record.events import LaunchRecord, Repeated, ScalarValue
from hypocenter.record.known_launch import KnownLaunch

#: How many kinds of launches are remembered, and ways to call kernels.
MAX_KINDS = MAX_FORMS = 4096
_NUMBERS = frozenset({int, float, bool, type(None)})
_PLAIN = _NUMBERS | {str}

#: Where a launch is made: number of the kernel, device, stream, line.
Where = tuple[int, str, str, str]
Key = tuple[object, ...]


@dataclass(slots=True)
class _Kind:
    """Launches with tensors in storages that still live; `number` is 0 after the first one."""

    storages: tuple[Any, ...]
    number: int = 0


@dataclass(frozen=True, slots=True)
class _Form:
    """A way to call a kernel: `names` are those of its numbers.

    `look` gives what its launches have in common with others of a kind, their tensors and their
    numbers. `is_same` says whether tensors lie in these storages.
    """

    names: tuple[str, ...]
    look: Callable[[Where, tuple[Any, ...]], tuple[Key, tuple[Any, ...], tuple[ScalarValue, ...]]]
    is_same: Callable[[tuple[Any, ...], tuple[Any, ...]], bool]
    kinds: dict[Key, _Kind] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Looked:
    """A launch that is to be told in full: what is there to be learned of it."""

    form: _Form
    key: Key
    tensors: tuple[Any, ...]


class KnownLaunches:
    """The kinds of launches that one log knows."""

    def __init__(self, log: RunLog) -> None:
        self._log = log
        self._numbers = itertools.count(1)
        self._forms: dict[Key, _Form] = {}
        self._num_kinds = 0

    def forget(self) -> None:
        """The log begins anew."""
        self._forms.clear()
        self._num_kinds = 0

    def tell(
        self,
        where: Where,
        constants: Mapping[str, bool],
        args: tuple[Any, ...],
        options: Mapping[str, Any],
        grid: tuple[int, ...],
        tensor_types: Collection[type],
    ) -> Looked | bool:
        """Write a launch of a kind that is known: True. Else what there is to learn of it.

        That is nothing (False) where it is given anything but tensors of `tensor_types` and
        numbers. `constants` says of each parameter of the kernel whether it is one.
        """
        values = (*args, *options.values())
        call = (where[0], len(args), *map(type, values), *options)
        form = self._forms.get(call)
        if form is None:
            form = _form_of(constants, len(args), values, options, tensor_types)
            if form is None:
                return False
            if len(self._forms) >= MAX_FORMS:
                self.forget()
            self._forms[call] = form
        key, tensors, scalars = form.look(where, values)
        known = form.kinds.get(key)
        if known is None or not known.number or not form.is_same(known.storages, tensors):
            return Looked(form, key, tensors)
        event = Repeated(
            seq=self._log.next_number(),
            step=self._log.num_launches,
            of=known.number,
            grid=grid,
            scalars=scalars,
        )
        try:
            self._log.event(event)
        except OverflowError:  # an integer of more than 64 bits, which is told as text
            return False
        return True

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
    num_positional: int,
    values: tuple[Any, ...],
    options: Mapping[str, Any],
    tensor_types: Collection[type],
) -> _Form | None:
    """None where something is given that is neither a tensor of before, a number nor a constant."""
    key, tensors, numbers, names = ["where"], [], [], []
    for at, (name, value) in enumerate(
        zip((*itertools.islice(constants, num_positional), *options), values, strict=False)
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
    given = "".join(f"v{at}, " for at in range(len(values)))
    same = [f"s[{at}]() is t[{at}].untyped_storage()" for at in range(len(tensors))]
    text = (
        f"def look(where, values):\n"
        f"    {f'[{given}] = values' if values else 'pass'}\n"
        f"    return ({', '.join(key)},), ({' '.join(tensors)}), ({' '.join(numbers)})\n"
        f"def is_same(s, t):\n"
        f"    return {' and '.join(same) or 'True'}\n"
    )
    scope: dict[str, Any] = {"scalar_of": scalar_of}
    exec(compile(text, "<a way to call a kernel>", "exec"), scope)
    return _Form(tuple(names), scope["look"], scope["is_same"])
