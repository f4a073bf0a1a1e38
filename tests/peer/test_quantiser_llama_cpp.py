"""Blocks and whole files are those of llama.cpp's quantiser, byte for byte.

`python -m peer.test_quantiser_llama_cpp` in tests/, with the variables of scripts/test-peers,
writes the digests anew that the fast tier compares with.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
from models.block_cases import comparable, digest, weights
from models.unquantised_gguf import write_unquantised
from repository import ROOT

from hypocenter.base.tensor import DType
from hypocenter.kernels.blocks.block_quantise import (
    NEEDS_WEIGHTS,
    WEIGHED,
    WRITTEN_TYPES,
    quantise_rows,
)
from hypocenter.model.gguf.file import open_gguf
from hypocenter.model.quantising.mixes import MIXES
from hypocenter.model.quantising.quantising import WantedFile, quantise
from peer.comparison import Peer

DIGESTS = ROOT / "tests/fixtures/blocks_of_ggml.json"


def _cases(dtype: DType) -> dict[str, np.ndarray]:
    """All cases of a type, those with weights under names that begin with "weighed"."""
    found = {} if dtype in NEEDS_WEIGHTS else comparable(dtype)
    if dtype in WEIGHED:
        found = {**found, **{f"weighed {name}": x for name, x in comparable(dtype).items()}}
    return {**found, "weights": weights()}


@pytest.mark.parametrize("dtype", WRITTEN_TYPES, ids=lambda dtype: dtype.name)
def test_blocks_are_ggmls(dtype: DType, peer: Peer) -> None:
    cases = _cases(dtype)
    theirs = peer.blocks(dtype, cases)
    known = json.loads(DIGESTS.read_text())[dtype.name]
    of_columns = cases.pop("weights")
    for name, x in cases.items():
        ours = quantise_rows(x, dtype, of_columns if name.startswith("weighed") else None)
        assert ours.tobytes() == theirs[name].tobytes(), name
        assert known[name] == digest(theirs[name]), f"{name}: record the digests anew"


#: Mixes without rules of their own for tensors, which need no importance matrix.
UNWEIGHED = [name for name in MIXES if not name.startswith(("IQ2", "IQ3_X")) and name != "Q2_K_S"]


@pytest.mark.parametrize("num_experts", [0, 4])
@pytest.mark.parametrize("name", UNWEIGHED)
def test_a_file_is_that_of_llama_quantize(
    name: str, num_experts: int, peer: Peer, tmp_path: Path
) -> None:
    source = write_unquantised(
        tmp_path / "source.gguf", num_layers=9, num_experts=num_experts, ffn_width=256
    )
    peer.quantise(source, tmp_path / "theirs.gguf", name)
    with open_gguf(source) as file:
        quantise(file, tmp_path / "ours.gguf", WantedFile(MIXES[name]))
    assert (tmp_path / "ours.gguf").read_bytes() == (tmp_path / "theirs.gguf").read_bytes()


@pytest.mark.parametrize("num_experts", [0, 4])
@pytest.mark.parametrize(("kind", "num_files"), [("F32", 1), ("BF16", 1), ("F16", 3), ("BF16", 4)])
@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q3_K_M", "Q4_K_M", "IQ4_XS"])
def test_a_source_of_another_type_or_in_parts_gives_the_same_file(
    name: str, kind: str, num_files: int, num_experts: int, peer: Peer, tmp_path: Path
) -> None:
    source = write_unquantised(
        tmp_path / "source.gguf", num_layers=3, num_experts=num_experts, ffn_width=256,
        kind=kind, split=num_files,
    )  # fmt: skip
    assert len([*tmp_path.iterdir()]) == num_files
    peer.quantise(source, tmp_path / "theirs.gguf", name)
    with open_gguf(source) as file:
        quantise(file, tmp_path / "ours.gguf", WantedFile(MIXES[name]))
    assert (tmp_path / "ours.gguf").read_bytes() == (tmp_path / "theirs.gguf").read_bytes()


def _record() -> None:
    """Write the digests of what ggml makes of all cases."""
    peer = Peer.from_environment(Path(tempfile.mkdtemp()))
    found = {
        dtype.name: {name: digest(made) for name, made in peer.blocks(dtype, _cases(dtype)).items()}
        for dtype in WRITTEN_TYPES
    }
    text = json.dumps({"llama-cpp-python": peer.version(), **found}, indent=1)
    DIGESTS.write_text(f"{text}\n")


if __name__ == "__main__":
    _record()
