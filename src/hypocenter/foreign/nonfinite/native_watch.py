"""The watch over numbers whose operations machine code sees: Python judges those that matter."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hypocenter.foreign.nonfinite.chunk import (
    MAX_BYTES,
    MAX_GPU_BYTES,
    MAX_OPS,
    MAX_RESULTS,
    gpu_bytes,
)
from hypocenter.foreign.nonfinite.examine import Examiner
from hypocenter.foreign.nonfinite.native_chunk import NativeChunk, NativeUndefined
from hypocenter.foreign.nonfinite.ops import SeenOp, place_of
from hypocenter.foreign.nonfinite.watch import (
    MAX_FILLED_BYTES,
    MAX_SINGLE,
    SCALER,
    UNDEFINED,
    NumberWatch,
)
from hypocenter.foreign.ops.native import NativeOps
from hypocenter.record.events import Launched
from hypocenter.record.nonfinite import NumberEnd

_LIMITS = {
    "ops": MAX_OPS,
    "results": MAX_RESULTS,
    "bytes": MAX_BYTES,
    "gpu_bytes": MAX_GPU_BYTES,
    "filled_bytes": MAX_FILLED_BYTES,
    "single": MAX_SINGLE,
    "undefined": UNDEFINED,
}


class NativeNumberWatch(NumberWatch):
    """As NumberWatch; operations come by `native`, and not by `run`."""

    def __init__(
        self,
        torch: Any,
        tell: Callable[..., None],
        may_look: Callable[[], bool],
        keep: Callable[[Launched, Mapping[str, Any]], None],
        native: NativeOps,
    ) -> None:
        self._native, self._code = native, native.code.numbers
        super().__init__(torch, tell, may_look, keep)
        self._chunk = NativeChunk(torch, self._code, self._facts)
        self._examiner = Examiner(torch, self._chunk, NativeUndefined(self._code), tell, keep)
        self._code.start(self._look, self._note_item, _LIMITS)
        #: Of the launch that is about to be made: what it writes, and copies of that.
        self._copied: list[tuple[Any, Any]] = []

    @property
    def is_paused(self) -> bool:
        """Whether a launch is under way, whose operations are Triton's interpreter's."""
        return self._is_paused

    @is_paused.setter
    def is_paused(self, is_paused: bool) -> None:
        self._is_paused = is_paused
        self._code.set_paused(is_paused)

    @property
    def backward_site(self) -> str:
        """The line that has asked for a backward pass last."""
        return self._backward_site

    @backward_site.setter
    def backward_site(self, site: str) -> None:
        self._backward_site = site
        self._code.set_backward_site(site)

    def flush(self, *, is_whole: bool = False) -> None:
        """Look at the operations so far; `_look` is called for that."""
        if not self._is_busy:
            self._code.flush(is_whole)

    def _look(self, places: list[int]) -> None:
        """These of the operations that are kept gave what is not finite."""
        self._chunk.note_flagged(places)
        with self._quiet():
            for op, result in self._examiner.look():
                self._tell_reached(result, NumberEnd.PARAMETER, op.site)
            if self._torch.cuda.is_initialized():
                self._code.set_gpu_bytes(gpu_bytes(self._torch))

    def _note_item(self, tensor: Any, value: float) -> None:
        self.note_read(tensor, NumberEnd.READ, value)

    def _next_number(self) -> int:
        return int(self._code.next_number())

    def _copies(self, tensors: list[Any]) -> dict[tuple[Any, ...], Any]:
        self._copied = self._code.copies(tensors)
        return {place_of(written): copied for written, copied in self._copied}

    def _keep(self, op: SeenOp) -> None:
        self._chunk.launches[op.number] = op
        self._code.add_launch(op.number, op.results, self._copied, op.site)
        self._copied = []

    def _num_seen(self) -> int:
        return int(self._code.counts()[0])

    def _num_uncounted(self) -> int:
        return self._num_in_graphs + int(self._code.counts()[1])

    def _num_of_hidden(self) -> int:
        return int(self._code.counts()[2])

    def _tell_reached(self, tensor: Any, how: NumberEnd, site: str) -> None:
        # Whoever has asked the machine code for a scaler's operation has a scaler.
        self._has_scaler = self._has_scaler or self._native.has_seen(SCALER)
        super()._tell_reached(tensor, how, site)

    def close(self, problem: str = "") -> None:
        """The program ends."""
        super().close(problem)
        self._code.stop()

    @contextlib.contextmanager
    def _quiet(self) -> Iterator[None]:
        was = self._code.set_busy(True)
        try:
            with self._native.quiet(), super()._quiet():
                yield
        finally:
            self._code.set_busy(was)
