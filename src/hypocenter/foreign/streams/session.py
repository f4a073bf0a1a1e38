"""The order of this process, from the loading of torch to the end: what `hooks.py` needs of it."""

from __future__ import annotations

import atexit
import contextlib
from collections.abc import Callable
from typing import Any, Protocol

from hypocenter.foreign.streams.install import TorchAnswers, can_watch, install
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
    ) -> None:
        self._torch, self._recorder = torch, recorder
        self.watch: StreamWatch | None = None
        if can_watch(torch):
            self.watch = StreamWatch(TorchAnswers(torch), self._tell)
            install(torch, self.watch, attempt)
            atexit.register(close)

    @property
    def run(self) -> Callable[..., Any] | None:
        """Runs one of torch's operations and has it noted; None where nothing is watched."""
        return self.watch.operation if self.watch is not None else None

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
        is_of_use = is_recorded or len(watch.streams) > 1 or watch.num_async > 0
        if is_of_use and (recorder := self._recorder()) is not None:
            recorder.record_order(OrderWatched, fields_of(watch))
