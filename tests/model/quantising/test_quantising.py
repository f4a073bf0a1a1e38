"""A quantised file has the blocks, the order and the metadata that it should, or is not there."""

from __future__ import annotations

import errno
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from models.families import make_family
from models.family_table import FAMILIES, VOCAB_SIZE
from models.gguf_edit import Tensors, rewritten
from models.tiny_gguf import write_tiny
from models.unquantised_gguf import WIDTH, importance_of, write_imatrix, write_unquantised

from hypocenter import LLM
from hypocenter.base.errors import BadModelFile, UnsupportedModel, UsageError
from hypocenter.base.tensor import DType
from hypocenter.kernels.blocks.block_quantise import quantise_rows
from hypocenter.kernels.weights.block_types import dequantise
from hypocenter.model.gguf.file import GGUFFile, open_gguf
from hypocenter.model.gguf.inspection import check
from hypocenter.model.gguf.values import StringArray
from hypocenter.model.quantising import quantising
from hypocenter.model.quantising.importance import read_importance
from hypocenter.model.quantising.mixes import MIXES, in_order
from hypocenter.model.quantising.quantising import Quantised, WantedFile, quantise


def _made(source: Path, out: Path, mix: str, **wanted: Any) -> Quantised:
    with open_gguf(source) as file:
        return quantise(file, out, WantedFile(MIXES[mix], **wanted))


def _rows(file: GGUFFile, name: str) -> np.ndarray:
    info = file.tensors[name]
    raw = file.raw(name).reshape(-1, info.dtype.num_bytes(info.shape[-1]))
    return np.ascontiguousarray(dequantise(raw, info.dtype, info.shape[-1]))


def _values(file: GGUFFile, name: str) -> np.ndarray:
    """A tensor as f32, in NVFP4 times the factors that stand beside it."""
    info, scale = file.tensors[name], f"{name.removesuffix('.weight')}.scale"
    rows = _rows(file, name).reshape(info.shape)
    if info.dtype is not DType.NVFP4:
        return rows
    factors = file.raw(scale).view(np.float32)
    return np.asarray(rows * factors.reshape(-1, *(1,) * (len(info.shape) - 1)))


def test_tensors_and_metadata(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows come in parts of seven, and all files of a split model become one."""
    monkeypatch.setattr(quantising, "_MAX_NUMBERS", 7 * WIDTH)
    source = write_unquantised(tmp_path / "in.gguf", kind="BF16", split=3)
    told: list[float] = []
    with open_gguf(source) as file:
        assert len(file.shard_paths) == 3
        request = WantedFile(MIXES["Q4_K_M"])
        made = quantise(file, tmp_path / "out.gguf", request, lambda _, share: told.append(share))
        with open_gguf(tmp_path / "out.gguf") as new:
            assert list(new.tensors) == [info.name for info in in_order(file.tensors.values())]
            for name, info in new.tensors.items():
                assert info.shape == file.tensors[name].shape
                rows = _rows(file, name)
                if info.dtype.is_quantised:
                    assert bytes(new.raw(name)) == quantise_rows(rows, info.dtype).tobytes()
                else:
                    assert bytes(new.raw(name)) == bytes(file.raw(name))
            types = Counter(info.dtype.name for info in new.tensors.values())
            assert types == {"F32": 5, "Q4_K": 13, "Q6_K": 3}
            _same_metadata(file, new)
            assert check(new).findings == ()
    assert made.num_bytes == (tmp_path / "out.gguf").stat().st_size
    assert made.num_tensors[DType.Q6_K] == types["Q6_K"]
    assert made.dropped == ("split.no", "split.count", "split.tensors.count")
    assert told == sorted(told)
    assert told[-1] == 1


def _same_metadata(old: GGUFFile, new: GGUFFile) -> None:
    """All keys in their order, but for two at the end that are new, and those of split files."""
    left = [k for k in old.metadata if not k.startswith("split.") and k != "general.file_type"]
    assert list(new.metadata) == [*left, "general.quantization_version", "general.file_type"]
    for key in left:
        one, other = old.metadata[key], new.metadata[key]
        assert new.metadata.kind(key) == old.metadata.kind(key)
        if isinstance(one, StringArray):
            assert list(one) == list(other)  # type: ignore[arg-type]
        else:
            assert np.array_equal(one, other)  # type: ignore[arg-type]
    assert new.metadata["general.file_type"] == 15
    assert new.metadata["general.quantization_version"] == 2
    assert new.metadata.kind("general.file_type") == "u32"


def test_importance_counts_for_each_expert(tmp_path: Path) -> None:
    source = write_unquantised(tmp_path / "in.gguf", num_experts=4, ffn_width=256, num_layers=1)
    importance = read_importance(write_imatrix(tmp_path / "i.gguf", importance_of(source)))
    made = _made(source, tmp_path / "out.gguf", "Q4_0", importance=importance)
    name = "blk.0.ffn_up_exps.weight"
    with open_gguf(source) as file, open_gguf(tmp_path / "out.gguf") as new:
        rows, weights = _rows(file, name), importance.weights[name].reshape(4, -1)
        for expert in range(4):
            part = rows[256 * expert : 256 * (expert + 1)]
            blocks = quantise_rows(part, DType.Q4_0, np.ascontiguousarray(weights[expert]))
            found = new.raw(name).reshape(4, -1)[expert]
            assert bytes(found) == blocks.tobytes()
            assert bytes(found) != quantise_rows(part, DType.Q4_0).tobytes()
        assert new.metadata["quantize.imatrix.entries_count"] == len(importance.weights)
        assert new.metadata["quantize.imatrix.chunks_count"] == importance.num_chunks
        assert new.metadata["quantize.imatrix.dataset"] == importance.dataset
        assert new.metadata["quantize.imatrix.file"] == str(importance.path)[:127]
    assert made.unweighed == ("token_embd.weight",)


def test_nvfp4_has_a_factor_for_each_matrix(tmp_path: Path) -> None:
    source = write_unquantised(tmp_path / "in.gguf", num_experts=4, ffn_width=256, num_layers=1)
    made = _made(source, tmp_path / "out.gguf", "NVFP4")
    with open_gguf(source) as old, open_gguf(tmp_path / "out.gguf") as new:
        assert check(new).findings == ()
        assert new.metadata["general.file_type"] == 39
        for name in (one for one, info in new.tensors.items() if info.dtype is DType.NVFP4):
            num_matrices = old.tensors[name].shape[0] if "_exps" in name else 1
            scales = new.raw(f"{name.removesuffix('.weight')}.scale").view(np.float32)
            x = _rows(old, name).reshape(num_matrices, -1, old.tensors[name].shape[-1])
            assert (scales == np.abs(x).max(axis=(1, 2)) / np.float32(1440)).all(), name
            parts = zip(x, scales, new.raw(name).reshape(num_matrices, -1), strict=True)
            for matrix, scale, found in parts:
                blocks = quantise_rows(matrix / scale, DType.NVFP4)
                assert bytes(found) == blocks.tobytes()
                read = scale * dequantise(blocks, DType.NVFP4, matrix.shape[1])
                assert np.square(read - matrix).mean() < 0.0105 * np.square(matrix).mean()
        assert new.tensors["token_embd.weight"].dtype is DType.Q6_K
        assert "token_embd.scale" not in new.tensors
    assert made.num_tensors == {DType.F32: 5 + 7, DType.F16: 1, DType.NVFP4: 7, DType.Q6_K: 2}
    with (
        LLM(source, device="cpu", context_length=64) as whole,
        LLM(tmp_path / "out.gguf", device="cpu", context_length=64) as small,
    ):
        ids = list(range(3, 20))
        right, ours = np.array(whole.logits(ids)), np.array(small.logits(ids))
    # Squares of what seven products, and a choice of experts, are off by a tenth each.
    assert np.square(ours - right).mean() < 0.15 * np.square(right).mean()


@pytest.mark.parametrize("has_factors", [True, False])
def test_experts_with_factors_of_their_own_become_nvfp4(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_factors: bool
) -> None:
    """What they are divided by is multiplied into these factors, which are there for all types."""
    config = {**FAMILIES["gemma4-whole"].config, "moe_intermediate_size": 64}
    keys = {**FAMILIES["gemma4-whole"].metadata, "expert_feed_forward_length": 64}
    family = replace(FAMILIES["gemma4-whole"], config=config, metadata=keys)
    monkeypatch.setitem(FAMILIES, "gemma4-whole", family)
    made = make_family("gemma4-whole", tmp_path)
    name, scale = "blk.0.ffn_down_exps.weight", "blk.0.ffn_down_exps.scale"

    def small(tensors: Tensors) -> Tensors:
        """Weights as small as those of models are, whose factors make up for it."""
        tensors[name] = tensors[name] / 1000
        tensors[scale] = np.linspace(500, 2000, 7, dtype=np.float32)
        return {key: x for key, x in tensors.items() if has_factors or key != scale}

    source = rewritten(made.path, tmp_path / "in.gguf", small)
    _made(source, tmp_path / "out.gguf", "NVFP4")
    with open_gguf(source) as old, open_gguf(tmp_path / "out.gguf") as new:
        assert check(new).findings == ()
        assert new.tensors[name].dtype is DType.NVFP4
        before = old.raw(scale).view(np.float32) if has_factors else np.ones(7)
        wanted = _rows(old, name).reshape(7, -1).astype(np.float64) * before[:, None]
        now = new.raw(scale).view(np.float32).astype(np.float64)
        read = _rows(new, name).reshape(7, -1).astype(np.float64) * now[:, None]
        values = {key: _values(new, key) for key in old.tensors if key != scale}
    assert (np.square(read - wanted).mean(1) < 0.0105 * np.square(wanted).mean(1)).all()

    # The same numbers in f32 give the same logits, so no factor counts twice.
    def numbers(tensors: Tensors) -> Tensors:
        return values | {scale: np.ones(7, np.float32)}

    settings: dict[str, Any] = {
        "device": "cpu", "context_length": made.context_length, "kv_dtype": "f32",
    }  # fmt: skip
    right = rewritten(source, tmp_path / "right.gguf", numbers)
    with LLM(right, **settings) as whole, LLM(tmp_path / "out.gguf", **settings) as packed:
        ids = made.token_ids[:8]
        logits, ours = np.array(whole.logits(ids)), np.array(packed.logits(ids))
    # Codes of activations are off by some hundredths; a factor twice would be 500.
    assert np.abs(ours - logits).max() < 0.1 * np.abs(logits).max()


def test_numbers_of_nvfp4_come_back_exactly(tmp_path: Path) -> None:
    """Codes times scales, the largest of them times a power of two: so the factor is one."""
    rng = np.random.default_rng(3)
    scales = (1 + rng.integers(0, 8, (WIDTH, WIDTH // 16, 1)) / 8) * 2.0 ** rng.integers(-5, 8)
    codes = rng.choice([0, 0.5, 1, 1.5, 2, 3, 4, -1, -6], (WIDTH, WIDTH // 16, 16))
    codes[..., 3], scales[0, 0] = 6, 240
    rows = np.asarray(2.0**-11 * scales * codes, np.float32).reshape(WIDTH, WIDTH)
    name = "blk.1.attn_q.weight"
    source = write_unquantised(tmp_path / "in.gguf", kind="F32", changed={name: rows})
    _made(source, tmp_path / "out.gguf", "NVFP4")
    with open_gguf(tmp_path / "out.gguf") as new:
        scale = new.raw("blk.1.attn_q.scale").view(np.float32)
        assert scale == [2.0**-11]
        assert (scale * _rows(new, name) == rows).all()


def test_matrices_whose_factor_llama_cpp_does_not_read_are_no_nvfp4(tmp_path: Path) -> None:
    """It refuses files with tensors that it does not know; without a factor scales are zeros."""
    rows = np.random.default_rng(2).normal(size=(2, 64, WIDTH)).astype(np.float32) / 1000
    others = {"blk.0.attn_q_a.weight": rows[0], "blk.0.ffn_gate_up_exps.weight": rows}
    plain = write_unquantised(tmp_path / "plain.gguf", num_layers=1)
    source = rewritten(plain, tmp_path / "in.gguf", lambda tensors: {**tensors, **others})
    _made(source, tmp_path / "out.gguf", "NVFP4")
    with open_gguf(tmp_path / "out.gguf") as new:
        for name, values in others.items():
            assert f"{name.removesuffix('.weight')}.scale" not in new.tensors
            assert new.tensors[name].dtype is DType.IQ4_NL
            read = _rows(new, name).reshape(values.shape)
            assert np.square(read - values).mean() < 0.01 * np.square(values).mean()


def test_rows_that_are_no_blocks_get_another_type(tmp_path: Path) -> None:
    source = write_unquantised(tmp_path / "in.gguf", num_layers=1, ffn_width=272)
    made = _made(source, tmp_path / "out.gguf", "Q4_K_S")
    assert made.fallbacks == {"blk.0.ffn_down.weight": DType.F16}
    pure = _made(source, tmp_path / "pure.gguf", "Q4_K_S", pure=True)
    assert set(pure.num_tensors) == {DType.F32, DType.F16, DType.Q4_K}


def _with(values: dict[int, float]) -> dict[str, np.ndarray]:
    rows = np.zeros((WIDTH, WIDTH), np.float32)
    for at, value in values.items():
        rows.reshape(-1)[at] = value
    return {"blk.1.attn_q.weight": rows}


@pytest.mark.parametrize(
    ("values", "mix", "said"),
    [
        ({700: np.nan}, "Q8_0", "column 188 of row 2 of tensor 'blk.1.attn_q.weight' is nan, but"),
        ({700: np.inf}, "F16", "column 188 of row 2 of tensor 'blk.1.attn_q.weight' is inf, but"),
        ({700: np.inf}, "NVFP4", "column 188 of row 2 of tensor 'blk.1.attn_q.weight' is inf, but"),
        ({700: 1e30}, "Q6_K", "is 1e[+]30, but Q6_K reaches not so far; take another type, such"),
        ({700: 1e9}, "Q4_0", "row 2 of tensor 'blk.1.attn_q.weight' is too large, but a number"),
        ({700: 1e5}, "F16", "row 2 of tensor 'blk.1.attn_q.weight' is too large, but a number"),
    ],
)
def test_numbers_that_cannot_be_are_refused(
    values: dict[int, float], mix: str, said: str, tmp_path: Path
) -> None:
    source = write_unquantised(
        tmp_path / "in.gguf", kind="F32", ffn_width=32, changed=_with(values)
    )
    with pytest.raises(BadModelFile, match=said) as caught:
        _made(source, tmp_path / "out.gguf", mix)
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["in.gguf"]


def test_weights_that_break_a_type_are_blamed_and_not_the_model(tmp_path: Path) -> None:
    """The same rows can be written with equal weights."""
    rows = np.random.RandomState(1).standard_normal((WIDTH, WIDTH)).astype(np.float32)
    source = write_unquantised(
        tmp_path / "in.gguf",
        kind="F32",
        ffn_width=32,
        changed={"blk.1.attn_q.weight": rows * np.float32(1.9e6)},
    )
    sums = {"blk.1.attn_q.weight": np.full((1, WIDTH), 7e14, np.float32)}
    importance = read_importance(write_imatrix(tmp_path / "i.dat", sums))
    said = "weights of 'blk.1.attn_q.weight' is from 1e[+]14 to 1e[+]14, but row 102 as IQ4_NL can"
    with pytest.raises(BadModelFile, match=said) as caught:
        _made(source, tmp_path / "out.gguf", "IQ4_NL", pure=True, importance=importance)
    assert str(importance.path) in str(caught.value)
    assert str(source) not in str(caught.value)


def test_no_tensor_becomes_zeros_alone(tmp_path: Path) -> None:
    """Such a file would be taken for a download that broke off."""
    rows = np.full((VOCAB_SIZE, WIDTH), 1e-12, np.float32)
    source = write_unquantised(
        tmp_path / "in.gguf", kind="F32", ffn_width=32, changed={"output.weight": rows}
    )
    with pytest.raises(
        BadModelFile, match=r"'output\.weight' is too small, but F16 makes zeros of"
    ):
        _made(source, tmp_path / "out.gguf", "F16")
    assert [path.name for path in tmp_path.iterdir()] == ["in.gguf"]


@pytest.mark.parametrize("has_links", [True, False])
def test_a_file_that_another_makes_meanwhile_is_kept(
    has_links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "no links here")

    if not has_links:
        monkeypatch.setattr("os.link", refuse)
    source = write_unquantised(tmp_path / "in.gguf", num_layers=1, ffn_width=32)
    request, out = WantedFile(MIXES["Q8_0"]), tmp_path / "out.gguf"

    def come_first(*_: object) -> None:
        out.write_text("another's")

    with open_gguf(source) as file:
        with pytest.raises(FileExistsError) as caught:
            quantise(file, out, request, come_first)
        assert caught.value.filename == str(out)
        assert out.read_text() == "another's"
        quantise(file, tmp_path / ("n" * 255), request)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"in.gguf", "out.gguf", "n" * 255}


def test_what_cannot_be_written_is_told_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_unquantised(tmp_path / "in.gguf", num_layers=1, ffn_width=32)
    before = source.read_bytes()
    link = tmp_path / "link.gguf"
    link.symlink_to(source)
    for out, said in (
        (source, "is the model itself; name another file"),
        (link, "is the model itself; name another file"),
        (tmp_path / "no" / "out.gguf", "there is no folder .*no; make it first"),
    ):
        with pytest.raises(UsageError, match=said):
            _made(source, out, "Q8_0")
    _made(source, tmp_path / "q8.gguf", "Q8_0")
    with pytest.raises(UsageError, match="is there already; name another file, or remove it"):
        _made(source, tmp_path / "q8.gguf", "Q8_0")
    with pytest.raises(
        UsageError, match=r"'output\.weight' is Q8_0 already, and Q6_K of it loses tw"
    ):
        _made(tmp_path / "q8.gguf", tmp_path / "twice.gguf", "Q4_0")
    _made(tmp_path / "q8.gguf", tmp_path / "twice.gguf", "Q4_0", requantise=True)
    with pytest.raises(UsageError, match="as IQ2_XS in IQ2_XS needs an importance matrix; give"):
        _made(source, tmp_path / "out.gguf", "IQ2_XS")
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(UsageError, match=r"out.gguf will have .* KiB, but 1000 B are free in"):
        _made(source, tmp_path / "out.gguf", "Q8_0")
    assert source.read_bytes() == before
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"in.gguf", "link.gguf", "q8.gguf", "twice.gguf"}


def test_other_files_are_told_for_what_they_are(tmp_path: Path) -> None:
    unknown = write_tiny(tmp_path / "unknown.gguf", "falcon")
    with pytest.raises(
        UnsupportedModel, match=r"general\.architecture is 'falcon', but the rules of"
    ):
        _made(unknown, tmp_path / "out.gguf", "Q8_0")
    source = write_unquantised(tmp_path / "in.gguf", num_layers=1, ffn_width=32)
    matrix = write_imatrix(tmp_path / "imatrix.gguf", importance_of(source))
    with pytest.raises(UnsupportedModel, match="the file is an importance matrix"):
        _made(matrix, tmp_path / "out.gguf", "Q8_0")
