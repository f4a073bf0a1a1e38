"""Has Triton compile kernels before a launch needs them, by several processes at once.

What they compile lies in Triton's cache on disk, for this process and for those that follow. No
kernel is launched here, and none of ours is known.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import logging
import os
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from hypocenter.base import package
from hypocenter.base.own_folder import own_folder
from hypocenter.device.forms import Compilable, distinct
from hypocenter.device.gpu.compile_process import CompileOrder, hash_in_order
from hypocenter.device.helper_processes import helper, never
from hypocenter.device.triton_lang import triton
from hypocenter.settings.cache_folder import private_folder
from hypocenter.settings.config import OnProgress

log = logging.getLogger("hypocenter.gpu")

_PROCESS = "hypocenter.device.gpu.compile_process"
#: Each takes some 300 MB while it compiles.
_MAX_HELPERS = 16
#: Fewer kernels are compiled sooner than a process has started.
_MIN_KERNELS = 3
#: Between two looks at whether the helpers are done: a Ctrl-C is heard then.
_LOOK_SECONDS = 0.1
#: What all of them together may take.
_MOST_SECONDS = 600.0
#: Some thousands of forms.
_MAX_INDEX_BYTES = 32 << 20


class NotOnDisk(Exception):
    """Machine code would have to be compiled."""


class Compiled:
    """Counts what Triton makes ready to be launched: what it compiles and what it reads from disk.

    Others may have a hook of their own there; it is called as before.
    """

    def __init__(self) -> None:
        self.number = 0
        self._before = triton.knobs.runtime.jit_post_compile_hook
        triton.knobs.runtime.jit_post_compile_hook = self._note

    def _note(self, *args: Any, **keywords: Any) -> Any:
        self.number += 1
        return self._before(*args, **keywords) if self._before is not None else None


@dataclass(slots=True)
class _Form:
    """A launch whose machine code is wanted; `key` and `data` are what Triton calls it and writes
    down of it. `is_kept`: the cache has it; `is_spoiled`: what the cache has cannot be read."""

    launch: Compilable
    key: Any = None
    data: str = ""
    is_kept: bool = False
    is_spoiled: bool = False


class FormIndex:
    """The forms that processes before this one needed for the same, by a name that stands for it.

    With that a process loads them before it knows its launches: it lies in the folder of the
    kernels, and only says what to look for there. An index that is old or damaged costs time only.
    """

    def __init__(self, name: str) -> None:
        _open_cache()
        self._path = Path(kernel_folder()) / f"forms-{name}.json"
        self._known = self._read()
        #: Of these, what was there to be loaded.
        self._loaded: list[CompileOrder] = []
        self._was_short = False

    def load(self) -> int:
        """Load what it names and what lies on disk; how many. Nothing is compiled."""
        named = {(order.module, order.name): _kernel_of(order) for order in self._known}
        found = {names: jit for names, jit in named.items() if jit is not None}
        hash_in_order(found.values())
        for order in self._known:
            jit = found.get((order.module, order.name))
            if jit is not None and _preload(jit, order.data):
                self._loaded.append(order)
        return len(self._loaded)

    @property
    def is_whole(self) -> bool:
        """Whether all that was needed under this name is loaded, and no form was met beside it."""
        is_loaded = bool(self._known) and len(self._loaded) == len(self._known)
        return is_loaded and not self._was_short

    def note(self, forms: Sequence[_Form]) -> None:
        """These were needed: have the next process find them, with those that were loaded."""
        new = [order for form in forms if (order := _job(form)) is not None]
        if not new:
            return
        self._was_short = True
        self._loaded += new
        data = msgspec.json.encode(list({order.data: order for order in self._loaded}.values()))
        try:
            with tempfile.NamedTemporaryFile(dir=self._path.parent, delete=False) as file:
                file.write(data)
            os.replace(file.name, self._path)
        except OSError as error:
            log.info("the next start looks for each kernel: %s: %s", self._path, error.strerror)

    def _read(self) -> list[CompileOrder]:
        try:
            with self._path.open("rb") as file:
                data = file.read(_MAX_INDEX_BYTES)
            return msgspec.json.decode(data, type=list[CompileOrder])
        except (OSError, msgspec.DecodeError):
            return []


def _kernel_of(order: CompileOrder) -> Any:
    """A kernel of ours by its names; None for anything else."""
    if not order.module.startswith(f"{package.NAME}."):
        return None
    try:
        found = getattr(importlib.import_module(order.module), order.name, None)
    except ImportError:
        return None
    return found if hasattr(found, "preload") else None


def _preload(jit: Any, data: str) -> bool:
    """Have a form in this process and on the GPU if it lies on disk."""
    source = triton.compiler.ASTSource
    make, source.make_ir = source.make_ir, _refuse
    try:
        _ = jit.preload(data).run
    except Exception as error:  # it is asked for again, by its launch, and then told of
        log.debug("%s is not loaded ahead: %s", jit.__name__, _line(error))
        return False
    finally:
        source.make_ir = make
    return True


def _refuse(*args: Any, **keywords: Any) -> Any:
    raise NotOnDisk


def compile_ahead(
    launches: Sequence[Compilable],
    progress: OnProgress | None = None,
    index: FormIndex | None = None,
    is_over: Callable[[], bool] = never,
) -> bool:
    """Have the machine code of every form of `launches` ready: loaded, or compiled and loaded. What
    is not compiled when the time `is_over` is left; whether nothing is.

    A form that Triton refuses is named in the log: a launch of it will raise why. `index` gets to
    know them, where none is left.
    """
    _open_cache()
    forms = [_Form(launch) for launch in distinct(launches)]
    kernels = hash_in_order(form.launch.jit for form in forms)
    started = time.perf_counter()
    missing = [form for form in forms if not _load_kept(form)]
    if missing and not is_over():
        _compile(missing, kernels, progress, is_over)
        names = ", ".join(dict.fromkeys(form.launch.kernel for form in missing))
        seconds = time.perf_counter() - started
        log.info("%d forms compiled in %.1f s: %s", len(missing), seconds, names)
    num_left = 0
    for number, form in enumerate(forms):
        if progress:
            progress("loading kernels", number / len(forms))
        if is_over() and not form.is_kept and not _load_kept(form):
            num_left += 1
        else:
            _load(form)
    if index is not None and not num_left:
        index.note(forms)
    return not num_left


def _load_kept(form: _Form) -> bool:
    """Whether the machine code is in this process, or was read from disk; nothing is compiled."""
    with _compiling_nothing(form):
        try:
            _ask(form.launch)
        except NotOnDisk:
            return False
        except Exception as error:  # of a file that is damaged
            form.is_spoiled = True
            log.warning("%s in Triton's cache is damaged: %s", form.launch.kernel, _line(error))
            return False
    form.is_kept = True
    return True


def _ask(launch: Compilable) -> Any:
    """Triton's compiled kernel for a launch, which is not launched."""
    return launch.jit.run(*launch.args, warmup=True, **launch.options)


@contextlib.contextmanager
def _compiling_nothing(form: _Form) -> Iterator[None]:
    """Within, Triton raises NotOnDisk where it would compile, and `form.data` is what it was told.

    The first thing that it does for a kernel that is not in its cache is to read its Python.
    """
    source, runtime = triton.compiler.ASTSource, triton.knobs.runtime
    make, hook = source.make_ir, runtime.jit_cache_hook

    def note(*args: Any, **keywords: Any) -> bool:
        form.key, form.data = keywords["key"], keywords["compile"]["specialization_data"]
        return bool(hook is not None and hook(*args, **keywords))

    source.make_ir, runtime.jit_cache_hook = _refuse, note
    try:
        yield
    finally:
        source.make_ir, runtime.jit_cache_hook = make, hook


def _compile(
    missing: Sequence[_Form],
    kernels: Sequence[tuple[str, str]],
    progress: OnProgress | None,
    is_over: Callable[[], bool],
) -> None:
    """Have helpers compile them on disk, but for what these cannot be told of."""
    lines = {
        number: msgspec.json.encode(job)
        for number, form in enumerate(missing)
        if (job := _job(form)) is not None
    }
    waiting = deque(lines)

    def tell(num_running: int) -> None:
        if progress:
            share = 1 - (len(waiting) + num_running) / len(missing)
            progress(f"compiling {len(missing)} forms of kernels", max(share, 0.0))

    with contextlib.ExitStack() as stack:
        target = triton.runtime.driver.active.get_current_target()
        order = msgspec.json.encode(kernels).decode()
        words = (target.backend, str(target.arch), str(target.warp_size), order)
        environ = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
        helpers = [
            stack.enter_context(helper(_PROCESS, waiting, lines, words, environ))
            for _ in range(_num_helpers(len(waiting)))
        ]
        end = time.monotonic() + _MOST_SECONDS
        # One that hangs is ended, and what it was at is compiled here.
        while running := [thread for thread in helpers if thread.is_alive()]:
            if time.monotonic() >= end or is_over():
                break
            running[0].join(_LOOK_SECONDS)
            tell(len(running))


def _job(form: _Form) -> CompileOrder | None:
    """How a helper is told of it; None for what it could not be told of."""
    jit = form.launch.jit
    module, name = jit.fn.__module__, jit.fn.__qualname__
    if form.is_spoiled or not form.data:
        return None
    if getattr(sys.modules.get(module), name, None) is not jit:
        return None
    return CompileOrder(module, name, form.data)


def _num_helpers(num_kernels: int) -> int:
    if num_kernels < _MIN_KERNELS or not sys.executable:
        return 0
    return min(len(os.sched_getaffinity(0)), _MAX_HELPERS, num_kernels)


def _load(form: _Form) -> None:
    """Have the machine code on the GPU; what lies damaged on disk is compiled anew."""
    if not form.is_spoiled:
        try:
            _onto_gpu(form.launch)
            return
        except Exception as error:  # Triton and its passes raise whatever they like
            is_refused = isinstance(error, triton.runtime.errors.OutOfResources)
            if is_refused or not form.is_kept:
                _tell_of_refused(form, error)
                return
            kernel = form.launch.kernel
            log.warning("%s in Triton's cache does not load: %s", kernel, _line(error))
    try:
        _compile_anew(form)
        form.is_spoiled = False
    except Exception as error:
        _tell_of_refused(form, error)


def _compile_anew(form: _Form) -> None:
    for kernels, *_ in form.launch.jit.device_caches.values():
        kernels.pop(form.key, None)
    before = triton.knobs.compilation.always_compile
    triton.knobs.compilation.always_compile = True
    try:
        _onto_gpu(form.launch)
    finally:
        triton.knobs.compilation.always_compile = before


def _onto_gpu(launch: Compilable) -> None:
    kernel = _ask(launch)
    _ = kernel.run  # loads it


def _tell_of_refused(form: _Form, error: Exception) -> None:
    kernel = form.launch.kernel
    log.warning("%s cannot be launched in a form that may be met: %s", kernel, _line(error))


def _line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1] if lines else 'no reason given'}"[:300]


def _open_cache() -> None:
    """Have Triton keep what it compiles in TRITON_CACHE_DIR or else in our cache's folder, and
    where that cannot be written in a folder of this process."""
    if kernel_folder():
        return
    if named := os.environ.get("TRITON_CACHE_DIR"):
        folder, problem = Path(named), _write_problem(Path(named))
    else:
        found, problem = private_folder("triton")
        folder = found or Path()
    if problem:
        folder = _until_exit.enter_context(own_folder("hypo-triton-"))
        log.warning("kernels are compiled at each start: %s; set HYPO_CACHE_DIR", problem)
    triton.knobs.cache.dir = str(folder)
    _opened.append(str(folder))


def kernel_folder() -> str:
    """Where the machine code is kept; empty before the first `compile_ahead`."""
    return _opened[0] if _opened else ""


_opened: list[str] = []
#: A folder that lasts as long as this process.
_until_exit = contextlib.ExitStack()
atexit.register(_until_exit.close)


def _write_problem(folder: Path) -> str:
    """Why nothing can be kept in `folder`; empty where it can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return ""
    except OSError as error:
        return f"{folder}: {error.strerror or error}"
