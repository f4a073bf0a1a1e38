"""How large the KV cache of a model is on a GPU, where nobody says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hypocenter.base.package import bundled_model
from hypocenter.device.backend import Room
from hypocenter.model.facts.architecture import Architecture, read_architecture
from hypocenter.model.gguf.file import open_gguf
from hypocenter.model.placement import kv_room, kv_tokens_in
from hypocenter.settings.config import EngineConfig

GIB = 1 << 30
CONFIG = EngineConfig(context_length=256)


@pytest.fixture(scope="module")
def facts() -> Architecture:
    with open_gguf(bundled_model()) as file:
        return read_architecture(file)


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
