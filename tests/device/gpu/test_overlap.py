"""Launches that begin while others end: who does, and that each waits before it does anything."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
from specimens.guard_kernels import unmasked_kernel

# mypy: disable-error-code="no-untyped-call"
from specimens.project_kernels import first_specimens, kernels

from hypocenter.base.tensor import DType, Tensor
from hypocenter.device import devices, launch, memory
from hypocenter.device.limits import TABLE, named_gpu
from hypocenter.device.offline.abstract import AbstractGpu
from hypocenter.device.offline.compile import _guarded_specimen, compile_source, triton_source
from hypocenter.device.offline.specimen import Specimen
from hypocenter.device.plan import PlanBuilder
from hypocenter.kernels.rowwise import norm
from hypocenter.model.offline.specimens import vendor_specimens

KERNELS = tuple(kernels().values())
OVERLAPPING = [jit for jit in KERNELS if "OVERLAPS" in jit.arg_names]
#: What a program does that others may see, or that ends it, in PTX.
#: What asks for weights, which no launch writes, before it waits.
ASKS_FIRST = "linear_codes_few_kernel"
DEEDS = ("ld.global", "st.global", "cp.async", "atom.", "red.", "ret;", "bra")


def test_what_runs_in_every_decode_step_overlaps() -> None:
    names = {jit.__name__.removesuffix("_kernel") for jit in OVERLAPPING}
    assert names >= {
        "rms_norm", "round", "linear_codes_few", "linear_float", "rope_write", "rope",
        "kv_write", "rms_norm_round", "gate_round", "attention_fold_round", "attention_split",
        "attention_fold", "gate", "gather", "lookup_codes", "greedy_rows",
        "mark",
    }  # fmt: skip


@pytest.mark.parametrize("jit", OVERLAPPING, ids=lambda jit: str(jit.__name__))
def test_a_kernel_that_overlaps_waits_first(jit: Any) -> None:
    function = ast.parse(textwrap.dedent(inspect.getsource(jit.fn))).body[0]
    assert isinstance(function, ast.FunctionDef)
    if jit.__name__ == ASKS_FIRST:
        return  # its code is looked at
    has_text = ast.get_docstring(function) is not None
    deeds = [ast.unparse(deed) for deed in function.body[has_text:]]
    assert deeds[deeds[0].startswith("lead(OVERLAPS")] == "follow(OVERLAPS)"


def ptx(one: Specimen, arch: str) -> str:
    limits = named_gpu(arch)
    text = str(compile_source(triton_source(one, limits), limits, one.options).asm["ptx"])
    return text[text.index(".entry") :]


@pytest.mark.parametrize(
    ("name", "guarded"),
    [(jit.__name__, False) for jit in OVERLAPPING]
    + [(name, True) for name in ("rms_norm_kernel", "rope_write_kernel", "mark_kernel")],
)
@pytest.mark.tier(
    "targets",
    fast=lambda case: case.guarded or case.name in ("round_kernel", "linear_codes_few_kernel"),
)
def test_the_compiler_moves_nothing_before_the_wait(name: str, guarded: bool) -> None:
    one = first_specimens()[name]
    text = ptx(_guarded_specimen(one) if guarded else one, "sm_90")
    assert "ld.global" in text
    before, after = text.split("griddepcontrol.wait", 1)
    if name == ASKS_FIRST:
        # Words and scales of two rows, by one load each.
        assert before.count("ld.global") == 4
        assert [deed for deed in DEEDS[1:] if deed in before] == []
        for parameter in ("param_0", "param_1", "param_2"):  # x, its scales and counts
            (pointer,) = re.findall(rf"ld.param.[bu]64\s+(%rd\d+), \[\w+{parameter}\]", text)
            assert not re.search(rf"ld.global[^;]*\[{pointer}[+\]]", before)
        assert "ld.global" in after
        return
    assert [deed for deed in DEEDS if deed in before] == []


@pytest.mark.tier("targets")
def test_units_of_weights_are_asked_for_together_and_before_the_wait() -> None:
    one = next(
        one
        for one in vendor_specimens("hopper")
        if one.name == ASKS_FIRST and one.constants["UNITS"] == 4
    )
    assert one.constants["HAS_MINIMA"]
    before, _ = ptx(one, "sm_90").split("griddepcontrol.wait", 1)
    # Words, scales and minima of two rows, by one load each: of the weight whose code comes first.
    assert before.count("ld.global") == 4 * 6


def test_registers_are_filled_anew_when_the_matrix_units_have_read_them() -> None:
    """Weights that are unpacked in registers: each step's products end before the next step."""
    one = next(
        one
        for one in vendor_specimens("hopper")
        if one.name == "linear_codes_kernel" and one.constants["ROWS"] == 128
    )
    text = ptx(one, "sm_90")
    assert "wgmma.mma_async" in text
    waits = re.findall(r"wgmma\.wait_group\.sync\.aligned\s+(\d+)", text)
    assert set(waits) == {"0"}


def test_an_older_gpu_gets_code_without_the_wait() -> None:
    assert "griddepcontrol" not in ptx(first_specimens()["mark_kernel"], "sm_89")


@pytest.mark.parametrize("arch", TABLE)
def test_which_gpus_overlap(arch: str) -> None:
    assert named_gpu(arch).overlaps == (arch in ("sm_90", "sm_100", "sm_120"))


class Overlapping(AbstractGpu):
    overlaps = True


def prepared_norm() -> launch.Launch:
    def tensor(name: str, dtype: DType, *shape: int) -> Tensor:
        return memory.allocate_undefined(name, "test", dtype, shape, device="cuda:abstract")

    plan = PlanBuilder(1, "cuda:abstract")
    x, weight = tensor("x", DType.F32, 1, 64), tensor("weight", DType.F32, 64)
    out, counts = tensor("out", DType.F32, 1, 64), tensor("counts", DType.I32, 2)
    norm.rms_norm(plan, x, weight, 1e-5, out, counts, width=64)
    return plan.launches[0]


def test_the_launch_door_tells_kernel_and_driver_alike() -> None:
    devices.use_backend(Overlapping("nvidia"))
    options = prepared_norm().options
    assert (options["OVERLAPS"], options["launch_pdl"]) == (True, True)
    devices.use_backend(AbstractGpu("nvidia"))
    options = prepared_norm().options
    # AMD's part of Triton refuses an option that it does not know.
    assert (options["OVERLAPS"], "launch_pdl" in options) == (False, False)


class DemandsNothing:
    def check(self, **arguments: Any) -> dict[str, Any]:
        return {}

    def needs_int64(self, **arguments: Any) -> bool:
        return False

    def check_values(self, read: Callable[[Tensor], Any], **arguments: Any) -> None:
        """There are no index values."""


def test_a_kernel_that_does_not_wait_begins_when_all_before_it_has_ended() -> None:
    devices.use_backend(Overlapping("nvidia"))
    x = memory.allocate_undefined("x", "test", DType.F32, (64,), device="cuda:abstract")
    options = {"grid": (1,), "num_warps": 1, "BLOCK": 64}
    made = launch.prepare_gpu(
        unmasked_kernel, [x, x], options, DemandsNothing(), {}, "cuda:abstract"
    )
    assert made.options == options
