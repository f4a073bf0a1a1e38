"""Runs each Triton launch of a foreign program as its guarded variant, and reads what that refused.

The variants are those of `device/guard/`; `hooks.py` has each launch pass through here. What has
no guarded form runs as it is, and is told of once.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hypocenter.base.errors import HypoError, LaunchRejected, Unguardable
from hypocenter.device.guard.derive import SLOTS
from hypocenter.device.guard.guard import Guarded, guard
from hypocenter.device.guard.rows import rows_of
from hypocenter.record.events import Launched
from hypocenter.record.guard_faults import AccessFault

#: Words of slots that are taken from torch at a time; a kernel takes one for each access.
ARENA_WORDS = 1 << 16
#: What of Triton's says that a launch was not made, for its kernel demands too much.
_NOT_MADE = ("OutOfResources",)

#: Tells of a kernel that runs as it is: name, reason, file, line, expression.
TellUnguarded = Callable[[str, str, str, int, str], object]


@dataclass(frozen=True, slots=True)
class _Kernel:
    """What is the same in every launch of a kernel; `jit` is kept so that its id stays its own."""

    jit: Any
    name: str
    names: tuple[str, ...]
    defaults: Mapping[str, Any]
    constants: frozenset[str]


@dataclass(slots=True)
class GuardedLaunch:
    """One launch on its way: its form, its tensors by parameter, its slots on the device.

    `made` is what the recorder has written of it, and `grid` its size, once it is known.
    """

    form: Guarded
    tensors: Mapping[str, Any]
    extra: dict[str, Any]
    is_captured: bool
    made: Launched | None = None
    grid: tuple[int, ...] = ()


@dataclass(slots=True)
class Guarding:
    """The guarded forms of a process's kernels, and where their slots lie."""

    tell_unguarded: TellUnguarded
    _kernels: dict[int, _Kernel] = field(default_factory=dict)
    _forms: dict[tuple[int, tuple[str, ...], tuple[str, ...]], Guarded | None] = field(
        default_factory=dict
    )
    _arenas: dict[Any, tuple[Any, int]] = field(default_factory=dict)
    _slots: dict[tuple[int, Any], Any] = field(default_factory=dict)
    _captured: list[GuardedLaunch] = field(default_factory=list)
    _told: set[tuple[str, str]] = field(default_factory=set)
    _seen: set[tuple[object, ...]] = field(default_factory=set)
    #: The device has failed: nothing can be read of it any more.
    _is_lost: bool = False

    # -- before a launch --------------------------------------------------------------------------

    def prepare(
        self, jit: Any, args: tuple[Any, ...], options: Mapping[str, Any]
    ) -> GuardedLaunch | None:
        """The guarded form of a launch; None where there is none, which is told."""
        kernel = self._kernels.get(id(jit)) or self._new_kernel(jit)
        try:
            given = _pointers_of(kernel, args, options)
            rows = tuple(name for name, view in given.items() if rows_of(view) is not None)
            form = self._form(kernel, tuple(given), rows)
            if form is None:
                return None
            return self._launch(kernel, form, given)
        except LaunchRejected as error:
            self._leave(kernel, str(error))
        except Exception as error:  # a kernel that cannot be understood runs as it is
            self._leave(kernel, f"{type(error).__name__}: {error}")
        return None

    def is_unlaunchable(self, jit: Any, error: BaseException, *, has_begun: bool) -> bool:
        """Whether the guarded form alone could not be launched; then its kernel runs as it is."""
        kind = type(error).__name__
        if not isinstance(error, Exception) or (has_begun and kind not in _NOT_MADE):
            return False
        kernel = self._kernels[id(jit)]
        for key in [key for key in self._forms if key[0] == id(jit)]:
            self._forms[key] = None
        self._leave(kernel, f"its guarded variant cannot be launched: {kind}: {error}")
        return True

    def _new_kernel(self, jit: Any) -> _Kernel:
        parameters = inspect.signature(jit.fn).parameters
        kernel = _Kernel(
            jit,
            jit.fn.__name__,
            tuple(parameters),
            {n: p.default for n, p in parameters.items() if p.default is not p.empty},
            frozenset(n for n, p in parameters.items() if "constexpr" in str(p.annotation)),
        )
        self._kernels[id(jit)] = kernel
        return kernel

    def _form(
        self, kernel: _Kernel, pointers: tuple[str, ...], with_rows: tuple[str, ...]
    ) -> Guarded | None:
        key = id(kernel.jit), pointers, with_rows
        if key not in self._forms:
            self._forms[key] = None
            try:
                self._forms[key] = guard(kernel.jit, pointers, with_rows=with_rows)
            except Unguardable as error:
                place = error.file, error.line, error.expression
                self._leave(kernel, error.reason, *place)
        return self._forms[key]

    def _launch(self, kernel: _Kernel, form: Guarded, given: Mapping[str, Any]) -> GuardedLaunch:
        tensors = {name: value for name, value in given.items() if value is not None}
        device = next((t.device for t in tensors.values() if t.device.type == "cuda"), None)
        is_captured = device is not None and _is_capturing()
        slots = self._slots_of(form, device, is_captured)
        if slots is None:
            raise HypoError("its first launch is captured into a graph, where no memory is set")
        extra = {**form.extents(given), SLOTS: slots}
        return GuardedLaunch(form, tensors, extra, is_captured)

    def _slots_of(self, form: Guarded, device: Any, is_captured: bool) -> Any:
        """Words that are zero: a captured launch has some of its own, for as long as its graph."""
        key = id(form), device
        if not is_captured and key in self._slots:
            return self._slots[key]
        arena, used = self._arenas.get(device, (None, 0))
        if arena is None or used + form.num_slots > arena.numel():
            if is_captured:
                return None
            arena, used = _zeros(max(ARENA_WORDS, form.num_slots), device), 0
        slots = arena[used : used + form.num_slots]
        self._arenas[device] = arena, used + form.num_slots
        if not is_captured:
            self._slots[key] = slots
        return slots

    def _leave(
        self, kernel: _Kernel, reason: str, file: str = "", line: int = 0, expression: str = ""
    ) -> None:
        if not file:
            file, line = kernel.jit.fn.__code__.co_filename, kernel.jit.fn.__code__.co_firstlineno
        self.leave(kernel.name, reason, file, line, expression)

    def leave(
        self, name: str, reason: str, file: str = "", line: int = 0, expression: str = ""
    ) -> None:
        """Tell once that launches of a kernel run as they are, and why."""
        if (name, reason) not in self._told:
            self._told.add((name, reason))
            self.tell_unguarded(name, reason, file, line, expression)

    # -- after it ---------------------------------------------------------------------------------

    def settle(self, launch: GuardedLaunch) -> list[AccessFault]:
        """Wait for a launch and return the faults of sites that had none before.

        One that was captured is kept for `settle_captured`.
        """
        if launch.is_captured:
            self._captured.append(launch)
            return []
        return self._read(launch)

    def settle_captured(self) -> list[tuple[GuardedLaunch, list[AccessFault]]]:
        """What the launches in graphs have found since; none while a graph is captured."""
        if not self._captured or self._is_lost or _is_capturing():
            return []
        found = [(launch, self._read(launch)) for launch in self._captured]
        return [(launch, faults) for launch, faults in found if faults]

    def _read(self, launch: GuardedLaunch) -> list[AccessFault]:
        if self._is_lost:
            return []
        slots = launch.extra[SLOTS]
        try:
            words = slots.tolist()
        except RuntimeError:
            # A launch before it has failed: the program's next call says so, as without a guard.
            self._is_lost = True
            return []
        if not any(words):
            return []
        faults = launch.form.decode(words, launch.grid)
        slots.zero_()
        slots.tolist()  # the next launch may be in another stream
        return [fault for fault in faults if self._is_new(fault)]

    def _is_new(self, fault: AccessFault) -> bool:
        site = fault.site
        here = site.calls[0]
        key = fault.kernel, here.file, here.line, site.operation, site.expression, fault.parameter
        if key in self._seen:
            return False
        self._seen.add(key)
        return True


def _pointers_of(
    kernel: _Kernel, args: tuple[Any, ...], options: Mapping[str, Any]
) -> dict[str, Any]:
    """The tensors of a launch by parameter, and the parameters that get None instead of one."""
    whole = {**kernel.defaults, **dict(zip(kernel.names, args, strict=False))}
    whole |= {name: value for name, value in options.items() if name in kernel.names}
    given: dict[str, Any] = {}
    for name in kernel.names:
        if name in kernel.constants:
            continue
        value: Any = whole.get(name)
        if hasattr(value, "base") and hasattr(value, "dtype") and hasattr(value, "data_ptr"):
            value = value.base  # triton.reinterpret
        if value is None or hasattr(value, "data_ptr"):
            given[name] = value
    return given


def _zeros(num_words: int, device: Any) -> Any:
    """Words that are zero for every stream, and that any code may write to."""
    torch = sys.modules["torch"]
    with torch.inference_mode(False):
        words = torch.zeros(num_words, dtype=torch.int64, device=device or "cpu")
    words[:1].tolist()
    return words


def _is_capturing() -> bool:
    cuda = sys.modules["torch"].cuda
    return bool(cuda.is_available() and cuda.is_current_stream_capturing())
