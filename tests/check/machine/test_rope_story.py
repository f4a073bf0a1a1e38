"""A crash that people met on MI300X, as gfx942 code: rotary embedding with wrong positions.

What they had on their list of possible causes is one case each: pointers, sizes, freed memory,
refused launches. The code is `examples/rope.hip`; executed by our emulator, not hardware.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from repository import ROOT

from hypocenter.base.errors import BadCodeObject, DeviceFault, UsageError
from hypocenter.check.machine import launch as amd
from hypocenter.check.machine.launch import MachineReport
from hypocenter.check.machine.launch_file import run_launch_file
from hypocenter.check.machine.memory import free
from hypocenter.device.amd.emu import open_emu
from hypocenter.device.amd.executor import prepare
from hypocenter.device.amd.kernarg import LaunchShape
from hypocenter.replay.findings import FindingKind
from hypocenter.replay.text import finding_text

CODE = ROOT / "tests" / "fixtures" / "amd" / "rope.gfx942.co"
LAUNCH = ROOT / "examples" / "rope.toml"
TOKENS, HEADS, DIM = 32, 4, 128


def _launched(shape: LaunchShape | None = None, **changed: Any) -> MachineReport:
    given: dict[str, Any] = {
        "x": np.ones((TOKENS, HEADS, DIM), np.float32),
        "positions": np.arange(TOKENS, dtype=np.int32),
        "num_heads": HEADS,
        "head_dim": DIM,
        "base": 10000.0,
    }
    shape = shape or LaunchShape((TOKENS, HEADS, 1), (DIM // 2, 1, 1))
    return amd.launch(CODE, "rope", shape, {**given, **changed})


def test_the_healthy_launch_rotates_and_has_no_finding() -> None:
    x = np.random.default_rng(0).standard_normal((TOKENS, HEADS, DIM)).astype(np.float32)
    first, second = x[..., : DIM // 2].copy(), x[..., DIM // 2 :].copy()
    assert _launched(x=x).findings == ()
    pair = np.arange(DIM // 2)
    angle = np.arange(TOKENS)[:, None, None] * 10000.0 ** (-2.0 * pair / DIM)
    np.testing.assert_allclose(
        x[..., : DIM // 2], first * np.cos(angle) - second * np.sin(angle), atol=1e-4
    )


def test_positions_of_two_bytes_are_the_cause_and_a_trial_proves_it(tmp_path: Any) -> None:
    path = tmp_path / "rope.toml"
    path.write_text(LAUNCH.read_text().replace('"rope.hip"', f'"{CODE}"'))
    (report,) = run_launch_file(path, "gfx942", 60.0)
    (found,) = report.findings
    assert (found.kind, found.kernel) == (FindingKind.ELEMENT_WIDTH, "rope")
    assert (found.argument, found.number, found.line) == ("positions", 32, 12)
    assert found.num_programs == 16 * HEADS
    text = finding_text(found)
    assert "4 bytes past its end; positions has 32 elements of int16" in text
    assert "with int32 elements the same launch, run again, has no finding" in text


def test_positions_that_are_too_few_are_no_fault_of_their_width() -> None:
    """The twin: 16-bit elements, and half of them missing besides."""
    report = _launched(positions=np.arange(8, dtype=np.int16))
    assert report.findings[0].kind is FindingKind.OUT_OF_BOUNDS
    assert "run again" not in report.findings[0].detail


@pytest.mark.parametrize(("changed", "kind", "argument"), [
    ({"x": None}, FindingKind.NULL_POINTER, None),
    ({"positions": None}, FindingKind.NULL_POINTER, None),
    ({"head_dim": DIM + 2}, FindingKind.OUT_OF_BOUNDS, "x"),
    ({"num_heads": HEADS + 1}, FindingKind.OUT_OF_BOUNDS, "x"),
    ({"x": free(np.ones((TOKENS, HEADS, DIM), np.float32))}, FindingKind.FREED_MEMORY, "x"),
])  # fmt: skip
def test_each_cause_on_their_list_is_named(
    changed: dict[str, Any], kind: FindingKind, argument: str | None
) -> None:
    kinds = {(found.kind, found.argument) for found in _launched(**changed).findings}
    assert (kind, argument) in kinds


def test_a_base_of_zero_makes_nan_and_a_trial_with_another_one_proves_it() -> None:
    (found,) = _launched(base=0.0).findings
    assert (found.kind, found.argument) == (FindingKind.NOT_A_NUMBER, "base")
    assert "elements of x are NaN after the launch" in found.detail
    assert "base is 0.0: with 1 the same launch, run again, leaves none" in found.detail
    # Without a position there is no angle, whatever the base; and NaN that were there are nobody's.
    x = np.ones((TOKENS, HEADS, DIM), np.float32)
    x[3, 1, 5] = np.nan
    assert _launched(x=x, base=0.0).findings == ()


def test_an_odd_head_leaves_its_last_element_as_it_was_and_that_is_said() -> None:
    x = np.ones((TOKENS, HEADS, DIM - 1), np.float32)
    report = _launched(x=x, head_dim=DIM - 1)
    assert report.findings == ()
    whole, last = TOKENS * HEADS * (DIM - 1), TOKENS * HEADS
    assert report.notes == (
        f"x is written in {whole - last} of {whole} elements, and not in [0, 0, 126] (no finding)",
    )
    assert _launched().notes == ()


def test_a_base_that_is_written_as_a_whole_number_is_a_float() -> None:
    given = {kind: np.ones((TOKENS, HEADS, DIM), np.float32) for kind in (int, float)}
    for kind, x in given.items():
        assert _launched(x=x, base=kind(10000)).findings == ()
    np.testing.assert_array_equal(given[int], given[float])


def test_half_a_head_is_refused() -> None:
    with pytest.raises(UsageError, match=r"rope: num_heads is 4\.5, and the kernel takes a whole"):
        _launched(num_heads=4.5)


def test_the_copy_to_the_host_tells_of_the_fault_and_the_kernel_before_it_had_it() -> None:
    """As a program of the host goes: the launch is queued, and a later call finds the GPU gone.

    The positions are the last bytes of what is mapped, as after long prompts; else none faults.
    """
    gpu = open_emu("emu:mi300x", on_abort=lambda: None)
    x = np.ones((TOKENS, HEADS, DIM), np.float32)
    at = gpu.allocate(x.nbytes)
    gpu.copy_in(at, x.reshape(-1).view(np.uint8))
    mapped_bytes = 10 << 20  # so much is a mapping of its own
    positions = gpu.allocate(mapped_bytes) + mapped_bytes - 2 * TOKENS
    gpu.copy_in(positions, np.arange(TOKENS, dtype=np.int16).view(np.uint8))
    program = prepare(amd.code_of_file(CODE, "gfx942"), "rope")
    shape = LaunchShape((TOKENS, HEADS, 1), (DIM // 2, 1, 1))
    values = {"x": at, "positions": positions, "heads": HEADS, "dim": DIM, "base": 10000.0}
    gpu.launch_code(program, shape, values)
    with pytest.raises(DeviceFault) as told:
        gpu.copy_out(at, x.nbytes)
    assert (told.value.call, told.value.is_asynchronous) == ("copy_out", True)
    fault = gpu.last_fault
    assert fault is not None
    assert 0 <= fault.address - (positions + 2 * TOKENS) < 2 * TOKENS
    frame = program.code_object.frame_at(fault.pc)
    assert frame is not None
    assert (frame.file.rpartition("/")[2], frame.line) == ("rope.hip", 12)


def test_an_offset_that_leaves_32_bits_is_outside_before_the_array() -> None:
    """Row 1 begins 2**24 * 128 elements on, which is -2**31 in 32 bits."""
    report = _launched(num_heads=1 << 24)
    assert (report.findings[0].argument, report.findings[0].number) == ("x", -(1 << 31))
    assert "8589934592 bytes before its first" in report.findings[0].detail


@pytest.mark.parametrize(("shape", "reason"), [
    (LaunchShape((0, HEADS, 1), (64, 1, 1)), r"rope: grid \(0, 4, 1\) .* must be 1 or more"),
    (LaunchShape((TOKENS, HEADS, 1), (2048, 1, 1)), "a block of 2048 threads, limit 1024"),
    (LaunchShape((TOKENS, 70000, 1), (64, 1, 1)), "70000 blocks along y, limit 65535"),
    (LaunchShape((1, 1, 1), (64, 1, 1), 65537), "65537 bytes of shared memory .* limit 65536"),
])  # fmt: skip
def test_a_launch_that_a_runtime_refuses_says_value_and_limit(
    shape: LaunchShape, reason: str
) -> None:
    with pytest.raises(UsageError, match=reason):
        _launched(shape)


def test_a_kernel_that_is_not_there_or_not_for_this_gpu_is_said() -> None:
    shape = LaunchShape((1, 1, 1), (64, 1, 1))
    with pytest.raises(BadCodeObject, match="has no kernel ropes; it holds rope"):
        amd.launch(CODE, "ropes", shape, {})
    with pytest.raises(BadCodeObject, match="was made for gfx942, not for gfx1100"):
        amd.launch(CODE, "rope", shape, {}, arch="gfx1100")
