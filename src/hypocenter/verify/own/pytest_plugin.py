"""`pytest --hypo-check`: every Triton launch of a test runs on the CPU with each access checked.

It is held against its reference, too, where one stands beside the kernel.

Imports nothing of the package until the option is given.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

_HELD = pytest.StashKey[Any]()
_BUDGET_SECONDS = 60.0


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options."""
    group = parser.getgroup("hypocenter")
    group.addoption(
        "--hypo-check",
        action="store_true",
        help="run every Triton launch of a test on the CPU with each access checked",
    )
    group.addoption("--hypo-arch", default="sm_90", help="the GPU that tests see (sm_90)")


def pytest_configure(config: pytest.Config) -> None:
    """Put the check in the place of Triton's launches, for the time of this process."""
    if not config.getoption("--hypo-check"):
        return
    from hypocenter.verify.own.launches import HeldLaunches
    from hypocenter.verify.own.runtime import on_pretended_gpu

    launches = HeldLaunches(_BUDGET_SECONDS)
    entered = on_pretended_gpu(launches, config.getoption("--hypo-arch"))
    entered.__enter__()
    config.stash[_HELD] = (launches, entered)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Put torch back."""
    held = config.stash.get(_HELD, None)
    if held is not None:
        held[1].__exit__(None, None, None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Fail a test whose launches were wrong, whatever it asserts itself."""
    held = item.config.stash.get(_HELD, None)
    if held is None:
        return (yield)
    launches = held[0]
    launches.kernels.clear()
    result = yield
    launches.watch.finish()
    lines = [
        f"{finding.where}: {finding.what}"
        for kernel in launches.kernels.values()
        for finding in kernel.findings or ()
    ]
    if lines:
        pytest.fail("\n".join(lines), pytrace=False)
    return result
