"""Sends every Triton launch of this process through the replay, in every configuration.

Puts itself in the place of JITFunction.run and Autotuner.run; heuristics go on as they are.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

from hypocenter.base import package
from hypocenter.base.dtypes import Array
from hypocenter.check.configurations import configuration_text, configurations_once
from hypocenter.check.report import CheckedLaunch
from hypocenter.check.tensors import TensorWatch, fill_undefined
from hypocenter.check.tuning import changed_by_tuning, finding_of, storage_bytes, tensors_in
from hypocenter.device.interpret.block_pointers import compile_problem
from hypocenter.device.triton_lang import triton
from hypocenter.replay.arguments import Argument
from hypocenter.replay.findings import (
    Coverage,
    Finding,
    FindingKind,
    Headroom,
    ReplayReport,
    Site,
)
from hypocenter.replay.replay import KernelFailed, StaticAssertFailed, replay
from hypocenter.replay.terms import GivenMemory, Observers, Schedule
from hypocenter.replay.undefined import results_in, without_harmless

CheckOutput = CheckedLaunch | Finding | Headroom

#: Share of what is left of the budget that one launch may take.
_SHARE = 0.5
_LEAST_SECONDS = 0.2
#: Tensors of a launch that are copied, so that it can be made again with other numbers in them.
_MAX_COPIED_BYTES = 256 << 20


class Launches:
    """Replays launches as they come and writes what each of them shows, once per place."""

    def __init__(self, budget_seconds: float, write: Callable[[CheckOutput], None]) -> None:
        self.watch = TensorWatch(self.write_finding)
        self._write = write
        self._left = budget_seconds
        self._configuration: str | None = None
        self._was_skipped = False
        #: Of the last launch: who made it, whether it ran whole, and whether it worked in place.
        self._site: Site | None = None
        self._is_complete = self._is_in_place = False
        self._seen: set[Any] = set()
        self._tuned: dict[Any, Any] = {}
        #: Is told of each launch: kernel, line, its arguments, and what became of its tensors.
        self.on_launch: Callable[..., None] = lambda *told: None

    def install(self) -> None:
        """From now on every launch of this process comes here."""
        launches = self

        def run(self: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> Any:
            if warmup:
                return _Compiled(self, kwargs)
            with _plain_torch():
                launches.launch(self, args, grid, kwargs)
            return None

        def tune(self: Any, *args: Any, **kwargs: Any) -> None:
            launches.tune(self, args, kwargs)

        # A file that asks for Triton's own interpreter would get past the replay.
        triton.knobs.runtime.interpret = False
        triton.runtime.jit.JITFunction.run = run
        triton.runtime.autotuner.Autotuner.run = tune

    def launch(self, jit: Any, args: tuple[Any, ...], grid: Any, kwargs: dict[str, Any]) -> None:
        """Replay one launch of `jit`."""
        site = _launch_site()
        for hook in getattr(jit, "pre_run_hooks", ()):
            hook(*args, **kwargs)
        known = {k: v for k, v in kwargs.items() if k in jit.arg_names}
        arguments = dict(inspect.signature(jit.fn).bind_partial(*args, **known).arguments)
        size = _Size(grid)
        started = time.thread_time()
        self._was_skipped = False

        def once(*, headroom: bool = False) -> tuple[ReplayReport, tuple[Argument, ...]]:
            done: list[Argument] = []
            report = replay(
                jit,
                size,
                arguments,
                schedule=Schedule(
                    budget_seconds=max(self._left * _SHARE, _LEAST_SECONDS),
                    num_warps=kwargs.get("num_warps"),
                ),
                given=GivenMemory(initialised=self.watch.flags, find_storage=self.watch.find),
                observers=Observers(done.extend),
                headroom=headroom,
            )
            return report, tuple(done)

        rewind = self._snapshot(arguments) if self._may_read_undefined(arguments) else None
        try:
            report, done = once(headroom=self._is_new(jit, arguments))
            findings: Sequence[Finding] = report.findings
            if rewind is not None and report.coverage.is_complete:
                findings = self._that_count(report.findings, done, arguments, rewind, once)
        except StaticAssertFailed as error:
            if self._configuration is None:
                raise
            self._was_skipped = True
            nothing = Coverage(0, 0, 0, 0.0)
            self._write(
                CheckedLaunch(
                    jit.__name__, size.value, nothing, site, self._configuration, str(error)
                )
            )
            return
        except KernelFailed as error:
            x, y, z = size.value
            nothing = Coverage(0, x * y * z, 0, 0.0)
            self._write(
                CheckedLaunch(
                    jit.__name__,
                    size.value,
                    nothing,
                    site,
                    self._configuration,
                    stopped=f"not run to its end: {error.problem}",
                )
            )
            raise
        finally:
            self._left -= time.thread_time() - started
        for finding in findings:
            self.write_finding(
                msgspec.structs.replace(
                    finding, configuration=self._configuration, launched_at=site
                )
            )
        for spare in report.headroom:
            self._once((spare.kernel, spare.axis, spare.origin), spare)
        self._write(
            CheckedLaunch(
                jit.__name__,
                size.value,
                report.coverage,
                site,
                self._configuration,
                problem=compile_problem() if report.has_block_pointers else "",
            )
        )
        self._site, self._is_complete = site, report.coverage.is_complete
        self._is_in_place = any(
            argument.was_updated or (argument.was_read and argument.was_written)
            for argument in done
        )
        self.on_launch(jit.__name__, site, arguments, done)
        self.watch.note_launch(
            jit.__name__, self._configuration, site, done, report.coverage.is_complete
        )

    def _may_read_undefined(self, arguments: Mapping[str, Any]) -> bool:
        """Whether a launch is given memory that nobody has written, and little enough to copy."""
        storages = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for tensor in tensors_in(arguments).values()
        }
        flags = (self.watch.flags.get(address) for address in storages)
        is_small = sum(storages.values()) <= _MAX_COPIED_BYTES
        return is_small and any(known is not None and not known.all() for known in flags)

    def _that_count(
        self,
        findings: Sequence[Finding],
        done: tuple[Argument, ...],
        arguments: dict[str, Any],
        rewind: Callable[[], None],
        once: Callable[[], tuple[ReplayReport, tuple[Argument, ...]]],
    ) -> Sequence[Finding]:
        """Without reads of undefined memory that reach no result.

        The launch is made again with other numbers there; the tensors are then as it left them.
        """
        tensors = tensors_in(arguments)
        named = {f.argument for f in findings if f.kind == FindingKind.UNINITIALISED_READ}
        named |= {each.name for each in done if each.was_written or each.store_seen}
        if not named <= tensors.keys():
            return findings

        def results(numbers: Mapping[str, float | None]) -> list[Any] | None:
            rewind()
            for name, number in numbers.items():
                tensor = tensors[name]
                flags = self.watch.flags[tensor.untyped_storage().data_ptr()]
                fill_undefined(storage_bytes(tensor), tensor.dtype, flags, number)
            try:
                report, left = once()
            except KernelFailed:
                return None
            told = sorted(
                (each.kind, each.line, each.argument or "", each.num_lanes)
                for each in report.findings
                if each.kind != FindingKind.UNINITIALISED_READ
            )
            return [*results_in(left), told] if report.coverage.is_complete else None

        put_back = self._snapshot(arguments)
        try:
            return without_harmless(findings, done, results)
        finally:
            put_back()

    def tune(self, tuner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run an autotuned kernel in every configuration that its author does not rule out.

        Those that differ for the compiler alone (num_warps, num_stages) run the same programs, and
        are run once. The tensors are put back between them. A launch like an earlier one takes the
        last configuration alone, as tuning would take the best.
        """
        tuner.nargs = dict(zip(tuner.arg_names, args, strict=False))
        every = {**tuner.nargs, **kwargs}
        key = (id(tuner), *(_signature(every[name]) for name in sorted(every) if name != "grid"))
        configs = tuner.configs
        if len(configs) > 1 and tuner.early_config_prune:
            configs = tuner.early_config_prune(configs, tuner.nargs, **kwargs) or configs
        known = self._tuned.get(key)
        chosen = [known] if known else configurations_once(tuner, configs, every)
        is_tuned = known is None and len(configs) > 1
        restore = self._snapshot(every) if is_tuned else lambda: None

        def launch(same: list[Any]) -> None:
            config = same[-1]
            full = {**tuner.nargs, **kwargs, **config.all_kwargs()}
            tuner.pre_hook(full, reset_only=True)
            if config.pre_hook is not None:
                config.pre_hook(full)
            with self._in_configuration(configuration_text(same)):
                tuner.fn.run(*args, **kwargs, **config.all_kwargs())

        def run(same: list[Any]) -> bool:
            restore()
            launch(same)
            return not self._was_skipped

        compiled = [same for same in chosen if run(same)]
        if compiled and self._was_skipped:  # the results must be those of a launch that happened
            run(compiled[-1])
        if compiled and is_tuned and self._is_in_place and self._is_benchmarked(tuner, every):
            self._tune_twice(
                tuner, compiled[-1], args, kwargs, restore, lambda: launch(compiled[-1])
            )
        if compiled:
            self._tuned[key] = compiled[-1]
            tuner.best_config = compiled[-1][-1]
        tuner.nargs = None

    def _is_benchmarked(self, tuner: Any, every: Mapping[str, Any]) -> bool:
        """Whether Triton would run benchmarks for this launch, after those that came before."""
        values = (_signature(every[name]) for name in tuner.keys if name in every)
        types = (str(v.dtype) for n, v in every.items() if n != "grid" and hasattr(v, "dtype"))
        key = ("benchmarked", id(tuner), *values, *types)
        is_new = key not in self._seen
        self._seen.add(key)
        return is_new

    def _tune_twice(
        self,
        tuner: Any,
        same: list[Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        restore: Callable[[], None],
        launch: Callable[[], None],
    ) -> None:
        """Report what one benchmark before the launch would change; the launch itself stays."""
        config = same[-1]
        full = {**tuner.nargs, **kwargs, **config.all_kwargs()}

        def benchmark() -> None:
            if config.pre_hook is not None:
                config.pre_hook(full)
            tuner.pre_hook(full)
            tuner.fn.run(*args, **kwargs, **config.all_kwargs())
            tuner.post_hook(full, exception=None)

        write, self._write = self._write, lambda record: None
        seen = set(self._seen)
        try:
            with self._in_configuration(configuration_text(same)):
                found = changed_by_tuning(full, restore, launch, benchmark)
        finally:
            self._write, self._seen = write, seen
        if found is not None and self._is_complete:
            kernel = tuner.base_fn
            name = configuration_text(same)
            self.write_finding(finding_of(kernel.__name__, kernel, found, name, self._site))

    def write_finding(self, finding: Finding) -> None:
        """Write a finding unless its like has been written for this configuration."""
        place = (finding.file, finding.line) if finding.sites else finding.launched_at
        key = (finding.kind, finding.kernel, finding.operation, finding.argument, place)
        self._once((*key, finding.configuration), finding)

    def _once(self, key: Any, record: CheckOutput) -> None:
        if key not in self._seen:
            self._seen.add(key)
            self._write(record)

    def _is_new(self, jit: Any, arguments: dict[str, Any]) -> bool:
        """Whether int32 headroom is still to be measured for these strides and constants."""
        numbers = {n: v for n, v in arguments.items() if isinstance(v, int | float | str)}
        key = ("headroom", jit.__name__, self._configuration, tuple(sorted(numbers.items())))
        if key in self._seen:
            return False
        self._seen.add(key)
        if self._left <= 0:
            why = "the budget was spent before; --budget SECONDS gives more"
            spare = Headroom(jit.__name__, 0, None, 0, gave_up=why)
            self._once((spare.kernel, spare.axis, None), spare)
            return False
        return True

    @contextlib.contextmanager
    def _in_configuration(self, name: str) -> Iterator[None]:
        before, self._configuration = self._configuration, name
        try:
            yield
        finally:
            self._configuration = before

    def _snapshot(self, arguments: dict[str, Any]) -> Callable[[], None]:
        """A function that puts the bytes of the tensors, and what is known of them, back."""
        kept: list[tuple[Array, Array]] = []
        with _plain_torch():
            for tensor in tensors_in(arguments).values():
                raw = storage_bytes(tensor)
                kept.append((raw, raw.copy()))
                flags = self.watch.flags.get(tensor.untyped_storage().data_ptr())
                if flags is not None:
                    kept.append((flags, flags.copy()))

        def restore() -> None:
            for live, copy in kept:
                np.copyto(live, copy)

        return restore


class _Size:
    """The grid of a launch, remembered when it is computed from the arguments."""

    def __init__(self, grid: Any) -> None:
        self._grid = grid
        self.value = (0, 0, 0)

    def __call__(self, bound: Any) -> tuple[int, ...]:
        given = self._grid(bound) if callable(self._grid) else self._grid
        sizes = (given,) if isinstance(given, int) else tuple(int(size) for size in given)
        x, y, z = (*sizes, 1, 1, 1)[:3]
        self.value = (x, y, z)
        return sizes


class _Compiled:
    """Stands for what `kernel.warmup(...)` compiles: launches again, and knows no registers."""

    n_regs, n_spills, n_max_threads = 32, 0, 1024

    def __init__(self, jit: Any, options: dict[str, Any]) -> None:
        self._jit = jit
        self._options = options

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            known = set(self._jit.arg_names[: len(args)])
            options = {name: v for name, v in self._options.items() if name not in known}
            self._jit.run(*args, grid=grid, **{**options, **kwargs})

        return launch

    def _init_handles(self) -> None:
        pass

    @property
    def metadata(self) -> Any:
        return type("metadata", (), {"shared": 0, "num_warps": self._options.get("num_warps", 4)})


@contextlib.contextmanager
def _plain_torch() -> Iterator[None]:
    """Torch as it is: tensors say where they really are, and nothing is watched."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


def _signature(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), str(value.dtype), value.stride())
    return value if isinstance(value, int | float | str) else type(value).__name__


def _launch_site() -> Site | None:
    """The nearest line outside installed packages and this one; else the nearest outside Triton."""
    import linecache

    skip = (
        str(triton.__file__).rsplit("__init__", 1)[0],
        str(torch.__file__).rsplit("__init__", 1)[0],
        f"{package.FOLDER}{os.sep}",
        "<",
    )
    frames = []
    step = sys._getframe(1).f_back
    while step is not None:
        if not step.f_code.co_filename.startswith(skip):
            frames.append(step)
        step = step.f_back
    if not frames:
        return None
    own = [frame for frame in frames if "site-packages" not in frame.f_code.co_filename]
    frame = (own or frames)[0]
    name, line = frame.f_code.co_filename, frame.f_lineno
    return Site(name, line, frame.f_code.co_name, linecache.getline(name, line).strip())
