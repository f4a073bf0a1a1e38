"""A norm that no family has, planted where a change of the source would plant it.

Its flag goes into `families.py`; its field and its declaration go into `table.py`. Beside these
only the decoder, which computes with it, would change.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models.tiny_gguf import HEAD_DIM, NUM_HEADS, WIDTH, write_tiny

from hypocenter.base.errors import UnsupportedModel
from hypocenter.base.tensor import DType, Tensor
from hypocenter.device import copies, devices
from hypocenter.device.offline.abstract import AbstractGpu
from hypocenter.model.facts.architecture import Architecture, read_architecture
from hypocenter.model.facts.families import FAMILIES, Family
from hypocenter.model.facts.part import Part
from hypocenter.model.facts.split import part_of
from hypocenter.model.gguf.file import GGUFFile, open_gguf
from hypocenter.model.tensors import footprint, specimen_weights, table
from hypocenter.model.tensors.part_of_file import PartOfFile
from hypocenter.model.tensors.specimen_weights import undefined_weights
from hypocenter.model.tensors.tensor_reader import check_tensors
from hypocenter.model.tensors.tensor_spec import TensorSpec, vector
from hypocenter.model.tensors.weights import load_weights
from hypocenter.settings.config import EngineConfig

NAME = "blk.0.attn_result_norm.weight"
VALUES = np.arange(1, NUM_HEADS * HEAD_DIM + 1, dtype=np.float32).reshape(NUM_HEADS, HEAD_DIM)


@dataclass(frozen=True, slots=True)
class PlantedFamily(Family):
    """A family whose files may norm what each head gives."""

    norms_results: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PlantedLayer(table.LayerWeights):
    """A layer with a field for it."""

    result_norm: Tensor | None = None


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both edits."""
    old, declared = FAMILIES["llama"], table._of_layer
    given = {field.name: getattr(old, field.name) for field in fields(old)}
    monkeypatch.setitem(FAMILIES, "llama", PlantedFamily(**given, norms_results=True))
    monkeypatch.setattr(table, "LayerWeights", PlantedLayer)

    def of_layer(
        arch: Architecture, index: int, has: table.Has, **named: Any
    ) -> Iterator[TensorSpec]:
        yield from declared(arch, index, has, **named)
        if arch.family.norms_results:  # type: ignore[attr-defined]
            shape = arch.num_heads, arch.layers[index].head_dim
            yield vector("attn_result_norm.weight", "result_norm", *shape, is_optional=True)

    monkeypatch.setattr(table, "_of_layer", of_layer)


def model(path: Path, *, has_norm: bool) -> GGUFFile:
    """A model of two layers, the first of which has the norm, and of two heads of keys."""
    tensors = {
        f"blk.{i}.attn_{part}.weight": np.ones((WIDTH, WIDTH)) for i in (0, 1) for part in "kv"
    }
    norm = {NAME: VALUES} if has_norm else {}
    metadata = {"attention.head_count_kv": NUM_HEADS}
    return open_gguf(write_tiny(path, metadata=metadata, tensors={**tensors, **norm}, num_layers=2))


def result_norm(layer: table.LayerWeights) -> Tensor | None:
    """The field that was planted."""
    assert isinstance(layer, PlantedLayer)
    return layer.result_norm


def test_a_norm_that_is_declared_is_loaded_counted_cut_and_looked_for(
    planted: None, tmp_path: Path
) -> None:
    config = EngineConfig(context_length=40, max_batch_tokens=8)
    with (
        model(tmp_path / "with.gguf", has_norm=True) as file,
        model(tmp_path / "without.gguf", has_norm=False) as other,
    ):
        arch = read_architecture(file)
        for each in (file, other):
            check_tensors(each, arch)
        [first, second], [absent, _] = (load_weights(one, arch, 40).layers for one in (file, other))
        assert (result_norm(second), result_norm(absent)) == (None, None)
        norm = result_norm(first)
        assert norm is not None
        numbers = copies.to_host(norm)
        assert np.array_equal(numbers[: VALUES.size], VALUES.reshape(-1))
        held, without = (
            footprint.needed_bytes(one, arch, config, 40)["weights"] for one in (file, other)
        )
        assert held - without == norm.allocation.num_bytes
        part = part_of(arch, Part(1, 2))
        [own, _] = load_weights(PartOfFile(file, arch, part.part), part, 40).layers
        own_norm = result_norm(own)
        assert own_norm is not None
        assert np.array_equal(copies.to_host(own_norm)[:HEAD_DIM], VALUES[1])


def test_specimens_have_it_where_their_names_say_so(
    planted: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(specimen_weights, "_names", lambda arch: {NAME})
    gpu = AbstractGpu("nvidia")
    devices.use_backend(gpu)
    with model(tmp_path / "with.gguf", has_norm=True) as file:
        [first, second] = undefined_weights(read_architecture(file), DType.F16, gpu.name).layers
    norm = result_norm(first)
    assert norm is not None
    assert norm.shape == (64,)
    assert result_norm(second) is None


def test_without_its_declaration_it_is_refused(tmp_path: Path) -> None:
    with model(tmp_path / "with.gguf", has_norm=True) as file:
        arch = read_architecture(file)
        with pytest.raises(UnsupportedModel, match="attn_result_norm"):
            check_tensors(file, arch)
        with pytest.raises(UnsupportedModel, match="attn_result_norm"):
            load_weights(file, arch, 40)
