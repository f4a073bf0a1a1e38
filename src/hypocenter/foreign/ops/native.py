"""Machine code that sees each of torch's operations, and what it asks of Python."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

from hypocenter.foreign import caller
from hypocenter.foreign.nonfinite.ops import COMPARES, Role, facts_of
from hypocenter.foreign.ops.build import NotBuilt, build_later, has_failed, is_built, load
from hypocenter.foreign.ops.modes import see_below_modes
from hypocenter.foreign.seen_reads import SeenReads
from hypocenter.foreign.streams.operations import Operation, Sort, operation_of
from hypocenter.settings.environment import Environment

log = logging.getLogger("hypocenter.foreign")

#: In the order of `Sort`, `Role` and `Whose` of `seen.h`.
_SORTS = (Sort.PLAIN, Sort.NOTHING, Sort.COPY, Sort.NUMBER, Sort.RECORD_STREAM)
_LATER = (
    "machine code that sees operations is compiled for later runs; in this one Python sees them, "
    "which takes longer (HYPO_NATIVE=1 waits for it, and 0 does without)"
)
_FAILED = (
    "operations are seen by Python, which takes longer: machine code for them could not be "
    "compiled (HYPO_NATIVE=1 tries again and says why, and 0 does without)"
)
_ROLES = (Role.PASS, Role.EMPTY, Role.ITEM, Role.TEST, Role.PLAIN)


class AskedOfPython:
    """What the machine code asks of Python beside its two watches.

    `told` get what goes wrong while an operation is seen, which the program is kept from. `reads`
    gives whoever follows what nobody has written, or None, and `attempt` calls it.
    """

    def __init__(self) -> None:
        self.told: list[Callable[[BaseException], None]] = []
        self.reads: Callable[[], SeenReads | None] = lambda: None
        self.attempt: Callable[..., None] = lambda do, *args: do(*args)

    def report_failure(self, error: BaseException) -> None:
        """Called by the machine code."""
        for tell in self.told:
            tell(error)

    @property
    def is_needed(self) -> bool:
        """Whether the next operation is to be told of by `note`."""
        looking = self.reads()
        return looking is not None and looking.is_needed

    def note(self, asked: tuple[Any, tuple[Any, ...], dict[str, Any]], result: Any) -> None:
        """An operation has run, which was asked for so."""
        if (looking := self.reads()) is not None:
            self.attempt(looking.note, *asked, result)


class NativeOps:
    """One for a process. `code` is the module, whose `numbers` and `order` the watches start."""

    def __init__(self, torch: Any, code: Any) -> None:
        self.code, self._torch = code, torch
        self.asked = AskedOfPython()
        self._seen: set[str] = set()
        self._num_quiet = 0
        self._leave_modes = see_below_modes(torch, self._below_modes)
        code.begin(self._describe, lambda file: caller.whose(file).value, self.asked)

    @classmethod
    def load(cls, torch: Any) -> NativeOps | None:
        """None where it cannot be had, or is not wanted; says why.

        Only who asks for that waits until it is compiled, which takes half a minute. A run with
        `--nan` has it compiled for the next one.
        """
        environment = Environment.read()
        if environment.native is False:
            return None
        try:
            if environment.native is None and not is_built(torch):
                if environment.nan and build_later(torch):
                    log.warning(_LATER)
                elif environment.nan and has_failed(torch):
                    log.warning(_FAILED)
                return None
            return cls(torch, load(torch))
        except NotBuilt as error:
            log.warning("operations are seen by Python, which takes longer: %s", error)
            return None

    def has_seen(self, name: str) -> bool:
        """Whether an operation of this bare name has been made."""
        return name in self._seen

    def see(self) -> None:
        """See the operations of this thread, and of its backward passes, from now on."""
        self.code.see(True)

    def follow_reads(
        self, reads: Callable[[], SeenReads | None], attempt: Callable[..., None]
    ) -> None:
        """Have operations told to whoever follows what nobody has written, once there is such."""
        self.asked.reads, self.asked.attempt = reads, attempt
        SeenReads.on_look = staticmethod(lambda: self.code.need_reads(True))
        self.see()

    def end(self) -> None:
        """See none any more, of any thread."""
        self._leave_modes()
        self.code.end()

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """Within, operations of this thread are this package's own."""
        was = self.code.leave_out(True)
        self._num_quiet += 1
        try:
            yield
        finally:
            self._num_quiet -= 1
            self.code.leave_out(was)

    @contextlib.contextmanager
    def _below_modes(self) -> Iterator[None]:
        """Within, operations of this thread are seen that a mode of the program's has asked for."""
        was = self.code.leave_out(self._num_quiet > 0)
        try:
            yield
        finally:
            self.code.leave_out(was)

    def _describe(self, name: str, overload: str) -> dict[str, Any]:
        """What `seen.h` has to know of an overload."""
        namespace, _, bare = name.partition("::")
        self._seen.add(bare.rstrip("_"))
        packet = getattr(getattr(self._torch.ops, namespace), bare, None)
        func = getattr(packet, overload or "default", None)
        if func is None:  # it has no schema that Python knows
            used = Operation(name, Sort.NOTHING, (), makes=False)
            return {**_of_order(used, ()), **_NO_NUMBERS, "overload": None}
        names = tuple(argument.name for argument in func._schema.arguments)
        facts = facts_of(self._torch, func)
        return {
            **_of_order(operation_of(func), names),
            "overload": func,
            "role": _ROLES.index(facts.role),
            "written": [place for place, _ in facts.written],
            "is_new": list(facts.new),
            "is_lifted": facts.name == "lift_fresh",
            "is_compare": facts.name in COMPARES,
        }


_NO_NUMBERS = {
    "role": _ROLES.index(Role.PASS),
    "written": [],
    "is_new": [],
    "is_lifted": False,
    "is_compare": False,
}


def _of_order(used: Operation, names: tuple[str, ...]) -> dict[str, Any]:
    place = names.index("non_blocking") if "non_blocking" in names else -1
    return {
        "sort": _SORTS.index(used.sort),
        "makes": used.makes,
        "what": used.name,
        "tensors": [(at, is_write, name) for at, name, is_write in used.tensors],
        "place_non_blocking": place,
    }
