"""Files that llama.cpp's converter and quantiser make of every architecture load and agree."""

from __future__ import annotations

from pathlib import Path

import pytest
from models.family_table import FAMILIES

from hypocenter.model.gguf.file import open_gguf
from peer.comparison import CONVERTED_KINDS, ConvertedRow, Peer, converted_row
from peer.converted import NAMES, UNMADE, WRITING, Converter, make_converted
from peer.rows import keep

#: Largest logit difference from transformers over largest logit, where both sum in f32 and all
#: weights are the same numbers.
TOLERANCE = 3e-5
#: The same where the converter multiplies factors into weights and rounds these to f16 once more.
#: Each is off by 2^-12 on average; that grows with the layers, by less than this.
FOLDED_TOLERANCE = 32 * 2.0**-12
FOLDED = ("falcon-h1", "falcon-h1-normed")
#: How much farther than llama.cpp's our distribution may be from that of the weights' numbers: both
#: round what they multiply to 8 bits, each in its own way. A wrong scale, row or key is hundreds of
#: times as far.
FARTHER = 3.0
#: Where llama.cpp runs another model: what no other model exceeds.
LARGEST_DIVERGENCE = 0.2


@pytest.fixture(scope="session")
def converter(tmp_path_factory: pytest.TempPathFactory) -> Converter:
    return Converter(tmp_path_factory.mktemp("converted"))


@pytest.mark.parametrize(
    ("name", "kind"), [(name, kind) for name in NAMES for kind in CONVERTED_KINDS]
)
def test_a_converted_file(name: str, kind: str, converter: Converter, peer: Peer) -> None:
    model = converter[name]
    row = converted_row(model, kind, peer)
    with open_gguf(model.path) as file:
        assert file.text("general.architecture") == model.family.arch
    keep(row)
    assert row.ours < _limit(row)
    if row.error is not None:
        assert row.error < (FOLDED_TOLERANCE if name in FOLDED else TOLERANCE)


def _limit(row: ConvertedRow) -> float:
    return LARGEST_DIVERGENCE if row.theirs is None else FARTHER * row.theirs


def test_every_architecture_is_converted() -> None:
    names = {name.removeprefix("odd/") for name in NAMES}
    assert {FAMILIES[name].arch for name in names} == set(WRITING)


@pytest.mark.parametrize(("name", "said"), UNMADE.items())
def test_what_the_converter_makes_no_file_of(name: str, said: str, tmp_path: Path) -> None:
    """A version of it that does is to be listed among the others."""
    made = make_converted([name], tmp_path)
    with pytest.raises(RuntimeError, match=said):
        made[name].require_file()
