"""Operations that machine code has kept, for who looks at those whose results are not finite."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from hypocenter.foreign.nonfinite.ops import OpFacts, SeenOp, facts_of, is_hidden, tensors_in


class NativeChunk:
    """As OpChunk: `code` is the machine code's part for numbers, which keeps them and clears them.

    `launches` are by number those of Triton's.
    """

    def __init__(self, torch: Any, code: Any, facts: dict[Any, OpFacts]) -> None:
        self._torch, self._code, self._facts = torch, code, facts
        self.launches: dict[int, SeenOp] = {}
        self._flagged: list[int] = []
        self._made: dict[int, SeenOp] = {}

    def note_flagged(self, places: list[int]) -> None:
        """These of the operations that are kept gave what is not finite."""
        self._flagged = places

    def find_flagged(self) -> set[int]:
        """The numbers of those of which a result is not finite."""
        return {self._op(place).number for place in self._flagged}

    def ops_of(self, flagged: set[int], tainted: Collection[Any]) -> Iterator[SeenOp]:
        """Those that have to be judged, in order: flagged, or over storages that matter."""
        if not flagged and not tainted:
            return
        memories = [storage._cdata for storage in [*tainted]]
        over = self._code.overwriters(memories, self._flagged)
        for place in sorted({*self._flagged, *over}):
            yield self._op(place)

    def _op(self, place: int) -> SeenOp:
        if place not in self._made:
            number, func, args, kwargs, results, site, node, forward_site = self._code.op(place)
            if func is None:
                self._made[place] = self.launches[number]
            else:
                facts = self._facts.get(func)
                if facts is None:
                    facts = self._facts[func] = facts_of(self._torch, func)
                self._made[place] = SeenOp(
                    number, facts, func, args, kwargs, results, {}, site, node, forward_site
                )
        return self._made[place]

    def clear(self) -> None:
        """What was made of the operations is over; the machine code forgets them by itself."""
        self._flagged = []
        self._made.clear()
        self.launches.clear()

    def content(self, tensor: Any, number: int) -> Any | None:
        """What a tensor held after operation `number`; None where that is gone."""
        return self._code.content(tensor, number)

    def inputs(self, op: SeenOp) -> Mapping[str, list[Any]]:
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


class NativeUndefined:
    """By storage the line that made memory which nobody has written, as machine code knows it."""

    def __init__(self, code: Any) -> None:
        self._code = code

    def __contains__(self, storage: Any) -> bool:
        return self._code.undefined_site(storage._cdata) is not None

    def get(self, storage: Any, otherwise: str) -> str:
        """`otherwise` for memory that is not such."""
        found: str | None = self._code.undefined_site(storage._cdata)
        return otherwise if found is None else found
