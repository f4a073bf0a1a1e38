"""Every GPU kernel runs in some route of the decoder and compiles for GPUs that are not here."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache

import pytest
import torch
from specimens.project_kernels import all_specimens, kernels

from hypocenter.base.tensor import DType
from hypocenter.contracts.contract import Contract
from hypocenter.contracts.registry import contract_of
from hypocenter.device import devices
from hypocenter.device.offline.abstract import AbstractGpu, AbstractPointer, specimens
from hypocenter.device.offline.compile import specimen_of_launch
from hypocenter.device.offline.specimen import of_device
from hypocenter.model.layers.decoder import Decoder
from hypocenter.model.layers.step_buffers import Cache, KVPages, StepInputs
from hypocenter.model.offline.specimens import AbstractModel, architecture_of, form_of
from hypocenter.model.tensors.specimen_weights import undefined_weights, with_undefined_adapters


def test_every_kernel_is_reached_by_some_plan() -> None:
    assert {specimen.name for specimen in all_specimens()} == kernels().keys()


def test_every_launch_of_a_decoder_has_a_contract_that_the_doctor_knows() -> None:
    """By facts and recorded text, which are what a bundle holds."""
    seen: dict[str, bool] = {}
    forms = [("llama", "fused"), ("llama", "parts"), ("qwen3moe", "fused"), ("phi2", "fused")]
    for dtype, num_tokens, (family, attention) in itertools.product(
        (DType.F16, DType.BF16, DType.Q8_0, DType.Q4_K), (1, 64), forms
    ):
        plan = AbstractModel("nvidia", family, dtype, DType.F16, attention=attention).plan(
            num_tokens
        )
        for launch in plan.launches:
            contract = launch.contract
            assert isinstance(contract, Contract)
            found = contract_of(launch.kernel, list(launch.facts), contract.declaration)
            seen[launch.kernel] = seen.get(launch.kernel, True) and found is contract
    assert {kernel for kernel, is_known in seen.items() if not is_known} == set()
    assert len(seen) > 20


def test_what_adapters_launch_has_contracts_that_the_doctor_knows() -> None:
    model = AbstractModel("nvidia", "llama", DType.Q8_0, DType.F16, adapters=DType.F16)
    launches = [one for one in model.plan(16).launches if one.kernel.startswith("adapter")]
    assert {one.kernel for one in launches} == {"adapter_down", "adapter_up"}
    assert len(launches) == 2 * 7, "beside each matrix of the layer"
    for one in launches:
        assert isinstance(one.contract, Contract)
        assert contract_of(one.kernel, list(one.facts), one.contract.declaration) is one.contract


def test_what_adapters_of_experts_launch_has_contracts_that_the_doctor_knows() -> None:
    model = AbstractModel("amd", "qwen3moe", DType.Q8_0, DType.F16, adapters=DType.F16)
    launches = [one for one in model.plan(16).launches if "experts_adapter" in one.kernel]
    assert {one.kernel for one in launches} == {"experts_adapter_down", "experts_adapter_up"}
    assert len(launches) == 2 * 3, "beside each stack of the layer"
    for one in launches:
        assert isinstance(one.contract, Contract)
        assert contract_of(one.kernel, list(one.facts), one.contract.declaration) is one.contract


def test_a_layer_with_an_adapter_is_unlike_those_without() -> None:
    gpu = AbstractGpu("nvidia")
    devices.use_backend(gpu)
    arch = architecture_of("llama")
    arch = replace(arch, layers=arch.layers * 4)
    weights = undefined_weights(arch, DType.Q8_0, gpu.name)
    inputs = StepInputs.allocate(16, 2, 16, device=gpu.name, num_adapters=1)
    cache = Cache(KVPages.allocate(arch, 64, 16, DType.F16, device=gpu.name))
    placed = with_undefined_adapters(weights, DType.F16).adapters
    of_third = {id(matrix) for matrix in weights.layers[2].matrices}
    few = {key: beside for key, beside in placed.items() if key in of_third}
    for adapters, unlike in (({}, {0, 3}), (placed, {0, 3}), (few, {0, 2, 3})):
        decoder = Decoder(arch, replace(weights, adapters=adapters), inputs, cache, 16)
        assert decoder.unlike_layers == unlike


def test_both_forms_of_each_flag_are_reached() -> None:
    flags: dict[tuple[str, str], set[object]] = {}
    for specimen in all_specimens():
        for name, value in specimen.constants.items():
            if isinstance(value, bool) and not of_device([name], is_nvidia=True, overlaps=True):
                flags.setdefault((specimen.name, name), set()).add(value)
    assert [flag for flag, values in flags.items() if values != {True, False}] == []


def test_a_specimen_is_what_triton_would_make_of_the_launch() -> None:
    """Numbers that are 1, multiples of 16, and those that a kernel asks to be left alone."""
    plans = [
        AbstractModel("amd", "llama", DType.Q4_K, DType.F16).plan(tokens) for tokens in (1, 16)
    ]
    launches = [launch for plan in plans for launch in plan.launches]
    kinds = {DType.F32: "float32", DType.F16: "float16", DType.I32: "int32"}
    left_alone = 0
    for launch, made in zip(launches, specimens(launches, ""), strict=True):
        names = [name for name in launch.jit.arg_names if name not in launch.options]
        arguments = {
            name: torch.empty(0, dtype=getattr(torch, kinds[value.dtype]), device="meta")
            if isinstance(value, AbstractPointer)
            else value
            for name, value in zip(names, launch.args, strict=True)
        }
        wanted = specimen_of_launch(launch.jit, {**arguments, **launch.options}, made.options)
        assert made.signature == wanted.signature, launch.kernel
        assert made.constants == wanted.constants, launch.kernel
        assert made.divisible == wanted.divisible, launch.kernel
        left_alone += sum(parameter.do_not_specialize for parameter in launch.jit.params)
    assert left_alone


@pytest.mark.parametrize(
    ("vendor", "device"),
    [("amd", "hip:abstract"), ("nvidia", "cuda:abstract"), ("hopper", "cuda:hopper")],
)
def test_a_plan_names_its_device_and_kernels(vendor: str, device: str) -> None:
    plan = AbstractModel(vendor, "llama", DType.Q4_K, DType.F16).plan(4)
    assert {tensor.device for launch in plan.launches for tensor in launch.tensors.values()} == {
        device
    }
    assert plan.kernels[:3] == ("lookup_codes", "rms_norm_round", "linear_codes_few")


def test_forms_are_those_of_the_vendor_whose_gpus_are_launched_so() -> None:
    """Each kernel is there for both; a form that only one has is compiled for that one alone."""
    for vendor in ("amd", "nvidia"):
        own = [one for one in all_specimens() if one.vendor in ("", vendor)]
        assert {one.name for one in own} == kernels().keys()
        plan = AbstractModel(vendor, "llama", DType.Q8_0, DType.F16).plan(1)
        launch = next(one for one in plan.launches if one.kernel == "linear_codes_few")
        same = [
            one.vendor
            for one in all_specimens()
            if one.name == "linear_codes_few_kernel"
            and one.constants["IS_FRAGMENTS"] == launch.options["IS_FRAGMENTS"]
        ]
        assert vendor in same
        assert set(same) <= {vendor, *({"hopper"} if vendor == "nvidia" else ())}
    alike = {one.name for one in all_specimens() if not one.vendor}
    assert {"rms_norm_kernel", "rope_write_kernel", "rope_kernel", "kv_write_kernel"} <= alike


@cache
def _forms() -> set[tuple[object, ...]]:
    return {form_of(one) for one in all_specimens()}


@pytest.mark.parametrize("vendor", ["amd", "nvidia", "hopper"])
@pytest.mark.parametrize("dtype", [DType.F16, DType.Q4_K])
@pytest.mark.parametrize("num_rows", [1, 2, 4, 8, 16, 32, 64, 512])
def test_every_bucket_of_a_model_launches_forms_that_are_compiled(
    vendor: str, dtype: DType, num_rows: int
) -> None:
    known = _forms()
    plan = AbstractModel(vendor, "qwen3", dtype, DType.F16).plan(num_rows)
    unknown = [one for one in specimens(plan.launches, "") if form_of(one) not in known]
    assert [(one.name, one.constants, one.options) for one in unknown] == []
