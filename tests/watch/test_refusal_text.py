"""What runtimes, compilers and kernels refuse is read as facts, from what they really write."""

from __future__ import annotations

import pytest
from pretended.runtime_words import (
    ASSERTED,
    ASSERTIONS,
    CAPTURE,
    COMPILE,
    FRAMES,
    NO_CODE,
    RESOURCES,
    TRITON,
)

from hypocenter.base.errors import ErrorKind
from hypocenter.base.refusals import (
    CaptureError,
    CompileError,
    DeviceAssert,
    NoCode,
    ResourceExceeded,
)
from hypocenter.watch.fault_text import fault_in, is_fault
from hypocenter.watch.refusal_text import refused_in


@pytest.mark.parametrize("resource", ["shared memory", "threads", "tensor memory"])
def test_a_resource_is_read_with_need_limit_kernel_and_line(resource: str) -> None:
    fault = fault_in(RESOURCES.replace("shared memory", resource), 1, None)
    assert fault.refusal == ResourceExceeded(
        resource=resource, needed=278528, limit=232448, gpu="the GPU"
    )
    assert (fault.kind, fault.kernel, fault.site) == (
        "error", "attention_fwd", "/home/ann/train.py:61",
    )  # fmt: skip
    assert fault.call == "`out = attention_fwd[grid](q, k, v, num_stages=4)`"
    assert not fault.is_asynchronous
    assert is_fault(RESOURCES, 1, None)


def test_a_type_that_the_gpu_lacks_is_what_the_compiler_says() -> None:
    fault = fault_in(COMPILE, 1, None)
    assert isinstance(fault.refusal, CompileError)
    assert fault.refusal.sentence.startswith("type fp8e4nv not supported in this architecture")
    assert fault.refusal.text == "x = x.to(tl.float8e4nv)"
    assert (fault.kernel, fault.site) == ("cast_kernel", "/home/ann/train.py:61")


def test_an_assertion_of_torch_is_read_with_block_thread_and_count() -> None:
    fault = fault_in(ASSERTED, 1, None)
    assert fault.refusal == DeviceAssert(
        condition="srcIndex < srcSelectDimSize",
        function="indexSelectLargeIndex",
        file="/pytorch/aten/src/ATen/native/cuda/Indexing.cu",
        line=1553,
        block=(63, 0, 0),
        thread=(64, 0, 0),
        num_threads=3,
    )
    assert fault.error_kind is ErrorKind.FOUND_LATER
    assert fault.is_asynchronous
    assert fault.site == "/home/ann/train.py:61"


def test_assertions_of_hip_and_of_templates_are_read() -> None:
    hip = (
        "/pytorch/aten/src/ATen/native/hip/Indexing.hip:1289: indexSelectSmallIndex: Device-side "
        "assertion `srcIndex < srcSelectDimSize' failed.\n"
    )
    found = refused_in(hip)
    assert found is not None
    assert isinstance(found.refusal, DeviceAssert)
    assert (found.refusal.function, found.refusal.block) == ("indexSelectSmallIndex", None)
    long = ASSERTIONS.replace(
        "indexSelectLargeIndex",
        "void indexSelectLargeIndex(TensorInfo<T, I>, int) [with T = float]",
    )
    found = refused_in(long)
    assert found is not None
    assert found.kernel == "indexSelectLargeIndex"


def test_a_missing_architecture_is_read_with_those_that_are_there() -> None:
    fault = fault_in(NO_CODE, 1, None)
    assert fault.refusal == NoCode(
        sentence="no kernel image is available for execution on the device",
        gpu="NVIDIA GeForce RTX 5090",
        wanted="sm_120",
        built_for=("sm_80", "sm_86", "sm_90"),
    )
    assert fault.error_kind is ErrorKind.NO_CODE
    newer = NO_CODE.partition("UserWarning:\n")[2].partition("Traceback")
    text = (
        "Found GPU0 NVIDIA GeForce RTX 5090 which is of compute capability (CC) 12.0.\n"
        "The following list shows the CCs this version of PyTorch was built for and the hardware "
        "CCs it supports:\n- 8.0 which supports hardware CC >=8.0,<9.0\n"
        "- 9.0 which supports hardware CC >=9.0,<10.0\n"
    )
    other = fault_in(text + newer[1] + newer[2], 1, None).refusal
    assert isinstance(other, NoCode)
    assert (other.wanted, other.built_for) == ("sm_120", ("sm_80", "sm_90"))


def test_the_first_error_of_a_capture_counts_and_not_its_echo() -> None:
    fault = fault_in(CAPTURE, 1, None)
    assert fault.refusal == CaptureError(
        code=900, sentence="operation not permitted when stream is capturing", in_triton=True
    )
    assert (fault.kernel, fault.site) == ("norm_kernel", "/home/ann/train.py:61")
    item = CAPTURE.replace(TRITON, "").replace("Triton Error [CUDA]", "CUDA error")
    other = fault_in(item, 1, None).refusal
    assert isinstance(other, CaptureError)
    assert not other.in_triton


def test_what_refuses_nothing_has_no_refusal() -> None:
    assert refused_in("") is None
    assert refused_in("torch.AcceleratorError: CUDA error: an illegal memory access\n") is None
    assert refused_in("test.py:3: AssertionError: Assertion `x` failed") is None
    assert fault_in(FRAMES.format(line="f()") + "ValueError: no\n", 1, None).refusal is None


def test_of_several_refusals_the_first_counts() -> None:
    for first, second, kind in (
        (COMPILE, RESOURCES, CompileError),
        (RESOURCES, COMPILE, ResourceExceeded),
    ):
        found = refused_in(first + second)
        assert found is not None
        assert isinstance(found.refusal, kind)


def test_what_follows_another_error_of_the_runtime_is_no_refusal() -> None:
    first = "torch.AcceleratorError: CUDA error: an illegal memory access was encountered\n"
    assert refused_in(first + CAPTURE) is None
    fault = fault_in(first + CAPTURE, 1, None)
    assert fault.error == "an illegal memory access was encountered"
