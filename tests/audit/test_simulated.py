"""Gates that a CPU has not: on simulated GPUs, with a model of a few columns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from models.tiny_gguf import write_tiny

from hypocenter import LLM
from hypocenter.audit.beside import Beside
from hypocenter.audit.equivalence import AuditSizes, OwnGates
from hypocenter.audit.executed import OwnRecord
from hypocenter.audit.residency import residency
from hypocenter.audit.ways import Ways
from hypocenter.device import devices
from hypocenter.device.plan import Plan
from hypocenter.device.sim.sim import SimGpu, open_sim
from hypocenter.engine.runner import Runner
from hypocenter.record import recorder
from hypocenter.settings.config import EngineConfig
from hypocenter.verify.outcome import Stage, StageVerdict

SIM = "sim:h200"
SIZES = AuditSizes(read=6, asked=3, answered=3, chunks=(2,), batches=(2,))
FIELDS: dict[str, Any] = {
    "device": SIM, "context_length": 32, "kv_tokens": 256, "max_batch_requests": 2,
    "prefix_cache": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    words = ["<unk>", "<s>", "</s>", "a", "b", "c", "d"]
    return write_tiny(tmp_path_factory.mktemp("model") / "tiny.gguf", tokens=words, in_f16=True)


@pytest.fixture(scope="module")
def own(model: Path) -> Iterator[OwnGates]:
    patched = pytest.MonkeyPatch()
    patched.setenv("HYPO_RUN_DIR", str(model.parent / "runs"))
    patched.delenv("HYPO_RECORD", raising=False)
    recorder.close_recorder()
    devices.use_backend(open_sim(SIM, graphs=True))
    with LLM(model, **FIELDS) as llm:
        yield OwnGates(Ways(llm, OwnRecord(), SIM), SIZES, 0.1)
    recorder.close_recorder()
    devices.use_backend(open_sim(SIM))
    patched.undo()


def graphs(own: OwnGates) -> Stage:
    return own._graphs().run()


def fields_of(stage: Stage) -> set[str]:
    return {item.details["field"] for item in stage.findings if "field" in item.details}


def test_graphs_and_single_launches_are_two_routes(own: OwnGates) -> None:
    found = graphs(own)
    assert found.verdict is StageVerdict.RIGHT, found.findings
    [[eager, replayed]] = found.details["routes"]
    assert eager["executed"]["num_replayed"] == eager["executed"]["num_captured"] == 0
    assert replayed["executed"]["num_replayed"] == SIZES.answered


@pytest.mark.tier("sim")
def test_graphs_that_are_never_replayed_are_told(
    own: OwnGates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Plan, "_can_capture", lambda self: False)
    found = graphs(own)
    assert found.verdict is StageVerdict.WRONG
    assert fields_of(found) == {"replays"}
    assert any("same route" in item.what for item in found.findings)


@pytest.mark.tier("sim")
def test_graphs_where_single_launches_were_asked_for_are_told(
    own: OwnGates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Runner, "take_routes", lambda self, routes: None)
    found = graphs(own)
    assert found.verdict is StageVerdict.WRONG
    assert fields_of(found) == {"replays"}


@pytest.mark.tier("sim")
def test_a_device_that_captures_nothing_says_so(
    own: OwnGates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SimGpu, "captures", property(lambda self: False))
    found = graphs(own)
    assert found.verdict is StageVerdict.NOT_RUN
    assert found.uncovered[0].why == f"{SIM} captures none here"


def test_launches_that_are_in_no_graph_are_not_audited(
    own: OwnGates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both sides would run one by one."""
    runner = own.ways.runner
    monkeypatch.setattr(runner, "config", replace(runner.config, launch_mode="checked"))
    found = graphs(own)
    assert found.verdict is StageVerdict.NOT_RUN
    assert found.uncovered[0].why == "launches that are checked are in no graph"


def test_each_copy_of_a_step_has_a_reason(own: OwnGates) -> None:
    found = residency(own.ways, 3, 2)
    assert found.verdict is StageVerdict.RIGHT, found.findings
    assert [copy["reason"] for copy in found.details["copies"]] == ["the chosen tokens"]
    assert found.details["bytes_per_step"]["out: the chosen tokens"] == 8.0
    assert found.canary is not None
    assert (found.canary.num_planted, found.canary.num_seen) == (2, 2)


def beside(model: Path, own: OwnGates) -> Beside:
    return Beside(str(model), own, EngineConfig(**FIELDS), own.ways.record, 0.1)


@pytest.mark.tier("sim")
def test_a_device_is_held_against_the_cpu(
    model: Path, own: OwnGates, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = beside(model, own).device()
    assert found.verdict is StageVerdict.RIGHT, found.findings
    assert 0 < found.details["largest_distance"] < found.details["distance_allowed"]

    monkeypatch.setattr(Beside, "_read", lambda self, llm, length: own.read("at once", length))
    found = beside(model, own).device()
    assert found.verdict is StageVerdict.WRONG
    assert found.findings[0].details["axis"] == "devices"


@pytest.mark.tier("sim")
def test_two_ranks_are_two_processes(
    model: Path, own: OwnGates, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = beside(model, own).ranks()
    assert found.verdict is StageVerdict.RIGHT, found.findings
    [[one, both]] = found.details["routes"]
    assert len(one["executed"]["processes"]) == 1
    assert len(set(both["executed"]["processes"])) == 2

    monkeypatch.setattr("hypocenter.audit.beside._NUM_RANKS", 1)
    found = beside(model, own).ranks()
    assert found.verdict is StageVerdict.WRONG
    assert found.findings[0].details["axis"] == "num_processes"


@pytest.mark.tier("sim")
def test_a_model_on_two_ranks_is_held_against_one(model: Path) -> None:
    fields = {**FIELDS, "tensor_parallel": 2}
    with LLM(model, **fields) as llm:
        own = OwnGates(Ways(llm, OwnRecord(), SIM), SIZES, 0.1)
        found = Beside(str(model), own, EngineConfig(**fields), own.ways.record, 0.1).ranks()
    assert found.verdict is StageVerdict.RIGHT, found.findings
    assert found.asks == "do 2 ranks give what one does?"
    [[both, one]] = found.details["routes"]
    assert len(set(both["executed"]["processes"])) == 2
    assert len(one["executed"]["processes"]) == 1


@pytest.mark.tier("sim")
def test_a_model_that_cannot_be_split_says_so(
    model: Path, own: OwnGates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hypocenter.audit.beside._NUM_RANKS", 3)
    found = beside(model, own).ranks()
    assert found.verdict is StageVerdict.NOT_RUN
    assert "3 ranks do not run it" in found.uncovered[0].why
    assert "3 equal parts" in found.uncovered[0].why
