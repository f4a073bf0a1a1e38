"""Forms of a right engine are right, and each planted fault of a kernel is found."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from models.adapter_gguf import random_pairs, write_adapter
from models.expert_model import write_experts
from repository import DEMO

from hypocenter.base.tensor import DType, Tensor
from hypocenter.device import copies, memory
from hypocenter.device.op import Op
from hypocenter.device.plan import OpCall, PlanBuilder
from hypocenter.engine.runner import Runner, load_runner
from hypocenter.kernels.attention import rope
from hypocenter.kernels.linear.head_linear import HEAD_LINEAR
from hypocenter.kernels.recurrent.delta_rule import DELTA_RULE
from hypocenter.kernels.recurrent.short_conv import SHORT_CONV
from hypocenter.kernels.recurrent.ssm_scan import SSM_SCAN
from hypocenter.kernels.rowwise.gate_norm import GATE_NORM
from hypocenter.kernels.weights.packing import pack, place
from hypocenter.model.gguf.file import GGUFFile, open_gguf
from hypocenter.settings.config import EngineConfig
from hypocenter.verify.drawing import SEQUENCE_INPUTS
from hypocenter.verify.expected import Miss
from hypocenter.verify.form import Unit, distinct_units, form, units_of
from hypocenter.verify.kernel_stage import KernelStage
from hypocenter.verify.outcome import Stage, StageVerdict
from hypocenter.verify.steps import PromptSteps, prompt

SMALL: dict[str, Any] = {
    "context_length": 64,
    "kv_tokens": 128,
    "max_batch_tokens": 32,
    "max_batch_requests": 2,
}


@pytest.fixture(scope="module")
def file() -> Iterator[GGUFFile]:
    with open_gguf(DEMO) as opened:
        yield opened


@pytest.fixture(scope="module")
def runner(file: GGUFFile) -> Runner:
    return load_runner(file, EngineConfig(device="cpu", **SMALL))


def stage_of(file: GGUFFile, runner: Runner) -> KernelStage:
    return KernelStage(file, runner.config.device, list(runner.plans_of_all_forms()))


def no_end() -> bool:
    return False


def test_every_form_of_a_right_engine_is_right(file: GGUFFile, runner: Runner) -> None:
    found = stage_of(file, runner).run(no_end)
    assert found.verdict is StageVerdict.RIGHT, found.findings
    assert found.num_covered == found.num_all >= 10, found.uncovered
    assert found.canary is not None
    assert found.canary.num_seen == found.canary.num_planted >= found.num_all


def test_forms_that_steps_have_with_several_rows_are_looked_at_so(
    file: GGUFFile, runner: Runner
) -> None:
    plans = list(runner.plans_of_all_forms())
    most: dict[Any, int] = {}
    for plan in plans:
        for unit in units_of(plan):
            forms = frozenset(form(launch, call) for call in unit.calls for launch in call.launches)
            most[forms] = max(most.get(forms, 0), unit.num_rows)
    units = distinct_units(plans)
    assert {unit.op for unit in units if unit.num_rows > 1} >= {"gather", "lookup", "rope_write"}
    for unit in units:
        forms = frozenset(form(launch, call) for call in unit.calls for launch in call.launches)
        assert unit.num_rows >= min(most[forms], 4), unit.op


def test_a_comparison_that_sees_nothing_makes_the_stage_blind(
    file: GGUFFile, runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "hypocenter.verify.kernel_stage.compare", lambda *_: Miss(0.0, "out", (), 0.0, 0.0)
    )
    assert stage_of(file, runner).run(no_end).verdict is StageVerdict.BLIND


def test_what_there_is_no_time_for_is_told(file: GGUFFile, runner: Runner) -> None:
    found = stage_of(file, runner).run(lambda: True)
    assert found.verdict is StageVerdict.NOT_RUN
    assert (found.num_covered, len(found.uncovered)) == (0, found.num_all)


def _other_table(arguments: Mapping[str, Any], base: float) -> dict[str, Any]:
    cos, _sin = arguments["cos"], arguments["sin"]
    tables = rope.tables(cos.shape[0], 2 * cos.shape[1], base)
    return {name: _tensor(name, table) for name, table in zip(("cos", "sin"), tables, strict=True)}


def _tensor(name: str, values: Any) -> Tensor:
    kinds = {"float32": DType.F32, "int32": DType.I32}
    made = memory.allocate(name, "test", kinds[values.dtype.name], values.shape)
    copies.to_device(made, values)
    return made


def _blocks_rolled(file: GGUFFile) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """The weight with the scales of its first row's blocks moved on by one block."""

    def changed(arguments: Mapping[str, Any]) -> dict[str, Any]:
        weight = arguments["weight"]
        info = file.tensors[weight.name]
        raw = np.array(file.raw(weight.name)).reshape(weight.shape[0], -1)
        blocks = raw.reshape(len(raw), -1, info.dtype.block_bytes)
        blocks[0, :, :2] = np.roll(blocks[0, :, :2], 1, axis=0)
        packed = pack(raw, info.dtype, weight.shape[1])
        return {"weight": place(weight.name, "model", packed), "products": None}

    return changed


#: Of each fault: the op, and what its kernel takes in place of what it was asked for.
FAULTS: dict[str, tuple[str, Callable[[Mapping[str, Any]], dict[str, Any]]]] = {
    "norm: epsilon 1e-3 in place of 1e-5": ("rms_norm_codes", lambda a: {"eps": 1e-3}),
    "norm: another norm's weight": (
        "rms_norm_codes",
        lambda a: {"weight": _tensor("w", copies.to_host(a["weight"])[::-1].copy())},
    ),
    "norm: a column short": ("rms_norm_codes", lambda a: {"width": a["width"] - 1}),
    "rope: base 5000 in place of 10000": ("rope_write", lambda a: _other_table(a, 5000.0)),
    "rope: halves in place of neighbours": (
        "rope_write",
        lambda a: {"neighbours": not a["neighbours"]},
    ),
    "attention: scale 1% too large": ("attention", lambda a: {"scale": a["scale"] * 1.01}),
    "attention: window of one key less": ("attention", lambda a: {"window": 31}),
    "attention: softcap that no model asked for": ("attention", lambda a: {"softcap": 30.0}),
    "linear: the sum before is lost": ("linear", lambda a: {"accumulate": not a["accumulate"]}),
    "gate: gelu in place of silu": ("linear_gate_codes", lambda a: {"kind": 1}),
    "codes: a column short": ("quantise", lambda a: {"width": a["width"] - 1}),
    "lookup: the row above": (
        "lookup",
        lambda a: {"token_ids": memory.rows(a["token_ids"], 1, a["token_ids"].shape[0])},
    ),
    "gather: one row for all": (
        "gather",
        lambda a: {"rows": _tensor("r", np.zeros(a["rows"].shape, np.int32))},
    ),
    "positions of the token before": (
        "rope_write",
        lambda a: {"positions": memory.rows(a["positions"], 1, a["positions"].shape[0])},
    ),
}


def _with_fault(
    units: list[Unit], op: str, change: Callable[[Mapping[str, Any]], dict[str, Any]]
) -> list[Unit]:
    """The units of an op, whose launches do other than their calls ask for."""
    found = []
    for unit in units:
        if unit.op == op:
            first = unit.calls[0]
            plan = PlanBuilder(unit.num_rows, unit.device)
            plan.add(first.op, **{**first.arguments, **change(first.arguments)})
            wrong = OpCall(first.op, first.arguments, tuple(plan.launches))
            found.append(replace(unit, calls=(wrong, *unit.calls[1:])))
    return found


def _run_alone(stage: KernelStage, units: list[Unit]) -> Stage:
    stage.units = units
    return stage.run(no_end)


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(file: GGUFFile, runner: Runner, name: str) -> None:
    op, change = FAULTS[name]
    stage = stage_of(file, runner)
    found = _run_alone(stage, _with_fault(stage.units, op, change))
    assert found.verdict is StageVerdict.WRONG, name
    assert found.findings[0].where


def test_scales_of_one_row_that_are_off_by_a_block_are_found(
    file: GGUFFile, runner: Runner
) -> None:
    stage = stage_of(file, runner)
    units = [unit for unit in stage.units if unit.op == "linear"]
    units = [unit for unit in units if "weight_2" not in {a.name for a in unit.given}][:1]
    changed = _blocks_rolled(file)

    def with_products(arguments: Mapping[str, Any]) -> dict[str, Any]:
        found = changed(arguments)
        (product,) = arguments["products"]
        return found | {"products": [replace(product, weight=found["weight"])]}

    found = _run_alone(stage, _with_fault(units, "linear", with_products))
    assert found.verdict is StageVerdict.WRONG
    assert found.findings[0].details["place"][1] == 0


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[GGUFFile, Runner]]:
    """A small random model with experts."""
    path = write_experts(tmp_path_factory.mktemp("verify") / "m.gguf", DType.Q8_0, num_layers=1)
    with open_gguf(path) as opened:
        yield opened, load_runner(opened, EngineConfig(device="cpu", **SMALL))


def test_the_choice_of_experts_and_their_sum_are_right(
    mixture: tuple[GGUFFile, Runner],
) -> None:
    stage = stage_of(*mixture)
    units = [unit for unit in stage.units if unit.op in ("mix", "route")]
    assert {unit.op for unit in units} == {"mix", "route"}
    found = _run_alone(stage, units)
    assert found.verdict is StageVerdict.RIGHT, found.findings
    assert found.canary is not None
    assert found.num_covered == len(units)
    assert found.canary.num_seen == found.canary.num_planted >= 2 * len(units)


def test_all_forms_of_a_mixture_are_right(mixture: tuple[GGUFFile, Runner]) -> None:
    found = stage_of(*mixture).run(no_end)
    assert found.verdict is StageVerdict.RIGHT, found.findings
    assert found.num_covered == found.num_all, found.uncovered
    assert found.canary is not None
    assert found.canary.num_seen == found.canary.num_planted


def _rolled(tensor: Tensor) -> Tensor:
    return _tensor("x", np.roll(copies.to_host(tensor), 1))


@pytest.mark.parametrize(
    ("op", "change"),
    [
        ("route", lambda a: {"normalises": not a["normalises"]}),
        ("route", lambda a: {"scale": 1.01}),
        ("route", lambda a: {"kind": 1 - a["kind"]}),
        ("mix", lambda a: {"accumulate": not a["accumulate"]}),
        ("mix", lambda a: {"places": _tensor("p", copies.to_host(a["places"]) * 0)}),
        ("mix", lambda a: {"width": a["width"] - 64}),
        ("group", lambda a: {"ids": _tensor("ids", copies.to_host(a["ids"])[:, ::-1].copy())}),
        ("experts", lambda a: {"experts": _tensor("e", 1 + 0 * copies.to_host(a["experts"]))}),
        ("experts", lambda a: {"sizes": _tensor("s", copies.to_host(a["sizes"]) // 2)}),
        ("experts_gate_codes", lambda a: {"kind": 1}),
    ],
)
def test_a_fault_of_a_mixture_is_found(
    mixture: tuple[GGUFFile, Runner], op: str, change: Callable[[Mapping[str, Any]], dict[str, Any]]
) -> None:
    stage = stage_of(*mixture)
    found = _run_alone(stage, _with_fault(stage.units, op, change))
    assert found.verdict is StageVerdict.WRONG


def _convolution(activates: int, has_bias: bool) -> Unit:
    """A short convolution of 12 rows and four sequences, by hand."""
    random = np.random.default_rng(0)

    def floats(*shape: int) -> Tensor:
        return _tensor("x", random.standard_normal(shape).astype(np.float32))

    def numbers(num: int) -> Tensor:
        return _tensor("n", np.zeros(num, np.int32))

    arguments = {
        "x": floats(12, 64),
        "weight": floats(4, 64),
        "bias": floats(64) if has_bias else None,
        "state": floats(9, 3, 64),
        "out": floats(12, 64),
        "activates": activates,
        "num_sequences": 4,
        **{name: numbers(4) for name in SEQUENCE_INPUTS[:4]},
        "sequence_starts": numbers(5),
        "sequence_rows": numbers(12),
        "positions": numbers(12),
        "counts": numbers(2),
    }
    plan = PlanBuilder(12, "cpu")
    plan.add(SHORT_CONV, **arguments)
    return Unit((OpCall(SHORT_CONV, arguments, tuple(plan.launches)),), "cpu")


@pytest.mark.parametrize(("activates", "has_bias"), [(0, True), (1, False)])
def test_a_convolution_with_states_is_right(
    file: GGUFFile, runner: Runner, activates: int, has_bias: bool
) -> None:
    found = _run_alone(stage_of(file, runner), [_convolution(activates, has_bias)])
    assert found.verdict is StageVerdict.RIGHT, found.findings
    # One case less than others have: such a step has a token.
    assert (found.num_covered, found.num_checks) == (1, 4)
    assert found.canary is not None
    assert found.canary.num_seen == found.canary.num_planted == 4


@pytest.mark.parametrize(
    "change",
    [
        lambda a: {"activates": 1 - a["activates"]},
        lambda a: {"weight": _tensor("w", copies.to_host(a["weight"])[::-1].copy())},
        lambda a: {"state_sources": a["state_slots"]},
        lambda a: {"checkpoint_slots": a["state_slots"]},
        lambda a: {"positions": _tensor("p", np.zeros(12, np.int32))},
    ],
)
def test_a_fault_of_a_convolution_is_found(
    file: GGUFFile, runner: Runner, change: Callable[[Mapping[str, Any]], dict[str, Any]]
) -> None:
    stage = stage_of(file, runner)
    found = _run_alone(stage, _with_fault([_convolution(1, False)], "short_conv", change))
    assert found.verdict is StageVerdict.WRONG


def _floats(*shape: int, seed: int = 0) -> Tensor:
    drawn = np.random.default_rng([seed, *shape]).standard_normal(shape)
    return _tensor("x", drawn.astype(np.float32))


def _of_model(values: Tensor) -> Tensor:
    """What is not drawn anew."""
    return replace(values, owner="model")


def _unit_of(op: Op, num_rows: int, arguments: dict[str, Any]) -> Unit:
    plan = PlanBuilder(num_rows, "cpu")
    plan.add(op, **arguments)
    return Unit((OpCall(op, arguments, tuple(plan.launches)),), "cpu")


def _sequences(num_rows: int) -> dict[str, Any]:
    def numbers(num: int) -> Tensor:
        return _tensor("n", np.zeros(num, np.int32))

    return {
        "num_sequences": 4,
        **{name: numbers(4) for name in SEQUENCE_INPUTS[:4]},
        "sequence_starts": numbers(5),
        "sequence_rows": numbers(num_rows),
        "positions": numbers(num_rows),
        "counts": numbers(2),
    }


def _rates(num_heads: int) -> Tensor:
    """Of a model they are below zero."""
    rates = -np.random.default_rng(3).uniform(0.02, 1, num_heads)
    return _of_model(_tensor("rates", rates.astype(np.float32)))


def _delta_rule() -> Unit:
    """12 rows of four sequences, 2 heads of keys of 16 columns and 4 of values of 24."""
    arguments = {
        "x": _floats(12, 2 * 2 * 16 + 4 * 24),
        "betas": _floats(12, 4, seed=1),
        "steps": _floats(12, 4, seed=2),
        "step_bias": _of_model(_floats(4)),
        "rates": _rates(4),
        "state": _floats(9, 4, 16, 64),
        "out": _floats(12, 4 * 24),
        "num_key_heads": 2,
        "value_dim": 24,
        "heads_in_turn": 2,
        **_sequences(12),
    }
    return _unit_of(DELTA_RULE, 12, arguments)


def _ssm_scan() -> Unit:
    """12 rows of four sequences, 4 heads of 24 columns, states of 16 and 2 groups."""
    arguments = {
        "x": _floats(12, 4 * 24 + 2 * 2 * 16),
        "steps": _floats(12, 4, seed=2),
        "step_bias": _of_model(_floats(4)),
        "rates": _rates(4),
        "skips": _of_model(_floats(4, seed=5)),
        "state": _floats(9, 4, 16, 64),
        "out": _floats(12, 4 * 24),
        "num_groups": 2,
        "value_dim": 24,
        **_sequences(12),
    }
    return _unit_of(SSM_SCAN, 12, arguments)


def _gate_norm() -> Unit:
    arguments = {
        "gate": _floats(6, 128),
        "x": _floats(6, 128, seed=1),
        "weight": _of_model(_floats(128)),
        "counts": _tensor("counts", np.zeros(2, np.int32)),
        "num_groups": 2,
        "width": 64,
        "eps": 1e-5,
    }
    return _unit_of(GATE_NORM, 6, arguments)


def _head_linear() -> Unit:
    arguments = {
        "weight": _of_model(_floats(3, 16, 64)),
        "x": _floats(6, 3 * 20),
        "out": _floats(6, 3 * 28),
        "counts": _tensor("counts", np.zeros(2, np.int32)),
        "num_kept": 4,
        "num_outputs": 24,
    }
    return _unit_of(HEAD_LINEAR, 6, arguments)


_BY_HAND: dict[str, Callable[[], Unit]] = {
    "delta_rule": _delta_rule,
    "ssm_scan": _ssm_scan,
    "gate_norm": _gate_norm,
    "head_linear": _head_linear,
}


@pytest.mark.parametrize("name", _BY_HAND)
def test_an_op_by_hand_is_right(file: GGUFFile, runner: Runner, name: str) -> None:
    found = _run_alone(stage_of(file, runner), [_BY_HAND[name]()])
    assert found.verdict is StageVerdict.RIGHT, found.findings
    assert found.num_covered == 1
    assert found.canary is not None
    assert found.canary.num_seen == found.canary.num_planted >= 4


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("delta_rule", lambda a: {"heads_in_turn": 1}),
        ("delta_rule", lambda a: {"rates": _tensor("r", copies.to_host(a["rates"]) * 1.01)}),
        ("delta_rule", lambda a: {"betas": a["steps"]}),
        ("delta_rule", lambda a: {"step_bias": _rolled(a["step_bias"])}),
        ("delta_rule", lambda a: {"state_sources": a["state_slots"]}),
        ("delta_rule", lambda a: {"checkpoint_slots": a["state_slots"]}),
        ("delta_rule", lambda a: {"positions": _tensor("p", np.zeros(12, np.int32))}),
        ("ssm_scan", lambda a: {"num_groups": 1}),
        ("ssm_scan", lambda a: {"rates": _tensor("r", copies.to_host(a["rates"]) * 1.01)}),
        ("ssm_scan", lambda a: {"skips": _rolled(a["skips"])}),
        ("ssm_scan", lambda a: {"step_bias": _rolled(a["step_bias"])}),
        ("ssm_scan", lambda a: {"state_sources": a["state_slots"]}),
        ("ssm_scan", lambda a: {"positions": _tensor("p", np.zeros(12, np.int32))}),
        ("gate_norm", lambda a: {"num_groups": 1, "width": 128}),
        ("gate_norm", lambda a: {"eps": 1e-2}),
        ("head_linear", lambda a: {"num_outputs": 20}),
        ("head_linear", lambda a: {"weight": _floats(3, 16, 64, seed=9)}),
    ],
)
def test_a_fault_of_an_op_by_hand_is_found(
    file: GGUFFile,
    runner: Runner,
    name: str,
    change: Callable[[Mapping[str, Any]], dict[str, Any]],
) -> None:
    found = _run_alone(stage_of(file, runner), _with_fault([_BY_HAND[name]()], name, change))
    assert found.verdict is StageVerdict.WRONG


@pytest.mark.parametrize("kv_dtype", ["q8_0", "q4_0"])
def test_caches_of_blocks_are_right(file: GGUFFile, kv_dtype: str) -> None:
    runner = load_runner(file, EngineConfig(device="cpu", kv_dtype=kv_dtype, **SMALL))
    stage = stage_of(file, runner)
    units = [unit for unit in stage.units if unit.op in ("attention", "kv_write")]
    found = _run_alone(stage, units)
    assert found.verdict is StageVerdict.RIGHT, found.findings
    assert found.num_covered == len(units) >= 2
    assert found.canary is not None
    assert found.canary.num_seen == found.canary.num_planted >= 2 * len(units)
    for op, change in (
        ("kv_write", lambda a: {"k": a["v"], "v": a["k"]}),
        ("attention", lambda a: {"scale": a["scale"] * 1.1}),
    ):
        wrong = _with_fault([unit for unit in units if unit.op == op][:1], op, change)
        assert _run_alone(stage_of(file, runner), wrong).verdict is StageVerdict.WRONG, op


# -- adapters --------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["matrices", "experts"])
def adapted(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[GGUFFile, Runner]]:
    """A small random model with two adapters, one of which counts nothing by default."""
    folder = tmp_path_factory.mktemp("adapted")
    path = write_experts(folder / "m.gguf", DType.Q8_0, num_layers=1)
    is_wanted = request.param == "experts"
    files = []
    for seed, rank in ((1, 11), (2, 8)):
        pairs = random_pairs(path, rank, seed)
        own = {name: pair for name, pair in pairs.items() if ("_exps" in name) == is_wanted}
        files.append(str(write_adapter(folder / f"{seed}.gguf", path, own)))
    config = EngineConfig(device="cpu", lora=(f"{files[0]}:0.5", f"{files[1]}:0"), **SMALL)
    with open_gguf(path) as opened:
        yield opened, load_runner(opened, config)


def _of_adapters(stage: KernelStage) -> list[Unit]:
    return [unit for unit in stage.units if "adapter" in unit.op]


def test_products_of_adapters_are_right(adapted: tuple[GGUFFile, Runner]) -> None:
    stage = stage_of(*adapted)
    units = _of_adapters(stage)
    assert {unit.op.removeprefix("experts_") for unit in units} == {"adapter_down", "adapter_up"}
    found = _run_alone(stage, units)
    assert found.verdict is StageVerdict.RIGHT, found.findings
    assert found.num_covered == found.num_all == len(units), found.uncovered
    assert found.canary is not None
    assert found.canary.num_seen == found.canary.num_planted >= 2 * len(units)


@pytest.mark.parametrize(
    ("op", "change"),
    [
        ("adapter_down", lambda a: {"factors": _tensor("f", 1.01 * copies.to_host(a["factors"]))}),
        ("adapter_down", lambda a: {"owners": _tensor("o", 1 - copies.to_host(a["owners"]))}),
        ("adapter_down", lambda a: {"num_columns": a["num_columns"] - 1}),
        ("adapter_up", lambda a: {"owners": _tensor("o", 1 - copies.to_host(a["owners"]))}),
        ("adapter_up", lambda a: {"up": _halved(a["up"])}),
        ("adapter_up", lambda a: {"scales": _tensor("s", 0 * copies.to_host(a["scales"]))}),
    ],
)
def test_a_fault_of_an_adapter_is_found(
    adapted: tuple[GGUFFile, Runner],
    op: str,
    change: Callable[[Mapping[str, Any]], dict[str, Any]],
) -> None:
    stage = stage_of(*adapted)
    units = _of_adapters(stage)
    op = next(unit.op for unit in units if unit.op.endswith(op))
    found = _run_alone(stage, _with_fault(units, op, change))
    assert found.verdict is StageVerdict.WRONG


def _halved(up: Tensor) -> Tensor:
    """The same with the rank of each tile that comes last as it is half as large."""
    values = copies.to_host(up)
    values[..., 7::8, :] /= 2
    return _tensor("up", values)


def test_steps_have_the_adapters_that_a_configuration_gives(
    adapted: tuple[GGUFFile, Runner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So logits are looked at with them, too."""
    _, runner = adapted
    steps, ids = PromptSteps(runner, 1, 8), prompt(runner.vocab_size, 8, 1)
    with_adapters = steps.run([(ids, 0, 8)])
    adapters = runner.adapters
    assert adapters is not None
    monkeypatch.setattr(type(adapters), "scales", lambda self, asked: ())
    plain = steps.run([(ids, 0, 8)])
    assert np.abs(with_adapters - plain).max() > 0.01 * np.abs(plain).max()


# -- experts on the host ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def on_host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[GGUFFile, Runner]]:
    """A small random model on a simulated GPU, of which the CPU computes the experts."""
    path = write_experts(tmp_path_factory.mktemp("host") / "m.gguf", DType.Q8_0, num_layers=1)
    config = EngineConfig(device="sim:h200", cpu_moe=True, **SMALL)
    with open_gguf(path) as opened:
        yield opened, load_runner(opened, config)


def _of_host(stage: KernelStage) -> list[Unit]:
    return [unit for unit in stage.units if unit.device == "cpu"]


def test_experts_on_the_host_are_right(on_host: tuple[GGUFFile, Runner]) -> None:
    stage = stage_of(*on_host)
    units = _of_host(stage)
    assert {unit.op for unit in units} >= {"experts", "route", "mix"}
    found = _run_alone(stage, units)
    assert found.verdict is StageVerdict.RIGHT, found.findings
    assert found.num_covered == found.num_all, found.uncovered
    assert found.canary is not None
    assert found.canary.num_seen == found.canary.num_planted >= len(units)


def test_a_fault_of_experts_on_the_host_is_found(on_host: tuple[GGUFFile, Runner]) -> None:
    stage = stage_of(*on_host)
    wrong = _with_fault(
        _of_host(stage),
        "experts",
        lambda a: {"sizes": _tensor("s", copies.to_host(a["sizes"]) // 2)},
    )
    assert _run_alone(stage, wrong).verdict is StageVerdict.WRONG
