"""The kernel of a recorded launch as a function: the installed one, or the bundle's own text.

The text of a bundle is somebody else's code; it is executed only where the caller allows that.
"""

from __future__ import annotations

import ast
import builtins
import hashlib
import importlib
import inspect
import linecache
import math
import sys
import textwrap
import tokenize
from collections.abc import Collection
from types import ModuleType
from typing import Any

from hypocenter.base import package
from hypocenter.base.errors import NotReplayed, SourceNotAllowed
from hypocenter.device.triton_lang import tl, triton
from hypocenter.record.bundle_index import BundleIndex
from hypocenter.record.catalogue import sources_of
from hypocenter.record.events import LaunchRecord, SourceRecord

#: Before the name of a source file: its text is a bundle's. Digits of the text's digest follow.
FROM_BUNDLE = "bundle:"
_DIGITS = 16

_MAX_FIRST_LINE = 1 << 20
_JIT = triton.runtime.jit.JITFunction


def kernel_of(
    index: BundleIndex,
    launch: LaunchRecord,
    *,
    allow_source: bool,
    edited: SourceRecord | None = None,
) -> Any:
    """The JITFunction of a recorded launch; `edited` has another text for the function of its id.

    Raises SourceNotAllowed when only the bundle's own text would do and `allow_source` is False,
    NotReplayed when the bundle has no text either.
    """
    record = index.sources.get(launch.source)
    if record is None:
        raise NotReplayed(launch.kernel, "has no source in the bundle")
    differing = _differing(index, record, set())
    if differing is None and edited is None:
        return _installed_function(record)
    if differing is not None and not allow_source:
        is_ours = is_project_kernel(record)
        raise SourceNotAllowed(record.function, differing if is_ours else "")
    return _fresh(index, record, {}, edited)


def installed_kernel(index: BundleIndex, launch: LaunchRecord) -> Any | None:
    """This installation's own kernel of that name, where its text differs from the recorded one.

    None when there is none, when the launch was one of it, or of a program that is not ours.
    """
    record = index.sources.get(launch.source)
    if record is None or not is_project_kernel(record):
        return None
    if _differing(index, record, set()) is None:
        return None
    for file in package.gpu_kernel_files():
        module = importlib.import_module(package.module_name(file))
        function = getattr(module, launch.function, None)
        if isinstance(function, _JIT):
            return function
    return None


def is_project_kernel(record: SourceRecord | None) -> bool:
    """Whether a kernel is this project's, which never casts a pointer."""
    return record is not None and package.recorded_kernel_module(record.file) is not None


def _differing(index: BundleIndex, record: SourceRecord, seen: set[str]) -> str | None:
    """The first function, of the kernel and all it calls, that is not installed as recorded."""
    seen.add(record.id)
    hashes = {key for source in index.sources.values() for key in source.callees}
    function = _installed_function(record)
    if function is None:
        return record.function
    # Its text names what it calls, and the hashes say which text that had, kept or not.
    own, *below = sources_of(function) or (record,)
    known = {source.id: source for source in below if source.id in hashes} | index.sources
    for key in record.callees:
        callee = known.get(key)
        if callee is None:
            return "a function"
        if key not in seen and (found := _differing(index, callee, seen)):
            return found
        if key not in own.callees:
            return callee.function
    return None


def _callees(index: BundleIndex, record: SourceRecord) -> list[SourceRecord]:
    return [index.sources[key] for key in record.callees if key in index.sources]


def _installed_function(record: SourceRecord) -> Any | None:
    """The function that the running installation has for `record`, when its text is the same."""
    module = _module(record.file)
    function = getattr(module, record.function, None)
    function = getattr(function, "fn", None) if not isinstance(function, _JIT) else function
    if not isinstance(function, _JIT) or _digest(record.text) != record.id:
        return None
    try:
        text = inspect.getsource(function.fn)
    except (OSError, SyntaxError, tokenize.TokenError):  # its file has changed meanwhile
        return None
    same = {text, textwrap.dedent(text), str(function.src)}
    return function if record.text in same else None


def recorded_file(name: str) -> str:
    """The name of a file as it was recorded, by the name that its text has here."""
    is_fresh = name.startswith(FROM_BUNDLE)
    return name[len(FROM_BUNDLE) + _DIGITS + 1 :] if is_fresh else name


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _module(file: str) -> ModuleType | None:
    """The module of a source file: one of this package's, or one that is loaded already."""
    if (name := package.recorded_kernel_module(file)) is not None:
        return importlib.import_module(name)
    loaded = (m for m in list(sys.modules.values()) if getattr(m, "__file__", None) == file)
    return next(loaded, None)


def _fresh(
    index: BundleIndex, record: SourceRecord, made: dict[str, Any], edited: SourceRecord | None
) -> Any:
    """The recorded text as a JITFunction of its own, with the functions that it calls."""
    if record.id in made:
        return made[record.id]
    if edited is not None and edited.id == record.id:
        record = edited
    names: dict[str, Any] = {"__name__": "bundle", "tl": tl, "triton": triton, "math": math}
    names["libdevice"] = getattr(tl.extra, "libdevice", None)
    names |= {name: tl.constexpr(value) for name, value in record.constants.items()}
    made[record.id] = None
    for callee in _callees(index, record):
        names[callee.function] = _fresh(index, callee, made, edited)
    # Each text has a file name of its own: two bundles may hold two versions of one file.
    file = f"{FROM_BUNDLE}{_digest(record.text)[:_DIGITS]}:{record.file}"
    text = _placed_text(record)
    tree = ast.parse(text, file)
    found = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == record.function]
    if len(found) != 1:
        raise NotReplayed(record.function, "is not defined by its source in the bundle")
    names |= aliases_of(found[0], names)
    found[0].decorator_list = []  # jit is put back below; an autotuner's choice is recorded
    shown = text.splitlines(keepends=True)
    # Triton and the findings read the text of a function by its file's name.
    linecache.cache[file] = (sum(map(len, shown)), None, shown, file)
    exec(compile(ast.Module([*found], []), file, "exec"), names)
    made[record.id] = _JIT(names[record.function])
    return made[record.id]


def aliases_of(function: ast.FunctionDef, known: Collection[str]) -> dict[str, Any]:
    """Names of somebody's module for Triton's own: `language` for tl, `load` for tl.load."""
    used: dict[str, set[str]] = {}
    for node in ast.walk(function):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            used.setdefault(node.value.id, set()).add(node.attr)
    bound = {
        node.id
        for node in ast.walk(function)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    bound |= {node.arg for node in ast.walk(function) if isinstance(node, ast.arg)}
    loaded = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
    found = {}
    for name in loaded - bound - set(known) - set(dir(builtins)):
        if name in used and all(hasattr(tl, part) for part in used[name]):
            found[name] = tl
        elif name not in used and hasattr(tl, name):
            found[name] = getattr(tl, name)
    return found


def _placed_text(record: SourceRecord) -> str:
    """The text at the line numbers that it had in its file."""
    if not 1 <= record.first_line <= _MAX_FIRST_LINE:
        raise NotReplayed(
            record.function, f"begins at line {record.first_line} of its file, says the bundle"
        )
    return "\n" * (record.first_line - 1) + textwrap.dedent(record.text)
