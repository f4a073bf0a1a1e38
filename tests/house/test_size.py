"""The house stays small enough to hold in the head: files, functions, no import cycle."""

from __future__ import annotations

import ast
import graphlib
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from layering import IMPORTING, PACKAGE, imported_modules
from parsed import nodes_of, tree_of
from repository import PACKAGE_DIR

#: Of a function: a signature of 26 arguments is no complexity, so lines are not counted.
MAX_STATEMENTS = 40
MAX_NESTING = 4
MAX_PARAMETERS = 7

#: Lines that a room may have, all its folders together. Who raises one says why in the commit.
BUDGETS = {
    "base": 2_100,
    "settings": 1_850,
    "wire": 520,
    "conversation": 2_615,
    "record": 5_995,
    "order": 600,
    "trace": 720,
    "coredump": 2_800,
    "watch": 3_050,
    "contracts": 900,
    "device": 24_530,
    "foreign": 10_590,
    "replay": 6_950,
    "check": 5_065,
    "doctor": 25_325,
    "kernels": 20_695,
    "hub": 1_650,
    "model": 14_715,
    "engine": 11_000,
    "worker": 1_050,
    "verify": 5_075,
    "peers": 1_250,
    "server": 15_360,
    "ray": 650,
    "cli": 9_825,
    "audit": 1_900,
    "evals": 270,
    "package": 140,
}
#: How far a budget may lie above what is there: one that nothing presses against is none.
MAX_ROOM_LEFT = 0.15
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
    """(`file:function`, what is beyond the limits)."""
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        for node in nodes_of(tree_of(path.read_text()), ast.FunctionDef, ast.AsyncFunctionDef):
            if (number := num_statements(node)) > MAX_STATEMENTS:
                yield f"{name}:{node.name}", f"{number} statements"
            if (depth := nesting(node)) > MAX_NESTING:
                yield f"{name}:{node.name}", f"{depth} blocks deep"


def lines_of_rooms(root: Path) -> dict[str, int]:
    """Lines of each room, all its folders together."""
    sizes: Counter[str] = Counter()
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).parts
        sizes["package" if len(parts) == 1 else parts[0]] += len(path.read_text().splitlines())
    return dict(sizes)


def beyond_budget(sizes: dict[str, int], budgets: dict[str, int]) -> dict[str, str]:
    """Rooms whose lines and budget do not fit each other, with what is wrong."""
    wrong = {}
    for room in sizes.keys() | budgets.keys():
        size, budget = sizes.get(room, 0), budgets.get(room, 0)
        if size > budget:
            wrong[room] = f"{size} lines, and its budget is {budget}"
        elif budget > 100 and size < budget * (1 - MAX_ROOM_LEFT):
            wrong[room] = f"{size} lines, and a budget of {budget} is too loose"
    return wrong


def skips(root: Path) -> Iterator[tuple[str, bool]]:
    """(`file:line` of each `# fmt: skip`, whether it keeps a table or a kernel's signature)."""
    for path in sorted(root.rglob("*.py")):
        text = path.read_text()
        if "# fmt: skip" not in text:
            continue
        name = path.relative_to(root).as_posix()
        is_kernel = path.stem.endswith(("_gpu", "_cpu")) or name.startswith("device/cpu/")
        tree = tree_of(text)
        allowed: set[int] = set()
        for statement in tree.body:
            is_table = isinstance(statement, ast.Assign | ast.AnnAssign) and isinstance(
                statement.value, ast.Dict | ast.Tuple | ast.List
            )
            if is_table:
                allowed |= set(range(statement.lineno, (statement.end_lineno or 0) + 1))
        for node in nodes_of(tree, ast.FunctionDef):
            if is_kernel:
                allowed |= set(range(node.lineno, node.body[0].lineno))
        for number, line in enumerate(text.splitlines(), 1):
            if "# fmt: skip" in line:
                yield f"{name}:{number}", number in allowed


def num_skips_before() -> int | None:
    """Skips in the commit that this tree grows from; None where git knows of none.

    That is where the branch left main, and on main itself the commit before.
    """

    def git(*words: str) -> str:
        command = ["git", "-C", str(PACKAGE_DIR), *words]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    head = git("rev-parse", "HEAD")
    bases = (git("merge-base", "HEAD", main) for main in ("origin/main", "main"))
    base = next((commit for commit in bases if commit and commit != head), "") or git(
        "rev-parse", "--verify", "--quiet", "HEAD~1"
    )
    if not base:
        return None
    lines = git("grep", "-h", "-c", "# fmt: skip", base, "--", ".").splitlines()
    return sum(map(int, lines))


def test_the_formatter_is_skipped_for_tables_and_signatures_of_kernels() -> None:
    found = list(skips(PACKAGE_DIR))
    assert [where for where, is_allowed in found if not is_allowed] == []
    before = num_skips_before()
    assert before is None or len(found) <= before


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
        for node in nodes_of(tree_of(path.read_text()), *IMPORTING):
            graph[module] |= set(imported_modules(root, name, node)) - {module, PACKAGE}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def _module_name(name: str) -> str:
    parts = Path(name).with_suffix("").parts
    return ".".join([PACKAGE, *(parts[:-1] if parts[-1] == "__init__" else parts)])


def test_functions_have_a_readable_size() -> None:
    assert dict(oversized(PACKAGE_DIR)) == {}


def test_no_room_is_beyond_its_budget() -> None:
    assert beyond_budget(lines_of_rooms(PACKAGE_DIR), BUDGETS) == {}


def test_a_room_beyond_its_budget_is_found(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "x.py").write_text("x = 1\n" * 600)
    (tmp_path / "a" / "b" / "y.py").write_text("x = 1\n" * 401)
    (tmp_path / "z.py").write_text("x = 1\n")
    sizes = lines_of_rooms(tmp_path)
    assert sizes == {"a": 1001, "package": 1}
    assert beyond_budget(sizes, {"a": 1001, "package": 5}) == {}
    assert beyond_budget(sizes, {"a": 1000, "package": 5}).keys() == {"a"}
    assert beyond_budget(sizes, {"a": 1200, "package": 5}).keys() == {"a"}
    assert beyond_budget(sizes, {"a": 1001}).keys() == {"package"}


def test_no_import_cycle() -> None:
    assert import_cycle(PACKAGE_DIR) == []


def test_a_long_function_is_found(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    lines = ['    """It says what it does."""\n', *["    x = 1\n"] * (MAX_STATEMENTS)]
    file.write_text("def f(\n    a: int,\n) -> None:\n" + "".join(lines))
    assert dict(oversized(tmp_path)) == {}
    file.write_text("def f() -> None:\n" + "".join(lines) + "    x = 2\n")
    assert dict(oversized(tmp_path)) == {"a.py:f": f"{MAX_STATEMENTS + 1} statements"}


@pytest.mark.parametrize("depth", [MAX_NESTING, MAX_NESTING + 1])
def test_a_deep_function_is_found(tmp_path: Path, depth: int) -> None:
    blocks = "".join(f"{'    ' * (level + 1)}while True:\n" for level in range(depth))
    chosen = "    if a:\n        x = 1\n" + "    elif b:\n        x = 2\n" * 6
    body = f"def f() -> None:\n{chosen}{blocks}{'    ' * (depth + 1)}x = 1\n"
    (tmp_path / "a.py").write_text(body)
    found = {} if depth <= MAX_NESTING else {"a.py:f": f"{depth} blocks deep"}
    assert dict(oversized(tmp_path)) == found


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


def wide_functions(root: Path) -> Iterator[tuple[str, int]]:
    """(`file:function`, parameters) of each function with more of them than MAX_PARAMETERS.

    What is called by another language's rules, a kernel or an op of one, is none of these: its
    arguments are those that a contract declares.
    """
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if name.startswith(("kernels/", "device/cpu/")) or path.stem.endswith(("_gpu", "_cpu")):
            continue
        for node in nodes_of(tree_of(path.read_text()), ast.FunctionDef, ast.AsyncFunctionDef):
            given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            number = len(given) - (given[:1] != [] and given[0].arg in ("self", "cls"))
            if number > MAX_PARAMETERS:
                yield f"{name}:{node.name}", number


def test_what_has_many_parameters_has_an_object_for_them() -> None:
    assert list(wide_functions(PACKAGE_DIR)) == [], "make a dataclass of what belongs together"


def test_a_function_with_many_parameters_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        "def f(a, b, c, d, e, f, g): ...\n"
        "class A:\n    def g(self, a, b, c, d, e, f, g): ...\n"
        "    def h(self, a, b, c, d, /, e, *, f, g, h): ...\n"
    )
    (tmp_path / "a_gpu.py").write_text("def k(a, b, c, d, e, f, g, h): ...\n")
    assert list(wide_functions(tmp_path)) == [("a.py:h", 8)]
