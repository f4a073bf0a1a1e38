"""Blocks and whole files are those of llama.cpp's quantiser, byte for byte.

`python -m peer.test_quantiser_llama_cpp` in tests/, with the variables of scripts/test-peers,
writes the digests anew that the fast tier compares with.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models.block_cases import comparable, digest, digest_of_types, weights
from models.unquantised_gguf import importance_of, write_imatrix, write_unquantised
from repository import ROOT

from hypocenter import LLM
from hypocenter.base.tensor import DType
from hypocenter.kernels.blocks.block_quantise import (
    NEEDS_WEIGHTS,
    WEIGHED,
    WRITTEN_TYPES,
    quantise_rows,
)
from hypocenter.model.gguf.file import open_gguf
from hypocenter.model.quantising.importance import read_importance
from hypocenter.model.quantising.mixes import MIXES, OF_NO_PROGRAM
from hypocenter.model.quantising.quantising import WantedFile, quantise
from peer.comparison import Peer

DIGESTS = ROOT / "tests/fixtures/blocks_of_ggml.json"
TYPES = ROOT / "tests/fixtures/types_of_mixes.json"
KNOWN_TYPES = json.loads(TYPES.read_text())


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


#: Mixes that need an importance matrix, and those that do not.
WEIGHED_ALONE = [
    name for name in MIXES if name.startswith(("IQ1", "IQ2", "IQ3_X")) or name == "Q2_K_S"
]
UNWEIGHED = [name for name in MIXES if name not in (*WEIGHED_ALONE, *OF_NO_PROGRAM)]


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


@pytest.mark.parametrize("num_experts", [0, 8])
@pytest.mark.parametrize("name", WEIGHED_ALONE)
def test_tensors_by_an_importance_matrix_are_those_of_llama_quantize(
    name: str, num_experts: int, peer: Peer, tmp_path: Path
) -> None:
    """Metadata apart: the program beside llama.cpp's library adds what tells of the matrix."""
    source = write_unquantised(
        tmp_path / "source.gguf", num_layers=9, num_experts=num_experts, ffn_width=256
    )
    importance = read_importance(write_imatrix(tmp_path / "i.gguf", importance_of(source)))
    peer.quantise(source, tmp_path / "theirs.gguf", name, dict(importance.weights))
    with open_gguf(source) as file:
        quantise(file, tmp_path / "ours.gguf", WantedFile(MIXES[name], importance))
    with open_gguf(tmp_path / "ours.gguf") as ours, open_gguf(tmp_path / "theirs.gguf") as theirs:
        assert list(ours.tensors) == list(theirs.tensors)
        for tensor, info in theirs.tensors.items():
            assert ours.tensors[tensor].dtype is info.dtype, tensor
            assert bytes(ours.raw(tensor)) == bytes(theirs.raw(tensor)), tensor


@pytest.mark.parametrize("model", KNOWN_TYPES["models"])
def test_recorded_types_are_those_of_a_dry_run(model: str, peer: Peer, tmp_path: Path) -> None:
    assert _types(peer, tmp_path, KNOWN_TYPES["models"][model]) == KNOWN_TYPES["types"][model]


def _types(peer: Peer, folder: Path, wanted: dict[str, Any]) -> dict[str, str | None]:
    """A digest of a line for each tensor, by mix; None for what llama.cpp cannot write."""
    source = write_unquantised(folder / "source.gguf", **wanted)
    return {
        mix: None if types is None else digest_of_types(dict(types))
        for mix, types in peer.types(
            source, [mix for mix in MIXES if mix not in OF_NO_PROGRAM]
        ).items()
    }


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
    """Write the digests of what ggml makes of all cases, and of the types of all mixes."""
    peer = Peer.from_environment(Path(tempfile.mkdtemp()))
    found = {
        dtype.name: {name: digest(made) for name, made in peer.blocks(dtype, _cases(dtype)).items()}
        for dtype in WRITTEN_TYPES
    }
    text = json.dumps({"llama-cpp-python": peer.version(), **found}, indent=1)
    DIGESTS.write_text(f"{text}\n")
    types = {}
    for model, wanted in KNOWN_TYPES["models"].items():
        with tempfile.TemporaryDirectory() as folder:
            types[model] = _types(peer, Path(folder), wanted)
    TYPES.write_text(json.dumps({**KNOWN_TYPES, "types": types}, indent=1) + "\n")


if __name__ == "__main__":
    _record()


@pytest.mark.parametrize("num_experts", [0, 4])
def test_llama_cpp_reads_nvfp4_as_we_do(num_experts: int, tmp_path: Path, peer: Peer) -> None:
    source = write_unquantised(
        tmp_path / "source.gguf", num_experts=num_experts, ffn_width=256, num_layers=2
    )
    small = tmp_path / "small.gguf"
    with open_gguf(source) as file:
        quantise(file, small, WantedFile(MIXES["NVFP4"]))
    ids = list(range(3, 20))
    theirs = peer.logits(small, [ids], 64)[0]
    with LLM(small, device="cpu", context_length=64) as llm:
        ours = np.array(llm.logits(ids))
    off = np.square(ours - theirs).mean() / np.square(theirs).mean()
    assert off < 0.01, "codes of activations are others, and weights are the same"
