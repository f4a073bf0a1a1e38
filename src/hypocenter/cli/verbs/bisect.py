"""`hypo bisect`: what of two models, two trees of sources or two routes explains a difference.

Each side runs in a process of its own and leaves a trace; exchanged are whole pieces: a tensor, a
key of the metadata, a file, the form of an op.
"""

from __future__ import annotations

import difflib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from hypocenter.base import package
from hypocenter.base.errors import EXIT_GATE, HypoError, UsageError
from hypocenter.base.own_folder import own_folder
from hypocenter.base.wording import count_text
from hypocenter.cli.output import show, show_json
from hypocenter.cli.progress import ProgressDisplay
from hypocenter.cli.tool_options import BisectOptions
from hypocenter.cli.trace_report import TraceFindings, examine, lines_of
from hypocenter.model.gguf.file import GGUFFile, open_gguf
from hypocenter.settings.routes import ROUTES, read_routes
from hypocenter.trace.comparing import OPS, compare
from hypocenter.trace.narrowing import NoTimeLeft, narrow
from hypocenter.trace.points import ModelTrace
from hypocenter.trace.reading import read_trace

#: Of the elements of a side's trace so many MiB are kept.
_DATA_MIB = 256
#: Seconds that one run may take at most.
_RUN_SECONDS = 600


@dataclass(frozen=True)
class Side:
    """What is run: a model, by the sources of a tree (None: these), in routes, with keys of the
    metadata in place of the file's."""

    model: Path
    tree: Path | None = None
    routes: dict[str, str] = field(default_factory=dict)
    keys: tuple[str, ...] = ()


class Bisected(msgspec.Struct, frozen=True):
    """What `hypo bisect` found: the first point and op, the pieces that explain it, and whether
    that was shown: with these of A, B gives what A gives, in all bits."""

    kind: str
    op: str
    point: str
    layer: int | None
    step: int
    pieces: tuple[str, ...]
    is_shown: bool
    num_differing: int
    num_runs: int
    found: TraceFindings
    detail: str = ""


def bisect(a: str, b: str, model: str, asked: BisectOptions) -> None:
    """Find and print; leaves with EXIT_GATE where the two differ. Raises UsageError."""
    with own_folder("hypo-bisect-") as folder, ExitStack() as stack:
        progress = stack.enter_context(ProgressDisplay(quiet=asked.quiet or asked.json))
        pair = _pair(a, b, Path(model), folder, stack)
        runs = _Runs(folder, asked, progress)
        traces = runs.of(pair.a), runs.of(pair.b)
        if not compare(traces[0], runs.of(pair.a)).is_equal:
            raise HypoError(f"{a} gives other bits each time it is run, so nothing can be narrowed")
        found = examine(*traces)
        result = None
        if found.diff.first is not None:
            result = _narrow(pair, runs, traces[0], found)
    if result is None:
        _tell_without_op(found, traces, as_json=asked.json)
        return
    if asked.json:
        show_json(result)
    else:
        show("\n".join([*_lines(result), *lines_of(found, *traces)]))
    sys.exit(EXIT_GATE)


def _tell_without_op(
    found: TraceFindings, traces: tuple[ModelTrace, ModelTrace], *, as_json: bool
) -> None:
    """Say that the two are equal, or leave with EXIT_GATE where no op of theirs differs, but what
    they were given does. Raises UsageError where nothing was compared."""
    diff = found.diff
    if diff.is_empty:
        raise UsageError("nothing can be compared: the two traces have no point in common")
    if as_json:
        show_json({"difference": None if diff.is_equal else found})
    elif diff.is_equal:
        show(f"no difference in {diff.num_points} points of {diff.num_steps} steps")
    else:
        show("\n".join(lines_of(found, *traces)))
    if not diff.is_equal:
        sys.exit(EXIT_GATE)


@dataclass(frozen=True)
class _Pair:
    """Two sides, the pieces in which they differ, and B with some of these as A has them."""

    kind: str
    a: Side
    b: Side
    pieces: tuple[str, ...]
    exchange: Callable[[Sequence[str]], Side]
    detail: Callable[[Sequence[str]], str] = lambda pieces: ""


def _narrow(pair: _Pair, runs: _Runs, of_a: ModelTrace, found: TraceFindings) -> Bisected:
    def explains(pieces: Sequence[str]) -> bool:
        return compare(of_a, runs.of(pair.exchange(pieces), may_be_late=True)).is_equal

    pieces, is_shown = narrow(pair.pieces, explains) if pair.pieces else ((), False)
    first = found.diff.first
    assert first is not None
    return Bisected(
        pair.kind,
        OPS[first.name].format(layer=first.layer),
        first.name,
        first.layer,
        first.step,
        pieces,
        is_shown,
        len(pair.pieces),
        runs.num_runs,
        found,
        pair.detail(pieces) if is_shown else "",
    )


def _lines(result: Bisected) -> list[str]:
    names = ", ".join(result.pieces[:8]) + " ..." * (len(result.pieces) > 8)
    lines = [f"the op that differs first: {result.op}"]
    if result.is_shown:
        others = result.num_differing - len(result.pieces)
        lines.append(f"what explains it: {result.kind} {names}")
        lines.append(
            f"shown in {result.num_runs} runs: with {'it' if len(result.pieces) == 1 else 'them'} "
            f"as in A, B gives what A gives in all bits; {count_text(others, 'other difference')} "
            "may stay"
        )
    elif result.num_differing and not result.pieces:
        num = result.num_differing
        lines.append(f"all that can be exchanged does not explain it: {num} of {result.kind}")
    elif result.pieces:
        lines.append(f"not narrowed further than to {result.kind} {names}")
    else:
        lines.append(f"no {result.kind} differs, so nothing can be exchanged")
    return lines + ([result.detail] if result.detail else [])


class _Runs:
    """Runs sides, each in a process of its own."""

    def __init__(self, folder: Path, asked: BisectOptions, progress: ProgressDisplay) -> None:
        self._folder, self._asked, self._progress = folder, asked, progress
        self._deadline = time.monotonic() + asked.budget
        self.num_runs = 0

    def of(self, side: Side, *, may_be_late: bool = False) -> ModelTrace:
        """The trace of a run; raises HypoError where it fails, NoTimeLeft with `may_be_late`."""
        if may_be_late and time.monotonic() > self._deadline:
            raise NoTimeLeft
        self.num_runs += 1
        self._progress(f"run {self.num_runs}", 0.0)
        out, asked = self._folder / f"{self.num_runs}.trace", self._asked
        routes = [f"{op}={form}" for op, form in side.routes.items()]
        command = [
            *package.module_command(package.NAME),
            *("run", str(side.model), "-p", asked.prompt, "-n", str(asked.num_tokens)),
            *("--temp", "0", "-q", "--trace", str(out), "--trace-data", str(_DATA_MIB)),
            *(("--route", ",".join(routes)) if routes else ()),
            *(word for key in side.keys for word in ("--override-kv", key)),
            *("--device", asked.device),
        ]
        environment = dict(os.environ, HYPO_RECORD="0")
        if side.tree is not None:
            environment["PYTHONPATH"] = str(side.tree)
        try:
            ended = subprocess.run(
                command, capture_output=True, env=environment, timeout=_RUN_SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            raise HypoError(
                f"a run took more than {_RUN_SECONDS} s; ask for fewer tokens"
            ) from None
        if ended.returncode or not out.exists():
            told = ended.stderr.decode(errors="replace").strip().splitlines()
            where = f" of {side.tree}" if side.tree else ""
            raise HypoError(
                f"the run{where} with {side.model} ended with {ended.returncode}: "
                f"{told[-1] if told else 'it said nothing'}"
            )
        return read_trace(out)


def _pair(a: str, b: str, model: Path, folder: Path, stack: ExitStack) -> _Pair:
    """What the two words mean; raises UsageError where they mean unlike things."""
    kinds = [_kind(word) for word in (a, b)]
    if kinds[0] != kinds[1]:
        raise UsageError(f"{a} is a {kinds[0]}, and {b} a {kinds[1]}; give two of one kind")
    if kinds[0] == "route":
        routes = [read_routes([] if word == "usual" else [word]) for word in (a, b)]
        return _of_routes(routes[0], routes[1], model)
    if kinds[0] == "tree of sources":
        return _of_trees(_package_above(Path(a)), _package_above(Path(b)), model, folder)
    files = [stack.enter_context(open_gguf(Path(word))) for word in (a, b)]
    return _of_models(files[0], files[1], folder)


def _kind(word: str) -> str:
    if Path(word).is_file():
        return "model"
    if Path(word).is_dir():
        return "tree of sources"
    if word == "usual" or "=" in word:
        return "route"
    raise UsageError(
        f"{word}: no such model or folder, nor a route as OP=FORM (or `usual` for none)"
    )


def _of_routes(a: dict[str, str], b: dict[str, str], model: Path) -> _Pair:
    usual = {op: forms[0] for op, forms in ROUTES.items()}
    both = {**usual, **a}, {**usual, **b}
    pieces = tuple(op for op in ROUTES if both[0][op] != both[1][op])

    def exchange(some: Sequence[str]) -> Side:
        return Side(model, routes={**b, **{op: both[0][op] for op in some}})

    return _Pair("form of", Side(model, routes=a), Side(model, routes=b), pieces, exchange)


def _package_above(folder: Path) -> Path:
    """The folder to look for the package in: a checkout's src, or site-packages."""
    for place in (folder / "src", folder):
        if (place / package.NAME / "__init__.py").is_file():
            return place.resolve()
    raise UsageError(f"{folder}: neither {package.NAME} nor src/{package.NAME} lies in it")


def _of_trees(a: Path, b: Path, model: Path, folder: Path) -> _Pair:
    of_both = [_files_of(tree) for tree in (a, b)]
    names = sorted({*of_both[0], *of_both[1]})
    pieces = tuple(name for name in names if of_both[0].get(name) != of_both[1].get(name))
    mixed = folder / "mixed"

    def exchange(some: Sequence[str]) -> Side:
        shutil.rmtree(mixed, ignore_errors=True)
        shutil.copytree(b / package.NAME, mixed / package.NAME, symlinks=False)
        for name in some:
            to = mixed / package.NAME / name
            if name in of_both[0]:
                to.parent.mkdir(parents=True, exist_ok=True)
                to.write_bytes(of_both[0][name])
            else:
                to.unlink()
        return Side(model, mixed)

    def detail(some: Sequence[str]) -> str:
        shown: list[str] = []
        for name in some:
            mine, other = (
                each.get(name, b"").decode(errors="replace").splitlines() for each in of_both
            )
            names = f"A/{name}", f"B/{name}"
            shown += difflib.unified_diff(mine, other, *names, n=1, lineterm="")
        return "\n".join(shown[:40])

    return _Pair("file", Side(model, a), Side(model, b), pieces, exchange, detail)


def _files_of(tree: Path) -> dict[str, bytes]:
    """The sources of a package by their paths below it."""
    root = tree / package.NAME
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*.py")}


def _of_models(a: GGUFFile, b: GGUFFile, folder: Path) -> _Pair:
    """Tensors of equal type and shape, and numbers and texts of the metadata, can be exchanged."""
    if len(a.shard_paths) > 1 or len(b.shard_paths) > 1:
        raise UsageError("models in several files cannot be compared piece by piece; join them")
    tensors = [
        name
        for name, info in b.tensors.items()
        if (of_a := a.tensors.get(name)) is not None
        and (of_a.dtype, of_a.shape) == (info.dtype, info.shape)
        and not np.array_equal(a.raw(name), b.raw(name))
    ]
    keys = {key: word for key in a.metadata if (word := _override(a, b, key)) is not None}
    mixed = folder / "mixed.gguf"

    def exchange(some: Sequence[str]) -> Side:
        mine = tuple(keys[name] for name in some if name in keys)
        taken = [name for name in some if name in b.tensors]
        if not taken:
            return Side(b.path, keys=mine)
        shutil.copyfile(b.path, mixed)
        with mixed.open("r+b") as file:
            for name in taken:
                file.seek(b.tensors[name].offset)
                file.write(a.raw(name).tobytes())
        return Side(mixed, keys=mine)

    pieces = (*keys, *tensors)
    return _Pair("tensor or key", Side(a.path), Side(b.path), pieces, exchange)


#: By which `--override-kv` gives a value.
_KINDS: dict[type, str] = {bool: "bool", int: "int", float: "float", str: "str"}


def _override(a: GGUFFile, b: GGUFFile, key: str) -> str | None:
    """A's value of a key as `--override-kv` has it, where B's is another; None where it is equal,
    or no plain number, flag or text of the model itself."""
    mine, other = a.metadata[key], b.metadata.get(key)
    kind = _KINDS.get(type(mine))
    if kind is None or mine == other or key.startswith("general."):
        return None
    shown: Any = repr(mine) if kind == "float" else str(mine).lower() if kind == "bool" else mine
    return f"{key}={kind}:{shown}"
