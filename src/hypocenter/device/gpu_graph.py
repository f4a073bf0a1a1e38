"""A captured sequence of launches and the memory that it holds on to; knows no torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypocenter.errors import UsageError


class Graph:
    """Calling it runs the captured launches again, with the addresses of then.

    Until it is closed or collected, the allocations at `bases` cannot be freed.
    """

    __slots__ = ("__weakref__", "_replay", "bases", "num_launches")

    def __init__(
        self, replay: Callable[[], None], bases: frozenset[int], num_launches: int
    ) -> None:
        self._replay: Callable[[], None] | None = replay
        self.bases = bases
        self.num_launches = num_launches

    def __call__(self) -> None:
        if self._replay is None:
            raise UsageError("this graph was closed; capture it again")
        self._replay()

    def close(self) -> None:
        """Give the graph up: its memory may be freed from now on."""
        self._replay, self.bases = None, frozenset()


class Seen:
    """What a capture sees: each launch, and the allocations that its arguments lie in.

    `base_of` gives the address at which the allocation around an address begins.
    """

    def __init__(self, base_of: Callable[[int], int]) -> None:
        self.bases: set[int] = set()
        self.num_launches = 0
        self._base_of = base_of
        self._watched: list[Any] = []

    def watch(self, jit: Any) -> None:
        # Triton calls these before each launch; an empty list costs a launch nothing.
        jit.add_pre_run_hook(self._note)
        self._watched.append(jit)

    def unwatch(self) -> None:
        for jit in self._watched:
            jit.pre_run_hooks.remove(self._note)
        self._watched.clear()

    def _note(self, *args: Any, **keywords: Any) -> None:
        self.num_launches += 1
        for value in (*args, *keywords.values()):
            if hasattr(value, "data_ptr") and value.numel():
                self.bases.add(self._base_of(value.data_ptr()))
