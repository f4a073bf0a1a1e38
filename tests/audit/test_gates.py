"""Each gate of an audit: right as things are, wrong when the thing is broken on purpose."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from repository import DEMO

from hypocenter import LLM, EngineConfig
from hypocenter.audit import beside, compare
from hypocenter.audit.audit import _fit_sizes, _without_drafts
from hypocenter.audit.equivalence import USUAL, AuditSizes, OwnGates
from hypocenter.audit.executed import Executed, OwnRecord, RecordCutShort, Stretch
from hypocenter.audit.gates import Gate, attempt
from hypocenter.audit.repeats import repeats
from hypocenter.audit.residency import residency
from hypocenter.audit.soak import soak
from hypocenter.audit.ways import Ways
from hypocenter.base.errors import (
    BadLogits,
    BadSetting,
    HypoError,
    ModelTooLarge,
    OutOfBlocks,
    OutOfMemory,
    UsageError,
)
from hypocenter.base.tensor import DType
from hypocenter.device import copies, memory
from hypocenter.engine.engine import Engine
from hypocenter.engine.kv_cache import KVCache
from hypocenter.engine.runner import Runner
from hypocenter.record import recorder
from hypocenter.verify.outcome import Stage, StageVerdict

SIZES = AuditSizes(read=40, asked=5, answered=3, chunks=(7,), batches=(2, 5))


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    patched = pytest.MonkeyPatch()
    patched.setenv("HYPO_RUN_DIR", str(tmp_path_factory.mktemp("runs")))
    patched.delenv("HYPO_RECORD", raising=False)
    recorder.close_recorder()
    fields: dict[str, Any] = {"context_length": 64, "kv_tokens": 1024, "max_batch_requests": 8}
    with LLM(DEMO, prefix_cache=False, **fields) as found:
        yield found
    recorder.close_recorder()
    patched.undo()


@pytest.fixture
def own(llm: LLM) -> OwnGates:
    return OwnGates(Ways(llm, OwnRecord(), "cpu"), SIZES, 0.0)


def gate(own: OwnGates, name: str) -> Stage:
    return next(one for one in own.each() if one.name == name).run()


def fields_of(stage: Stage) -> set[str]:
    """The fields of Executed that a stage complains of."""
    return {item.details["field"] for item in stage.findings if "field" in item.details}


def same_in(stage: Stage) -> set[str]:
    """The axes along which both sides took one route."""
    return {item.details["axis"] for item in stage.findings if "axis" in item.details}


@pytest.mark.parametrize("name", ["pages", "chunks", "decode", "batch", "forms"])
def test_a_gate_passes_and_sees_what_it_plants(own: OwnGates, name: str) -> None:
    if name == "pages":  # finds an empty cache where it is the first
        cache = own.ways.llm.engine.cache
        cache._blank.sort(reverse=True)
    found = gate(own, name)
    assert found.verdict is StageVerdict.RIGHT, found.findings
    assert found.num_checks > 0
    assert found.canary is not None
    assert found.canary.num_seen == found.canary.num_planted
    assert found.canary.num_planted >= (compare.NUM_PLANTED + 2) * found.num_covered
    for one, other in found.details["routes"]:
        assert one["executed"] != other["executed"]


def test_a_gate_that_cannot_be_had_says_why(own: OwnGates) -> None:
    found = gate(own, "graphs")
    assert found.verdict is StageVerdict.NOT_RUN
    assert found.uncovered[0].why == "a CPU has no graphs"


def test_a_prompt_that_is_cut_is_told(own: OwnGates, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in an engine whose long-context tests ran 70 characters."""
    request = Engine.request

    def cut(self: Engine, ids: Any, *rest: Any) -> Any:
        return request(self, ids[:20], *rest)

    monkeypatch.setattr(Engine, "request", cut)
    found = gate(own, "chunks")
    assert found.verdict is StageVerdict.WRONG
    assert {"length", "chunks"} <= fields_of(found)


def test_a_chunk_size_that_is_ignored_is_told(
    own: OwnGates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in an engine whose gate compared a run with itself, for its flags were never used."""
    watched = Ways._watching
    monkeypatch.setattr(Ways, "_watching", lambda self, tap, chunk: watched(self, tap, None))
    found = gate(own, "chunks")
    assert found.verdict is StageVerdict.WRONG
    assert same_in(found) == {"chunks"}
    assert fields_of(found) == {"chunks"}


def test_a_route_that_is_ignored_is_told(own: OwnGates, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Runner, "take_routes", lambda self, routes: None)
    found = gate(own, "forms")
    assert found.verdict is StageVerdict.WRONG
    assert same_in(found) == {"kernels"}


def test_a_batch_that_runs_one_by_one_is_told(
    own: OwnGates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own.ways.llm.engine.scheduler, "max_batch_requests", 1)
    found = gate(own, "batch")
    assert found.verdict is StageVerdict.WRONG
    assert same_in(found) == {"num_sequences"}


def test_blocks_that_are_never_scattered_are_told(
    own: OwnGates, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = own.ways.llm.engine.cache
    cache._blank.sort(reverse=True)
    monkeypatch.setattr(Ways, "quietly", lambda self, requests: None)
    found = gate(own, "pages")
    assert found.verdict is StageVerdict.WRONG
    assert same_in(found) == {"is_scattered"}


def test_another_device_and_another_type_than_asked_for_are_told(own: OwnGates) -> None:
    own.ways.asked = {"devices": ("cuda",), "kv_types": ("F32",)}
    found = gate(own, "decode")
    assert found.verdict is StageVerdict.WRONG
    assert fields_of(found) == {"devices", "kv_types"}


def changed_by_one_unit(when: Callable[[Any], bool]) -> Callable[..., Any]:
    """`Runner.run` with one element of its last row off by a unit of rounding in some steps."""
    run = Runner.run

    def changed(self: Runner, batch: Any) -> Any:
        result = run(self, batch)
        if when(batch) and len(batch.logit_rows):
            last = len(batch.logit_rows) - 1
            result.data[last, 3] = np.nextafter(result.data[last, 3], np.float32(np.inf))
        return result

    return changed


@pytest.mark.parametrize(
    ("name", "when"),
    [
        ("chunks", lambda batch: len(batch.token_ids) == 7),
        ("decode", lambda batch: len(batch.token_ids) == 1),
        ("batch", lambda batch: len(batch.block_tables) > 1),
    ],
)
def test_one_unit_of_rounding_in_one_element_is_told(
    name: str, when: Callable[[Any], bool], own: OwnGates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Runner, "run", tapped_behind(changed_by_one_unit(when)))
    found = gate(own, name)
    assert found.verdict is StageVerdict.WRONG
    assert any("other bits" in item.what for item in found.findings), found.findings


def tapped_behind(run: Callable[..., Any]) -> Callable[..., Any]:
    """`run` with the look behind each step after what it has changed."""

    def running(self: Runner, batch: Any) -> Any:
        look, self.after_step = self.after_step, None
        plans: list[Any] = []
        self.after_step = lambda plan, batch: plans.append(plan)
        try:
            result = run(self, batch)
        finally:
            self.after_step = look
        if look is not None:
            look(plans[0], batch)
        return result

    return running


def test_runs_that_differ_are_told(own: OwnGates, monkeypatch: pytest.MonkeyPatch) -> None:
    assert repeats(own, 2).run().verdict is StageVerdict.RIGHT
    number = [0]

    def later(batch: Any) -> bool:
        number[0] += 1
        return number[0] > 4

    monkeypatch.setattr(Runner, "run", tapped_behind(changed_by_one_unit(later)))
    assert repeats(own, 3).run().verdict is StageVerdict.WRONG


def test_a_comparison_that_sees_nothing_is_blind(
    own: OwnGates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare, "first_difference", lambda one, other: None)
    assert gate(own, "decode").verdict is StageVerdict.BLIND


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (UsageError("it is not to be had"), StageVerdict.NOT_RUN),
        (OutOfMemory("cuda", 2, 1, 1), StageVerdict.NOT_RUN),
        (OutOfBlocks(2, 1, 1), StageVerdict.NOT_RUN),
        (RecordCutShort("the ring turned"), StageVerdict.NOT_RUN),
        (BadLogits(0, 1, 32), StageVerdict.WRONG),
    ],
)
def test_a_way_that_cannot_be_had_is_no_mistake(
    error: HypoError, verdict: StageVerdict, own: OwnGates, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(self: Any, batch: Any) -> Any:
        raise error

    monkeypatch.setattr(Runner, "run", refused)
    found = gate(own, "decode")
    memory_left = attempt("memory", "asks", lambda: soak(own.ways, 1, 2))
    assert [found.verdict, memory_left.verdict] == [verdict, verdict]
    for stage in (found, memory_left):
        told = stage.findings[0].what if stage.findings else stage.uncovered[0].why
        assert str(error) in told


def test_pairs_that_ran_stay_when_a_later_one_cannot(own: OwnGates) -> None:
    whole = own.read("at once", 8)

    def pairs() -> Iterator[tuple[compare.AuditedRun, compare.AuditedRun]]:
        yield whole, own.read("steps of 7", 8, 7)
        raise UsageError("it is not to be had")

    found = Gate("chunks", "asks", "chunks", pairs).run()
    assert (found.verdict, found.num_covered) == (StageVerdict.RIGHT, 1)
    assert [item.why for item in found.uncovered] == ["it is not to be had"]


def test_sizes_are_those_that_context_and_step_hold() -> None:
    def fitted(**fields: Any) -> AuditSizes:
        return _fit_sizes(USUAL, EngineConfig(device="cpu", **fields))

    assert fitted(context_length=256) == USUAL
    assert fitted(context_length=64).read == 64
    assert fitted(context_length=64).chunks == (1, 7)
    assert fitted(context_length=256, max_batch_tokens=32).read == 32
    assert fitted(context_length=256, max_batch_tokens=32).batches == (2, 3)
    for field in ("context_length", "max_batch_tokens"):
        with pytest.raises(BadSetting, match=field):
            fitted(**{field: 31})


def test_a_small_step_leaves_gates_right(own: OwnGates, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = own.ways.llm.engine.scheduler
    monkeypatch.setattr(scheduler, "max_batch_tokens", 8)
    config = replace(own.ways.runner.config, max_batch_tokens=8)
    small = OwnGates(own.ways, _fit_sizes(SIZES, config), 0.0)
    for name in ("chunks", "decode", "batch"):
        found = gate(small, name)
        assert found.verdict is StageVerdict.RIGHT, found.findings
        assert found.uncovered or name == "decode"


def test_another_load_that_has_no_room_is_not_audited(
    own: OwnGates, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_large(path: str, config: EngineConfig) -> LLM:
        raise ModelTooLarge("cpu", 2, 1, 1)

    monkeypatch.setattr(beside, "LLM", too_large)
    made = beside.Beside(str(DEMO), own, own.ways.runner.config, own.ways.record, 0.1)
    found = made.device()
    assert found.verdict is StageVerdict.NOT_RUN
    assert "sim:h200 does not run it: cpu: 2 B asked for" in found.uncovered[0].why


def test_a_large_model_is_not_simulated(own: OwnGates, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside, "_num_weights", lambda path: 8_000_000_000)
    monkeypatch.setattr(
        beside.Beside, "_open_other", lambda self, config: pytest.fail("it is loaded")
    )
    found = beside.Beside(str(DEMO), own, own.ways.runner.config, own.ways.record, 0.1).device()
    assert found.verdict is StageVerdict.NOT_RUN
    assert "6 tokens are 48,000 million" in found.uncovered[0].why


def test_settings_that_leave_no_ranks_are_said(own: OwnGates) -> None:
    config = EngineConfig(device="sim:h200", cpu_moe=True)
    found = beside.Beside(str(DEMO), own, config, own.ways.record, 0.1).ranks()
    assert found.verdict is StageVerdict.NOT_RUN
    assert found.uncovered[0].why.startswith("2 ranks do not run it: cpu_moe is True, but parts")


def test_a_cpu_beside_a_gpu_has_all_of_the_model(
    own: OwnGates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its experts too, which are the host's where a GPU has the rest."""
    opened: list[EngineConfig] = []

    def opening(path: str, config: EngineConfig) -> LLM:
        opened.append(config)
        raise UsageError("seen")

    monkeypatch.setattr(beside, "LLM", opening)
    config = EngineConfig(device="sim:h200", cpu_moe=True)
    beside.Beside(str(DEMO), own, config, own.ways.record, 0.1).device()
    assert [(config.device, config.num_host_layers) for config in opened] == [("cpu", 0)]


def test_that_no_emulated_gpu_is_beside_a_real_one_is_said_of_each_device() -> None:
    for device in ("cpu", "cuda", "hip"):
        [left] = beside._left_of_amd(device)
        assert device in left.why.lower()


@pytest.mark.parametrize("name", ["spec", "draft_model"])
def test_an_audit_takes_no_drafts(name: str) -> None:
    given: Any = {name: "ngram" if name == "spec" else "/other.gguf"}
    config = EngineConfig(device="cpu", **given)
    with pytest.raises(BadSetting, match=f"{name} is"):
        _without_drafts(config)


def test_a_launch_elsewhere_is_a_fallback(own: OwnGates, monkeypatch: pytest.MonkeyPatch) -> None:
    found = residency(own.ways, 4, 2)
    assert found.verdict is StageVerdict.RIGHT, found.findings
    assert found.details["fallbacks"] == 0
    made = Stretch.__init__

    def with_one_elsewhere(self: Stretch, *given: Any) -> None:
        made(self, *given)
        for number, plan in self.plans.items():
            first = msgspec.structs.replace(plan.launches[0], device="cuda")
            launches = (first, *plan.launches[1:])
            self.plans[number] = msgspec.structs.replace(plan, launches=launches)

    monkeypatch.setattr(Stretch, "__init__", with_one_elsewhere)
    wrong = residency(own.ways, 4, 2)
    assert wrong.verdict is StageVerdict.WRONG
    assert "runs on cuda" in wrong.findings[0].what


def test_what_requests_leave_behind_is_told(own: OwnGates, monkeypatch: pytest.MonkeyPatch) -> None:
    found = soak(own.ways, 2, 2)
    assert found.verdict is StageVerdict.RIGHT, found.findings
    assert found.canary is not None
    assert (found.canary.num_planted, found.canary.num_seen) == (3, 3)
    kept: list[Any] = []
    run, remove = Runner.run, KVCache.remove

    def allocating(self: Runner, batch: Any) -> Any:
        kept.append(memory.allocate("leak", "test", DType.I32, (16,)))
        return run(self, batch)

    with monkeypatch.context() as patched:
        patched.setattr(Runner, "run", allocating)
        wrong = soak(own.ways, 1, 2)
    assert wrong.verdict is StageVerdict.WRONG
    assert "leak (test" in wrong.findings[0].what

    def keeping(self: KVCache, request: int, **more: Any) -> None:
        if request % 2:
            remove(self, request, **more)

    with monkeypatch.context() as patched:
        patched.setattr(KVCache, "remove", keeping)
        wrong = soak(own.ways, 1, 2)
    cache = own.ways.llm.engine.cache
    for request in cache.owners():
        cache.remove(request)
    assert wrong.verdict is StageVerdict.WRONG
    assert any("blocks of the KV cache" in item.what for item in wrong.findings)


def executed(**fields: Any) -> Executed:
    usual: dict[str, Any] = {
        "devices": ("cuda",), "length": 8, "chunks": (8,), "num_sequences": 1, "num_replayed": 0,
        "num_captured": 0, "is_scattered": False, "kv_types": ("F16",), "weight_types": ("Q8_0",),
        "kernels": ("norm",), "processes": (1,),
    }  # fmt: skip
    return Executed(**(usual | fields))


def ran(name: str, rows: Any, asked: Any = None, **fields: Any) -> compare.AuditedRun:
    return compare.AuditedRun(name, asked or {}, executed(**fields), (0, 1), rows, ())


def test_graphs_that_were_not_replayed_are_told() -> None:
    rows = np.zeros((2, 4), np.float32)
    eager = ran("eager", rows, {"replays": "none"}, num_captured=1)
    graphs = ran("graphs", rows, {"replays": "all"}, num_replayed=0)
    found = compare.route_mistakes(eager, graphs, "replays")
    assert [item.details["field"] for item in found] == ["replays", "replays"]
    graphs = ran("graphs", rows, {"replays": "all"}, num_replayed=1)
    eager = ran("eager", rows, {"replays": "none"})
    assert not compare.route_mistakes(eager, graphs, "replays")


def test_two_ranks_of_which_one_did_not_run_are_told() -> None:
    rows = np.zeros((2, 4), np.float32)
    one = ran("one", rows, {"num_processes": 1})
    both = ran("both", rows, {"num_processes": 2})
    found = compare.route_mistakes(one, both, "num_processes")
    assert len(found) == 2
    both = ran("both", rows, {"num_processes": 2}, processes=(1, 2))
    assert not compare.route_mistakes(one, both, "num_processes")


def test_twice_the_threshold_is_seen_and_half_of_it_passes() -> None:
    drawn = np.random.default_rng(0)
    rows = drawn.standard_normal((2, 512)).astype(np.float32)
    near = (rows + 0.05 * drawn.standard_normal(rows.shape)).astype(np.float32)
    assert compare.distance_mistake(rows, near, (0, 1), 0.1) is None
    assert compare.distance_mistake(rows, near, (0, 1), 0.025) is not None
    planted = compare.planted_distances(rows, near, (0, 1), 0.1)
    assert (planted.num_planted, planted.num_seen) == (100, 100)


def test_an_audit_needs_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hypocenter.audit.executed.current", recorder._NOT_RECORDING.__class__)
    with pytest.raises(UsageError, match="HYPO_RECORD"):
        OwnRecord()


def test_a_copy_without_reason_is_told(own: OwnGates, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a simulated GPU: a CPU copies nothing."""
    from hypocenter.audit.residency import _without_reason
    from hypocenter.device import devices

    devices.open_device("sim:h200")
    tensor = memory.allocate("weight", "weights", DType.I32, (4,), device="sim:h200")
    record = OwnRecord()
    mark = record.mark()
    copies.to_host(tensor)
    [found] = _without_reason(record.since(mark))
    assert "weight (weights) is copied to the host" in found.what
    assert found.details == {"bytes": 16}


def _device_gate(rows: Any, others: Any, reach: list[float]) -> Stage:
    """Two tokens on two devices, and how far rounding alone moves each."""
    moved = np.array(reach)
    asked = {"length": 8}
    one = ran("cpu", np.asarray(rows, np.float32), asked, devices=("cpu",))
    other = ran("gpu", np.asarray(others, np.float32), asked, devices=("gpu",))
    gate = Gate("device", "?", "devices", lambda: [(one, other)], 0.1, reach=lambda: moved)
    return gate.run()


ROWS = [[1.0, -1.0, 2.0, 0.0], [0.0, 3.0, 1.0, -1.0]]


def test_a_token_that_rounding_alone_moves_too_far_is_not_decided() -> None:
    others = [ROWS[0], [3.0, 0.0, 1.0, -1.0]]
    found = _device_gate(ROWS, others, [0.01, 0.5])
    assert found.verdict is StageVerdict.RIGHT
    assert found.num_checks == 1
    assert found.canary is not None
    assert found.canary.num_seen == found.canary.num_planted == 102
    [left] = found.uncovered
    assert left.what == "1 of 2 tokens, the first of them 1"
    assert left.why.endswith("rounding alone moves token 1 by 0.5, where 0.1 is allowed")
    assert _device_gate(ROWS, others, [0.5, 0.01]).verdict is StageVerdict.WRONG
    assert _device_gate(ROWS, others[::-1], [0.01, 0.5]).verdict is StageVerdict.WRONG


def test_what_is_not_finite_is_wrong_wherever_it_is() -> None:
    others = [ROWS[0], [3.0, 0.0, 1.0, np.nan]]
    found = _device_gate(ROWS, others, [0.01, 0.5])
    assert found.verdict is StageVerdict.WRONG
    assert found.findings[0].what.startswith("token 1 is inf away")


def test_a_gate_that_decides_no_token_is_not_audited() -> None:
    found = _device_gate(ROWS, ROWS[::-1], [0.5, 0.5])
    assert found.verdict is StageVerdict.NOT_RUN
    assert "not decided" in found.uncovered[0].why


def test_nobody_asks_what_rounding_does_where_all_is_near() -> None:
    found = _device_gate(ROWS, ROWS, [])
    assert found.verdict is StageVerdict.RIGHT
