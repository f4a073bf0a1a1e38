"""Weights that one process has on a device and others map, on a simulated GPU and on a real one."""

from __future__ import annotations

import importlib.resources
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from models.expert_model import write_experts, write_with_factors

pytest.importorskip("triton")
from pretended.sharing_sim import NAME, SharingSim

from faults.model import model_path
from hypocenter import LLM
from hypocenter.base.errors import BadModelFile, NotShareable, StaleLayout
from hypocenter.base.tensor import DType
from hypocenter.device import devices
from hypocenter.device.limits import TABLE
from hypocenter.device.sim.sim import SimGpu
from hypocenter.kernels.weights import packing
from hypocenter.model.facts.architecture import read_architecture
from hypocenter.model.gguf.file import open_gguf
from hypocenter.model.tensors import weight_layout
from hypocenter.model.tensors.shared_weights import WeightLender
from hypocenter.settings.config import EngineConfig
from hypocenter.wire.messages import KeptWeights, SharedWeight

torch = pytest.importorskip("torch")
PROMPT = [72, 105, 300]


@pytest.fixture
def sharing() -> Iterator[None]:
    limits = TABLE["sm_90"]
    devices.use_backend(SharingSim(NAME, limits))
    yield
    devices._backends.pop(NAME)


def lent(path: Path, device: str = NAME) -> KeptWeights:
    with open_gguf(path) as file:
        return WeightLender(file, read_architecture(file), device).fill()


def test_a_model_on_weights_that_others_have_is_the_same(
    sharing: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = model_path("q8_0")
    config = EngineConfig(device=NAME, context_length=32, max_batch_tokens=4)
    with LLM(path, config) as llm:
        expected = llm.logits(PROMPT)
    with monkeypatch.context() as seen:
        released: list[SimGpu] = []
        seen.setattr(SharingSim, "release_cached", lambda gpu: released.append(gpu))
        kept = lent(path)
        # What packing took besides the weights is left to who runs the model.
        assert len(released) == 1
    assert sum(piece.num_bytes for piece in kept.pieces) >= path.stat().st_size // 2

    def refuse(*given: object, **named: object) -> None:
        raise AssertionError("a matrix was packed, although it is there")

    monkeypatch.setattr(packing, "pack", refuse)
    with LLM(path, config, shared=kept) as llm:
        np.testing.assert_array_equal(llm.logits(PROMPT), expected)


def test_weights_of_a_file_that_is_another_now_are_not_taken(sharing: None, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(model_path().read_bytes())
    config = EngineConfig(device=NAME, context_length=32, max_batch_tokens=4)
    kept = lent(path)
    path.write_bytes(model_path("q8_0").read_bytes())
    with LLM(path, config) as llm:
        expected = llm.logits(PROMPT)
    with LLM(path, config, shared=kept) as llm:
        np.testing.assert_array_equal(llm.logits(PROMPT), expected)


@pytest.fixture
def layouts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of layouts, empty at first."""
    folder = tmp_path / "layouts"
    folder.mkdir()
    monkeypatch.setattr(weight_layout, "private_folder", lambda name: (folder, ""))
    return folder


def lender_of(path: Path) -> WeightLender:
    file = open_gguf(path)
    return WeightLender(file, read_architecture(file), NAME)


def test_a_second_start_makes_ready_before_the_weights_are_read(
    sharing: None, layouts: Path
) -> None:
    path = model_path("q8_0")
    config = EngineConfig(device=NAME, context_length=32, max_batch_tokens=4)
    with LLM(path, config) as llm:
        expected = llm.logits(PROMPT)
    first = lender_of(path)
    assert first.plan() is None
    kept = first.fill()
    second = lender_of(path)
    planned = second.plan()
    assert planned is not None
    assert planned.weights == kept.weights
    with LLM(path, config, shared=planned) as llm:
        assert not np.array_equal(llm.logits(PROMPT), expected), "nothing was read yet"
        assert second.fill() == planned
        np.testing.assert_array_equal(llm.logits(PROMPT), expected)


def test_a_layout_that_is_not_that_of_the_file_is_noticed_and_forgotten(
    sharing: None, layouts: Path
) -> None:
    path = model_path("q8_0")
    lender_of(path).fill()
    [kept] = layouts.iterdir()
    layout = msgspec.json.decode(kept.read_bytes(), type=weight_layout.WeightLayout)
    name, weight = sorted(layout.weights.items())[-1]
    *parts, factor = weight.parts
    assert isinstance(factor, float)
    other = msgspec.structs.replace(weight, parts=(*parts, factor * 2))
    changed = msgspec.structs.replace(layout, weights={**layout.weights, name: other})
    kept.write_bytes(msgspec.json.encode(changed))
    lender = lender_of(path)
    assert lender.plan() is not None
    with pytest.raises(StaleLayout, match="was packed otherwise than at the last start"):
        lender.fill()
    assert lender_of(path).plan() is None


@pytest.mark.parametrize("what", ["damaged", "no folder", "not writable"])
def test_without_a_layout_the_weights_are_read_first(
    sharing: None, layouts: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    path = model_path("q8_0")
    if what == "no folder":
        monkeypatch.setattr(weight_layout, "private_folder", lambda name: (None, "not ours"))
    if what == "not writable":
        layouts.rmdir()
    lender_of(path).fill()
    if what == "damaged":
        [kept] = layouts.iterdir()
        kept.write_bytes(kept.read_bytes()[:-40])
    lender = lender_of(path)
    assert lender.plan() is None
    assert lender.fill().weights


def test_a_factor_beside_a_weight_is_lent_with_it(
    sharing: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plain = write_experts(tmp_path / "plain.gguf", DType.NVFP4)
    path = write_with_factors(tmp_path / "with.gguf", ["attn_q", "ffn_up_exps"], {})
    seen: dict[str, list[packing.Packed]] = {}
    lend = packing.lend

    def note(name: str, packed: packing.Packed, lender: Any) -> SharedWeight:
        seen.setdefault(name, []).append(packed)
        return lend(name, packed, lender)

    monkeypatch.setattr(packing, "lend", note)
    for one in (plain, path):
        lent(one)
    for name in ("blk.1.attn_q.weight", "blk.1.ffn_up_exps.weight"):
        for first, second in zip(*(packed.parts for packed in seen[name]), strict=True):
            np.testing.assert_array_equal(first, second)


def test_a_scale_that_is_no_number_is_not_lent(sharing: None, tmp_path: Path) -> None:
    path = write_experts(tmp_path / "experts.gguf", DType.MXFP4, arch="gpt-oss")
    with open_gguf(path) as file:
        at = file.tensors["blk.1.ffn_down_exps.weight"].offset
    data = bytearray(path.read_bytes())
    data[at + 3 * DType.MXFP4.block_bytes] = 255
    path.write_bytes(data)
    with pytest.raises(BadModelFile, match=r"ffn_down_exps.weight: scale of block 3 of row 0"):
        lent(path)


def test_memory_that_cannot_be_shared_is_refused_in_a_line() -> None:
    devices.open_device(NAME)
    with pytest.raises(NotShareable, match="cannot be shared between processes"):
        lent(model_path())


_USER = """
    import os, signal, sys, msgspec
    from hypocenter import LLM
    from hypocenter.settings.config import EngineConfig
    from hypocenter.wire.messages import KeptWeights, SharedWeight
    kept = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=KeptWeights)
    llm = LLM(sys.argv[1], EngineConfig(device="cuda"), shared=kept)
    print(llm.generate("import os", max_tokens=16, ignore_eos=True).token_ids, flush=True)
    os.kill(os.getpid(), int(sys.argv[2]))
"""


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no GPU here; scripts/gpu runs this on one"
)
def test_weights_on_a_gpu_outlive_whoever_maps_them() -> None:

    bundled = importlib.resources.files("hypocenter") / "assets" / "demo-q8_0.gguf"
    with importlib.resources.as_file(bundled) as path:
        devices.open_device("cuda")
        kept = msgspec.msgpack.encode(lent(path, "cuda"))
        expected = LLM(path, EngineConfig(device="cuda")).generate(
            "import os", max_tokens=16, ignore_eos=True
        )
        for number in (signal.SIGKILL, signal.SIGABRT, signal.SIGKILL):
            user = subprocess.run(
                [sys.executable, "-c", textwrap.dedent(_USER), str(path), str(int(number))],
                input=kept,
                capture_output=True,
                env={**os.environ, "HYPO_RECORD": "0"},
                check=False,
            )
            assert user.returncode == -number, user.stderr
            assert user.stdout.decode().strip() == str(expected.token_ids)
