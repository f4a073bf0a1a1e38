"""When a process is watched: from its first use of a GPU on, until another tool wants CUPTI.

Only one tool of a process may subscribe to CUPTI. So the watch begins no earlier than the program
first needs its GPU, says in one line that it could not where another was first, and makes room for
the profilers of torch, Triton and JAX when they begin.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from hypocenter.foreign.caller import made_at
from hypocenter.foreign.driver.library import Cupti, DriverLibrary, NotHere
from hypocenter.foreign.driver.named import named_tensors
from hypocenter.foreign.driver.watch import DriverWatch
from hypocenter.record.driver_log import DriverLogWriter
from hypocenter.settings.environment import Environment

if TYPE_CHECKING:
    from hypocenter.foreign.recorder import ForeignRecorder

#: Modules with which a program says that it uses a GPU at once.
GPU_MODULES = frozenset({"numba.cuda.cudadrv.driver", "cupy", "jax_plugins.xla_cuda12"}) | {
    "jax_plugins.xla_cuda13"
}
#: Module to what begins a profiler in it.
PROFILERS = {
    "torch.autograd.profiler": "_prepare_profiler",
    "triton.profiler": "start",
    "jax._src.profiler": "start_trace",
}


class Arming:
    """The watch of this process: `begin` when it needs its GPU, `end` when it is to stop.

    `recorder` opens the recording; `attempt` calls what may fail, and keeps the program out of it.
    """

    def __init__(
        self,
        recorder: Callable[[], ForeignRecorder | None],
        attempt: Callable[..., None],
    ) -> None:
        self._recorder, self._attempt = recorder, attempt
        self._cupti: Cupti | None = None
        self._watch: DriverWatch | None = None
        self._writer: DriverLogWriter | None = None
        self._has_begun = False

    def watch_torch(self, torch: Any) -> None:
        """Begin when torch first needs its GPU, and make room for its profiler."""
        self._begin_after(torch.cuda, "_lazy_init")
        profiler = sys.modules.get("torch.autograd.profiler")
        if profiler is not None:
            self.make_room_in(profiler)

    def watch_module(self, module: Any) -> None:
        """Begin at once, or with numba when its driver is first needed: one of GPU_MODULES."""
        if hasattr(module, "Driver"):
            self._begin_after(module.Driver, "ensure_initialized")
        elif not self._has_begun:
            self._attempt(self.begin)

    def _begin_after(self, owner: Any, name: str) -> None:
        original = getattr(owner, name, None)
        if original is None:
            return

        @functools.wraps(original)
        def call(*args: Any, **options: Any) -> Any:
            result = original(*args, **options)
            if not self._has_begun:
                self._attempt(self.begin)
            return result

        setattr(owner, name, call)

    def make_room_in(self, module: Any) -> None:
        """End the watch before the profiler of a module begins, which needs CUPTI for itself."""
        name = PROFILERS[module.__name__]
        original = getattr(module, name, None)
        if original is None:
            return

        @functools.wraps(original)
        def start(*args: Any, **options: Any) -> Any:
            why = f"{module.__name__} began, which needs CUPTI for itself"
            self._attempt(self.end, why)
            return original(*args, **options)

        setattr(module, name, start)

    def begin(self) -> None:
        """Subscribe, once; whatever is in the way is written down and nothing else."""
        self._has_begun = True
        opened = self._recorder() if Environment.read().driver else None
        if opened is None:
            return
        self._writer = writer = DriverLogWriter(opened.folder)
        opened.on_moved = self._move
        try:
            self._watch = DriverWatch(
                writer,
                DriverLibrary(),
                Environment.read().cache_dir,
                lambda: opened.reads.is_in_launch,
            )
            self._cupti = Cupti(self._watch.callback)
        except NotHere as error:
            writer.note_nothing(str(error))

    def _move(self, folder: Path) -> None:
        """The recording begins anew in another folder."""
        assert self._writer is not None
        self._writer.move(folder)
        if self._watch is not None and self._cupti is not None:
            self._watch.begin()

    def end(self, why: str = "") -> None:
        """Stop for good, before the interpreter goes or another tool begins."""
        self._has_begun = True
        if self._watch is not None:
            self._watch.end()
        if self._cupti is not None:
            self._cupti.close()
            self._cupti = None
            if why and self._writer is not None:
                with contextlib.suppress(OSError):
                    self._writer.note_nothing(f"{why}; what was launched from then on is not known")

    def abandon(self) -> None:
        """In the child of a fork: the subscription and the files are the parent's."""
        if self._watch is not None:
            self._watch.end()
        self._cupti = self._watch = self._writer = None

    def note_end(self, opened: ForeignRecorder, trace: TracebackType | None) -> None:
        """Write down which tensors variables stand for, where an exception ends the program."""
        writer = self._writer or DriverLogWriter(opened.folder)
        writer.note_tensors(named_tensors(trace, made_at))
