"""HIP kernels with a planted fault each, and their healthy twins, as AMD's machine code.

Truth and judge are those of `faults/`. Needs clang; executed by our emulator of the machine code,
not on hardware.
"""

from __future__ import annotations

import msgspec
import pytest

from faults.judge import CLAIMS, Claim
from faults.machine import HIP, hip_truths, hip_verdict
from hypocenter.base.errors import HypoError
from hypocenter.check.machine.check_file import check_machine
from hypocenter.device.amd.hip import find_clang

#: clang 19 knows no gfx950.
ARCHS = ("gfx942", "gfx1100", "gfx1201")
#: The fast tier runs two that the interpreter cannot see; `scripts/test-amd` runs all.
FAST = ("missing_barrier", "unset_register")


@pytest.fixture(scope="module", autouse=True)
def clang() -> str:
    try:
        return find_clang()
    except HypoError as error:
        pytest.skip(str(error))


def _judge(name: str, archs: tuple[str, ...]) -> None:
    for arch in archs:
        findings = check_machine(HIP / f"{name}.toml", (arch,), 60.0).findings
        assert len(findings) == 1
        verdict = hip_verdict(name, map(msgspec.to_builtins, findings))
        assert verdict.claims == dict.fromkeys(CLAIMS, Claim.RIGHT), arch
        assert check_machine(HIP / f"{name}_healthy.toml", (arch,), 60.0).findings == ()


def test_the_collection_is_whole() -> None:
    assert len(hip_truths()) >= 15
    assert {path.stem for path in HIP.glob("*.hip")} == set(hip_truths())


@pytest.mark.parametrize("name", FAST)
def test_a_planted_fault_is_named_and_its_twin_is_clean(name: str) -> None:
    _judge(name, ("gfx942",))


@pytest.mark.tier("amd")
@pytest.mark.parametrize("name", sorted(hip_truths()))
def test_every_planted_fault_is_named_on_every_target(name: str) -> None:
    _judge(name, ARCHS)
