"""In a run that follows no numbers the first NaN that the host reads is noted."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

from hypocenter.foreign.nonfinite.first_read import watch_first_read  # noqa: E402


def test_the_first_nan_that_the_host_reads_is_noted_once() -> None:
    class Tensor(torch.Tensor):  # type: ignore[misc]
        pass

    sites: list[str] = []
    recorder = SimpleNamespace(record_number=lambda event, site: sites.append(site))
    opened: list[Any] = [None]
    watch_first_read(SimpleNamespace(Tensor=Tensor), lambda: opened[0], lambda do: do())
    numbers = torch.tensor([1.0, math.inf, math.nan, math.nan]).as_subclass(Tensor)
    assert numbers[0].item() == 1.0
    assert numbers[1].item() == math.inf
    assert torch.tensor(3).as_subclass(Tensor).item() == 3
    assert math.isnan(numbers[2].item())  # nothing records yet
    opened[0] = recorder
    assert sites == []
    assert math.isnan(numbers[2].item())
    assert math.isnan(numbers[3].item())
    assert len(sites) == 1
    assert "test_first_read.py:" in sites[0]
