"""The order of this process, from the loading of torch to the end: what `hooks.py` needs of it."""

from __future__ import annotations

import atexit
import contextlib
from collections.abc import Callable
from typing import Any, Protocol

from hypocenter.foreign.ops.native import NativeOps
from hypocenter.foreign.streams.install import TorchAnswers, can_watch, install
from hypocenter.foreign.streams.native_watch import NativeStreamWatch
from hypocenter.foreign.streams.watch import StreamWatch, fields_of
from hypocenter.record.order_events import Disordered, OrderWatched


class _Recorder(Protocol):
    def record_order(
        self, kind: type[Disordered | OrderWatched], fields: dict[str, Any]
    ) -> None: ...


class OrderSession:
    """`watch` is None where torch is for no GPU. `recorder` opens one, or gives that of before."""

    def __init__(
        self,
        torch: Any,
        recorder: Callable[[], _Recorder | None],
        attempt: Callable[..., None],
        close: Callable[[], None],
        native: NativeOps | None = None,
    ) -> None:
        self._torch, self._recorder = torch, recorder
        self.watch: StreamWatch | None = None
        self._native: NativeStreamWatch | None = None
        if can_watch(torch):
            answers = TorchAnswers(torch)
            if native is not None:
                self._native = NativeStreamWatch(answers, self._tell, native)
                native.see()
            self.watch = self._native or StreamWatch(answers, self._tell)
            install(torch, self.watch, attempt)
            atexit.register(close)

    @property
    def run(self) -> Callable[..., Any] | None:
        """Runs one of torch's operations and has it noted; None where that is not needed."""
        if self.watch is None or self._native is not None:
            return None
        return self.watch.operation

    def _tell(self, fields: dict[str, Any]) -> None:
        if (recorder := self._recorder()) is not None:
            recorder.record_order(Disordered, fields)

    def quiet(self) -> contextlib.AbstractContextManager[None]:
        """What torch does meanwhile is the doctor's business."""
        return self.watch.quiet() if self.watch is not None else contextlib.nullcontext()

    def end_filling(self) -> None:
        """Where there are several streams, what was filled must not meet another one's work.

        While a graph is captured nothing may be waited for, and nothing runs.
        """
        if self.watch is None or not self.watch.has_streams:
            return
        if not self._torch.cuda.is_current_stream_capturing():
            self._torch._C._cuda_synchronize()

    def finish(self, *, is_recorded: bool) -> None:
        """Tell how much of the order was watched, once; where nothing else `is_recorded`, if there
        was any: work in one stream has nothing to order but what the host copies.
        """
        watch, self.watch = self.watch, None
        if watch is None:
            return
        if self._native is not None:
            self._native.end()
        is_of_use = is_recorded or len(watch.streams) > 1 or watch.num_async > 0
        if is_of_use and (recorder := self._recorder()) is not None:
            recorder.record_order(OrderWatched, fields_of(watch))
