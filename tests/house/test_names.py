"""Names say what they are: functions are verbs or nouns, and each public class has one home."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import pytest
from parsed import nodes_of, tree_of
from repository import ROOT

PACKAGE_DIR = ROOT / "src" / "hypocenter"

#: Names of files that say nothing of what is in them.
EMPTY_STEMS = frozenset((
    "utils", "util", "helpers", "common", "misc", "records", "facts", "parts", "things", "told",
    "made", "found",
))  # fmt: skip
#: Participles that do not end in "ed", but for those that are a verb's plain form, too.
IRREGULAR = frozenset((
    "begun", "bent", "born", "bought", "broken", "brought", "built", "caught", "chosen", "done",
    "drawn", "driven", "fallen", "felt", "found", "forgotten", "frozen", "given", "gone",
    "grown", "heard", "held", "hidden", "kept", "known", "laid", "led", "lent", "lost", "made",
    "meant", "met", "paid", "said", "seen", "sent", "shown", "sold", "spent", "stood", "stuck",
    "taken", "taught", "thought", "thrown", "told", "undone", "understood", "undrawn", "unread",
    "won", "worn", "written",
))  # fmt: skip
#: Adjectives that leave open of what.
BARE = frozenset((
    "alike", "alive", "bad", "dead", "good", "late", "ready", "same", "stale", "vague", "whole",
    "wrong",
))  # fmt: skip
#: Verbs that end as a participle does.
VERBS = frozenset((
    "embed", "exceed", "feed", "need", "proceed", "seed", "shed", "speed", "succeed",
))  # fmt: skip
#: Names that say nothing of what they hold: `docs/glossary.md` has the field's words.
PRIVATE_WORDS = frozenset(("facts", "made", "told"))
#: Rooms in which some still are; the list only gets shorter.
PRIVATE_WORDS_YET = frozenset((
    "check", "cli", "coredump", "device", "doctor", "foreign", "order", "record", "replay",
    "server", "watch", "wire", "worker",
))  # fmt: skip
#: A docstring that begins so has no subject: a reader must find out of what, or what does it.
NO_SUBJECT = re.compile(r"(Of|Those|That|By|As|With|Without|For|In|On|At|Behind|Beside|To)\b")
#: Rooms in which some still do; the list only gets shorter.
NO_SUBJECT_YET = frozenset((
    "check", "coredump", "device", "doctor", "foreign", "lab", "order", "record", "replay",
    "server", "watch", "worker",
))  # fmt: skip


def is_bare(name: str) -> bool:
    """Whether a name is one participle or adjective, and so neither a verb nor a noun."""
    word = name.strip("_")
    ends_so = re.fullmatch(r"[a-z0-9]+ed", word) is not None
    return (ends_so and word not in VERBS) or word in IRREGULAR or word in BARE


@lru_cache(maxsize=1)
def trees(root: Path) -> list[tuple[str, ast.Module]]:
    """Of all files below a folder; the package is read once for all rules."""
    files = sorted(root.rglob("*.py"))
    return [(path.relative_to(root).as_posix(), tree_of(path.read_text())) for path in files]


def bare_functions(root: Path) -> Iterator[str]:
    """`file:function` of every function with a bare name; properties are no functions."""
    for name, tree in trees(root):
        for node in nodes_of(tree, ast.FunctionDef, ast.AsyncFunctionDef):
            decorators = {ast.unparse(one).split(".")[-1] for one in node.decorator_list}
            if is_bare(node.name) and not decorators & {"property", "cached_property"}:
                yield f"{name}:{node.name}"


def homes(root: Path) -> dict[str, list[str]]:
    """Public classes and aliases of modules to the files that define them; victims have none."""
    found: dict[str, list[str]] = defaultdict(list)
    for name, tree in trees(root):
        if "victims/" in name:
            continue
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                defined = [node.name]
            elif isinstance(node, ast.Assign):
                defined = [one.id for one in node.targets if isinstance(one, ast.Name)]
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                defined = [node.target.id]
            else:
                continue
            for one in defined:
                if re.match(r"[A-Z][A-Za-z0-9]*[a-z]", one):
                    found[one].append(name)
    return found


def re_exports(root: Path) -> Iterator[str]:
    """`file:name` of imports that offer a name again; those without `as` mypy --strict refuses."""
    for name, tree in trees(root):
        for node in nodes_of(tree, ast.Import, ast.ImportFrom):
            yield from (f"{name}:{one.name}" for one in node.names if one.asname == one.name)


def bad_names(root: Path) -> Iterator[str]:
    """Files and classes with a name that says nothing."""
    for name, tree in trees(root):
        if Path(name).stem in EMPTY_STEMS:
            yield name
        for node in nodes_of(tree, ast.ClassDef):
            if node.name.endswith(("Manager", "Helper")) or node.name.startswith("Base"):
                yield f"{name}:{node.name}"


def nameless_items(root: Path) -> Iterator[str]:
    """`file:line` of every loop or comprehension whose item is only called `one`."""
    for name, tree in trees(root):
        for node in nodes_of(tree, ast.For, ast.comprehension):
            target = node.target
            if isinstance(target, ast.Name) and target.id == "one":
                yield f"{name}:{target.lineno}"


def subjectless(root: Path) -> Iterator[str]:
    """`file:name` of each docstring that begins with no subject."""
    for name, tree in trees(root):
        for node in nodes_of(tree, ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef):
            if NO_SUBJECT.match(ast.get_docstring(node) or ""):
                yield f"{name}:{getattr(node, 'name', '')}"


def private_names(root: Path) -> Iterator[str]:
    """`file:line` of each name that is given one of the words that say nothing."""
    for name, tree in trees(root):
        for node in nodes_of(
            tree, ast.Name, ast.Attribute, ast.arg,
            ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef,
        ):  # fmt: skip
            given = ""
            if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
                given = node.id if isinstance(node, ast.Name) else node.attr
            elif isinstance(node, ast.arg):
                given = node.arg
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                given = node.name
            if given.strip("_").lower() in PRIVATE_WORDS:
                yield f"{name}:{getattr(node, 'lineno', 0)}"


def test_names_are_words_of_the_field() -> None:
    found = {name.split("/")[0]: name for name in private_names(PACKAGE_DIR)}
    assert {room: name for room, name in found.items() if room not in PRIVATE_WORDS_YET} == {}
    assert found.keys() >= PRIVATE_WORDS_YET, "take the room off the list"


def test_a_private_name_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        "facts = 1\ndef f(told): ...\ndef _made(): ...\nx.facts = 2\nmade_with = 3\n"
        "print(facts, made)\n"
    )
    assert sorted(private_names(tmp_path)) == ["a.py:1", "a.py:2", "a.py:3", "a.py:4"]


def test_docstrings_begin_with_a_subject_or_a_verb() -> None:
    found = {name.split("/")[0]: name for name in subjectless(PACKAGE_DIR)}
    assert {room: name for room, name in found.items() if room not in NO_SUBJECT_YET} == {}
    assert NO_SUBJECT_YET - {"lab"} <= found.keys(), "take the room off the list"


def test_a_docstring_without_a_subject_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        '"""Where blocks lie."""\n'
        'def f():\n    """Of each block its owner."""\n'
        'def g():\n    """The owner of each block."""\n'
        'class Thing:\n    """Those that wait."""\n'
    )
    assert sorted(subjectless(tmp_path)) == ["a.py:Thing", "a.py:f"]


def test_names_say_something() -> None:
    assert list(bad_names(PACKAGE_DIR)) == []


def test_functions_are_verbs_or_nouns() -> None:
    assert list(bare_functions(PACKAGE_DIR)) == []


def test_items_have_a_noun() -> None:
    assert list(nameless_items(PACKAGE_DIR)) == []


def test_a_public_name_has_one_home() -> None:
    assert {name: files for name, files in homes(PACKAGE_DIR).items() if len(files) > 1} == {}
    assert list(re_exports(PACKAGE_DIR)) == []


@pytest.mark.parametrize("stem", sorted(EMPTY_STEMS))
def test_a_file_with_an_empty_name_is_found(tmp_path: Path, stem: str) -> None:
    (tmp_path / f"{stem}.py").write_text("class CacheManager: ...\n")
    assert list(bad_names(tmp_path)) == [f"{stem}.py", f"{stem}.py:CacheManager"]


def test_a_bare_name_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        "def told(): ...\ndef _kept(): ...\ndef needed(): ...\n"
        "def feed(): ...\ndef record_copy(): ...\ndef kept_rows(): ...\n"
        "class A:\n    def dead(self): ...\n    @property\n    def written(self): ...\n"
    )
    assert list(bare_functions(tmp_path)) == [
        "a.py:told", "a.py:_kept", "a.py:needed", "a.py:dead",
    ]  # fmt: skip


def test_an_item_without_a_noun_is_found(tmp_path: Path) -> None:
    (tmp_path / "loops.py").write_text(
        "for one in claims:\n    print([one for one in one.rows])\nfor claim in claims:\n    pass\n"
    )
    assert list(nameless_items(tmp_path)) == ["loops.py:1", "loops.py:2"]


def test_a_second_home_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("class Event: ...\nLIMIT = 1\nArray = list\n")
    (tmp_path / "b.py").write_text("LIMIT = 2\nArray: type = list\nclass _Event: ...\n")
    (tmp_path / "c.py").write_text("Event = tuple\n")
    assert {name: files for name, files in homes(tmp_path).items() if len(files) > 1} == {
        "Array": ["a.py", "b.py"], "Event": ["a.py", "c.py"],
    }  # fmt: skip


def test_a_name_that_is_offered_again_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("from b import c as c, d, e as f\nimport g as g\n")
    assert list(re_exports(tmp_path)) == ["a.py:c", "a.py:g"]
