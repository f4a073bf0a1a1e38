"""Has Triton compile kernels before a launch needs them, by several processes at once.

What they compile lies in Triton's cache on disk, for this process and for those that follow. No
kernel is launched here, and none of ours is known.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from hypocenter.device.forms import Compilable, distinct
from hypocenter.device.gpu.compile_process import CompileOrder, hash_in_order
from hypocenter.device.helper_processes import helper
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


def compile_ahead(launches: Sequence[Compilable], progress: OnProgress | None = None) -> None:
    """Have the machine code of every form of `launches` ready: loaded, or compiled and loaded.

    A form that Triton refuses is named in the log: a launch of it will raise why.
    """
    _open_cache()
    forms = [_Form(launch) for launch in distinct(launches)]
    kernels = hash_in_order(form.launch.jit for form in forms)
    started = time.perf_counter()
    missing = [form for form in forms if not _load_kept(form)]
    if missing:
        _compile(missing, kernels, progress)
        names = ", ".join(dict.fromkeys(form.launch.kernel for form in missing))
        seconds = time.perf_counter() - started
        log.info("%d forms compiled in %.1f s: %s", len(missing), seconds, names)
    for number, form in enumerate(forms):
        if progress:
            progress("loading kernels", number / len(forms))
        _load(form)


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

    def refuse(*args: Any, **keywords: Any) -> Any:
        raise NotOnDisk

    def note(*args: Any, **keywords: Any) -> bool:
        form.key, form.data = keywords["key"], keywords["compile"]["specialization_data"]
        return bool(hook is not None and hook(*args, **keywords))

    source.make_ir, runtime.jit_cache_hook = refuse, note
    try:
        yield
    finally:
        source.make_ir, runtime.jit_cache_hook = make, hook


def _compile(
    missing: Sequence[_Form], kernels: Sequence[tuple[str, str]], progress: OnProgress | None
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
        while (
            running := [thread for thread in helpers if thread.is_alive()]
        ) and time.monotonic() < end:
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
        _only_ours.append(tempfile.TemporaryDirectory(prefix="hypo-triton-"))
        folder = Path(_only_ours[-1].name)
        log.warning("kernels are compiled at each start: %s; set HYPO_CACHE_DIR", problem)
    triton.knobs.cache.dir = str(folder)
    _opened.append(str(folder))


def kernel_folder() -> str:
    """Where the machine code is kept; empty before the first `compile_ahead`."""
    return _opened[0] if _opened else ""


_opened: list[str] = []
#: A folder that lasts as long as this process.
_only_ours: list[tempfile.TemporaryDirectory[str]] = []


def _write_problem(folder: Path) -> str:
    """Why nothing can be kept in `folder`; empty where it can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return ""
    except OSError as error:
        return f"{folder}: {error.strerror or error}"
