"""Small mistakes planted in what moves memory and lanes: the cases of this folder must see them.

A mistake is another operator, comparison, number or branch, or a line that is left out, in the
machine's own functions or in those that read instructions. `pytest -s` prints the rate by group.
"""

from __future__ import annotations

import importlib.util
import itertools
import sys
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from types import ModuleType

import pytest
from machine.amd_changed import (
    Case,
    Change,
    cases_by_block,
    changes_of,
    is_found,
    planted,
)

from hypocenter.device.amd import access, lanes, lower_memory, lower_other, operands, routes

#: Of what a group's functions must not see go by: the goal of the whole.
SHARE_FOUND = 0.95
#: In how many parts the mistakes of a group are tried.
PARTS = 4
#: Groups of which one mistake is tried in the fast tier, too. Those of memory take a minute each.
_FAST = ("lanes",)


@cache
def cases_of(*names: str) -> tuple[Case, ...]:
    """Every case of some files of this folder."""
    found: list[Case] = []
    for name in names:
        path = Path(__file__).with_name(f"{name}.py")
        spec = importlib.util.spec_from_file_location(f"changed_{name}", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[module.__name__] = module
        spec.loader.exec_module(module)
        for word, test in vars(module).items():
            if word.startswith("test_"):
                found += [partial(test, **given) for given in _grid(test)]
    return tuple(found)


def _grid(test: Callable[..., None]) -> Iterator[dict[str, object]]:
    """The arguments of a test, by its marks."""
    axes = []
    for mark in getattr(test, "pytestmark", ()):
        if mark.name == "parametrize":
            names, values = mark.args
            names = (names,) if isinstance(names, str) else names
            rows = [value if len(names) > 1 else (value,) for value in values]
            axes.append([dict(zip(names, row, strict=True)) for row in rows])
    for chosen in itertools.product(*axes):
        yield {name: value for part in chosen for name, value in part.items()}


_LANES = ("test_machine_lanes", "test_machine_scalar")
_MEMORY = (
    "test_machine_memory",
    "test_machine_bounds",
    "test_machine_scalar",
    "test_machine_log",
)
#: Module, its functions (all that are not left out), and the files whose cases must see a mistake.
#: The log of accesses and what is left of a stop are those of `check`, and have its tests.
GROUPS: dict[str, tuple[ModuleType, Callable[[str], bool], tuple[str, ...]]] = {
    "lanes": (lanes, lambda name: True, _LANES),
    "lanes of DPP": (operands, lambda name: name == "_gather", _LANES),
    "routes of lanes": (routes, lambda name: True, _LANES),
    "instructions on lanes": (
        lower_other,
        lambda n: n in ("lower_lanes", "lower_lds_lanes"),
        _LANES,
    ),
    "memory": (access, lambda name: not name.startswith("_note"), _MEMORY),
    "instructions on memory": (lower_memory, lambda name: True, _MEMORY),
}
#: Mistakes that change nothing, by function, a part of the line and what is done, and why.
EQUIVALENT = {
    ("_gather", "", "0 is 1"): "a lane of -1 is none before it is shifted by",
    ("_in_row", "", "1 is 2"): "any negative number is no lane",
    ("_whole_wave", "", "1 is 2"): "any negative number is no lane",
    ("_move", "", "Lt is LtE"): "PERMUTE itself has gone another way",
    ("_move", "", "2 is 3"): "what has the first bit has gone another way",
    ("lane_operation", "", "1 is 2"): "of two words the register takes the lower one",
    ("_select", "", "1 is 2"): "a lane's number is in the lower word",
    ("_choose", "", "1 is 2"): "its sixteen numbers of four bits are in the lower word",
    **dict.fromkeys(
        (
            (name, "if host < 0:", what)
            for name in ("scalar_load", "_find")
            for what in ("Lt is LtE", "0 is 1")
        ),
        "no array of a process lies at its address 0",
    ),
    ("_buffer_addresses", "code[r.BASE] + 4]", "4 is 5"): "four words of them are looked at",
    ("_do", "if size < 4:", "Lt is LtE"): "a word may go the way of its parts as well",
    ("_do", "if size < 4:", "4 is 5"): "a word may go the way of its parts as well",
    ("_combine", "call_handler(", "1 is 2"): "of two results only the first is read",
    ("_to_local", "m0 =", "1 is 2"): "18 bits of it count, which are in the lower word",
    ("_transpose", "loaded =", "2 is 3"): "two words of them are looked at",
    ("_transpose", "per_lane =", "64 is 65"): "by 8 and by 16 it is the same whole number",
    ("_transpose", "per_word =", "32 is 33"): "by 8 and by 16 it is the same whole number",
    ("_transpose", "16 // per_lane", "16 is 17"): "by 4 and by 8 it is the same whole number",
    ("_meaning_of", "* 2, f", "2 is 3"): "no text of an atomic names a third operand",
    ("lower_local", "words[:2]", "2 is 3"): "the third word, TR, says nothing of a width",
    ("lower_local", "row[r.TWO] = 1", "1 is 2"): "any number but 0 says that there are two",
    ("_address", "has_scalar else -1", "1 is 2"): "any negative number is no register",
}


def _is_equivalent(change: Change) -> bool:
    return any(_is_meant(change, *of) for of in EQUIVALENT)


def _is_meant(change: Change, function: str, line: str, what: str) -> bool:
    return (change.function, change.what) == (function, what) and line in change.line


def changes_in(group: str) -> list[Change]:
    module, is_meant, _ = GROUPS[group]
    found = changes_of(module, [name for name in vars(module) if is_meant(name)])
    return [change for change in found if not _is_equivalent(change)]


def test_each_mistake_that_is_left_out_is_there() -> None:
    every = [
        change for module, *_ in GROUPS.values() for change in changes_of(module, [*vars(module)])
    ]
    stale = [of for of in EQUIVALENT if not any(_is_meant(change, *of) for change in every)]
    assert stale == []


@pytest.mark.tier("amd")
@pytest.mark.parametrize("part", range(PARTS), ids=lambda part: f"part{part + 1}of{PARTS}")
@pytest.mark.parametrize("group", GROUPS)
def test_mistakes_are_seen(group: str, part: int) -> None:
    changes = changes_in(group)[part::PARTS]
    cases = list(cases_of(*GROUPS[group][2]))
    by_block = cases_by_block(GROUPS[group][0], cases)
    lost = [
        str(change)
        for change in changes
        if not is_found(change, cases, by_block.get(change.block, ()))
    ]
    share = 1 - len(lost) / len(changes)
    print(f"\n{group}, part {part + 1}: {len(changes) - len(lost)} of {len(changes)} seen")
    print("\n".join(lost))
    assert share >= SHARE_FOUND, lost


def test_without_a_mistake_a_machine_of_python_passes() -> None:
    with planted(None):
        for case in cases_of("test_machine_scalar")[:12]:
            case()


@pytest.mark.tier("amd")
@pytest.mark.parametrize("name", sorted({name for *_, names in GROUPS.values() for name in names}))
def test_without_a_mistake_every_case_passes(name: str) -> None:
    """One that fails by itself would see every mistake."""
    with planted(None):
        for case in cases_of(name):
            case()


def test_a_table_of_pages_may_be_read_without_a_mistake() -> None:
    with planted(None):
        for case in cases_of("test_machine_bounds"):
            if case.func.__name__ == "test_each_page_of_an_access_must_be_there":  # type: ignore[attr-defined]
                case()


@pytest.mark.parametrize(
    "group",
    [
        pytest.param(group, marks=() if group in _FAST else pytest.mark.tier("amd"))
        for group in GROUPS
    ],
)
def test_a_mistake_is_seen(group: str) -> None:
    cases = list(cases_of(*GROUPS[group][2]))
    assert is_found(changes_in(group)[5], cases, cases)
