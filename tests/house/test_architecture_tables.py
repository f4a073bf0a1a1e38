"""The tables of docs/architecture.md are true: rooms, and the files and functions of all paths."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from layering import MAY_IMPORT
from repository import ROOT

PACKAGE_DIR = ROOT / "src" / "hypocenter"
DOCUMENT = (ROOT / "docs" / "architecture.md").read_text()
PATHS = ("The path of a token", "The path of a fault", "The path of a served request")


def rows(text: str, heading: str) -> list[list[str]]:
    """The cells of the first table below a heading, without its first two lines."""
    section = text.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    table = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[2:]]


def quoted_names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def definitions(tree: ast.Module) -> Iterator[str]:
    """Names of a file's functions, classes and constants, and of methods as `Class.method`."""
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        if isinstance(node, ast.ClassDef):
            functions = ast.FunctionDef | ast.AsyncFunctionDef
            inner = (one.name for one in node.body if isinstance(one, functions))
            yield from (f"{node.name}.{name}" for name in inner)


def mistakes(row: list[str], package: Path) -> list[str]:
    """What a row names that is not there: a file, or a function in none of its files."""
    files = [package / name for name in quoted_names(row[1])]
    missing = [f"{file.relative_to(package)} is not there" for file in files if not file.is_file()]
    names = {
        name
        for file in files
        if file.is_file()
        for name in definitions(ast.parse(file.read_text()))
    }
    wanted = quoted_names(row[2])
    missing += [f"{name} is in none of {row[1]}" for name in wanted if name not in names]
    return missing if files and wanted else [*missing, f"{row} names nothing"]


@pytest.mark.parametrize("heading", PATHS)
def test_each_file_and_function_of_a_path_exists(heading: str) -> None:
    table = rows(DOCUMENT, heading)
    assert len(table) >= 10
    assert [one for row in table for one in mistakes(row, PACKAGE_DIR)] == []


def test_a_wrong_row_is_found() -> None:
    good = ["ids to Request", "`engine/engine.py`", "`Engine.request`"]
    assert mistakes(good, PACKAGE_DIR) == []
    assert mistakes([*good[:2], "`Engine.gone`"], PACKAGE_DIR)
    assert mistakes(["", good[1].replace("engine.py", "gone.py"), good[2]], PACKAGE_DIR)
    assert mistakes(["", "`engine/request.py`", "`Engine.request`"], PACKAGE_DIR)
    assert mistakes(["", "`engine/engine.py`", "step"], PACKAGE_DIR)


def test_the_table_of_rooms_is_that_of_the_layering() -> None:
    told = {row[0].strip("`/"): row for row in rows(f"\n## Rooms\n{DOCUMENT}", "Rooms")}
    there = {room for room in MAY_IMPORT if (PACKAGE_DIR / room).is_dir()}
    assert told.keys() == there
    for room in there - {"cli"}:
        allowed = set(re.findall(r"\w+", told[room][2])) - {"nothing", "more"}
        assert allowed == MAY_IMPORT[room] - {"base"}, room
