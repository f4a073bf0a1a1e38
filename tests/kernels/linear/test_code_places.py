"""Where CPU kernels put the codes of activations."""

from __future__ import annotations

from itertools import pairwise

import pytest
from repository import DEMO

from hypocenter.base.tensor import DType
from hypocenter.engine.runner import load_runner
from hypocenter.kernels.linear.operands import Operands
from hypocenter.model.gguf.file import open_gguf
from hypocenter.settings.config import EngineConfig

#: Of buffers for 48 rows. A row of 96 has four groups of 32: its scales are a quarter of a line,
#: so that twelve whole lines hold twelve places; its codes fill two, and 48 would fit.
PLACES = {
    1: {"codes": 16, "scales": 12, "sums": 16, "weighted": 16},
    4: {"codes": 12, "scales": 12, "sums": 12, "weighted": 12},
    5: {"codes": 1, "scales": 1, "sums": 1, "weighted": 1},
    16: {"codes": 1, "scales": 1, "sums": 1, "weighted": 1},
}

#: Which argument of a kernel is the first of the four that it writes.
WRITTEN = {"rms_norm_codes": 6, "attention": 9, "linear_gate_codes": 8}


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

    def written() -> dict[str, list[list[int]]]:
        """By kernel where its launches write codes, scales, sums and weighted sums."""
        found: dict[str, list[list[int]]] = {kernel: [] for kernel in WRITTEN}
        for one in decoder.plan(1, 1).launches:
            if one.kernel in WRITTEN:
                at = WRITTEN[one.kernel]
                found[one.kernel].append([each.ctypes.data for each in one.args[at : at + 4]])
        return found

    places = written()
    assert places == written()
    assert [len(places[kernel]) for kernel in WRITTEN] == [13, 6, 6]
    for several in places.values():
        for part in zip(*several, strict=True):
            assert all(len(set(part[at : at + 6])) == 6 for at in range(len(part) - 5))
    codes = [one for kernel in ("rms_norm_codes", "attention") for one in places[kernel]]
    assert not {one[0] for one in codes} & {one[0] for one in places["linear_gate_codes"]}
