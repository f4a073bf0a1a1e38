"""Looks at operations whose results are not finite: who made that, and who only passed it on."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hypocenter.foreign.nonfinite.chunk import OpChunk
from hypocenter.foreign.nonfinite.kinds import Found, explain, operand_at, where
from hypocenter.foreign.nonfinite.native_chunk import NativeChunk, NativeUndefined
from hypocenter.foreign.nonfinite.ops import Role, SeenOp, is_hidden, is_looked_at, tensors_in
from hypocenter.foreign.nonfinite.spread import OVERWRITING, reach_of
from hypocenter.record.events import Launched
from hypocenter.record.nonfinite import NonFinite, NumberKind

#: Operations that are told of, at most; a loop makes the same ones again and again.
MAX_TOLD = 256
#: By storage the line that made memory which nobody has written.
UndefinedMarks = weakref.WeakKeyDictionary[Any, str] | NativeUndefined
_INTEGERS = {1: "int8", 2: "int16", 4: "int32", 8: "int64"}


@dataclass(frozen=True, slots=True)
class Taint:
    """What a memory holds: the ids of those who made its NaN and its infinities, 0 for none.

    `is_sure`: each has one origin only. `is_source`: it is as it came in.
    """

    nan: int = 0
    inf: int = 0
    is_sure: bool = True
    is_source: bool = False


@dataclass(frozen=True, slots=True)
class Tested:
    """The number that the program last found to be none, by asking for it."""

    of: int
    value: float
    site: str
    is_sure: bool


@dataclass(frozen=True, slots=True)
class _Input:
    """A tensor that an operation read: `name` of the parameter, and where it holds what is none."""

    name: str
    tensor: Any
    content: Any
    bad: Any
    nan: Any


@dataclass(frozen=True, slots=True)
class _Given:
    """What an operation was given that is not finite: who made that of its tensors, and a number.

    `is_known`: all of its inputs still are.
    """

    taints: tuple[Taint, ...]
    scalar: float | None
    is_known: bool

    @property
    def nans(self) -> set[int]:
        """Who made their NaN."""
        return {taint.nan for taint in self.taints} - {0}

    @property
    def infs(self) -> set[int]:
        """Who made their infinities."""
        return {taint.inf for taint in self.taints} - {0}


class Examiner:
    """Judges the operations of a chunk in order. `undefined` is memory that nobody has written."""

    def __init__(
        self,
        torch: Any,
        chunk: OpChunk | NativeChunk,
        undefined: UndefinedMarks,
        tell: Callable[..., None],
        keep: Callable[[Launched, Mapping[str, Any]], None],
    ) -> None:
        self._torch, self._chunk, self._undefined = torch, chunk, undefined
        self._tell, self._keep = tell, keep
        self._taints: weakref.WeakKeyDictionary[Any, Taint] = weakref.WeakKeyDictionary()
        self._events: dict[int, Found] = {}
        self._known: dict[object, int] = {}
        #: By id those whose numbers it all began with; none for infinities that are meant.
        self._roots: dict[int, frozenset[int]] = {0: frozenset()}
        self.num_lost = 0
        self.tested: Tested | None = None
        self.last_nan = 0

    def look(self) -> list[tuple[SeenOp, Any]]:
        """Look at the chunk and clear it; parameters that are not finite now, with their writer."""
        chunk, parameters = self._chunk, []
        flagged = chunk.find_flagged()
        try:
            for op in chunk.ops_of(flagged, self._taints):
                if op.number not in flagged:
                    self._forget_overwritten(op)
                elif op.facts.role is Role.TEST:
                    self._note_tested(op)
                else:
                    parameters += [(op, result) for result in self._examine(op)]
        finally:
            chunk.clear()
        return parameters

    def whence(self, tensor: Any) -> tuple[Found, float, bool] | None:
        """Who made what a tensor holds, the number, and whether that is sure.

        None for a finite tensor, infinities that are meant, and data as it came in.
        """
        bad = self._mask_of_bad(tensor)
        if not bool(bad.any()):
            return None
        nan = _plain(tensor).isnan()
        has_nan = bool(nan.any())
        value = float(tensor.reshape(-1)[where(self._torch, nan if has_nan else bad)])
        taint = self._taints.get(tensor.untyped_storage())
        if taint is None or taint.is_source:
            return None
        event = self._events.get(taint.nan if has_nan else taint.inf)
        if event is None or (not has_nan and self._is_meant(event)):
            return None
        return event, value, taint.is_sure

    def _is_meant(self, event: Found) -> bool:
        """Whether an infinity stands in the source or the data, and no operation made it."""
        return event.kind is NumberKind.GIVEN

    # -- one operation ----------------------------------------------------------------------------

    def _forget_overwritten(self, op: SeenOp) -> None:
        for result in op.results if op.facts.role is not Role.TEST else ():
            storage = result.untyped_storage()
            if storage in self._taints and result.nbytes == storage.nbytes():
                del self._taints[storage]

    def _note_tested(self, op: SeenOp) -> None:
        content = self._chunk.content(op.results[0], op.number - 1)
        if content is None:
            return
        found = self.whence(content)
        if found is not None:
            self.tested = Tested(found[0].id, found[1], op.site, found[2])

    def _examine(self, op: SeenOp) -> Iterator[Any]:
        """Judge each result; those that are parameters and not finite any more."""
        for number, result in enumerate(op.results):
            after = self._chunk.content(result, op.number)
            if after is None:
                self.num_lost += 1
                continue
            bad = self._mask_of_bad(after)
            if op.is_launch:
                before = self._chunk.content(result, op.number - 1)
                if before is None:
                    self.num_lost += 1
                    continue
                bad &= self._bits(after) != self._bits(before)
            if not bool(bad.any()):
                continue
            self._judge(op, number, result, _plain(after), bad)
            if result.is_leaf and result.requires_grad:
                yield result

    def _judge(self, op: SeenOp, number: int, result: Any, after: Any, bad: Any) -> None:
        torch = self._torch
        inputs, is_known = self._inputs(op, number)
        guilty = [own for own in inputs if bool(own.bad.any())]
        scalar = _nonfinite_number(op)
        given = _Given(tuple(self._taint_of(op, own) for own in guilty), scalar, is_known)
        nan = after.isnan() & bad
        passed = reach_of(torch, op, _by_name(guilty, "bad"), after)
        with_nan = [own for own in guilty if bool(own.nan.any())]
        passed_nan = reach_of(torch, op, _by_name(with_nan, "nan"), after)
        nothing = torch.zeros_like(bad)
        born = nothing
        if is_known and scalar is None and passed is not None:
            born = bad & ~passed
        became = nothing
        if is_known and passed_nan is not None and not (scalar is not None and math.isnan(scalar)):
            became = nan & ~passed_nan & ~born
        made = _Made(op, number, after, inputs)
        new = self._note_born(made, born, nan)
        of_inf = tuple(sorted(given.infs))
        if bool(became.any()):
            if scalar is not None and not of_inf:
                of_inf = (self._given_number(made, scalar),)
            new.append((True, self._event(made, became, comes_from=of_inf)))
        rest = bad & ~born & ~became
        self._taint(made, result, new, rest, nan, given)

    def _note_born(self, made: _Made, born: Any, nan: Any) -> list[tuple[bool, int]]:
        """Events of what an operation made of finite numbers, and whether each is NaN."""
        found = []
        for is_nan, mask in ((True, born & nan), (False, born & ~nan)):
            if bool(mask.any()):
                found.append((is_nan, self._event(made, mask)))
        return found

    def _taint(
        self,
        made: _Made,
        result: Any,
        new: list[tuple[bool, int]],
        rest: Any,
        nan: Any,
        given: _Given,
    ) -> None:
        """Note who made what a result holds."""
        nans = {number for is_nan, number in new if is_nan}
        infs = {number for is_nan, number in new if not is_nan}
        has_nan, has_inf = bool((rest & nan).any()), bool((rest & ~nan).any())
        old = self._taints.get(result.untyped_storage()) or Taint()
        if has_nan:
            nans |= given.nans
        if has_inf:
            infs |= given.infs
        if (has_nan and not nans) or (has_inf and not infs):
            unknown = (
                self._given_number(made, given.scalar)
                if given.scalar is not None and given.is_known
                else self._event(made, rest, kind=NumberKind.UNKNOWN, is_sure=False)
            )
            nans = nans or ({unknown} if has_nan else set())
            infs = infs or ({unknown} if has_inf else set())
        is_part = result.nbytes < result.untyped_storage().nbytes()
        if is_part:
            nans |= {old.nan} - {0}
            infs |= {old.inf} - {0}
        is_sure = self._is_one(nans) and self._is_one(infs)
        is_sure = is_sure and all(taint.is_sure for taint in given.taints)
        taint = Taint(min(nans, default=0), min(infs, default=0), is_sure)
        self._taints[result.untyped_storage()] = taint
        self.last_nan = taint.nan or self.last_nan

    # -- what it read -----------------------------------------------------------------------------

    def _inputs(self, op: SeenOp, number: int) -> tuple[list[_Input], bool]:
        """The floats that an operation read, and whether all of them are still known."""
        found, is_known = [], True
        is_list = op.facts.name.startswith("_foreach_")
        skipped = {"out"} | ({"self"} if op.facts.name in OVERWRITING else set())
        contents = self._chunk.inputs(op)
        for name, value in op.inputs.items():
            if name in skipped or name not in contents:
                continue
            pairs = list(zip(tensors_in(value), contents[name], strict=True))
            if is_list and len(pairs) == len(op.results):
                pairs = pairs[number : number + 1]
            for tensor, content in pairs:
                if not is_looked_at(self._torch, tensor):
                    is_known = is_known and not is_hidden(self._torch, tensor)
                    continue
                if content is None:
                    is_known = False
                    continue
                bad = self._mask_of_bad(content)
                if op.is_launch:
                    bad &= ~self._nobodys(tensor, content)
                plain = _plain(content)
                found.append(_Input(name, tensor, plain, bad, plain.isnan() & bad))
        return found, is_known

    def _taint_of(self, op: SeenOp, own: _Input) -> Taint:
        """Who made what an input holds; where nobody was seen to, it came in."""
        storage = own.tensor.untyped_storage()
        taint = self._taints.get(storage) or Taint(is_source=True)
        has_nan = bool(own.nan.any())
        has_inf = bool((own.bad & ~own.nan).any())
        if (has_nan and not taint.nan) or (has_inf and not taint.inf):
            mask = own.nan if has_nan and not taint.nan else own.bad & ~own.nan
            number = self._source(op, own, mask)
            taint = Taint(
                taint.nan or number * has_nan,
                taint.inf or number * has_inf,
                taint.is_sure,
                taint.is_source,
            )
            self._taints[storage] = taint
        return taint

    def _source(self, op: SeenOp, own: _Input, mask: Any) -> int:
        at = where(self._torch, mask)
        made_at = self._undefined.get(own.tensor.untyped_storage(), "")
        is_undefined = bool(made_at) and bool(
            self._nobodys(own.tensor, own.content.to(own.tensor.dtype)).reshape(-1)[at]
        )
        kind = NumberKind.UNDEFINED if is_undefined else NumberKind.GIVEN
        made = _Made(op, 0, own.content, [])
        return self._event(
            made, mask, kind=kind, name=own.name, made_at=made_at if is_undefined else ""
        )

    def _is_one(self, numbers: set[int]) -> bool:
        """Whether what these made began with one operation."""
        return len({root for number in numbers for root in self._roots[number]}) <= 1

    def _given_number(self, made: _Made, scalar: float) -> int:
        """The event of a number that stands in the source, as in `masked_fill(mask, -inf)`."""
        found = Found(
            op=made.op,
            kind=NumberKind.GIVEN,
            result=operand_at("value", None, 0, scalar),
        )
        return self._tell_once(found, (repr(scalar),))

    def _nobodys(self, tensor: Any, content: Any) -> Any:
        """Elements that still are what was put where nobody has written."""
        if tensor.untyped_storage() not in self._undefined:
            return self._torch.zeros(content.shape, dtype=self._torch.bool, device=content.device)
        return self._bits(content) == -1

    def _bits(self, tensor: Any) -> Any:
        kind = getattr(self._torch, _INTEGERS[tensor.element_size()])
        return tensor.contiguous().view(kind) if tensor.dim() else tensor.reshape(1).view(kind)[0]

    def _mask_of_bad(self, tensor: Any) -> Any:
        return ~self._torch.isfinite(_plain(tensor))

    # -- events -----------------------------------------------------------------------------------

    def _event(
        self,
        made: _Made,
        mask: Any,
        *,
        kind: NumberKind | None = None,
        comes_from: tuple[int, ...] = (),
        is_sure: bool = True,
        name: str = "",
        made_at: str = "",
    ) -> int:
        """The id of what is told of the first marked element; 0 where no more is told."""
        torch, op = self._torch, made.op
        at = where(torch, mask)
        value = float(made.after.reshape(-1)[at])
        key = ("" if math.isnan(value) else repr(value), kind, comes_from, name)
        known = self._known.get(self._key(op, key))
        if known is not None:
            return known
        if kind is None:
            found = explain(torch, op, made.number, made.after, at, made.pairs)
        else:
            result = operand_at(name or "result", made.after, at, value)
            found = Found(op=op, kind=kind, result=result)
        found.comes_from, found.is_sure, found.made_at = comes_from, is_sure, made_at
        found.num_nan = int(made.after.isnan().sum())
        found.num_inf = int(made.after.isinf().sum())
        found.num_elements = made.after.numel()
        return self._tell_once(found, key)

    def _keep_given(self, op: SeenOp) -> None:
        """All that a launch was given, for its replay; not where some of it is gone."""
        known = {
            name: self._chunk.content(value, op.number - 1)
            for name, value in op.inputs.items()
            if hasattr(value, "untyped_storage")
        }
        if all(content is not None for content in known.values()):
            self._keep(op.made, known)

    def _key(self, op: SeenOp, more: tuple[Any, ...]) -> object:
        return (op.facts.name, op.site, op.node, op.forward_site, *more)

    def _tell_once(self, found: Found, key: tuple[Any, ...]) -> int:
        op = found.op
        whole = self._key(op, key)
        if whole in self._known:
            return self._known[whole]
        if len(self._events) >= MAX_TOLD:
            return 0
        found.id = self._known[whole] = len(self._events) + 1
        before = {root for own in found.comes_from for root in self._roots[own]}
        found.is_sure = found.is_sure and len(before) <= 1
        is_meant = found.kind is NumberKind.GIVEN and math.isinf(found.result.value)
        self._roots[found.id] = frozenset() if is_meant else frozenset(before or {found.id})
        self._events[found.id] = found
        is_read = found.kind is NumberKind.GIVEN and op.is_launch
        if found.kind is NumberKind.IN_KERNEL or is_read:
            self._keep_given(op)
        self._tell(NonFinite, **found.fields())
        return found.id


@dataclass(frozen=True, slots=True)
class _Made:
    """A result of an operation (`number` of them), as it was after it, and what was read."""

    op: SeenOp
    number: int
    after: Any
    inputs: list[_Input]

    @property
    def pairs(self) -> list[tuple[str, Any]]:
        return [(own.name, own.content) for own in self.inputs]


def _plain(tensor: Any) -> Any:
    """The same in a type that torch can ask for NaN: it cannot for those of 8 bits."""
    return tensor.float() if "float8" in str(tensor.dtype) else tensor


def _by_name(inputs: list[_Input], field: str) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for own in inputs:
        found.setdefault(own.name, []).append(getattr(own, field))
    return found


def _nonfinite_number(op: SeenOp) -> float | None:
    """A number among the arguments that is not finite."""
    for value in op.inputs.values():
        for part in value if isinstance(value, list | tuple) else (value,):
            if isinstance(part, float) and not math.isfinite(part):
                return part
    return None
