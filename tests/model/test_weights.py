"""Loading: which tensors are refused, and that a model which does not fit is refused before."""

from __future__ import annotations

import math
import re
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType
from models.demo_variants import demo_with
from models.resident import resident_bytes
from models.tiny_gguf import HEAD_DIM, NUM_HEADS, NUM_KV_HEADS, write_tiny
from repository import DEMO

from hypocenter import LLM
from hypocenter.base.errors import BadModelFile, OutOfMemory, UnsupportedModel
from hypocenter.base.tensor import DType
from hypocenter.base.wording import bytes_text
from hypocenter.cli.verbs import bench
from hypocenter.device import copies, devices
from hypocenter.device.backend import Room
from hypocenter.engine.runner import load_runner
from hypocenter.kernels.weights import packing
from hypocenter.model.facts.architecture import read_architecture
from hypocenter.model.gguf.file import GGUFFile, open_gguf
from hypocenter.model.tensors import footprint
from hypocenter.model.tensors import weights as weights_module
from hypocenter.model.tensors.table import FeedForward, Weights
from hypocenter.model.tensors.weights import load_weights
from hypocenter.settings.config import EngineConfig

ONES = np.ones(4)
SMAPS = Path("/proc/self/smaps")


def load(folder: Path, name: str = "llama", **changes: Any) -> Weights:
    with open_gguf(write_tiny(folder / "tiny.gguf", name, **changes)) as file:
        arch = read_architecture(file)
        return load_weights(file, arch, arch.context_length)


@pytest.mark.parametrize(
    "name",
    [
        "blk.1.attn_norm.weight",
        "blk.999.junk",
        "blk.0.junk",
        "blk.x.y",
        "blk.",
        "blk.²",
        "blk.².weight",
        "blk.٣.weight",
        "blk.-1.weight",
        "blk.1 .weight",
        "blk." + "1" * 50 + ".w",
        "junk",
    ],
)
def test_a_tensor_that_would_be_ignored_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        load(tmp_path, tensors={name: ONES})
    assert caught.value.value == name
    assert "llama models of 1 layers have no such tensor" in str(caught.value)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("olmo2", "blk.0.attn_norm.weight"),
        ("arcee", "blk.0.ffn_gate.bias"),
        ("llama", "blk.0.attn_norm.bias"),
    ],
)
def test_what_a_family_would_not_use_is_refused(family: str, name: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=f"{name}.*{family} models of 1 layers have no"):
        load(tmp_path, family, tensors={name: ONES})


def test_a_block_count_below_the_layers_in_the_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"tensor is 'blk.1.attn_norm.weight'"):
        load(tmp_path, num_layers=3, metadata={"block_count": 1})


def test_draft_layers_are_left_out_and_only_they(tmp_path: Path) -> None:
    metadata = {"block_count": 3, "nextn_predict_layers": 2}
    drafts = {"blk.1.nextn.eh_proj.weight": ONES, "blk.2.attn_norm.weight": ONES}
    assert len(load(tmp_path, metadata=metadata, tensors=drafts).layers) == 1
    for name in ("blk.3.attn_norm.weight", "blk.1", "blk.1.", "blk.01.w", "blk.١.w", "blk.²."):
        with pytest.raises(UnsupportedModel):
            load(tmp_path, metadata=metadata, tensors={**drafts, name: ONES})


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
@pytest.mark.parametrize("name", ["rope_freqs", "rope_factors_long", "rope_factors_short"])
def test_rope_divisors_must_divide(name: str, value: float, tmp_path: Path) -> None:
    sound = np.ones(HEAD_DIM // 2)
    wrong = np.array([1.0, 1.0, value, 1.0, value])
    pair = {f"rope_factors_{kind}.weight": sound for kind in ("long", "short")}
    tensors = {**(pair if name != "rope_freqs" else {}), f"{name}.weight": wrong}
    with pytest.raises(BadModelFile) as caught:
        load(tmp_path, tensors=tensors)
    assert caught.value.field == f"{name}.weight[2]"


def test_a_rope_table_must_be_finite(tmp_path: Path) -> None:
    """Each number fits f32; what yarn makes of them does not."""
    metadata = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 1e30,
        "rope.scaling.attn_factor": 3e38,
    }
    with pytest.raises(BadModelFile, match=r"attn_factor 3e\+38.*the rope table must be finite"):
        load(tmp_path, metadata=metadata)


def mapped_bytes(path: Path) -> int:
    """How much of a mapped file is in this process's memory; fields are those of proc(5)."""
    num_bytes, is_ours = 0, False
    for line in SMAPS.read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            is_ours = line.endswith(str(path))
        elif is_ours and line.startswith("Rss:"):
            num_bytes += int(line.split()[1]) << 10
    return num_bytes


@pytest.mark.skipif(not SMAPS.exists(), reason="reads Linux's account of this process's memory")
def test_loaded_weights_are_not_in_memory_a_second_time(tmp_path: Path) -> None:
    """The kernel maps 64 KiB around what is read, so neighbours of the last bytes come back."""
    path = tmp_path / "demo.gguf"
    shutil.copy(DEMO, path)
    with open_gguf(path) as file:
        weights = load_weights(file, read_architecture(file), 64)
        assert mapped_bytes(path) < path.stat().st_size / 3
        again = load_weights(file, read_architecture(file), 64)
        (first,), (second,) = (one.token_table.data.parts for one in (weights, again))
        np.testing.assert_array_equal(first, second)
        for name in file.tensors:
            file.raw(name).sum()
        assert mapped_bytes(path) >= sum(info.num_bytes for info in file.tensors.values())


def test_rows_of_each_matrix_are_let_go_as_they_are_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the largest one would be there twice before its tensor is let go."""
    seen: list[int] = []
    monkeypatch.setattr(GGUFFile, "let_go_of", lambda _, rows: seen.append(rows.nbytes))
    with open_gguf(DEMO) as file:
        load_weights(file, read_architecture(file), 64)
        matrices = [info.num_bytes for info in file.tensors.values() if len(info.shape) == 2]
    assert sum(seen) == sum(matrices)


@pytest.mark.skipif(not SMAPS.exists(), reason="reads Linux's account of this process's memory")
@pytest.mark.parametrize(("kind", "width"), [("F32", 4), ("F16", 2), ("BF16", 2)])
def test_rows_of_floats_leave_memory_while_they_are_packed(
    kind: str, width: int, tmp_path: Path
) -> None:
    # The system may map 2 MiB around what another thread reads.
    path, size = tmp_path / "floats.gguf", (1024 * 8, 1024)
    writer = gguf.GGUFWriter(path, "llama")
    data = np.zeros((size[0], size[1] * width), np.uint8)
    writer.add_tensor("a", data, raw_dtype=GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with open_gguf(path) as file:
        raw = file.raw("a").reshape(size[0], -1)
        raw.sum()
        assert mapped_bytes(path) >= raw.nbytes
        packing.pack(raw, DType[kind], size[1], read=file.let_go_of)
        assert mapped_bytes(path) < raw.nbytes / 2
        file.let_go_of(np.zeros(1 << 20, np.uint8))  # no view of the file: left alone


@pytest.mark.parametrize(
    "name", ["llama", "gemma3", "phi3", "mistral3", "command-r", "stablelm", "phi2", "gemma4"]
)
@pytest.mark.parametrize(("kv_dtype", "context_length"), [("f16", 40), ("f32", 40), ("f16", 1100)])
def test_needed_bytes_are_those_that_are_allocated(
    name: str, kv_dtype: str, context_length: int, tmp_path: Path
) -> None:
    extra = {}
    if name == "gemma3":
        norms = ("blk.0.attn_q_norm.weight", "blk.0.attn_k_norm.weight")
        extra = dict.fromkeys(norms, np.ones(HEAD_DIM))
    if name == "stablelm":  # as the one of 12B
        sizes = {"q": NUM_HEADS, "k": NUM_KV_HEADS}
        extra = {
            f"blk.0.attn_{part}_norm.weight": np.ones((count, HEAD_DIM))
            for part, count in sizes.items()
        }
    path = write_tiny(
        tmp_path / "tiny.gguf",
        name,
        tensors={**extra, "blk.1.nextn.eh_proj.weight": np.ones((64, 4096))},
        metadata={
            "block_count": 2,
            "nextn_predict_layers": 1,
            "attention.sliding_window": 16 if name in ("llama", "gemma3", "phi3") else 0,
            "attention.temperature_scale": 0.1,
            "rope.scaling.original_context_length": 512,
            "context_length": 2048,
        },
    )
    config = EngineConfig(
        context_length=context_length,
        kv_tokens=context_length,
        kv_dtype=kv_dtype,
        max_batch_tokens=8,
        max_batch_requests=3,
    )
    with open_gguf(path) as file:
        needed = footprint.needed_bytes(file, read_architecture(file), config, context_length)
        held = resident_bytes(load_runner(file, config))
    angles_in_f64 = context_length * HEAD_DIM // 2 * 3 * 8
    assert sum(needed.values()) == held + angles_in_f64


def test_needed_bytes_of_quantised_weights_count_the_codes_of_activations() -> None:
    config = EngineConfig(
        context_length=64, kv_tokens=64, max_batch_tokens=40, max_batch_requests=3
    )
    with open_gguf(DEMO) as file:
        arch = read_architecture(file)
        needed = footprint.needed_bytes(file, arch, config, 64)
        runner = load_runner(file, config)
    assert runner._decoder._operands.operands.codes is not None
    angles_in_f64 = 64 * arch.layers[0].head_dim // 2 * 3 * 8
    assert sum(needed.values()) == resident_bytes(runner) + angles_in_f64


@pytest.mark.parametrize("float_products", ["exact", "bf16"])
def test_needed_bytes_count_activations_rounded_to_bf16(
    float_products: str, tmp_path: Path
) -> None:
    config = EngineConfig(max_batch_tokens=40, kv_tokens=64, float_products=float_products)
    with open_gguf(write_tiny(tmp_path / "tiny.gguf", in_f16=True)) as file:
        needed = footprint.needed_bytes(file, read_architecture(file), config, 64)
        runner = load_runner(file, config)
    rounded = runner._decoder._operands.operands.rounded
    assert (rounded is not None) == (float_products == "bf16")
    angles_in_f64 = 64 * HEAD_DIM // 2 * 3 * 8
    assert sum(needed.values()) == resident_bytes(runner) + angles_in_f64


def logits(path: Path) -> tuple[Weights, np.ndarray[Any, Any]]:
    """Of a prompt, and of a token after it."""
    with open_gguf(path) as file:
        runner = load_runner(file, EngineConfig(max_batch_tokens=32))
    ids = np.arange(5, 25, dtype=np.int32)
    made = [
        copies.to_host(runner.run(bench.batch_of(tokens, start, runner)))
        for tokens, start in ((ids, 0), (ids[:1], len(ids)))
    ]
    return runner.weights, np.concatenate(made)


def dense_parts(weights: Weights) -> list[FeedForward]:
    return [layer.dense for layer in weights.layers if layer.dense is not None]


def test_gate_and_up_lie_side_by_side_where_that_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only as codes, and only on the CPU; where types differ, one layer may and another not."""
    kinds = {"blk.0.ffn_up.weight": "Q4_0", "blk.1.ffn_down.weight": "F16"}
    types = {name: GGMLQuantizationType[kind] for name, kind in kinds.items()}
    path = demo_with(tmp_path / "demo.gguf", {}, types)
    joined, found = logits(path)
    joined_parts = dense_parts(joined)
    assert [part.gate_up is not None for part in joined_parts[:3]] == [False, False, True]
    for part in joined_parts:
        assert (part.gate is None) == (part.up is None) == (part.gate_up is not None)
    both = joined_parts[2].gate_up
    assert both is not None
    assert both.name == "blk.2.ffn_gate.weight + blk.2.ffn_up.weight"
    with open_gguf(path) as file:
        device = devices.open_device("sim:mi300x")
        elsewhere = load_weights(file, read_architecture(file), 64, device=device)
    assert all(part.gate_up is None for part in dense_parts(elsewhere))
    monkeypatch.setattr(weights_module, "may_join", lambda dtypes: False)
    apart, wanted = logits(path)
    assert all(part.gate_up is None for part in dense_parts(apart))
    np.testing.assert_array_equal(found, wanted)


def test_all_layers_and_plans_share_one_scratch_for_tiles_of_keys(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "tiny.gguf", metadata={"context_length": 2048}, num_layers=2)
    with open_gguf(path) as file:
        runner = load_runner(file, EngineConfig(max_batch_tokens=64, max_batch_requests=3))
    decoder = runner._decoder
    (tiles,) = decoder._attending._cpu_tiles.values()
    scratch = tiles.allocation
    for num_tokens, kernels in ((1, ["attention", "attention_fold"]), (64, ["attention"])):
        launches = decoder.plan(num_tokens, 1).launches
        found = [one for one in launches if one.kernel.startswith("attention")]
        assert [one.kernel for one in found] == 2 * kernels
        assert all(one.tensors["parts"].allocation is scratch for one in found)


def test_a_model_that_does_not_fit_is_refused_before_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(max_batch_tokens=8, max_batch_requests=3)
    with open_gguf(write_tiny(tmp_path / "tiny.gguf")) as file:
        num_bytes = sum(footprint.needed_bytes(file, read_architecture(file), config, 64).values())
        room = Room(num_bytes - 1, 1 << 30)
        monkeypatch.setattr(footprint, "host_room", lambda: room)
        loaded: list[str] = []
        with pytest.raises(OutOfMemory, match="smaller context_length") as caught:
            load_runner(file, config, lambda what, share: loaded.append(what))
        assert loaded == []
        assert f"cpu: {bytes_text(num_bytes)} asked for (weights " in str(caught.value)
        used = bytes_text((1 << 30) - num_bytes + 1)
        assert f"{used} of 1.00 GiB are in use" in str(caught.value)
        assert (caught.value.exit_code, caught.value.num_bytes) == (2, num_bytes)
        for enough in (Room(num_bytes, 1 << 30), None):
            monkeypatch.setattr(footprint, "host_room", lambda enough=enough: enough)
            load_runner(file, config)


def test_the_context_decides_whether_a_model_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_tiny(tmp_path / "tiny.gguf", metadata={"context_length": 1 << 24})
    monkeypatch.setattr(footprint, "host_room", lambda: Room(1 << 28, 1 << 30))
    with open_gguf(path) as file:
        with pytest.raises(OutOfMemory, match="KV cache"):
            load_runner(file, EngineConfig(context_length=1 << 24))
        load_runner(file, EngineConfig(context_length=64))


MEMINFO = "MemTotal:  1000 kB\nMemFree:  10 kB\nMemAvailable:  600 kB\n"


def system(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_without_figures_of_the_system_there_is_no_room_to_tell(tmp_path: Path) -> None:
    assert footprint.host_room(tmp_path) is None
    assert footprint.host_room(system(tmp_path, {"proc/meminfo": "nonsense"})) is None


def test_the_machine_alone(tmp_path: Path) -> None:
    files = {"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/a/b\n3:cpuset:/\n"}
    assert footprint.host_room(system(tmp_path, files)) == Room(600 << 10, 1000 << 10)


def test_the_tightest_control_group_counts(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/a"
    files = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "0::/a/b\n",
        f"{group}/b/memory.max": "max\n",
        f"{group}/b/memory.current": "4096\n",
        f"{group}/memory.max": "8192\n",
        f"{group}/memory.current": "7000\n",
        f"{group}/memory.stat": "anon 5000\nactive_file 100\ninactive_file 900\n",
    }
    assert footprint.host_room(system(tmp_path, files)) == Room(2192, 8192)


def test_a_container_of_version_1_sees_its_group_at_the_mount(tmp_path: Path) -> None:
    mount = "sys/fs/cgroup/memory"
    files = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "4:cpu,memory:/docker/abc\n1:name=systemd:/\n",
        f"{mount}/memory.limit_in_bytes": "9000\n",
        f"{mount}/memory.usage_in_bytes": "9500\n",
        f"{mount}/memory.stat": "inactive_file 3\ntotal_inactive_file 100\n",
    }
    assert footprint.host_room(system(tmp_path, files)) == Room(0, 9000)


def test_this_machine_tells_its_memory() -> None:
    room = footprint.host_room()
    assert room is not None
    assert 0 < room.available_bytes <= room.limit_bytes


@pytest.mark.parametrize("family", ["stablelm", "command-r"])
@pytest.mark.parametrize(("part", "num_heads"), [("q", NUM_HEADS), ("k", NUM_KV_HEADS)])
def test_layer_norms_of_heads_may_be_of_queries_or_of_keys_alone(
    tmp_path: Path, family: str, part: str, num_heads: int
) -> None:
    norm = np.ones((num_heads, HEAD_DIM), np.float32)
    tensors = {f"blk.0.attn_{part}_norm.weight": norm}
    path = write_tiny(tmp_path / "tiny.gguf", family, tokens=list("abcdefg"), tensors=tensors)
    answer = LLM(str(path)).generate([1, 2], max_tokens=2, ignore_eos=True)
    assert len(answer.token_ids) == 2
