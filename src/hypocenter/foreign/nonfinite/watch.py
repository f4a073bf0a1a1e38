"""Counts on the device which results are not finite, and looks closer where one is.

Each operation's results are summed into a slot of one buffer: a sum is finite only if all it adds
is. The buffer comes to the host once for some hundred operations. Until then their arguments are
kept, so that the operation can be made again with its real inputs.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hypocenter.foreign.caller import caller_of_now
from hypocenter.foreign.nonfinite.chunk import OpChunk
from hypocenter.foreign.nonfinite.examine import Examiner, Tested
from hypocenter.foreign.nonfinite.ops import (
    OpFacts,
    Role,
    SeenOp,
    facts_of,
    is_hidden,
    is_looked_at,
    place_of,
    tensors_in,
)
from hypocenter.record.events import Launched
from hypocenter.record.nonfinite import NonFiniteReached, NumberEnd, NumbersWatched
from hypocenter.record.runtime_text import is_of_numbers

#: Lines of operations whose backward pass may still come.
MAX_SITES = 1 << 20
#: New memory of this many bytes is filled with what stands for "nobody has written".
MAX_FILLED_BYTES, UNDEFINED = 64 << 20, 0xFF
#: Endings that are told of, at most.
MAX_REACHED = 64
#: More tensors than these are copied together.
MAX_SINGLE = 4
#: Finds what is not finite, for GradScaler.
SCALER = "_amp_foreach_non_finite_check_and_unscale"


class NumberWatch:
    """Sees the operations of one process; `tell` writes an event of a class with its fields.

    Calls raise what goes wrong in here, which `hooks.py` keeps from the program. `may_look` is
    asked before each operation: False while a graph is captured. `keep` writes what a launch was
    given.
    """

    def __init__(
        self,
        torch: Any,
        tell: Callable[..., None],
        may_look: Callable[[], bool],
        keep: Callable[[Launched, Mapping[str, Any]], None],
    ) -> None:
        self._torch, self._tell, self._may_look = torch, tell, may_look
        self._facts: dict[Any, OpFacts] = {}
        self._number = self._num_launches = self._num_in_graphs = self._num_hidden = 0
        #: By torch's number of a node the line that made it.
        self._sites: dict[int, str] = {}
        self.chunk = OpChunk(torch)
        #: Memory that was made and filled here: where.
        self._undefined: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._examiner = Examiner(torch, self.chunk, self._undefined, tell, keep)
        self._told: set[tuple[int, NumberEnd]] = set()
        self._has_scaler = False
        self.is_paused = self.is_eager = False
        #: Threads that the program has begun: their operations are not seen.
        self.num_threads = 0
        #: The line that has asked for a backward pass last.
        self.backward_site = ""
        self._is_busy = False

    # -- operations of torch ----------------------------------------------------------------------

    def run(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        attempt: Callable[..., Any],
    ) -> Any:
        """Make an operation, and note what it gave; `attempt` does what may fail in here."""
        facts = self._facts.get(func)
        if facts is None:
            facts = self._facts[func] = facts_of(self._torch, func)
        if facts.role is Role.PASS or self.is_paused or self._is_busy:
            return func(*args, **kwargs)
        if not self._may_look():
            self._num_in_graphs += 1
            return func(*args, **kwargs)
        number = self._next_number()
        written: list[Any] = []
        before = None
        if facts.written:
            written += self._tensors_written(facts, args, kwargs)
            before = attempt(self._copies, written)
        result = func(*args, **kwargs)
        if facts.role is Role.PLAIN:
            op = SeenOp(number, facts, func, args, kwargs, written, before or {})
            attempt(self._note, op, result)
        elif facts.role is Role.EMPTY:
            attempt(self._fill, result)
        elif facts.role is Role.TEST:
            attempt(self._note_test, number, facts, func, args, kwargs)
        elif isinstance(result, float) and not math.isfinite(result):
            attempt(self.note_read, args[0], NumberEnd.READ, result)
        return result

    def _next_number(self) -> int:
        self._number += 1
        return self._number

    def _copies(self, tensors: list[Any]) -> dict[tuple[Any, ...], Any]:
        """Copies of what is about to be written, by `place_of`."""
        num_bytes = sum(t.nbytes for t in tensors)
        if self.chunk.is_full(num_bytes):
            self.flush()
        if self.chunk.is_full(num_bytes):  # more than is kept of all together
            return {}
        self.chunk.num_bytes += num_bytes
        places = [place_of(tensor) for tensor in tensors]
        tensors = [tensor.detach() for tensor in tensors]
        # Many at once, where they are many: a launch for each would cost more than the copy.
        is_list = len(tensors) > MAX_SINGLE and len({(t.device, t.dtype) for t in tensors}) == 1
        if is_list and "float8" not in str(tensors[0].dtype):
            return dict(zip(places, self._torch._foreach_mul(tensors, 1.0), strict=True))
        return {place: tensor.clone() for place, tensor in zip(places, tensors, strict=True)}

    def _tensors_written(
        self, facts: OpFacts, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Iterator[Any]:
        for place, name in facts.written:
            value = args[place] if place < len(args) else kwargs.get(name)
            for tensor in tensors_in(value):
                if is_looked_at(self._torch, tensor):
                    yield tensor

    def _note(self, op: SeenOp, result: Any) -> None:
        """`op.results` are the tensors that it wrote; those that it made come to them."""
        facts, results = op.facts, op.results
        parts = result if isinstance(result, tuple) else (result,)
        self._num_hidden += any(is_hidden(self._torch, t) for t in tensors_in(parts))
        for part, is_new in zip(parts, facts.new, strict=False):
            if is_new or facts.name == "lift_fresh":
                results += [t for t in tensors_in(part) if is_looked_at(self._torch, t)]
        if facts.name == SCALER:
            self._has_scaler = True
        if results:
            self._place(op)
            self._keep(op)

    def _place(self, op: SeenOp) -> None:
        """The line that an operation stands for, and of a backward pass the line forward."""
        torch = self._torch
        node = torch._C._current_autograd_node()
        if node is None or node.name().endswith("AccumulateGrad"):
            op.site = caller_of_now()[1]
        else:
            op.site = self._site_in(node)
        if node is not None:
            op.node = node.name()
            op.forward_site = self._sites.get(node._sequence_nr(), "")
        elif torch.is_grad_enabled() or op.facts.new:
            self._sites.setdefault(torch.autograd._get_sequence_nr() - 1, op.site)
            if len(self._sites) > MAX_SITES:
                for number in list(self._sites)[: MAX_SITES // 2]:
                    del self._sites[number]

    def _site_in(self, node: Any) -> str:
        """The line of a backward pass: that which asked for it, or that of a program's own node.

        Of a GPU the nodes run in a thread that has no line of the program's.
        """
        is_own = isinstance(node, self._torch.autograd.function.BackwardCFunction)
        return (is_own and caller_of_now()[1]) or self.backward_site

    def _keep(self, op: SeenOp) -> None:
        self.chunk.add(op)
        if self.chunk.is_full(0):
            self.flush()

    def _fill(self, result: Any) -> None:
        """Mark memory that nobody has written."""
        for tensor in tensors_in(result):
            if is_looked_at(self._torch, tensor):
                storage = tensor.untyped_storage()
                if storage.nbytes() <= MAX_FILLED_BYTES:
                    storage.fill_(UNDEFINED)
                    self._undefined[storage] = caller_of_now()[1]

    def _note_test(
        self,
        number: int,
        facts: OpFacts,
        func: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> None:
        """The program asks whether a tensor's elements are numbers."""
        first = args[0] if args else None
        if not is_looked_at(self._torch, first):
            return
        if facts.name in ("eq", "ne"):
            other = args[1] if len(args) > 1 else None
            is_infinity = isinstance(other, float) and not math.isfinite(other)
            if other is not first and not is_infinity:
                return
        op = SeenOp(number, facts, func, args, kwargs, [first], {})
        op.site = caller_of_now()[1]
        self._keep(op)

    # -- launches of Triton's ---------------------------------------------------------------------

    def before_launch(self, arguments: Mapping[str, Any]) -> SeenOp | None:
        """A launch is about to be made with these; None where it is not looked at."""
        if self._is_busy or self.is_paused or not self._may_look():
            self._num_in_graphs += not self.is_paused
            return None
        number = self._next_number()
        self._num_launches += 1
        tensors = [t for t in arguments.values() if is_looked_at(self._torch, t)]
        with self._quiet():
            before = self._copies(tensors)
        op = SeenOp(number, OpFacts("", Role.PLAIN), None, (), dict(arguments), tensors, before)
        op.is_launch = True
        self.is_paused = True
        return op

    def after_launch(self, op: SeenOp, made: Launched) -> None:
        """It has been made."""
        self.is_paused = False
        op.facts = OpFacts(made.launch.kernel, Role.PLAIN)
        op.site, op.made = made.launch.site, made
        if op.results:
            with self._quiet():
                self._keep(op)

    # -- where numbers come out -------------------------------------------------------------------

    def flush(self, *, is_whole: bool = False) -> None:
        """Look at the flags of the operations so far, and closer where one is set.

        `is_whole`: at each result, though nothing is left of it. Machine code looks at what is
        left, and at more only if that is not finite. Here each is always looked at.
        """
        if self._is_busy:
            return
        with self._quiet():
            for op, result in self._examiner.look():
                self._tell_reached(result, NumberEnd.PARAMETER, op.site)

    def note_read(self, tensor: Any, how: NumberEnd, value: float | None = None) -> None:
        """The program reads a tensor; `value` is what it is, where that is one number."""
        if self._is_busy or not is_looked_at(self._torch, tensor):
            return
        site = caller_of_now()[1]
        self.flush()
        with self._quiet():
            if value is None and tensor.numel() > 1 and not bool(tensor.isnan().any()):
                return
            self._tell_reached(tensor, how, site)

    def _tell_reached(self, tensor: Any, how: NumberEnd, site: str) -> None:
        found = self._examiner.whence(tensor)
        if found is None:
            return
        event, value, is_sure = found
        if how is NumberEnd.READ and self._has_scaler and event.op.node:
            return  # a norm that GradScaler skips a step for
        if how is NumberEnd.READ:
            self._examiner.tested = Tested(event.id, value, site, is_sure)
        self._tell_once(event.id, how, value, site, is_sure=is_sure)

    def _tell_once(
        self, of: int, how: NumberEnd, value: float, site: str, *, is_sure: bool
    ) -> None:
        if (of, how) not in self._told and len(self._told) < MAX_REACHED:
            self._told.add((of, how))
            self._tell(NonFiniteReached, of=of, how=how, value=value, site=site, is_sure=is_sure)

    def note_end(self, error: BaseException, site: str, statement: str) -> None:
        """An exception ends the program at `site`, in `statement`; told where it is about NaN."""
        is_about = is_of_numbers(f"{error} {statement}")
        self.flush(is_whole=is_about)
        tested = self._examiner.tested
        if tested is not None and (is_about or tested.site == site):
            self._tell_once(tested.of, NumberEnd.ENDED, tested.value, site, is_sure=tested.is_sure)
        elif is_about and self._examiner.last_nan:
            last = self._examiner.last_nan
            self._tell_once(last, NumberEnd.ENDED, math.nan, site, is_sure=False)

    def close(self, problem: str = "") -> None:
        """The program ends."""
        self.flush()
        self._tell(
            NumbersWatched,
            num_operations=self._num_seen() - self._num_launches,
            num_launches=self._num_launches,
            num_lost=self._examiner.num_lost,
            num_in_graphs=self._num_uncounted(),
            num_hidden=self._num_of_hidden(),
            num_threads=self.num_threads,
            is_eager=self.is_eager,
            problem=problem,
        )

    def _num_seen(self) -> int:
        return self._number

    def _num_uncounted(self) -> int:
        return self._num_in_graphs

    def _num_of_hidden(self) -> int:
        return self._num_hidden

    @contextlib.contextmanager
    def _quiet(self) -> Iterator[None]:
        """Within, operations are this package's own."""
        modes: Any = self._torch.utils._python_dispatch
        self._is_busy = True
        try:
            with modes._disable_current_modes(), self._torch.no_grad():
                yield
        finally:
            self._is_busy = False
