"""Which tier each test belongs to: a table of folders, and the one marker that moves single cases.

A test is of the tier that holds its folder. `@pytest.mark.tier(NAME)` moves it to another one, and
`@pytest.mark.tier(NAME, fast=WHICH)` leaves those cases of a grid where they are whose parameters
WHICH accepts. `conftest.py` applies this when pytest is given `--tier`; without it every tier runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any


@dataclass(frozen=True, slots=True)
class Tier:
    """What `script` runs: the test files in `folders`, and what is marked to be of this tier."""

    script: str
    folders: tuple[str, ...]
    holds: str


TIERS = {
    "fast": Tier(
        "test",
        ("house", "record", "order", "coredump", "watch", "device", "foreign", "kernels", "model",
         "engine", "replay", "check", "doctor", "faults", "verify", "cli", "process", "server",
         "hub", "trace", "audit"),
        "every room on the CPU and on simulated GPUs, the smallest shapes of each layout",
    ),
    "sim": Tier("test-sim", (), "the grids in full, and what compiles all kernels anew"),
    "whole": Tier("test-whole", (), "commands, servers and programs as processes of their own"),
    "targets": Tier("test-targets", ("targets",), "every GPU kernel for every target, guarded too"),
    "amd": Tier("test-amd", (), "AMD's machine code, executed by the emulator, in full"),
    "paths": Tier("test-paths", ("paths",), "the other paths of CPU instructions"),
    "tools": Tier("test-tools", ("tools",), "scripts, benchmarks and tools: not the product"),
    "lab": Tier("test-lab", (), "the doctor's score on every victim"),
    "peers": Tier("test-peers", ("peer",), "comparison with llama.cpp"),
    "clients": Tier("test-clients", ("clients",), "hypo serve under clients that people use"),
    "page": Tier("test-page", ("page",), "the pages of hypo serve in a real browser"),
    "ray": Tier("test-ray", ("ray",), "the Ray Serve application on a cluster of two nodes"),
    "recorder": Tier("test-recorder", (), "processes killed at random moments"),
    "attack": Tier("test-attack", ("attack",), "attacks on hypo serve and what stands around it"),
    "fuzz": Tier("test-fuzz", (), "hostile input for what reads foreign data"),
}  # fmt: skip

#: Marks of one case, each by its arguments: (tier, which cases it leaves where they are).
Moves = list[tuple[str, Callable[[SimpleNamespace], bool] | None]]


class NoSingleTier(Exception):
    """A test that no tier holds, or that more than one does."""


def tier_of_folder(file: str, tiers: Mapping[str, Tier] = TIERS) -> str:
    """Of a file's path below tests/, such as `kernels/linear/test_bf16.py`."""
    folder = file.split("/")[0]
    found = [name for name, tier in tiers.items() if folder in tier.folders]
    if len(found) != 1:
        raise NoSingleTier(f"tests/{file}: its folder is in the tiers {found}, but must be in one")
    return found[0]


def tier_of_case(
    file: str, moves: Moves, parameters: Mapping[str, Any], tiers: Mapping[str, Tier] = TIERS
) -> str:
    """Of one case of a test, whose marks and parameters these are."""
    found = set()
    for name, stays in moves:
        if name not in tiers:
            raise NoSingleTier(f"tests/{file}: there is no tier {name!r}")
        if stays is None or not stays(SimpleNamespace(**parameters)):
            found.add(name)
    if len(found) > 1:
        raise NoSingleTier(f"tests/{file}: one case is in the tiers {sorted(found)}")
    return found.pop() if found else tier_of_folder(file, tiers)


def empty_grids(cases: Iterable[tuple[str, str]]) -> set[str]:
    """Of (test, tier of one of its cases): the tests that have no case in the fast tier."""
    found: dict[str, set[str]] = {}
    for test, tier in cases:
        found.setdefault(test, set()).add(tier)
    return {test for test, of_its_cases in found.items() if "fast" not in of_its_cases}
