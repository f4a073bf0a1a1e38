"""The house stays small enough to hold in the head: files, functions, names, no import cycle."""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from layering import PACKAGE, imported_modules

PACKAGE_DIR = Path(__file__).parent.parent / "src" / "hypocenter"

# The design says about 400 and about 40; these are where "about" ends.
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60

#: `file` or `file:function` to the reason why its length serves clarity.
EXCEPTIONS: dict[str, str] = {}


def oversized(root: Path) -> Iterator[tuple[str, int]]:
    """(`file` or `file:function`, number of lines) of everything above the limits."""
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        text = path.read_text()
        num_lines = len(text.splitlines())
        if num_lines > MAX_FILE_LINES:
            yield name, num_lines
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                num_lines = (node.end_lineno or 0) - node.lineno + 1
                if num_lines > MAX_FUNCTION_LINES:
                    yield f"{name}:{node.name}", num_lines


def bad_names(root: Path) -> Iterator[str]:
    """Files and classes with a name that says nothing."""
    for path in sorted(root.rglob("*.py")):
        if path.stem in ("utils", "util", "helpers", "common", "misc"):
            yield path.relative_to(root).as_posix()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and (
                node.name.endswith(("Manager", "Helper")) or node.name.startswith("Base")
            ):
                yield f"{path.relative_to(root).as_posix()}:{node.name}"


def import_cycle(root: Path) -> list[str]:
    """Module names along one cycle of the imports that run at import time, or nothing."""
    graph: dict[str, set[str]] = {}
    for path in root.rglob("*.py"):
        name = path.relative_to(root).as_posix()
        module = _module_name(name)
        graph[module] = set()
        for node in _import_time_nodes(ast.parse(path.read_text())):
            graph[module] |= set(imported_modules(root, name, node)) - {module, PACKAGE}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def _module_name(name: str) -> str:
    parts = Path(name).with_suffix("").parts
    return ".".join([PACKAGE, *(parts[:-1] if parts[-1] == "__init__" else parts)])


def _import_time_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node
        yield from _import_time_nodes(node)


def test_files_and_functions_are_short() -> None:
    too_long = dict(oversized(PACKAGE_DIR))
    assert {name: n for name, n in too_long.items() if name not in EXCEPTIONS} == {}


def test_exceptions_are_still_needed_and_have_a_reason() -> None:
    too_long = dict(oversized(PACKAGE_DIR))
    assert [name for name in EXCEPTIONS if name not in too_long] == []
    assert all(len(reason) > 20 for reason in EXCEPTIONS.values())


def test_names_say_something() -> None:
    assert list(bad_names(PACKAGE_DIR)) == []


def test_no_import_cycle() -> None:
    assert import_cycle(PACKAGE_DIR) == []


@pytest.mark.parametrize("num_lines", [MAX_FUNCTION_LINES, MAX_FUNCTION_LINES + 1])
def test_a_long_function_is_found(tmp_path: Path, num_lines: int) -> None:
    (tmp_path / "a.py").write_text("def f():\n" + "    x = 1\n" * (num_lines - 1))
    assert dict(oversized(tmp_path)) == (
        {} if num_lines <= MAX_FUNCTION_LINES else {"a.py:f": num_lines}
    )


def test_a_long_file_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\n" * (MAX_FILE_LINES + 1))
    assert dict(oversized(tmp_path)) == {"a.py": MAX_FILE_LINES + 1}


def test_a_bad_name_is_found(tmp_path: Path) -> None:
    (tmp_path / "utils.py").write_text("class CacheManager: ...\n")
    assert list(bad_names(tmp_path)) == ["utils.py", "utils.py:CacheManager"]


def test_a_cycle_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("from hypocenter.b import x\n")
    (tmp_path / "b.py").write_text("def f():\n    from .a import y\n")
    assert import_cycle(tmp_path) == []
    (tmp_path / "b.py").write_text("from . import a\n")
    assert set(import_cycle(tmp_path)) == {"hypocenter.a", "hypocenter.b"}
