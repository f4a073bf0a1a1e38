"""The house stays small enough to hold in the head: files, functions, no import cycle."""

from __future__ import annotations

import ast
import graphlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from layering import PACKAGE, imported_modules
from repository import PACKAGE_DIR

MAX_FILE_LINES, MIN_FILE_LINES = 600, 40
#: Of a function: a signature of 26 arguments is no complexity, so lines are not counted.
MAX_STATEMENTS = 40
MAX_NESTING = 4
MAX_MODULES = 24

#: Files above or below the limits, and why their length serves the reader.
EXCEPTIONS = {
    "foreign/startup/sitecustomize.py": "it is read by Pythons that know little of today's syntax",
    "device/triton_lang.py": "the one file outside kernels that imports Triton",
    "foreign/planted_gpu.py": "a program of anybody's, as short as such a program is",
    "kernels/mark_gpu.py": "a kernel has a file of its own, beside its op",
    "model/text/chat_frames.py": "what two processes say to each other, of which neither owns it",
    "model/parts/part.py": "facts of a model name their part: it stands below them",
    "model/recurrent/state_net.py": "the one place that knows both nets of layers with a state",
    "record/not_recording.py": "the recorder's other half: what stands there when nothing records",
    "record/recorder.py": "one class, with a method for each thing that an engine tells it",
    "refusals.py": "a struct for each demand that can be broken; all of them are one union",
    "replay/memory.py": "one memory that checks each access; the checks share its state",
    "wording.py": "the one place that makes a plural",
}
#: `# fmt: skip` in the package: lower it when one goes.
NUM_SKIPS = 145
#: Kinds of files that say what they have to say in a few lines.
_SHORT = ("__init__.py", "__main__.py")

_BLOCKS = (
    ast.If, ast.For, ast.While, ast.With, ast.Try, ast.Match, ast.FunctionDef,
    ast.AsyncFor, ast.AsyncWith, ast.AsyncFunctionDef,
)  # fmt: skip


def num_statements(function: ast.AST) -> int:
    """Statements in a function, docstrings not counted."""
    return sum(
        isinstance(node, ast.stmt)
        and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        for node in ast.walk(function)
        if node is not function
    )


def nesting(node: ast.AST, depth: int = 0) -> int:
    """How many blocks stand around the innermost statement of `node`; `elif` is no block more."""
    deepest = depth
    for child in ast.iter_child_nodes(node):
        is_elif = isinstance(node, ast.If) and isinstance(child, ast.If) and node.orelse == [child]
        is_block = isinstance(child, _BLOCKS) and not is_elif
        deepest = max(deepest, nesting(child, depth + is_block))
    return deepest


def oversized(root: Path) -> Iterator[tuple[str, str]]:
    """(`file` or `file:function`, what is beyond the limits)."""
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        text = path.read_text()
        num_lines = len(text.splitlines())
        is_short = path.name in _SHORT or path.parent.name == "victims"
        if num_lines > MAX_FILE_LINES or (num_lines < MIN_FILE_LINES and not is_short):
            yield name, f"{num_lines} lines"
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                if (number := num_statements(node)) > MAX_STATEMENTS:
                    yield f"{name}:{node.name}", f"{number} statements"
                if (depth := nesting(node)) > MAX_NESTING:
                    yield f"{name}:{node.name}", f"{depth} blocks deep"


def skips(root: Path) -> Iterator[tuple[str, bool]]:
    """(`file:line` of each `# fmt: skip`, whether it keeps a table or a kernel's signature)."""
    for path in sorted(root.rglob("*.py")):
        text = path.read_text()
        if "# fmt: skip" not in text:
            continue
        name = path.relative_to(root).as_posix()
        is_kernel = path.stem.endswith(("_gpu", "_cpu")) or name.startswith("device/cpu/")
        tree = ast.parse(text)
        allowed: set[int] = set()
        for statement in tree.body:
            is_table = isinstance(statement, ast.Assign | ast.AnnAssign) and isinstance(
                statement.value, ast.Dict | ast.Tuple | ast.List
            )
            if is_table:
                allowed |= set(range(statement.lineno, (statement.end_lineno or 0) + 1))
        for node in ast.walk(tree):
            if is_kernel and isinstance(node, ast.FunctionDef):
                allowed |= set(range(node.lineno, node.body[0].lineno))
        for number, line in enumerate(text.splitlines(), 1):
            if "# fmt: skip" in line:
                yield f"{name}:{number}", number in allowed


def test_the_formatter_is_skipped_for_tables_and_signatures_of_kernels() -> None:
    found = list(skips(PACKAGE_DIR))
    assert [where for where, is_allowed in found if not is_allowed] == []
    assert len(found) == NUM_SKIPS


def test_a_needless_skip_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("A = {1: 2}  # fmt: skip\nb = f(1)  # fmt: skip\n")
    signature = "def f(a,\n      b):  # fmt: skip\n    return g(a)  # fmt: skip\n"
    (tmp_path / "b.py").write_text(signature)
    (tmp_path / "b_gpu.py").write_text(signature)
    assert [where for where, is_allowed in skips(tmp_path) if not is_allowed] == [
        "a.py:2", "b.py:2", "b.py:3", "b_gpu.py:3",
    ]  # fmt: skip


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


@pytest.fixture(scope="module")
def beyond() -> dict[str, str]:
    """What of the package is beyond the limits."""
    return dict(oversized(PACKAGE_DIR))


def test_files_and_functions_have_a_readable_size(beyond: dict[str, str]) -> None:
    assert {name: what for name, what in beyond.items() if name not in EXCEPTIONS} == {}


def test_exceptions_are_still_needed_and_have_a_reason(beyond: dict[str, str]) -> None:
    assert [name for name in EXCEPTIONS if name not in beyond] == []
    assert all(len(reason) > 20 for reason in EXCEPTIONS.values())


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


def test_a_long_function_is_found(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    lines = ['    """It says what it does."""\n', *["    x = 1\n"] * (MAX_STATEMENTS)]
    rest = "y = 1\n" * MIN_FILE_LINES
    file.write_text("def f(\n    a: int,\n) -> None:\n" + "".join(lines) + rest)
    assert dict(oversized(tmp_path)) == {}
    file.write_text("def f() -> None:\n" + "".join(lines) + "    x = 2\n" + rest)
    assert dict(oversized(tmp_path)) == {"a.py:f": f"{MAX_STATEMENTS + 1} statements"}


@pytest.mark.parametrize("depth", [MAX_NESTING, MAX_NESTING + 1])
def test_a_deep_function_is_found(tmp_path: Path, depth: int) -> None:
    blocks = "".join(f"{'    ' * (level + 1)}while True:\n" for level in range(depth))
    chosen = "    if a:\n        x = 1\n" + "    elif b:\n        x = 2\n" * 6
    body = f"def f() -> None:\n{chosen}{blocks}{'    ' * (depth + 1)}x = 1\n"
    (tmp_path / "a.py").write_text(body + "y = 1\n" * MIN_FILE_LINES)
    found = {} if depth <= MAX_NESTING else {"a.py:f": f"{depth} blocks deep"}
    assert dict(oversized(tmp_path)) == found


@pytest.mark.parametrize("num_lines", [MIN_FILE_LINES - 1, MAX_FILE_LINES + 1])
def test_a_file_of_an_odd_length_is_found(tmp_path: Path, num_lines: int) -> None:
    (tmp_path / "a.py").write_text("x = 1\n" * num_lines)
    assert dict(oversized(tmp_path)) == {"a.py": f"{num_lines} lines"}


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
