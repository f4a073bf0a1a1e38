"""What AMD's debug agent prints, and names of kernels as compilers give them.

The texts have the form of its guide and of reports; no AMD GPU was there to print them.
"""

from __future__ import annotations

import pytest
from recorded.core_dumps import AGENT_TEXT

from hypocenter.coredump.debug_agent import read_debug_agent
from hypocenter.coredump.names import source_name
from hypocenter.record.gpu_stop import MAX_WARPS, GpuFrame

TORCH = (
    "_ZN2at6native54_GLOBAL__N__d8ceb000_21_DistributionNormal_cu_0c5b6e8543distribution_elementwise"
    "_grid_stride_kernelIfLi4EZNS0_9templates4cuda20normal_and_transformIffPNS_17CUDAGeneratorImpl"
    "EZZZNS4_13normal_kernelIS7_EEvRKNS_10TensorBaseEddT_ENKUlvE_clEvENKUlvE0_clEvEUlfE_EEvRNS_18"
    "TensorIteratorBaseET1_T2_EUlP24curandStatePhilox4_32_10E_ZNS1_27distribution_nullary_kernelIff"
    "7double2S7_SF_SE_EEvS9_SA_RKT3_T4_EUlifE_EEvlNS_15PhiloxCudaStateET1_SA_"
)


def test_waves_that_stopped_with_kernel_line_and_registers() -> None:
    stop = read_debug_agent(f"some output\n{AGENT_TEXT}more output\n")
    assert stop is not None
    assert (stop.source, stop.exception) == ("ROCm debug agent", "illegal address")
    assert (stop.address, stop.num_warps) == (0x7F3E5A400000, 2)
    first, second = stop.warps
    assert (first.kernel, first.warp, first.offset) == ("scatter", 3, 40)
    assert first.frames == (GpuFrame("/home/user/scatter.hip", 17),)
    assert first.lanes[1].registers == (0x5A400004, 0x7F3E)
    assert (first.block, first.lanes[0].thread) == (None, None)
    # ROCm 7 names the kernel with each wave, whose disassembly stands elsewhere.
    assert (second.kernel, second.exception, second.frames) == ("scatter", "illegal address", ())
    assert stop.faulting == first
    assert [(s.line, s.num_warps) for s in stop.standing] == [(17, 1), (0, 1)]


def test_waves_that_were_asked_for_are_no_fault() -> None:
    stop = read_debug_agent("wave_1: pc=0x7f0000001000 (running)\n")
    assert stop is not None
    assert stop.is_on_request
    assert stop.exception == ""


def test_output_without_the_agent_says_nothing() -> None:
    assert read_debug_agent("") is None
    assert read_debug_agent("Memory access fault by GPU node-1 on address 0x1000.\n") is None


def test_of_many_waves_some_are_kept_and_all_are_counted() -> None:
    row = "wave_{0}: pc=0x7f0000001000 (stopped, reason: ASSERT_TRAP)\n"
    stop = read_debug_agent("".join(row.format(number) for number in range(500)))
    assert stop is not None
    assert (stop.num_warps, len(stop.warps)) == (500, MAX_WARPS)
    assert (stop.exception, stop.problem()) == ("assert", "")


@pytest.mark.parametrize(
    ("symbol", "name"),
    [
        ("embed", "embed"),
        ("_Z6gatherPKfPKlPfi", "gather"),
        ("_ZN12_GLOBAL__N_16kernelEv", "(anonymous namespace)::kernel"),
        (
            "_ZN2at6native21indexSelectLargeIndexIflLj2ELj2ELin2ELb1EEEvNS_4cuda6detail10TensorInfo",
            "at::native::indexSelectLargeIndex<...>",
        ),
        (
            "_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_11FillFunctorIfEESt5arrayIPcLm1EEEEviT0_T1_",
            "at::native::vectorized_elementwise_kernel<FillFunctor>",
        ),
        (
            TORCH,
            "at::native::(anonymous namespace)::distribution_elementwise_grid_stride_kernel"
            "<templates, normal_and_transform, CUDAGeneratorImpl>",
        ),
        # What is not read here stays as it is.
        ("_ZN", "_ZN"),
        ("_ZN9999999999x", "_ZN9999999999x"),
        ("_Z4funcI" + "N" * 5000, "_Z4funcI" + "N" * 5000),
        ("_Z4func" + "I" * 4000, "_Z4func" + "I" * 4000),
    ],
)
def test_names_of_the_source(symbol: str, name: str) -> None:
    assert source_name(symbol) == name
