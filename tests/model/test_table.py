"""The table of tensors against what the loader takes out of files of every family, and holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
from models.families import new_model
from models.family_gguf import write_gguf
from models.family_table import FAMILIES
from models.resident import resident_bytes, tensors_of
from models.tiny_gguf import write_tiny

from hypocenter.base.errors import BadModelFile, BadSetting
from hypocenter.base.tensor import DType
from hypocenter.engine.runner import load_runner
from hypocenter.model.facts.architecture import Architecture, read_architecture
from hypocenter.model.facts.part import Part
from hypocenter.model.facts.split import part_of
from hypocenter.model.gguf.file import GGUFFile, open_gguf
from hypocenter.model.gguf.values import TensorInfo, without_leading_ones
from hypocenter.model.tensors.footprint import needed_bytes
from hypocenter.model.tensors.part_of_file import PartOfFile
from hypocenter.model.tensors.table import TensorTable, Weights, tensor_table
from hypocenter.model.tensors.tensor_reader import TensorReader, check_tensors
from hypocenter.model.tensors.tensor_spec import TensorKind, TensorSpec
from hypocenter.model.tensors.weights import load_weights
from hypocenter.settings.config import EngineConfig


def is_of_few_families(case: SimpleNamespace) -> bool:
    """One of each kind of layer."""
    return case.file in ("llama", "gpt-oss", "gemma4-e", "deepseek2-lite", "stablelm-12b")


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def file(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GGUFFile]:
    path = tmp_path_factory.mktemp("family") / "model.gguf"
    family = FAMILIES[request.param]
    write_gguf(family, new_model(family), path)
    with open_gguf(path) as file:
        yield file


def of_file(table: TensorTable) -> list[TensorSpec]:
    return [spec for spec in table if spec.kind is not TensorKind.CONSTANT]


def held_bytes(weights: Weights) -> int:
    """What weights take, tables of rotations apart."""
    of_ropes = {id(tensor.allocation) for tensor in tensors_of(weights.ropes)}
    allocations = {id(x.allocation): x.allocation.num_bytes for x in tensors_of(weights)}
    return sum(size for which, size in allocations.items() if which not in of_ropes)


def declared_bytes(file: GGUFFile, table: TensorTable) -> int:
    constants = {
        (spec.value, spec.shape): spec.num_bytes(DType.F32)
        for spec in table
        if spec.kind is TensorKind.CONSTANT
    }
    of_tensors = sum(spec.num_bytes(file.tensors[spec.name].dtype) for spec in of_file(table))
    return of_tensors + sum(constants.values())


@pytest.mark.tier("sim", fast=is_of_few_families)
def test_the_table_is_what_the_loader_takes(
    file: GGUFFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    arch, taken = read_architecture(file), {}
    expect = TensorReader._expect

    def noted(reader: TensorReader, name: str, shape: tuple[int, ...]) -> DType:
        taken[name] = without_leading_ones(shape)
        return expect(reader, name, shape)

    monkeypatch.setattr(TensorReader, "_expect", noted)
    weights = load_weights(file, arch, 64)
    table = tensor_table(arch, file.tensors)
    names = [spec.name for spec in of_file(table)]
    assert len(set(names)) == len(names)
    assert {spec.name: without_leading_ones(spec.shape) for spec in of_file(table)} == taken
    assert declared_bytes(file, table) == held_bytes(weights)


def without(file: GGUFFile, name: str) -> Mapping[str, TensorInfo]:
    """The tensors of a file but that one and, of a weight, its bias."""
    gone = {name, f"{name.removesuffix('.weight')}.bias"}
    return MappingProxyType({key: info for key, info in file.tensors.items() if key not in gone})


@pytest.mark.tier("sim", fast=is_of_few_families)
def test_what_the_table_calls_optional_may_be_missing_and_nothing_else(
    file: GGUFFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    arch, seen = read_architecture(file), set()
    for spec in of_file(tensor_table(arch, file.tensors)):
        kind = spec.name.split(".", 2)[-1]
        if kind in seen or spec.kind is TensorKind.DIVISORS:  # texts may do without
            continue
        seen.add(kind)
        with monkeypatch.context() as patch:
            patch.setattr(file, "_tensors", without(file, spec.name))
            missing = missing_in(file, arch)
            assert (missing == "") == spec.is_optional, spec.name
            named = {one.name for one in tensor_table(arch, file.tensors)}
            assert missing in named | {""}, spec.name


def missing_in(file: GGUFFile, arch: Architecture) -> str:
    try:
        check_tensors(file, arch)
    except BadModelFile as error:
        return error.field
    return ""


@pytest.mark.tier("sim", fast=is_of_few_families)
def test_parts_of_a_file_have_the_shapes_of_the_table(file: GGUFFile) -> None:
    arch = read_architecture(file)
    for one in halves_of(arch):
        cut = PartOfFile(file, arch, one.part)
        for spec in of_file(tensor_table(one, cut.tensors)):
            shape = cut.tensors[spec.name].shape
            assert without_leading_ones(shape) == without_leading_ones(spec.shape), spec.name


def halves_of(arch: Architecture) -> list[Architecture]:
    """Both parts of a model; none where it is not split."""
    try:
        return [part_of(arch, Part(rank, 2)) for rank in range(2)]
    except BadSetting:
        return []


def test_a_tensor_of_another_shape_than_the_whole_model_has_is_refused(tmp_path: Path) -> None:
    """In the numbers of the file, not in those of a part."""
    with open_gguf(write_tiny(tmp_path / "tiny.gguf", "stablelm")) as file:
        arch = read_architecture(file)
        arch = replace(arch, layers=tuple(replace(x, num_kv_heads=2) for x in arch.layers))
        with pytest.raises(BadModelFile, match=r"attn_k.weight shape is \(10, 20\).*say \(20, 20"):
            PartOfFile(file, arch, Part(0, 2))


@pytest.mark.tier("sim")
def test_needed_bytes_are_those_that_are_allocated(file: GGUFFile) -> None:
    """Of every family: buffers of steps and pages of the cache, and not weights alone."""
    sizes: dict[str, Any] = {"max_batch_tokens": 8, "max_batch_requests": 3, "state_checkpoints": 2}
    config = EngineConfig(context_length=40, kv_tokens=40, **sizes)
    arch = read_architecture(file)
    needed = needed_bytes(file, arch, config, 40)
    held = resident_bytes(load_runner(file, config))
    angles_in_f64 = 40 * max(arch.rope.dim, arch.local_rope.dim) // 2 * 3 * 8
    assert sum(needed.values()) == held + angles_in_f64
