"""The environment that tests run in; the watchdog is `faulthandler_timeout` in pyproject.toml."""

from __future__ import annotations

import atexit
import itertools
import os
import shutil
import tempfile

import pytest

# The settings of whoever runs the tests must not change what they see, and nothing is downloaded.
# What they say of instructions may stay: results are within the same bounds on every path.
for _name in [name for name in os.environ if name.startswith("HYPO_")]:
    if _name not in ("HYPO_CACHE_DIR", "HYPO_INSTRUCTIONS"):
        del os.environ[_name]
os.environ["HF_HUB_OFFLINE"] = "1"
# Runs of tests are recorded, as all runs are, but leave nothing behind.
_runs = tempfile.mkdtemp(prefix="hypo-test-runs-")
atexit.register(shutil.rmtree, _runs, ignore_errors=True)
os.environ["HYPO_RUN_DIR"] = _runs

_numbers = itertools.count(1)


@pytest.fixture(autouse=True)
def _own_run_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test's commands record into a folder of their own, so that no other tells of a death."""
    monkeypatch.setenv("HYPO_RUN_DIR", os.path.join(_runs, str(next(_numbers))))
