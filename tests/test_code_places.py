"""Where CPU kernels put the codes of activations."""

from __future__ import annotations

from itertools import pairwise

import pytest
from demo_variants import DEMO

from hypocenter.config import EngineConfig
from hypocenter.engine.runner import load_runner
from hypocenter.kernels.quantise import Operands
from hypocenter.model.gguf import open_gguf
from hypocenter.tensor import DType

#: Of buffers for 48 rows. A row of 96 has four groups of 32: its scales are a quarter of a line,
#: so that twelve whole lines hold twelve places; its codes fill two, and 48 would fit.
PLACES = {
    1: {"codes": 16, "scales": 12, "sums": 16, "weighted": 16},
    4: {"codes": 12, "scales": 12, "sums": 12, "weighted": 12},
    5: {"codes": 1, "scales": 1, "sums": 1, "weighted": 1},
    16: {"codes": 1, "scales": 1, "sums": 1, "weighted": 1},
}


@pytest.mark.parametrize("num_rows", list(PLACES))
def test_codes_of_few_rows_take_turns_in_places_of_their_own(num_rows: int) -> None:
    """On the CPU; no two share a cache line, also where the groups of a row do not fill lines."""
    buffers = Operands.allocate([DType.Q4_0], 48, 96, device="cpu")
    turns = [buffers.first(num_rows, turn) for turn in range(40)]
    for name, num_places in PLACES[num_rows].items():
        lines = []
        for turn in turns:
            one = getattr(turn, name)
            start = one.data.ctypes.data
            assert start == one.allocation.address + 4 * one.offset
            assert start % 64 == 0
            lines.append(range(start // 64, -(-(start + one.data.nbytes) // 64)))
        assert lines[num_places:] == lines[:-num_places]
        own = sorted(lines[:num_places], key=lambda one: one.start)
        assert all(one.stop <= after.start for one, after in pairwise(own))


def test_a_plan_of_a_token_writes_codes_elsewhere_each_time() -> None:
    """And where does not depend on which plans were made before."""
    with open_gguf(DEMO) as file:
        decoder = load_runner(file, EngineConfig(max_batch_tokens=64))._decoder

    def written() -> list[int]:
        launches = decoder.plan(1, 1).launches
        return [one.args[6].ctypes.data for one in launches if one.kernel == "rms_norm_codes"]

    places = written()
    assert len(places) > 8
    assert all(len(set(places[at : at + 8])) == 8 for at in range(len(places) - 7))
    assert places == written()
