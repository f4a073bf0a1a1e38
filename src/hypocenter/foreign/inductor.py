"""Launches of kernels that torch.compile makes: Inductor makes them itself, past `triton.jit`.

A kernel of Inductor's has launchers, one for each configuration that is left: functions that it
writes as text, which work out the grid and call `runner(grid_0, grid_1, grid_2, ...)`. Such a
function is run here a second time with a runner that only notes the grid. So no formula of
Inductor's is written down here, and torch 2.6 to 2.13 are read alike
(torch/_inductor/runtime/triton_heuristics.py, `_gen_launcher_code`).
"""

from __future__ import annotations

import functools
import os
import sys
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FrameType, FunctionType
from typing import Any

from hypocenter.record.runtime_text import code_in

#: Told of a launch: kernel, arguments and constants by name, grid, and where it is made.
NoteLaunch = Callable[[Any, Mapping[str, Any], tuple[int, ...], "MadeIn"], object]
#: In the names of folders in which Inductor keeps what it has written.
_WRITTEN = "torchinductor_"
#: Calls between a launch and the line that asks for it.
_MAX_BETWEEN = 4


@dataclass(frozen=True, slots=True)
class MadeIn:
    """The line of Inductor's own file that makes a launch, and the parameters in its order."""

    file: str
    line: int
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Probe:
    """A launcher that launches nothing: the names of its arguments, and itself."""

    names: tuple[str, ...]
    ask: Callable[..., object]
    grids: list[tuple[int, ...]]


def watch_inductor(
    kind: Any,
    tell: NoteLaunch,
    attempt: Callable[..., None],
    lose: Callable[[str, str], None] = lambda kernel, reason: None,
) -> None:
    """Have each launch of `CachingAutotuner` noted right before it is made.

    The first one of a kernel is noted when it has been made, or has failed: until then its
    configuration is not known. `attempt` calls what may fail, and keeps the program out of it;
    `lose` is told of a launch that was made and cannot be noted: its kernel and why.
    """
    original = kind.run
    probes: weakref.WeakKeyDictionary[Any, _Probe] = weakref.WeakKeyDictionary()
    reloaded: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    def note(tuner: Any, *facts: Any) -> None:
        tell(_with_function(tuner, reloaded), *facts)

    @functools.wraps(original)
    def run(self: Any, *args: Any, **options: Any) -> Any:
        is_known, by = _is_settled(self), sys._getframe(1)
        if is_known:
            attempt(_note, self, self.launchers[0], probes, args, options, note, by)
        try:
            return original(self, *args, **options)
        except RuntimeError as error:
            # One of those that are measured has failed: which is not known, but they differ in
            # their tiles alone.
            launchers: list[Any] = getattr(self, "launchers", [])
            if code_in(f"{error}") is not None and len(launchers) > 1:
                attempt(_note, self, launchers[0], probes, args, options, note, by)
            raise
        finally:
            if not is_known and _is_settled(self):
                attempt(_note, self, self.launchers[0], probes, args, options, note, by)
            elif not is_known and hasattr(self, "fn") and sys.exc_info()[0] is None:
                lose(name_of(self), "which of its configurations was launched is not known")

    kind.run = run


def name_of(tuner: Any) -> str:
    """The kernel's name."""
    return str(getattr(tuner.fn, "__name__", "a kernel"))


def _with_function(tuner: Any, reloaded: weakref.WeakKeyDictionary[Any, Any]) -> Any:
    """Its kernel with the Python function, of which torch.compile dropped its own.

    That is so where a process of Inductor's compiled it: the function stays there, and torch reads
    the text again where it needs one (`prepare_for_pickle` and `_reload_kernel`).
    """
    jit, reload = tuner.fn, getattr(tuner, "_reload_kernel", None)
    if getattr(jit, "fn", jit) is not None or not callable(reload):
        return jit
    if tuner not in reloaded:
        reloaded[tuner] = reload().fn
    return reloaded[tuner]


def is_written_by_inductor(file: str) -> bool:
    """Whether a file is what torch.compile wrote and no line of anybody's."""
    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    return _WRITTEN in file or bool(folder and file.startswith(folder))


def _is_settled(tuner: Any) -> bool:
    """Whether one configuration is left, so that the next launch is of that one."""
    return len(getattr(tuner, "launchers", ())) == 1


def _note(
    tuner: Any,
    launcher: Any,
    probes: weakref.WeakKeyDictionary[Any, _Probe],
    args: tuple[Any, ...],
    options: Mapping[str, Any],
    note: Callable[..., None],
    by: FrameType | None,
) -> None:
    probe = probes.get(launcher)
    if probe is None:
        probe = probes[launcher] = _probe_of(launcher)
    given = {name: value for name, value in options.items() if name != "benchmark_run"}
    probe.grids.clear()
    probe.ask(*args, **given)
    [grid] = probe.grids
    bound = dict(zip(probe.names, args, strict=False)) | given
    made = {**_constants(tuner), **bound, **_configuration(launcher.config)}
    note(tuner, made, grid, _made_in(by, probe.names))


def _made_in(frame: FrameType | None, names: tuple[str, ...]) -> MadeIn:
    """The nearest line that Inductor wrote, from a frame on: hooks of others may lie between."""
    for _ in range(_MAX_BETWEEN):
        if frame is None:
            break
        if is_written_by_inductor(frame.f_code.co_filename):
            return MadeIn(frame.f_code.co_filename, frame.f_lineno, names)
        frame = frame.f_back
    return MadeIn("", 0, names)


def _probe_of(launcher: Any) -> _Probe:
    grids: list[tuple[int, ...]] = []

    def runner(*given: Any, **_: Any) -> None:
        grids.append(tuple(int(size) for size in given[:3]))

    code = launcher.__code__
    scope = {**launcher.__globals__, "runner": runner, "launch_enter_hook": None}
    names = code.co_varnames[: code.co_argcount]
    ask = FunctionType(code, scope, launcher.__name__, launcher.__defaults__, launcher.__closure__)
    return _Probe(names, ask, grids)


def _constants(tuner: Any) -> dict[str, Any]:
    """Numbers that Inductor compiled into the kernel; by name, or by the place of a parameter."""
    names = tuner.fn.arg_names
    found = {}
    for key, value in (tuner.triton_meta.get("constants") or {}).items():
        place = key[0] if isinstance(key, tuple) and len(key) == 1 else key
        found[names[place] if isinstance(place, int) else str(place)] = value
    return found


def _configuration(config: Any) -> dict[str, Any]:
    """The constants of a configuration, and how many warps it has."""
    return {**config.kwargs, "num_warps": config.num_warps}
