"""Forms of a right engine are right, and each planted fault of a kernel is found."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from repository import DEMO

from hypocenter.base.tensor import Tensor
from hypocenter.device import copies, memory
from hypocenter.device.plan import OpCall, PlanBuilder
from hypocenter.engine.runner import Runner, load_runner
from hypocenter.kernels.attention import rope
from hypocenter.kernels.weights.packing import pack, place
from hypocenter.model.gguf.file import GGUFFile, open_gguf
from hypocenter.settings.config import EngineConfig
from hypocenter.verify.expected import Miss
from hypocenter.verify.form import Unit
from hypocenter.verify.kernel_stage import KernelStage
from hypocenter.verify.outcome import Stage, StageVerdict

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
    from hypocenter.base.tensor import DType

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
