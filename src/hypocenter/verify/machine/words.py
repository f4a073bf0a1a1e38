"""Patterns of words in memory, written and looked at by the host or by a GPU itself."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hypocenter.base.dtypes import Array
from hypocenter.base.tensor import DType, Tensor
from hypocenter.contracts.contract import Contract
from hypocenter.contracts.demands import Arg, Scalar
from hypocenter.device import copies, memory
from hypocenter.device.launch import run
from hypocenter.device.plan import PlanBuilder

WRITE = Contract(
    "write",
    Arg("words", (DType.I32,), "num_words", "write"),
    Scalar("kind", "0 <= kind < 4", "must be 0 to 3"),
)
LOOK = Contract(
    "look",
    Arg("words", (DType.I32,), "num_words"),
    Arg("found", (DType.I32,), "2", "both"),
    Scalar("kind", "0 <= kind < 4", "must be 0 to 3"),
)
_CONSTANT, _PLACE, _COMPLEMENT, _WALKING = range(4)
_BLOCK = 4096
_NONE = np.iinfo(np.int32).max


@dataclass(frozen=True, slots=True)
class Pattern:
    """What each word of memory is to hold: a constant, or what follows from its place."""

    name: str
    kind: int
    constant: int = 0

    def words(self, start: int, num_words: int) -> Array:
        """The words from place `start` on, i32 [num_words]."""
        place = np.arange(num_words, dtype=np.uint32) + np.uint32(_first_place(start))
        if self.kind == _CONSTANT:
            found = np.full(num_words, self.constant, np.uint32)
        elif self.kind == _WALKING:
            found = np.uint32(1) << (place % np.uint32(32))
        else:
            found = place if self.kind == _PLACE else ~place
        return found.view(np.int32)


def patterns() -> tuple[Pattern, ...]:
    """All bits, every second one, lines of addresses, and a bit that walks."""
    constants = (0x00000000, 0xFFFFFFFF, 0xAAAAAAAA, 0x55555555)
    return (
        *(Pattern(f"all words {word:#010x}", _CONSTANT, word) for word in constants),
        Pattern("each word its own place", _PLACE),
        Pattern("each word what its place is not", _COMPLEMENT),
        Pattern("a bit that walks", _WALKING),
    )


class WordLooker:
    """Writes and looks at pieces of a device's memory, which it does itself where `on_device`."""

    def __init__(self, device: str, *, on_device: bool) -> None:
        self._device, self._on_device = device, on_device
        self._found: Tensor | None = None
        if on_device:
            self._found = memory.allocate("found", "verify", DType.I32, (2,), device=device)

    def write(self, piece: Tensor, start: int, pattern: Pattern) -> None:
        """Write a piece, the first word of which is at place `start`."""
        if not self._on_device:
            copies.to_device(piece, pattern.words(start, piece.num_elements))
            return
        from hypocenter.verify.machine.memory_gpu import write_kernel  # needs Triton

        self._launch(write_kernel, (piece,), {"words": piece}, WRITE, start, pattern)

    def look(self, piece: Tensor, start: int, pattern: Pattern) -> tuple[int, int] | None:
        """How many words of a piece are not the pattern's, and the first of them; None for none."""
        if not self._on_device:
            differ = np.flatnonzero(
                copies.to_host(piece) != pattern.words(start, piece.num_elements)
            )
            return (int(differ.size), int(differ[0])) if differ.size else None
        from hypocenter.verify.machine.memory_gpu import look_kernel  # needs Triton

        assert self._found is not None
        copies.to_device(self._found, np.array([0, _NONE], np.int32))
        details = {"words": piece, "found": self._found}
        self._launch(look_kernel, (piece, self._found), details, LOOK, start, pattern)
        number, first = (int(item) for item in copies.to_host(self._found))
        return (number, first) if number else None

    def free(self) -> None:
        """Give its own memory back."""
        if self._found is not None:
            memory.free(self._found)

    def _launch(
        self,
        kernel: object,
        tensors: tuple[Tensor, ...],
        details: dict[str, Tensor],
        contract: Contract,
        start: int,
        pattern: Pattern,
    ) -> None:
        num_words = tensors[0].num_elements
        plan = PlanBuilder(num_words, self._device)
        plan.add_gpu(
            kernel,
            *tensors,
            num_words,
            _as_i32(_first_place(start)),
            pattern.kind,
            _as_i32(pattern.constant),
            grid=(-(-num_words // _BLOCK),),
            contract=contract,
            facts={**details, "kind": pattern.kind},
            BLOCK=_BLOCK,
        )
        run(plan.launches)


def _first_place(start: int) -> int:
    """32 bits for a place that may need more: places 2**32 words apart differ, too."""
    return (start + 0x9E3779B9 * (start >> 32)) & 0xFFFFFFFF


def _as_i32(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word
