"""Residency of a model whose experts the host computes: what goes there and back is told."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models.tiny_gguf import FFN_WIDTH, VOCAB_SIZE, WIDTH, write_tiny

from hypocenter import LLM
from hypocenter.audit.equivalence import AuditSizes, OwnGates
from hypocenter.audit.executed import OwnRecord, Stretch
from hypocenter.audit.residency import residency
from hypocenter.audit.ways import Ways
from hypocenter.record import recorder
from hypocenter.record.events import Allocated
from hypocenter.verify.outcome import StageVerdict

SIM = "sim:h200"
FIELDS: dict[str, Any] = {
    "device": SIM, "context_length": 32, "kv_tokens": 64, "max_batch_requests": 2,
    "prefix_cache": False, "cpu_moe": True,
}  # fmt: skip
SIZES = AuditSizes(read=3, asked=3, answered=2, chunks=(2,), batches=(2,))
WHY = "experts on the host"


def _experts(path: Path) -> Path:
    """A layer of three experts, of which two count."""
    drawn = np.random.default_rng(0)
    shapes = {
        "gate_inp": (3, WIDTH),
        "gate_exps": (3, FFN_WIDTH, WIDTH),
        "up_exps": (3, FFN_WIDTH, WIDTH),
        "down_exps": (3, WIDTH, FFN_WIDTH),
    }
    tensors: dict[str, Any] = {f"blk.0.ffn_{name}.weight": None for name in ("gate", "up", "down")}
    tensors |= {
        f"blk.0.ffn_{name}.weight": drawn.uniform(0.5, 1.0, shape) / shape[-1] ** 0.5
        for name, shape in shapes.items()
    }
    keys = {
        "expert_count": 3, "expert_used_count": 2, "expert_feed_forward_length": FFN_WIDTH,
    }  # fmt: skip
    words = ["<unk>", "<s>", "</s>", "a", "b", "c", "d"][:VOCAB_SIZE]
    return write_tiny(path, "qwen3moe", metadata=keys, tensors=tensors, tokens=words)


@pytest.fixture(scope="module")
def ways(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ways]:
    folder = tmp_path_factory.mktemp("experts")
    patched = pytest.MonkeyPatch()
    patched.setenv("HYPO_RUN_DIR", str(folder / "runs"))
    patched.delenv("HYPO_RECORD", raising=False)
    recorder.close_recorder()
    with LLM(_experts(folder / "experts.gguf"), **FIELDS) as llm:
        yield Ways(llm, OwnRecord(), SIM)
    recorder.close_recorder()
    patched.undo()


@pytest.mark.tier("sim")
def test_what_the_host_does_is_told(ways: Ways, monkeypatch: pytest.MonkeyPatch) -> None:
    found = residency(ways, 3, 1)
    assert found.verdict is StageVerdict.RIGHT, found.findings
    assert "but for experts on the host" in found.asks
    assert found.details["launches_by_host_per_step"] > 0
    pitch = -(-WIDTH // 64) * 64
    for way in ("in", "out"):
        copied = found.details["bytes_per_step"][f"{way}: {WHY}"]
        assert copied == 3 * pitch * 4  # three rows in F32
    assert found.details["bytes_per_step"][f"out: the end of a step, {WHY}"] == 8
    assert [item.what for item in found.uncovered] == ["experts"]

    from hypocenter.audit import residency as room

    with monkeypatch.context() as patched:
        patched.setattr(room, "_given_to_host", lambda stretch: frozenset())
        wrong = residency(ways, 3, 1)
    assert wrong.verdict is StageVerdict.WRONG
    assert "is copied to the" in wrong.findings[0].what


@pytest.mark.tier("sim")
def test_a_route_has_the_processor_that_computes_experts(ways: Ways) -> None:
    ran = OwnGates(ways, SIZES, 0.1).read("at once", 3)
    assert ran.executed.devices == ran.asked["devices"] == ("cpu", SIM)


@pytest.mark.tier("sim")
def test_what_the_record_does_not_know_is_not_covered(
    ways: Ways, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Stretch.__init__

    def forgetting(self: Stretch, *given: Any) -> None:
        made(self, *given)
        self.all_events = tuple(e for e in self.all_events if not isinstance(e, Allocated))

    monkeypatch.setattr(Stretch, "__init__", forgetting)
    found = residency(ways, 3, 1)
    [left] = (item for item in found.uncovered if item.what != "experts")
    assert left.why == "the record does not have their allocations"
    assert left.what.startswith("on which device ")
