"""What a launch has touched, found piece by piece: as it is found in all of it at once."""

from __future__ import annotations

import numpy as np
import pytest

from hypocenter.replay import touched
from hypocenter.replay.arguments import Argument, Region


@pytest.mark.parametrize("together", [1, 4, 1000])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.9, 1.0])
def test_pieces_give_what_the_whole_gives(
    together: int, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(touched, "_TOGETHER", together)
    rng = np.random.default_rng(1)
    region = Region(np.zeros(200, np.uint8), 200, 2, None)
    for notes in (region.writer, region.reader):
        notes[:] = rng.random(100) < share
    argument = Argument("x", 1, (150,), (1,), 1, region, start=20, num_bytes=150)
    for writes, reads in ((True, False), (False, True), (True, True)):
        spans = touched.touched_bytes(argument, writes=writes, reads=reads)
        found = np.zeros(150, bool)
        for start, end in spans:
            found[start:end] = True
        wanted = (region.writer * writes + region.reader * reads != 0)[10:85].repeat(2)
        np.testing.assert_array_equal(found, wanted)
        assert (spans[1:, 0] > spans[:-1, 1]).all(), "they lie apart"
        assert spans.max(initial=0) <= 150
