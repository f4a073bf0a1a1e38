"""Every GPU kernel runs in some route of the decoder and compiles for GPUs that are not here."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator

import pytest

import hypocenter.kernels
from hypocenter.device.gpu_lang import triton
from hypocenter.model.specimens import abstract_plan, project_specimens
from hypocenter.tensor import DType

SPECIMENS = project_specimens()


def _kernels() -> Iterator[str]:
    for module in pkgutil.iter_modules(hypocenter.kernels.__path__):
        if module.name.endswith("_gpu"):
            for name, value in vars(
                importlib.import_module(f"hypocenter.kernels.{module.name}")
            ).items():
                if isinstance(value, triton.runtime.jit.JITFunction) and name.endswith("_kernel"):
                    yield name


def test_every_kernel_is_reached_by_some_plan() -> None:
    assert {specimen.name for specimen in SPECIMENS} == set(_kernels())


def test_both_forms_of_each_flag_are_reached() -> None:
    flags: dict[tuple[str, str], set[object]] = {}
    for specimen in SPECIMENS:
        for name, value in specimen.constants.items():
            if isinstance(value, bool):
                flags.setdefault((specimen.name, name), set()).add(value)
    assert [flag for flag, values in flags.items() if values != {True, False}] == []


@pytest.mark.parametrize("device", ["abstract"])
def test_a_plan_names_its_device_and_kernels(device: str) -> None:
    plan = abstract_plan("llama", DType.Q4_K, DType.F16, num_tokens=4)
    assert {tensor.device for launch in plan.launches for tensor in launch.tensors.values()} == {
        device
    }
    assert plan.kernels[:3] == ("lookup_codes", "rms_norm", "linear_codes")
