"""The environment that tests run in, and the choice of tiers.

The watchdog is `faulthandler_timeout` in pyproject.toml, the table of tiers is `tiers.py`.
"""

from __future__ import annotations

import atexit
import gc
import itertools
import os
import shutil
import sys
import tempfile
from pathlib import Path

import hypothesis
import pytest
from _pytest.assertion.rewrite import AssertionRewritingHook
from costs import Costs
from hypothesis.internal.conjecture import providers
from tiers import TIERS, NoSingleTier, empty_grids, tier_of_case, tier_of_folder

TESTS = Path(__file__).parent

# Until all tests are collected nothing becomes garbage; `pytest_collection_finish` ends this.
gc.disable()

# A package that brings a plugin has its own assertions rewritten, too: here 160,000 lines, by each
# process. What is tested is the package as users load it.
for _finder in sys.meta_path:
    if isinstance(_finder, AssertionRewritingHook):
        _finder._must_rewrite.discard("hypocenter")
        _finder._marked_for_rewrite_cache.clear()

# The settings of whoever runs the tests must not change what they see, and nothing is downloaded.
# What they say of instructions may stay: results are within the same bounds on every path.
for _name in [name for name in os.environ if name.startswith("HYPO_")]:
    if _name not in ("HYPO_CACHE_DIR", "HYPO_INSTRUCTIONS"):
        del os.environ[_name]
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HYPO_NATIVE"] = "0"  # whatever an earlier run has compiled
os.environ["HYPO_DEVICE"] = "cpu"  # on a machine with a GPU too, where no test names it
# Commands that tests start find each other's bytecode, or each compiles all of torch anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Runs of tests are recorded, as all runs are, but leave nothing behind.
_runs = tempfile.mkdtemp(prefix="hypo-test-runs-")
atexit.register(shutil.rmtree, _runs, ignore_errors=True)
os.environ["HYPO_RUN_DIR"] = _runs

# How long a case takes hangs on who else uses the machine.
hypothesis.settings.register_profile("any machine", deadline=None)
hypothesis.settings.load_profile("any machine")

_numbers = itertools.count(1)


@pytest.fixture(autouse=True)
def _own_run_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test's commands record into a folder of their own, so that no other tells of a death."""
    monkeypatch.setenv("HYPO_RUN_DIR", os.path.join(_runs, str(next(_numbers))))


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    """Each test draws the same numbers in every run, or rare ones fail what no change touched."""
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


def pytest_addoption(parser: pytest.Parser) -> None:
    # With "=", or pytest looks for conftest.py in a folder of the tier's name, such as tools.
    parser.addoption("--tier", default="", help="--tier=A,B: run these tiers alone")


def pytest_configure(config: pytest.Config) -> None:
    if unknown := _tiers_asked_for(config) - TIERS.keys():
        raise pytest.UsageError(f"no tier {unknown}; known are {', '.join(TIERS)}")
    is_fast = _tiers_asked_for(config) == {"fast"}
    config.pluginmanager.register(Costs(is_limited=is_fast))
    if is_fast:
        # It parses each loaded source for numbers to try: seven seconds, in each process.
        vars(providers)["_get_local_constants"] = lambda: providers._local_constants


def pytest_collection_finish() -> None:
    """Modules and tests stay; looking through millions of objects over and over takes a minute."""
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # or what extensions hold is told as a leak when the process ends


def _tiers_asked_for(config: pytest.Config) -> set[str]:
    return set(filter(None, config.getoption("--tier").split(",")))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Read no folder of a tier that was not asked for; marks move cases of fast folders only."""
    asked = _tiers_asked_for(config)
    if not asked or collection_path.suffix != ".py" or TESTS not in collection_path.parents:
        return None
    file = collection_path.relative_to(TESTS).as_posix()
    if not collection_path.name.startswith("test_"):
        return None
    return True if tier_of_folder(file) not in asked | {"fast"} else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    asked = _tiers_asked_for(config)
    try:
        tiers = [_tier_of(item) for item in items]
        _refuse_empty_grids(config, items, tiers)
    except NoSingleTier as error:
        raise pytest.UsageError(str(error)) from error
    if asked:
        left = [item for item, tier in zip(items, tiers, strict=True) if tier not in asked]
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item, tier in zip(items, tiers, strict=True) if tier in asked]


def _tier_of(item: pytest.Item) -> str:
    moves = [(mark.args[0], mark.kwargs.get("fast")) for mark in item.iter_markers("tier")]
    call = getattr(item, "callspec", None)
    file = item.path.relative_to(TESTS).as_posix()
    return tier_of_case(file, moves, call.params if call else {})


def _refuse_empty_grids(config: pytest.Config, items: list[pytest.Item], tiers: list[str]) -> None:
    """A mark that says which cases are fast must leave some, or the fast tier lacks that test."""
    if any("::" in argument for argument in config.args):
        return  # not all cases are here
    cases = [
        (item.nodeid.partition("[")[0], tier)
        for item, tier in zip(items, tiers, strict=True)
        if any("fast" in mark.kwargs for mark in item.iter_markers("tier"))
    ]
    if empty := empty_grids(cases):
        raise NoSingleTier(f"no case is left in the fast tier: {', '.join(sorted(empty))}")
