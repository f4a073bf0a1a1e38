"""Puts the watch over numbers into a program: a mode below autograd, and readers of tensors."""

from __future__ import annotations

import functools
import inspect
import logging
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from hypocenter.foreign.argument_facts import dtype_of, values_of
from hypocenter.foreign.caller import caller_of_now
from hypocenter.foreign.nonfinite.ops import SeenOp
from hypocenter.record.contents import LaunchOutcome
from hypocenter.record.nonfinite import NumberEnd

if TYPE_CHECKING:
    from hypocenter.foreign.nonfinite.watch import NumberWatch
    from hypocenter.foreign.ops.native import NativeOps
    from hypocenter.foreign.recorder import ForeignRecorder
    from hypocenter.record.events import Launched

log = logging.getLogger("hypocenter.foreign")

#: After so many failures in here the watch is given up.
MAX_FAILURES = 10
_MAX_CHARS = 500
#: Packages whose threads carry what others made: batches to a GPU, and marks of progress.
_CARRIERS = frozenset({"torch", "tqdm"})
#: What is kept of all tensors of a launch that gave a number which is none.
GIVEN_BYTES = 16 << 20


class NumberHooks:
    """The watch of this process, once torch is loaded in a run with `--nan`; else does nothing.

    `recorder` opens what is written to; `may_look` is False while a graph is captured.
    """

    def __init__(
        self, recorder: Callable[[], ForeignRecorder | None], may_look: Callable[[], bool]
    ) -> None:
        self._recorder, self._may_look = recorder, may_look
        self.watch: NumberWatch | None = None
        self._num_failed = 0
        self._problem = ""

    def start(self, torch: Any, native: NativeOps | None = None) -> None:
        """See every operation of this thread, and of its backward passes, from now on."""
        opened = self._recorder()
        if opened is None:
            return
        self.see(
            torch,
            opened.record_number,
            lambda made, given: _keep_given(opened, made, given),
            native,
        )
        for name in ("tolist", "__repr__"):
            self._watch_reader(torch.Tensor, name)
        for name in ("backward", "grad"):
            self._watch_backward(torch.autograd, name)
        self._watch_compile(torch)
        self._watch_threads(threading.Thread)

    def see(
        self,
        torch: Any,
        tell: Callable[..., None],
        keep: Callable[[Launched, Mapping[str, Any]], None],
        native: NativeOps | None,
    ) -> Any:
        """Have each operation seen by machine code, or by a mode in Python, which is returned."""
        from hypocenter.foreign.nonfinite.native_watch import NativeNumberWatch
        from hypocenter.foreign.nonfinite.watch import NumberWatch

        if native is None:
            self.watch = NumberWatch(torch, tell, self._may_look, keep)
            return enter_mode(torch, self)
        self.watch = NativeNumberWatch(torch, tell, self._may_look, keep, native)
        native.asked.told.append(self._note_error)
        native.see()
        return None

    def run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Make an operation, seen by the watch."""
        if self.watch is None:
            return func(*args, **kwargs)
        return self.watch.run(func, args, kwargs, self.attempt)

    def attempt(self, do: Callable[..., Any], *args: Any) -> Any:
        """Do it, or note why it cannot be done; after some failures nothing is tried any more."""
        try:
            return do(*args)
        except Exception as error:
            self._note_error(error)
            return None

    def _note_error(self, error: BaseException) -> None:
        self._problem = f"{type(error).__name__}: {error}"[:_MAX_CHARS]
        self._num_failed += 1
        if self._num_failed == 1:
            is_debugged = log.isEnabledFor(logging.DEBUG)
            log.warning(
                "an operation was not looked at: %s",
                self._problem,
                exc_info=error if is_debugged else None,
            )
        if self._num_failed >= MAX_FAILURES:
            self.close()

    def before_launch(
        self, jit: Any, args: tuple[Any, ...], options: Mapping[str, Any]
    ) -> SeenOp | None:
        """A launch of Triton's is about to be made."""
        if self.watch is None:
            return None
        names = inspect.signature(jit.fn).parameters
        given = {**dict(zip(names, args, strict=False)), **options}
        found: SeenOp | None = self.attempt(self.watch.before_launch, given)
        return found

    def after_launch(self, op: SeenOp | None, made: Launched | None) -> None:
        """It has been made, or has failed, as `made` tells."""
        if self.watch is None or op is None:
            return
        if made is None:
            self.watch.is_paused = False
            return
        self.attempt(self.watch.after_launch, op, made)

    def note_end(self, error: BaseException, site: str, statement: str) -> None:
        """An exception ends the program at `site`."""
        if self.watch is not None:
            self.attempt(self.watch.note_end, error, site, statement)

    def close(self) -> None:
        """Look at what is left, and say how much was looked at."""
        if self.watch is not None:
            watch, self.watch = self.watch, None
            try:
                watch.close(self._problem)
            except Exception as error:
                log.warning("the last operations were not looked at: %s", error)

    def abandon(self) -> None:
        """In the child of a fork: what is written belongs to the parent."""
        self.watch = None

    def _watch_reader(self, kind: Any, name: str) -> None:
        original = getattr(kind, name)

        @functools.wraps(original)
        def read(tensor: Any, *args: Any, **options: Any) -> Any:
            if self.watch is not None:
                self.attempt(self.watch.note_read, tensor, NumberEnd.READ)
            return original(tensor, *args, **options)

        setattr(kind, name, read)

    def _watch_backward(self, autograd: Any, name: str) -> None:
        """Note the line of the program that asks for a backward pass."""
        original = getattr(autograd, name)

        @functools.wraps(original)
        def run(*args: Any, **options: Any) -> Any:
            if self.watch is not None:
                self.watch.backward_site = caller_of_now()[1]
            return original(*args, **options)

        setattr(autograd, name, run)

    def _watch_threads(self, kind: Any) -> None:
        """Count the threads that are begun, but for those that make nothing of their own."""
        original = kind.start

        @functools.wraps(original)
        def start(thread: Any) -> Any:
            work = getattr(thread, "_target", None) or type(thread).run
            package = str(getattr(work, "__module__", "")).partition(".")[0]
            if self.watch is not None and package not in _CARRIERS:
                self.watch.num_threads += 1
            return original(thread)

        kind.start = start

    def _watch_compile(self, torch: Any) -> None:
        """Note that a program asks for compiled code, which a run with `--nan` does without."""
        original = torch.compile

        @functools.wraps(original)
        def compile_model(*args: Any, **options: Any) -> Any:
            if self.watch is not None:
                self.watch.is_eager = True
            return original(*args, **options)

        torch.compile = compile_model


def _keep_given(opened: ForeignRecorder, made: Launched, given: Mapping[str, Any]) -> None:
    """Write what a launch was given, by parameter, unless that is too much."""
    found, num_bytes = [], 0
    for argument in made.launch.arguments:
        tensor = given.get(argument.name)
        if argument.tensor is not None and tensor is not None:
            num_bytes += tensor.nbytes
            if num_bytes > GIVEN_BYTES:
                return
            found.append(values_of(tensor, argument.tensor, dtype_of(tensor.dtype)))
    opened.keep_outcome(LaunchOutcome(step=made.step, launch=made.seq, given=tuple(found), gave=()))


def enter_mode(torch: Any, hooks: NumberHooks) -> Any:
    """Have each operation of this thread made by `hooks`, below autograd; the mode, to be left."""
    base: Any = torch.utils._python_dispatch.TorchDispatchMode

    class Watch(base):  # type: ignore[misc]
        @classmethod
        def ignore_compile_internals(cls) -> bool:
            return True

        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            return hooks.run(func, args, kwargs or {})

    # Torch hides the method from its compiler, which a run with `--nan` does not use.
    plain = getattr(Watch.__torch_dispatch__, "__wrapped__", None)
    if plain is not None:
        Watch.__torch_dispatch__ = plain  # type: ignore[method-assign]
    return Watch().__enter__()
