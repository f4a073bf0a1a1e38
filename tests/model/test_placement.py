"""How large the KV cache of a model is on a GPU, where nobody says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hypocenter.base.errors import ModelTooLarge
from hypocenter.base.package import bundled_model
from hypocenter.cli.options import message_of
from hypocenter.device.backend import Room
from hypocenter.model.facts.architecture import Architecture, read_architecture
from hypocenter.model.gguf.file import open_gguf
from hypocenter.model.placement import kv_room, kv_tokens_in, require_gpu_room
from hypocenter.settings.config import EngineConfig

GIB = 1 << 30
CONFIG = EngineConfig(context_length=256)


@pytest.fixture(scope="module")
def arch() -> Architecture:
    with open_gguf(bundled_model()) as file:
        return read_architecture(file)


def test_the_cache_leaves_what_steps_need_and_others_have(arch: Architecture) -> None:
    with open_gguf(bundled_model()) as file:
        half = kv_room(file, arch, replace(CONFIG, gpu_memory_fraction=0.5), Room(8 * GIB, 8 * GIB))
        assert 3.9 * GIB < half < 4 * GIB
        nine = kv_room(file, arch, replace(CONFIG, gpu_memory_fraction=0.9), Room(8 * GIB, 8 * GIB))
        assert nine - half == pytest.approx(0.4 * 8 * GIB, abs=2)
        # What others have is no part of it, and what is missing is not negative.
        assert kv_room(file, arch, CONFIG, Room(2 * GIB, 8 * GIB)) < 1.2 * GIB
        assert kv_room(file, arch, CONFIG, Room(GIB // 2, 8 * GIB)) == 0


def test_two_models_share_a_gpu_by_their_fractions(arch: Architecture) -> None:
    """Each takes its share of the whole, whoever comes first; a tenth of it stays free."""
    config = replace(CONFIG, gpu_memory_fraction=0.4)
    with open_gguf(bundled_model()) as file:
        first = kv_room(file, arch, config, Room(8 * GIB, 8 * GIB))
        second = kv_room(file, arch, config, Room(8 * GIB - first, 8 * GIB))
        assert 0.98 * first < second <= first
        third = kv_room(file, arch, config, Room(8 * GIB - first - second, 8 * GIB))
        assert third < 0.11 * 8 * GIB


def test_how_many_tokens_that_is(arch: Architecture) -> None:
    per_token = 2 * arch.num_layers * arch.layers[0].num_kv_heads * arch.layers[0].head_dim * 2
    # Whole sixteens of blocks: or else kernels would be launched in another form at each start.
    assert kv_tokens_in(5000 * per_token + 7, arch, CONFIG) == 4864 == 19 * 16 * 16
    assert kv_tokens_in(0, arch, CONFIG) == 256  # one context in any case
    assert kv_tokens_in(1 << 40, arch, CONFIG) == 1 << 20
    many = replace(CONFIG, max_batch_requests=4096 * 2 // 2)
    assert kv_tokens_in(1 << 50, arch, replace(many, context_length=512)) == 4096 * 512
    assert kv_tokens_in(1 << 40, arch, replace(CONFIG, max_batch_requests=1)) == 256


def what_fits(arch: Architecture, mib: float, **changes: Any) -> str:
    """What is said to fit a GPU of so many MiB that nobody uses; empty: all of it does."""
    config = replace(EngineConfig(gpu_memory_fraction=1.0, max_batch_tokens=64), **changes)
    room = Room(int(mib * (1 << 20)), int(mib * (1 << 20)))
    with open_gguf(bundled_model()) as file:
        try:
            require_gpu_room("cuda", file, arch, config, room)
        except ModelTooLarge as error:
            return str(error).partition("; what would fit: ")[2]
    return ""


def test_a_model_that_does_not_fit_a_gpu_says_what_would(arch: Architecture) -> None:
    """5.9 MiB of weights, and of a context of 512 tokens 1.5 MiB; steps take 1.9 MiB."""
    assert what_fits(arch, 9.3) == ""
    assert what_fits(arch, 9) == (
        "context_length 432, or context_length 512 with kv_dtype q8_0, "
        "or a file of 5.64 MiB, 8.2 bits a weight"
    )
    least = "context_length 336 with kv_dtype q4_0_hadamard, or a file of "
    assert what_fits(arch, 8).startswith(least)
    asked = what_fits(arch, 8, kv_dtype="q4_0")
    assert asked.startswith("context_length 336, or a file of "), "not of another type of its size"
    assert what_fits(arch, 2) == "a smaller model, or several GPUs"
    asked = what_fits(arch, 40, kv_tokens=16384)
    assert asked.startswith("kv_tokens 11")
    assert "kv_tokens 16384 with kv_dtype q8_0" in asked


def test_what_others_hold_does_not_fit(arch: Architecture) -> None:
    room = Room(8 << 20, 80 << 20)
    with open_gguf(bundled_model()) as file, pytest.raises(ModelTooLarge) as caught:
        require_gpu_room(
            "cuda", file, arch, EngineConfig(gpu_memory_fraction=1.0, max_batch_tokens=64), room
        )
    assert "72.00 MiB of 80.00 MiB are in use; what would fit: " in str(caught.value)
    # A command line says it in its own words.
    assert "-c/--ctx-size" in message_of(caught.value)
