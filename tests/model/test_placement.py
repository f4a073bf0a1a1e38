"""Which device a model gets where none is named, and how large its KV cache is on a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hypocenter.config import EngineConfig
from hypocenter.device.backend import Room
from hypocenter.device.choice import DeviceChoice
from hypocenter.errors import BadSetting
from hypocenter.model import placement
from hypocenter.model.architecture import Architecture, read_architecture
from hypocenter.model.gguf.file import open_gguf
from hypocenter.model.placement import kv_room, kv_tokens_in, with_device
from hypocenter.package import bundled_model

GIB = 1 << 30
CONFIG = EngineConfig(context_length=256)


@pytest.fixture(scope="module")
def facts() -> Architecture:
    with open_gguf(bundled_model()) as file:
        return read_architecture(file)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """What room was asked for, on a machine whose GPU has 1 GiB and 100 MiB free."""
    asked: list[tuple[int, int]] = []

    def choose(needed_bytes: int = 0, num_gpus: int = 1) -> DeviceChoice:
        asked.append((needed_bytes, num_gpus))
        fits = needed_bytes <= GIB + (100 << 20)
        return DeviceChoice("cuda" if fits else "cpu", "pretended")

    monkeypatch.setattr(placement, "choose_device", choose)
    return asked


def test_a_device_that_is_named_is_taken(asked: list[tuple[int, int]]) -> None:
    config = replace(CONFIG, device="cpu")
    assert with_device(bundled_model(), config) == (config, None)
    assert not asked


def test_the_model_must_have_room(asked: list[tuple[int, int]]) -> None:
    config, choice = with_device(bundled_model(), CONFIG)
    assert (config.device, str(choice)) == ("cuda", "device cuda: pretended")
    _, (needed_bytes, num_gpus) = asked
    with open_gguf(bundled_model()) as file:
        num_weights = sum(info.num_bytes for info in file.tensors.values())
    assert num_gpus == 1
    assert GIB + num_weights < needed_bytes < GIB + num_weights + (64 << 20)
    wide = replace(CONFIG, kv_tokens=1 << 22)
    assert with_device(bundled_model(), wide)[0].device == "cpu"


def test_settings_that_only_a_cpu_follows_choose_it(asked: list[tuple[int, int]]) -> None:
    config, _ = with_device(bundled_model(), replace(CONFIG, float_products="bf16"))
    assert config.device == "cpu"
    assert not asked
    with pytest.raises(BadSetting, match="tensor_parallel is 2, but a CPU has all cores"):
        with_device(bundled_model(), replace(CONFIG, kv_tokens=1 << 22, tensor_parallel=2))


def test_the_cache_leaves_what_steps_need_and_others_have(facts: Architecture) -> None:
    with open_gguf(bundled_model()) as file:
        half = kv_room(
            file, facts, replace(CONFIG, gpu_memory_fraction=0.5), Room(8 * GIB, 8 * GIB)
        )
        assert 3.9 * GIB < half < 4 * GIB
        nine = kv_room(
            file, facts, replace(CONFIG, gpu_memory_fraction=0.9), Room(8 * GIB, 8 * GIB)
        )
        assert nine - half == pytest.approx(0.4 * 8 * GIB, abs=2)
        # What others have is no part of it, and what is missing is not negative.
        assert kv_room(file, facts, CONFIG, Room(2 * GIB, 8 * GIB)) < 1.2 * GIB
        assert kv_room(file, facts, CONFIG, Room(GIB // 2, 8 * GIB)) == 0


def test_how_many_tokens_that_is(facts: Architecture) -> None:
    per_token = 2 * facts.num_layers * facts.layers[0].num_kv_heads * facts.layers[0].head_dim * 2
    assert kv_tokens_in(5000 * per_token + 7, facts, CONFIG) == 5000
    assert kv_tokens_in(0, facts, CONFIG) == 256  # one context in any case
    assert kv_tokens_in(1 << 40, facts, CONFIG) == 1 << 20
    many = replace(CONFIG, max_batch_requests=4096 * 2 // 2)
    assert kv_tokens_in(1 << 50, facts, replace(many, context_length=512)) == 4096 * 512
    assert kv_tokens_in(1 << 40, facts, replace(CONFIG, max_batch_requests=1)) == 256
