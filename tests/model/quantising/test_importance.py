"""Importance matrices of both formats give the same weights; broken ones are refused in a line."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from models.unquantised_gguf import DATASET, NUM_CHUNKS, write_imatrix

from hypocenter.base.errors import BadModelFile, UsageError
from hypocenter.model.quantising.importance import read_importance, weights_of

SUMS = {
    "blk.0.attn_q.weight": np.array([[1, 2, 3, 74]], np.float32),
    "blk.0.ffn_up_exps.weight": np.array([[1, 2], [37, 0], [5, 6]], np.float32),
}


def test_a_gguf_file_has_means_of_what_each_matrix_has_seen(tmp_path: Path) -> None:
    found = read_importance(write_imatrix(tmp_path / "a.gguf", SUMS))
    assert (found.num_chunks, found.dataset) == (NUM_CHUNKS, DATASET)
    of_q = found.weights["blk.0.attn_q.weight"]
    assert of_q.tobytes() == (SUMS["blk.0.attn_q.weight"][0] / np.float32(37)).tobytes()
    # The last expert has seen nothing: all its columns count the same.
    assert found.weights["blk.0.ffn_up_exps.weight"].tolist()[2:] == [1, 0, 1, 1]


def test_a_dat_file_has_sums_of_so_many_calls(tmp_path: Path) -> None:
    found = read_importance(write_imatrix(tmp_path / "a.dat", SUMS))
    assert (found.num_chunks, found.dataset) == (NUM_CHUNKS, DATASET)
    of_q = found.weights["blk.0.attn_q.weight"]
    assert of_q.tobytes() == (SUMS["blk.0.attn_q.weight"][0] / np.float32(7)).tobytes()


def test_what_follows_the_entries_of_a_dat_file_may_be_missing(tmp_path: Path) -> None:
    data = write_imatrix(tmp_path / "a.dat", SUMS).read_bytes()
    short = tmp_path / "b.dat"
    short.write_bytes(data[: -8 - len(DATASET)])
    found = read_importance(short)
    assert (len(found.weights), found.num_chunks, found.dataset) == (2, 0, "")


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    found = read_importance(write_imatrix(tmp_path / "a.dat", SUMS))
    assert weights_of(found, "output.weight", 256) is None
    assert weights_of(None, "blk.0.attn_q.weight", 256) is None
    with pytest.raises(UsageError, match="has 4 weights, but the tensor has 256 columns"):
        weights_of(found, "blk.0.attn_q.weight", 256)


@pytest.mark.parametrize("small", [0.0, 1e-44, 1e-22])
def test_a_matrix_of_which_no_column_counts_is_refused(small: float, tmp_path: Path) -> None:
    sums = {"a": np.array([[small, 0], [7, 0]], np.float32)}
    found = read_importance(write_imatrix(tmp_path / "a.dat", sums))
    with pytest.raises(
        BadModelFile, match=r"largest weight of matrix 0 of 'a' is .*, but"
    ) as caught:
        weights_of(found, "a", 4, 2)
    assert str(found.path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert weights_of(found, "a", 4) is not None, "one column of one matrix is enough"


def _entry(name: bytes, values: list[float], num_calls: int = 1) -> bytes:
    head = struct.pack("<i", len(name)) + name + struct.pack("<ii", num_calls, len(values))
    return head + struct.pack(f"<{len(values)}f", *values)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "size in bytes, is 4, but 0 of the 0 bytes are left"),
        (struct.pack("<i", 0), "number of entries is 0, but it must be from 1 to 65536"),
        (struct.pack("<i", -3), "number of entries is -3, but it must be from 1"),
        (struct.pack("<ii", 1, 1 << 30), "length of the name of entry 0 is 1073741824, but"),
        (struct.pack("<i", 1) + _entry(b"a", [1.0])[:-2], "weights of entry 0, size in bytes, is"),
        (struct.pack("<i", 1) + _entry(b"a", [1.0, np.nan]), "weight of 'a' is nan, but it must"),
        (struct.pack("<i", 1) + _entry(b"a", [1.0, -2.0]), "weight of 'a' is -2.0, but it must"),
        (struct.pack("<i", 1) + _entry(b"a", [1.0, 3e38]), "weight of 'a' is 3e[+]38, but the lim"),
        (struct.pack("<i", 1) + _entry(b"a", []), "length of entry 0 is 0, but it must be from 1"),
    ],
)
def test_a_broken_dat_file(data: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "a.dat"
    path.write_bytes(data)
    with pytest.raises(BadModelFile, match=said) as caught:
        read_importance(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda w: w.add_tensor("x.in_sum2", np.array([1], np.float32)),
            "sums and counts come in pairs",
        ),
        (
            lambda w: _pair(w, np.array([1, 2], np.float16), 1),
            "type of 'x.in_sum2' is 'F16', but it must be",
        ),
        (
            lambda w: _pair(w, np.array([1, 2, 3], np.float32), 2),
            "it must be a multiple of its 2 counts",
        ),
        (lambda w: None, "number of entries is 0"),
    ],
)
def test_a_broken_gguf_file(
    change: Callable[[gguf.GGUFWriter], None], said: str, tmp_path: Path
) -> None:
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "")
    writer.add_array("imatrix.datasets", [DATASET])
    writer.add_uint32("imatrix.chunk_count", 1)
    writer.add_uint32("imatrix.chunk_size", 512)
    change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(BadModelFile, match=said):
        read_importance(tmp_path / "a.gguf")


def _pair(writer: gguf.GGUFWriter, sums: np.ndarray, num_counts: int) -> None:
    writer.add_tensor("x.in_sum2", sums)
    writer.add_tensor("x.counts", np.ones(num_counts, np.float32))


def test_a_gguf_file_that_is_none_and_no_file(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(BadModelFile, match=r"imatrix\.datasets is missing, but an importance"):
        read_importance(tmp_path / "a.gguf")
    with pytest.raises(UsageError, match="there is no such file"):
        read_importance(tmp_path / "b.gguf")
