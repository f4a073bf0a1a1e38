"""Names and axes of tensors are the file's word: what no layer has is refused in one line."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest
from models.families import make_family

from hypocenter.base.errors import BadModelFile
from hypocenter.engine.runner import load_runner
from hypocenter.model.facts.architecture import read_architecture
from hypocenter.model.gguf.file import open_gguf
from hypocenter.model.tensors import footprint
from hypocenter.settings.config import EngineConfig

CONFIG = EngineConfig(context_length=40, max_batch_tokens=8, max_batch_requests=3)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("families")
    return {name: make_family(name, folder).path for name in ("phi3", "deepseek2-lite")}


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("phi3", "blk.x.ffn_up.weight"),
        ("phi3", "blk..ffn_up.weight"),
        ("phi3", "blk.99.attn_qkv.weight"),
        ("phi3", ".attn_qkv.weight"),
        ("phi3", "blk.٣.ffn_up.weight"),
        ("deepseek2-lite", "blk.-1.ffn_up.weight"),
    ],
)
def test_a_tensor_of_no_layer_is_refused(family: str, name: str, files: dict[str, Path]) -> None:
    kind = name.rpartition(".")[0].rpartition(".")[2]
    with open_gguf(files[family]) as file:
        old = next(
            there for there in reversed(list(file.tensors)) if there.endswith(f".{kind}.weight")
        )
        tensors = {(name if key == old else key): info for key, info in file.tensors.items()}
        tensors[name] = replace(tensors[name], name=name)
        file._tensors = MappingProxyType(tensors)
        with pytest.raises(BadModelFile, match=r"blk\.\d\.\w+\.weight is missing, but"):
            load_runner(file, CONFIG)


@pytest.mark.parametrize("kind", ["attn_kv_a_mqa", "ffn_gate_up_exps", "ffn_gate_inp", "attn_k_b"])
@pytest.mark.parametrize("axes", [(), (1,), (3, 5), (2, 3, 5), (2, 2, 3, 5)])
def test_room_for_any_axes_is_reckoned(
    kind: str, axes: tuple[int, ...], files: dict[str, Path]
) -> None:
    """Loading refuses them; it comes after the look at the memory."""
    with open_gguf(files["deepseek2-lite"]) as file:
        arch = read_architecture(file)
        info = next(iter(file.tensors.values()))
        lie = replace(info, name=f"blk.1.{kind}.weight", shape=axes)
        file._tensors = MappingProxyType({**file.tensors, lie.name: lie})
        needed = footprint.needed_bytes(file, arch, CONFIG, 40)
    assert needed["weights"] > 0


def test_a_file_with_more_layers_than_it_says_is_refused(
    files: dict[str, Path], tmp_path: Path
) -> None:
    path = Path(shutil.copy(files["phi3"], tmp_path))
    with open_gguf(path) as file:
        num_layers = read_architecture(file).num_layers
    data = path.read_bytes()
    key = b"phi3.block_count"
    value = data.index(key) + len(key) + 4  # behind its type
    assert data[value] == num_layers
    path.write_bytes(data[:value] + bytes([1]) + data[value + 1 :])
    with (
        open_gguf(path) as file,
        pytest.raises(BadModelFile, match="of 1 layers have no such tens"),
    ):
        load_runner(file, CONFIG)
