"""Stage six: patterns in memory that is free: all bits, bits that walk, and lines of addresses."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np

from hypocenter.base.errors import OutOfMemory
from hypocenter.base.tensor import DType, Tensor
from hypocenter.device import copies, devices, memory
from hypocenter.settings.config import is_simulated
from hypocenter.verify.machine.words import Pattern, WordLooker, patterns
from hypocenter.verify.outcome import Mistake, PlantedError, Stage, Uncovered, verdict_of

NAME = "memory"
ASKS = "does free memory hold what is written to it?"
#: What is looked at at once, and of free memory at most.
_PIECE_BYTES, _SHARE = 64 << 20, 0.5
_PIECE_WORDS = _PIECE_BYTES // 4
_MOST_PIECES = 4096
#: In a machine's own memory other programs live, and simulated memory is that.
_HOST_BYTES, _SIMULATED_BYTES = 256 << 20, 16 << 20
_MOST_FINDINGS = 8


class MemoryStage:
    """Writes patterns and reads them back, piece by piece; all pieces are held together, so that
    lines of addresses that are joined show."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._findings: list[Mistake] = []
        self._planted = self._seen = 0
        is_gpu = device != "cpu" and not is_simulated(device)
        self._words = WordLooker(device, on_device=is_gpu)

    def run(self, is_over: Callable[[], bool]) -> Stage:
        """Take as much as is free, to a bound, and go through it until the time `is_over`."""
        started = time.perf_counter()
        wanted = self._wanted_bytes()
        pieces = list(self._allocate(wanted, is_over))
        num_passes = 0
        try:
            for pattern in patterns():
                for at, piece in enumerate(pieces):
                    self._words.write(piece, at * _PIECE_WORDS, pattern)
                for at, piece in enumerate(pieces):
                    self._look(pattern, at, piece)
                num_passes += 1
                if is_over():
                    break
            if pieces:
                self._plant(pieces[-1])
        finally:
            for piece in pieces:
                if self._device != "cpu":
                    memory.free(piece)
            self._words.free()
        num_bytes = sum(piece.extent_bytes for piece in pieces)
        left = []
        num_patterns = len(patterns())
        if num_passes < num_patterns:
            what = f"{num_patterns - num_passes} of {num_patterns} patterns"
            left.append(Uncovered(what, "the time was over"))
        if num_bytes < wanted:
            left.append(Uncovered(f"{wanted - num_bytes} bytes", "they could not be had in time"))
        canary = PlantedError("one bit of one word", self._planted, self._seen)
        return Stage(
            name=NAME,
            asks=ASKS,
            verdict=verdict_of(self._findings, canary, num_bytes),
            things="bytes",
            num_covered=num_bytes,
            num_all=wanted,
            num_checks=num_passes * len(pieces),
            canary=canary,
            findings=tuple(self._findings[:_MOST_FINDINGS]),
            uncovered=tuple(left),
            seconds=time.perf_counter() - started,
        )

    def _wanted_bytes(self) -> int:
        room = devices.room_of(self._device) if self._device != "cpu" else None
        if is_simulated(self._device):
            return _SIMULATED_BYTES
        if room is None:
            return _HOST_BYTES
        return min(int(room.available_bytes * _SHARE), _MOST_PIECES * _PIECE_BYTES)

    def _allocate(self, wanted: int, is_over: Callable[[], bool]) -> Iterator[Tensor]:
        for at in range(-(-wanted // _PIECE_BYTES)):
            if at and is_over():
                return
            num_words = min(_PIECE_BYTES, wanted - at * _PIECE_BYTES) // 4
            try:
                yield memory.allocate(
                    f"piece {at}", "verify", DType.I32, (num_words,), device=self._device
                )
            except OutOfMemory:
                return

    def _look(self, pattern: Pattern, at: int, piece: Tensor) -> None:
        found = self._words.look(piece, at * _PIECE_WORDS, pattern)
        if found is None:
            return
        num_words, word = found
        got = int(copies.to_host(memory.rows(piece, word, word + 1))[0]) & 0xFFFFFFFF
        want = int(pattern.words(at * _PIECE_WORDS + word, 1)[0]) & 0xFFFFFFFF
        offset = 4 * (at * _PIECE_WORDS + word)
        details = {
            "offset": offset,
            "wrote": f"{want:#010x}",
            "read": f"{got:#010x}",
            "bits": f"{got ^ want:#010x}",
            "num_words": num_words,
            "pattern": pattern.name,
        }
        what = f"offset {offset:#x} holds {got:#010x}, and {want:#010x} was written"
        self._findings.append(Mistake(what, pattern.name, details))

    def _plant(self, piece: Tensor) -> None:
        """Turn one bit of one word of a piece that has been written, and look again."""
        zeros = patterns()[0]
        self._words.write(piece, 0, zeros)
        word = piece.num_elements // 3
        copies.to_device(memory.rows(piece, word, word + 1), np.array([1 << 17], np.int32))
        self._planted += 1
        self._seen += self._words.look(piece, 0, zeros) == (1, word)
