"""What ROCm's runtimes say of a fault, as their users have it in a log."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_launcher_lines import AMD, CLR_FAULT, GGML, NO_BINARY

from hypocenter.base.errors import ErrorKind
from hypocenter.base.refusals import NoCode
from hypocenter.watch.fault_text import fault_in
from hypocenter.watch.gpu_dumps import debug_agent, gpu_dumps

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


def test_rocms_debug_agent_is_loaded_where_it_is(tmp_path: Path) -> None:
    assert debug_agent({}, tmp_path) == {}
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "kfd").touch()
    assert debug_agent({}, tmp_path) == {}
    library = tmp_path / "opt" / "rocm-7.2" / "lib" / "librocm-debug-agent.so.2"
    library.parent.mkdir(parents=True)
    library.touch()
    assert debug_agent({}, tmp_path) == {"HSA_TOOLS_LIB": str(library)}
    # A tool of the user's own stays.
    assert debug_agent({"HSA_TOOLS_LIB": "librocprofiler.so"}, tmp_path) == {}
    with gpu_dumps({}, root=tmp_path) as dumps:
        assert dumps.variables == {"HSA_TOOLS_LIB": str(library)}
