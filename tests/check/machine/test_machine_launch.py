"""Launches of machine code with planted faults: what is named, and that the healthy have nothing.

The code was compiled by clang (tests/fixtures/amd); it is executed by our emulator, not hardware.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from repository import ROOT

from hypocenter.base.errors import HypoError, UsageError
from hypocenter.check.machine import launch as amd
from hypocenter.check.machine.check_file import check_machine
from hypocenter.check.machine.memory import unwritten
from hypocenter.check.report import report_text
from hypocenter.device.amd import hip
from hypocenter.device.amd.kernarg import LaunchShape
from hypocenter.replay.findings import FindingKind

BUNDLE = ROOT / "tests" / "fixtures" / "amd" / "saxpy.bundle"
LAUNCH = """
code = "{bundle}"
[[launch]]
kernel = "saxpy"
grid = 4
block = 256
[launch.arguments]
y = {{ shape = [1000], fill = "ones" }}
x = {{ shape = [1000], fill = "arange" }}
a = 2.0
n = {n}
"""


@pytest.fixture
def arrays() -> dict[str, np.ndarray]:
    return {"y": np.ones(1000, np.float32), "x": np.arange(1000, dtype=np.float32)}


@pytest.mark.parametrize("arch", ["gfx942", "gfx1100"])
def test_a_healthy_launch_computes_and_has_no_finding(
    arch: str, arrays: dict[str, np.ndarray]
) -> None:
    report = amd.launch(BUNDLE, "saxpy", ((4,), (256,)), {**arrays, "a": 2.0, "n": 1000}, arch=arch)
    assert report.findings == ()
    np.testing.assert_array_equal(arrays["y"], 2.0 * arrays["x"] + 1.0)
    assert (report.launch.coverage.num_run, report.launch.arch) == (4, arch)


# A wave of 64 has element 1000 in lane 40 of wave 3 of block 3, one of 32 in lane 8 of wave 7.
@pytest.mark.parametrize(("arch", "wave", "lane"), [("gfx942", 3, 40), ("gfx1100", 7, 8)])
def test_an_access_outside_names_argument_element_lane_register_and_line(
    arch: str, wave: int, lane: int, arrays: dict[str, np.ndarray]
) -> None:
    report = amd.launch(BUNDLE, "saxpy", ((4,), (256,)), {**arrays, "a": 2.0, "n": 1024}, arch=arch)
    (found,) = report.findings
    assert (found.kind, found.operation) == (FindingKind.OUT_OF_BOUNDS, "load")
    assert (found.argument, found.number, found.program) == ("x", 1000, (3, 0, 0))
    assert found.lane == (lane,)
    assert (found.file, found.line) == ("./saxpy.hip", 8)
    assert f"wave {wave} lane {lane}: v[2:3]" in found.detail
    assert "4 bytes past its end; x has 1000 elements of float32" in found.detail


def test_a_read_of_what_nobody_wrote_is_told_and_the_same_array_written_is_not(
    arrays: dict[str, np.ndarray],
) -> None:
    given: dict[str, Any] = {"y": unwritten(1000), "x": arrays["x"], "a": 2.0, "n": 1000}
    report = amd.launch(BUNDLE, "saxpy", ((4,), (256,)), given)
    (found,) = report.findings
    assert (found.kind, found.argument) == (FindingKind.UNINITIALISED_READ, "y")


def test_a_null_pointer_is_one(arrays: dict[str, np.ndarray]) -> None:
    given = {"y": arrays["y"], "x": None, "a": 2.0, "n": 1000}
    (found,) = amd.launch(BUNDLE, "saxpy", ((4,), (256,)), given).findings
    assert found.kind is FindingKind.NULL_POINTER
    assert found.num_programs == 4


@pytest.mark.parametrize(("shape", "reason"), [
    (LaunchShape((1, 1, 1), (2048, 1, 1)), "a block of 2048 threads, limit 1024"),
    (LaunchShape((1, 1, 1), (0, 1, 1)), "must be 1 or more"),
    (LaunchShape((1, 70000, 1), (64, 1, 1)), "70000 blocks along y, limit 65535"),
    (LaunchShape((1 << 26, 1, 1), (64, 1, 1)), "4294967296 threads of the grid along x, limit"),
    (LaunchShape((1, 1, 1), (64, 1, 1), 1 << 20),
     "1048576 bytes of shared memory a block, limit 65536"),
])  # fmt: skip
def test_a_launch_that_a_runtime_refuses_is_refused(
    shape: LaunchShape, reason: str, arrays: dict[str, np.ndarray]
) -> None:
    with pytest.raises(UsageError, match=reason):
        amd.launch(BUNDLE, "saxpy", shape, {**arrays, "a": 2.0, "n": 1000})


@pytest.mark.parametrize(("arguments", "reason"), [
    ({"y": 0}, "saxpy: 4 parameters in 280 bytes, and the launch gives 1: y"),
    ({"y": 0, "x": 0, "a": np.float64(2), "n": 5}, "a is given as 8 bytes, and the kernel takes 4"),
    ({"y": 0, "x": 0, "a": 2.0, "n": 1 << 40}, "n is 1099511627776, which does not fit the 4"),
    ({"y": np.zeros((4, 4))[:, 1:], "x": 0, "a": 2.0, "n": 4}, "y has gaps between its elements"),
])  # fmt: skip
def test_arguments_that_do_not_fit_the_kernel_are_refused(
    arguments: dict[str, object], reason: str
) -> None:
    with pytest.raises(UsageError, match=reason):
        amd.launch(BUNDLE, "saxpy", ((1,), (64,)), arguments)  # type: ignore[arg-type]


def test_a_file_of_launches_is_checked_on_each_target(tmp_path: Path) -> None:
    path = tmp_path / "saxpy.toml"
    path.write_text(LAUNCH.format(bundle=BUNDLE, n=1024))
    report = check_machine(path, ("gfx942", "gfx1100"), 60.0)
    text = report_text(report)
    assert "saxpy.hip:8: out of bounds: load of x in saxpy" in text
    assert f"launched at {path}:3" in text
    assert "shows as on both" in text
    assert "1 finding in 2 launches of 1 kernel" in text
    assert text.endswith("executed by our emulator of the machine code; not hardware")
    path.write_text(LAUNCH.format(bundle=BUNDLE, n=1000))
    assert check_machine(path, ("gfx942",), 60.0).findings == ()


@pytest.mark.parametrize(("old", "new", "reason"), [
    ("grid = 4", "gird = 4", "unknown field `gird`"),
    ('fill = "ones"', 'fill = "twos"', "argument y: fill 'twos'; it is one of zeros, ones"),
    ("[1000]", "[1000, 1000000]", "at most 268435456 elements are made"),
    ("a = 2.0", 'a = "two"', 'a text can only be "null"'),
    ('kernel = "saxpy"', 'kernel = "sexpy"', "has no kernel sexpy; it holds saxpy, count"),
])  # fmt: skip
def test_a_file_of_launches_that_is_wrong_is_refused(
    tmp_path: Path, old: str, new: str, reason: str
) -> None:
    path = tmp_path / "saxpy.toml"
    path.write_text(LAUNCH.format(bundle=BUNDLE, n=1000).replace(old, new))
    with pytest.raises(HypoError) as found:
        check_machine(path, ("gfx942",), 60.0)
    assert reason in str(found.value)


def test_the_package_with_the_compiler_is_named_where_it_is_missing() -> None:
    with pytest.raises(HypoError, match="apt-get install clang-19 lld-19"):
        hip.find_clang(names=("no-such-clang",))


@pytest.mark.parametrize(("old", "new", "reason"), [
    ("grid = 4", "grid = [1, 2, 3, 4]", "a grid or block of 4 numbers, but 1 to 3 are launched"),
    ("block = 256", "block = []", "a grid or block of 0 numbers, but 1 to 3 are launched"),
    ("[1000]", "[-1000]", "argument y: shape [-1000]; sizes are 0 or more"),
    ('fill = "ones"', 'same_as = "z"', "argument y: same_as 'z' is no earlier argument"),
    ('fill = "ones"', 'dtype = "uint8", values = [300]', "argument y: "),
    ('fill = "ones"', 'dtype = "U5"', "argument y: dtype 'U5' holds no numbers"),
    ('fill = "ones"', 'file = "saxpy.toml"', "saxpy.toml is no .npy file"),
])  # fmt: skip
def test_a_field_that_makes_no_sense_is_named(
    tmp_path: Path, old: str, new: str, reason: str
) -> None:
    path = tmp_path / "saxpy.toml"
    path.write_text(LAUNCH.format(bundle=BUNDLE, n=1000).replace(old, new, 1))
    with pytest.raises(UsageError) as found:
        check_machine(path, ("gfx942",), 60.0)
    assert reason in str(found.value)


def test_a_source_that_is_not_there_is_named_and_not_its_launches(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none\.hip: no such file"):
        check_machine(tmp_path / "none.hip", ("gfx942",), 60.0)


@pytest.mark.parametrize(("x", "reason"), [
    ([1.0], "x is a list; arguments are numpy arrays, numbers or None"),
    (np.array([object()]), "x holds Python objects"),
])  # fmt: skip
def test_a_value_that_no_kernel_takes_is_refused(x: object, reason: str) -> None:
    given = {"y": np.ones(4, np.float32), "x": x, "a": 2.0, "n": 4}
    with pytest.raises(UsageError, match=reason):
        amd.launch(BUNDLE, "saxpy", ((1,), (64,)), given)  # type: ignore[arg-type]


@pytest.mark.parametrize(("num_kept", "is_told"), [(1 << 10, False), (1 << 7, True)])
def test_a_block_with_more_accesses_than_are_kept_still_has_what_lies_outside(
    num_kept: int, is_told: bool, arrays: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What such a block wrote is not known, so no read of it is called one of what nobody wrote."""
    monkeypatch.setattr(amd, "_MAX_ACCESSES", num_kept)
    given: dict[str, Any] = {**arrays, "y": unwritten(1000), "a": 2.0, "n": 1024}
    report = amd.launch(BUNDLE, "saxpy", ((4,), (256,)), given)
    kinds = {found.kind for found in report.findings}
    unwritten_too = set() if is_told else {FindingKind.UNINITIALISED_READ}
    assert kinds == {FindingKind.OUT_OF_BOUNDS} | unwritten_too
    assert any("more than 128 accesses" in what for what in report.untested) is is_told
