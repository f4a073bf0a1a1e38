"""The house stays small enough to hold in the head: files, functions, names, no import cycle."""

from __future__ import annotations

import ast
import graphlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from layering import PACKAGE, imported_modules

PACKAGE_DIR = Path(__file__).parent.parent / "src" / "hypocenter"

# The design says about 400 and about 40; these are where "about" ends.
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
MAX_MODULES = 20

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
    """Module names along one cycle of imports, or nothing.

    Imports in functions count, and those that only types need.
    """
    graph: dict[str, set[str]] = {}
    for path in root.rglob("*.py"):
        name = path.relative_to(root).as_posix()
        module = _module_name(name)
        graph[module] = set()
        if module == PACKAGE:
            continue  # it loads each name when it is first used
        for node in ast.walk(ast.parse(path.read_text())):
            graph[module] |= set(imported_modules(root, name, node)) - {module, PACKAGE}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def _module_name(name: str) -> str:
    parts = Path(name).with_suffix("").parts
    return ".".join([PACKAGE, *(parts[:-1] if parts[-1] == "__init__" else parts)])


def test_files_and_functions_are_short() -> None:
    too_long = dict(oversized(PACKAGE_DIR))
    assert {name: n for name, n in too_long.items() if name not in EXCEPTIONS} == {}


def test_exceptions_are_still_needed_and_have_a_reason() -> None:
    too_long = dict(oversized(PACKAGE_DIR))
    assert [name for name in EXCEPTIONS if name not in too_long] == []
    assert all(len(reason) > 20 for reason in EXCEPTIONS.values())


def test_names_say_something() -> None:
    assert list(bad_names(PACKAGE_DIR)) == []


def full_folders(root: Path) -> dict[str, int]:
    """Folders with more modules than a newcomer keeps in mind, `__init__.py` not counted."""
    sizes = Counter(
        path.relative_to(root).parent.as_posix()
        for path in root.rglob("*.py")
        if path.name != "__init__.py" and path.parent.name != "victims"
    )
    return {folder: number for folder, number in sizes.items() if number > MAX_MODULES}


def test_no_folder_is_full() -> None:
    assert full_folders(PACKAGE_DIR) == {}


def test_a_full_folder_is_found(tmp_path: Path) -> None:
    for number in range(MAX_MODULES + 1):
        assert full_folders(tmp_path) == {}
        (tmp_path / f"a{number}.py").write_text("")
    assert full_folders(tmp_path) == {".": MAX_MODULES + 1}


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
    (tmp_path / "b.py").write_text("import os\n")
    assert import_cycle(tmp_path) == []
    for text in (
        "from . import a\n",
        "def f():\n    from .a import y\n",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .a import y\n",
    ):
        (tmp_path / "b.py").write_text(text)
        assert set(import_cycle(tmp_path)) == {"hypocenter.a", "hypocenter.b"}
