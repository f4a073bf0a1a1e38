"""Costs of test files are added up over the workers of a run; far beyond the limits it is red."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import costs
import pytest
from _pytest.assertion.rewrite import AssertionRewritingHook
from costs import MOST_SECONDS, MOST_SECONDS_OF_A_FILE, Costs, beyond_limits


def _finish(plugin: Costs, exitstatus: int = 0, **of_config: Any) -> SimpleNamespace:
    session = SimpleNamespace(config=SimpleNamespace(**of_config), exitstatus=exitstatus)
    plugin.pytest_sessionfinish(cast(Any, session))
    return session


def test_a_file_or_a_tier_that_costs_too_much_is_told() -> None:
    assert beyond_limits({"a": MOST_SECONDS_OF_A_FILE, costs.SET_UP: 80.0}) == []
    (told,) = beyond_limits({"a": MOST_SECONDS_OF_A_FILE + 1, "b": 1.0})
    assert told.startswith("a took 81 processor seconds; a file of the fast tier may take 80")
    many = dict.fromkeys(range(100), MOST_SECONDS / 100)
    assert beyond_limits(cast(Any, many)) == []
    (told,) = beyond_limits({**cast(Any, many), "one more": 1.0})
    assert told.startswith("the fast tier took 1401 processor seconds")


def test_what_workers_took_is_added_and_makes_a_run_red() -> None:
    worker, controller = Costs(is_limited=True), Costs(is_limited=True)
    worker.of_files = {"a": 50.0}
    output: dict[str, Any] = {}
    assert _finish(worker, workeroutput=output).exitstatus == 0
    for number in (1, 2):
        controller.pytest_testnodedown(SimpleNamespace(workeroutput=output))
        assert controller.of_files == {"a": 50.0 * number}
        assert _finish(controller).exitstatus == number - 1
    assert _finish(controller, exitstatus=2).exitstatus == 2
    unlimited = Costs(is_limited=False)
    unlimited.of_files = controller.of_files
    assert _finish(unlimited).exitstatus == 0
    controller.pytest_testnodedown(SimpleNamespace())  # one that died has told nothing


def test_a_test_is_measured_and_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(costs.DIARIES, str(tmp_path))
    seconds = iter((5.0, 7.5, 8.0, 8.25))
    monkeypatch.setattr(costs, "processor_seconds", lambda: next(seconds))
    plugin = Costs(is_limited=True)
    for name in ("one", "two"):
        ran = plugin.pytest_runtest_protocol(cast(Any, SimpleNamespace(nodeid=f"a.py::{name}")))
        next(ran)
        with pytest.raises(StopIteration):
            ran.send(True)
    assert plugin.of_files == {"a.py": 2.75}
    (diary,) = tmp_path.iterdir()
    noted = [json.loads(line) for line in diary.read_text().splitlines()]
    assert noted == [["a.py::one", 2.5], ["a.py::two", 0.25]]


def test_this_run_is_measured(request: pytest.FixtureRequest) -> None:
    plugins = request.config.pluginmanager.get_plugins()
    assert len([plugin for plugin in plugins if isinstance(plugin, Costs)]) == 1


def test_the_package_is_loaded_as_users_load_it() -> None:
    """Only of what pytest loads before `conftest.py` are assertions rewritten: of the plugin."""
    import hypocenter.base.errors

    def is_rewritten(name: str) -> bool:
        spec = sys.modules[name].__spec__
        return spec is not None and isinstance(spec.loader, AssertionRewritingHook)

    ours = {name for name in sys.modules if name.split(".")[0] == "hypocenter"}
    plugin = "hypocenter.verify.own.pytest_plugin"
    first = {plugin, "hypocenter", "hypocenter.verify", "hypocenter.verify.own"}
    assert set(filter(is_rewritten, ours)) <= first
    assert hypocenter.base.errors.__name__ in ours - first
    assert is_rewritten(__name__), "of tests they are"
