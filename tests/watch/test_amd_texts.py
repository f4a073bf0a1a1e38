"""What ROCm's runtimes say of a fault, as their users have it in a log."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from recorded.core_dumps import AGENT_TEXT
from test_launcher_lines import AMD, CLR_FAULT, GGML, NO_BINARY

from hypocenter.base.errors import ErrorKind
from hypocenter.base.refusals import NoCode
from hypocenter.record.fault_record import FaultRecord
from hypocenter.watch.device_dump import device_dump
from hypocenter.watch.fault_text import fault_in, with_kernel_log
from hypocenter.watch.gpu_dumps import GpuDumps

ABORT = 6


def test_a_line_of_clr_gives_the_address_and_names_kernels_with_doubt() -> None:
    fault = fault_in(CLR_FAULT, None, ABORT)
    assert (fault.kind, fault.address) == ("crash", 0x7F7D37C00000)
    assert "rope_kernel(float*, int const*): under way, not surely the kernel that" in fault.message
    # The kernel is no fact: no rung may take it for the one that faulted.
    assert fault.kernel == ""


def test_beside_the_drivers_line_the_kernels_are_kept() -> None:
    two = CLR_FAULT + CLR_FAULT.replace("rope_kernel", "copy_kernel") + AMD
    fault = fault_in(two, None, ABORT)
    assert fault.address == 0x7F3A12345000
    assert "Page not present" in fault.error
    assert "rope_kernel(float*, int const*), copy_kernel(float*, int const*)" in fault.message


def test_a_kernel_that_clr_does_not_know_is_not_named() -> None:
    text = CLR_FAULT.replace("rope_kernel(float*, int const*)", "<unknown>")
    assert fault_in(text, None, ABORT).message == "Memory Fault Error"


def test_a_queue_error_alone_is_told() -> None:
    text = "Warning: Queue error - HSA_STATUS_ERROR_MEMORY_FAULT\n"
    assert fault_in(text, None, ABORT).error == "HSA_STATUS_ERROR_MEMORY_FAULT"


@pytest.mark.parametrize(("text", "kind"), [
    (GGML, ErrorKind.FOUND_LATER),
    (GGML.replace("an illegal memory access was encountered", "out of memory"),
     ErrorKind.OUT_OF_MEMORY),
])  # fmt: skip
def test_an_error_of_ggml_is_one_of_the_runtime(text: str, kind: ErrorKind) -> None:
    assert fault_in(text, None, ABORT).error_kind is kind


def test_a_gpu_without_code_is_named_by_its_target() -> None:
    fault = fault_in(NO_BINARY, None, ABORT)
    assert fault.error_kind is ErrorKind.NO_CODE
    assert isinstance(fault.refusal, NoCode)
    assert fault.refusal.wanted == "gfx1036"


def test_a_program_that_talks_of_a_memory_fault_is_not_one() -> None:
    assert fault_in("see Memory Fault Error in the manual\n", 0, None).kind == "none"


@pytest.mark.parametrize("prefix", [
    "", "(EngineCore_DP0 pid=4711) ", "[rank3]: ", "(RayWorkerWrapper pid=99, ip=10.0.0.7) ",
    "server-1  | ",
])  # fmt: skip
def test_the_debug_agents_waves_are_read_behind_what_a_launcher_puts_before_lines(
    prefix: str,
) -> None:
    text = "".join(f"{prefix}{line}\n" for line in AGENT_TEXT.splitlines())
    [stop], _ = GpuDumps().stops(text)
    assert (stop.num_warps, stop.address) == (2, 0x7F3E5A400000)
    assert stop.faulting is not None
    assert (stop.faulting.kernel, stop.faulting.frames[0].line) == ("scatter", 17)


DEVICE_DUMP = """\
**** AMDGPU Device Coredump ****
version: 1
kernel: 6.14.0
module: amdgpu
time: 29.725011811
process_name: python3.12 PID: 1720
IP Dump
Ring timed out details
IP Type: 0 Ring Name: comp_1.0.0

[gfxhub] Page fault observed
Faulty page starting at address: 0x00007f3e5a400000
Protection fault status register: {status}
"""


@pytest.mark.parametrize(("status", "pid", "told"), [
    ("0x301031", 1720, (0x7F3E5A400000, "read")),
    ("0x341031", 1720, (0x7F3E5A400000, "write")),
    ("0x301031", 1721, (None, "")),  # another process
    ("0x0", 1720, (None, "")),  # a reset without a fault: all zeros
])  # fmt: skip
def test_the_drivers_device_dump_tells_the_page(
    status: str, pid: int, told: tuple[int | None, str], tmp_path: Path
) -> None:
    path = tmp_path / "sys" / "class" / "devcoredump" / "devcd1" / "data"
    path.parent.mkdir(parents=True)
    path.write_text(DEVICE_DUMP.format(status=status))
    lines = device_dump(time.monotonic(), tmp_path)
    assert lines[0] == "amdgpu devcoredump: process_name: python3.12 PID: 1720"
    assert len(lines) == 6
    fault = with_kernel_log(FaultRecord(kind="crash", message="ended"), lines, pid)
    assert (fault.address, fault.access) == told
    os.utime(path, (0, 0))
    assert device_dump(time.monotonic(), tmp_path) == ()
