"""The one door for kernel launches: prepare a launch once, run it many times.

A prepared launch holds its arguments for good. Its `run` is rebound by its mode, so that a launch
without checks is the compiled kernel itself, with nothing looked up before it.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from hypocenter.base.errors import LaunchRejected, UsageError
from hypocenter.base.package import caller_outside
from hypocenter.base.refusals import Refused, WrongScalar
from hypocenter.base.tensor import Tensor
from hypocenter.device import copies, devices, memory
from hypocenter.device.cpu import pool
from hypocenter.device.cpu.kernel_forms import KernelForm, NamedKernel
from hypocenter.device.cpu.native import KERNEL_FAILED, BoundLaunch, NativeLaunches
from hypocenter.device.cpu.slots import key_of
from hypocenter.device.helper_processes import never
from hypocenter.device.limits import check_launch
from hypocenter.device.offline.specimen import of_device
from hypocenter.device.stream_order import Writes
from hypocenter.record.recorder import current
from hypocenter.record.ring import CELL_PLACE
from hypocenter.settings.config import LAUNCH_MODES, OnProgress

log = logging.getLogger("hypocenter.launch")

# numba has one thread pool per process, and its workqueue layer aborts the process when two
# threads enter it at once; so this lock is the process's too and not an engine's. A launch of a GPU
# may have the host do something (`host_work.py`), for which its thread takes it again.
_POOL = threading.RLock()


def _renew_lock() -> None:
    """In the child of a fork: the thread that held it, if one did, is not there to let it go."""
    global _POOL
    _POOL = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)

_PLAIN_NUMBERS = (int, float)
_NUMBERS = (*_PLAIN_NUMBERS, np.number)

_known_place: tuple[memoryview | None, int] = (None, 0)


class Runs(Protocol):
    """A launch, or a graph of launches."""

    @property
    def run(self) -> Callable[[], None]: ...


class Demands(Protocol):
    """What a launch needs of a contract (`contracts/contract.py`)."""

    def check(self, **arguments: Any) -> dict[str, Any]: ...

    def needs_int64(self, **arguments: Any) -> bool: ...

    def check_values(self, read: Callable[[Tensor], Any], **arguments: Any) -> None: ...


class BoundArguments(NamedTuple):
    """Arguments as they were given, what a kernel gets for them, and of each of these the bytes
    behind it if it is memory, and the tensor whose memory it is alone."""

    given: tuple[Any, ...]
    values: tuple[Any, ...]
    sizes: tuple[int | None, ...]
    tensors: tuple[Tensor | None, ...] = ()


class TritonCall(NamedTuple):
    """Triton's function, its grid, warps and constants, the bytes behind each pointer, and of
    those that are views whose elements do not lie packed their tensors."""

    jit: Any = None
    options: Mapping[str, Any] = {}
    extents: Mapping[str, int] = {}
    views: Mapping[str, Tensor] = {}


_NO_TRITON = TritonCall()


class Launch:
    """A kernel with its arguments: `facts` as its contract names them, `args` as it takes them.

    Of a GPU launch `jit` is Triton's function, `options` its grid, warps and constants, `extents`
    the bytes behind each pointer parameter, `views` those that do not lie packed. `given` are the
    arguments as Tensors, `site` is where they were given, `caller` the line beyond `kernels/` that
    asked for it.
    """

    __slots__ = (
        "__weakref__",
        "args",
        "caller",
        "contract",
        "device",
        "extents",
        "facts",
        "function",
        "given",
        "jit",
        "kernel",
        "options",
        "run",
        "site",
        "views",
    )

    def __init__(
        self,
        kernel: str,
        function: Any,
        bound: BoundArguments,
        contract: Demands,
        facts: Mapping[str, Any],
        device: str = "cpu",
        triton: TritonCall = _NO_TRITON,
    ) -> None:
        self.kernel, self.function, self.args = kernel, function, bound.values
        self.contract, self.facts, self.device = contract, facts, device
        self.jit, self.options, self.extents = triton.jit, triton.options, triton.extents
        self.views = triton.views
        self.given, self.site = bound.given, caller_outside("device")
        self.caller = caller_outside("device", "kernels")
        self.run: Callable[[], None] = self._plain()

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensor arguments by their names in the contract."""
        return {name: fact for name, fact in self.facts.items() if isinstance(fact, Tensor)}

    def set_mode(self, mode: str) -> None:
        """Rebind `run`: `off` is the kernel alone; `checked` first rechecks arguments and index
        values; `traced` is `off` to a launch, for it is its plan that looks at what each one did.

        The fourth mode, `guarded` (accesses that leave their tensors are masked off), needs
        somebody who reads what the launches found: see `GuardedLaunches`.
        """
        if mode == "guarded":
            raise UsageError(f"{self.kernel}: guarded is a mode of plans; set it on the plan")
        plain = self._plain()
        if mode in ("off", "traced"):
            self.run = plain
        elif mode == "checked":
            self.run = functools.partial(self._run_checked, plain)
        else:
            raise UsageError(
                f"launch mode is {mode!r}, but must be one of {', '.join(LAUNCH_MODES)}"
            )

    def _plain(self) -> Callable[[], None]:
        """The compiled kernel itself with its arguments."""
        if isinstance(self.function, KernelForm):
            return BoundLaunch(self.function, self.args)
        return functools.partial(self.function, *self.args, **self.options)

    def _run_checked(self, plain: Callable[[], None]) -> None:
        current().record_check("index values")
        self.contract.check_values(copies.to_host, **self.facts)
        plain()


def prepare(
    kernel: NamedKernel,
    args: Sequence[Any],
    contract: Demands,
    facts: Mapping[str, Any],
    *,
    parallel: bool,
    reads: Sequence[tuple[Any, int]] = (),
) -> Launch:
    """Bind a CPU kernel to its arguments: Tensors, numpy arrays and scalars.

    Raises LaunchRejected when `facts` break the contract.
    """
    _check(contract, facts, kernel.name, "cpu")
    bound = _bind(args)
    passed = dict(zip(kernel.parameters, bound.values, strict=False))
    _require_facts(kernel.name, "cpu", passed, contract, facts)
    function = kernel.form(is_shared=parallel, reads=reads)
    return Launch(kernel.name, function, bound, contract, facts)


def prepare_gpu(
    jit: Any,
    args: Sequence[Any],
    options: Mapping[str, Any],
    contract: Demands,
    facts: Mapping[str, Any],
    device: str,
) -> Launch:
    """Bind a Triton kernel to its arguments and `options` (grid, num_warps, constants).

    An argument of 2**31 elements or more picks the kernel's 64-bit variant. Raises LaunchRejected
    when `facts` break the contract or the launch exceeds the device's limits.
    """
    name = jit.__name__.removesuffix("_kernel")
    _check(contract, facts, name, device)
    options = dict(options)
    if "WIDE" in jit.arg_names:
        options["WIDE"] = contract.needs_int64(**facts)
    backend = devices.backend_of(device)
    is_nvidia = device.startswith("cuda")
    options |= of_device(jit.arg_names, is_nvidia=is_nvidia, overlaps=backend.overlaps)
    if options.get("OVERLAPS"):
        options["launch_pdl"] = True  # Triton's word for it, which AMD's part does not know
    bound = _bind(args)
    names = [name for name in jit.arg_names if name not in options]
    passed = dict(zip(names, bound.values, strict=True)) | options
    _require_facts(name, device, passed, contract, facts)
    sizes = zip(names, bound.sizes, strict=True)
    views = {
        name: tensor
        for name, tensor in zip(names, bound.tensors, strict=True)
        if tensor is not None and not tensor.is_contiguous and not tensor.dtype.is_quantised
    }
    extents = {name: size for name, size in sizes if size is not None}
    triton = TritonCall(jit, options, extents, views)
    made = Launch(name, backend.launcher(jit), bound, contract, facts, device, triton)
    if backend.limits is not None:
        try:
            # Shared memory is known when the kernel is compiled; the compiler refuses too much.
            check_launch(backend.limits, name, options["grid"], options["num_warps"], 0)
        except LaunchRejected as error:
            current().record_failure(error, made)
            raise
    return made


def prepare_call(
    name: str,
    function: Callable[..., None],
    args: Sequence[Tensor],
    contract: Demands,
    facts: Mapping[str, Any],
    device: str,
) -> Launch:
    """Bind a call of a library that launches on a GPU by itself to its arguments.

    `function` takes arrays where a kernel takes pointers. Raises LaunchRejected when `facts` break
    the contract.
    """
    _check(contract, facts, name, device)
    call = devices.backend_of(device).caller(name, function, [arg.extent_bytes for arg in args])
    return Launch(name, call, _bind(args), contract, facts, device)


def _check(contract: Demands, facts: Mapping[str, Any], kernel: str, device: str) -> None:
    current().record_check("contracts")
    try:
        contract.check(**facts)
    except LaunchRejected as error:
        current().record_refusal(error, kernel, device, facts, contract)
        raise


def _require_facts(
    kernel: str,
    device: str,
    passed: Mapping[str, Any],
    contract: Demands,
    facts: Mapping[str, Any],
) -> None:
    """Raises LaunchRejected where a parameter is given another number than the contract was checked
    with under its name: what is passed would be as unchecked as if there were no contract."""
    for name, fact in facts.items():
        if not isinstance(fact, _PLAIN_NUMBERS):
            continue
        # A constant of a Triton kernel is written in capitals.
        for parameter in (name, name.upper()):
            value = passed.get(parameter)
            if not isinstance(value, _NUMBERS) or value == fact:
                continue
            limit = f"its contract was checked with {fact}; pass what is among its facts"
            shown = value.item() if isinstance(value, np.number) else value
            wrong = WrongScalar(argument=name, value=shown, limit=limit)
            error = LaunchRejected(kernel, wrong)
            current().record_refusal(error, kernel, device, facts, contract)
            raise error


def compile_all(
    launches: Sequence[Launch],
    progress: OnProgress | None = None,
    is_over: Callable[[], bool] = never,
) -> bool:
    """Compile, or load from the cache, every kernel of `launches` before the first one runs.

    What is not compiled when the time `is_over` is left; whether nothing is.
    """
    is_whole = True
    for device in dict.fromkeys(launch.device for launch in launches if launch.jit is not None):
        backend = devices.backend_of(device)
        if backend.compiles:
            on_device = [launch for launch in launches if launch.device == device]
            is_whole &= backend.compile(on_device, progress, is_over)
    missing = {}
    for launch in launches:
        form = launch.function
        if isinstance(form, KernelForm) and not form.is_ready(launch.args):
            missing[form.kernel, form.is_shared, key_of(launch.args)] = launch, form
    if missing:
        is_whole &= _load_by_numba(list(missing.values()), progress, is_over)
    return is_whole


def _load_by_numba(
    wanted: Sequence[tuple[Launch, KernelForm]],
    progress: OnProgress | None,
    is_over: Callable[[], bool],
) -> bool:
    """Have numba load kernels, or compile them; whether it has all."""
    from hypocenter.device.cpu import code_cache
    from hypocenter.device.cpu.lang import kinds_of

    to_compile = []
    for done, (launch, form) in enumerate(wanted):
        if progress:
            progress(f"loading kernel {launch.kernel}", done / len(wanted))
        function, signature = form.dispatcher, kinds_of(launch.args)
        if signature in function.overloads:
            continue
        if code_cache.load(function, signature):
            log.info("%s loaded", launch.kernel)
        else:
            to_compile.append((launch, function))
    is_whole = not to_compile or (not is_over() and _compile(to_compile, progress, is_over))
    for launch, form in wanted:
        if kinds_of(launch.args) in form.dispatcher.overloads:
            form.compile_entry(launch.args)
    return is_whole


def _compile(
    wanted: Sequence[tuple[Launch, Any]],
    progress: OnProgress | None,
    is_over: Callable[[], bool],
) -> bool:
    """Compile kernels, each a launch and numba's dispatcher; whether all are."""
    from hypocenter.device.cpu.compile_together import compile_together
    from hypocenter.device.cpu.lang import kinds_of

    def tell(number: int) -> None:
        if progress:
            num_done = sum(kinds_of(launch.args) in made.overloads for launch, made in wanted)
            progress(f"compiling kernel {wanted[number][0].kernel}", num_done / len(wanted))

    started = time.perf_counter()
    pairs = [(function, launch.args) for launch, function in wanted]
    is_whole = compile_together(pairs, tell, is_over)
    names = ", ".join(launch.kernel for launch, _ in wanted)
    log.info("%s compiled in %.2f s", names, time.perf_counter() - started)
    if progress:
        progress("compiling kernels", 1.0)
    return is_whole


def start_threads() -> None:
    """Have the threads that run CPU kernels ready."""
    with _POOL:
        pool.start()


def run(launches: Sequence[Launch]) -> None:
    """Run prepared launches that belong to no plan, in order.

    Safe from several threads, as `walk` is: they take turns.
    """
    recorder = current()
    if launches:
        devices.will_run(launches[0].device, Writes(launches))
    with _POOL:
        for launch in launches:
            recorder.record_launch_outside_plans(launch, devices.stream_of(launch.device))
            try:
                launch.run()
            except Exception as error:
                recorder.record_failure(error, launch)
                raise


def run_within(native: NativeLaunches, launches: Sequence[Launch], place: int) -> None:
    """Run native launches that are part of a launch, whose numbers go to the address `place`.

    Raises LaunchRejected for one that failed.
    """
    with _POOL:
        num_done = native.run(place, 0)
    if num_done < len(launches):
        raise LaunchRejected(launches[num_done].kernel, Refused(what=KERNEL_FAILED))


def walk(launches: Sequence[tuple[int, Runs]], header: memoryview, place_word: int) -> None:
    """Run the launches of a plan; before each, `place_word` plus its number goes into `header`."""
    with _POOL:
        launch: Runs | None = None
        try:
            for number, launch in launches:
                header[CELL_PLACE] = place_word + number
                launch.run()
        except Exception as error:
            current().record_failure(error, launch if isinstance(launch, Launch) else None)
            raise


def native(launches: Sequence[tuple[int, Runs]]) -> NativeLaunches:
    """Numbered launches of compiled CPU kernels as one call; a CPU has no marks among them."""
    return NativeLaunches(
        [
            (number, launch.function, launch.args)
            for number, launch in launches
            if isinstance(launch, Launch)
        ]
    )


def walk_native(
    native: NativeLaunches, launches: Sequence[Launch], header: memoryview, place_word: int
) -> None:
    """As `walk`, in one call."""
    with _POOL:
        num_done = native.run(_place_in(header), place_word)
    if num_done < len(launches):
        error = LaunchRejected(launches[num_done].kernel, Refused(what=KERNEL_FAILED))
        current().record_failure(error, launches[num_done])
        raise error


def _place_in(header: memoryview) -> int:
    """The address of the cell that says where a plan is; looked up once for the many steps."""
    global _known_place
    if _known_place[0] is not header:
        _known_place = header, int(np.frombuffer(header, np.uint64)[CELL_PLACE:].ctypes.data)
    return _known_place[1]


def _bind(args: Sequence[Any]) -> BoundArguments:
    """A packed weight stands for several values."""
    values: list[Any] = []
    sizes: list[int | None] = []
    tensors: list[Tensor | None] = []
    for arg in args:
        if isinstance(arg, Tensor) and hasattr(arg.data, "parts"):
            of_parts = _bind(arg.data.parts)
            values += of_parts.values
            sizes += of_parts.sizes
            tensors += of_parts.tensors
            continue
        value: Any = arg
        size: int | None = None
        if isinstance(arg, Tensor):
            value, size = arg.data, arg.extent_bytes
        elif isinstance(arg, memory.PackedArray):
            value, size = arg.argument, arg.num_bytes
        values.append(value)
        sizes.append(size)
        tensors.append(arg if isinstance(arg, Tensor) else None)
    return BoundArguments(tuple(args), tuple(values), tuple(sizes), tuple(tensors))
