"""Puts a look at launches, waits and the last exception into a program that did not ask for it.

Called by `startup/hypocenter_waiting.py` when the program has loaded torch or Triton. All that
goes wrong in here is told once and changes nothing for the program.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import CodeType, FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from hypocenter.device.limits import GpuLimits, present_gpu
from hypocenter.foreign.argument_facts import INTERPRETER, device_and_stream, mark_undefined
from hypocenter.foreign.asked_hooks import watch_asked
from hypocenter.foreign.caller import caller_of_now
from hypocenter.foreign.comparing.watch import Comparisons
from hypocenter.foreign.compiled.session import COMPILER_MODULES, CompiledSession
from hypocenter.foreign.driver.arming import GPU_MODULES, PROFILERS, Arming
from hypocenter.foreign.graph_hooks import GraphWatch
from hypocenter.foreign.inductor import MadeIn, name_of, watch_inductor
from hypocenter.foreign.last_exception import MAX_CHARS, call_of, refusal_of
from hypocenter.foreign.lost_launches import LostLaunches
from hypocenter.foreign.nonfinite.first_read import watch_first_read
from hypocenter.foreign.nonfinite.hooks import NumberHooks
from hypocenter.foreign.ops.native import NativeOps
from hypocenter.foreign.recorder import ForeignRecorder, LaunchPlace
from hypocenter.foreign.repeats import Repeat
from hypocenter.foreign.seen_memory import storages_are_kept
from hypocenter.foreign.seen_reads import SeenReads, watch_methods, watch_reads
from hypocenter.foreign.streams.install import can_watch
from hypocenter.foreign.streams.session import OrderSession
from hypocenter.foreign.tuning_hooks import watch_tuning
from hypocenter.record.events import Launched
from hypocenter.record.runtime_text import is_of_numbers
from hypocenter.settings.environment import Environment

if TYPE_CHECKING:
    from hypocenter.foreign.guarding import GuardedLaunch, Guarding
    from hypocenter.record.guard_faults import AccessFault

log = logging.getLogger("hypocenter.foreign")

#: After so many launches that could not be recorded no other is tried.
MAX_FAILURES = 10
#: The code of what stands in the place of Triton's `run`.
_RUNS: set[CodeType] = set()
#: Sentences of the runtimes, after which a program that launched nothing is worth a look as well.
_OF_A_GPU = (
    *("CUDA error", "HIP error", "Triton Error", "out of memory"),
    *("CUDA_ERROR", "cudaError", "CudaAPIError"),  # of numba, CuPy and JAX
)


class _State:
    """Of this process: the recorder, once it is needed, and whether something failed in here."""

    recorder: ForeignRecorder | None = None
    is_off = False
    num_failed = 0
    lost: LostLaunches
    limits: dict[str, Any] | None = None
    knows_limits = False
    #: In a guarded run, once the first launch is made.
    guarding: Guarding | None = None
    #: How often Triton was asked for the code of a kernel.
    num_compiled = 0
    graphs: GraphWatch
    #: In a run that is looked at closely, or guarded, once torch is loaded.
    order: OrderSession | None = None
    numbers: NumberHooks
    driver: Arming
    compiled: CompiledSession
    comparisons: Comparisons
    #: To be called when torch.compile has been loaded.
    on_compiler_loaded: Callable[[], None] = staticmethod(lambda: None)


def module_loaded(module: Any) -> None:
    """The program has loaded one of `hypocenter_waiting.MODULES`."""
    if module.__name__ == "torch":
        _watch_the_end()
        _watch_waits(module)
        _State.graphs.watch(module)
        _State.driver.watch_torch(module)
        environment = Environment.read()
        _watch_operations(module, environment)
        if not environment.nan:  # each operation would count
            _State.comparisons.watch(module)
    elif module.__name__ in GPU_MODULES:
        _watch_the_end()
        _State.driver.watch_module(module)
    elif module.__name__ in PROFILERS:
        _State.driver.make_room_in(module)
    elif module.__name__ == "torch._dynamo":
        _State.on_compiler_loaded()
    elif module.__name__ == "triton.runtime.jit":
        _watch_the_end()
        _watch_launches(module.JITFunction, is_interpreted=False)
    elif module.__name__ == "triton.runtime.interpreter":
        _watch_launches(module.InterpretedFunction, is_interpreted=True)
    elif module.__name__ == "triton.runtime.autotuner":
        watch_tuning(module.Autotuner, recorder, _attempt)
    elif module.__name__ == "triton.compiler.compiler":
        _count_compiled(module)
        if _is_guarded_run():
            reason = "it is launched as a compiled kernel, past triton.jit"
            _list_past(module.CompiledKernel, "__getitem__", reason)
    elif module.__name__ in COMPILER_MODULES:
        _State.compiled.watch(module)
    elif module.__name__ == "torch._inductor.runtime.triton_heuristics":
        _watch_the_end()
        watch_inductor(module.CachingAutotuner, _note_compiled, _attempt_launch, _State.lost.count)
        if _is_guarded_run():
            reason = "torch.compile launches the kernels that it makes itself, past triton.jit"
            _list_past(module.CachingAutotuner, "run", reason)


def _watch_operations(torch: Any, environment: Environment) -> None:
    """Have torch's operations seen, by machine code where that can be had."""
    is_looked_at = environment.trace or environment.guard
    is_of_use = environment.nan or environment.trace or (is_looked_at and can_watch(torch))
    native = NativeOps.load(torch) if is_of_use else None
    if native is not None:
        atexit.register(native.end)  # before what is registered later, so after it
        _State.graphs.listeners.append(native.code.numbers.set_capturing)
    if environment.nan:
        _State.numbers.start(torch, native)
    if not is_looked_at:
        return
    order = _State.order = OrderSession(torch, recorder, _attempt, _close, native)
    reads = _reads if environment.trace else lambda: None
    if environment.trace:
        mark_undefined(torch, order.quiet, order.end_filling)
        watch_first_read(torch, _recorder_now, _attempt)
        watch_asked(torch, _recorder_now, _State.graphs, _attempt)
    if native is not None and environment.trace:
        native.follow_reads(reads, _attempt_quietly)
        watch_methods(torch, reads, _attempt_quietly)
    elif native is None and (environment.trace or order.run is not None):
        _State.on_compiler_loaded = watch_reads(torch, reads, _attempt_quietly, order.run)


def _recorder_now() -> ForeignRecorder | None:
    return _State.recorder


def _reads() -> SeenReads | None:
    """None while a graph is captured, of which a copy to the host would be a part."""
    if _State.recorder is None or _State.graphs.captured_into is not None:
        return None
    return _State.recorder.reads


def _quiet() -> contextlib.AbstractContextManager[None]:
    """What torch does meanwhile is no part of the program's order."""
    return _State.order.quiet() if _State.order is not None else contextlib.nullcontext()


def recorder() -> ForeignRecorder | None:
    """The recorder of this process, opened by the first thing that is worth it."""
    if _State.recorder is None and not _State.is_off:
        environment = Environment.read()
        if not environment.record:
            _State.is_off = True
            return None
        _State.recorder = ForeignRecorder(
            environment.run_dir,
            sees_frees=storages_are_kept(),
            is_guarded=_is_guarded_run() or environment.nan,
            looks_closely=environment.trace,
        )
        atexit.register(_close)
    return _State.recorder


def _close() -> None:
    _attempt(_State.driver.end)
    _attempt(_note_captured)
    _State.lost.tell()
    _attempt(_finish_order)
    _State.numbers.close()
    if _State.recorder is not None:
        _attempt(_State.recorder.close)
        _State.recorder = None


def _finish_order() -> None:
    if _State.order is not None:
        _State.order.finish(is_recorded=_State.recorder is not None)


def _forget() -> None:
    """In the child of a fork: the folder is the parent's."""
    _State.numbers.abandon()
    _State.driver.abandon()
    if _State.recorder is not None:
        _State.recorder.abandon()
        _State.recorder = None


os.register_at_fork(after_in_child=_forget)


def _attempt(do: Callable[..., Any], *args: Any) -> None:
    """Do it, or say once why it cannot be done; after some failures, nothing is tried any more."""
    if _State.is_off:
        return
    try:
        do(*args)
    except Exception as error:
        _note_error(error)


def _attempt_quietly(do: Callable[..., Any], *args: Any) -> None:
    """The same, for what asks torch for values: the waits of that are none of the program's."""
    with _quiet():
        _attempt(do, *args)


def _attempt_launch(do: Callable[..., Any], tuner: Any, *args: Any) -> None:
    """As `_attempt`, for a launch of a kernel of torch.compile's, which counts where it is lost."""
    if _State.is_off:
        _lose_off(name_of(tuner))
        return
    try:
        do(tuner, *args)
    except Exception as error:
        _note_error(error, name_of(tuner))


def _note_error(error: Exception, kernel: str = "") -> None:
    """Something failed in here; with `kernel` a launch of it is lost for that."""
    _State.num_failed += 1
    _State.is_off = _State.num_failed >= MAX_FAILURES
    reason = f"{type(error).__name__}: {error}"
    if _State.num_failed == 1:
        what = "a launch was not recorded" if kernel else "something was not recorded"
        log.warning("%s: %s", what, reason)
    if kernel:
        _State.lost.count(kernel, reason)


def _lose_off(kernel: str) -> None:
    """A launch is made while nothing is recorded any more, because too much has failed."""
    if _State.num_failed:
        _State.lost.count(kernel, f"recording was given up after {MAX_FAILURES} failures")


_State.lost = LostLaunches(lambda: _State.recorder)
_State.graphs = GraphWatch(recorder, _attempt)
_State.numbers = NumberHooks(recorder, lambda: _State.graphs.captured_into is None)
_State.driver = Arming(recorder, _attempt)
_State.compiled = CompiledSession(recorder, _attempt)
_State.comparisons = Comparisons(_recorder_now, _attempt_quietly)


# -- launches -------------------------------------------------------------------------------------


def _watch_launches(kind: Any, *, is_interpreted: bool) -> None:
    """Look at each launch right before it is made, when its grid is known."""
    original = kind.run

    @functools.wraps(original)
    def run(self: Any, *args: Any, grid: Any, warmup: bool = False, **options: Any) -> Any:
        if warmup or _State.is_off or _is_of_ours(getattr(self.fn, "__module__", "")):
            if _State.is_off and not warmup:
                _lose_off(_name_of(self))
            return original(self, *args, grid=grid, warmup=warmup, **options)
        outside = sys._getframe(1)
        launch = _Launch(self, args, options, grid, is_interpreted, _State.num_compiled, outside)
        if _is_guarded_run():
            _attempt(_prepare, launch)
        numbers = _State.numbers.before_launch(self, args, options)
        try:
            if launch.guarded is not None:
                with contextlib.suppress(_NotGuarded):
                    return _run_guarded(original, launch, launch.guarded)
            result = original(self, *args, grid=launch.looked_at, warmup=False, **options)
            if launch.repeat is not None:
                _over()
                _attempt(_make_again, original, launch, launch.repeat, result)
            return result
        finally:
            _over()
            _State.numbers.after_launch(numbers, launch.made)

    watched: Any = run
    _RUNS.add(watched.__code__)
    kind.run = run


def _name_of(jit: Any) -> str:
    return str(getattr(jit, "__name__", None) or getattr(jit.fn, "__name__", "a kernel"))


@functools.cache
def _is_of_ours(module: object) -> bool:
    """Whether it is of this package's own kernels, of which another recorder tells."""
    return str(module).split(".")[0] == "hypocenter"


@dataclass(slots=True)
class _Launch:
    """A launch that the program makes; `size` and `made` are known right before it is made.

    `num_compiled` is how often Triton had compiled by its beginning, and `outside` a frame of who
    called.
    """

    jit: Any
    args: tuple[Any, ...]
    options: dict[str, Any]
    grid: Any
    is_interpreted: bool
    num_compiled: int = 0
    outside: FrameType | None = None
    size: Any = None
    made: Launched | None = None
    guarded: GuardedLaunch | None = None
    repeat: Repeat | None = None

    def looked_at(self, bound: Any) -> Any:
        """The grid; whoever asks for it is about to launch."""
        self.size = size = self.grid(bound) if callable(self.grid) else self.grid
        try:  # in here itself: each call that leads to the recorder costs every launch
            opened = _State.recorder or recorder()
            if opened is not None:
                caller, site = caller_of_now(self.outside)
                is_interpreted = self.is_interpreted
                device, stream = (
                    (INTERPRETER, "") if is_interpreted else device_and_stream(sys.modules["torch"])
                )
                with _quiet():
                    self.made = opened.record_launch(
                        self.jit,
                        self.args,
                        self.options,
                        size,
                        LaunchPlace(
                            device, stream, site, caller, None if is_interpreted else _limits
                        ),
                        _State.graphs.captured_into,
                        is_compiled=_State.num_compiled > self.num_compiled,
                    )
                # Nobody else keeps the program's tensors alive.
                self.repeat, opened.repeat = opened.repeat, None
                watch = _State.order.watch if _State.order is not None else None
                if watch is not None and not is_interpreted:
                    given = dict(zip(self.jit.arg_names, self.args, strict=False)) | self.options
                    watch.launch(self.jit, given, self.made.seq if self.made else 0, site, caller)
        except Exception as error:
            _note_error(error, _name_of(self.jit))
        return size


def _count_compiled(compiler: Any) -> None:
    """Know when a kernel is compiled, or loaded from Triton's cache on disk."""
    original = compiler.compile

    @functools.wraps(original)
    def compile_kernel(*args: Any, **options: Any) -> Any:
        _State.num_compiled += 1
        return original(*args, **options)

    compiler.compile = compile_kernel


class _NotGuarded(Exception):
    """The guarded form of a launch could not be launched, and nothing has happened."""


def _prepare(launch: _Launch) -> None:
    """Find the guarded form of a launch, where it has one."""
    if _State.guarding is None:
        from hypocenter.foreign.guarding import Guarding

        _State.guarding = Guarding(_tell_unguarded)
    launch.guarded = _State.guarding.prepare(launch.jit, launch.args, launch.options)


@functools.cache
def _is_guarded_run() -> bool:
    environment = Environment.read()
    return environment.guard and environment.record


def _list_past(kind: Any, method: str, reason: str) -> None:
    """Tell of kernels that are launched by another way, by the first launch of each."""
    original = getattr(kind, method)
    seen: set[str] = set()

    @functools.wraps(original)
    def run(self: Any, *args: Any, **options: Any) -> Any:
        named = getattr(self, "fn", self)
        name = str(getattr(named, "__name__", None) or getattr(named, "name", "a kernel"))
        if name not in seen:
            seen.add(name)
            _tell_unguarded(name, reason)
        return original(self, *args, **options)

    setattr(kind, method, run)


def _tell_unguarded(*facts: Any) -> None:
    if (opened := recorder()) is not None:
        _attempt(opened.record_unguarded, *facts)


def _run_guarded(original: Any, launch: _Launch, guarded: GuardedLaunch) -> Any:
    """Launch the guarded form, wait for it, and write down what it refused."""
    guarding = _State.guarding
    assert guarding is not None
    for hook in launch.jit.pre_run_hooks:  # a form has none: they know nothing of its arguments
        hook(*launch.args, **launch.options)
    options = {**launch.options, **guarded.extra}
    try:
        result = original(
            guarded.form.fn, *launch.args, grid=launch.looked_at, warmup=False, **options
        )
    except Exception as error:
        if guarding.is_unlaunchable(launch.jit, error, has_begun=launch.size is not None):
            raise _NotGuarded from error
        raise
    size = (launch.size,) if isinstance(launch.size, int) else tuple(launch.size)
    guarded.made, guarded.grid = launch.made, tuple(int(number) for number in size)
    if _State.recorder is not None:
        _State.recorder.count_guarded()
    with _quiet():
        faults = guarding.settle(guarded)
    _attempt(_note_faults, guarded, faults)
    return result


def _note_faults(guarded: GuardedLaunch, faults: list[AccessFault]) -> None:
    if faults and guarded.made is not None and _State.recorder is not None:
        _State.recorder.record_guarded(guarded.made, faults, guarded.tensors)


def _note_captured() -> None:
    """What launches in graphs have found."""
    if _State.guarding is not None:
        for guarded, faults in _State.guarding.settle_captured():
            _note_faults(guarded, faults)


def _make_again(original: Any, launch: _Launch, repeat: Repeat, compiled: Any) -> None:
    """Make a launch again that has come back, and note what it gave each time."""
    if _State.recorder is not None and launch.made is not None:
        again = functools.partial(original, launch.jit, grid=launch.size, warmup=False)
        # Triton's interpreter runs a replay as well: it has nothing to say against one.
        make = None if launch.is_interpreted else again
        with _quiet():
            _State.recorder.record_outcome(launch.made, repeat, make, compiled)


def _note_compiled(
    jit: Any, given: Mapping[str, Any], size: tuple[int, ...], made_in: MadeIn
) -> None:
    """A launch of a kernel of torch.compile's."""
    launch = _Launch(
        jit,
        (),
        dict(given),
        size,
        is_interpreted=False,
        num_compiled=_State.num_compiled,
    )
    launch.looked_at(None)
    _State.compiled.tell(jit, made_in)
    _over()  # when it comes back is not watched


def _over() -> None:
    """A launch or a wait has come back."""
    opened = _State.recorder
    if opened is not None:
        try:
            opened.end()
        except Exception as error:
            _note_error(error)


def _limits() -> dict[str, Any] | None:
    """Those of the GPU, asked once; None for one that is not in our table."""
    if not _State.knows_limits:
        _State.knows_limits = True
        try:
            found: GpuLimits | None = present_gpu()
            if found is not None:
                _State.limits = {name: getattr(found, name) for name in found.__slots__}
        except Exception as error:
            log.info("the limits of this GPU are not known: %s", error)
    return _State.limits


# -- waits and the end ----------------------------------------------------------------------------


def _watch_waits(torch: Any) -> None:
    """Note when torch.cuda.synchronize has come back well: all launches before it have ended."""
    original = torch.cuda.synchronize

    @functools.wraps(original)
    def synchronize(*args: Any, **options: Any) -> Any:
        if _State.recorder is not None:
            _attempt(_State.recorder.begin)
        try:
            result = original(*args, **options)
        finally:
            _over()
        if _State.recorder is not None:
            _attempt(_note_synchronisation)
        return result

    torch.cuda.synchronize = synchronize


def _note_synchronisation() -> None:
    _note_captured()
    if _State.recorder is not None:
        _State.recorder.record_synchronisation(caller_of_now()[1])


def _watch_the_end() -> None:
    """Note the exception that ends the program; then do what would have been done."""
    original = sys.excepthook
    if getattr(original, "is_hypocenters", False):
        return

    def note_end(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if not issubclass(kind, KeyboardInterrupt):
            _attempt(_note_end, error, trace)
        original(kind, error, trace)

    note_end.is_hypocenters = True  # type: ignore[attr-defined]
    sys.excepthook = note_end


def _note_end(error: BaseException, trace: TracebackType | None) -> None:
    call, site, is_statement = call_of(trace)
    _State.numbers.note_end(error, site, call)
    text = f"{type(error).__name__}: {error}"[:MAX_CHARS]
    is_of_gpu = any(words in text for words in _OF_A_GPU)
    refused = refusal_of(error, *_kernel_of(trace), _limits)
    _State.compiled.note_end(error, trace)
    is_of_any = is_of_gpu or refused or is_of_numbers(f"{text} {call}")
    opened = recorder() if is_of_any else _State.recorder
    if opened is None:
        return
    if refused is not None:
        opened.record_refusal(*refused, site)
    _attempt_quietly(_State.comparisons.note_end, error, trace)
    opened.record_failure(call, text, site, is_statement=is_statement)
    if is_of_gpu:
        _blocks(opened)
        _State.driver.note_end(opened, trace)


def _kernel_of(trace: TracebackType | None) -> tuple[Any, dict[str, Any]]:
    """The kernel whose launch an exception came out of, and its keywords."""
    for frame, _ in traceback.walk_tb(trace):
        if frame.f_code in _RUNS:
            return frame.f_locals.get("self"), dict(frame.f_locals.get("options", {}))
    return None, {}


def _blocks(opened: ForeignRecorder) -> None:
    """Torch's own table of its memory, which it keeps on the host."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return
    kind = "hip" if torch.version.hip else "cuda"
    found: dict[str, list[tuple[int, int, bool]]] = {}
    for segment in torch.cuda.memory_snapshot():
        address = int(segment["address"])
        for block in segment["blocks"]:
            size = int(block["size"])
            is_used = block["state"] == "active_allocated"
            found.setdefault(f"{kind}:{segment['device']}", []).append((address, size, is_used))
            address += size
    for device, blocks in found.items():
        opened.blocks(device, blocks)
