"""Captured sequences of launches and the memory that they hold on to; knows no torch."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from hypocenter.base.errors import UsageError


class Graph:
    """Calling it runs the captured launches again, with the addresses of then.

    Until it is closed or collected, the allocations at `bases` cannot be freed. `num_launches` is 0
    where graphs are off: calling it then launches anew.
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


class CaptureWatch:
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


class Graphs:
    """The graphs of a device that are alive, and the bases of the one that is being captured."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._alive: weakref.WeakSet[Graph] = weakref.WeakSet()
        #: What the capture under way holds so far; None when there is none.
        self.open_bases: set[int] | None = None

    def add(self, replay: Callable[[], None], bases: set[int], num_launches: int) -> Graph:
        """A graph that counts from now on; raises UsageError for one without launches."""
        if not num_launches:
            raise UsageError(f"{self._device}: nothing was launched while a graph was captured")
        graph = Graph(replay, frozenset(bases), num_launches)
        self._alive.add(graph)
        return graph

    def refuse_call(self, call: str) -> None:
        """Raises UsageError for a call other than a launch while a graph is captured."""
        if self.open_bases is not None:
            raise UsageError(
                f"{self._device}: {call} while a graph is captured; a captured step only launches"
            )

    def refuse_free(self, address: int, num_bytes: int, name_of: Callable[[int], str]) -> None:
        """Raises UsageError when a graph uses the allocation that begins at `address`."""
        held = sum(address in graph.bases for graph in self._alive)
        if held or address in (self.open_bases or ()):
            raise UsageError(
                f"{self._device}: free of {name_of(address)} ({num_bytes} bytes at {address:#x}), "
                f"which is used by {held or 'the'} captured graph{'s' * (held > 1)} and may be "
                "written to at each replay; close the graph first"
            )
