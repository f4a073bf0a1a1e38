"""Facts stay data: nothing in the package reads a sentence that the package wrote."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from parsed import nodes_of, tree_of
from repository import ROOT

PACKAGE_DIR = ROOT / "src" / "hypocenter"

#: Fields of errors, findings, gaps, claims and reports that hold sentences of ours.
SENTENCES = frozenset((
    "reason", "detail", "message", "sentence", "fix", "red", "green", "corrected", "evidence",
    "would_refute", "symptom", "surfaced", "consequences", "untested", "clean", "left_out",
    "outcome", "problem", "problems", "hint", "way_out",
))  # fmt: skip
#: Methods of a string that take it apart or look into it.
READS = frozenset((
    "startswith", "endswith", "split", "rsplit", "partition", "rpartition", "removeprefix",
    "removesuffix", "find", "rfind", "index", "rindex", "count",
))  # fmt: skip
#: `file` or `file:function` that reads what others wrote, which comes as text and nothing else.
READERS = {
    "device/gpu/errors.py:launch_failure": "what Triton's launcher says of an address",
    "replay/replay.py:_one": "what Python says of an operation on None",
}


def is_sentence(node: ast.expr) -> bool:
    """Whether an expression is a sentence field, `str(error)`, or either of them lowered."""
    if isinstance(node, ast.Attribute):
        return node.attr in SENTENCES
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.attr in ("lower", "strip", "casefold") and is_sentence(node.func.value)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "str":
        return any(
            isinstance(one, ast.Name) and one.id in ("error", "refusal", "gap", "finding")
            for one in node.args
        )
    return False


def readings(root: Path) -> Iterator[str]:
    """`file:line` of every place that takes a sentence apart or looks something up in it."""
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        tree = tree_of(path.read_text())
        excepted = {
            id(node)
            for function in nodes_of(tree, ast.FunctionDef)
            if f"{name}:{function.name}" in READERS
            for node in ast.walk(function)
        }
        for node in nodes_of(tree, ast.Compare, ast.Call):
            if name in READERS or id(node) in excepted:
                continue
            if isinstance(node, ast.Compare):
                looks = any(isinstance(op, ast.In | ast.NotIn) for op in node.ops)
                is_read = looks and any(is_sentence(one) for one in node.comparators)
            elif isinstance(node.func, ast.Attribute):
                of_re = isinstance(node.func.value, ast.Name) and node.func.value.id == "re"
                by_pattern = of_re or node.func.attr in ("search", "match", "fullmatch", "finditer")
                # Without a separator `split` evens out white space, and reads nothing.
                evens_out = node.func.attr == "split" and not node.args
                takes_apart = node.func.attr in READS and is_sentence(node.func.value)
                is_read = (by_pattern and any(is_sentence(one) for one in node.args)) or (
                    takes_apart and not evens_out
                )
            else:
                continue
            if is_read:
                yield f"{name}:{node.lineno}"


def test_nothing_reads_our_own_sentences() -> None:
    assert list(readings(PACKAGE_DIR)) == []


def test_the_readers_of_foreign_text_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    names = set(READERS)
    monkeypatch.setattr(sys.modules[__name__], "READERS", {})
    files = {place.split(":")[0] for place in readings(PACKAGE_DIR)}
    assert files == {name.split(":")[0] for name in names}


@pytest.mark.parametrize(
    "text",
    [
        'if "bytes" in finding.detail: ...',
        'if "overflow" not in str(error): ...',
        're.search(r"[0-9]+ bytes", finding.detail)',
        "WIDTH.search(one.reason)",
        'kernel = gap.reason.partition(": ")[0]',
        'is_clean = diagnosis.symptom.startswith("no symptom")',
        "first = claim.root.sentence.lower().split(',')",
        'any("replay" in row.evidence for row in rows)',
    ],
)
def test_a_reading_is_found(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.py").write_text(text + "\n")
    assert list(readings(tmp_path)) == ["a.py:1"]


@pytest.mark.parametrize(
    "text",
    [
        'print(f"{gap.what}: {gap.reason}")',
        "if gap.kind in KINDS: ...",
        "lines = source.text.splitlines()",
        'name.removesuffix("_ptr")',
        'line = " ".join(fault.message.split())',
    ],
)
def test_writing_and_other_text_are_no_reading(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.py").write_text(text + "\n")
    assert list(readings(tmp_path)) == []
